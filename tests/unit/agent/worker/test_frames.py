"""Frames between an agent's processes: calls, refusals, cancellation, and peers that break the rules."""

import asyncio
import gc
import socket
import struct
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.compiled import interpreted_frames
from harness.wait import until
from shoal.agent.frames import MAX_HEADER, ConnectionLost, FrameClient, FrameMessage, FrameServer, InferCall
from shoal.agent.frames.format import KEPT_BYTES, FrameType
from shoal.types.codes import Code, ShoalError, refuse

NONCE = "a" * 32
WAIT = b'{"kind":"wait","name":"x"}'
HELLO = struct.pack("!HBxIIQ", 0x5347, 1, 44, 0, 0) + b'{"nonce":"%s"}' % NONCE.encode()


class Echo:
    """Handlers that record what reached them."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.running = 0
        self.gate = asyncio.Event()
        self.held: dict[str, InferCall] = {}

    async def echo(self, message: FrameMessage) -> FrameMessage:
        return FrameMessage("echoed", message.header, message.payload)

    async def deny(self, message: FrameMessage) -> FrameMessage:
        raise refuse(Code.OVERLOADED, "full", "room", "retry")

    async def wait(self, message: FrameMessage) -> FrameMessage:
        self.running += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(str(message.header["name"]))
            raise
        return FrameMessage("waited", message.header)

    def on_infer(self, call: InferCall) -> None:
        """By assignment: echoes at once, refuses, fails, or waits for the gate."""
        match call.header.assignment:
            case "echo":
                call.answer(
                    (memoryview(call.payload)[:1], call.payload[1:]), {"stages": 1} if call.header.trace else None
                )
            case "deny":
                raise refuse(Code.OVERLOADED, "full", "room", "retry")
            case "fail":
                raise RuntimeError("a defect")
            case name:
                self.held[name] = call
                call.on_cancel = partial(self.cancelled.append, name)


@pytest.fixture
async def frame_server(tmp_path: Path) -> AsyncIterator[tuple[Path, Echo, FrameServer]]:
    echo = Echo()
    path = tmp_path / "s.sock"
    handlers = {"echo": echo.echo, "deny": echo.deny, "wait": echo.wait}
    server = FrameServer(path, NONCE, handlers, on_infer=echo.on_infer, max_payload=1_000_000)
    await server.start()
    yield path, echo, server
    await server.close()
    assert not path.exists()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed because nothing refers to it."""
    gc.disable()
    yield
    gc.enable()


class Owner:
    """As a supervisor's worker: it holds a client that pushes to it."""

    def __init__(self) -> None:
        self.client: FrameClient | None = None

    def on_push(self, message: FrameMessage) -> None:
        """Never called."""


async def test_calls_carry_header_and_payload(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    path, _, server = frame_server
    assert path.stat().st_mode & 0o777 == 0o600
    client = await FrameClient.connect(path, NONCE)
    payloads = [bytes([n]) * (n * 997) for n in range(200)]
    replies = await asyncio.gather(*(client.call("echo", p, header={"n": n}) for n, p in enumerate(payloads)))
    assert [r.payload for r in replies] == payloads
    assert [r.header["n"] for r in replies] == list(range(200))
    assert server.connections == 1
    await client.close()
    await until(lambda: server.connections == 0, 5, "disconnected")
    assert server.empty_since is not None


async def test_large_frames_stay_whole_and_small_ones_pass_no_other(
    frame_server: tuple[Path, Echo, FrameServer],
) -> None:
    path, _, _ = frame_server
    client = await FrameClient.connect(path, NONCE)
    payloads = [bytes([n]) * (999_000 if n % 3 else n) for n in range(30)]
    replies = await asyncio.gather(*(client.call("echo", each, header={"n": n}) for n, each in enumerate(payloads)))
    assert [(r.header["n"], r.payload) for r in replies] == list(enumerate(payloads))
    calls = [asyncio.create_task(client.call("echo", payloads[1])) for _ in range(8)]
    await asyncio.sleep(0)  # noqa: TID251 - all are queued, the first is on its way
    for each in calls[::2]:
        each.cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended[::2])
    assert all(isinstance(each, FrameMessage) and each.payload == payloads[1] for each in ended[1::2])
    assert (await client.call("echo", b"still well")).payload == b"still well"
    await client.close()


async def test_a_client_that_goes_ends_what_is_queued(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    path, _, server = frame_server
    client = await FrameClient.connect(path, NONCE)
    calls = [asyncio.create_task(client.call("echo", bytes(999_000))) for _ in range(8)]
    await asyncio.sleep(0)  # noqa: TID251 - all are queued
    await client.close()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, ConnectionLost) for each in ended)
    await until(lambda: server.connections == 0, 5, "disconnected")


@pytest.mark.parametrize("kind", ["call", "infer"])
async def test_a57_large_payloads_are_held_once_on_each_side(tmp_path: Path, kind: str) -> None:
    """Request and answer of 32 MiB: each is held where it was read, and nowhere else. Three copies more, before."""
    size = 32 * 2**20
    echo = Echo()
    server = FrameServer(tmp_path / "s.sock", NONCE, {"echo": echo.echo}, on_infer=echo.on_infer)
    await server.start()
    client = await FrameClient.connect(tmp_path / "s.sock", NONCE)
    request = bytes(size)
    tracemalloc.start()
    try:
        if kind == "call":
            assert len((await client.call("echo", request)).payload) == size
        else:
            answer = asyncio.create_task(client.infer("held", request, remaining_s=60.0))
            await until(lambda: "held" in echo.held, 5, "held")
            echo.held["held"].answer((echo.held["held"].payload,))
            assert len((await answer).payload) == size
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        await client.close()
        await server.close()
    assert most < 2.5 * size, f"{most / size:.1f} times the payload"


async def test_refusals_come_back_as_errors(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    client = await FrameClient.connect(frame_server[0], NONCE)
    with pytest.raises(ShoalError) as denied:
        await client.call("deny")
    assert (denied.value.refusal.code, denied.value.refusal.remedy) == (Code.OVERLOADED, "retry")
    with pytest.raises(ShoalError) as unknown:
        await client.call("nothing")
    assert unknown.value.code is Code.UNIMPLEMENTED
    with pytest.raises(ShoalError) as large:
        await client.call("echo", bytes(1_000_001))
    assert large.value.code is Code.TOO_LARGE
    with pytest.raises(ShoalError) as header:
        await client.call("echo", header={"x": "y" * MAX_HEADER})
    assert header.value.code is Code.TOO_LARGE
    assert (await client.call("echo", b"still well")).payload == b"still well"
    await client.close()


async def test_wrong_nonce_is_refused(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    with pytest.raises(ShoalError) as error:
        await FrameClient.connect(frame_server[0], "b" * 32)
    assert error.value.code is Code.UNAUTHENTICATED
    with pytest.raises(ConnectionLost):
        await FrameClient.connect(frame_server[0], NONCE, peer_pid=1)
    with pytest.raises(ConnectionLost):
        await FrameClient.connect(frame_server[0].with_name("absent"), NONCE)


async def test_timeouts_and_cancellation_reach_the_handler(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    path, echo, _ = frame_server
    client = await FrameClient.connect(path, NONCE)
    with pytest.raises(ShoalError) as late:
        await client.call("wait", header={"name": "late"}, timeout=0.05)
    assert late.value.code is Code.DEADLINE_EXCEEDED
    task = asyncio.create_task(client.call("wait", header={"name": "dropped"}))
    await until(lambda: echo.running == 2, 5, "seen by the handler")
    task.cancel()
    await until(lambda: echo.cancelled == ["late", "dropped"], 5, "seen by the handler")
    other = asyncio.create_task(client.call("wait", header={"name": "gone"}))
    await until(lambda: echo.running == 3, 5, "seen by the handler")
    await client.close()
    with pytest.raises(ConnectionLost):
        await other
    await until(lambda: echo.cancelled[-1] == "gone", 5, "seen by the handler")


async def test_infer_calls_carry_payloads_of_every_size(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    path, _, _ = frame_server
    client = await FrameClient.connect(path, NONCE)
    payloads = [bytes([n]) * (n * 9973) for n in range(1, 100)]
    answers = await asyncio.gather(*(client.infer("echo", each, remaining_s=5.0) for each in payloads))
    assert [each.payload for each in answers] == payloads
    assert answers[0].header == {}
    assert (await client.infer("echo", b"x", remaining_s=5.0, trace="00-1-2-01")).header == {"stages": 1}
    for name, code in (("deny", Code.OVERLOADED), ("fail", Code.INTERNAL)):
        with pytest.raises(ShoalError) as refused:
            await client.infer(name, b"x", remaining_s=5.0)
        assert refused.value.code is code
    with pytest.raises(ShoalError) as large:
        await client.infer("echo", bytes(1_000_001), remaining_s=5.0)
    assert large.value.code is Code.TOO_LARGE
    await client.close()


async def test_an_infer_call_is_cancelled_once_and_answered_once(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    path, echo, _ = frame_server
    client = await FrameClient.connect(path, NONCE)
    with pytest.raises(ShoalError) as late:
        await client.infer("late", b"x", remaining_s=0.05)
    assert late.value.code is Code.DEADLINE_EXCEEDED
    dropped = asyncio.create_task(client.infer("dropped", b"x", remaining_s=5.0))
    await until(lambda: "dropped" in echo.held, 5, "seen")
    dropped.cancel()
    await until(lambda: echo.cancelled == ["late", "dropped"], 5, "cancelled at the server")
    echo.held["late"].answer((b"too late",))
    answered = asyncio.create_task(client.infer("answered", b"x", remaining_s=5.0))
    await until(lambda: "answered" in echo.held, 5, "seen")
    echo.held["answered"].answer((b"one",))
    echo.held["answered"].answer((b"two",))
    echo.held["answered"].refuse(late.value.refusal)
    assert (await answered).payload == b"one"
    gone = asyncio.create_task(client.infer("gone", b"x", remaining_s=5.0))
    await until(lambda: "gone" in echo.held, 5, "seen")
    await client.close()
    with pytest.raises(ConnectionLost):
        await gone
    await until(lambda: echo.cancelled == ["late", "dropped", "gone"], 5, "cancelled at the server")
    echo.held["gone"].answer((b"to nobody",))


@pytest.mark.parametrize("kind", [FrameType.ANSWER, FrameType.REPLY, FrameType.CANCEL, FrameType.WELCOME])
async def test_a_server_that_answers_otherwise_than_it_was_asked_is_left(
    frame_server: tuple[Path, Echo, FrameServer], kind: FrameType
) -> None:
    path, echo, server = frame_server
    client = await FrameClient.connect(path, NONCE)
    infer = asyncio.create_task(client.infer("held", b"x", remaining_s=60.0))
    call = asyncio.create_task(client.call("wait", header={"name": "x"}))
    await until(lambda: echo.held and echo.running, 5, "both seen")
    (number,) = (each for each in client._calls if (each % 2 == 0) is (kind is FrameType.ANSWER))
    (connection,) = server._open
    connection.send_json(kind, number, {})
    ended = await asyncio.gather(infer, call, return_exceptions=True)
    assert all(isinstance(each, ConnectionLost) and "FrameError" in each.refusal.found for each in ended)
    assert client.is_closed


@interpreted_frames
async def test_a_peer_that_reads_nothing_gets_no_more_calls_taken(
    frame_server: tuple[Path, Echo, FrameServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers wait, up to a limit; beyond it its calls wait unread. When it reads, all are answered."""
    path, echo, _ = frame_server
    monkeypatch.setattr("shoal.agent.frames.server.MAX_PAYLOAD", 2_000_000)
    client = await FrameClient.connect(path, NONCE)
    transport = client._transport
    assert transport is not None
    transport.pause_reading()
    calls = [asyncio.create_task(client.infer(f"n{n}", bytes(10), remaining_s=60.0)) for n in range(12)]
    await until(lambda: len(echo.held) == 12, 5, "held")
    for n in range(12):
        echo.held[f"n{n}"].answer((bytes(500_000),))
    more = [asyncio.create_task(client.infer("echo", b"more", remaining_s=60.0)) for _ in range(3)]
    last = asyncio.create_task(client.infer("last", b"", remaining_s=60.0))
    other = await FrameClient.connect(path, NONCE)
    assert (await other.infer("echo", b"others are served", remaining_s=5.0)).payload
    assert "last" not in echo.held
    transport.resume_reading()
    assert [len((await each).payload) for each in calls] == 12 * [500_000]
    assert [(await each).payload for each in more] == 3 * [b"more"]
    await until(lambda: "last" in echo.held, 5, "taken")
    echo.held["last"].answer(())
    assert (await last).payload == b""
    await client.close()
    await other.close()


async def test_what_the_kernel_does_not_take_leaves_in_order(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    """A peer that stops reading for a while gets each frame whole, but for one that was withdrawn before a byte of it
    had left."""
    path, echo, server = frame_server
    client = await FrameClient.connect(path, NONCE)
    await until(lambda: server.connections == 1, 5, "connected")
    (connection,) = server._open
    assert connection._transport is not None
    connection._transport.pause_reading()
    sizes = [700_001, 3, 40_000, 32_768, 999_000, 1, 500_000, 33_000, 65, 900_000, 120_000, 2_000]
    payloads = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    calls = [asyncio.create_task(client.infer("echo", each, remaining_s=60.0)) for each in payloads]
    withdrawn = asyncio.create_task(client.infer("withdrawn", bytes(200_000), remaining_s=60.0))
    await until(lambda: client._is_blocked, 5, "the kernel is full")
    assert client._queue[0].is_begun
    waiting = client.waiting_bytes
    withdrawn.cancel()
    await asyncio.wait((withdrawn,))
    assert waiting - 210_000 < client.waiting_bytes < waiting - 200_000
    connection._transport.resume_reading()
    assert [bytes((await each).payload) == payload for each, payload in zip(calls, payloads, strict=True)] == 12 * [
        True
    ]
    assert "withdrawn" not in echo.held
    assert client.waiting_bytes == 0
    await client.close()


async def test_pushes_reach_every_client(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    path, _, server = frame_server
    got: list[FrameMessage] = []
    clients = [await FrameClient.connect(path, NONCE, on_push=got.append) for _ in range(2)]
    await until(lambda: server.connections == 2, 5, "both connected")
    server.push("phase", b"x", header={"phase": "warming"})
    await until(lambda: len(got) == 2, 5, "pushed")
    assert got[0] == FrameMessage("phase", {"phase": "warming"}, b"x")
    for client in clients:
        await client.close()


async def test_server_gone_ends_calls(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    path, echo, server = frame_server
    client = await FrameClient.connect(path, NONCE)
    call = asyncio.create_task(client.call("wait", header={"name": "x"}))
    await until(lambda: echo.running == 1, 5, "seen by the handler")
    await server.close()
    with pytest.raises(ConnectionLost):
        await call
    await client.wait_closed()
    with pytest.raises(ConnectionLost):
        await client.call("echo")


@interpreted_frames
@pytest.mark.usefixtures("no_collector")
async def test_a_client_whose_server_is_gone_waits_for_no_collector(
    frame_server: tuple[Path, Echo, FrameServer],
) -> None:
    """A supervisor runs for weeks, and its collector looks for cycles of what lived long after hundreds of faults."""
    path, echo, server = frame_server
    owner = Owner()
    owner.client = client = await FrameClient.connect(path, NONCE, on_push=owner.on_push)
    calls: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(client.call("wait", header={"name": "x"})),
        asyncio.ensure_future(client.infer("held", b"", 5.0)),
    ]
    await until(lambda: echo.running == 1 and "held" in echo.held, 5, "seen by the handlers")
    await server.close()
    assert all(isinstance(each, ConnectionLost) for each in await asyncio.gather(*calls, return_exceptions=True))
    await client.wait_closed()
    gone = weakref.ref(owner), weakref.ref(client)
    del owner, client
    calls.clear()
    await until(lambda: [each() for each in gone] == [None, None], 5, "freed")


@interpreted_frames
@pytest.mark.usefixtures("no_collector")
async def test_a_client_that_found_no_server_waits_for_no_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor tries for as long as a process starts."""
    made = list[weakref.ref[FrameClient]]()
    begin = FrameClient.__init__

    def count(client: FrameClient, *arguments: Any) -> None:
        made.append(weakref.ref(client))
        begin(client, *arguments)

    monkeypatch.setattr(FrameClient, "__init__", count)
    for _ in range(3):
        with suppress(ConnectionLost):
            await FrameClient.connect(tmp_path / "none.sock", NONCE)
    await until(lambda: [each() for each in made] == [None, None, None], 5, "freed")


async def test_a_connection_that_is_over_holds_no_buffer(frame_server: tuple[Path, Echo, FrameServer]) -> None:
    path, _, server = frame_server
    tracemalloc.start()
    try:
        clients = [await FrameClient.connect(path, NONCE) for _ in range(4)]
        assert tracemalloc.get_traced_memory()[0] > len(clients) * KEPT_BYTES
        await server.close()
        for client in clients:
            await client.wait_closed()
        await until(lambda: tracemalloc.get_traced_memory()[0] < KEPT_BYTES, 5, "freed")
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
        struct.pack("!HBxIIQ", 0x5347, 1, 2**31, 0, 0),
        struct.pack("!HBxIIQ", 0x5347, 99, 2, 0, 0) + b"{}",
        struct.pack("!HBxIIQ", 0x5347, 1, 2, 0, 0) + b"[]",
        struct.pack("!HBxIIQ", 0x5347, 1, 60000, 0, 0) + b"[" * 60000,
        struct.pack("!HBxIIQ", 0x5347, 3, 15, 0, 7) + b'{"kind":"echo"}',
        struct.pack("!HBxIIQ", 0x5347, 8, 14, 0, 7) + bytes(14),
        HELLO + struct.pack("!HBxIIQ", 0x5347, 8, 15, 0, 7) + bytes(15),
        HELLO + struct.pack("!HBxIIQ", 0x5347, 9, 0, 0, 7),
        HELLO + 2 * (struct.pack("!HBxIIQ", 0x5347, 3, len(WAIT), 0, 7) + WAIT),
        HELLO + struct.pack("!HBxIIQ", 0x5346, 3, 15, 0, 7) + b'{"kind":"echo"}',
    ],
    ids=[
        "http",
        "header-2GiB",
        "sort",
        "list",
        "deep",
        "no-hello",
        "infer-no-hello",
        "infer-header",
        "answer",
        "twice",
        "other-version",
    ],
)
async def test_junk_ends_only_its_own_connection(frame_server: tuple[Path, Echo, FrameServer], junk: bytes) -> None:
    path, _, _ = frame_server
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    await loop.sock_connect(sock, str(path))
    await loop.sock_sendall(sock, junk)
    async with asyncio.timeout(5):
        while True:
            try:
                if not await loop.sock_recv(sock, 4096):
                    break
            except ConnectionResetError:
                break
    sock.close()
    client = await FrameClient.connect(path, NONCE)
    assert (await client.call("echo", b"fine")).payload == b"fine"
    await client.close()


async def test_paths_longer_than_the_kernel_takes(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    server = FrameServer(folder / "worker.sock", NONCE, {"echo": Echo().echo})
    await server.start()
    client = await FrameClient.connect(folder / "worker.sock", NONCE)
    assert (await client.call("echo", b"long")).payload == b"long"
    await client.close()
    await server.close()
