"""How long a move is expected to take: what it waits for, and what earlier ones took beyond that."""

from dataclasses import replace

import pytest

from harness.builders.coordinator_core import CoreRegion, fleet_of, intent, node
from shoal.coordinator.core.migration.durations import MOST_MOVES, move_overheads, took_s, waits_s
from shoal.coordinator.core.migration.model import DoneState, Migration
from shoal.coordinator.core.placement.model import NO_OVERHEADS
from shoal.types.migration import Against, MigrationRule
from shoal.types.units import Bytes, Seconds, Wall


def region_after(*targets: str) -> CoreRegion:
    """Its replica was moved to each in turn."""
    region = CoreRegion(node("a"), node("b"), flops={"a": 2e11, "b": 1e11})
    region.intents = (intent(),)
    region.run(10)
    for target in targets:
        region.migrate(target)
        region.run(60)
    return region


def done_move() -> Migration:
    (done,) = region_after("b").migrations.values()
    assert isinstance(done.state, DoneState)
    return done


def longer(move: Migration, seconds: float, name: str = "") -> Migration:
    last = replace(move.stages[-1], at=Wall(move.stages[-1].at + seconds))
    return replace(move, id=name or move.id, stages=(*move.stages[:-1], last))


def test_a_replica_drains_for_its_longest_request_and_not_for_all_that_it_may() -> None:
    rule = MigrationRule(against=Against.NONE, steps=(0.5, 1.0), hold_s=Seconds(10.0), drain_s=Seconds(30.0))
    fleet = fleet_of(node("a"))
    assert waits_s(fleet, rule, 0.2, 0.1, 1.0) == pytest.approx(1.0 + 2 * 10.0 + 0.2)
    assert waits_s(fleet, rule, 300.0, 0.1, 1.0) == pytest.approx(1.0 + 2 * 10.0 + 30.0)


def test_the_next_move_is_expected_to_take_what_the_last_one_took() -> None:
    region = region_after("b", "a")
    first, second = sorted(region.migrations.values(), key=lambda each: each.stages[0].at)
    assert first.expected is not None
    assert second.expected is not None
    assert first.expected.overhead_s == 0.0
    assert second.expected.overhead_s == pytest.approx(took_s(first) - first.expected.seconds)
    assert second.expected.seconds == pytest.approx(took_s(second), rel=0.1)


def test_the_overhead_is_the_median_of_the_newest() -> None:
    move = done_move()
    assert move_overheads([]) == NO_OVERHEADS
    base = move_overheads([move]).cached_s
    few = [longer(move, seconds, f"m{seconds}") for seconds in (1.0, 2.0, 900.0)]
    assert move_overheads(few).cached_s == pytest.approx(base + 2.0)
    old = [longer(move, 1.0, f"old{number}") for number in range(100)]
    new = [longer(move, 5.0, f"new{number}") for number in range(MOST_MOVES)]
    assert move_overheads([*new, *old]).cached_s == pytest.approx(base + 5.0)


def test_moves_that_fetch_the_model_count_apart() -> None:
    move = done_move()
    assert move.expected is not None
    cached = replace(move, id="cached", expected=replace(move.expected, fetch_bytes=Bytes(0)))
    fetched = longer(replace(move, expected=replace(move.expected, fetch_bytes=Bytes(9))), 4.0, "fetched")
    found = move_overheads([cached, fetched])
    assert found.fetched_s == pytest.approx(found.cached_s + 4.0)
    assert (found.of(Bytes(0)), found.of(Bytes(1))) == found
    alone = move_overheads([cached])
    assert alone.fetched_s == alone.cached_s == found.cached_s


def test_what_did_not_move_or_was_not_expected_does_not_count() -> None:
    move = done_move()
    assert move_overheads([replace(move, expected=None), replace(move, gap=True)]) == NO_OVERHEADS
