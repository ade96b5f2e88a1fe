"""The timeline's rings: what was put is there for a day, what was not is unknown, coarse steps sum up fine ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core import timeline
from shoal.coordinator.core.timeline import (
    COARSE,
    FIGURES,
    FINE,
    PER_COARSE,
    REGION,
    CoarseStep,
    Figure,
    Timeline,
    Values,
)
from shoal.types.units import Wall

START = 1_800_000_000.0
"""A whole number of coarse steps after 1970."""
AT = {figure: at for at, figure in enumerate(FIGURES)}


def values(**told: float) -> Values:
    return tuple(told.get(figure.name.lower(), math.nan) for figure in FIGURES)


def wall(step: int) -> Wall:
    """In the middle of a fine step."""
    return Wall(START + (step + 0.5) * FINE.step_s)


def requests(kept: Timeline, step: int, subject: str = REGION) -> list[float]:
    """All fine values of requests, as seen in `step`."""
    return list(kept.series(subject, wall(step), FINE)[AT[Figure.REQUESTS]].values)


@given(st.sets(st.integers(0, 3 * FINE.steps), min_size=1, max_size=60))
def test_each_step_is_there_for_an_hour_and_gaps_are_unknown(steps: set[int]) -> None:
    kept = Timeline()
    for step in sorted(steps):
        kept.add(wall(step), {REGION: values(requests=float(step))})
    now = max(steps) + 1
    for at, value in enumerate(requests(kept, now)):
        step = now - FINE.steps + at
        assert (value == step) if step in steps else math.isnan(value)


def test_the_step_that_has_not_ended_and_later_ones_are_not_shown() -> None:
    kept = Timeline()
    kept.add(wall(0), {REGION: values(requests=1.0)})
    (series, *_) = kept.series(REGION, wall(0), FINE)
    assert math.isnan(series.values[-1])
    (series, *_) = kept.series(REGION, wall(1), FINE)
    assert (series.values[-1], series.start + (FINE.steps - 1) * FINE.step_s) == (1.0, START)


def test_a_clock_that_went_back_adds_nothing() -> None:
    kept = Timeline()
    kept.add(wall(5), {REGION: values(requests=1.0)})
    kept.add(wall(5), {REGION: values(requests=2.0)})
    kept.add(wall(4), {REGION: values(requests=3.0)})
    assert [each for each in requests(kept, 6) if not math.isnan(each)] == [1.0]


def test_a_coarse_step_is_the_mean_and_of_latencies_the_highest() -> None:
    kept = Timeline()
    ended = [
        kept.add(wall(step), {REGION: values(requests=float(step), latency=0.01 * (step + 1))})
        for step in range(PER_COARSE + 1)
    ]
    assert ended[:-1] == [None] * PER_COARSE
    step = ended[-1]
    assert step is not None
    assert step.number == START // COARSE.step_s
    found = step.values[REGION]
    assert found[AT[Figure.REQUESTS]] == pytest.approx((PER_COARSE - 1) / 2)
    assert found[AT[Figure.LATENCY]] == pytest.approx(0.01 * PER_COARSE)
    assert math.isnan(found[AT[Figure.COST]])
    shown = kept.series(REGION, Wall(START + COARSE.step_s + 1), COARSE)[AT[Figure.REQUESTS]]
    assert shown.values[-1] == pytest.approx((PER_COARSE - 1) / 2)


def test_stored_steps_are_shown_again() -> None:
    kept = Timeline()
    kept.restore(CoarseStep(int(START // COARSE.step_s) - 1, {"default/w": values(cost=0.5)}))
    series = kept.series("default/w", Wall(START + 1), COARSE)[AT[Figure.COST]]
    assert series.values[-1] == 0.5
    assert all(map(math.isnan, series.values[:-1]))


def test_the_hour_before_a_restart_is_shown_in_stored_steps() -> None:
    """But for the five minutes in which it began again, of which nothing was stored."""
    kept, now = Timeline(), 3 * PER_COARSE + 7
    first = int(START // COARSE.step_s)
    for number in (0, 1):
        kept.restore(CoarseStep(first + number, {REGION: values(requests=number + 1.0)}))
    before = [*[1.0] * PER_COARSE, *[2.0] * PER_COARSE]
    assert [each for each in requests(kept, now) if not math.isnan(each)] == before
    kept.add(wall(now), {REGION: values(requests=9.0)})
    shown = requests(kept, now + 1)
    assert [each for each in shown if not math.isnan(each)] == [*before, 9.0]
    assert shown[-1] == 9.0
    assert shown[-1 - now : -1 - now + 2 * PER_COARSE] == before, "each where it was"
    assert all(map(math.isnan, requests(kept, now + 1, "default/unknown")))
    for step in range(now + 1, now + FINE.steps + 1):
        kept.add(wall(step), {REGION: values(requests=9.0)})
    assert requests(kept, now + FINE.steps + 1) == [9.0] * FINE.steps, "an hour later it has its own"


def test_a_workload_that_is_gone_takes_no_memory() -> None:
    kept = Timeline()
    kept.add(wall(0), {REGION: values(), "default/old": values(requests=1.0)})
    kept.add(wall(1), {REGION: values(), "default/new": values(requests=2.0)})
    assert all(map(math.isnan, requests(kept, 2, "default/old")))
    assert kept._fine._values.keys() == {REGION, "default/new"}


def test_the_newest_values_of_a_row() -> None:
    kept = Timeline()
    assert kept.newest(REGION, 3) == []
    for step in range(2):
        kept.add(wall(step), {REGION: values(requests=float(step))})
    assert [each[0] for each in kept.newest(REGION, 2)] == [0.0, 1.0]
    assert math.isnan(kept.newest(REGION, 3)[0][0])
    assert math.isnan(kept.newest("default/unknown", 1)[0][0])


def test_memory_is_bounded_as_stated() -> None:
    each = (FINE.steps + COARSE.steps) * len(FIGURES) * 4
    assert timeline.SUBJECTS_MOST * each < 42e6
