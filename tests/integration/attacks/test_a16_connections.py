"""A16: connection floods, on every listener: silent connections, handshakes that stop half way, endless reconnecting.

gRPC's server offers a cap on connections of one port, before TLS, and a time limit for the handshake. It has no cap by
address, and each reconnect costs it a handshake: limits by address are left to the firewall (docs/guides/hardening.md).
REST and metrics have their own.
"""

import asyncio
from functools import partial
from pathlib import Path

import psutil
import pytest

from harness.attacks.bystander import Attack, AttackCost, run_beside
from harness.clients.oip import Tensor
from harness.cluster.coordinator import CoordinatorServer, operator
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import CertificateFiles
from harness.report import record
from harness.wait import until, wait_until
from shoal.agent.dataplane.data_port import CONNECTIONS_PER_ADDRESS
from shoal.types.device import Role
from shoal.v1 import operator_pb2 as api

pytestmark = pytest.mark.alone

CONNECTIONS = 1500
GROWTH_MIB = 440
"""For 4,500 connections in their handshakes, 1,500 at each of three listeners: gRPC keeps some 90 KB for each (406 MiB
were measured). More than these are never open at once where strangers end theirs by themselves."""
X = (Tensor("x", "FP32", (1, 4), bytes(16)),)
LONGEST_MS = 1000.0
LIMIT_S = 15.0
"""Ten seconds for a handshake, and some for a machine that is busy."""


def check_cost(toll: AttackCost, *, grown_mib: int, ratio: float = 10.0) -> None:
    """The general clause: nobody else fails or waits for the attack to end, and it costs us no more than ten times what
    it costs them. Attackers and victim share the processors here, so how much slower the victim's calls are says how
    busy those are: the ratios (`slower_p50`, `slower_p99`; the row's goal is 1.1) are recorded, and what is asserted is
    far below the ten seconds that an attacker's connection can last."""
    assert toll.errors == []
    assert toll.calls > 20
    assert toll.p99_ms < LONGEST_MS, toll.figures()
    assert toll.ours_s < ratio * toll.theirs_s, toll.figures()
    assert toll.growth_bytes < grown_mib * 2**20, toll.figures()


async def at_coordinator(
    coordinator: CoordinatorServer, kind: str, count: int, listeners: tuple[str, ...]
) -> AttackCost:
    assert coordinator.process is not None
    stub = operator(coordinator.link, coordinator.certificate(Role.OPERATOR, "victim"))
    ask = partial(asyncio.to_thread, partial(stub.WhoAmI, api.WhoAmIRequest(), timeout=10))
    attacks = [Attack(kind, getattr(coordinator, name), count) for name in listeners]
    return await run_beside(ask, [coordinator.process.pid], attacks, for_s=45)


async def at_node(node: DataPlaneNode, kind: str, count: int, files: CertificateFiles | None = None) -> AttackCost:
    assert node.front.pid is not None
    client = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    attacks = [Attack(kind, f"127.0.0.1:{node.front.config.port}", count, files)]
    try:
        return await run_beside(lambda: client.infer("relu", X), [node.front.pid], attacks, for_s=45)
    finally:
        await client.close()


async def is_closed_at_once(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(5):
            return not await reader.read()
    except ConnectionResetError:
        return True
    finally:
        writer.close()


async def silence_at_the_coordinator(coordinator: CoordinatorServer, count: int) -> AttackCost:
    toll = await at_coordinator(coordinator, "half", count, ("link", "enrol", "metrics"))
    assert coordinator.process is not None
    for attacker in toll.attackers:
        assert attacker["ended"] + attacker["refused"] == count, "the server let go of every one"
        assert attacker["longest_s"] < LIMIT_S
    process = psutil.Process(coordinator.process.pid)
    wait_until(lambda: process.num_fds() < 200, 15, "descriptors to come back")
    return toll


async def silence_at_the_node(node: DataPlaneNode, count: int) -> AttackCost:
    toll = await at_node(node, "half", count)
    for attacker in toll.attackers:
        assert attacker["ended"] + attacker["refused"] == count, "the server let go of every one"
        assert attacker["longest_s"] < LIMIT_S
    assert node.front.pid is not None
    process = psutil.Process(node.front.pid)
    await until(lambda: process.num_fds() < 200, 15, "descriptors to come back")
    return toll


async def silence(coordinator: CoordinatorServer, node: DataPlaneNode, count: int, grown_mib: int) -> None:
    """At all listeners of both at once, since it takes ten seconds."""
    async with asyncio.TaskGroup() as group:
        at_region = group.create_task(silence_at_the_coordinator(coordinator, count))
        at_node = group.create_task(silence_at_the_node(node, count))
    for toll in (at_region.result(), at_node.result()):
        check_cost(toll, grown_mib=grown_mib, ratio=20)
    figures = {"coordinator": at_region.result().figures(), "node": at_node.result().figures()}
    record("A16", "P", 6, connections=6 * count, **figures)


@pytest.mark.timeout(180)
async def test_a16_silent_connections(coordinator: CoordinatorServer, node: DataPlaneNode) -> None:
    await silence(coordinator, node, CONNECTIONS, GROWTH_MIB)


@pytest.mark.parametrize(("kind", "count", "grown_mib"), [("junk", 3000, GROWTH_MIB), ("reconnect", 600, 200)])
@pytest.mark.timeout(180)
async def test_a16_strangers_that_come_again_and_again(
    coordinator: CoordinatorServer, node: DataPlaneNode, kind: str, count: int, grown_mib: int
) -> None:
    before = coordinator.log.stat().st_size
    at_region = await at_coordinator(coordinator, kind, count, ("link", "enrol", "metrics"))
    check_cost(at_region, grown_mib=grown_mib)
    at_front = await at_node(node, kind, count)
    check_cost(at_front, grown_mib=grown_mib)
    assert coordinator.log.stat().st_size == before, "a stranger that fails the handshake writes no log"
    record("A16", "P", 6, connections=6 * count, coordinator=at_region.figures(), node=at_front.figures())


async def test_a16_a_front_turns_an_address_away_before_tls(node: DataPlaneNode, tmp_path: Path) -> None:
    """The next one behind the same address is closed at once; another address is served."""
    port = node.front.config.port
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_PER_ADDRESS)]
    assert await is_closed_at_once("127.0.0.1", port)
    other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    rest = node.rest_client(node.authority.issue(Role.TENANT, "acme"))
    await other[1].start_tls(rest.context(), server_hostname="localhost")
    other[1].write(rest.request_bytes("GET", "/v2/health/live"))
    assert (await other[0].readline()).startswith(b"HTTP/1.1 200")
    for _, each in [*held, other]:
        each.transport.abort()
    await until(rest.live, 10, "the address to be served again")
    record("A16", "P", 1, held=len(held), limit_per_address=CONNECTIONS_PER_ADDRESS)


@pytest.mark.long
@pytest.mark.timeout(120)
async def test_a16_ten_thousand_silent_connections_at_each_listener(
    coordinator: CoordinatorServer, node: DataPlaneNode
) -> None:
    """As many as crashed gRPC's core while a TLS configuration was handed over at each handshake."""
    await silence(coordinator, node, 10_000, 1024)
