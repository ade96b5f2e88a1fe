"""The client's end of a connection: calls, their answers, and pushed messages."""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, Self

from shoal.agent.frames.connection import FrameConnection
from shoal.agent.frames.format import (
    MAX_PAYLOAD,
    Frame,
    FrameError,
    FrameMessage,
    FrameType,
    Header,
    InferAnswer,
    InferHeader,
    Payload,
    decode_json,
    encode_infer,
    encode_json,
    read_message,
    read_refusal,
)
from shoal.agent.frames.unix_peers import HELLO_TIMEOUT_S, new_socket, peer_credentials
from shoal.agent.timeouts import within
from shoal.host import file_descriptors
from shoal.host.unix_sockets import socket_address
from shoal.types.codes import Code, Refusal, ShoalError, refuse

Push = Callable[[FrameMessage], None]
_NO_FACTS: Final[Header] = {}


class ConnectionLost(ShoalError):
    """The peer is gone. Whether a call in flight was carried out is unknown."""

    def __init__(self, why: str) -> None:
        super().__init__(
            Refusal(Code.REPLICA_UNREACHABLE, why, "an answer", "retry elsewhere: the process behind the socket ended")
        )


class PendingCall(Protocol):
    """Takes the outcome of a call, once. An `asyncio.Future` is one."""

    def done(self) -> bool:
        """Whether it wants the outcome no more."""
        ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: ShoalError, /) -> None: ...


class FrameClient(FrameConnection):
    """A connection to one server, for any number of concurrent calls. Not for use from several event loops."""

    def __init__(self, on_push: Push | None) -> None:
        super().__init__()
        self._on_push = on_push
        self._calls: dict[int, PendingCall] = {}
        self._deadlines: dict[int, float] = {}
        """Of inferences, by call, on the event loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._ids = itertools.count(1)
        self._end_reason: str | None = None
        self._lost = asyncio.Event()
        # The server's answer to the nonce; done once the connection may be used.
        self._welcome: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def connect(
        cls,
        path: str | Path,
        nonce: str,
        *,
        on_push: Push | None = None,
        timeout: float = HELLO_TIMEOUT_S,
        peer_pid: int | None = None,
    ) -> Self:
        """Open a connection.

        Raises ConnectionLost (nobody listens, or not the process `peer_pid`), ShoalError(UNAUTHENTICATED), or
        ShoalError(OVERLOADED) if this process has no file descriptor left.
        """
        sock = new_socket()
        client = cls(on_push)
        try:
            await within(timeout, client._open(sock, Path(path), nonce, peer_pid))
        except TimeoutError as error:
            client._give_up(sock)
            raise ConnectionLost(f"no answer to hello within {timeout:g}s on {Path(path).name}") from error
        except OSError as error:
            client._give_up(sock)
            if file_descriptors.is_exhaustion(error):
                raise ShoalError(file_descriptors.NONE_LEFT) from error
            raise ConnectionLost(f"{type(error).__name__} on {Path(path).name}: {error}") from error
        except BaseException:
            client._give_up(sock)
            raise
        return client

    @property
    def is_closed(self) -> bool:
        return self._end_reason is not None

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    @property
    def is_busy(self) -> bool:
        return bool(self._calls)

    async def call(
        self,
        kind: str,
        payload: bytes | memoryview = b"",
        *,
        header: Header | None = None,
        timeout: float | None = None,
    ) -> FrameMessage:
        """The reply. Raises what the server refused with, DEADLINE_EXCEEDED after `timeout`, or ConnectionLost.

        A call that times out, or whose caller is cancelled, is cancelled at the server too.
        """
        text = encode_json({**(header or {}), "kind": kind})
        future: asyncio.Future[FrameMessage] = self._loop.create_future()
        call = self._send_call(FrameType.CALL, text, payload, future)
        payload = b""  # the caller may need it again; this function must not keep it alive longer than the send
        timer = self._loop.call_later(timeout, _expire, future, kind, timeout) if timeout is not None else None
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            self._end_call(call)
            del future  # its error knows this frame: only the cyclic collector would free them

    async def infer(
        self,
        assignment: str,
        payload: Payload | memoryview,
        remaining_s: float,
        origin: str = "",
        trace: str = "",
        *,
        patience_s: float = 0.0,
    ) -> InferAnswer:
        """As `call`, for a ModelInferRequest to one assignment, which must be answered within `remaining_s`. The answer
        is waited for `patience_s` longer."""
        future: asyncio.Future[InferAnswer] = self._loop.create_future()
        call = self.begin_infer(future, assignment, payload, remaining_s, origin, trace, patience_s=patience_s)
        payload = b""
        try:
            return await future
        finally:
            self.end_infer(call)
            del future  # as in `call`

    def begin_infer(
        self,
        pending: PendingCall,
        assignment: str,
        payload: Payload | memoryview,
        remaining_s: float,
        origin: str = "",
        trace: str = "",
        *,
        patience_s: float = 0.0,
    ) -> int:
        """As `infer`, without waiting: `pending` gets the outcome. Returns the call's number, for `end_infer`."""
        deadline = self._loop.time() + remaining_s
        header = encode_infer(InferHeader(assignment, origin, trace, deadline))
        call = self._send_call(FrameType.INFER, header, payload, pending)
        self._deadlines[call] = deadline + patience_s
        self._set_timer(deadline + patience_s)
        return call

    def end_infer(self, call: int) -> None:
        """Nobody waits for the outcome any more. The call is cancelled at the server, if it has not ended."""
        self._deadlines.pop(call, None)
        self._end_call(call)

    async def wait_closed(self) -> None:
        """Returns when the connection is over, whichever side ended it."""
        await self._lost.wait()

    async def close(self) -> None:
        """Idempotent. Calls in flight end with ConnectionLost."""
        self.flush()
        self._end("closed by this side")
        await self._lost.wait()

    def abandon(self, refusal: Refusal) -> None:
        """Give up on a peer that is alive and does not answer: end calls in flight with `refusal`, and the
        connection."""
        self._end_reason = str(refusal)
        self._end_calls(ShoalError(refusal))
        self.abort()

    def max_payload(self) -> int:
        return MAX_PAYLOAD if self._welcome.done() else 0

    def on_frame(self, frame: Frame) -> None:
        if frame.oversized_bytes:
            raise FrameError(f"payload of {frame.oversized_bytes} bytes")
        if not self._welcome.done():
            self._on_hello_answer(frame)
            return
        if frame.frame_type is FrameType.PUSH:
            if self._on_push is not None:
                self._on_push(read_message(frame))
            return
        if frame.frame_type is not FrameType.REFUSAL:
            expected = FrameType.ANSWER if _is_infer(frame.call) else FrameType.REPLY
            if frame.frame_type is not expected:
                raise FrameError(f"a server sent {frame.frame_type.name} where {expected.name} was due")
        pending = self._calls.pop(frame.call, None)
        self._deadlines.pop(frame.call, None)
        if pending is None or pending.done():
            return
        match frame.frame_type:
            case FrameType.ANSWER:
                header = decode_json(frame.header) if frame.header else _NO_FACTS
                pending.set_result(InferAnswer(frame.payload, header))
            case FrameType.REPLY:
                pending.set_result(read_message(frame))
            case FrameType.REFUSAL:
                pending.set_exception(ShoalError(read_refusal(frame.header)))

    def on_broken(self, why: str) -> None:
        self._end(why)

    def on_lost(self, why: str) -> None:
        self._end(why)
        self._lost.set()

    async def _open(self, sock: socket.socket, path: Path, nonce: str, peer_pid: int | None) -> None:
        """Raises what `connect` catches."""
        with socket_address(path) as address:
            await self._loop.sock_connect(sock, address)
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid() or (peer_pid is not None and pid != peer_pid):
            raise ConnectionLost(f"another process (pid {pid}, uid {uid}) holds {path.name}")
        await self._loop.create_connection(lambda: self, sock=sock)
        self.send_json(FrameType.HELLO, 0, {"nonce": nonce})
        await self._welcome

    def _on_hello_answer(self, frame: Frame) -> None:
        if frame.frame_type is FrameType.WELCOME:
            self._welcome.set_result(None)
        elif frame.frame_type is FrameType.REFUSAL:
            self._welcome.set_exception(ShoalError(read_refusal(frame.header)))
        else:
            raise FrameError(f"a server sent {frame.frame_type.name} before it took the nonce")

    def _give_up(self, sock: socket.socket) -> None:
        """The connection did not come about."""
        if not self._welcome.cancel() and not self._welcome.cancelled():
            self._welcome.exception()  # or asyncio reports an error that nobody took
        self._end("not opened")
        sock.close()

    def _send_call(
        self, frame_type: FrameType, header: bytes, payload: Payload | memoryview, pending: PendingCall
    ) -> int:
        """The call's number. Raises ConnectionLost, ShoalError(TOO_LARGE)."""
        if self._end_reason is not None:
            raise ConnectionLost(self._end_reason)
        call = 2 * next(self._ids) + (frame_type is FrameType.INFER)
        self.send(frame_type, call, header, (payload,) if payload else ())
        self._calls[call] = pending
        return call

    def _end_call(self, call: int) -> None:
        """Cancel the call at the server, if it has not ended."""
        if self._calls.pop(call, None) is not None and self._end_reason is None and not self.unsend(call):
            self.send_json(FrameType.CANCEL, call, {})

    def _set_timer(self, deadline: float) -> None:
        """One timer serves all inferences: nearly every one ends before its deadline."""
        if self._timer is None or deadline < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        now = self._loop.time()
        late = [call for call, deadline in self._deadlines.items() if deadline <= now]
        for call in late:
            pending = self._calls.get(call)
            if pending is not None and not pending.done():
                found = "no answer by the deadline"
                pending.set_exception(refuse(Code.DEADLINE_EXCEEDED, found, "one in time", "allow more time or retry"))
        later = min((each for each in self._deadlines.values() if each > now), default=None)
        if later is not None:
            self._set_timer(later)

    def _end(self, why: str) -> None:
        if self._end_reason is None:
            self._end_reason = why
            self.abort()
        if not self._welcome.done():
            self._welcome.set_exception(ConnectionLost(self._end_reason))
        self._end_calls(ConnectionLost(self._end_reason))
        self._on_push = None  # whoever takes what is pushed mostly holds this client

    def _end_calls(self, error: ShoalError) -> None:
        calls, self._calls = self._calls, {}
        self._deadlines.clear()
        for pending in calls.values():
            if not pending.done():
                pending.set_exception(error)


def _is_infer(call: int) -> bool:
    """Their numbers are odd: the answer to a call must be of its kind."""
    return call % 2 == 1


def _expire(future: asyncio.Future[Any], kind: str, timeout: float) -> None:
    if not future.done():
        future.set_exception(
            refuse(Code.DEADLINE_EXCEEDED, f"no answer to `{kind}`", f"within {timeout}s", "allow more time or retry")
        )
