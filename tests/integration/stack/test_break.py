"""`shoal dev break NAME cut | slow | fill | heal` on a region as a person has it, under load."""

from collections.abc import Iterator

import pytest

from harness.crafted import padded
from harness.stack import Load, Stack, documents, on_nodes, policy, workload
from harness.wait import wait_until
from shoal.devstack.keeper import FILLED_BYTES
from shoal.devstack.roads import SLOW_BYTES_PER_S
from shoal.types.codes import Code

NODES = ("plain-cpu", "edge-npu")
SLOW_BYTES = 3 * SLOW_BYTES_PER_S
"""Another size than what an earlier test left in a cache."""


@pytest.fixture
def pair(stack: Stack) -> Iterator[Stack]:
    stack.apply(documents(policy("two", on_nodes(NODES, 2)), workload("broken", "relu", "two")))
    stack.serves("broken", 2)
    yield stack
    for name in NODES:
        stack.control.hurt(name, "heal")
    stack.forget("broken", "large")


def liveness(stack: Stack, node: str) -> str:
    with stack.api() as api:
        return next(view.liveness for view in api.get("nodes").nodes if view.node.name == node)


def broken(stack: Stack, node: str) -> set[str]:
    return {verb for row in stack.control.status() if row["name"] == node for verb in row["broken"]}


def test_cut_is_silence_and_heal_is_all_there_is_to_do(pair: Stack) -> None:
    workers = pair.workers()
    with Load(pair.port("gateway", "grpc"), pair.client_files, "broken") as load:
        told = pair.shoal("dev", "break", "edge-npu", "cut")
        assert told.returncode == 0, told.stderr
        wait_until(lambda: liveness(pair, "edge-npu") == "suspect", 20.0, "it to be missed")
        assert "running, cut" in pair.shoal("dev", "status").stdout
        load.wait_for(40)
        with Load(pair.port("edge-npu", "grpc"), pair.client_files, "broken", 1) as at_its_console:
            at_its_console.wait_for(20)
        pair.shoal("dev", "break", "edge-npu", "heal")
        wait_until(lambda: liveness(pair, "edge-npu") == "ready", 20.0, "it to be back")
        pair.serves("broken", 2)
        load.wait_for(40)
    for verdict in (load.verdict(), at_its_console.verdict()):
        assert (verdict.lost, verdict.violations) == (0, ()), str(verdict)
    assert pair.workers() == workers, "nothing was restarted"
    assert broken(pair, "edge-npu") == set()


def test_fill_is_a_full_disk_for_what_is_new(pair: Stack) -> None:
    large = padded(4 * FILLED_BYTES)
    pair.push(large, "large")
    pair.control.hurt("edge-npu", "fill")
    assert broken(pair, "edge-npu") == {"fill"}
    with Load(pair.port("gateway", "grpc"), pair.client_files, "broken") as load:
        pair.apply(documents(policy("there", on_nodes(["edge-npu"])), workload("large", "large", "there")))
        wait_until(
            lambda: Code.DISK_FULL in {event.code for event in pair.events() if event.workload.name == "large"},
            30.0,
            "the disk to be full",
        )
        load.wait_for(20)
        pair.control.hurt("edge-npu", "heal")
        pair.serves("large")
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost, verdict.violations) == (0, ()), str(verdict)


@pytest.mark.alone
def test_slow_is_slow(pair: Stack) -> None:
    """The model's bytes share the line; a heartbeat still gets through."""
    last = pair.events()[-1].sequence
    pair.push(padded(SLOW_BYTES), "large")
    pair.control.hurt("edge-npu", "slow")
    pair.apply(documents(policy("there", on_nodes(["edge-npu"])), workload("large", "large", "there")))
    pair.serves("large")
    took = {event.code: event.at for event in pair.events(last) if event.workload.name == "large"}
    assert took["READY"] - took["ASSIGNED"] >= 0.9 * SLOW_BYTES / SLOW_BYTES_PER_S, (
        f"{SLOW_BYTES} bytes at {SLOW_BYTES_PER_S} a second"
    )
    assert not {"NODE_SUSPECT", "NODE_LOST"} & {event.code for event in pair.events(last)}


@pytest.mark.parametrize(
    ("target", "verb"),
    [("edge-npu/worker", "cut"), ("coordinator", "fill"), ("nobody", "cut"), ("plain-cpu", "heat")],
)
def test_what_cannot_be_broken_is_refused(stack: Stack, target: str, verb: str) -> None:
    told = stack.shoal("dev", "break", target, verb)
    assert told.returncode != 0
    assert told.stderr.split()[0] in (Code.FIELD_INVALID, Code.NOT_FOUND)
