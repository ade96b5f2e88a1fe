"""Moves that nobody asked for: what speaks for them, what holds them back, and what they bring."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from harness.builders.coordinator_core import START, CoreRegion, intent, node
from shoal.coordinator.core.migration.model import Cause, DoneState, Migration, MoveProposal
from shoal.coordinator.core.migration.triggers import view
from shoal.coordinator.core.placement.model import Slot
from shoal.types.assignment import Served
from shoal.types.device import EnergySource
from shoal.types.migration import Against, MigrationRule, MigrationWindow
from shoal.types.units import Joules, Seconds, UsdPerHour, Watts
from shoal.types.workload import Intent, Limits, ScheduledWeights, WorkloadKey

CHEAP = {"cost": 1.0}
COOLDOWN_S = 60.0


def rule(**more: Any) -> MigrationRule:
    values: dict[str, Any] = {
        "against": Against.NONE, "automatic": True, "cooldown_s": Seconds(COOLDOWN_S), "hold_s": Seconds(1.0),
        "drain_s": Seconds(1.0),
    }  # fmt: skip
    return MigrationRule(**(values | more))


def workload(**changes: Any) -> Intent:
    values: dict[str, Any] = {"weights": CHEAP, "migration": rule()}
    return intent(**(values | changes))


def priced_region(first: float = 1.0, second: float = 2.0, **changes: Any) -> CoreRegion:
    """Two nodes of these prices and one workload, which runs where it is cheap."""
    region = CoreRegion(node("edge-1"), node("edge-2"))
    price(region, first, second)
    region.intents = (workload(**changes),)
    region.run(10)
    return region


def price(region: CoreRegion, first: float, second: float) -> None:
    region.costs = {Slot("edge-1", "cpu0"): UsdPerHour(first), Slot("edge-2", "cpu0"): UsdPerHour(second)}


def where(region: CoreRegion) -> list[str]:
    return sorted(at for at, draining in region.replicas().values() if not draining)


def completed_migrations(region: CoreRegion) -> list[Migration]:
    return sorted(
        (each for each in region.migrations.values() if isinstance(each.state, DoneState)),
        key=lambda each: each.stages[0].at,
    )


def test_it_follows_the_price_after_a_while_and_says_why() -> None:
    region = priced_region()
    assert where(region) == ["edge-1"]
    price(region, 3.0, 2.0)
    region.run(8)
    assert not region.migrations, "not held for long"
    region.run(22)
    (moved,) = completed_migrations(region)
    assert (moved.cause, where(region)) == (Cause.PRICE, ["edge-2"])
    assert moved.reason == "cost 3 USD/h -> 2 USD/h, the objective is 33% better"
    assert moved.expected is not None
    assert moved.expected.gain == pytest.approx(1 / 3)
    region.agents["edge-2"].served = served_stats(0.02)
    region.run(40)
    (moved,) = completed_migrations(region)
    assert moved.came is not None
    assert moved.came.requests == 1000
    assert moved.came.after.joules == pytest.approx(0.4)
    assert moved.came.gain == pytest.approx(1 / 3)
    assert "MIGRATION_BROUGHT" in {event.code for event in region.events}


def test_a_schedule_that_asks_for_a_move_is_its_cause_and_that_of_the_way_back() -> None:
    """The fast node is dear."""
    region = CoreRegion(node("edge-1"), node("edge-2"), flops={"edge-1": 2e11, "edge-2": 1e11})
    region.agents["edge-1"].p50_s = 0.01
    price(region, 2.0, 1.0)
    while_cheap = f"int(now) >= {START + 100:.0f} && int(now) < {START + 250:.0f}"
    region.intents = (workload(weights={"latency": 1.0}, schedule=(ScheduledWeights(while_cheap, CHEAP),)),)
    region.run(60, tick=1.0)
    assert (where(region), region.migrations) == (["edge-1"], {})
    region.run(90, tick=1.0)
    (there,) = completed_migrations(region)
    assert (there.cause, where(region)) == (Cause.SCHEDULE, ["edge-2"])
    assert (
        there.reason == "by the objective that holds at this time: cost 2 USD/h -> 1 USD/h, the objective is 50% better"
    )
    region.run(150, tick=1.0)
    assert [each.cause for each in completed_migrations(region)] == [Cause.SCHEDULE, Cause.SCHEDULE]
    assert where(region) == ["edge-1"]


def test_a_policy_that_does_not_say_when_moves_nothing() -> None:
    region = priced_region(migration=rule(automatic=False))
    price(region, 9.0, 2.0)
    region.run(120)
    assert not region.migrations


def test_less_than_the_gain_asked_moves_nothing() -> None:
    region = priced_region()
    price(region, 2.1, 2.0)
    region.run(120)
    assert not region.migrations


def test_a_price_that_returns_within_the_hold_speaks_for_nothing() -> None:
    region = priced_region()
    for _ in range(20):
        price(region, 3.0, 2.0)
        region.run(5)
        price(region, 1.0, 2.0)
        region.run(6)
    assert not region.migrations


def test_the_next_move_waits_for_the_cooldown_and_says_so() -> None:
    region = priced_region()
    price(region, 3.0, 2.0)
    region.run(30)
    (first,) = completed_migrations(region)
    price(region, 1.0, 2.0)
    region.run(20)
    assert len(region.migrations) == 1
    (message,) = [event.message for event in region.events if event.code == "MOVE_HELD"]
    assert f"after {first.id}" in message
    region.run(60)
    assert where(region) == ["edge-1"]
    assert completed_migrations(region)[1].reason.startswith(f"back where {first.id} (price) left: cost ")


def test_to_and_fro_waits_twice_as_long_each_time() -> None:
    region = priced_region()
    for turn in range(240):
        price(region, *((3.0, 2.0) if turn % 2 == 0 else (1.0, 2.0)))
        region.run(15, tick=5.0)
    moves = completed_migrations(region)
    began = [each.stages[0].at for each in moves]
    done = [each.stages[-1].at for each in moves]
    waits = [began[i + 1] - done[i] for i in range(len(moves) - 1)]
    assert 4 <= len(moves) <= 20
    for number, wait in enumerate(waits[:4]):
        assert wait >= COOLDOWN_S * 2**number - 1.0, waits


def test_an_operators_word_is_not_taken_back_by_what_was_known_when_it_was_given() -> None:
    region = priced_region()
    region.migrate("edge-2", hold_s=Seconds(1.0), drain_s=Seconds(1.0), against=Against.NONE)
    region.run(300)
    assert where(region) == ["edge-2"], "half the price was there to be had before"
    price(region, 0.5, 2.0)
    region.run(60)
    assert where(region) == ["edge-1"], "a quarter was not"


def test_a_window_holds_what_can_wait() -> None:
    closed = MigrationWindow(days=(0,), opens=0, closes=1, zone="UTC")
    region = priced_region(migration=rule(windows=(closed,)))
    price(region, 3.0, 2.0)
    region.run(60)
    assert not region.migrations
    assert any("windows" in event.message for event in region.events if event.code == "MOVE_HELD")


def test_a_cost_limit_that_is_passed_forces_it_away() -> None:
    region = priced_region(weights={"latency": 1.0}, limits=Limits(cost=UsdPerHour(2.5)))
    (start,) = where(region)
    price(region, *((3.0, 2.0) if start == "edge-1" else (2.0, 3.0)))
    region.run(60)
    (moved,) = completed_migrations(region)
    assert moved.cause is Cause.PRICE
    assert "COST_OVER" in moved.reason
    assert where(region) != [start]


def served_stats(p95: float, requests: int = 1000) -> tuple[Served, ...]:
    return (
        Served("eu-west", requests, 0, Seconds(p95 / 2), Seconds(p95), Joules(requests * 0.4), EnergySource.ESTIMATED),
    )


@pytest.mark.parametrize(("joules", "moves"), [(0.7, False), (1.4, True)])
def test_estimated_energy_moves_a_replica_by_its_middle_alone(joules: float, moves: bool) -> None:
    """Of 0.7 J other processors would take up to 1.3, which is above the bound."""
    region = CoreRegion(node("edge-1"), node("edge-2"))
    region.intents = (workload(weights={"latency": 1.0}, limits=Limits(energy=Joules(1.2))),)
    region.run(10)
    (start,) = where(region)
    region.agents[start].served = tuple(replace(each, joules=Joules(1000 * joules)) for each in served_stats(0.02))
    region.run(60)
    assert [each.cause for each in completed_migrations(region)] == [Cause.ENERGY] * moves
    # A new version of the policy that asks nothing else.
    region.intents = tuple(replace(each, limits=Limits(energy=Joules(1.21))) for each in region.intents)
    region.run(20)
    assert (where(region) != [start]) == moves


def test_a_measured_p95_above_the_bound_moves_it() -> None:
    region = CoreRegion(node("edge-1"), node("edge-2"))
    region.intents = (workload(weights={"latency": 1.0}, latency_p95_s=Seconds(0.06)),)
    region.run(10)
    (start,) = where(region)
    region.agents[start].served = served_stats(0.2)
    region.run(60)
    (moved,) = completed_migrations(region)
    assert moved.cause is Cause.SLO
    assert "SLO_UNREACHABLE" in moved.reason
    assert where(region) != [start]
    assert moved.expected is not None
    assert moved.expected.before.latency_p95_s > 0.1


def test_where_no_place_keeps_the_bound_it_stays_and_says_so() -> None:
    region = CoreRegion(node("edge-1"))
    region.intents = (workload(weights={"latency": 1.0}, latency_p95_s=Seconds(0.06)),)
    region.run(10)
    region.agents["edge-1"].served = served_stats(0.2)
    region.run(60)
    assert not region.migrations
    (told,) = [event.message for event in region.events if event.code == "MOVE_HELD"]
    assert "no other place" in told


def set_temperature(
    region: CoreRegion, at: str, celsius: float, watts: float = 10.0, *, throttled: bool = False
) -> None:
    """What the sensors of a node say from now on."""
    region.sensors[at] = lambda each: replace(each, temperature_c=celsius, power_w=Watts(watts), throttled=throttled)


def test_it_leaves_a_hot_device_and_comes_back_once_it_is_cool() -> None:
    region = priced_region()
    set_temperature(region, "edge-1", 95.0)
    region.run(40)
    (moved,) = completed_migrations(region)
    assert (moved.cause, moved.reason) == (Cause.HEAT, "edge-1/cpu0 is at 95 C")
    assert moved.expected is not None
    assert moved.expected.gain == pytest.approx(-1.0)
    region.run(200)
    assert where(region) == ["edge-2"], "still hot"
    set_temperature(region, "edge-1", 50.0)
    region.run(60)
    assert where(region) == ["edge-1"]
    assert completed_migrations(region)[1].cause is Cause.FAILBACK


def test_a_node_that_draws_more_than_it_may_is_left() -> None:
    region = priced_region(limits=Limits(node_power=Watts(30.0)))
    set_temperature(region, "edge-1", 40.0, watts=35.0)
    region.run(40)
    (moved,) = completed_migrations(region)
    assert moved.cause is Cause.POWER
    assert "35W" in moved.reason


def test_nothing_moves_while_replicas_are_missing() -> None:
    region = priced_region(replicas=3)
    price(region, 3.0, 1.0)
    region.run(60)
    assert not region.migrations


def test_in_a_large_region_those_that_must_leave_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"edge-{number}" for number in range(4)]
    monkeypatch.setattr(view, "OPTIONS_MOST", len(names))
    looked = Counter[view.TriggerView]()
    forced = view.TriggerView.forced_proposal

    def count_calls(self: view.TriggerView, *asked: Any) -> MoveProposal:
        looked[self] += 1
        return forced(self, *asked)

    monkeypatch.setattr(view.TriggerView, "forced_proposal", count_calls)
    region = CoreRegion(*map(node, names))
    region.costs = {Slot(name, "cpu0"): UsdPerHour(1.0 if name < "edge-2" else 2.0) for name in names}
    bounded = workload(limits=Limits(cost=UsdPerHour(2.5)))
    region.intents = tuple(replace(bounded, key=WorkloadKey("shop", f"w{number}")) for number in range(3))
    region.run(10)
    region.costs = {Slot(name, "cpu0"): UsdPerHour(3.0 if name < "edge-2" else 2.0) for name in names}
    region.run(90, tick=1.0)
    assert {each.workload.name for each in completed_migrations(region)} == {"w0", "w1", "w2"}
    assert set(looked.values()) == {1}, "one replica's places in a look, of those of three"


def test_what_a_move_brought_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    region = priced_region()
    price(region, 3.0, 2.0)
    region.run(30)
    region.intents = ()
    region.run(10)
    assert not region.replicas(), "the target is gone before it can be read"

    def fail_if_called(_: object) -> None:
        raise AssertionError("every option of the region is thought through for nothing")

    monkeypatch.setattr("shoal.coordinator.core.migration.advance.Scope", fail_if_called)
    region.run(40, tick=1.0)
    (moved,) = completed_migrations(region)
    assert moved.came is None
