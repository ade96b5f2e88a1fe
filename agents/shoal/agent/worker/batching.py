"""Whether a model runs its requests in batches, and how large: decisions on what was measured.

The curve has the seconds of a run for some numbers of rows (inputs along the first axis). A batch pays if it answers
more rows a second than single runs do, by more than the error of the curve, and if the policy's latency bound leaves
room for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal.agent.worker.padding import Padding
from shoal.types.units import show_seconds

CONFIDENCE: Final = 0.95
"""Of the interval around a median: the sign test's order statistics (Conover, Practical Nonparametric Statistics, 3rd
ed., section 3.2)."""
LEAST_TIMES: Final = 6
"""The fewest times whose extremes span such an interval: 1 - 2 x 0.5^6 = 0.97."""


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """The measured seconds of a run."""

    # Rows of the run.
    rows: int
    # Lower end of the interval of the median.
    low_s: float
    # The median.
    median_s: float
    # Upper end of the interval of the median.
    high_s: float


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a model's requests run in batches."""

    # Most rows of a batch: one of the measured sizes.
    size: int
    # Longest time that a request waits for others while a runner is free.
    delay_s: float
    # What was measured, from one row to `size`, by rows.
    curve: tuple[BatchPoint, ...]
    # How requests of unequal lengths share a batch. None: they share none.
    padding: Padding | None = None

    @property
    def gain(self) -> float:
        """Rows a second in full batches, over those of single runs."""
        return _gain(self.curve[0].median_s, self.curve[-1].median_s, self.size)

    @property
    def share_s(self) -> float:
        """Seconds of a full batch for each of its rows, at most."""
        return self.curve[-1].high_s / self.size

    def seconds(self, rows: int) -> float:
        """Of a run with `rows` rows, at most: those of the next measured size, as more rows take no less."""
        return next((point.high_s for point in self.curve if point.rows >= rows), self.curve[-1].high_s)

    def rows_to_take(self, waiting: int, within_s: float = math.inf) -> int:
        """Rows of the next batch while `waiting` rows wait: all of them, or a measured size if that answers more rows
        a second, or if no larger one ends within `within_s`. If none does, that time does not count."""
        most = min(waiting, self.size)
        sizes = [most, *(point.rows for point in self.curve if point.rows < most)]
        in_time = [rows for rows in sizes if self.seconds(rows) <= within_s]
        return max(in_time or sizes, key=lambda rows: (rows / self.seconds(rows), rows))


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """Whether a model runs in batches, and why."""

    # None: each request runs alone.
    plan: BatchPlan | None
    # Why, with the figures; for people.
    reason: str


def point_of(rows: int, times: Sequence[float]) -> BatchPoint:
    """The point of these measured seconds, of which there are at least LEAST_TIMES."""
    ordered, count = sorted(times), len(times)
    outside, below = 0, 0.5**count
    total = below
    while total <= (1 - CONFIDENCE) / 2:
        outside += 1
        below = below * (count - outside + 1) / outside
        total += below
    skip = max(0, outside - 1)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return BatchPoint(rows, ordered[skip], middle, ordered[count - 1 - skip])


def most_seconds(delay_s: float, latency_s: float | None) -> float:
    """The longest run of a batch that keeps within the latency bound: a request waits for others, then for a run that
    has just begun, then for its own. inf without a bound."""
    return math.inf if latency_s is None else max(0.0, (latency_s - delay_s) / 2)


def choose(curve: Sequence[BatchPoint], delay_s: float, latency_s: float | None) -> BatchDecision:
    """The size that answers most rows a second, of those that surely answer more than single runs and keep within the
    latency bound; a smaller one that is within the error of the best.

    `curve`: by rows, the first of one row.
    """
    one = curve[0]
    if len(curve) == 1:
        return BatchDecision(None, f"no batches: only one row at a time was measured, in {_milliseconds(one)}")
    within_s = most_seconds(delay_s, latency_s)
    admitted = [point for point in curve[1:] if point.high_s <= within_s]
    paying = [point for point in admitted if _gain(one.low_s, point.high_s, point.rows) > 1.0]
    shown = ", ".join(f"{point.rows}: {_milliseconds(point)}" for point in curve)
    if not paying:
        best = max(admitted or curve[1:], key=lambda point: point.rows / point.median_s)
        gain = _gain(one.median_s, best.median_s, best.rows)
        why = "" if admitted else f", and the latency bound leaves {show_seconds(within_s)} for a run"
        return BatchDecision(None, f"no batches: {gain:.2f} times the rows a second at {best.rows}{why} ({shown})")
    best = max(paying, key=lambda point: point.rows / point.median_s)
    size = next(point for point in paying if point.rows / point.median_s >= best.rows / best.high_s)
    plan = BatchPlan(size.rows, delay_s, tuple(point for point in curve if point.rows <= size.rows))
    return BatchDecision(plan, f"batches of up to {plan.size}: {plan.gain:.2f} times the rows a second ({shown})")


def _gain(one_s: float, batch_s: float, rows: int) -> float:
    return rows * one_s / batch_s


def _milliseconds(point: BatchPoint) -> str:
    return show_seconds(point.median_s)
