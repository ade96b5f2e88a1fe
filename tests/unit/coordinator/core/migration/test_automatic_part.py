"""Triggers look at what may move by itself, and come to what a look at the whole region comes to."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.builders.coordinator_core import (
    DIGEST,
    SMALL,
    START,
    CoreRegion,
    device,
    intent,
    node,
    traffic,
)
from shoal.coordinator.core.migration import advance as advance_module
from shoal.coordinator.core.migration.model import Cause
from shoal.coordinator.core.migration.triggers import TriggerScan, scan
from shoal.coordinator.core.migration.triggers.view import TriggerView
from shoal.coordinator.core.placement.model import Slot
from shoal.types.assignment import Served
from shoal.types.device import EnergySource, Rest
from shoal.types.migration import Against, MigrationRule
from shoal.types.units import Joules, PerSecond, Seconds, UsdPerHour, Watts
from shoal.types.workload import Intent, Limits, ModelRef, Preempt, Quota, ScheduledWeights, Traffic, WorkloadKey

REST = Rest(Watts(60.0), Watts(5.0), Seconds(5.0), "of this test")
OFTEN = f"(int(now) - {START:.0f}) % 60 < 30"
STAYS = MigrationRule(against=Against.NONE)
MOVES = replace(STAYS, automatic=True, cooldown_s=Seconds(10.0), hold_s=Seconds(1.0), drain_s=Seconds(1.0), gain=0.05)


def view_keys(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """By scan, the names of the workloads that it looks at."""
    found = list[set[str]]()

    def note(view: TriggerView) -> TriggerScan:
        found.append({each.key.name for each in view.inputs.intents})
        return scan(view)

    monkeypatch.setattr(advance_module, "scan", note)
    return found


def test_a_scan_does_not_look_at_what_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one automatic workload had all of the region predicted, every 5 s."""
    region = CoreRegion(*(node(f"n{number}") for number in range(3)))
    still = [intent(f"still-{number}", migration=STAYS) for number in range(12)]
    region.intents = (*still, intent("moves", migration=MOVES, weights={"cost": 1.0}))
    region.run(15, tick=1.0)
    looked_at = view_keys(monkeypatch)
    region.run(5, tick=1.0)
    # Each step of a test also decides about everything, to compare: that one looks at all.
    assert {len(names) for names in looked_at} == {1, 13}
    assert {"moves"} in looked_at
    region.intents = (
        *still, intent("moves", migration=MOVES, traffic=(Traffic("eu-west", PerSecond(1.0), PerSecond(2.0), OFTEN),)),
    )  # fmt: skip
    region.run(10, tick=1.0)
    looked_at.clear()
    region.run(5, tick=1.0)
    (beside,) = {frozenset(names) for names in looked_at if len(names) < 13}
    (at,) = region.replicas("moves").values()
    there = {each.workload.name for each in region.desired[at[0]].assignments}
    assert beside == there, "who shares its device takes part in what a peak leaves of it"


def test_what_others_have_on_a_node_is_known_of_it() -> None:
    """The model is there already, and the device does not sleep because of another workload that stays."""
    region = CoreRegion(node("n0"), node("n1"))
    region.costs = {Slot("n0", "cpu0"): UsdPerHour(1.0), Slot("n1", "cpu0"): UsdPerHour(2.0)}
    still = intent("still", migration=STAYS, where='node.name == "n1"')
    region.intents = (still, intent("moves", migration=MOVES, weights={"cost": 1.0}))
    region.run(10, tick=1.0)
    assert [at for at, _ in region.replicas("moves").values()] == ["n0"]
    region.costs[Slot("n0", "cpu0")] = UsdPerHour(3.0)
    region.run(20, tick=1.0)
    (moved,) = region.migrations.values()
    assert moved.expected is not None
    assert moved.expected.fetch_bytes == 0


def test_a_device_on_which_another_workload_stays_is_not_left_to_sleep() -> None:
    region = CoreRegion(
        node("server", device("gpu0", kind="gpu", rest=REST)), node("board"), flops={"server": 1e12, "board": 1.5e10}
    )
    region.agents["server"].p50_s = 0.001
    here = 'node.name == "server"'
    still = intent("still", migration=STAYS, where=here)
    moves = intent("moves", migration=MOVES, traffic=traffic(1.0), where=here)
    region.intents = (still, moves)
    region.run(5, tick=1.0)
    region.facts = replace(region.facts, sleep_after_s=Seconds(5.0))
    region.intents = (still, intent("moves", migration=MOVES, traffic=traffic(1.0), weights={"energy": 1.0}))
    region.run(40, tick=1.0)
    assert Cause.CONSOLIDATION not in {each.cause for each in region.migrations.values()}
    region.intents = region.intents[1:]
    region.run(30, tick=1.0)
    assert Cause.CONSOLIDATION in {each.cause for each in region.migrations.values()}


def any_workload(rng: np.random.Generator, name: str) -> Intent:
    def one_of(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    large, small = ModelRef("m", DIGEST, ""), ModelRef("s", SMALL, "")
    peak = (Traffic("eu-west", PerSecond(1.0), PerSecond(float(rng.integers(5, 40))), OFTEN),)
    changes: dict[str, Any] = {
        "models": one_of((large,), (small,), (large, small)),
        "weights": one_of({"cost": 1.0}, {"latency": 1.0}, {"energy": 1.0}, {"latency": 0.5, "energy": 0.5}),
        "traffic": one_of((), traffic(float(rng.integers(1, 20))), peak),
        "schedule": one_of((), (), (ScheduledWeights(OFTEN, {"energy": 1.0}),)),
        "migration": one_of(STAYS, MOVES),
        "limits": one_of(Limits(), Limits(cost=UsdPerHour(2.5)), Limits(node_power=Watts(30.0))),
        "priority": one_of(1, 100),
        "preempt": one_of(*[Preempt.NEVER] * 8, Preempt.LOWER),
        "replicas": one_of(1, 1, 2),
        "latency_p95_s": one_of(None, None, Seconds(0.06)),
    }
    return replace(intent(name, **changes), key=WorkloadKey(one_of("shop", "mill"), name))


def change_something(region: CoreRegion, rng: np.random.Generator) -> None:
    names = sorted(region.agents)
    at = names[int(rng.integers(len(names)))]
    match int(rng.integers(6)):
        case 0:
            region.costs[Slot(at, "cpu0")] = UsdPerHour(float(rng.integers(1, 5)))
        case 1:
            celsius, watts = float(rng.choice([40.0, 85.0, 95.0])), float(rng.choice([10.0, 35.0]))
            region.sensors[at] = lambda each: replace(each, temperature_c=celsius, power_w=Watts(watts))
        case 2:
            p95 = float(rng.choice([0.02, 0.2]))
            region.agents[at].served = (
                Served("eu-west", 1000, 0, Seconds(0.8 * p95), Seconds(p95), Joules(400.0), EnergySource.ESTIMATED),
            )
        case 3:
            place = int(rng.integers(len(region.intents)))
            other = any_workload(rng, region.intents[place].key.name)
            region.intents = (*region.intents[:place], other, *region.intents[place + 1 :])
        case 4:
            region.agents[at].heard = not region.agents[at].heard
        case _:
            region.agents[at].p50_s = float(rng.choice([0.005, 0.02, 0.05]))


@pytest.mark.parametrize("seed", range(4))
def test_it_comes_to_what_a_look_at_everything_comes_to(seed: int) -> None:
    """`CoreRegion` compares both in each step: the moves that begin, what holds the others, and whose turn it is."""
    rng = np.random.default_rng(seed)
    devices = [(device(),), (device("gpu0", kind="gpu", rest=REST), device()), (device(rest=REST),), (device(),)]
    region = CoreRegion(*(node(f"n{number}", *each) for number, each in enumerate(devices)), flops={"n1": 5e11})
    region.facts = replace(region.facts, sleep_after_s=Seconds(5.0))
    region.costs = {Slot(name, "cpu0"): UsdPerHour(1.0 + number) for number, name in enumerate(region.agents)}
    region.intents = tuple(any_workload(rng, f"w{number}") for number in range(6))
    region.run(8, tick=1.0)
    for _ in range(10):
        change_something(region, rng)
        region.run(6, tick=2.0)
    assert region.migrations or any(each.code == "MOVE_HELD" for each in region.events), "or nothing was compared"


def test_what_may_move_is_not_counted_as_what_stands_as_well() -> None:
    """Twice, it would take more than its tenant's quota, and never move."""
    region = CoreRegion(node("n0"), node("n1"))
    region.costs = {Slot("n0", "cpu0"): UsdPerHour(1.0), Slot("n1", "cpu0"): UsdPerHour(2.0)}
    moving = intent("moves", migration=MOVES, weights={"cost": 1.0})
    region.quotas = {moving.key.tenant: Quota(moving.key.tenant, replicas=1)}
    region.intents = (moving,)
    region.run(10, tick=1.0)
    region.costs[Slot("n0", "cpu0")] = UsdPerHour(3.0)
    region.run(20, tick=1.0)
    assert len(region.migrations) == 1
