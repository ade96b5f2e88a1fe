"""Calls to another front: whose they are, and which of them it may have begun to run when its connection is closed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from harness.crypto.pki import Authority
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane import upstream
from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, ConnectedPeer, PeerClients, _PeerConnection
from shoal.host.grpc_client import ANSWER_WINDOW_BYTES, GrpcChannel
from shoal.http2 import frames
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Seconds
from shoal.wire.limits import PEER


class Peer:
    """A front that takes one call at a time and answers none, and the connection to it."""

    def __init__(self, port: int) -> None:
        self.data, self.large, ping = (
            GrpcChannel(f"127.0.0.1:{port}", "n1", None, PEER, 2**20, is_shared=True) for _ in range(3)
        )
        self.connection = _PeerConnection(self.data, self.large, ping, Seconds(5.0))

    def begin(self) -> asyncio.Task[bytes]:
        return asyncio.create_task(self.call())

    async def call(self) -> bytes:
        return await self.connection.call("/x/Y", b"step", Seconds(60.0), lambda: (), "acme")


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    ended = asyncio.Event()

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.settings(((frames.MAX_CONCURRENT_STREAMS, 1),)))
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    there = Peer(server.sockets[0].getsockname()[1])
    try:
        yield there
    finally:
        await there.connection.close(None)
        ended.set()
        server.close()


async def failure(call: asyncio.Task[bytes]) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as failed:
        await call
    return failed.value


async def test_only_a_call_that_had_a_stream_may_have_run_where_the_connection_is_given_up(peer: Peer) -> None:
    await until(lambda: peer.data.can_begin("acme"), 5.0, "the connection is open")
    sent = peer.begin()
    await until(lambda: not peer.data.can_begin("acme"), 5.0, "the only stream is in use")
    in_line = [peer.begin() for _ in range(2)]
    session = peer.data._session
    assert session is not None
    await until(lambda: len(session._shares.lines.get("acme", ())) == 2, 5.0, "two wait for it")
    await peer.connection.close(0.0)
    late = peer.begin()
    found = [await failure(call) for call in (sent, *in_line, late)]
    assert {each.code for each in found} == {Code.REPLICA_UNREACHABLE}
    assert [each.was_sent for each in found] == [True, False, False, False]


async def test_a_request_is_its_payers_on_the_way_to_another_front_and_the_agents_own_calls_are_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = Authority(tmp_path / "ca", "west", SystemClock().wall()).issue(Role.GATEWAY, "g1")
    tls = TlsFiles(files.certificate, files.key, files.authority)
    peers = PeerClients("west", tls, Authorities("west", tls))
    payers = list[tuple[str, str]]()

    class Recorder:
        async def call(self, path: str, _request: bytes, _timeout_s: Seconds, _metadata: object, payer: str) -> bytes:
            payers.append((path.rpartition("/")[2], payer))
            return b""

        def begin_call(self, _pending: object, path: str, *given: object) -> object:
            payers.append((path.rpartition("/")[2], str(given[-1])))
            return given

    async def open_connection(_endpoint: Endpoint, _request: bytes) -> Recorder:
        return Recorder()

    monkeypatch.setattr(peers, "_open_connection", open_connection)
    there = Endpoint("a-1", "n1", EndpointKind.AGENT, "127.0.0.1:1", 1.0, EndpointState.READY)
    context = CallContext("acme", "g1", "r-1", Seconds(5.0), payer="acme/till")
    connected = ConnectedPeer(peers, cast("_PeerConnection", Recorder()))
    connected.begin_infer(asyncio.get_running_loop().create_future(), there, b"x", context)
    await peers.infer(there, b"x", context)
    await peers.metadata(there, "reader", context)
    await peers.hand_over(there, "Take", b"", Seconds(5.0))
    await peers.call_verification_source(there, "Answer", b"", Seconds(5.0))
    assert payers == [
        ("ModelInfer", "acme/till"),
        ("ModelInfer", "acme/till"),
        ("ModelMetadata", "acme/till"),
        ("Take", ""),
        ("Answer", ""),
    ]
    await peers.close()


async def test_answers_of_another_front_wait_for_no_window(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ca", "west", SystemClock().wall()).issue(Role.GATEWAY, "g1")
    tls = TlsFiles(files.certificate, files.key, files.authority)
    peers = PeerClients("west", tls, Authorities("west", tls))
    connection = peers._connection(Endpoint("a-1", "n1", EndpointKind.AGENT, "127.0.0.1:1", 1.0, EndpointState.READY))
    assert [each._answer_window for each in (connection.data, connection.large)] == 2 * [ANSWER_WINDOW_BYTES]
    await peers.close()


async def test_many_gateways_of_another_region_are_connected_to_in_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """How many there are, and whether they answer, is for that region to say."""
    monkeypatch.setattr(upstream, "OPENING_TURN_S", 3600.0)  # so that only the end of connections begins a turn
    callers = list[asyncio.StreamWriter]()

    async def hold(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(writer)

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    west, evil = (Authority(tmp_path / name, name, SystemClock().wall()) for name in ("west", "evil"))
    files = west.issue(Role.GATEWAY, "g1")
    tls = TlsFiles(files.certificate, files.key, files.authority)
    authorities, names = Authorities("west", tls), tuple(f"g{number}" for number in range(20))
    authorities.configure((PeerTrust("evil", (evil.certificate.read_text(),), names, ("a-1",)),))
    peers = PeerClients("west", tls, authorities)
    peers.configure(
        Endpoint(f"a-1/{name}", name, EndpointKind.GATEWAY, address, 1.0, EndpointState.READY, "evil", "a-1")
        for name in names
    )
    try:
        at_once = upstream.OPENED_AT_ONCE
        await until(lambda: len(callers) >= 3 * at_once, 10.0, "each of the first has its three connections")
        assert len(peers._connections) == at_once
        while len(peers._connections) < len(names):
            for each in callers:
                each.close()
            callers.clear()
            await until(lambda: bool(callers), 10.0, "others are connected to")
    finally:
        await peers.close()
        server.close()
