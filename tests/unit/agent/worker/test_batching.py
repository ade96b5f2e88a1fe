"""Whether batches pay, and how large they are: by curves of all kinds."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.worker.batching import LEAST_TIMES, BatchPlan, BatchPoint, choose, most_seconds, point_of

SIZES = (1, 2, 4, 8, 16, 32)


def exact(*milliseconds: float) -> list[BatchPoint]:
    """A curve without error."""
    return [
        BatchPoint(rows, each / 1e3, each / 1e3, each / 1e3)
        for rows, each in zip(SIZES[: len(milliseconds)], milliseconds, strict=True)
    ]


@st.composite
def curves(draw: st.DrawFn) -> list[BatchPoint]:
    count = draw(st.integers(1, len(SIZES)))
    found = []
    for rows in SIZES[:count]:
        middle, below, above = draw(st.floats(1e-4, 1.0)), draw(st.floats(0.5, 1.0)), draw(st.floats(1.0, 2.0))
        found.append(BatchPoint(rows, middle * below, middle, middle * above))
    return found


def test_a_batch_that_costs_no_more_than_one_is_as_large_as_it_was_measured() -> None:
    plan = choose(exact(10, 10, 10, 10), 0.0, None).plan
    assert plan is not None
    assert plan.size == 8
    assert plan.gain == pytest.approx(8)


def test_a_model_that_gains_nothing_runs_alone() -> None:
    """Magika at one thread, as measured: 0.79 to 0.87 times the rows a second."""
    decision = choose([BatchPoint(n, t, t, t) for n, t in ((1, 10.8), (4, 54.7), (8, 99.4))], 0.0, None)
    assert decision.plan is None
    assert "0.87 times the rows a second at 8" in decision.reason


def test_the_size_stops_where_more_gains_nothing() -> None:
    plan = choose(exact(10, 11, 13, 25, 50), 0.0, None).plan
    assert plan is not None
    assert plan.size == 8
    noisy = [replace(point, high_s=point.median_s * 1.1) for point in exact(10, 11, 13, 25, 50)]
    decided = choose(noisy, 0.0, None).plan
    assert decided is not None
    assert decided.size == 4, "what 8 gains is within the error"


def test_a_gain_within_the_error_is_none() -> None:
    vague = [BatchPoint(1, 0.008, 0.010, 0.012), BatchPoint(2, 0.016, 0.018, 0.020)]
    assert choose(vague, 0.0, None).plan is None
    sharp = [replace(point, low_s=point.median_s, high_s=point.median_s) for point in vague]
    assert choose(sharp, 0.0, None).plan is not None


def test_the_latency_bound_limits_the_size() -> None:
    curve = exact(10, 12, 14, 18, 26)
    assert most_seconds(0.002, 0.040) == pytest.approx(0.019)
    plan = choose(curve, 0.002, 0.040).plan
    assert plan is not None
    assert plan.size == 8
    decision = choose(curve, 0.002, 0.020)
    assert decision.plan is None
    assert "the latency bound leaves 9ms" in decision.reason


@given(curves(), st.floats(0, 0.1), st.none() | st.floats(1e-3, 2.0))
def test_law_a_plan_gains_surely_and_keeps_the_bound(
    curve: list[BatchPoint], delay_s: float, latency_s: float | None
) -> None:
    decision = choose(curve, delay_s, latency_s)
    plan = decision.plan
    if plan is None:
        return
    last = plan.curve[-1]
    assert plan.size == last.rows > 1
    assert last.rows / last.high_s > 1 / curve[0].low_s
    if latency_s is not None:
        assert delay_s + 2 * last.high_s <= latency_s * (1 + 1e-9)


@given(curves(), st.integers(1, 100))
def test_law_a_batch_takes_what_waits_and_never_loses_to_a_smaller_one(curve: list[BatchPoint], waiting: int) -> None:
    plan = BatchPlan(curve[-1].rows, 0.0, tuple(curve))
    rows = plan.rows_to_take(waiting)
    assert 1 <= rows <= min(waiting, plan.size)
    assert all(
        rows / plan.seconds(rows) >= point.rows / plan.seconds(point.rows) for point in curve if point.rows <= waiting
    )


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=60))
def test_law_the_interval_holds_the_median(times: list[float]) -> None:
    point = point_of(4, times)
    assert min(times) <= point.low_s <= point.median_s <= point.high_s <= max(times)


@pytest.mark.parametrize(("count", "skipped"), [(1, 0), (LEAST_TIMES, 0), (8, 0), (9, 1), (20, 5), (25, 7)])
def test_the_interval_is_that_of_the_sign_test(count: int, skipped: int) -> None:
    """Conover's table of order statistics: 95 % of the median of 9 lie between the 2nd and the 8th, of 20 between the
    6th and the 15th, of 25 between the 8th and the 18th."""
    point = point_of(1, [float(number) for number in range(count)])
    assert (point.low_s, point.high_s) == (skipped, count - 1 - skipped)
    outside = 2 * sum(math.comb(count, k) for k in range(skipped + 1)) / 2**count
    assert outside <= 0.05 or count < LEAST_TIMES
