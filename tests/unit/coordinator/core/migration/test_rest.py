"""Consolidation and waking: what may sleep does, and a declared peak finds its place awake and serving."""

import math
from dataclasses import replace
from typing import Any

import pytest

from harness.builders.coordinator_core import START, CoreRegion, device, intent, node
from shoal.coordinator.core.migration.model import Cause, DoneState, Migration
from shoal.types.assignment import Served
from shoal.types.device import EnergySource, PowerState, Rest
from shoal.types.migration import Against, MigrationRule
from shoal.types.units import Joules, PerSecond, Seconds, Watts
from shoal.types.workload import Intent, ScheduledWeights, Traffic, WorkloadKey

PEAK_AT, PEAK_END = 120, 160
PEAK = f"int(now) >= {START + PEAK_AT:.0f} && int(now) < {START + PEAK_END:.0f}"
ENERGY, FAST = {"energy": 1.0}, {"latency": 1.0}
SERVER, BOARD = "server", "board"
REST = Rest(Watts(100.0), Watts(10.0), Seconds(20.0), "of this test")


def workload(**changes: Any) -> Intent:
    """1/s; 50/s at the peak, which takes more of the board than it has."""
    rule = MigrationRule(
        against=Against.NONE, automatic=True, cooldown_s=Seconds(60.0), hold_s=Seconds(1.0), drain_s=Seconds(1.0)
    )
    values: dict[str, Any] = {
        "weights": FAST,
        "schedule": (ScheduledWeights(f"!({PEAK})", ENERGY),),
        "traffic": (Traffic("eu-west", PerSecond(1.0), PerSecond(50.0), PEAK),),
        "migration": rule,
        **changes,
    }
    return intent(**values)


def region(after: float | None = 5.0, **changes: Any) -> CoreRegion:
    """A server that can sleep, and a slow board that cannot."""
    found = CoreRegion(
        node(SERVER, device("gpu0", kind="gpu", rest=REST)), node(BOARD), flops={SERVER: 1e12, BOARD: 1.5e10}
    )
    found.agents[SERVER].p50_s = 0.001
    found.facts = replace(found.facts, sleep_after_s=None if after is None else Seconds(after))
    found.intents = (workload(**changes),)
    return found


def region_on_server(**changes: Any) -> CoreRegion:
    """The same once the server has the workload: it was placed while nothing might sleep."""
    found = region(None, **changes)
    found.run(3, tick=1.0)
    assert where(found) == [SERVER]
    found.facts = replace(found.facts, sleep_after_s=Seconds(5.0))
    return found


def has_sleeping_devices(found: CoreRegion) -> bool:
    return SERVER in found.desired and bool(found.desired[SERVER].asleep)


def where(found: CoreRegion) -> list[str]:
    return sorted(at for at, draining in found.replicas().values() if not draining)


def moves(found: CoreRegion) -> list[Migration]:
    return sorted(found.migrations.values(), key=lambda each: each.stages[0].at)


def test_a_day() -> None:
    found = region()
    found.run(45, tick=1.0)
    assert where(found) == [BOARD]
    assert has_sleeping_devices(found)
    while found.now < PEAK_AT:
        found.step(1.0)
        assert where(found) or found.now < 10, "it is somewhere at any time"
        served = [name for name, draining in found.replicas().values() if not draining]
        assert not (has_sleeping_devices(found) and SERVER in served), "what sleeps carries nothing"
    assert where(found) == [SERVER], "it has taken over before the peak begins"
    assert not has_sleeping_devices(found)
    woken = next(each for each in moves(found) if each.cause is Cause.WAKE)
    assert isinstance(woken.state, DoneState)
    assert "declared peak" in woken.reason
    assert woken.stages[0].at - START + REST.wake_s <= PEAK_AT
    found.run(PEAK_END - PEAK_AT - 1, tick=1.0)
    assert where(found) == [SERVER]
    found.run(110, tick=1.0)
    assert where(found) == [BOARD]
    assert has_sleeping_devices(found)
    assert moves(found)[-1].cause in (Cause.CONSOLIDATION, Cause.FAILBACK)
    codes = [event.code for event in found.events]
    assert codes.count("DEVICE_SLEEPS") == 2
    assert codes.count("DEVICE_WAKES") == 1


@pytest.mark.parametrize(
    ("after", "changes"),
    [(None, {}), (5.0, {"weights": FAST, "schedule": ()}), (5.0, {"migration": MigrationRule()})],
    ids=["nothing may sleep", "energy does not count", "nothing moves unasked"],
)
def test_nothing_is_consolidated(after: float | None, changes: dict[str, Any]) -> None:
    found = region(after, **changes)
    found.run(110, tick=1.0)
    assert not any(each.cause is Cause.CONSOLIDATION for each in moves(found))
    if after is None:
        assert not has_sleeping_devices(found)


def test_a_load_time_that_nobody_can_predict_holds_nothing_up() -> None:
    found = region_on_server()
    states = {
        name: replace(
            state,
            receipts={
                device: replace(each, rates=replace(each.rates, load_bytes=math.nan))
                for device, each in state.receipts.items()
            },
        )
        for name, state in found.fleet.nodes.items()
    }
    found.fleet = replace(found.fleet, nodes=states)
    found.run(40, tick=1.0)
    assert where(found) == [BOARD]
    assert [each.cause for each in moves(found)] == [Cause.CONSOLIDATION]


def peaking(name: str, peak: float, **changes: Any) -> Intent:
    """1/s; so much at the peak, of 50/s that the board can do."""
    rates = (Traffic("eu-west", PerSecond(1.0), PerSecond(peak), PEAK),)
    return replace(workload(traffic=rates, **changes), key=WorkloadKey("shop", name))


def board(found: CoreRegion, *names: str) -> int:
    """How many of them are there."""
    every = (at for name in names for at, draining in found.replicas(name).values() if not draining)
    return sum(at == BOARD for at in every)


def test_a_neighbour_that_may_not_move_takes_its_share_of_the_device() -> None:
    found = region()
    steady = peaking("steady", 1.0, where=f'node.name == "{BOARD}"', schedule=(), migration=MigrationRule())
    steady = replace(steady, traffic=(Traffic("eu-west", PerSecond(20.0), PerSecond(20.0)),))
    found.intents = (peaking("reader", 25.0), steady)
    found.run(PEAK_AT - 60, tick=1.0)
    assert board(found, "reader", "steady") == 2
    found.run(60, tick=1.0)
    assert [each.workload.name for each in moves(found) if each.cause is Cause.WAKE] == ["reader"]
    assert (board(found, "reader"), board(found, "steady")) == (0, 1)


def test_so_many_leave_as_the_device_cannot_carry() -> None:
    names = ("one", "two", "three")
    found = region()
    rule = replace(workload().migration, gain=1.0)
    there = [peaking(name, 20.0, where=f'node.name == "{BOARD}"', migration=rule) for name in names]
    found.intents = tuple(there)
    found.run(20, tick=1.0)
    found.intents = tuple(replace(each, require=replace(each.require, where="")) for each in there)
    found.run(PEAK_AT - 65, tick=1.0)
    assert board(found, *names) == 3
    found.run(47, tick=1.0)
    assert sum(each.cause is Cause.WAKE for each in moves(found)) in (1, 2)
    assert board(found, *names) in (1, 2)


def test_two_devices_that_may_sleep_do_not_swap_their_replicas() -> None:
    found = CoreRegion(*(node(name, device("gpu0", kind="gpu", rest=REST)) for name in ("left", "right")))
    homes = {"one": "left", "two": "right"}
    placed = {name: peaking(name, 1.0, where=f'node.name == "{at}"', weights=ENERGY) for name, at in homes.items()}
    found.intents = tuple(placed.values())
    found.run(8)
    found.intents = tuple(replace(each, require=replace(each.require, where="")) for each in placed.values())
    found.run(8)
    found.facts = replace(found.facts, sleep_after_s=Seconds(5.0))
    found.run(82, tick=1.0)
    assert [each.cause for each in moves(found)] == [Cause.CONSOLIDATION]
    carried = {at for name in homes for at, _ in found.replicas(name).values()}
    assert len(carried) == 1
    (awake,) = carried
    assert [name for name, content in found.desired.items() if content.asleep] == [
        each for each in homes.values() if each != awake
    ]


def test_a_consolidation_is_begun_for_joules_and_brings_them() -> None:
    """At 1/s: awake, the server draws 100 W; asleep 10 W, beside what the board's inferences take."""
    found = region_on_server()
    found.sensors[SERVER] = lambda each: replace(
        each, power=PowerState.ASLEEP if has_sleeping_devices(found) else PowerState.AWAKE
    )
    took = (Seconds(0.02), Seconds(0.03), Joules(100 * 0.4))
    found.run(40, tick=1.0)
    found.agents[BOARD].served = (Served("eu-west", 100, 0, *took, EnergySource.ESTIMATED),)
    found.run(40, tick=1.0)
    (moved,) = moves(found)
    assert moved.cause is Cause.CONSOLIDATION
    assert moved.expected is not None
    assert 0.3 < moved.expected.gain < 0.9, "less than 90 %, as moving and waking are paid for"
    assert moved.came is not None
    assert moved.came.gain == pytest.approx(1 - (10.0 + 0.4) / 100.0, abs=0.01)
    assert moved.came.gain > moved.expected.gain


def test_it_comes_back_to_what_slept_once_energy_counts_no_more() -> None:
    night = f"int(now) < {START + PEAK_AT:.0f}"
    found = region_on_server(
        schedule=(ScheduledWeights(night, ENERGY),), traffic=(Traffic("eu-west", PerSecond(1.0), PerSecond(1.0)),)
    )
    found.run(60, tick=1.0)
    assert (where(found), has_sleeping_devices(found)) == ([BOARD], True)
    found.run(160, tick=1.0)
    assert (where(found), has_sleeping_devices(found)) == ([SERVER], False)
    assert [each.cause for each in moves(found)] == [Cause.CONSOLIDATION, Cause.SCHEDULE]
