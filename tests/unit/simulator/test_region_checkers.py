"""The judge finds each kind of violation in a record that holds just it, and nothing in the sound one beside it."""

import ast
from pathlib import Path
from typing import Any

import pytest

from shoal.simulator.checkers import region as module
from shoal.simulator.checkers.region import find_violations
from shoal.simulator.world.world import SimEvent

H = "history-1"
REPLICA = {"node": "a", "assignment": "r1", "workload": "shop/text", "model": "m"}
OTHER = {"node": "b", "assignment": "r2", "workload": "shop/text", "model": "m"}


def timeline(*events: tuple[str, dict[str, Any]]) -> list[SimEvent]:
    """One event a second."""
    return [SimEvent(float(at), kind, facts) for at, (kind, facts) in enumerate(events)]


def saved_event(
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


def sent_event(generation: int, content: str) -> tuple[str, dict[str, Any]]:
    return "coordinator.sent", {"what": "desired", "node": "a", "version": (H, 1, generation), "content": content}


def commit(revision: int, **puts: str) -> tuple[str, dict[str, Any]]:
    return "store.commit", {"store": "s", "revision": revision, "puts": tuple(puts.items()), "deletes": ()}


def recovered_event(revision: int, **contents: str) -> tuple[str, dict[str, Any]]:
    return "store.recovered", {"store": "s", "revision": revision, "contents": tuple(contents.items())}


def configured_event(*workers: str) -> tuple[str, dict[str, Any]]:
    return "front.configured", {"node": "a", "workers": workers, "unloaded": (), "routes": ()}


def calls(*nodes: str) -> list[tuple[str, dict[str, Any]]]:
    return [("link.connect", {"node": node, "holds": None}) for node in nodes]


def begins(*, strict: bool) -> tuple[str, dict[str, Any]]:
    return "matrix.begins", {"cell": "c", "strict": strict}


def moves(step: str, *, share: float = 0.0, gap_s: float = 0.0) -> tuple[str, dict[str, Any]]:
    facts = {"migration": "m", "step": step, "source": "r1", "target": "r2", "share": share, "verifies": not gap_s}
    return "move.step", {**facts, "gap_s": gap_s}


def routed_event(old: float, new: float) -> tuple[str, dict[str, Any]]:
    endpoints = (("r1", "a", "ready", old, "agent"), ("r2", "b", "ready", new, "agent"))
    return "front.configured", {"node": "a", "workers": (), "unloaded": (), "routes": (("shop/text", 1, endpoints),)}


PASSED = ("verified", {"node": "b", "assignment": "r2", "migration": "m", "passed": True})
READY = [("worker.start", {**REPLICA, "device": "cpu0"}), ("worker.ready", REPLICA)]
WANTED = ("operator.wanted", {"workloads": ("shop/text",)})
STOPPED = ("worker.stop", {**REPLICA, "ready": True, "in_flight": 0})
AUDIT = ((1, "one", "", "x"), (2, "two", "x", "y"))
OPENED = [saved_event("a", 1, "r1"), saved_event("b", 1, "r2"), WANTED, *READY]
ACKED = ("store.acked", {"store": "s", "revision": 1})

VERIFIED = ("verified", {"node": "a", "assignment": "r1", "migration": "m-1", "passed": True})
SOUND = {
    "a move goes on to its end": timeline(
        moves("planned"),
        moves("reserved"),
        PASSED,
        moves("shifting 1", share=0.25),
        routed_event(0.75, 0.25),
        moves("draining"),
        routed_event(0.0, 1.0),
        moves("done"),
    ),
    "a move with a gap takes its only replica away": timeline(
        *OPENED,
        moves("reserved", gap_s=5.0),
        moves("clearing", gap_s=5.0),
        STOPPED,
        ("worker.ready", OTHER),
        moves("draining", gap_s=5.0),
    ),
    "what died lengthens a gap": timeline(
        moves("clearing", gap_s=1.0), ("coordinator.died", {}), *[configured_event("r1")] * 9, ("worker.ready", OTHER)
    ),
    "a client may be refused where nobody else could answer": timeline(
        begins(strict=False), ("client.failed", {"number": 7, "code": "X"})
    ),
    "an unacknowledged write may be lost": timeline(
        commit(1, k="v"), ACKED, commit(2, k="w"), recovered_event(1, k="v")
    ),
    "an unacknowledged write may be kept": timeline(commit(1, k="v"), recovered_event(1, k="v")),
    "a new history may count anew": timeline(saved_event("a", 7), saved_event("a", 1, history="history-2")),
    "another replica serves": timeline(
        *OPENED, ("worker.start", {**OTHER, "device": "cpu0"}), ("worker.ready", OTHER), STOPPED
    ),
    "a deleted workload ends": timeline(*OPENED, ("operator.wanted", {"workloads": ()}), STOPPED),
    "a warm replica answers": timeline(*OPENED, ("request.answered", {"node": "a", "assignment": "r1"})),
    "a verified replica answers": timeline(
        saved_event("a", 1, "r1", verifying=("r1",)),
        *OPENED[1:],
        VERIFIED,
        ("request.answered", {"node": "a", "assignment": "r1"}),
    ),
    "nothing is to be verified any more": timeline(
        saved_event("a", 1, "r1", verifying=("r1",)),
        *OPENED[1:],
        saved_event("a", 2, "r1"),
        ("request.answered", {"node": "a", "assignment": "r1"}),
    ),
    "the unknown may have happened": timeline(
        ("operator.done", {"document": "d", "content": "e1", "outcome": "ok"}),
        ("operator.done", {"document": "d", "content": "e2", "outcome": "unknown"}),
        ("operator.read", {"documents": (("d", "e2"),)}),
    ),
    "a client may ask again": timeline(
        ("client.failed", {"number": 1, "code": "NODE_LOST"}),
        ("matrix.begins", {"strict": False}),
        ("matrix.calms", {}),
    ),
    "a chain of entries": timeline(("audit.kept", {"subject": "two"}), ("operator.audit", {"entries": AUDIT})),
    "memory and store agree": timeline(("region.memory", {"acts_on": (("k", 1),), "stored": (("k", 1),)})),
}

VIOLATED = {
    "AcknowledgedWritesChecker": [
        timeline(commit(1, k="v"), ACKED, recovered_event(0)),
        timeline(commit(1, k="v"), ACKED, recovered_event(1, k="other")),
    ],
    "JournalChecker": [
        timeline(
            saved_event("a", 3), ("journal.loaded", {"node": "a", "version": None, "assignments": (), "content": ""})
        ),
        timeline(saved_event("a", 3), ("journal.loaded", {**saved_event("a", 2)[1]})),
    ],
    "PersistenceChecker": [
        timeline(saved_event("a", 1), READY[0]),
        timeline(saved_event("a", 2), saved_event("a", 1)),
        timeline(saved_event("a", 1, term=2), saved_event("a", 2, term=1)),
        timeline(saved_event("a", 1), saved_event("a", 1, history="history-2"), saved_event("a", 2)),
        timeline(
            saved_event("a", 1), ("agent.sent", {"what": "status", "node": "a", "version": (H, 1, 2), "phases": ()})
        ),
    ],
    "DesiredSetChecker": [
        timeline(sent_event(1, "x"), sent_event(1, "y")),
        timeline(sent_event(2, "x"), sent_event(1, "y")),
        timeline(*[("link.opened", {"node": "a", "epoch": 4, "history": H, "term": 1})] * 2),
    ],
    "ReplicaChecker": [
        timeline(*OPENED, STOPPED),
        timeline(*OPENED[:-1], ("request.answered", {"node": "a", "assignment": "r1"})),
        timeline(
            *OPENED,
            configured_event("r1"),
            configured_event(),
            ("worker.stop", {**REPLICA, "ready": True, "in_flight": 2}),
        ),
        timeline(
            *OPENED[:-1],
            ("agent.sent", {"what": "status", "node": "a", "version": None, "phases": (("r1", "ready"),)}),
        ),
    ],
    "VerificationChecker": [
        timeline(
            saved_event("a", 1, "r1", verifying=("r1",)),
            *OPENED[1:],
            ("request.answered", {"node": "a", "assignment": "r1"}),
        ),
        timeline(
            saved_event("a", 1, "r1", verifying=("r1",)),
            *OPENED[1:],
            ("verified", {**VERIFIED[1], "passed": False}),
            ("request.answered", {"node": "a", "assignment": "r1"}),
        ),
    ],
    "ReconnectChecker": [[SimEvent(float(index // 2), *call) for index, call in enumerate(calls(*["a", "b"] * 6))]],
    "DocumentChecker": [
        timeline(
            ("operator.done", {"document": "d", "content": "e1", "outcome": "ok"}),
            ("operator.read", {"documents": ()}),
        ),
    ],
    "ClientChecker": [
        timeline(begins(strict=True), ("client.failed", {"number": 7, "code": "X"})),
        timeline(begins(strict=False), ("client.lost", {"number": 7, "code": "X"})),
    ],
    "MigrationChecker": [
        timeline(moves("reserved"), moves("planned")),
        timeline(moves("aborted"), moves("rolling_back")),
        timeline(moves("returning", gap_s=5.0), moves("staging", gap_s=5.0)),
        timeline(moves("verifying"), moves("shifting 1", share=0.25)),
        timeline(moves("verifying"), routed_event(0.75, 0.25)),
        timeline(PASSED, moves("shifting 1", share=0.25), routed_event(0.5, 0.5)),
    ],
    "StoredStateChecker": [
        timeline(("region.memory", {"acts_on": (("k", 1),), "stored": (("k", 2),)})),
        timeline(("region.memory", {"acts_on": (), "stored": (("k", 2),)})),
    ],
    "AuditChecker": [
        timeline(("audit.kept", {"subject": "three"}), ("operator.audit", {"entries": AUDIT})),
        timeline(("operator.audit", {"entries": AUDIT[1:]})),
        timeline(("operator.audit", {"entries": (AUDIT[0], (2, "two", "z", "y"))})),
    ],
    "EnrolmentChecker": [
        timeline(("enrolled", {"used": ("t-1",), "certificates": ("c-1", "c-2"), "holds": "c-1"})),
        timeline(("enrolled", {"used": ("t-1",), "certificates": ("c-1",), "holds": "c-2"})),
    ],
    "GapChecker": [timeline(moves("clearing", gap_s=1.0), *[configured_event("r1")] * 9, ("worker.ready", OTHER))],
    "PoisonChecker": [
        [
            *[
                SimEvent(float(at), "worker.died", {**REPLICA, "why": "crashed at load", "own": True})
                for at in range(3)
            ],
            SimEvent(99.0, "worker.start", {**OTHER, "device": "cpu0"}),
        ],
    ],
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_record_is_left_alone(name: str) -> None:
    assert find_violations(SOUND[name]) == []


@pytest.mark.parametrize(
    ("rule", "index"), [(rule, index) for rule, found in VIOLATED.items() for index in range(len(found))]
)
def test_each_rule_finds_its_violation(rule: str, index: int) -> None:
    assert any(f" {rule}: " in found for found in find_violations(VIOLATED[rule][index])), find_violations(
        VIOLATED[rule][index]
    )


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
    assert not {name for name in names if name.startswith("shoal.")} - {"shoal.types"}
