"""What one connection may cost an HTTP port: time, bytes and places, each within its bound."""

import asyncio
import gc
import http.client
import socket
import ssl
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.clients.oip import read_response
from harness.crypto.pki import Authority
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.host.http_server import HttpExchange, HttpLimits, HttpServer
from shoal.types.device import Role

POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LIMITS = HttpLimits(connections=4, connections_per_address=3, handshake_s=0.2, head_s=0.2, stall_s=0.2, linger_s=0.2)
SOON_S = 5.0
"""Far beyond each limit, far below asyncio's own for a handshake (60 s)."""

Answer = Callable[[HttpExchange], Awaitable[None]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Port:
    server: HttpServer
    number: int
    client: ssl.SSLContext

    async def connect(self, sent: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.number, ssl=self.client, server_hostname="localhost"
        )
        writer.write(sent)
        return reader, writer

    async def ask(self, sent: bytes) -> tuple[int, bytes]:
        """Status and body."""
        reader, writer = await self.connect(sent)
        try:
            async with asyncio.timeout(SOON_S):
                response = await read_response(reader)
                return response.status, response.body
        finally:
            writer.transport.abort()


OpenPort = Callable[..., Awaitable[Port]]


@pytest.fixture
async def open_port(tmp_path: Path) -> AsyncIterator[OpenPort]:
    """A port that answers so."""
    files = Authority(tmp_path, "eu", SystemClock().wall()).issue(Role.COORDINATOR, "coordinator")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    servers = list[HttpServer]()

    async def start(answer: Answer, limits: HttpLimits = LIMITS) -> Port:
        server = HttpServer(answer, limits, lambda: context)
        servers.append(server)
        number = await server.start("127.0.0.1", 0)
        return Port(server, number, ssl.create_default_context(cafile=str(files.authority)))

    yield start
    for each in servers:
        await each.stop()


async def echo(exchange: HttpExchange) -> None:
    body = b"".join([part async for part in exchange.body()])
    await exchange.respond(200, {}, f"{exchange.method} {exchange.target} ".encode() + body)


async def is_ended(streams: Streams) -> bool:
    """The server closes, without a word."""
    async with asyncio.timeout(SOON_S):
        try:
            return not await streams[0].read()
        except ConnectionError:
            return True
        finally:
            streams[1].transport.abort()


async def test_one_request_and_its_answer(open_port: OpenPort) -> None:
    port = await open_port(echo)
    assert await port.ask(GET) == (200, b"GET / ")
    put = b"PUT /a?b HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
    reader, writer = await port.connect(put)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(b"abc")
    response = await read_response(reader)
    assert (response.status, response.body) == (200, b"PUT /a?b abc")
    assert await is_ended((reader, writer)), "one connection, one request"


@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\nx-header: "])
async def test_a15_a_head_that_does_not_come_ends_its_connection(open_port: OpenPort, sent: bytes) -> None:
    port = await open_port(echo)
    assert await is_ended(await port.connect(sent))


async def test_a15_a_handshake_that_does_not_come_ends_its_connection(open_port: OpenPort) -> None:
    port = await open_port(echo)
    assert await is_ended(await asyncio.open_connection("127.0.0.1", port.number))


async def test_a15_a_body_that_does_not_come_is_not_waited_for(open_port: OpenPort) -> None:
    failed = asyncio.get_running_loop().create_future()

    async def answer(exchange: HttpExchange) -> None:
        try:
            await echo(exchange)
        except TimeoutError:
            failed.set_result(None)
            raise

    port = await open_port(answer)
    streams = await port.connect(b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
    await asyncio.wait_for(failed, SOON_S)
    assert await is_ended(streams)


async def test_a15_who_does_not_read_its_answer_is_left(open_port: OpenPort) -> None:
    left = asyncio.get_running_loop().create_future()

    async def answer(exchange: HttpExchange) -> None:
        exchange.begin(200, {})
        try:
            while True:
                await exchange.write(bytes(2**20))
        except (TimeoutError, ConnectionError) as error:
            left.set_result(type(error))
            raise

    port = await open_port(answer)
    streams = await port.connect(GET)
    streams[1].transport.pause_reading()  # type: ignore[attr-defined]
    assert await asyncio.wait_for(left, SOON_S) is TimeoutError
    streams[1].transport.abort()


async def test_a_request_has_its_time_whatever_it_does_with_it(open_port: OpenPort) -> None:
    async def answer(exchange: HttpExchange) -> None:
        await asyncio.Event().wait()

    port = await open_port(answer, replace(LIMITS, total_s=0.2))
    assert await is_ended(await port.connect(GET))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400), (b"\x00\r\n\r\n", 400), (b"GET /" + b"x" * 2**16, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    ],
)  # fmt: skip
async def test_what_is_no_request_is_refused(open_port: OpenPort, sent: bytes, status: int) -> None:
    port = await open_port(echo)
    assert (await port.ask(sent))[0] == status


async def test_a_body_that_breaks_off_is_no_body(open_port: OpenPort) -> None:
    seen = asyncio.get_running_loop().create_future()

    async def answer(exchange: HttpExchange) -> None:
        try:
            await echo(exchange)
        except ConnectionError:
            seen.set_result(None)
            raise

    port = await open_port(answer)
    _, writer = await port.connect(b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
    writer.close()
    await asyncio.wait_for(seen, SOON_S)


async def test_an_answer_reaches_who_still_sends(open_port: OpenPort) -> None:
    """As agents do, who read nothing until they have sent all. Closing at once would reset the connection, and the
    answer with it; the body is more than the buffers between them hold."""

    async def answer(exchange: HttpExchange) -> None:
        await exchange.respond(403, {}, b"no")

    def ask() -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("localhost", port.number, context=port.client, timeout=SOON_S)
        with closing(connection):
            connection.request("PUT", "/", bytes(32 * 2**20))
            response = connection.getresponse()
            return response.status, response.read()

    port = await open_port(answer, replace(LIMITS, linger_s=SOON_S))
    assert await asyncio.to_thread(ask) == (403, b"no")


async def test_an_error_of_ours_is_an_answer(open_port: OpenPort) -> None:
    async def answer(exchange: HttpExchange) -> None:
        raise KeyError("secret")

    port = await open_port(answer)
    assert await port.ask(GET) == (500, b"")


async def test_a16_silent_connections_make_room_and_busy_ones_stay(open_port: OpenPort) -> None:
    going_on = asyncio.Event()
    entered = list[str]()

    async def answer(exchange: HttpExchange) -> None:
        entered.append(exchange.target)
        await going_on.wait()
        await exchange.respond(200, {})

    port = await open_port(answer, replace(LIMITS, handshake_s=SOON_S))
    silent = [await asyncio.open_connection("127.0.0.1", port.number) for _ in range(LIMITS.connections_per_address)]
    busy = [await port.connect(GET) for _ in range(LIMITS.connections_per_address)]
    await until(lambda: len(entered) == len(busy), SOON_S, "as many requests as an address may have connections")
    assert all([await is_ended(each) for each in silent])
    with pytest.raises(OSError):  # before TLS
        await port.connect(GET)
    going_on.set()
    for reader, writer in busy:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.abort()


async def test_stop_ends_what_is_open(open_port: OpenPort) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(exchange: HttpExchange) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    port = await open_port(answer)
    streams = await port.connect(GET)
    await asyncio.wait_for(started.wait(), SOON_S)
    await port.server.stop()
    assert cancelled.is_set()
    assert await is_ended(streams)


async def test_nothing_more_is_written_to_a_client_that_is_gone(
    open_port: OpenPort, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes that never wait give the loop no turn to tell that the connection ended; asyncio complains of each."""
    clients: list[ssl.SSLSocket] = []
    is_over, written = asyncio.Event(), 0

    async def stream(exchange: HttpExchange) -> None:
        nonlocal written
        exchange.begin(200, {})
        clients[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        clients[0].close()
        try:
            for _ in range(20):
                await exchange.write(b"x")
                written += 1
        finally:
            is_over.set()

    port = await open_port(stream)

    def ask() -> None:
        raw = socket.create_connection(("127.0.0.1", port.number))
        clients.append(port.client.wrap_socket(raw, server_hostname="localhost"))
        clients[0].sendall(GET)

    await asyncio.to_thread(ask)
    async with asyncio.timeout(SOON_S):
        await is_over.wait()
    assert written < 3
    assert "raised exception" not in caplog.text


@pytest.mark.parametrize("does", ["write", "wait", "read", "catch"])
async def test_a_connection_that_ends_by_a_reset_leaves_nothing_that_only_a_search_frees(
    open_port: OpenPort, does: str
) -> None:
    """A coordinator searches what is old seldom, and a connection holds up to 490 KB."""
    served: list[weakref.ref[object]] = []

    async def stream(exchange: HttpExchange) -> None:
        served.extend(map(weakref.ref, (exchange, exchange._reader, exchange._writer)))
        if does == "read":
            async for _ in exchange.body():
                pass
        exchange.begin(200, {})
        with suppress(ConnectionError) if does == "catch" else nullcontext():
            while True:
                if does == "wait":
                    await until(lambda: exchange.is_closed, SOON_S, "the reset")
                await exchange.write(b"x")

    port = await open_port(stream)
    gc.collect()
    gc.disable()
    try:
        _, writer = await port.connect(POST if does == "read" else GET)
        await until(lambda: bool(served), SOON_S, "the request")
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await until(lambda: not any(each() for each in served), SOON_S, "what the connection held to be freed")
    finally:
        gc.enable()
