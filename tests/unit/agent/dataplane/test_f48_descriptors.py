"""F48: a front runs out of descriptors. It refuses with a code, blames no replica, and recovers by itself."""

import asyncio
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.crypto.pki import Authority
from harness.faults.descriptor_limit import descriptor_limit
from harness.ports import free_ports
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.routing import AttemptFault, fault_of
from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.frames import FrameServer, InferCall
from shoal.agent.ports import LocalWorker
from shoal.host import file_descriptors
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

ERRAND = CallContext("acme", "g1", "r1", Seconds(5.0))


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    files = Authority(tmp_path / "ca", "west", SystemClock().wall()).issue(Role.GATEWAY, "g1")
    return TlsFiles(files.certificate, files.key, files.authority)


def infer(call: InferCall) -> None:
    call.answer((call.payload,))


async def test_a_worker_that_was_not_met_yet(tmp_path: Path) -> None:
    nonce = secrets.token_hex(8)
    server = FrameServer(tmp_path / "w.sock", nonce, {}, on_infer=infer)
    await server.start()
    workers = WorkerClients()
    workers.configure([LocalWorker("a1", WorkloadKey("acme", "relu"), str(tmp_path / "w.sock"), nonce)])
    try:
        with descriptor_limit(os.getpid()), pytest.raises(AttemptFailed) as refused:
            await workers.infer("a1", b"x", ERRAND)
        assert (refused.value.code, refused.value.was_sent) == (Code.OVERLOADED, False)
        assert fault_of(refused.value.code) is AttemptFault.BUSY, "it is not ejected for what is our own want"
        assert await workers.infer("a1", b"x", ERRAND) == b"x", "by itself, at once"
    finally:
        await workers.close()
        await server.close()


@pytest.mark.parametrize("known", [False, True], ids=["own files unread", "own files read"])
async def test_a_peer_that_was_not_met_yet(tls: TlsFiles, known: bool) -> None:
    """known: whether this front has called anybody before."""
    ports = free_ports(6)
    other, there, *places = (
        Endpoint(f"a{port}", "n1", EndpointKind.AGENT, f"127.0.0.1:{port}", 1.0, EndpointState.READY) for port in ports
    )

    async def attempt_failure(peers: PeerClients, endpoint: Endpoint) -> AttemptFailed:
        with pytest.raises(AttemptFailed) as refused:
            await peers.infer(endpoint, b"x", ERRAND)
        return refused.value

    before, peers = (PeerClients("west", tls, Authorities("west", tls)) for _ in range(2))
    try:
        # grpc itself must be up, as a front's is, which listens by it
        assert (await attempt_failure(before, other)).code is Code.REPLICA_UNREACHABLE
        if known:
            assert (await attempt_failure(peers, other)).code is Code.REPLICA_UNREACHABLE
        with descriptor_limit(os.getpid()):
            # A connection that grpc closes meanwhile leaves its descriptor to the next call.
            refused = await attempt_failure(peers, there)
            while refused.code is not Code.OVERLOADED and places:
                there = places.pop()
                refused = await attempt_failure(peers, there)
        assert (refused.code, refused.was_sent) == (Code.OVERLOADED, False)
        assert "/" not in str(refused.refusal), "no path of this machine"

        async def looks_again() -> bool:
            return (await attempt_failure(peers, there)).code is Code.REPLICA_UNREACHABLE

        await until(looks_again, 10.0, "it to call there, where nobody is")
    finally:
        await before.close()
        await peers.close()


async def test_a_server_without_descriptors_does_little_and_goes_on_by_itself() -> None:
    """Of asyncio's own, by which the front and the coordinator serve: one failure a second, not one for each of a
    thousand places that somebody might wait in."""
    loop = asyncio.get_running_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, told: failures.append(told))
    inside = asyncio.Event()

    def enter(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside.set()
        writer.close()

    server = await asyncio.start_server(enter, "127.0.0.1", 0, backlog=file_descriptors.ACCEPTS_PER_TURN)
    file_descriptors.set_backlog(server, 1024)
    async with server:
        callers = [socket.socket() for _ in range(8)]
        with descriptor_limit(os.getpid()):
            for caller in callers:
                caller.setblocking(False)
                await loop.sock_connect(caller, server.sockets[0].getsockname())
            await until(lambda: failures, 5.0, "it to fail")
        await asyncio.wait_for(inside.wait(), 5.0)
        assert len(failures) <= 2, len(failures)
        for caller in callers:
            caller.close()
