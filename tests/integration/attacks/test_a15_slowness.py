"""A15: slow clients, on every listener. A client that is slow, never reads, never ends or keeps cancelling costs
only itself."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.attacks.bystander import Attack, AttackCost, run_beside
from harness.clients.http2 import Http2Connection
from harness.clients.oip import Tensor, infer_request, read_response
from harness.cluster.coordinator import REGION, CoordinatorServer
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import CertificateFiles
from harness.report import record
from harness.wait import until
from shoal.agent.dataplane.call_places import CALLS_PER_CALLER
from shoal.agent.dataplane.ingress_admission import READ_SLOTS_PER_CALLER
from shoal.types.device import Role
from shoal.wire.identity import dns_of
from shoal.wire.member_files import Enrolled

pytestmark = pytest.mark.alone

INFER = "/inference.GRPCInferenceService/ModelInfer"
X = (Tensor("x", "FP32", (1, 4), bytes(16)),)
ASKED = infer_request("relu", X).SerializeToString()
IN_TIME_S = 15.0
"""Ten seconds, and some for a machine that is busy."""
OTHERS_S = 5.0
"""Far below the ten seconds that a slow client has, and far above what another's call takes: some 50 ms."""
YEARS = "99999999H"


def trusting(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.authority))
    context.load_cert_chain(files.certificate, files.key)
    return context


async def connect_http2(node: DataPlaneNode, files: CertificateFiles, *, window: int = 65535) -> Http2Connection:
    return await Http2Connection.connect(
        f"127.0.0.1:{node.front.config.port}", trusting(files), "localhost", window=window
    )


async def duration_of(work: Awaitable[object]) -> float:
    loop = asyncio.get_running_loop()
    start = loop.time()
    await work
    return loop.time() - start


async def dripping(connection: Http2Connection, streams: range, path: str, **said: str) -> None:
    """A message of a hundred bytes on each stream, one byte a second, until the server has ended all of them."""
    for stream in streams:
        connection.open_stream(stream, path, **said)
        connection.send_message(stream, b"", of=100)
    loop = asyncio.get_running_loop()
    end, drop = loop.time() + 30, loop.time()
    while not all(connection.is_ended(stream) for stream in streams):
        assert loop.time() < end, f"{sum(connection.is_ended(s) for s in streams)} of {len(streams)} ended"
        if loop.time() > drop:
            drop = loop.time() + 1
            for stream in streams:
                if not connection.is_ended(stream):
                    connection.send_data(stream, b"x")
        await asyncio.sleep(0.05)  # noqa: TID251 - the pace of the drip


async def bystander_calls(node: DataPlaneNode, attack: Callable[[], Awaitable[None]]) -> tuple[int, float]:
    """Calls of another tenant's client meanwhile, none of which may fail, and the longest of them."""
    client = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    loop = asyncio.get_running_loop()
    taken: list[float] = []
    running = asyncio.ensure_future(attack())
    try:
        while not running.done():
            start = loop.time()
            await client.infer("relu", X)
            taken.append(loop.time() - start)
        await running
    finally:
        running.cancel()
        await client.close()
    return len(taken), max(taken)


async def slow_at_the_node(node: DataPlaneNode) -> dict[str, Any]:
    """Twice as many bodies as one caller has places for, on gRPC; another's head and body on REST."""
    slow = node.authority.issue(Role.TENANT, "slow")
    streams = range(1, 4 * READ_SLOTS_PER_CALLER, 2)
    connection = await connect_http2(node, slow)
    rest = node.rest_client(node.authority.issue(Role.TENANT, "slow-rest"))
    took: dict[str, float] = {}

    async def slow_rest(name: str, sent: bytes) -> None:
        reader, writer = await rest.connect()
        writer.write(sent)
        answered = asyncio.ensure_future(read_response(reader))

        async def drip() -> None:
            while not (await asyncio.wait([answered], timeout=1.0))[0]:
                writer.write(b"x")

        took[name] = await duration_of(drip())
        response = await answered
        assert (response.status, response.headers["shoal-code"]) == (408, "TOO_SLOW")
        writer.close()

    async def attack() -> None:
        head = rest.request_bytes("POST", "/v2/models/relu/infer")
        async with asyncio.TaskGroup() as group:
            group.create_task(slow_rest("rest head", head[:40]))
            group.create_task(slow_rest("rest body", head.replace(b"content-length: 0", b"content-length: 100")))
            took["grpc body"] = await duration_of(dripping(connection, streams, INFER))

    calls, longest = await bystander_calls(node, attack)
    told = [connection.header_blocks(stream) for stream in streams]
    assert all(b"TOO_SLOW" in each or b"OVERLOADED" in each for each in told)
    assert sum(b"TOO_SLOW" in each for each in told) >= READ_SLOTS_PER_CALLER
    assert took.pop("grpc body") < 2 * IN_TIME_S, "ten seconds for a place, and ten in it"
    assert max(took.values()) < IN_TIME_S, took
    assert calls > 100
    assert longest < OTHERS_S
    await connection.close()
    figures = {name.replace(" ", "_") + "_s": round(seconds, 1) for name, seconds in took.items()}
    return {"victim_calls": calls, "victim_longest_ms": round(longest * 1e3), **figures}


async def drip_handshakes(ask: Callable[[], Awaitable[object]], pid: int, addresses: list[str]) -> AttackCost:
    toll = await run_beside(ask, [pid], [Attack("drip", address, 20) for address in addresses], for_s=25)
    assert toll.errors == []
    for attacker in toll.attackers:
        assert attacker["ended"] + attacker["refused"] == 20, "the server let go of every one"
        assert attacker["longest_s"] < IN_TIME_S
    return toll


async def slow_handshakes(node: DataPlaneNode, coordinator: CoordinatorServer) -> dict[str, Any]:
    """Of a byte a second."""
    client = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    config = node.front.config
    assert node.front.pid is not None
    addresses = [f"127.0.0.1:{config.port}", coordinator.link, coordinator.enrol, coordinator.metrics]
    toll = await drip_handshakes(lambda: client.infer("relu", X), node.front.pid, addresses)
    await client.close()
    longest = max(attacker["longest_s"] for attacker in toll.attackers)
    return {"handshake_s": round(longest, 1), "handshake_cpu_ours_per_theirs": toll.figures()["cpu_ours_per_theirs"]}


async def test_a15_who_does_not_read_its_answers_holds_no_more_than_its_share(node: DataPlaneNode) -> None:
    """A window of zero: the answers wait in the front. Others go on; the share is bounded; hanging up gives it back."""
    deaf = node.authority.issue(Role.TENANT, "acme")
    connections = [await connect_http2(node, deaf, window=0) for _ in range(4)]
    streams = range(1, 401, 2)
    for connection in connections:
        for stream in streams:
            connection.open_stream(stream, INFER)
            connection.send_message(stream, ASKED, end=True)
    victim = node.grpc_client(node.authority.issue(Role.OPERATOR, "ann"))

    async def full() -> bool:
        refused = sum(b"OVERLOADED" in c.header_blocks(stream) for c in connections for stream in streams)
        return refused >= len(connections) * len(streams) - CALLS_PER_CALLER

    await until(full, 10, "what is over the caller's share to be refused")
    said = {"shoal-tenant": "acme"}
    longest = max([await duration_of(victim.infer("relu", X, extra_metadata=said)) for _ in range(50)])
    assert longest < OTHERS_S
    for connection in connections:
        await connection.close()
    back = node.grpc_client(deaf)

    async def is_serving() -> bool:
        await back.infer("relu", X)
        return True

    await until(is_serving, 5, "the caller's share to be free again")
    await victim.close()
    await back.close()
    record("A15", "P", 1, unread_calls=len(connections) * len(streams), victim_longest_ms=round(longest * 1e3))


async def test_a15_deadlines_of_years_and_cancel_storms(node: DataPlaneNode) -> None:
    """Calls that are taken back at once leave the queue, and the connection of who does little else is closed; a
    deadline of ten thousand years is no deadline."""
    files = node.authority.issue(Role.TENANT, "acme")
    storm = await connect_http2(node, files)
    cancelled = 0

    async def attack() -> None:
        nonlocal cancelled
        for start in range(1, 8001, 200):
            for stream in range(start, start + 200, 2):
                storm.open_stream(stream, INFER, grpc_timeout=YEARS)
                storm.send_message(stream, ASKED, end=True)
            for stream in range(start, start + 200, 2):
                storm.reset(stream)
                cancelled += 1
            await asyncio.sleep(0)  # noqa: TID251 - the victim's turn

    calls, longest = await bystander_calls(node, attack)

    async def idle() -> bool:
        return all(count == 0 for _, count in (await node.front.stats()).in_flight)

    await until(idle, 5, "cancelled work to leave the queue")
    await until(storm.closed.is_set, 5, "the storm's connection to be closed")
    assert longest < OTHERS_S
    patient = await connect_http2(node, files)
    patient.open_stream(1, INFER, grpc_timeout=YEARS)
    patient.send_message(1, ASKED, end=True)
    await until(lambda: patient.is_ended(1), 5, "an answer")
    assert b"grpc-status\x010" in patient.header_blocks(1)
    for connection in (storm, patient):
        await connection.close()
    record("A15", "P", 1, cancelled=cancelled, victim_calls=calls, victim_longest_ms=round(longest * 1e3))


async def test_a15_an_upload_without_end(node: DataPlaneNode) -> None:
    """Chunks for ever over REST; on gRPC a message cannot be longer than it says."""
    rest = node.rest_client(node.authority.issue(Role.TENANT, "acme"))
    reader, writer = await rest.connect()
    head = rest.request_bytes("POST", "/v2/models/relu/infer").replace(
        b"content-length: 0", b"transfer-encoding: chunked"
    )
    writer.write(head)
    answered = asyncio.ensure_future(read_response(reader))
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    sent = 0
    while not answered.done() and sent < 200:
        writer.write(chunk)
        sent += 1
        await writer.drain()
    response = await answered
    assert (response.status, response.headers["shoal-code"]) == (413, "TOO_LARGE")
    writer.close()
    record("A15", "P", 1, sent_mib=sent)


def write_identity(enrolled: Enrolled, folder: Path) -> CertificateFiles:
    enrolled.write(folder)
    return CertificateFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


async def slow_at_the_coordinator(coordinator: CoordinatorServer, tmp_path: Path) -> dict[str, Any]:
    """A command, an upload and a session without a hello; and strangers where tokens are redeemed."""
    admin = write_identity(coordinator.certificate(Role.OPERATOR, "slow"), tmp_path / "operator")
    agent = write_identity(coordinator.certificate(Role.AGENT, "slow"), tmp_path / "agent")
    stranger = ssl.create_default_context(cafile=str(admin.authority))
    name = dns_of(REGION, Role.COORDINATOR, "coordinator")
    took: dict[str, float] = {}

    async def one(what: str, address: str, context: ssl.SSLContext, path: str, limit_s: float, code: bytes) -> None:
        connection = await Http2Connection.connect(address, context, name)
        took[what] = await duration_of(dripping(connection, range(1, 9, 2), path))
        assert took[what] < limit_s, took
        assert all(code in connection.header_blocks(stream) for stream in range(1, 9, 2)), what
        await connection.close()

    async with asyncio.TaskGroup() as group:
        for what, files, path in (
            ("command", admin, "/shoal.v1.Operator/Apply"),
            ("upload", admin, "/shoal.v1.Artifacts/Push"),
            ("session", agent, "/shoal.v1.AgentLink/Session"),
        ):
            group.create_task(one(what, coordinator.link, trusting(files), path, IN_TIME_S, b"TOO_SLOW"))
        # a stranger is told nothing: its connection ends
        group.create_task(one("stranger", coordinator.enrol, stranger, "/shoal.v1.Enrolment/Redeem", 24.0, b""))
    return {f"{what}_s": round(seconds, 1) for what, seconds in took.items()}


@pytest.mark.timeout(180)
async def test_a15_slow_bodies_heads_and_handshakes(
    node: DataPlaneNode, coordinator: CoordinatorServer, tmp_path: Path
) -> None:
    """All at once, since each takes its ten seconds."""
    async with asyncio.TaskGroup() as group:
        at_node = group.create_task(slow_at_the_node(node))
        handshakes = group.create_task(slow_handshakes(node, coordinator))
        at_region = group.create_task(slow_at_the_coordinator(coordinator, tmp_path))
    record("A15", "P", 13, **at_node.result(), **handshakes.result(), **at_region.result())
