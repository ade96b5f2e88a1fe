"""The judge of moves between regions finds each kind of violation in a record of just it, and none in a sound one."""

from typing import Any

import pytest

from shoal.simulator.crossing_judge import Compared, SomebodyServes
from shoal.simulator.judge import Rule, judge
from shoal.simulator.world import Event

SERVING = Event(0.0, "coordinator.serving", {})
FAILED: dict[str, dict[str, Any]] = {
    "verified": {"passed": False, "migration": "m"},
    "move.step": {"migration": "m", "target": "g-1"},
}


def able(at: float, *names: str) -> Event:
    return Event(at, "able", {"names": names})


def refused(*times: float) -> list[Event]:
    return [Event(at, "client.failed", {"code": "MODEL_NOT_READY"}) for at in times]


def answered(at: float) -> Event:
    return Event(at, "request", {"outcome": "ok"})


def crossed(agreement: str) -> Event:
    return Event(9.0, "request.crossed", {"region": "south", "agreement": agreement})


def failed() -> list[Event]:
    return [Event(1.0, kind, facts) for kind, facts in reversed(FAILED.items())]


VIOLATED: dict[str, tuple[Rule, list[Event]]] = {
    "somebody could": (SomebodyServes(), [SERVING, able(1.0, "r1"), *refused(2.0, 8.0, 15.0)]),
    "a wrong region answers": (Compared(), [*failed(), crossed("g-1")]),
}
SOUND: dict[str, tuple[Rule, list[Event]]] = {
    "not for long": (SomebodyServes(), [SERVING, able(1.0, "r1"), *refused(2.0, 8.0), answered(9.0), *refused(15.0)]),
    "nobody could for as long": (
        SomebodyServes(), [SERVING, able(1.0, "r1"), *refused(2.0), able(5.0, "r2"), *refused(15.0)]
    ),
    "no coordinator to say so": (
        SomebodyServes(),
        [SERVING, able(1.0, "r1"), *refused(2.0), Event(3.0, "coordinator.died", {}), *refused(15.0),
         Event(16.0, "coordinator.serving", {}), *refused(20.0)],
    ),
    "another agreement answers": (Compared(), [*failed(), crossed("g-2")]),
}  # fmt: skip


def found(case: tuple[Rule, list[Event]]) -> list[Any]:
    rule, events = case
    return judge(events, (rule,))


@pytest.mark.parametrize("name", VIOLATED)
def test_what_must_not_happen_is_found(name: str) -> None:
    assert found(VIOLATED[name])


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_record_is_left_alone(name: str) -> None:
    assert found(SOUND[name]) == []
