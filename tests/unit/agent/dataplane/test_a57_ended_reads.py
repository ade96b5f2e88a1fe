"""A57: nothing is left of a request that does not arrive whole, from the moment on at which it is no longer charged.
Cycles are searched rarely, and a client can end many reads until then (A15 too)."""

import gc
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from harness.fakes.wire import Wire
from harness.wait import until
from shoal.agent.dataplane import ingress_admission as module
from shoal.agent.dataplane.grpc_methods import call_failure
from shoal.agent.dataplane.ingress_admission import READ_SLOTS_PER_CALLER, IngressAdmission, MessagePlace
from shoal.agent.dataplane.memory import MessageMemory
from shoal.host.grpc_server import GrpcServerLimits, ServerCall, ServerMethod
from shoal.http2 import frames
from shoal.http2.grpc_messages import GrpcStatus, MessageReader, frame_message
from shoal.http2.header_blocks import encode
from shoal.types.codes import ShoalError

MESSAGE: Final = bytes(2**20)
BEGUN_BYTES: Final = 60_000
"""Of the message, that arrive: within one window."""
HEADERS: Final = (
    (b":method", b"POST"),
    (b":scheme", b"https"),
    (b":path", b"/s/M"),
    (b"content-type", b"application/grpc"),
)
NO_LIMIT_S: Final = 60.0
SOON_S: Final = 0.03


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing searches cycles, and reads take as long as they like."""
    for name in ("MAX_READ_S", "GRACE_S", "SLOT_WAIT_S"):
        monkeypatch.setattr(module, name, NO_LIMIT_S)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_of(kind: type[object]) -> int:
    """How many there are, whether or not anything refers to them."""
    return sum(isinstance(each, kind) for each in gc.get_objects())


def held_bytes() -> int:
    """Bytes of messages that have not been taken."""
    return sum(each.held_bytes for each in gc.get_objects() if isinstance(each, MessageReader))


class Front:
    """A connection whose requests the port's admission lets in, as `GrpcMethods` does."""

    def __init__(self, *, has_task: bool) -> None:
        self.memory = MessageMemory(2**30)
        self.admission = IngressAdmission(self.memory)
        self.inside: list[MessagePlace] = []
        self.held_before = 0
        method = ServerMethod(self._answer)
        if not has_task:
            method = ServerMethod(self._answer, answer_now=self._answer_now, begin_read=self._begin_read)
        limits = GrpcServerLimits(64, 2**27, handshake_s=60.0, ping_interval_s=60.0, ping_timeout_s=60.0)
        self.wire = Wire()
        self.session = self.wire.session(method, limits)
        self._next = 1

    def take_slots(self) -> None:
        """All of the caller."""
        for _ in range(READ_SLOTS_PER_CALLER):
            place = self.admission.begin_read("a", 1, "a", lambda _: None, lambda _: None)
            assert place is not None
            self.inside.append(place)
        self.held_before = self.memory.held_bytes

    def begin(self, timeout: bytes = b"") -> int:
        """The head of a call, and the first of its request."""
        number, self._next = self._next, self._next + 2
        fields = (*HEADERS, (b"grpc-timeout", timeout)) if timeout else HEADERS
        self.session.data_received(frames.headers(number, encode(fields), 2**14, end_stream=False))
        self.send(number, frame_message(MESSAGE)[:BEGUN_BYTES])
        return number

    def send(self, number: int, data: bytes, *, is_end: bool = False) -> None:
        pieces = [data[at : at + 2**14] for at in range(0, len(data), 2**14)]
        for piece in pieces:
            flags = frames.END_STREAM if is_end and piece is pieces[-1] else 0
            self.session.data_received(frames.head(len(piece), frames.DATA, flags, number) + piece)

    async def _answer(self, call: ServerCall) -> bytes:
        try:
            with self.admission.places.take("a"):
                async with self.admission.read_slot("a", module.MAX_READ_S, len(MESSAGE)):
                    assert await call.read(2**27) == MESSAGE
                    return b"task"
        except ShoalError as error:
            raise call_failure(error) from None

    def _answer_now(self, call: ServerCall, message: bytes) -> bool:
        assert message == MESSAGE
        call.complete(b"now")
        return True

    def _begin_read(self, call: ServerCall, size: int) -> MessagePlace | None:
        return self.admission.begin_read(
            "a",
            size,
            "a",
            lambda error: call.fail(call_failure(error)),
            lambda is_ready: call.on_turn(is_ready=is_ready),
        )


async def begin(way: str, timeout: bytes = b"", *, ends_soon: bool = False) -> tuple[Front, int]:
    """A front that reads a request. `ends_soon`: after SOON_S, which on a busy machine is before this could look."""
    front = Front(has_task=way == "by a task")
    if way == "waiting":
        front.take_slots()
    number = front.begin(timeout)
    if ends_soon:
        return front, number
    await until(lambda: front.wire.window_updates() > 0 or way == "waiting", 5.0, "a wider window")
    assert held_bytes() == BEGUN_BYTES
    assert count_of(ServerCall) == 1
    return front, number


def reset(front: Front, number: int) -> None:
    front.session.data_received(frames.rst_stream(number, 8))


def lose(front: Front, number: int) -> None:
    front.session.connection_lost(None)


async def until_failed(front: Front, status: GrpcStatus) -> None:
    await until(lambda: b"grpc-status" in front.wire.sent, 5.0, "its end")
    text = b"%d" % status
    assert front.wire.sent.partition(b"grpc-status")[2].startswith(bytes((len(text),)) + text)
    assert not front.session.connection.streams


def charged_bytes(front: Front) -> int:
    return front.memory.held_bytes - front.held_before


WAYS: Final = ("without a task", "waiting", "by a task")


@pytest.mark.parametrize("end", [reset, lose])
@pytest.mark.parametrize("way", WAYS)
async def test_a57_a_request_that_its_caller_ends_leaves_nothing(way: str, end: Callable[[Front, int], None]) -> None:
    front, number = await begin(way)
    end(front, number)
    assert held_bytes() == 0, "at once: it may be charged to nobody"
    await until(lambda: front.session._data_timer is None and charged_bytes(front) == 0, 5.0, "nothing to be awaited")
    assert count_of(ServerCall) == 0
    assert count_of(MessagePlace) == len(front.inside)


@pytest.mark.parametrize("way", WAYS)
async def test_a15_a_request_whose_time_is_over_leaves_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOT_WAIT_S" if way == "waiting" else "MAX_READ_S", SOON_S)
    front, _ = await begin(way, ends_soon=True)
    await until_failed(front, GrpcStatus.DEADLINE_EXCEEDED if way != "waiting" else GrpcStatus.UNAVAILABLE)
    assert held_bytes() == 0
    assert charged_bytes(front) == 0
    assert count_of(MessagePlace) == len(front.inside)
    if way != "by a task":
        await until(lambda: front.session._data_timer is None, 5.0, "nothing to be awaited")
        assert count_of(ServerCall) == 0


@pytest.mark.parametrize("way", WAYS)
async def test_a15_a_request_after_its_deadline_leaves_nothing(way: str) -> None:
    front, _ = await begin(way, timeout=b"%dm" % (SOON_S * 1000), ends_soon=True)
    await until_failed(front, GrpcStatus.DEADLINE_EXCEEDED)
    assert held_bytes() == 0
    await until(lambda: front.session._data_timer is None and charged_bytes(front) == 0, 5.0, "nothing to be awaited")
    assert count_of(ServerCall) == 0
    assert count_of(MessagePlace) == len(front.inside)


@pytest.mark.parametrize("way", WAYS)
async def test_a57_a_request_that_is_answered_leaves_nothing(way: str) -> None:
    front, number = await begin(way)
    while front.inside:
        front.inside.pop().leave()
    await until(lambda: front.wire.window_updates() > 0, 5.0, "a wider window")
    front.send(number, frame_message(MESSAGE)[BEGUN_BYTES:], is_end=True)
    await until(lambda: not front.session.connection.streams, 5.0, "the answer")
    assert b"grpc-status" in front.wire.sent
    assert held_bytes() == 0
    await until(lambda: front.session._data_timer is None, 5.0, "nothing to be awaited")
    assert count_of(ServerCall) == 0
    assert count_of(MessagePlace) == 0
