"""Requests of a gRPC server that arrive behind their headers, or wait for a place: without a task, for a while."""

import asyncio
from typing import Any, cast

import pytest

from harness.fakes.wire import Wire
from harness.wait import until
from shoal.host import grpc_server as module
from shoal.host.grpc_server import GrpcServerLimits, ServerCall, ServerMethod
from shoal.http2 import frames
from shoal.http2.grpc_messages import frame_message
from shoal.http2.header_blocks import encode

MESSAGE = bytes(range(256)) * 400
"""More than one window."""
BLOCK = encode(
    ((b":method", b"POST"), (b":scheme", b"https"), (b":path", b"/s/M"), (b"content-type", b"application/grpc"))
)


class Place:
    def __init__(self, *, is_waiting: bool) -> None:
        self.is_waiting = is_waiting
        self.has_left = False

    def leave(self) -> None:
        assert not self.has_left
        self.has_left = True


class Port:
    """A server and one client's connection. What a task answers is `task`, what is answered without one `now`."""

    def __init__(self, place: Place | None) -> None:
        self.place = place
        self.calls: list[ServerCall] = []
        self.tasks = 0
        method = ServerMethod(self._answer, answer_now=self._answer_now, begin_read=self._begin_read)
        self.limits = limits = GrpcServerLimits(
            streams=8, message_bytes=2**20, handshake_s=60.0, ping_interval_s=60.0, ping_timeout_s=60.0
        )
        self.wire = Wire()
        self.session = self.wire.session(method, limits)
        self.wire.sent.clear()

    def open(self) -> None:
        """The headers of a call."""
        self.session.data_received(frames.headers(1, BLOCK, 2**14, end_stream=False))

    def send(self, data: bytes, *, is_end: bool) -> None:
        pieces = [data[at : at + 2**14] for at in range(0, len(data), 2**14)]
        for piece in pieces:
            flags = frames.END_STREAM if is_end and piece is pieces[-1] else 0
            self.session.data_received(frames.head(len(piece), frames.DATA, flags, 1) + piece)

    async def _answer(self, call: ServerCall) -> bytes:
        self.tasks += 1
        assert await call.read(2**20) == MESSAGE
        return b"task"

    def _answer_now(self, call: ServerCall, message: bytes) -> bool:
        assert message == MESSAGE
        call.complete(b"now")
        return True

    def _begin_read(self, call: ServerCall, size: int) -> Place | None:
        assert size == len(MESSAGE)
        self.calls.append(call)
        return self.place


async def test_a_request_that_follows_its_headers_needs_no_task() -> None:
    port = Port(Place(is_waiting=False))
    port.open()
    framed = frame_message(MESSAGE)
    port.send(framed[:60_000], is_end=False)
    await until(lambda: port.wire.window_updates() > 0, 5.0, "a wider window")
    port.send(framed[60_000:], is_end=True)
    await until(lambda: b"now" in port.wire.sent, 5.0, "the answer")
    assert port.place is not None
    assert port.place.has_left
    assert port.tasks == 0


async def test_a_call_whose_request_does_not_follow_gets_a_task() -> None:
    """Within twice the time that it is waited for: it may be refused before its request arrives."""
    port = Port(Place(is_waiting=False))
    loop = asyncio.get_running_loop()
    began = loop.time()
    port.open()
    assert port.tasks == 0
    await until(lambda: port.tasks == 1, 5.0, "a task")
    assert loop.time() - began >= module.DATA_WAIT_S
    port.send(frame_message(MESSAGE)[:60_000], is_end=False)
    await until(lambda: port.wire.window_updates() > 0, 5.0, "a wider window")
    port.send(frame_message(MESSAGE)[60_000:], is_end=True)
    await until(lambda: b"task" in port.wire.sent, 5.0, "the answer")
    assert not port.calls, "a task reads it"


async def test_a_call_that_ends_before_its_request_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DATA_WAIT_S", 0.001)
    port = Port(None)
    port.open()
    port.session.data_received(frames.rst_stream(1, 8))
    await until(lambda: port.session._data_timer is None, 5.0, "nothing that is waited for")
    assert not port.tasks
    assert not port.session._awaited_longer


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_request_waits_for_its_place_within_one_window(is_ready: bool) -> None:
    place = Place(is_waiting=True)
    port = Port(place)
    port.open()
    port.send(frame_message(MESSAGE)[:60_000], is_end=False)
    await until(lambda: port.session._data_timer is None, 5.0, "nothing that is waited for")
    assert port.tasks == 0
    assert port.wire.window_updates() == 0, "its caller can send no more"
    (call,) = port.calls
    place.is_waiting = False
    call.on_turn(is_ready=is_ready)
    await until(lambda: port.wire.window_updates() > 0, 5.0, "a wider window")
    port.send(frame_message(MESSAGE)[60_000:], is_end=True)
    await until(lambda: (b"now" if is_ready else b"task") in port.wire.sent, 5.0, "the answer")
    assert place.has_left
    assert port.tasks == (not is_ready)


async def test_a_request_that_is_withdrawn_leaves_its_place() -> None:
    place = Place(is_waiting=True)
    port = Port(place)
    port.open()
    port.send(frame_message(MESSAGE)[:60_000], is_end=False)
    port.session.data_received(frames.rst_stream(1, 8))
    assert place.has_left
    (call,) = port.calls
    call.on_turn(is_ready=True)  # it was on its way
    assert port.wire.window_updates() == 0
    assert not port.tasks
    assert not cast(Any, port.session.connection).streams


async def test_a_stream_tells_whether_its_next_message_has_begun() -> None:
    calls, taken = list[ServerCall](), list[bytes]()

    async def answer(call: ServerCall) -> None:
        calls.append(call)
        while (message := await call.read(2**20)) is not None:
            taken.append(message)

    port = Port(None)
    port.session = port.wire.session(ServerMethod(answer), port.limits)
    port.open()
    await until(lambda: bool(calls), 5.0, "the call")
    assert not calls[0].has_begun
    framed = frame_message(MESSAGE[:1000])
    port.send(framed[:3], is_end=False)
    assert calls[0].has_begun, "not even its length is known"
    port.send(framed[3:], is_end=False)
    await until(lambda: bool(taken), 5.0, "the message")
    assert not calls[0].has_begun
    port.send(framed[:600], is_end=False)
    assert calls[0].has_begun
    port.session.connection_lost(None)
