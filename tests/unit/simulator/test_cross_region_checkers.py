"""The judge of moves between regions finds each kind of violation in a record of just it, and none in a sound one."""

from typing import Any

import pytest

from shoal.simulator.checkers.cross_region import AvailabilityChecker, CrossRegionVerificationChecker
from shoal.simulator.checkers.region import Checker, find_violations
from shoal.simulator.world.world import SimEvent

SERVING = SimEvent(0.0, "coordinator.serving", {})
FAILED: dict[str, dict[str, Any]] = {
    "verified": {"passed": False, "migration": "m"},
    "move.step": {"migration": "m", "target": "g-1"},
}


def able(at: float, *names: str) -> SimEvent:
    return SimEvent(at, "able", {"names": names})


def refused_events(*times: float) -> list[SimEvent]:
    return [SimEvent(at, "client.failed", {"code": "MODEL_NOT_READY"}) for at in times]


def answer_event(at: float) -> SimEvent:
    return SimEvent(at, "request", {"outcome": "ok"})


def cross_region_event(agreement: str) -> SimEvent:
    return SimEvent(9.0, "request.cross_region", {"region": "south", "agreement": agreement})


def failure_events() -> list[SimEvent]:
    return [SimEvent(1.0, kind, facts) for kind, facts in reversed(FAILED.items())]


VIOLATED: dict[str, tuple[Checker, list[SimEvent]]] = {
    "somebody could": (AvailabilityChecker(), [SERVING, able(1.0, "r1"), *refused_events(2.0, 8.0, 15.0)]),
    "a wrong region answers": (CrossRegionVerificationChecker(), [*failure_events(), cross_region_event("g-1")]),
}
SOUND: dict[str, tuple[Checker, list[SimEvent]]] = {
    "not for long": (
        AvailabilityChecker(),
        [SERVING, able(1.0, "r1"), *refused_events(2.0, 8.0), answer_event(9.0), *refused_events(15.0)],
    ),
    "nobody could for as long": (
        AvailabilityChecker(),
        [SERVING, able(1.0, "r1"), *refused_events(2.0), able(5.0, "r2"), *refused_events(15.0)],
    ),
    "no coordinator to say so": (
        AvailabilityChecker(),
        [
            SERVING,
            able(1.0, "r1"),
            *refused_events(2.0),
            SimEvent(3.0, "coordinator.died", {}),
            *refused_events(15.0),
            SimEvent(16.0, "coordinator.serving", {}),
            *refused_events(20.0),
        ],
    ),
    "another agreement answers": (CrossRegionVerificationChecker(), [*failure_events(), cross_region_event("g-2")]),
}


def violations_of(case: tuple[Checker, list[SimEvent]]) -> list[Any]:
    rule, events = case
    return find_violations(events, (rule,))


@pytest.mark.parametrize("name", VIOLATED)
def test_what_must_not_happen_is_found(name: str) -> None:
    assert violations_of(VIOLATED[name])


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_record_is_left_alone(name: str) -> None:
    assert violations_of(SOUND[name]) == []
