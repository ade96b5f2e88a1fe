"""F48: descriptors, threads or memory run out. Strangers take all descriptors of a real front: connected clients are
served, calls that need one more are refused with a code, and it recovers by itself."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.clients.relu_load import KEY, send_load, send_request
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority, CertificateFiles
from harness.faults.descriptor_limit import are_descriptors_used_up, descriptor_limit
from harness.measure.history import CallHistory
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

UNMET = WorkloadKey(KEY.tenant, "unmet")
"""Asked for only once nothing is left for the way to its replica."""
SPARE = 8
STRANGERS = 32
"""At each of two ports."""
REQUESTS, RATE = 400, 100.0
FILLS_S = 10.0
RECOVERS_S = 10.0


@pytest.mark.parametrize("entry", ["gateway", "agent"])
async def test_f48_descriptors_of_a_front_are_used_up(tmp_path: Path, entry: str) -> None:
    """entry: of a gateway the way to a replica is a connection to another front, of an agent to a worker of its own."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    model = tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    gateway = DataPlaneNode("g1", authority, tmp_path / "g1", Role.GATEWAY)
    one, two = (DataPlaneNode(name, authority, tmp_path / name) for name in ("n1", "n2"))
    nodes = (gateway, one, two) if entry == "gateway" else (one,)
    files = authority.issue(Role.TENANT, KEY.tenant)
    front, last = nodes[0], nodes[-1]
    client = newcomer = None
    try:
        await asyncio.gather(*(node.start() for node in nodes))
        await one.load("a1", KEY, model)
        await last.load("a2", UNMET, model)
        await asyncio.gather(*(node.configure() for node in nodes))
        if entry == "gateway":
            ways = (
                Route(KEY, 1, (one.endpoint("a1", at=gateway),)),
                Route(UNMET, 1, (two.endpoint("a2", at=gateway),)),
            )
            await gateway.configure(ways)
        client, pid = front.grpc_client(files), front.front.pid
        assert pid is not None
        await send_request(client, CallHistory(), 1)
        refused: list[str] = []

        async def strike() -> None:
            with descriptor_limit(pid, SPARE):
                async with strangers(front, files):
                    refused.extend([await infer_code(client) for _ in range(5)])

        verdict = await send_load([client], REQUESTS, RATE, REQUESTS // 4, strike)
        print(verdict)
        assert (verdict.lost_count, verdict.violations, verdict.answered) == (0, (), REQUESTS), verdict
        assert set(refused) == {Code.OVERLOADED}, refused
        freed = asyncio.get_running_loop().time()
        newcomer = front.grpc_client(files)
        await until(lambda: is_served(newcomer), RECOVERS_S, "somebody new is served, by a replica not met before")
        recovered_s = asyncio.get_running_loop().time() - freed
        assert (front.front.pid, front.front.restarts) == (pid, 0)
        record(
            "F48", "P", 1, used_up="descriptors", of=entry, strangers=2 * STRANGERS, sent=verdict.sent, lost=0,
            refused=len(refused), crashes=0, slowest_s=round(verdict.slowest_s, 2), recovered_s=round(recovered_s, 2),
        )  # fmt: skip
    finally:
        for each in (client, newcomer):
            if each is not None:
                await each.close()
        await asyncio.gather(*(node.stop() for node in nodes))


async def infer_code(client: GrpcClient) -> str:
    """By a workload whose replica has not been met yet: the code, or the bare status."""
    try:
        await client.infer(UNMET.name, (Tensor("x", "FP32", (1, 4), bytes(16)),))
    except InferenceError as error:
        return error.code or str(error.status)
    return "answered"


async def is_served(client: GrpcClient) -> bool:
    return await infer_code(client) == "answered"


@asynccontextmanager
async def strangers(node: DataPlaneNode, files: CertificateFiles) -> AsyncIterator[None]:
    """Many at both ports, once they have all that the front can open. Who gets in stays, and the others go on waiting,
    so that what the front closes is taken again."""
    trust = ssl.create_default_context(cafile=files.authority)
    trust.load_cert_chain(files.certificate, files.key)
    trust.set_alpn_protocols(["h2", "http/1.1"])
    pid = node.front.pid
    assert pid is not None

    async def keep_connecting(port: int) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=trust, server_hostname="localhost"
                )
                try:
                    await reader.read()
                finally:
                    writer.transport.abort()

    async def are_inside() -> bool:
        return are_descriptors_used_up(pid)

    ports = (node.front.config.port,)
    waiting = [asyncio.create_task(keep_connecting(port)) for port in ports for _ in range(STRANGERS)]
    try:
        await until(are_inside, FILLS_S, "strangers have all descriptors")
        yield
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
