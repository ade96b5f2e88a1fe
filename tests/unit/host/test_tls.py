"""A TLS connection over memory: what arrives at once reaches the protocol whole and in order."""

import asyncio
import hashlib
import ssl
from pathlib import Path

import numpy as np
import pytest

from harness.crypto.pki import Authority
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.host.connection_turns import PAUSE_S, TURN_S, WAITING_BYTES, ConnectionTurns
from shoal.host.tls import TlsConnection, TlsTransport, client_context
from shoal.types.device import Role


class Recorder(asyncio.Protocol):
    """Notes what it gets."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.is_lost = False

    def data_received(self, data: bytes | memoryview) -> None:
        self.taken.append(bytes(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class Wire(asyncio.Transport):
    """Keeps what is written until it is carried to the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_closed = False
        self.is_read = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


class Side:
    """One end of the connection."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        self.recorder, self.wire, self.failures = Recorder(), Wire(), list[OSError]()
        self.connection = TlsConnection(
            context, lambda _: self.recorder, self.failures.append, handshake_s=5.0, server_name=server_name
        )
        self.connection._turns = ConnectionTurns(asyncio.get_running_loop(), lambda: 0.0)  # which never end

    def carry_to(self, other: "Side") -> None:
        """All that was sent, as the loop would bring it: in the connection's buffer."""
        sent, self.wire.sent = self.wire.sent, bytearray()
        while sent:
            place = other.connection.get_buffer(-1)
            size = min(len(place), len(sent))
            place[:size] = sent[:size]
            del sent[:size]
            other.connection.buffer_updated(size)


@pytest.fixture
async def sides(tmp_path: Path) -> tuple[Side, Side]:
    """Client and server, after the handshake."""
    authority = Authority(tmp_path, "eu", SystemClock().wall())
    files = authority.issue(Role.AGENT, "edge-1")
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(files.certificate, files.key)
    calling = client_context(files.authority, files.certificate, files.key)
    calling.check_hostname = False
    client, server = Side(calling, "edge-1"), Side(listening, None)
    server.connection.connection_made(server.wire)
    client.connection.connection_made(client.wire)
    for _ in range(4):
        client.carry_to(server)
        server.carry_to(client)
    assert (client.failures, server.failures) == ([], [])
    return client, server


@pytest.mark.parametrize("size", [1, 2**14, 2**14 + 1, 2**18 - 1, 2**18, 2**20 + 17])
async def test_what_arrives_reaches_the_protocol_whole(sides: tuple[Side, Side], size: int) -> None:
    client, server = sides
    sent = np.random.default_rng(size).bytes(size)
    client.connection.write(sent)
    client.carry_to(server)
    received = b"".join(server.recorder.taken)
    assert hashlib.sha256(received).digest() == hashlib.sha256(sent).digest()


async def test_what_arrives_byte_by_byte(sides: tuple[Side, Side]) -> None:
    client, server = sides
    client.connection.write(b"a" * 300)
    for each in bytes(client.wire.sent):
        server.connection.receive(bytes((each,)))
    assert b"".join(server.recorder.taken) == b"a" * 300


async def test_data_before_a_broken_record_is_not_passed_on(sides: tuple[Side, Side]) -> None:
    """It came with what shows that somebody writes to the connection who is not the client."""
    client, server = sides
    client.connection.write(b"good")
    client.wire.sent += b"\x17\x03\x03\x00\x20" + bytes(32)
    client.carry_to(server)
    assert server.recorder.taken == []
    assert server.wire.is_closed


async def test_a_protocol_that_ends_within_a_large_arrival_gets_no_more(sides: tuple[Side, Side]) -> None:
    client, server = sides
    taken: list[int] = []

    def end(data: memoryview) -> None:
        taken.append(len(data))
        server.connection.close()

    server.connection._on_data = end
    client.connection.write(bytes(2**20))
    server.connection.receive(bytes(client.wire.sent))
    assert len(taken) == 1


class Turns:
    """Of a server's side, over as soon as one event was handled."""

    def __init__(self, side: Side) -> None:
        self.now = 100.0
        self.turns = ConnectionTurns(asyncio.get_running_loop(), lambda: self.now)
        side.connection._turns = self.turns
        assert self.turns.begin_event()
        self.now += 2 * TURN_S
        self.turns.end_event()

    def pause(self) -> None:
        """Something else has the loop."""
        self.now += PAUSE_S

    async def until_next(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, None)
        await turn


async def test_what_arrives_when_the_turn_is_over_is_handled_in_the_next(sides: tuple[Side, Side]) -> None:
    client, server = sides
    turns = Turns(server)
    client.connection.write(b"a")
    client.carry_to(server)
    assert (server.recorder.taken, server.wire.is_read) == ([], True)
    client.connection.write(b"b")
    client.carry_to(server)
    assert (server.recorder.taken, server.wire.is_read) == ([], False), "it may hold a little, and no more"
    await turns.until_next()
    assert (server.recorder.taken, server.wire.is_read) == ([b"ab"], True)


async def test_what_answers_a_call_of_ones_own_does_not_wait(sides: tuple[Side, Side]) -> None:
    """By answers in time it is judged whether a peer lives, and an answer is not lost with its connection."""
    client, server = sides
    Turns(client)
    server.connection.write(b"pong")
    server.carry_to(client)
    client.connection.connection_lost(ConnectionResetError())
    assert client.recorder.taken == [b"pong"]


async def test_the_more_connections_wait_the_less_is_read(sides: tuple[Side, Side]) -> None:
    _, server = sides
    turns = Turns(server)
    before = len(server.connection.get_buffer(-1))
    for _ in range(4096):
        turns.turns.wait(lambda: None)
    assert len(server.connection.get_buffer(-1)) * 4096 <= WAITING_BYTES
    await turns.until_next()
    assert len(server.connection.get_buffer(-1)) == before


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_what_a_peer_sent_before_its_end_is_handled(sides: tuple[Side, Side], is_waiting: bool) -> None:
    client, server = sides
    turns = Turns(server)
    if not is_waiting:
        turns.pause()
    client.connection.write(b"last")
    client.carry_to(server)
    stays_open = server.connection.eof_received()
    assert stays_open is is_waiting
    await turns.until_next()
    assert server.recorder.taken == [b"last"]
    assert server.wire.is_closed is is_waiting, "else the event loop closes it"


async def test_a_protocol_that_wants_nothing_more_gets_nothing_more_after_its_turn(sides: tuple[Side, Side]) -> None:
    client, server = sides
    turns, above = Turns(server), TlsTransport(server.connection)
    for each in (b"a", b"b"):
        client.connection.write(each)
        client.carry_to(server)
    above.resume_reading()
    assert not server.wire.is_read, "it has not had its turn"
    above.pause_reading()
    await turns.until_next()
    assert (server.recorder.taken, server.wire.is_read) == ([b"ab"], False)
    above.resume_reading()
    assert server.wire.is_read


async def test_a_connection_that_ends_before_its_turn_gets_none(sides: tuple[Side, Side]) -> None:
    client, server = sides
    turns = Turns(server)
    client.connection.write(b"a")
    client.carry_to(server)
    server.connection.connection_lost(None)
    await turns.until_next()
    assert server.recorder.taken == []
    assert server.recorder.is_lost


async def test_a_connection_that_was_closed_beneath_before_its_turn_gets_none(sides: tuple[Side, Side]) -> None:
    client, server = sides
    turns = Turns(server)
    client.connection.write(b"a")
    client.carry_to(server)
    server.wire.abort()
    await turns.until_next()
    assert server.recorder.taken == []


async def test_a_connection_whose_protocol_fails_in_its_turn_is_closed(sides: tuple[Side, Side]) -> None:
    client, server = sides
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))

    def fail(_: memoryview) -> None:
        raise ValueError("broken")

    turns = Turns(server)
    server.connection._on_data = fail
    client.connection.write(b"a")
    client.carry_to(server)
    await turns.until_next()
    assert errors == ["broken"]
    assert server.wire.is_closed


async def test_the_time_of_a_handshake_begins_with_its_connection() -> None:
    """An event loop may make the protocol first: of a connection that does not come about nobody awaits the failure."""
    failures, wire, later = list[OSError](), Wire(), asyncio.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    connection = TlsConnection(context, lambda _: None, failures.append, handshake_s=0.01)
    asyncio.get_running_loop().call_later(0.05, later.set)
    await later.wait()
    assert failures == []
    connection.connection_made(wire)
    await until(lambda: failures, 5.0, "the end of the handshake")
    assert isinstance(failures[0], TimeoutError)
    assert wire.is_closed
