"""Live moves by real processes under load: there, back with the coordinator killed on the way, and a node emptied."""

import pytest

from harness.cluster.stack import DevStack, InferenceLoad, documents, policy, workload
from harness.report import record
from harness.wait import wait_until
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.long, pytest.mark.alone]

NODES = ("plain-cpu", "edge-npu")
ENDS_S = 120.0


def wait_stage(stack: DevStack, migration: str, *stages: str) -> operator_pb2.MigrationView:
    """The move, once it is in one of these stages."""

    def view_in_stage() -> operator_pb2.MigrationView | None:
        with stack.api() as api:
            (one,) = api.get("migrations", migration).migrations
        return one if one.stage in stages else None

    found = wait_until(view_in_stage, ENDS_S, f"{migration} to be {' or '.join(stages)}")
    assert found is not None
    return found


def test_f05_moves_under_load_lose_nothing_though_the_coordinator_is_killed(stack: DevStack) -> None:
    where = f"  require: {{where: \"node.name in ['{NODES[0]}', '{NODES[1]}']\"}}\n"
    stack.apply(documents(policy("either", where), workload("moving", "relu", "either")))
    (placed,) = stack.wait_serving("moving")
    source, target = placed.node, NODES[1 - NODES.index(placed.node)]
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "moving", clients=2) as load:
        with stack.api() as api:
            there = api.migrate("default", "moving", target)
        done = wait_stage(stack, there.id, "done", "aborted")
        assert (done.stage, done.verdict.passed) == ("done", True), done
        assert [one.share for one in done.readings] == [0.25, 1.0]
        assert sum(one.target.requests for one in done.readings) > 0
        with stack.api() as api:
            back = api.migrate("default", "moving", source)
        wait_stage(stack, back.id, "shifting")
        stack.kill("coordinator")
        load.wait_for(20)
        stack.control.break_member("coordinator", "resume")
        wait_until(stack.are_nodes_current, ENDS_S, "every node to be heard")
        assert wait_stage(stack, back.id, "done", "aborted").stage == "done"
        with stack.api() as api:
            (begun,) = [one for one in api.drain(source).migrations if one.workload.name == "moving"]
        assert wait_stage(stack, begun.id, "done", "aborted").stage == "done"
        load.wait_for(20)
    with stack.api() as api:
        api.cordon(source, cordoned=False)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    (left,) = stack.wait_serving("moving")
    assert left.node == target
    stack.delete_workloads("moving")
    record("F05", "P", 1, moves=3, killed="coordinator while shifting", lost=0, answered=load.answer_count())
