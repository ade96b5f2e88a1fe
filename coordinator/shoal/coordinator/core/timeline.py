"""Figures of a region and of its workloads over the last day: an hour in fine steps, a day in coarse ones. Pure.

Memory is bounded by the number of subjects. A step that nothing was added to is unknown (NaN), not zero.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from shoal.types.units import Seconds, Wall

REGION: Final = ""
"""The subject that is the whole region; others are workloads as `tenant/name`."""
SUBJECTS_MOST: Final = 2_000
"""Further ones have no figures, so that at most 42 MB are kept."""


class Figure(StrEnum):
    """What is kept of each subject. Values are in SI units, per second where not said otherwise."""

    # Requests that entered, a second.
    REQUESTS = "requests_per_s"
    # Requests that were sent to a replica and got neither an answer nor a refusal, a second.
    LOST = "lost_per_s"
    # 95th percentile at the worker, seconds.
    LATENCY = "latency_p95_s"
    # Share of requests that the worker answered within the policy's bound; NaN without a bound.
    WITHIN_BOUND = "within_bound"
    # Energy of an inference, J; of the region: what the devices draw, W.
    ENERGY = "energy"
    # USD/h of the devices that it has.
    COST = "cost_usd_per_h"
    # g/h of what its requests drew, at the region's carbon.
    CARBON = "carbon_g_per_h"
    # Share of wanted replicas that are ready; of the region: of its nodes.
    READY = "ready"


FIGURES: Final = tuple(Figure)
UNKNOWN: Final = (math.nan,) * len(FIGURES)
Values = tuple[float, ...]
"""In the order of FIGURES."""


class Resolution(NamedTuple):
    """A ring of steps."""

    step_s: Seconds
    steps: int


FINE: Final = Resolution(Seconds(10.0), 360)
COARSE: Final = Resolution(Seconds(300.0), 288)
PER_COARSE: Final = round(COARSE.step_s / FINE.step_s)
"""Fine steps of a coarse one."""


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one subject."""

    figure: Figure
    # Of the first value.
    start: Wall
    step_s: Seconds
    # Oldest first; NaN where unknown.
    values: Sequence[float]


class _Ring:
    """The newest steps of all subjects, at one resolution."""

    def __init__(self, resolution: Resolution) -> None:
        self.resolution = resolution
        self._steps = array("q", [-1]) * resolution.steps
        """Number of the step that each place holds."""
        self._values: dict[str, array[float]] = {}

    def put(self, step: int, values: Mapping[str, Values]) -> None:
        at, width = step % self.resolution.steps, len(FIGURES)
        if self._steps[at] != step:
            for known in self._values.values():
                known[at * width : (at + 1) * width] = array("f", UNKNOWN)
            self._steps[at] = step
        for subject, told in values.items():
            known = self._values.get(subject) or self._add(subject)
            known[at * width : (at + 1) * width] = array("f", told)

    def keep(self, subjects: Mapping[str, object]) -> None:
        for gone in self._values.keys() - subjects.keys():
            del self._values[gone]

    def values(self, subject: str, last: int, steps: int | None = None) -> list[Values]:
        """The newest `steps` up to `last`, oldest first; None: all."""
        known, width, most = self._values.get(subject), len(FIGURES), self.resolution.steps
        found = []
        for step in range(last - (steps or most) + 1, last + 1):
            at = step % most
            is_there = known is not None and self._steps[at] == step
            found.append(tuple(known[at * width : (at + 1) * width]) if known is not None and is_there else UNKNOWN)
        return found

    def _add(self, subject: str) -> "array[float]":
        added = self._values[subject] = array("f", UNKNOWN) * self.resolution.steps
        return added


@dataclass(frozen=True, slots=True)
class CoarseStep:
    """One coarse step of all subjects."""

    # Its start is this many steps after 1970.
    number: int
    # By subject.
    values: Mapping[str, Values]


class Downsampler:
    """One step of several: the mean of what is known; of a latency the highest, so that a bad moment stays visible."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[int], list[float]]] = {}
        """By subject: how many values of each figure are known, and their sum, or the highest."""

    def add(self, values: Mapping[str, Values]) -> None:
        for subject, told in values.items():
            counts, sums = self._known.setdefault(subject, ([0] * len(FIGURES), [0.0] * len(FIGURES)))
            for at, value in enumerate(told):
                if value == value:  # not NaN: math.isnan takes three times as long, and this is run for each value
                    counts[at] += 1
                    sums[at] = max(sums[at], value) if at == _HIGHEST else sums[at] + value

    def end(self) -> dict[str, Values]:
        """The step, and begins the next one. To four digits, as it is stored."""
        known, self._known = self._known, {}
        return {
            subject: tuple(
                _rounded(total if at == _HIGHEST else total / count) if count else math.nan
                for at, (count, total) in enumerate(zip(counts, sums, strict=True))
            )
            for subject, (counts, sums) in known.items()
        }


_HIGHEST: Final = FIGURES.index(Figure.LATENCY)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


class Timeline:
    """Both rings. Coarse steps are made of fine ones, once these are complete."""

    def __init__(self) -> None:
        self._fine, self._coarse = _Ring(FINE), _Ring(COARSE)
        self._first = self._last = -1
        """The oldest and the newest fine step that was added."""
        self._sums = Downsampler()

    def add(self, wall: Wall, values: Mapping[str, Values]) -> CoarseStep | None:
        """Adds what was measured in the fine step of `wall`; nothing, where that step or a later one is there. Subjects
        that are not in it are forgotten. Returns the coarse step that ended before this one, to be stored.
        """
        step = int(wall // FINE.step_s)
        if step <= self._last:
            return None
        if self._first < 0:
            self._first = step
        ended, coarse = None, self._last // PER_COARSE
        if self._last >= 0 and step // PER_COARSE != coarse:
            ended = CoarseStep(coarse, self._sums.end())
            self._coarse.put(coarse, ended.values)
        self._fine.put(step, values)
        self._sums.add(values)
        self._last = step
        for ring in (self._fine, self._coarse):
            ring.keep(values)
        return ended

    def restore(self, step: CoarseStep) -> None:
        self._coarse.put(step.number, step.values)

    def series(self, subject: str, wall: Wall, resolution: Resolution) -> tuple[Series, ...]:
        """Every figure, up to the newest step that has ended by `wall`. Fine steps from before the first that was added
        are those of the coarse step that they lie in, where one was restored."""
        last = int(wall // resolution.step_s) - 1
        if resolution is FINE:
            found = self._with_restored(self._fine.values(subject, last), subject, last)
        else:
            found = self._coarse.values(subject, last)
        start = Wall((last - resolution.steps + 1) * resolution.step_s)
        return tuple(
            Series(figure, start, resolution.step_s, [each[at] for each in found]) for at, figure in enumerate(FIGURES)
        )

    def _with_restored(self, values: list[Values], subject: str, last: int) -> list[Values]:
        """Fine steps up to `last`, with restored coarse ones in the place of those before the first that was added."""
        oldest = last - len(values) + 1
        until = self._first // PER_COARSE if self._first >= 0 else last // PER_COARSE + 1
        for number in range(oldest // PER_COARSE, min(until, last // PER_COARSE + 1)):
            (step,) = self._coarse.values(subject, number, 1)
            begin = max(number * PER_COARSE - oldest, 0)
            end = min((number + 1) * PER_COARSE - oldest, len(values))
            values[begin:end] = [step] * (end - begin)
        return values

    def newest(self, subject: str, steps: int) -> list[Values]:
        """The newest fine steps, oldest first; none before the first."""
        return self._fine.values(subject, self._last, steps) if self._last >= 0 else []
