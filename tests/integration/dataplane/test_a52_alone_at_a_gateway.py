"""A52: a tenant that was alone at a gateway sends more slow requests than a node takes calls of one connection. What
another tenant asks of an idle replica there does not wait for them. Real fronts; the workers are the test's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from harness.attacks.tenant_flood import INPUTS
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.fakes.fronts import ANSWER
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.fair_queue import ACTIVE_S
from shoal.agent.frames import FrameServer, InferCall
from shoal.agent.ports import LocalWorker
from shoal.http2.connection import Http2Limits
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.tenant import TenantLimit
from shoal.types.workload import WorkloadKey

LOUD, QUIET = WorkloadKey("loud", "relu"), WorkloadKey("quiet", "relu")
STREAMS = Http2Limits().streams
ASKED = 420
ANSWER_S = 20.0
"""Far more than an idle replica takes, on a machine with other work."""


class HeldWorker:
    """Answers what it is asked once it is told to."""

    def __init__(self) -> None:
        self.held: list[InferCall] = []
        self.is_idle = True

    def on_infer(self, call: InferCall) -> None:
        if self.is_idle:
            call.answer((ANSWER,))
        else:
            self.held.append(call)

    def answer_all(self) -> None:
        self.is_idle = True
        for call in self.held:
            call.answer((ANSWER,))


@pytest.fixture
async def slow() -> HeldWorker:
    return HeldWorker()


@pytest.fixture
async def gateway(tmp_path: Path, slow: HeldWorker) -> AsyncIterator[DataPlaneNode]:
    """Forwards to a node with a replica of each tenant."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    found = DataPlaneNode("gw", authority, tmp_path / "gw", role=Role.GATEWAY)
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    workers = tuple(
        LocalWorker(name, key, str(tmp_path / name), "nonce") for name, key in (("a1", LOUD), ("a2", QUIET))
    )
    async with AsyncExitStack() as stack:
        for each, worker in zip(workers, (slow, HeldWorker()), strict=True):
            server = FrameServer(Path(each.socket), each.nonce, {}, on_infer=worker.on_infer)
            await server.start()
            stack.push_async_callback(server.close)
        for front in (found, node):
            await front.start()
            stack.push_async_callback(front.stop)
        here, there = (
            tuple(Route(each.workload, 1, (node.endpoint(each.assignment, at=at),)) for each in workers)
            for at in (node, found)
        )
        await node.front.configure(here, (), workers)
        await found.front.configure(there, (), (), tenants=(TenantLimit(LOUD.tenant, concurrency=2 * ASKED),))
        yield found


async def test_a52_one_alone_at_a_gateway_leaves_calls_of_its_connection_to_others(
    gateway: DataPlaneNode, slow: HeldWorker
) -> None:
    loop = asyncio.get_running_loop()
    loud = [gateway.grpc_client(gateway.authority.issue(Role.TENANT, LOUD.tenant)) for _ in range(4)]
    quiet = gateway.grpc_client(gateway.authority.issue(Role.TENANT, QUIET.tenant))
    await quiet.infer("relu", INPUTS["relu"])
    await loud[0].infer("relu", INPUTS["relu"])
    alone_at = loop.time() + ACTIVE_S + 0.1
    await until(lambda: loop.time() > alone_at, 10.0, "nobody else asked for a while")
    slow.is_idle = False
    asked = [
        asyncio.create_task(client.infer("relu", INPUTS["relu"], timeout=120.0))
        for _ in range(ASKED // len(loud))
        for client in loud
    ]

    async def are_all_inside() -> bool:
        (use,) = (await gateway.front.stats()).tenants
        return use.inside == ASKED

    try:
        await until(are_all_inside, 60.0, "all of them at the gateway")
        await until(lambda: len(slow.held) >= STREAMS // 2, 60.0, "as many as may be at the node")
        for _ in range(3):
            await quiet.infer("relu", INPUTS["relu"], timeout=ANSWER_S)
        at_the_node = len(slow.held)
        assert STREAMS // 2 < at_the_node <= 3 * STREAMS // 4, "those of two payers would be more"
    finally:
        slow.answer_all()
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in (*loud, quiet)))
    assert [each for each in outcomes if isinstance(each, BaseException)] == [], "each had its turn"
    record("A52", "P", 1, slow_requests=ASKED, at_the_node=at_the_node, others_answered=3)
