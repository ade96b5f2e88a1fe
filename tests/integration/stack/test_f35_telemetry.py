"""F35: absurd telemetry (NaN, negative, from the future) is refused, and the node's work stays. An agent's
supervisor is stopped, and the test reports with its certificate."""

import asyncio
import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.cluster.stack import DevStack, InferenceLoad, documents, on_nodes, policy, workload
from harness.fakes.log import RecordingLog
from harness.report import record
from harness.wait import until, wait_until
from shoal.agent.clock import SystemClock
from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.link.grpc import GrpcLink, GrpcSession
from shoal.types.assignment import Observed, Status
from shoal.types.codes import Code
from shoal.types.device import Node, Reading
from shoal.types.link import Hello, Refused
from shoal.types.units import Bytes, Wall, Watts
from shoal.v1 import operator_pb2
from shoal.wire.nouns import from_wire

pytestmark = pytest.mark.alone

NODES = ("plain-cpu", "edge-npu")
LIAR = NODES[1]
WORSE_AT_MOST = 1.5
LIES: dict[str, Callable[[Reading], Reading]] = {
    "NaN": lambda it: replace(it, taken_at=Wall(math.nan)),
    "infinite": lambda it: replace(it, temperature_c=math.inf),
    "negative": lambda it: replace(it, power_w=Watts(-1.0)),
    "1e308": lambda it: replace(it, energy_j=1e308),
    "from the future": lambda it: replace(it, taken_at=Wall(it.taken_at + 86400.0)),
    "free above total": lambda it: replace(it, free_bytes=Bytes(2**62)),
}
BEATS = 2
"""Of each lie."""


def test_f35_absurd_telemetry_is_refused_and_its_work_stays(stack: DevStack) -> None:
    stack.apply(documents(policy("two", on_nodes(NODES, 2)), workload("told", "relu", "two")))
    try:
        stack.wait_serving("told", 2)
        workers, last = stack.workers(), stack.events()[-1].sequence
        with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "told") as load:
            before = load.now()
            load.wait_for(60)
            calm = load.latencies(before, load.now())
            stack.control.break_member(f"{LIAR}/supervisor", "pause")
            codes, heard = asyncio.run(lie(stack, load))
            stack.control.break_member(f"{LIAR}/supervisor", "resume")
            wait_until(lambda: not view(stack).quarantined, 60.0, "who reports well again to be believed again")
            stack.wait_serving("told", 2)
            load.wait_for(20)
        verdict = load.verdict()
        assert set().union(*codes.values()) <= {Code.TELEMETRY_ABSURD, Code.MESSAGE_INVALID}, codes
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
        assert stack.workers() == workers, "its work stays"
        told = {event.code for event in stack.events(last) if event.node == LIAR}
        assert "NODE_QUARANTINED" in told, told
        assert not {"NODE_LOST", "ASSIGNED"} & told
        worse = statistics.median(heard) / statistics.median(calm)
        assert worse <= WORSE_AT_MOST
        record(
            "F35", "P", 1, lies=BEATS * len(LIES), median_ratio=round(worse, 2), sent=verdict.sent, lost=0, restarts=0
        )
    finally:
        stack.delete_workloads("told")


def view(stack: DevStack) -> operator_pb2.NodeView:
    with stack.api() as api:
        return api.get("nodes", LIAR).nodes[0]


async def lie(stack: DevStack, load: InferenceLoad) -> tuple[dict[str, set[Code]], list[float]]:
    """Codes by lie, and how long the region's requests took meanwhile."""
    clock = SystemClock()
    with stack.api() as api:
        node = from_wire(Node, api.get("nodes", LIAR).nodes[0].node)
        (row,) = [row for row in api.get("placements").placements if row.node == LIAR]
    observed = from_wire(Observed, row.observed)
    link = GrpcLink(
        CredentialFiles(stack.control.folder / LIAR / "identity"),
        stack.info.stack.coordinator.addresses["link"],
        clock,
        RecordingLog(),
    )
    session: GrpcSession = await until(
        lambda: link.connect(Hello(node, "nonce-liar", None, 1, clock.wall())), 30.0, "the old session to be over"
    )
    found: dict[str, set[Code]] = {name: set() for name in LIES}
    began = load.now()
    sequence = 0
    for name, twist in LIES.items():
        for _ in range(BEATS):
            sequence += 1
            now = clock.wall()
            true = Reading(node.devices[0].name, Bytes(2**20), 0.1, 40.0, Watts(5.0), 1.0, now)
            report = Status(
                LIAR, session.welcome.epoch, sequence, True, None, (observed,), (), (twist(true),), (), now, True
            )  # fmt: skip
            await session.send(report)
            async with asyncio.timeout(10.0):
                while not isinstance(answer := await session.receive(), Refused):
                    pass
            found[name].add(answer.refusal.code)
    load.wait_for(60)
    heard = load.latencies(began, load.now())
    await session.close()
    return found, heard
