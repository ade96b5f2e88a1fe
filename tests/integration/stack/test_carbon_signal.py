"""A model that follows the region's carbon by itself, under load, with real processes."""

import pytest

from harness.cluster.stack import DevStack, InferenceLoad, documents, policy, workload
from harness.report import record
from harness.wait import wait_until
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.long, pytest.mark.alone]

SPEC = """  require: {where: "node.name in ['plain-cpu', 'edge-npu']"}
  limits: {carbon: 0.0005 gCO2/h}
  migration: {when: {gain: 15%, cooldown: 5s}, drain: 5s}
"""
TRAFFIC = "  traffic: [{from: home, rate: 50/s}]\n"
"""Carbon is counted at this rate: the processor's joules are a hundredth of the limit when the grid is clean, and ten
times the limit when it is as dirty as may be said; those of the emulated accelerator never come near it."""


def moves(stack: DevStack, cause: str) -> list[operator_pb2.MigrationView]:
    """That are over."""
    with stack.api() as api:
        listed = api.get("migrations").migrations
    ours = [one for one in listed if one.workload.name == "follower" and one.cause == cause]
    return [one for one in ours if one.stage in ("done", "aborted")]


def test_a_model_follows_the_carbon_under_load(stack: DevStack) -> None:
    def carbon(value: str) -> None:
        assert stack.shoal("region", "set", "carbon", value).returncode == 0

    carbon("5 gCO2/kWh")
    stack.apply(documents(policy("clean", SPEC), workload("follower", "relu", "clean") + TRAFFIC))
    stack.wait_serving("follower")
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "follower", clients=2) as load:
        with stack.api() as api:
            (placed,) = stack.placements("follower")
            if placed.node != "plain-cpu":
                api.migrate("default", "follower", "plain-cpu")
                wait_until(lambda: moves(stack, "operator"), 120.0, "the operator's move to end")
        carbon("5000 gCO2/kWh")
        (moved,) = wait_until(lambda: moves(stack, "carbon"), 180.0, "a move by itself")
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    assert (moved.stage, moved.target.node, moved.verdict.passed) == ("done", "edge-npu", True), moved
    assert "CARBON_OVER" in moved.why
    assert moved.expected.after.carbon_g_per_h < 0.0005 < moved.expected.before.carbon_g_per_h
    assert stack.shoal("region", "set", "carbon", "--clear").returncode == 0
    stack.delete_workloads("follower")
    record("moves-following", "P", 1, signal="carbon", lost=0, answered=load.answer_count())
