"""What an emulated device answers with, and what it says of itself: two parts of its published results, apart.

`figures` pace it. `rates` are what its capability receipt says, and so what the region predicts from; they are fitted
to other results. A prediction is then as wrong of an emulated device as it is of a real one.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from derive_profiles.results import Result
from shoal.agent.emulation import PublishedFigure, nearest, seconds_of

HELD_OUT = 4
"""One result in so many is left to the rates."""


@dataclass(frozen=True)
class Fit:
    """A straight line through results: seconds = launch_s + FLOPs / flops_per_s."""

    launch_s: float
    flops_per_s: float

    def seconds(self, result: Result) -> float:
        return self.launch_s + result.network.flops / self.flops_per_s


def split(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """(to pace by, to fit rates to). Every fourth of each precision, by FLOPs, is one for the rates."""
    paced: list[Result] = []
    fitted: list[Result] = []
    for precision in sorted({each.precision for each in results}):
        ordered = sorted(
            (each for each in results if each.precision == precision),
            key=lambda each: (each.network.flops, each.network.weights, each.model),
        )
        for number, each in enumerate(ordered):
            (fitted if number % HELD_OUT == HELD_OUT // 2 else paced).append(each)
    return paced, fitted


def fit(results: Sequence[Result]) -> Fit:
    """The line with the least squares of relative errors. Its launch is not below 0, and below every result."""
    if len(results) == 1:
        return Fit(0.0, results[0].network.flops / results[0].latency_s)
    # With t the seconds and f the FLOPs: the least of sum((a + b f) / t - 1)^2.
    weights = [1 / each.latency_s for each in results]
    per_flop = [each.network.flops / each.latency_s for each in results]
    ww, wf = sum(w * w for w in weights), sum(w * f for w, f in zip(weights, per_flop, strict=True))
    ff, w1, f1 = sum(f * f for f in per_flop), sum(weights), sum(per_flop)
    determinant = ww * ff - wf * wf
    if determinant <= 0:  # they are all of one size, but for rounding: nothing tells a launch from the rest
        return Fit(0.0, ff / f1)
    launch_s = (w1 * ff - f1 * wf) / determinant
    if launch_s <= 0:
        return Fit(0.0, ff / f1)
    launch_s = min(launch_s, 0.9 * min(each.latency_s for each in results))
    return Fit(launch_s, ff / (f1 - launch_s * wf))


def figure_of(result: Result) -> PublishedFigure:
    network = result.network
    return PublishedFigure(
        model=result.model,
        precision=result.precision,
        flops=network.flops,
        weights=network.weights,
        attention=network.attention,
        latency_s=result.latency_s,
        joules=result.joules,
    )


def pace_error(figures: Sequence[PublishedFigure], launch_s: float) -> tuple[float, float]:
    """(median, 90th percentile) of the factor by which the pace of a model differs from its own figure where that
    figure is missing. (NaN, NaN) of fewer than three."""
    factors = []
    for number, each in enumerate(figures):
        others = (*figures[:number], *figures[number + 1 :])
        if len(figures) < 3:
            return math.nan, math.nan
        relative = nearest(others, each.flops, each.weights, each.precision, attention=each.attention)
        factors.append(_factor(seconds_of(relative, launch_s, each.flops), each.latency_s))
    return statistics.median(factors), sorted(factors)[math.ceil(0.9 * len(factors)) - 1]


def rate_error(lines: dict[str, Fit], paced: Sequence[Result]) -> float:
    """Median factor by which the rates are wrong of what paces the device."""
    return statistics.median(_factor(lines[each.precision].seconds(each), each.latency_s) for each in paced)


def _factor(one: float, other: float) -> float:
    return max(one / other, other / one)
