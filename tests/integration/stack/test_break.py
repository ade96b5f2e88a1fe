"""`shoal dev break NAME cut | slow | fill | heal` on a region as a person has it, under load."""

from collections.abc import Iterator

import pytest

from harness.cluster.stack import DevStack, InferenceLoad, documents, on_nodes, policy, workload
from harness.models.synthetic import padded_model
from harness.wait import wait_until
from shoal.devstack.link_shaping import SLOW_BYTES_PER_S
from shoal.devstack.process_supervisor import FULL_DISK_FILE_BYTES
from shoal.types.codes import Code

NODES = ("plain-cpu", "edge-npu")
SLOW_BYTES = 3 * SLOW_BYTES_PER_S
"""Another size than what an earlier test left in a cache."""


@pytest.fixture
def pair(stack: DevStack) -> Iterator[DevStack]:
    stack.apply(documents(policy("two", on_nodes(NODES, 2)), workload("broken", "relu", "two")))
    stack.wait_serving("broken", 2)
    yield stack
    for name in NODES:
        stack.control.break_member(name, "heal")
    stack.delete_workloads("broken", "large")


def liveness(stack: DevStack, node: str) -> str:
    with stack.api() as api:
        return next(view.liveness for view in api.get("nodes").nodes if view.node.name == node)


def active_faults(stack: DevStack, node: str) -> set[str]:
    return {verb for row in stack.control.status() if row["name"] == node for verb in row["broken"]}


def test_cut_is_silence_and_heal_is_all_there_is_to_do(pair: DevStack) -> None:
    workers = pair.workers()
    with InferenceLoad(pair.port("gateway", "data"), pair.client_files, "broken") as load:
        told = pair.shoal("dev", "break", "edge-npu", "cut")
        assert told.returncode == 0, told.stderr
        wait_until(lambda: liveness(pair, "edge-npu") == "suspect", 20.0, "it to be missed")
        assert "running, cut" in pair.shoal("dev", "status").stdout
        load.wait_for(40)
        with InferenceLoad(pair.port("edge-npu", "data"), pair.client_files, "broken", 1) as at_its_console:
            at_its_console.wait_for(20)
        pair.shoal("dev", "break", "edge-npu", "heal")
        wait_until(lambda: liveness(pair, "edge-npu") == "ready", 20.0, "it to be back")
        pair.wait_serving("broken", 2)
        load.wait_for(40)
    for verdict in (load.verdict(), at_its_console.verdict()):
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert pair.workers() == workers, "nothing was restarted"
    assert active_faults(pair, "edge-npu") == set()


def test_fill_is_a_full_disk_for_what_is_new(pair: DevStack) -> None:
    large = padded_model(4 * FULL_DISK_FILE_BYTES)
    pair.push(large, "large")
    pair.control.break_member("edge-npu", "fill")
    assert active_faults(pair, "edge-npu") == {"fill"}
    with InferenceLoad(pair.port("gateway", "data"), pair.client_files, "broken") as load:
        pair.apply(documents(policy("there", on_nodes(["edge-npu"])), workload("large", "large", "there")))
        wait_until(
            lambda: Code.DISK_FULL in {event.code for event in pair.events() if event.workload.name == "large"},
            30.0,
            "the disk to be full",
        )
        load.wait_for(20)
        pair.control.break_member("edge-npu", "heal")
        pair.wait_serving("large")
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)


def test_slow_is_slow(pair: DevStack) -> None:
    """The model's bytes share the line; a heartbeat still gets through."""
    last = pair.events()[-1].sequence
    pair.push(padded_model(SLOW_BYTES), "large")
    pair.control.break_member("edge-npu", "slow")
    pair.apply(documents(policy("there", on_nodes(["edge-npu"])), workload("large", "large", "there")))
    pair.wait_serving("large")
    took = {event.code: event.at for event in pair.events(last) if event.workload.name == "large"}
    assert took["READY"] - took["ASSIGNED"] >= 0.9 * SLOW_BYTES / SLOW_BYTES_PER_S, (
        f"{SLOW_BYTES} bytes at {SLOW_BYTES_PER_S} a second"
    )
    assert not {"NODE_SUSPECT", "NODE_LOST"} & {event.code for event in pair.events(last)}


@pytest.mark.parametrize(
    ("target", "verb"),
    [("edge-npu/worker", "cut"), ("coordinator", "fill"), ("nobody", "cut"), ("plain-cpu", "heat")],
)
def test_what_cannot_be_broken_is_refused(stack: DevStack, target: str, verb: str) -> None:
    told = stack.shoal("dev", "break", target, verb)
    assert told.returncode != 0
    assert told.stderr.split()[-1].strip("()") in (Code.FIELD_INVALID, Code.NOT_FOUND)
