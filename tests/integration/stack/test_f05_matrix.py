"""F05: a process is killed at a step of a live move, under load, by real processes. The move ends, clients that retry
are answered, and nothing is left over.

One cell of the matrix in every run; with `-m long` every state with every process. A state may be shorter than the time
between the region's log and the kill, which then falls in the next and is recorded so. The moments around each write
are the simulator's (`simulation/test_move_rows.py`).
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, on_nodes, policy, workload
from harness.faults.migration_fault import MigrationFault
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import ShoalError
from shoal.v1 import operator_pb2

NAME = "pawn"
NODES = ("plain-cpu", "edge-npu")
ENDS_S = 120.0
INSIST_S = 60.0
STATES = ("planned", "reserved", "staging", "warming", "verifying", "shifting", "draining", "rolling_back")
ORDER = (*STATES[:-1], "done", "rolling_back", "aborted")
TARGETS = (
    "coordinator",
    *(f"{who}{part}" for who in ("source", "target") for part in ("", "/supervisor", "/front", "/worker")),
    "gateway",
)
ALWAYS = {("verifying", "target/front")}
UNHURRIED = "  migration: {verify: {samples: 24}}\n"
"""A comparison that lasts longer than the way of a blow."""


@pytest.fixture
def migrating_stack(stack: DevStack) -> Iterator[DevStack]:
    stack.apply(documents(policy(NAME, on_nodes(NODES) + UNHURRIED), workload(NAME, "relu", NAME)))
    yield stack
    for member in ("coordinator", "gateway", *NODES):
        stack.control.break_member(member, "resume")
    wait_until(stack.are_nodes_current, WAIT_TIMEOUT_S, "every node to be heard")
    stack.delete_workloads(NAME)
    wait_until(lambda: not stack.doctor(), WAIT_TIMEOUT_S, "the region to be whole")


def migration_view(stack: DevStack, migration: str) -> operator_pb2.MigrationView:
    with stack.api() as api:
        (one,) = api.get("migrations", migration).migrations
    return one


CELLS = [pytest.param(*cell, marks=() if cell in ALWAYS else pytest.mark.long) for cell in product(STATES, TARGETS)]


@pytest.mark.parametrize(("state", "victim"), CELLS)
def test_f05_killed_at_a_state_of_a_move(migrating_stack: DevStack, state: str, victim: str) -> None:
    stack = migrating_stack
    (placed,) = stack.wait_serving(NAME)
    source, target = placed.node, NODES[1 - NODES.index(placed.node)]
    who = victim.replace("source", source).replace("target", target)
    ports = tuple(stack.port(name, "data") for name in NODES)
    load = InferenceLoad(
        stack.port("gateway", "data"), stack.client_files, NAME, clients=2, other_ports=ports, retry_for_s=INSIST_S
    )  # fmt: skip
    with load:
        with MigrationFault(stack, who, NAME, ORDER[ORDER.index(state) :]) as blow:
            with stack.api() as api, suppress(*(ShoalError,) * (victim == "coordinator")):  # which may not answer
                begun = api.migrate("default", NAME, target)
                if state == "rolling_back":
                    wait_until(
                        lambda: migration_view(stack, begun.id).stage in ORDER[5:], ENDS_S, "it to shift", every_s=0.02
                    )
                    api.cancel_migration(begun.id)
            blow.wait(ENDS_S)
        if victim == "coordinator" or "/" not in victim:
            load.wait_for(10)
            stack.control.break_member(who, "resume")
        ended = wait_until(
            lambda: (
                one if (one := _migration_or_none(stack, blow.migration)) and one.stage in ("done", "aborted") else None
            ),
            ENDS_S,
            f"the end of the move, {victim} killed at {state}",
        )
        load.wait_for(20)
    assert ended is not None
    code = ended.reason.code if ended.stage == "aborted" else ""
    assert ended.stage == "done" or code, ended
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    (left,) = stack.wait_serving(NAME)
    wait_until(
        lambda: set(stack.workers()) == {row.assignment.id for row in stack.placements()},
        WAIT_TIMEOUT_S,
        "no worker to be nobody's",
    )
    record(
        "F05", "P", 1, aimed=state, state=blow.state_of(ended), victim=victim, struck=len(blow.pids),
        ended=f"{ended.stage} {code}".strip(), left_on="target" if left.node == target else "source",
        sent=verdict.sent, lost=0, asked_again=len(load.failed_attempts), slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip


def _migration_or_none(stack: DevStack, migration: str) -> operator_pb2.MigrationView | None:
    """None while no coordinator answers."""
    try:
        return migration_view(stack, migration)
    except ShoalError:
        return None
