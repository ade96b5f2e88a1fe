"""When a region has devices measured again."""

from typing import Any

from harness.builders.agent_values import assignment
from harness.builders.coordinator_core import START, device, fleet_of, intent, node
from shoal.coordinator.core.fleet.measuring import LEAST_S, MeasuringState, due_measurements
from shoal.coordinator.core.fleet.state import Fleet
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import Intent

TWO = node("a", device("cpu0"), device("gpu0", kind="gpu"))
FRESH = intent(measured_within_s=120.0)


def due(fleet: Fleet, *intents: Intent, at: float, state: MeasuringState | None = None, **desired: Any) -> Any:
    replicas = [(name, one) for name, assignments in desired.items() for one in assignments]
    return due_measurements(state or MeasuringState(), fleet, intents, replicas, Elapsed(at), Wall(START + at))


def test_nothing_is_measured_again_unless_a_policy_asks() -> None:
    assert due(fleet_of(TWO), intent(), at=1e6)[1] == {}


def test_a_receipt_is_renewed_at_half_of_its_age() -> None:
    fleet = fleet_of(TWO)
    assert due(fleet, FRESH, at=59.0)[1] == {}
    state, asked = due(fleet, FRESH, at=60.0)
    assert asked == {"a": ("cpu0", "gpu0")}
    assert due(fleet, FRESH, at=61.0, state=state)[1] == {}, "it was just asked"
    assert due(fleet, FRESH, at=60.0 + LEAST_S, state=state)[1] == asked, "the request, or its answer, was lost"


def test_a_workload_has_only_what_it_runs_on_measured() -> None:
    running = (assignment("a-1", workload=FRESH.key, device="gpu0"),)
    assert due(fleet_of(TWO), FRESH, at=60.0, a=running)[1] == {"a": ("gpu0",)}


def test_a_policy_of_seconds_costs_a_device_one_probe_a_minute() -> None:
    hasty = intent(measured_within_s=1.0)
    fleet, state, count = fleet_of(TWO), MeasuringState(), 0
    for second in range(600):
        state, asked = due(fleet, hasty, at=float(second), state=state)
        count += bool(asked)
    assert count == 10


def test_what_is_emulated_or_away_is_left_alone() -> None:
    emulated = fleet_of(node("a", device("npu0", kind="npu", emulated=True)))
    assert due(emulated, FRESH, at=60.0)[1] == {}
    assert due(fleet_of(), FRESH, at=60.0)[1] == {}
