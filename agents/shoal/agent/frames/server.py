"""The server's end: listens on one socket path, and runs a handler for each call."""

import asyncio
import hmac
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from shoal.agent.frames.connection import FrameConnection, Part
from shoal.agent.frames.format import (
    MAX_PAYLOAD,
    Frame,
    FrameError,
    FrameMessage,
    FrameType,
    Header,
    InferHeader,
    Payload,
    decode_infer,
    decode_json,
    encode_json,
    read_message,
)
from shoal.agent.frames.unix_peers import HELLO_TIMEOUT_S, peer_credentials
from shoal.host import file_descriptors
from shoal.host.unix_sockets import socket_address
from shoal.types.codes import Code, Refusal, ShoalError, refuse

_log = structlog.get_logger(__name__)

MAX_PENDING_CALLS: Final = 4096
MAX_PENDING_BYTES: Final = 512 * 2**20

Handler = Callable[[FrameMessage], Awaitable[FrameMessage]]
"""Answers one call. A ShoalError that it raises becomes the refusal. It is cancelled when the caller is gone."""


class InferCall:
    """One `infer` call. It is answered once, by `answer` or `refuse`; what comes after that is dropped."""

    __slots__ = ("_connection", "_number", "header", "on_cancel", "payload")

    def __init__(self, connection: "_ServedConnection", number: int, header: InferHeader, payload: Payload) -> None:
        self._connection: _ServedConnection | None = connection
        self._number = number
        self.header = header
        # The serialized ModelInferRequest.
        self.payload = payload
        # Called once if the caller is gone before the call was answered.
        self.on_cancel: Callable[[], object] | None = None

    def answer(self, parts: Sequence[Part], header: Header | None = None) -> None:
        """`parts`: the serialized ModelInferResponse. They must not change any more."""
        if (connection := self._end()) is not None:
            connection.answer(self._number, parts, header)

    def refuse(self, refusal: Refusal) -> None:
        if (connection := self._end()) is not None:
            connection.send_json(FrameType.REFUSAL, self._number, asdict(refusal))

    @property
    def is_turn_over(self) -> bool:
        """Whether to answer later: what came with this call has held the event loop for long enough."""
        return self._connection is None or self._connection.is_turn_over

    def cancel(self) -> None:
        """The caller is gone."""
        on_cancel = self.on_cancel
        if self._end() is not None and on_cancel is not None:
            on_cancel()

    def _end(self) -> "_ServedConnection | None":
        connection, self._connection = self._connection, None
        self.on_cancel = None  # what it refers to mostly refers to this call: a payload must not wait for the collector
        if connection is not None:
            connection.on_call_over(self._number, len(self.payload))
        return connection


OnInfer = Callable[[InferCall], None]
"""Takes one call, and returns at once. A ShoalError that it raises becomes the refusal."""


class FrameServer:
    """Listens on one socket path (mode 0600).

    Each call runs the handler of its kind in its own task, but for `infer`, which `on_infer` takes without one.
    """

    def __init__(
        self,
        path: str | Path,
        nonce: str,
        handlers: Mapping[str, Handler],
        *,
        on_infer: OnInfer | None = None,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        if not nonce:
            raise refuse(Code.FIELD_INVALID, "an empty nonce", "a secret", "make one with secrets.token_hex")
        self.handlers = dict(handlers)
        self.on_infer = on_infer
        self.max_payload = max_payload
        # Calls that run in tasks, on any connection.
        self.tasks: set[asyncio.Task[None]] = set()
        self._path = Path(path)
        self._nonce = nonce
        self._server: asyncio.Server | None = None
        self._open: set[_ServedConnection] = set()
        self._welcome: set[_ServedConnection] = set()
        self._empty_since: float | None = None

    @property
    def connections(self) -> int:
        return len(self._welcome)

    @property
    def empty_since(self) -> float | None:
        """loop.time() since which no peer is connected. None while one is."""
        return self._empty_since

    async def start(self) -> None:
        """Raises OSError. Replaces a socket file that a dead process left."""
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.lstat().st_mode):
                self._path.unlink()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        loop = asyncio.get_running_loop()
        try:
            os.fchmod(sock.fileno(), 0o600)
            with socket_address(self._path) as address:
                sock.bind(address)
            self._path.chmod(0o600)
            self._server = await loop.create_unix_server(
                lambda: _ServedConnection(self), sock=sock, backlog=file_descriptors.ACCEPTS_PER_TURN
            )
            file_descriptors.set_backlog(self._server)
        except BaseException:
            sock.close()
            raise
        self._empty_since = loop.time()

    def push(self, kind: str, payload: Payload = b"", *, header: Header | None = None) -> None:
        """Send to all connected peers. A peer that reads too slowly is dropped."""
        for connection in tuple(self._welcome):
            if connection.waiting_bytes > MAX_PAYLOAD:
                connection.abort()
            else:
                connection.send_json(FrameType.PUSH, 0, {**(header or {}), "kind": kind}, (payload,))

    async def close(self) -> None:
        """Stop listening, end every connection and its calls, remove the socket file."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self._open):
            connection.disconnect()
            connection.end_calls()
        if self.tasks:
            await asyncio.wait(tuple(self.tasks))
        # a confined worker may create its socket but not remove it: its supervisor does
        with suppress(PermissionError):
            self._path.unlink(missing_ok=True)

    def on_connected(self, connection: "_ServedConnection") -> None:
        self._open.add(connection)

    def is_welcome(self, nonce: str, uid: int) -> bool:
        return hmac.compare_digest(nonce.encode(), self._nonce.encode()) and uid == os.geteuid()

    def on_welcome(self, connection: "_ServedConnection") -> None:
        self._welcome.add(connection)
        self._empty_since = None

    def on_disconnected(self, connection: "_ServedConnection") -> None:
        self._open.discard(connection)
        if connection in self._welcome:
            self._welcome.discard(connection)
            if not self._welcome:
                self._empty_since = asyncio.get_running_loop().time()


class _ServedConnection(FrameConnection):
    """One peer of a server."""

    def __init__(self, server: FrameServer) -> None:
        super().__init__()
        self._server = server
        self._is_welcome = False
        self._hello_timer: asyncio.TimerHandle | None = None
        self._uid = -1
        # By call id.
        self._calls: dict[int, InferCall | asyncio.Task[None]] = {}
        # Payload bytes of those.
        self._pending_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.on_connected(self)
        _, self._uid = peer_credentials(transport.get_extra_info("socket"))
        self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self.abort)

    def max_payload(self) -> int:
        return min(self._server.max_payload, MAX_PENDING_BYTES - self._pending_bytes) if self._is_welcome else 0

    def may_read(self) -> bool:
        """A peer that takes no answers gets no more calls taken."""
        return self.waiting_bytes <= MAX_PAYLOAD

    def on_frame(self, frame: Frame) -> None:
        if not self._is_welcome:
            self._on_hello(frame)
            return
        if frame.frame_type is FrameType.CANCEL:
            held = self._calls.get(frame.call)
            if held is not None:
                held.cancel()
            return
        if frame.frame_type not in (FrameType.INFER, FrameType.CALL) or frame.call in self._calls:
            raise FrameError(f"a client sent {frame.frame_type.name} {frame.call}")
        if (why := self._check_size(frame)) is not None:
            self._refuse(frame.call, why)
        elif frame.frame_type is FrameType.INFER:
            self._on_infer(frame)
        else:
            self._on_call(frame)

    def on_lost(self, why: str) -> None:
        self.end_calls()
        self._server.on_disconnected(self)

    def end_calls(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        for held in tuple(self._calls.values()):
            held.cancel()

    def answer(self, call: int, parts: Sequence[Part], header: Header | None) -> None:
        try:
            self.send(FrameType.ANSWER, call, encode_json(header) if header else b"", parts)
        except ShoalError as error:
            self._refuse(call, error.refusal)

    def on_call_over(self, call: int, size: int) -> None:
        if self._calls.pop(call, None) is not None:
            self._pending_bytes -= size

    def _on_hello(self, frame: Frame) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        nonce = ""
        if frame.frame_type is FrameType.HELLO and not frame.oversized_bytes:
            nonce = str(decode_json(frame.header).get("nonce", ""))
        if self._server.is_welcome(nonce, self._uid):
            self._is_welcome = True
            self._server.on_welcome(self)
            self.send_json(FrameType.WELCOME, 0, {})
            return
        why = Refusal(Code.UNAUTHENTICATED, "a wrong nonce or user", "this process's own", "only its agent may call")
        self._refuse(0, why)
        self.disconnect()

    def _on_infer(self, frame: Frame) -> None:
        call = InferCall(self, frame.call, decode_infer(frame.header), frame.payload)
        if self._server.on_infer is None:
            self._refuse(frame.call, Refusal(Code.UNIMPLEMENTED, "`infer`", "a worker"))
            return
        self._hold(frame, call)
        try:
            self._server.on_infer(call)
        except Exception as error:
            call.refuse(_refusal_of(error, "infer"))

    def _on_call(self, frame: Frame) -> None:
        message = read_message(frame)
        handler = self._server.handlers.get(message.kind)
        if handler is None:
            names = ", ".join(self._server.handlers)
            self._refuse(frame.call, Refusal(Code.UNIMPLEMENTED, f"{message.kind!r:.40}", f"one of {names}"))
            return
        task = self._loop.create_task(self._run(handler, message, frame.call))
        self._hold(frame, task)
        self._server.tasks.add(task)
        task.add_done_callback(partial(self._on_task_done, frame.call, len(frame.payload)))

    def _hold(self, frame: Frame, held: "InferCall | asyncio.Task[None]") -> None:
        self._calls[frame.call] = held
        self._pending_bytes += len(frame.payload)

    def _on_task_done(self, call: int, size: int, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        self.on_call_over(call, size)

    async def _run(self, handler: Handler, message: FrameMessage, call: int) -> None:
        kind = message.kind
        try:
            reply = await handler(message)
            self.send_json(FrameType.REPLY, call, {**reply.header, "kind": reply.kind}, (reply.payload,))
        except Exception as error:
            self._refuse(call, _refusal_of(error, kind))

    def _check_size(self, frame: Frame) -> Refusal | None:
        if frame.oversized_bytes > self._server.max_payload:
            return Refusal(
                Code.TOO_LARGE,
                f"{frame.oversized_bytes} bytes",
                f"at most {self._server.max_payload}",
                "send smaller tensors",
            )
        if frame.oversized_bytes or len(self._calls) >= MAX_PENDING_CALLS:
            return Refusal(
                Code.OVERLOADED, f"{len(self._calls)} calls wait", f"at most {MAX_PENDING_CALLS}", "retry later"
            )
        return None

    def _refuse(self, call: int, why: Refusal) -> None:
        self.send_json(FrameType.REFUSAL, call, asdict(why))


def _refusal_of(error: Exception, kind: str) -> Refusal:
    if isinstance(error, ShoalError):
        return error.refusal
    _log.error("call_failed", method=kind, exc_info=error)
    return Refusal(Code.INTERNAL, f"{type(error).__name__}: {error}"[:2000], "", "report this with the log")
