"""A move that waits for room, by real processes under requests: over a killed coordinator, and then verified."""

import json
from collections.abc import Iterator

import pytest

from harness.cluster.stack import DevStack, InferenceLoad, documents, on_nodes, policy, region, workload
from harness.models.synthetic import digest_of, relu
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.long, pytest.mark.alone]

SMALL, PROFILE, LARGE = "small-npu", "qualcomm-ai100-dm2", "plain-cpu"
SIZE = "28MiB"
"""Of the small device's memory. A replica of these models is given 16 MiB and a little, so that it holds one."""
ENDS_S = 120.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    fleet = ((LARGE, ""), (SMALL, f"{PROFILE}={SIZE}"))
    with region(tmp_path_factory.mktemp("small"), len(fleet), fleet=fleet) as found:
        yield found


def model(name: str) -> bytes:
    made = relu()
    made.producer_name = name
    return bytes(made.SerializeToString())


def move(stack: DevStack, name: str) -> operator_pb2.MigrationView:
    with stack.api() as api:
        (found,) = api.get("migrations", name).migrations
    return found


def test_a_move_waits_for_room_over_a_restart_and_then_loses_nothing(small: DevStack) -> None:
    stack, first, second = small, model("first"), model("second")
    for name, content in (("first", first), ("second", second)):
        stack.push(content, name)
    stack.apply(documents(policy("there", on_nodes([SMALL])), workload("occupant", digest_of(first), "there")))
    stack.wait_serving("occupant")
    stack.apply(documents(policy("either", on_nodes([SMALL, LARGE])), workload("mover", digest_of(second), "either")))
    (source,) = stack.wait_serving("mover")
    assert source.node == LARGE, "the other one is full"

    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "mover", clients=2) as load:
        refused = stack.shoal("migrate", "mover", "--to", SMALL)
        assert refused.returncode != 0
        assert Code.MEMORY_SHORT in refused.stderr, refused.stderr
        asked = stack.shoal("migrate", "mover", "--to", SMALL, "--queue", "-o", "json")
        assert asked.returncode == 0, asked.stderr
        waits = json.loads(asked.stdout)
        assert (waits["stage"], waits["reason"]["code"]) == ("queued", "MEMORY_SHORT")
        again = stack.shoal("migrate", "mover", "--to", SMALL, "--queue")
        assert again.returncode != 0
        assert f"--cancel {waits['id']}" in again.stderr

        stack.kill("coordinator")
        load.wait_for(20)
        stack.control.break_member("coordinator", "resume")
        wait_until(stack.are_nodes_current, ENDS_S, "every node to be heard")
        wait_until(
            lambda: (now := move(stack, waits["id"])).stage == "queued" and now.reason.code == Code.MEMORY_SHORT,
            ENDS_S, "it to wait for room again",
        )  # fmt: skip
        listed = stack.shoal("get", "migrations")
        assert "queued" in listed.stdout, listed.stdout
        assert [row.node for row in stack.wait_serving("mover")] == [LARGE]

        stack.delete_workloads("occupant")
        watched = wait_until(
            lambda: found if (found := move(stack, waits["id"])).stage in ("done", "aborted") else None,
            ENDS_S, "the move to be over",
        )  # fmt: skip
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert watched is not None
    assert (watched.stage, watched.verdict.passed) == ("done", True), watched
    assert watched.stages[0].stage == "planned"
    assert "queued for" in watched.why
    (left,) = stack.wait_serving("mover")
    assert left.node == SMALL

    said = [event.code for event in stack.events() if event.subject == waits["id"]]
    assert (said[0], said[1], said[-1]) == ("MIGRATION_QUEUED", "MIGRATION_PLANNED", "MIGRATION_DONE"), said
    cancelled = stack.shoal("migrate", "mover", "--to", LARGE, "--queue", "-o", "json")
    assert json.loads(cancelled.stdout)["stage"] != "queued", "nothing refuses it, so it does not wait"
    record("queued moves", "P", 1, killed="coordinator while it waits", lost=0, answered=load.answer_count())
