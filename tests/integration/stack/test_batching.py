"""A workload that may batch: from its document to the worker's curve, which the placement shows."""

import pytest

from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from harness.models import engine_cases as models
from harness.wait import wait_until

pytestmark = [pytest.mark.long]

NODE = "plain-cpu"
MEASURED_S = 60.0


def test_a_placement_shows_whether_its_requests_run_in_batches(stack: DevStack) -> None:
    stack.push(models.layers(8, 512), "layers")
    asked = workload("layers", "layers", "layers") + "  batching: {max: 8, delay: 2ms}\n"
    stack.apply(documents(policy("layers", on_nodes([NODE])), asked))
    (placed,) = stack.wait_serving("layers")
    rule = placed.assignment.batching
    assert (rule.max, rule.delay_s, rule.HasField("latency_s")) == (8, 0.002, False)

    def reason() -> str:
        (found,) = stack.placements("layers")
        return found.observed.reason if "times the rows a second" in found.observed.reason else ""

    assert "(1: " in wait_until(reason, MEASURED_S, "the curve in the placement")
    shown = stack.shoal("describe", "placement", placed.assignment.id, "-o", "yaml")
    assert "times the rows a second" in " ".join(shown.stdout.split()), shown.stdout + shown.stderr
    stack.delete_workloads("layers")
