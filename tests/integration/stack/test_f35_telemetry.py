"""F35: absurd telemetry (NaN, negative, from the future) is refused, and the node's work stays. An agent's
supervisor is stopped, and the test reports with its certificate."""

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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

NODES = ("plain-cpu", "edge-npu")
LIAR = NODES[1]
WORSE_AT_MOST = 1.5
ATTEMPTS = 4
"""Other programs of the machine make an answer later, never earlier: the best attempt counts."""
BEATS = 2
"""Of each lie in an attempt."""
ANSWERS_A_BEAT = 5
"""Answers to others between two lies."""
LIES: dict[str, Callable[[Reading], Reading]] = {
    "NaN": lambda it: replace(it, taken_at=Wall(math.nan)),
    "infinite": lambda it: replace(it, temperature_c=math.inf),
    "negative": lambda it: replace(it, power_w=Watts(-1.0)),
    "1e308": lambda it: replace(it, energy_j=1e308),
    "from the future": lambda it: replace(it, taken_at=Wall(it.taken_at + 86400.0)),
    "free above total": lambda it: replace(it, free_bytes=Bytes(2**62)),
}


@dataclass
class Lies:
    """What became of them."""

    # Codes of the refusals, by lie.
    codes: dict[str, set[Code]] = field(default_factory=lambda: {name: set() for name in LIES})
    # Number of reports that lied.
    count: int = 0
    # For each attempt, the median time of an answer to others beside lies, over the one beside true reports before.
    ratios: list[float] = field(default_factory=list)


def test_f35_absurd_telemetry_is_refused_and_its_work_stays(stack: DevStack) -> None:
    stack.apply(
        documents(
            policy("two", on_nodes(NODES, 2)),
            policy("one", on_nodes(NODES[:1])),
            workload("told", "relu", "two"),
            workload("others", "relu", "one"),
        )
    )
    port, files = stack.port("gateway", "data"), stack.client_files
    try:
        stack.wait_serving("told", 2)
        stack.wait_serving("others")
        workers, last = stack.workers(), stack.events()[-1].sequence
        with InferenceLoad(port, files, "told") as load, InferenceLoad(port, files, "others") as others:
            stack.control.break_member(f"{LIAR}/supervisor", "pause")
            lies = asyncio.run(lie(stack, others))
            stack.control.break_member(f"{LIAR}/supervisor", "resume")
            wait_until(lambda: not view(stack).quarantined, 60.0, "who reports well again to be believed again")
            stack.wait_serving("told", 2)
            load.wait_for(20)
        for verdict in (load.verdict(), others.verdict()):
            assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
        assert all(codes for codes in lies.codes.values())
        assert set().union(*lies.codes.values()) <= {Code.TELEMETRY_ABSURD, Code.MESSAGE_INVALID}, lies.codes
        assert stack.workers() == workers, "its work stays"
        told = {event.code for event in stack.events(last) if event.node == LIAR}
        assert "NODE_QUARANTINED" in told, told
        assert not {"NODE_LOST", "ASSIGNED"} & told
        assert min(lies.ratios) <= WORSE_AT_MOST, lies.ratios
        record(
            "F35", "P", len(lies.ratios), lies=lies.count, median_ratio=round(min(lies.ratios), 2),
            sent=load.verdict().sent, lost=0, restarts=0,
        )  # fmt: skip
    finally:
        stack.delete_workloads("told", "others")


def view(stack: DevStack) -> operator_pb2.NodeView:
    with stack.api() as api:
        return api.get("nodes", LIAR).nodes[0]


async def lie(stack: DevStack, others: InferenceLoad) -> Lies:
    """Attempts until the answers to `others` are as fast beside lies as beside true reports, at most ATTEMPTS."""
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
    lies, sent = Lies(), itertools.count(1)

    async def report(twist: Callable[[Reading], Reading]) -> None:
        now = clock.wall()
        reading = twist(Reading(node.devices[0].name, Bytes(2**20), 0.1, 40.0, Watts(5.0), 1.0, now))
        status = Status(
            LIAR, session.welcome.epoch, next(sent), True, None, (observed,), (), (reading,), (), now, True
        )  # fmt: skip
        await session.send(status)

    while len(lies.ratios) < ATTEMPTS and (not lies.ratios or lies.ratios[-1] > WORSE_AT_MOST):
        calm, beside = list[float](), list[float]()
        for _ in range(BEATS * len(LIES)):
            await report(lambda it: it)
            calm += await answers_to(others, ANSWERS_A_BEAT)
        for name, twist in BEATS * tuple(LIES.items()):
            lies.count += 1
            await report(twist)
            async with asyncio.timeout(10.0):
                while not isinstance(answer := await session.receive(), Refused):
                    pass
            lies.codes[name].add(answer.refusal.code)
            beside += await answers_to(others, ANSWERS_A_BEAT)
        lies.ratios.append(statistics.median(beside) / statistics.median(calm))
    await session.close()
    return lies


async def answers_to(load: InferenceLoad, count: int) -> list[float]:
    """Seconds that each of the next answers takes, `count` at least."""
    began = load.now()
    await until(lambda: load.answer_count(began) >= count, 60.0, f"{count} answers to others")
    return load.latencies(began, load.now())
