"""A workload that nobody asks, in a region of real processes: listed as idle, moved, and answered by its gateway."""

import pytest

from harness.cluster.stack import DevStack, InferenceLoad, documents, policy, workload
from harness.wait import wait_until
from shoal.types.codes import Code

pytestmark = [pytest.mark.long]

SPEC = """  require: {where: "node.name in ['plain-cpu', 'edge-npu']"}
  scale: {to_zero_after: 2s}
"""
IDLE_S = 60.0


def wait_idle(stack: DevStack) -> str:
    """Until no worker runs for it; the node that keeps its place."""

    def node_if_idle() -> str:
        (placed,) = stack.placements("sleeper")
        told = stack.workload("sleeper")
        is_idle = placed.observed.code == told.reason.code == Code.SCALED_TO_ZERO
        return placed.node if is_idle and placed.assignment.id not in stack.workers() else ""

    return wait_until(node_if_idle, IDLE_S, "the workload to be idle")


def test_what_nobody_asks_is_idle_and_answers_and_moves_all_the_same(stack: DevStack) -> None:
    stack.apply(documents(policy("frugal", SPEC), workload("sleeper", "relu", "frugal")))
    stack.wait_serving("sleeper")
    node = wait_idle(stack)
    listed = " ".join(stack.shoal("get", "workloads").stdout.split())
    assert "idle 1/1" in listed, listed
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "sleeper", clients=4) as load:
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    assert wait_idle(stack) == node
    codes = [each.code for each in stack.events() if each.workload.name == "sleeper"]
    assert codes.index(Code.SCALED_TO_ZERO) < codes.index("SCALED_UP")
    other = ({"plain-cpu", "edge-npu"} - {node}).pop()
    moved = stack.migrate("sleeper", other)
    assert (moved.stage, moved.verdict.passed) == ("done", True), "its source was loaded to be compared with"
    assert wait_idle(stack) == other
    stack.delete_workloads("sleeper")
