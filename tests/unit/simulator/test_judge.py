"""The judge finds each kind of violation in a record that holds just it, and nothing in the sound one beside it."""

import ast
from pathlib import Path
from typing import Any

import pytest

from shoal.simulator import judge as module
from shoal.simulator.judge import judge
from shoal.simulator.world import Event

H = "history-1"
REPLICA = {"node": "a", "assignment": "r1", "workload": "shop/text", "model": "m"}
OTHER = {"node": "b", "assignment": "r2", "workload": "shop/text", "model": "m"}


def story(*events: tuple[str, dict[str, Any]]) -> list[Event]:
    """One event a second."""
    return [Event(float(at), kind, facts) for at, (kind, facts) in enumerate(events)]


def saved(
    node: str, generation: int, *assignments: str, history: str = H, term: int = 1, verifying: tuple[str, ...] = ()
) -> tuple[str, dict[str, Any]]:
    version = (history, term, generation)
    return "journal.saved", {
        "node": node,
        "version": version,
        "assignments": assignments,
        "verifying": verifying,
        "content": f"{version}{assignments}",
    }


def sent(generation: int, content: str) -> tuple[str, dict[str, Any]]:
    return "coordinator.sent", {"what": "desired", "node": "a", "version": (H, 1, generation), "content": content}


def commit(revision: int, **puts: str) -> tuple[str, dict[str, Any]]:
    return "store.commit", {"store": "s", "revision": revision, "puts": tuple(puts.items()), "deletes": ()}


def recovered(revision: int, **contents: str) -> tuple[str, dict[str, Any]]:
    return "store.recovered", {"store": "s", "revision": revision, "contents": tuple(contents.items())}


def configured(*workers: str) -> tuple[str, dict[str, Any]]:
    return "front.configured", {"node": "a", "workers": workers, "routes": ()}


def calls(*nodes: str) -> list[tuple[str, dict[str, Any]]]:
    return [("link.connect", {"node": node, "holds": None}) for node in nodes]


def begins(*, strict: bool) -> tuple[str, dict[str, Any]]:
    return "matrix.begins", {"cell": "c", "strict": strict}


def moves(step: str, *, share: float = 0.0, gap_s: float = 0.0) -> tuple[str, dict[str, Any]]:
    facts = {"migration": "m", "step": step, "source": "r1", "target": "r2", "share": share, "verifies": not gap_s}
    return "move.step", {**facts, "gap_s": gap_s}


def routed(old: float, new: float) -> tuple[str, dict[str, Any]]:
    endpoints = (("r1", "a", "ready", old), ("r2", "b", "ready", new))
    return "front.configured", {"node": "a", "workers": (), "routes": (("shop/text", 1, endpoints),)}


PASSED = ("verified", {"node": "b", "assignment": "r2", "migration": "m", "passed": True})
READY = [("worker.start", {**REPLICA, "device": "cpu0"}), ("worker.ready", REPLICA)]
WANTED = ("operator.wanted", {"workloads": ("shop/text",)})
STOPPED = ("worker.stop", {**REPLICA, "ready": True, "in_flight": 0})
AUDIT = ((1, "one", "", "x"), (2, "two", "x", "y"))
OPENED = [saved("a", 1, "r1"), saved("b", 1, "r2"), WANTED, *READY]
ACKED = ("store.acked", {"store": "s", "revision": 1})

VERIFIED = ("verified", {"node": "a", "assignment": "r1", "migration": "m-1", "passed": True})
SOUND = {
    "a move goes on to its end": story(
        moves("planned"),
        moves("reserved"),
        PASSED,
        moves("shifting 1", share=0.25),
        routed(0.75, 0.25),
        moves("draining"),
        routed(0.0, 1.0),
        moves("done"),
    ),
    "a move with a gap takes its only replica away": story(
        *OPENED,
        moves("reserved", gap_s=5.0),
        moves("clearing", gap_s=5.0),
        STOPPED,
        ("worker.ready", OTHER),
        moves("draining", gap_s=5.0),
    ),
    "what died lengthens a gap": story(
        moves("clearing", gap_s=1.0), ("coordinator.died", {}), *[configured("r1")] * 9, ("worker.ready", OTHER)
    ),
    "a client may be refused where nobody else could answer": story(
        begins(strict=False), ("client.failed", {"number": 7, "code": "X"})
    ),
    "an unacknowledged write may be lost": story(commit(1, k="v"), ACKED, commit(2, k="w"), recovered(1, k="v")),
    "an unacknowledged write may be kept": story(commit(1, k="v"), recovered(1, k="v")),
    "a new history may count anew": story(saved("a", 7), saved("a", 1, history="history-2")),
    "another replica serves": story(
        *OPENED, ("worker.start", {**OTHER, "device": "cpu0"}), ("worker.ready", OTHER), STOPPED
    ),
    "a deleted workload ends": story(*OPENED, ("operator.wanted", {"workloads": ()}), STOPPED),
    "a warm replica answers": story(*OPENED, ("request.answered", {"node": "a", "assignment": "r1"})),
    "a verified replica answers": story(
        saved("a", 1, "r1", verifying=("r1",)),
        *OPENED[1:],
        VERIFIED,
        ("request.answered", {"node": "a", "assignment": "r1"}),
    ),
    "nothing is to be verified any more": story(
        saved("a", 1, "r1", verifying=("r1",)),
        *OPENED[1:],
        saved("a", 2, "r1"),
        ("request.answered", {"node": "a", "assignment": "r1"}),
    ),
    "the unknown may have happened": story(
        ("operator.done", {"document": "d", "content": "e1", "outcome": "ok"}),
        ("operator.done", {"document": "d", "content": "e2", "outcome": "unknown"}),
        ("operator.read", {"documents": (("d", "e2"),)}),
    ),
    "a client may ask again": story(
        ("client.failed", {"number": 1, "code": "NODE_LOST"}),
        ("matrix.begins", {"strict": False}),
        ("matrix.calms", {}),
    ),
    "a chain of entries": story(("audit.kept", {"subject": "two"}), ("operator.audit", {"entries": AUDIT})),
    "memory and store agree": story(("region.memory", {"acts_on": (("k", 1),), "stored": (("k", 1),)})),
}

VIOLATED = {
    "AcknowledgedWrites": [
        story(commit(1, k="v"), ACKED, recovered(0)),
        story(commit(1, k="v"), ACKED, recovered(1, k="other")),
    ],
    "JournalKept": [
        story(saved("a", 3), ("journal.loaded", {"node": "a", "version": None, "assignments": (), "content": ""})),
        story(saved("a", 3), ("journal.loaded", {**saved("a", 2)[1]})),
    ],
    "Persisted": [
        story(saved("a", 1), READY[0]),
        story(saved("a", 2), saved("a", 1)),
        story(saved("a", 1, term=2), saved("a", 2, term=1)),
        story(saved("a", 1), saved("a", 1, history="history-2"), saved("a", 2)),
        story(saved("a", 1), ("agent.sent", {"what": "status", "node": "a", "version": (H, 1, 2), "phases": ()})),
    ],
    "OneTruth": [
        story(sent(1, "x"), sent(1, "y")),
        story(sent(2, "x"), sent(1, "y")),
        story(*[("link.opened", {"node": "a", "epoch": 4, "history": H, "term": 1})] * 2),
    ],
    "Replicas": [
        story(*OPENED, STOPPED),
        story(*OPENED[:-1], ("request.answered", {"node": "a", "assignment": "r1"})),
        story(*OPENED, configured("r1"), configured(), ("worker.stop", {**REPLICA, "ready": True, "in_flight": 2})),
        story(
            *OPENED[:-1],
            ("agent.sent", {"what": "status", "node": "a", "version": None, "phases": (("r1", "ready"),)}),
        ),
    ],
    "Verified": [
        story(
            saved("a", 1, "r1", verifying=("r1",)), *OPENED[1:], ("request.answered", {"node": "a", "assignment": "r1"})
        ),
        story(
            saved("a", 1, "r1", verifying=("r1",)),
            *OPENED[1:],
            ("verified", {**VERIFIED[1], "passed": False}),
            ("request.answered", {"node": "a", "assignment": "r1"}),
        ),
    ],
    "NoHerd": [[Event(float(index // 2), *call) for index, call in enumerate(calls(*["a", "b"] * 6))]],
    "Operators": [
        story(
            ("operator.done", {"document": "d", "content": "e1", "outcome": "ok"}),
            ("operator.read", {"documents": ()}),
        ),
    ],
    "Clients": [
        story(begins(strict=True), ("client.failed", {"number": 7, "code": "X"})),
        story(begins(strict=False), ("client.lost", {"number": 7, "code": "X"})),
    ],
    "Moves": [
        story(moves("reserved"), moves("planned")),
        story(moves("aborted"), moves("rolling_back")),
        story(moves("returning", gap_s=5.0), moves("staging", gap_s=5.0)),
        story(moves("verifying"), moves("shifting 1", share=0.25)),
        story(moves("verifying"), routed(0.75, 0.25)),
        story(PASSED, moves("shifting 1", share=0.25), routed(0.5, 0.5)),
    ],
    "Memory": [
        story(("region.memory", {"acts_on": (("k", 1),), "stored": (("k", 2),)})),
        story(("region.memory", {"acts_on": (), "stored": (("k", 2),)})),
    ],
    "Audit": [
        story(("audit.kept", {"subject": "three"}), ("operator.audit", {"entries": AUDIT})),
        story(("operator.audit", {"entries": AUDIT[1:]})),
        story(("operator.audit", {"entries": (AUDIT[0], (2, "two", "z", "y"))})),
    ],
    "Enrolments": [
        story(("enrolled", {"used": ("t-1",), "certificates": ("c-1", "c-2"), "holds": "c-1"})),
        story(("enrolled", {"used": ("t-1",), "certificates": ("c-1",), "holds": "c-2"})),
    ],
    "Gaps": [story(moves("clearing", gap_s=1.0), *[configured("r1")] * 9, ("worker.ready", OTHER))],
    "Poison": [
        [
            *[Event(float(at), "worker.died", {**REPLICA, "why": "crashed at load", "own": True}) for at in range(3)],
            Event(99.0, "worker.start", {**OTHER, "device": "cpu0"}),
        ],
    ],
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_record_is_left_alone(name: str) -> None:
    assert judge(SOUND[name]) == []


@pytest.mark.parametrize(
    ("rule", "index"), [(rule, index) for rule, found in VIOLATED.items() for index in range(len(found))]
)
def test_each_rule_finds_its_violation(rule: str, index: int) -> None:
    assert any(f" {rule}: " in found for found in judge(VIOLATED[rule][index])), judge(VIOLATED[rule][index])


def test_every_rule_has_a_violation_here() -> None:
    assert {type(rule).__name__ for rule in module.rules()} == VIOLATED.keys()


def test_the_judge_imports_nothing_of_the_code_under_test() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert not {name for name in names if name.startswith("shoal.")} - {"shoal.types"}
