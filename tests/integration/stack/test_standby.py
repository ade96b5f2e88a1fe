"""All processes of an agent killed at once under load: what stands by decides how long nobody answers."""

import os
from collections.abc import Iterator

import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, policy, workload
from harness.measure.contention import RunDelay, startup_slowdown_s
from harness.report import record
from harness.wait import wait_until
from shoal.v1 import operator_pb2

pytestmark = pytest.mark.alone

NAME = "kept"
BACK_WITHIN_S = 1.0
BEYOND_LOAD_S = 2.0
"""Beyond detection and the time that the model takes to load, where nothing stands by."""
KEPT = {"warm": "standby: warm", "staged": "standby: staged", "none": "replicas: 1", "two": "replicas: 2, spread: node"}


@pytest.fixture
def killable_stack(stack: DevStack) -> Iterator[DevStack]:
    yield stack
    for member in stack.info.stack.agents:
        stack.control.break_member(member.name, "resume")
    stack.delete_workloads(NAME)
    wait_until(lambda: not stack.doctor(), WAIT_TIMEOUT_S, "the region to be whole")


def load_s(row: operator_pb2.PlacementView) -> float:
    return row.observed.measured.load_s


def staged_rows(stack: DevStack) -> list[operator_pb2.PlacementView]:
    """Both replicas, once the one that stands by has its bytes and nothing loaded; none before."""
    rows = sorted(stack.placements(NAME), key=lambda row: row.assignment.staged)
    return rows if [row.observed.phase for row in rows] == ["ready", "staged"] and rows[0].routed else []


@pytest.mark.parametrize(
    "kept", ["warm", *(pytest.param(one, marks=pytest.mark.long) for one in ("staged", "none", "two"))]
)
def test_f04_agent_killed_whole_under_load(killable_stack: DevStack, kept: str) -> None:
    stack = killable_stack
    stack.apply(
        documents(policy(NAME, f"  require: {{availability: {{{KEPT[kept]}}}}}\n"), workload(NAME, "relu", NAME))
    )
    if kept == "staged":
        rows = wait_until(
            lambda: staged_rows(stack), WAIT_TIMEOUT_S, "one to serve, and the other's bytes to be on disk"
        )
    else:
        rows = stack.wait_serving(NAME, 1 if kept == "none" else 2)
    active = next(row for row in rows if not row.assignment.standby)
    spare = [row.assignment.id for row in rows if row is not active]
    last = stack.events()[-1].sequence
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, NAME) as load:
        at, delay = load.now(), RunDelay(os.getpid(), *(pid for pid, _ in stack.processes()))
        stack.kill(active.node)
        load.wait_for(60)
        silent_s, delayed_s = load.longest_gap_s(at), delay.seconds()
        others = wait_until(
            lambda: [row for row in stack.placements(NAME) if row.node != active.node and not row.assignment.standby],
            WAIT_TIMEOUT_S,
            "the other to be the active one",
        )
        load.wait_for(20)
    verdict = load.verdict()
    slowed_s = delayed_s + startup_slowdown_s()
    assert verdict.violations == (), str(verdict)
    told = {event.code: event for event in reversed(stack.events(last)) if event.node or event.workload.name == NAME}
    if kept in ("none", "staged"):
        suspect_s = told["NODE_SUSPECT"].at
        ready_s = told["READY"].at - suspect_s
        assert ready_s - slowed_s <= load_s(others[0]) + BEYOND_LOAD_S, (ready_s, load_s(others[0]))
    else:
        assert verdict.lost_count == 0, str(verdict)
    if kept != "none":
        assert [row.assignment.id for row in others] == spare, "the very same replica"
    if kept in ("warm", "two"):
        assert silent_s - slowed_s <= BACK_WITHIN_S, f"of which {slowed_s:.2f}s because others hold the cores"
    record(
        "F04", "P", 1, fault="SIGKILL of all processes", kept=kept, sent=verdict.sent, lost=verdict.lost_count,
        refused=verdict.refused, silent_s=round(silent_s, 3), slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip
