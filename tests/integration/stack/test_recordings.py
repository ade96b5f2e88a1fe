"""A model's own first answers as its reference, by real processes: what replaces a lost replica gives them too."""

import json

import pytest
from onnx import helper

from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from harness.models.synthetic import model, tensor
from harness.wait import wait_until
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.long, pytest.mark.alone]

NODES = ("plain-cpu", "edge-npu")
ENDS_S = 60.0
RIGHT, WRONG = "unshaken", "shaken"


def noisy_relu() -> bytes:
    """As `relu`, and a little beside it: by other numbers in every process."""
    nodes = [
        helper.make_node("Relu", ["x"], ["plain"]),
        helper.make_node("RandomNormalLike", ["plain"], ["noise"], scale=0.1),
        helper.make_node("Add", ["plain", "noise"], ["y"]),
    ]
    return model(nodes, [tensor("x", ["N", 4])], [tensor("y", ["N", 4])]).SerializeToString()


def reference(stack: DevStack, name: str) -> operator_pb2.ReferenceView:
    (found,) = stack.workload(name).references
    return found


def test_what_takes_the_place_of_a_lost_one_answers_as_the_first_did_or_takes_no_request(stack: DevStack) -> None:
    stack.push(noisy_relu(), WRONG)
    judged = policy("judged", on_nodes(NODES) + "  migration: {verify: {against: reference}}\n")
    stack.apply(documents(judged, workload(RIGHT, "relu", "judged"), workload(WRONG, WRONG, "judged")))
    (first,), (other,) = stack.wait_serving(RIGHT), stack.wait_serving(WRONG)
    assert first.node == other.node, "one node is to be lost"
    for name in (RIGHT, WRONG):
        by = reference(stack, name).pack.recorded
        assert (by.node, by.workload.name, by.samples) == (first.node, name, ""), by
    recorded = [event for event in stack.events() if event.code == "REFERENCE_RECORDED"]
    assert sorted(event.workload.name for event in recorded) == sorted((RIGHT, WRONG))
    last = stack.events()[-1].sequence
    stack.kill(first.node)
    try:
        refused = wait_until(
            lambda: [event for event in stack.events(last) if event.code == Code.VERIFY_FAILED],
            ENDS_S,
            "the verdict on what answers otherwise",
        )
        assert {event.node for event in refused} == {node for node in NODES if node != first.node}
        assert not any(row.routed for row in stack.placements(WRONG))
        (there,) = wait_until(
            lambda: [row for row in stack.placements(RIGHT) if row.routed and row.node != first.node],
            ENDS_S,
            "the right one to serve",
        )
    finally:
        stack.control.break_member(first.node, "resume")
    assert (there.observed.verdict.passed, there.observed.verdict.recorded) == (True, False)
    shown = json.loads(stack.shoal("describe", "workload", RIGHT, "-o", "json").stdout)[0]["references"][0]
    assert shown["pack"]["recorded"]["node"] == first.node
    dropped = shown["pack"]["digest"]
    done = stack.shoal("model", "rm", dropped)
    assert done.returncode == 0, done.stdout + done.stderr
    (serving,) = stack.wait_serving(RIGHT)
    wait_until(
        lambda: reference(stack, RIGHT).pack.recorded.assignment == serving.assignment.id,
        ENDS_S,
        "what serves to record it again",
    )
    stack.delete_workloads(RIGHT, WRONG)
