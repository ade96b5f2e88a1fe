"""F46: no feasible replacement, an empty list of candidates, a deletion while the node is cut off. The old replica
stays, and the deletion ends: by real processes."""

from collections.abc import Iterator

import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, on_nodes, policy, workload
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import ShoalError

OTHER, ISLAND = "plain-cpu", "edge-npu"
LOST_AFTER_S = 4.0
ENDS_S = 30.0
"""A deletion, once its node was given up."""
ONLY_THERE = on_nodes([ISLAND]) + f"  partition: {{lost_after: {LOST_AFTER_S:g}s}}\n"


@pytest.fixture
def island(stack: DevStack) -> Iterator[DevStack]:
    stack.apply(documents(policy("only", ONLY_THERE), *(workload(name, "relu", "only") for name in ("stays", "goes"))))
    stack.wait_serving("stays")
    stack.wait_serving("goes")
    yield stack
    stack.control.break_member(ISLAND, "heal")
    wait_until(stack.are_nodes_current, WAIT_TIMEOUT_S, "every node to be heard")
    stack.delete_workloads("stays", "goes")
    wait_until(lambda: not stack.doctor(), WAIT_TIMEOUT_S, "the region to be whole")


def test_f46_without_another_place_it_stays_and_a_deletion_ends_though_its_node_is_cut_off(island: DevStack) -> None:
    stack = island
    (stays,), (goes,) = stack.wait_serving("stays"), stack.wait_serving("goes")
    workers = stack.workers()
    refused = nowhere(stack)
    with InferenceLoad(stack.port(ISLAND, "data"), stack.client_files, "stays", clients=2) as at_its_console:
        stack.control.break_member(ISLAND, "cut")
        at = at_its_console.now()
        with stack.api() as api:
            api.delete("workload", "goes", "default")
        named = wait_until(lambda: stack.workload("goes").reason.found, WAIT_TIMEOUT_S, "what is left to be named")
        wait_until(lambda: not deleting(stack), LOST_AFTER_S + ENDS_S, "the deletion to end")
        ended_s = at_its_console.now() - at
        without = wait_until(lambda: stack.workload("stays").reason.code, WAIT_TIMEOUT_S, "what lacks to be said")
        at_its_console.wait_for(20)
        assert stack.workers() == workers, "blindness stops nothing, and nobody told it of the deletion"
        stack.control.break_member(ISLAND, "heal")
        (back,) = stack.wait_serving("stays")
        wait_until(lambda: goes.assignment.id not in stack.workers(), WAIT_TIMEOUT_S, "what is not wanted to go")
        at_its_console.wait_for(20)
    verdict = at_its_console.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert back.assignment.id == stays.assignment.id
    assert stack.workers() == {back.assignment.id: workers[back.assignment.id]}, "the very same process"
    assert ISLAND in named
    record(
        "F46", "P", 1, case="nowhere to go, and deleted while cut off", empty_list=refused, waits_for=without,
        deletion_ended_s=round(ended_s, 1), sent=verdict.sent, lost=0, restarted=0,
    )  # fmt: skip


def nowhere(stack: DevStack) -> str:
    """A move with an empty list of candidates is refused, or waits and is taken back: the code of either."""
    try:
        with stack.api() as api:
            begun = api.migrate("default", "stays", OTHER)
            (seen,) = api.get("migrations", begun.id).migrations
            assert seen.target.node == "", seen
            return str(api.cancel_migration(begun.id).reason.code)
    except ShoalError as error:
        return str(error.code)


def deleting(stack: DevStack) -> bool:
    with stack.api() as api:
        return any(view.workload.name == "goes" for view in api.get("workloads").workloads)
