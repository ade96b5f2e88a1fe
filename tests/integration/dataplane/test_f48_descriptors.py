"""A front whose descriptors strangers take, on real processes: who is connected is served, what needs one more is told
so, and nothing has to be done afterwards."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from integration.dataplane.test_faults import KEY, ask, load

from harness.crafted import relu
from harness.history import History
from harness.node import Node
from harness.oip import Failed, GrpcClient, Tensor
from harness.pki import Authority, Files
from harness.report import record
from harness.shortage import no_descriptors
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
RECOVERS_S = 10.0


@pytest.mark.parametrize("entry", ["gateway", "agent"])
async def test_f48_descriptors_of_a_front_are_used_up(tmp_path: Path, entry: str) -> None:
    """entry: of a gateway the way to a replica is a connection to another front, of an agent to a worker of its own."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    model = tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    gateway = Node("g1", authority, tmp_path / "g1", Role.GATEWAY)
    one, two = (Node(name, authority, tmp_path / name) for name in ("n1", "n2"))
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
        client, pid = front.grpc(files), front.front.pid
        assert pid is not None
        await ask(client, History(), 1)
        refused: list[str] = []

        async def strike() -> None:
            with no_descriptors(pid, SPARE):
                async with strangers(front, files) as shut_out:
                    assert shut_out, "there were enough"
                    refused.extend([await told(client) for _ in range(5)])

        verdict = await load([client], REQUESTS, RATE, REQUESTS // 4, strike)
        print(verdict)
        assert (verdict.lost, verdict.violations, verdict.answered) == (0, (), REQUESTS), verdict
        assert set(refused) == {Code.OVERLOADED}, refused
        freed = asyncio.get_running_loop().time()
        newcomer = front.grpc(files)
        await until(lambda: served(newcomer), RECOVERS_S, "somebody new is served, by a replica not met before")
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


async def told(client: GrpcClient) -> str:
    """By a workload whose replica has not been met yet: the code, or the bare status."""
    try:
        await client.infer(UNMET.name, (Tensor("x", "FP32", (1, 4), bytes(16)),))
    except Failed as error:
        return error.code or str(error.status)
    return "answered"


async def served(client: GrpcClient) -> bool:
    return await told(client) == "answered"


@asynccontextmanager
async def strangers(node: Node, files: Files) -> AsyncIterator[list[str]]:
    """Many at both front ends, who stay; why those that could not come in were shut out."""
    trust = ssl.create_default_context(cafile=files.authority)
    trust.load_cert_chain(files.certificate, files.key)
    trust.set_alpn_protocols(["h2", "http/1.1"])
    inside: list[asyncio.StreamWriter] = []
    shut_out: list[str] = []

    async def come(port: int) -> None:
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="localhost")
            inside.append(writer)
        except OSError as refused:
            shut_out.append(type(refused).__name__)

    ports = (node.front.config.grpc_port, node.front.config.rest_port)
    await asyncio.gather(*(come(port) for port in ports for _ in range(STRANGERS)))
    try:
        yield shut_out
    finally:
        for writer in inside:
            writer.transport.abort()
