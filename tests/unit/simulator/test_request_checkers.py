"""The judge of requests finds each kind of violation in a record that holds just it, and nothing in the sound one."""

import ast
from pathlib import Path
from typing import Any

import pytest

from shoal.simulator.checkers import requests as module
from shoal.simulator.checkers.region import find_violations
from shoal.simulator.world.world import SimEvent

TEXT = "shop/text"
Event = tuple[float, str, dict[str, Any]]
Listed = tuple[str, str, float, str]
"""(assignment, state, weight, how it is reached)."""
BOTH: tuple[Listed, ...] = (("r1", "ready", 1.0, "local"), ("r2", "ready", 1.0, "agent"))
STARTED: Event = (0.0, "front.started", {"node": "a", "per_endpoint": 1})
DIED: Event = (5.0, "front.died", {"node": "a"})


def timeline(*events: Event) -> list[SimEvent]:
    return [SimEvent(*event) for event in events]


def configured_event(*endpoints: Listed, at: float = 0.0, workers: tuple[str, ...] = ("r1",)) -> Event:
    listed = tuple((name, "n", state, weight, via) for name, state, weight, via in endpoints)
    return at, "front.configured", {"node": "a", "workers": workers, "routes": ((TEXT, 1, listed),)}


def entered_event(number: str, at: float, entry: str = "client", timeout_s: float = 60.0) -> Event:
    facts = {
        "front": "a", "number": number, "workload": TEXT, "content": b"x", "entry": entry, "timeout_s": timeout_s,
    }  # fmt: skip
    return at, "request.entered", facts


def sent_event(number: str, at: float, to: str, via: str = "agent") -> Event:
    return at, "request.sent", {"front": "a", "number": number, "to": to, "via": via}


def failed_event(number: str, at: float, to: str, code: str = "REPLICA_UNREACHABLE") -> Event:
    return at, "request.failed", {"front": "a", "number": number, "to": to, "code": code}


def served_event(number: str, at: float, to: str) -> Event:
    return at, "request.served", {"front": "a", "number": number, "to": to}


def left_event(number: str, at: float, outcome: str = "ok", *, alive: bool = True) -> Event:
    return at, "request.left", {"front": "a", "number": number, "outcome": outcome, "alive": alive}


def crashed_event(at: float, content: bytes = b"x") -> Event:
    return at, "request.crashed", {"node": "a", "assignment": "r1", "content": content}


UP = (STARTED, configured_event(*BOTH))
R2_FAILED = (*UP, entered_event("1", 1.0), sent_event("1", 1.0, "r2"), failed_event("1", 1.5, "r2"))
CALM: Event = (10.0, "requests.calm", {"per_replica": 1})
REST: Event = (20.0, "requests.rest", {})


def request_events(number: str, at: float, to: str) -> tuple[Event, ...]:
    return entered_event(number, at), sent_event(number, at, to), served_event(number, at, to), left_event(number, at)


SOUND = {
    "one that fails is followed by another": timeline(
        *R2_FAILED, sent_event("1", 1.5, "r1", "local"), served_event("1", 1.6, "r1"), left_event("1", 1.6)
    ),
    "who came earlier may go where an earlier route led": timeline(
        *UP, entered_event("1", 1.0), configured_event(BOTH[0], at=2.0), sent_event("1", 3.0, "r2")
    ),
    "what was forwarded goes to any worker here": timeline(
        STARTED,
        configured_event(BOTH[1], workers=("r1",)),
        entered_event("1", 1.0, "forward"),
        sent_event("1", 1.0, "r1", "local"),
    ),
    "what failed may be all that is left": timeline(
        *R2_FAILED,
        configured_event(BOTH[1], at=1.51),
        entered_event("2", 1.52),
        sent_event("2", 1.52, "r2"),
    ),
    "what failed may be tried when its time is over": timeline(
        *R2_FAILED, entered_event("2", 1.7), sent_event("2", 1.7, "r2")
    ),
    "what answered has not failed": timeline(
        *R2_FAILED,
        entered_event("0", 1.5),
        served_event("0", 1.51, "r2"),
        entered_event("2", 1.52),
        sent_event("2", 1.52, "r2"),
    ),
    "a busy replica has not failed": timeline(
        *UP,
        entered_event("1", 1.0),
        sent_event("1", 1.0, "r2"),
        failed_event("1", 1.5, "r2", "OVERLOADED"),
        entered_event("2", 1.51),
        sent_event("2", 1.51, "r2"),
    ),
    "a restarted worker has not failed": timeline(
        *R2_FAILED,
        (1.51, "worker.ready", {"node": "a", "assignment": "r2"}),
        entered_event("2", 1.52),
        sent_event("2", 1.52, "r2"),
    ),
    "a request may still end a worker where it was given up": timeline(
        *R2_FAILED, crashed_event(2.0), crashed_event(3.0), crashed_event(4.0)
    ),
    "a new front knows of no failure": timeline(
        *R2_FAILED, (1.5, "front.died", {"node": "a"}), *UP, entered_event("2", 1.52), sent_event("2", 1.52, "r2")
    ),
    "a replica that a request waits for is known while no route lists it": timeline(
        *UP,
        entered_event("1", 1.0),
        sent_event("1", 1.0, "r1", "local"),
        entered_event("2", 1.0),
        sent_event("2", 1.0, "r1", "local"),
        failed_event("2", 1.5, "r1"),
        sent_event("2", 1.5, "r2"),
        served_event("2", 1.6, "r2"),
        left_event("2", 1.6),
        configured_event(at=2.0, workers=()),
        configured_event(*BOTH, at=2.1),
        entered_event("3", 2.2, timeout_s=0.3),
        sent_event("3", 2.2, "r2"),
        failed_event("3", 2.5, "r2"),
        left_event("3", 2.5, "REPLICA_UNREACHABLE"),
        entered_event("4", 2.51),
        sent_event("4", 2.51, "r2"),
    ),
    "a front that dies refuses": timeline(
        *UP, entered_event("1", 1.0), DIED, left_event("1", 5.0, "REPLICA_UNREACHABLE")
    ),
    "a deadline ends the attempts": timeline(
        *UP,
        entered_event("1", 1.0, timeout_s=1.0),
        sent_event("1", 1.0, "r2"),
        left_event("1", 2.0, "REPLICA_UNREACHABLE"),
    ),
    "nobody goes to a standby while a ready one is there": timeline(
        STARTED,
        configured_event(BOTH[1], ("r3", "standby", 1.0, "agent")),
        entered_event("1", 1.0),
        sent_event("1", 1.0, "r2"),
        left_event("1", 2.0, "REPLICA_UNREACHABLE"),
    ),
    "a full front refuses": timeline(
        *UP,
        entered_event("1", 1.0),
        sent_event("1", 1.0, "r2"),
        entered_event("2", 1.0),
        left_event("2", 1.0, "OVERLOADED"),
    ),
    "a replica may be full where the front is empty": timeline(
        *UP, entered_event("1", 1.0), sent_event("1", 1.0, "r2"), left_event("1", 1.1, "OVERLOADED")
    ),
    "a request may end two workers": timeline(crashed_event(1.0), crashed_event(2.0), crashed_event(3.0, b"y")),
    "and more when it was forgotten": timeline(crashed_event(1.0), crashed_event(2.0), crashed_event(62.0)),
    "or when those died who knew": timeline(crashed_event(1.0), crashed_event(2.0), DIED, crashed_event(6.0)),
    "every replica is used": timeline(
        *UP, CALM, *request_events("1", 11.0, "r1"), *request_events("2", 12.0, "r2"), REST
    ),
    "not every replica is used where too few ask": timeline(*UP, CALM, *request_events("1", 11.0, "r1"), REST),
    "what is at rest is not asked for when routes change": timeline(
        *UP,
        CALM,
        *request_events("1", 11.0, "r1"),
        *request_events("2", 12.0, "r1"),
        configured_event(*BOTH, at=13.0),
        REST,
    ),
}
VIOLATED = {
    "RouteChecker": [
        timeline(*UP, entered_event("1", 1.0), sent_event("1", 1.0, "r3")),
        timeline(
            STARTED,
            configured_event(("r2", "draining", 1.0, "agent")),
            entered_event("1", 1.0),
            sent_event("1", 1.0, "r2"),
        ),
        timeline(
            STARTED,
            configured_event(("r2", "ready", 0.0, "agent")),
            entered_event("1", 1.0),
            sent_event("1", 1.0, "r2"),
        ),
        timeline(
            STARTED, configured_event(*BOTH, workers=()), entered_event("1", 1.0), sent_event("1", 1.0, "r1", "local")
        ),
        timeline(*UP, entered_event("1", 1.0, "forward"), sent_event("1", 1.0, "r9", "local")),
        timeline(*UP, entered_event("1", 1.0, "forward"), sent_event("1", 1.0, "r2")),
        timeline(*R2_FAILED, sent_event("1", 1.9, "r2")),
        timeline(*UP, configured_event(BOTH[0], at=2.0), entered_event("1", 3.0), sent_event("1", 3.0, "r2")),
    ],
    "EjectionChecker": [
        timeline(*R2_FAILED, entered_event("2", 1.51), sent_event("2", 1.51, "r2")),
        timeline(
            *R2_FAILED,
            (1.51, "worker.ready", {"node": "another", "assignment": "r2"}),
            entered_event("2", 1.52),
            sent_event("2", 1.52, "r2"),
        ),
        timeline(
            *UP,
            entered_event("1", 1.0),
            sent_event("1", 1.0, "r1", "local"),
            failed_event("1", 1.5, "r1"),
            sent_event("1", 1.5, "r2"),
            configured_event(at=2.0, workers=()),
            configured_event(*BOTH, at=2.1),
            failed_event("1", 2.5, "r2"),
            entered_event("4", 2.51),
            sent_event("4", 2.51, "r2"),
        ),
    ],
    "RetryChecker": [
        timeline(*R2_FAILED, left_event("1", 1.5, "REPLICA_UNREACHABLE")),
        timeline(*UP, entered_event("1", 1.0), left_event("1", 1.0, "MODEL_NOT_READY")),
    ],
    "FrontAdmissionChecker": [
        timeline(
            *UP,
            *(event for number in "123" for event in (entered_event(number, 1.0), sent_event(number, 1.0, "r2"))),
        ),
        timeline(*UP, entered_event("1", 1.0), left_event("1", 1.0, "OVERLOADED")),
        timeline(*UP, entered_event("1", 1.0, timeout_s=1.0), sent_event("1", 1.0, "r2"), left_event("1", 2.5)),
    ],
    "CrashingRequestChecker": [
        timeline(crashed_event(1.0), crashed_event(2.0), crashed_event(3.0)),
        timeline(*R2_FAILED, *(crashed_event(at) for at in (2.0, 3.0, 4.0, 5.0))),
    ],
    "RecoveryChecker": [timeline(*UP, CALM, *request_events("1", 11.0, "r1"), *request_events("2", 12.0, "r1"), REST)],
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_record_is_left_alone(name: str) -> None:
    assert find_violations(SOUND[name], module.make_checkers()) == []


@pytest.mark.parametrize(
    ("rule", "index"), [(rule, index) for rule, found in VIOLATED.items() for index in range(len(found))]
)
def test_each_rule_finds_its_violation(rule: str, index: int) -> None:
    found = find_violations(VIOLATED[rule][index], module.make_checkers())
    assert any(f" {rule}: " in each for each in found), found


def test_every_rule_has_a_violation_here() -> None:
    assert {type(rule).__name__ for rule in module.make_checkers()} == VIOLATED.keys()


def test_the_judge_imports_nothing_of_the_code_under_test() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert {name for name in names if name.startswith("shoal.")} == {"shoal.simulator.checkers.region"}
