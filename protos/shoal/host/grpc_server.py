"""A gRPC server on `shoal.http2` and asyncio: calls of any shape, whose messages pass as bytes.

A method is called when a call's headers have arrived. It reads messages one by one: until it does, the caller can send
no more than one window (64 KiB), and from then on as much as the next message says that it is long.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast

import structlog

from shoal.host.connections import Connection, Connections
from shoal.host.event_wait import wait_or_timeout
from shoal.host.http2_session import Http2Session, wake
from shoal.host.peer_certificate import PeerCertificate, certificate_of_peer
from shoal.http2.connection import ConnectionFailed, Http2Limits, Side, Stream
from shoal.http2.frames import DEFAULT_WINDOW, ErrorCode
from shoal.http2.grpc_messages import (
    PREFIX_BYTES,
    RESPONSE_HEAD,
    TRAILERS_OK,
    GrpcStatus,
    MessageBytes,
    MessageMalformed,
    MessageReader,
    decode_binary,
    frame_message,
    parse_timeout,
    prefix_of,
    status_fields,
)
from shoal.http2.header_blocks import HeaderList, encode
from shoal.http2.stream_resets import ResetCount

CHECK_EVERY_S: Final = 0.5
"""Seconds between two looks at which connections are silent."""
GOAWAY_S: Final = 1.0
"""Seconds for clients to learn that the server stops: a few round trips of a slow link."""
DATA_WAIT_S: Final = 0.01
"""Seconds that a call waits for the first of its request before a task waits for it. Clients send it right behind the
headers, but what is read of a connection at once may end between them."""
LAST_ANSWER_S: Final = 0.05
"""Seconds for clients to close their connections after the last GOAWAY."""
_KEPT_MEMOS: Final = 16
"""Memos of one connection that are kept."""
_KEPT_MEMO_BYTES: Final = 2048
"""No memo is kept for metadata that is larger."""
_GOAWAY_PING: Final = b"goaway\0\0"
_NOT_GRPC: Final = encode(((b":status", b"415"), (b"content-length", b"0")))

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GrpcServerLimits:
    """Bounds of one port. All times are in seconds."""

    # Streams of one connection.
    streams: int
    # Largest message, as sent.
    message_bytes: int
    # For the TLS handshake, and from then to the client's first frame.
    handshake_s: float
    # Silence of a client before a ping is sent to it.
    ping_interval_s: float
    # The connection is given up when the client has not answered a ping for this long.
    ping_timeout_s: float


class CallEnded(Exception):
    """The caller cancelled the call, or its connection is lost."""


class CallFailure(Exception):
    """Ends a call with a status."""

    def __init__(self, status: GrpcStatus, details: str, metadata: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.metadata = metadata


class MessageTooLarge(CallFailure):
    """A message exceeds the limit of its read; most of it has not arrived."""

    def __init__(self, size: int, max_bytes: int) -> None:
        super().__init__(GrpcStatus.RESOURCE_EXHAUSTED, f"message of {size} bytes is larger than max {max_bytes}")
        self.size = size
        self.max_bytes = max_bytes


class CallHead:
    """A call's headers. They do not change; a frozen dataclass takes ten times as long to make, for each call of a
    proxy."""

    __slots__ = ("failure", "memo", "metadata", "path", "shared_memo", "timeout_s")

    def __init__(
        self,
        path: str,
        metadata: Mapping[str, str],
        timeout_s: float | None,
        failure: CallFailure | None,
        shared_memo: dict[str, object],
    ) -> None:
        self.path = path
        """`/SERVICE/METHOD`."""
        self.metadata = metadata
        """Fields that are not the protocol's own. The last of equal keys counts. Keys in `-bin` are not in here."""
        self.timeout_s = timeout_s
        """Seconds until the caller's deadline, at arrival; None without one."""
        self.failure = failure
        """Why the call must fail; None: it need not."""
        self.memo: dict[str, object] = {}
        """What was made of the metadata. Calls of one connection with equal headers share it."""
        self.shared_memo = shared_memo
        """What was made of its fields `GrpcServer.shared_fields`. Calls of one connection share it whose path and whose
        fields of those are equal."""


class ServerCall:
    """One call, at the server."""

    __slots__ = (
        "_deadline", "_done", "_is_discarding", "_method", "_on_done", "_place", "_reader", "_reading", "_session",
        "_stream", "_task", "_timer", "_writing", "head", "is_ended", "is_long_lived", "is_started", "is_taken_up",
    )  # fmt: skip

    def __init__(self, session: "GrpcSession", stream: Stream, head: CallHead) -> None:
        self.head = head
        self.is_ended = False
        """Whether the stream is over: the answer is sent, or its caller is gone."""
        self.is_started = False
        """Whether a part of the answer is sent."""
        self.is_long_lived = False
        """Whether a server that stops does not wait for it."""
        self.is_taken_up = False
        """Whether its method has read a message, or has answered."""
        self._session = session
        self._stream = stream
        self._reader = MessageReader()
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        timeout_s = head.timeout_s
        self._deadline = None if timeout_s is None else session.loop.time() + timeout_s
        self._is_discarding = False
        self._method: ServerMethod | None = None
        """The method to start, where it may answer without a task and the request has not arrived yet."""
        self._place: ReadPlace | None = None
        """Of a request that is read without a task."""
        self._done = False
        """Whether the status is given; it may still wait for a window."""
        self._on_done: list[Callable[[], None]] = []

    @property
    def peer(self) -> str:
        """The caller's address and port."""
        return self._session.peer

    @property
    def certificate(self) -> PeerCertificate | None:
        """The caller's; None: it showed none."""
        return self._session.certificate

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.head.metadata

    @property
    def memo(self) -> dict[str, object]:
        """What was made of the metadata, by whatever made it. Calls of one connection with equal headers share it."""
        return self.head.memo

    @property
    def shared_memo(self) -> dict[str, object]:
        """The same, of the fields that the server was told: ids, deadlines and traces, which differ from call to call,
        need not be among them."""
        return self.head.shared_memo

    @property
    def message_bytes(self) -> int | None:
        """Bytes of the next message; None where it is not known yet."""
        return self._reader.size

    @property
    def has_message(self) -> bool:
        """Whether the next message has arrived whole, so that `read` does not wait."""
        return self._reader.size is not None and not self._reader.missing_bytes

    @property
    def has_begun(self) -> bool:
        """Whether a part of the next message has arrived."""
        return self._reader.held_bytes > 0

    def remaining_s(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""
        return None if self._deadline is None else self._deadline - self._session.loop.time()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the stream is over: the caller has got the answer, or is gone."""
        if self.is_ended:
            callback()
        else:
            self._on_done.append(callback)

    async def read(self, max_bytes: int) -> bytes | None:
        """The next message, None at the end of the call. One reader at a time.

        Raises MessageTooLarge, CallFailure(INTERNAL), CallEnded.
        """
        max_bytes = min(max_bytes, self._session.limits.message_bytes)
        reader, stream = self._reader, self._stream
        while True:
            if self.is_ended:
                raise CallEnded
            if reader.size is not None and reader.size > max_bytes:
                raise MessageTooLarge(reader.size, max_bytes)
            try:
                message = reader.take()
            except MessageMalformed as error:
                raise CallFailure(GrpcStatus.INTERNAL, str(error)) from error
            if message is not None:
                self.is_taken_up = True
                self._session.widen(stream, reader, max(0, DEFAULT_WINDOW - reader.held_bytes))
                return message
            if not stream.is_remote_open:
                if reader.held_bytes:
                    raise CallFailure(GrpcStatus.INTERNAL, "the call ended within a message")
                return None
            reader.expect()
            self._session.widen(stream, reader, max(reader.missing_bytes, DEFAULT_WINDOW - reader.held_bytes))
            self._reading = self._session.loop.create_future()
            try:
                await self._reading
            finally:
                self._reading = None

    def discard(self) -> None:
        """Hold nothing of what the caller sends, now or later: nobody reads on."""
        self._is_discarding = True
        self._reader.clear()

    async def write(self, message: bytes) -> None:
        """Send one message; return when all of it is on its way. One writer at a time. Raises CallEnded."""
        if self.is_ended or self._done:
            raise CallEnded
        self._send_head()
        connection = self._session.connection
        connection.send_data(self._stream, frame_message(message))
        self._session.flush_soon()
        while self._stream.queue and not self.is_ended:
            self._writing = self._session.loop.create_future()
            try:
                await self._writing
            finally:
                self._writing = None
        if self.is_ended:
            raise CallEnded

    def write_now(self, message: bytes) -> bool:
        """Send one message if all of it can go at once; return whether it did. Raises CallEnded."""
        if self.is_ended or self._done:
            raise CallEnded
        framed = frame_message(message)
        if not self._session.connection.has_room(self._stream, len(framed)):
            return False
        self._send_head()
        self._session.connection.send_data(self._stream, framed)
        self._session.flush_soon()
        return True

    def has_room(self, size: int) -> bool:
        """Whether a message of `size` bytes can go at once."""
        return self._session.connection.has_room(self._stream, PREFIX_BYTES + size)

    def complete(self, message: MessageBytes | None = None) -> None:
        """End the call with OK, after `message` if it is one that answers the call alone."""
        if self.is_ended or self._done:
            return
        self._done = True
        connection = self._session.connection
        if message is not None and not self.is_started:
            connection.respond(self._stream, RESPONSE_HEAD, (prefix_of(message), message), TRAILERS_OK)
        else:
            self._send_head()
            if message is not None:
                connection.send_data(self._stream, frame_message(message))
            connection.end(self._stream, TRAILERS_OK)
        self._session.flush_soon()

    def fail(self, failure: CallFailure) -> None:
        """End the call with a status."""
        if self.is_ended or self._done:
            return
        self._done = True
        fields = status_fields(failure.status, failure.details, failure.metadata)
        if not self.is_started:
            fields = ((b":status", b"200"), (b"content-type", b"application/grpc"), *fields)
        self._session.connection.end(self._stream, encode(fields))
        self._session.flush_soon()

    def _send_head(self) -> None:
        if not self.is_started:
            self.is_started = self.is_taken_up = True
            self._session.connection.send_headers(self._stream, RESPONSE_HEAD)

    # Called by the session

    def accept(self, method: "ServerMethod") -> None:
        """Start the method, now or once it is known whether the request came with its headers."""
        self.is_long_lived = method.is_long_lived
        if method.answer_now is None:
            self._start(method)
        else:
            self._method = method
            self._session.undecided.append(self)

    def start_undecided(self) -> None:
        """Nothing of the request came with its headers, unless it is being read. Where it can be read without a task,
        it is waited for a moment."""
        method = self._method
        if method is not None and method.begin_read is not None and self._reader.size is None:
            self._session.await_data(self)
        else:
            self.start_late()

    def start_late(self) -> None:
        """Start a task, unless the request is being read, or answered."""
        method = self._method
        if method is not None and self._place is None and not self.is_ended:
            self._start(method)

    def _start(self, method: "ServerMethod") -> None:
        self._method = None
        self._leave_place()
        self._set_timer()
        self._task = self._session.loop.create_task(self._run(method.answer))

    def _set_timer(self) -> None:
        if self._deadline is not None and self._timer is None:
            self._timer = self._session.loop.call_at(self._deadline, self._on_deadline)

    def _leave_place(self) -> None:
        if self._place is not None:
            self._place.leave()
            self._place = None

    def _go_on_without_task(self, method: "ServerMethod") -> None:
        """Read on, or have the request answered if it is whole; or leave it to a task after all, which also expands
        one that is compressed."""
        if self._reader.is_compressed:
            pass
        elif self._reader.missing_bytes and self._stream.is_remote_open:
            place = self._place or self._begin_read(method)
            if place is not None:
                if not place.is_waiting:
                    self._session.widen(self._stream, self._reader, self._reader.missing_bytes)
                return
        elif self._answer_now(method):
            self._method = None
            return
        self._start(method)

    def _begin_read(self, method: "ServerMethod") -> "ReadPlace | None":
        """Take a place for a request of which a part has arrived, if there is one."""
        size = self._reader.size
        if method.begin_read is None or size is None or size > self._session.limits.message_bytes:
            return None
        self._place = place = method.begin_read(self, size)
        if place is not None:
            self._set_timer()
            if not place.is_waiting:
                self._reader.expect()
        return place

    def on_turn(self, *, is_ready: bool) -> None:
        """The place that the request waited for is there; `is_ready` is false where a task is to read it instead."""
        method = self._method
        if method is None or self._place is None or self.is_ended:
            return
        if is_ready:
            self._reader.expect()
            self._session.widen(self._stream, self._reader, self._reader.missing_bytes)
        else:
            self._start(method)

    def _answer_now(self, method: "ServerMethod") -> bool:
        """Have a request answered without a task if it is whole; return whether it is."""
        message = self._reader.whole
        if message is None or self._stream.is_remote_open or method.answer_now is None:
            return False
        self._leave_place()
        try:
            if not method.answer_now(self, message):
                return False
        except Exception as error:
            self._on_error(error)
        self._reader.take()
        self.is_taken_up = True
        if self._timer is not None:
            self._timer.cancel()  # the method keeps the deadline
        return True

    async def _run(self, answer: "Answer") -> None:
        try:
            message = await answer(self)
        except CallFailure as failure:
            self.fail(failure)
        except CallEnded:
            pass
        except asyncio.CancelledError:
            self.fail(CallFailure(GrpcStatus.CANCELLED, "cancelled"))
            raise
        except Exception as error:
            self._on_error(error)
        else:
            self.complete(message)

    def _on_error(self, error: Exception) -> None:
        """Inside its handler."""
        _log.exception("call_failed", method=self.head.path)
        self.fail(CallFailure(GrpcStatus.INTERNAL, type(error).__name__))

    def _on_deadline(self) -> None:
        self.fail(CallFailure(GrpcStatus.DEADLINE_EXCEEDED, "the caller's deadline has passed"))
        self._cancel_task()

    def _cancel_task(self) -> None:
        """A task that is cancelled refers to the frames that this ended, and thereby to this call: with a reference
        back, what those hold would stay until cycles are searched."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def on_data(self, data: memoryview) -> None:
        if self._is_discarding:
            return
        if self._place is not None and data and self._stream.is_remote_open and self._reader.has_taken(data):
            return
        try:
            self._reader.receive(data)
        except MessageMalformed as error:
            self.fail(CallFailure(GrpcStatus.INTERNAL, str(error)))
            return
        if self._method is not None:
            self._go_on_without_task(self._method)
        else:
            wake(self._reading)

    def on_sent(self) -> None:
        wake(self._writing)

    def on_closed(self) -> None:
        self.is_ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._method = None
        self._leave_place()
        wake(self._reading)
        wake(self._writing)
        if not self._done:
            self._cancel_task()
        self._reader.clear()  # the call may be referred to for longer, but what it holds is no longer charged
        callbacks, self._on_done = self._on_done, []
        for callback in callbacks:
            callback()


class StreamCall(Protocol):
    """The call of one stream, for its session."""

    # As of `ServerCall`.
    is_long_lived: bool
    is_taken_up: bool

    def on_data(self, data: memoryview) -> None:
        """`data` has arrived, or the end of the caller's side."""
        ...

    def on_sent(self) -> None:
        """All that was queued is sent."""
        ...

    def on_closed(self) -> None:
        """The stream is over."""
        ...


Answer = Callable[[ServerCall], Awaitable[bytes | None]]
"""Answers one call: returns its only message, or None after it has written all. Raises CallFailure, CallEnded."""
AnswerNow = Callable[[ServerCall, bytes], bool]
"""Takes a call whose request has arrived, and ends it now or later by `complete` or `fail`; a deadline of the caller is
its to keep. False leaves the call to `Answer`."""


class ReadPlace(Protocol):
    """The place of a request that is being read. Whoever gave it may `fail` the call meanwhile."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is not there yet. Until the call's `on_turn`, its caller can send no more than a window."""
        ...

    def leave(self) -> None:
        """The request has arrived, or will not. Called once."""
        ...


BeginRead = Callable[[ServerCall, int], ReadPlace | None]
"""Gives a place to a request of so many bytes, of which a part has arrived, now or by `ServerCall.on_turn`; None leaves
the call to `Answer`."""


@dataclass(frozen=True, slots=True)
class ServerMethod:
    """A method of a server."""

    answer: Answer
    # True if a server that stops does not wait for its calls.
    is_long_lived: bool = False
    # Asked first once the request is there, because a task costs more than most answers.
    answer_now: AnswerNow | None = None
    # Asked where the request does not come with its headers; None: a task reads it then.
    begin_read: BeginRead | None = None


class GrpcServer:
    """Serves the connections of a port whose handshake agreed on HTTP/2 (`session` is a protocol of a `TlsListener`).

    find: the method of a path (`/SERVICE/METHOD`); it answers unknown ones too. connections: the port's, with their
    limits. may_reset: whether the client with this certificate may reset most of its calls before they arrive;
    any other that does so loses its connection. serve_other: answers a request that is none of gRPC; None: it is told
    so. shared_fields: the metadata that `ServerCall.shared_memo` depends on.
    """

    def __init__(
        self,
        find: Callable[[str], ServerMethod],
        limits: GrpcServerLimits,
        connections: Connections,
        may_reset: Callable[[PeerCertificate | None], bool] = lambda _: False,
        serve_other: "Callable[[GrpcSession, Stream, HeaderList], StreamCall] | None" = None,
        shared_fields: Collection[str] = (),
    ) -> None:
        self.find = find
        self.may_reset = may_reset
        self.serve_other = serve_other
        self.shared_fields = tuple(shared_fields)
        self.limits = limits
        self.connections = connections
        self.sessions: set[GrpcSession] = set()
        self._checking: asyncio.Task[None] | None = None
        self.change = asyncio.Event()
        """Set when a call or a connection ended, or a ping was answered."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is inside that `stop` waits for."""
        return any(each.is_busy for each in self.sessions)

    def session(self, place: Connection) -> "GrpcSession":
        """The protocol of a new connection."""
        if self._checking is None:
            self._checking = asyncio.create_task(self._check_connections())
        return GrpcSession(self, place)

    async def stop(self, grace_s: float) -> None:
        """Answer the calls inside and on their way, for `grace_s` at most, and close. The port accepts no more by then.

        Clients are told to open no more calls; what they send until they know is answered. The last GOAWAY names the
        last call that was, so that clients know which ones they may repeat elsewhere.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        for session in tuple(self.sessions):
            session.go_away(is_final=False)
        told = loop.time() + min(grace_s, GOAWAY_S)
        await self._wait_until(lambda: all(each.has_answered_ping for each in self.sessions), told)
        await self._wait_until(lambda: not self.is_busy, end)
        for session in tuple(self.sessions):
            session.go_away(is_final=True)
        await self._wait_until(lambda: not self.sessions, loop.time() + min(grace_s, LAST_ANSWER_S))
        for session in tuple(self.sessions):
            session.close()
        if self._checking is not None:
            self._checking.cancel()

    async def _wait_until(self, is_so: Callable[[], bool], end: float) -> None:
        """Return when `is_so`, which only an event of a session changes, or at `end`."""
        loop = asyncio.get_running_loop()
        while not is_so() and (left_s := end - loop.time()) > 0:
            self.change.clear()
            await wait_or_timeout(self.change, left_s)

    async def _check_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            now = loop.time()
            for session in tuple(self.sessions):
                session.check(now)


class GrpcSession(Http2Session):
    """One client's connection."""

    def __init__(self, server: GrpcServer, place: Connection) -> None:
        super().__init__(Side.SERVER, Http2Limits(server.limits.streams), server.limits.ping_timeout_s)
        self.limits = server.limits
        self.peer = ""
        self.certificate: PeerCertificate | None = None
        self.has_answered_ping = False
        """Whether the client knows of this server's GOAWAY."""
        self._server = server
        self._place = place
        self._resets = ResetCount()
        self.undecided: list[ServerCall] = []
        """Calls whose headers were received last, and whose request may have come with them."""
        self._awaited: list[ServerCall] = []
        """Calls of which nothing but headers had arrived, since the timer was set."""
        self._awaited_longer: list[ServerCall] = []
        """Those of the time before. When the timer ends, most of them are answered."""
        self._data_timer: asyncio.TimerHandle | None = None
        self._shared_memos: dict[tuple[str | None, ...], dict[str, object]] = {}
        """By path and `shared_fields`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.peer = f"{host}:{port}"
        self.certificate = certificate_of_peer(transport.get_extra_info("ssl_object"))
        if self.certificate is not None:
            self._server.connections.set_busy(self._place)  # no newcomer may close the connection of a known client
        self._server.sessions.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.sessions.discard(self)
        self._server.connections.remove(self._place)
        super().connection_lost(exc)
        self._server.change.set()

    def on_received(self) -> None:
        if self.undecided:
            undecided, self.undecided = self.undecided, []
            for call in undecided:
                call.start_undecided()

    def on_failure(self, failure: ConnectionFailed) -> None:
        _log.debug("client_connection_failed", peer=self.peer, reason=str(failure))

    # ConnectionUser

    def on_headers(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None:
        call: StreamCall | None = stream.user
        if call is not None:  # trailers, which say nothing but that the request is whole
            call.on_data(memoryview(b""))
            return
        head = headers.parsed
        if head is None:
            head = headers.parsed = repeated_head(headers, self._server.shared_fields) or call_head(
                headers, self._shared_memo
            )
            headers.like = None  # a stream may keep its fields for long
        if not isinstance(head, CallHead) and self._server.serve_other is None:
            self.connection.send_headers(stream, _NOT_GRPC)
            self.connection.end(stream)
            return
        if len(self.connection.streams) == 1:
            self._server.connections.set_busy(self._place)
        if not isinstance(head, CallHead):
            assert self._server.serve_other is not None
            stream.user = self._server.serve_other(self, stream, headers)
            return
        begun = stream.user = ServerCall(self, stream, head)
        if head.failure is not None:
            begun.fail(head.failure)
        else:
            begun.accept(self._server.find(head.path))

    def on_data(self, stream: Stream, data: memoryview, *, is_end: bool) -> None:
        call: StreamCall | None = stream.user
        if call is not None:
            call.on_data(data)

    def on_closed(self, stream: Stream, error: ErrorCode | None) -> None:
        call: StreamCall | None = stream.user
        if call is not None:
            call.on_closed()
            stream.user = None
            was_reset = error is not None and error is not ErrorCode.NO_ERROR and not call.is_taken_up
            if self._resets.record(was_reset=was_reset) and not self._server.may_reset(self.certificate):
                _log.warning(
                    "client_connection_closed",
                    peer=self.peer,
                    reason="most of its calls were reset before they arrived",
                )
                self.abort()
        if not self.connection.streams and self.certificate is None:
            self._server.connections.set_idle(self._place)
        self._server.change.set()

    def on_untaken(self) -> None:
        _log.warning(
            "client_connection_closed", peer=self.peer, reason="it takes nothing of the answers that it asks for"
        )

    def on_sent(self, stream: Stream) -> None:
        call: StreamCall | None = stream.user
        if call is not None:
            call.on_sent()

    def on_pong(self, payload: bytes) -> None:
        if payload == _GOAWAY_PING:
            self.has_answered_ping = True
            self._server.change.set()

    def on_goaway(self, last_stream: int, error: int) -> None:
        pass  # the client opens no more streams, and closes the connection

    def _shared_memo(self, path: str, metadata: Mapping[str, str]) -> dict[str, object]:
        key = (path, *[metadata.get(name) for name in self._server.shared_fields])
        found = self._shared_memos.get(key)
        if found is None and sum(len(text or "") for text in key) > _KEPT_MEMO_BYTES:
            return {}
        if found is None:
            if len(self._shared_memos) >= _KEPT_MEMOS:
                self._shared_memos.clear()
            found = self._shared_memos[key] = {}
        return found

    # Called by calls and by the server

    def await_data(self, call: ServerCall) -> None:
        """Start the call's task after DATA_WAIT_S, or up to twice that, if nothing arrives before."""
        self._awaited.append(call)
        if self._data_timer is None:
            self._data_timer = self.loop.call_later(DATA_WAIT_S, self._start_late)

    def _start_late(self) -> None:
        late, self._awaited_longer, self._awaited = self._awaited_longer, self._awaited, []
        self._data_timer = self.loop.call_later(DATA_WAIT_S, self._start_late) if self._awaited_longer else None
        for call in late:
            call.start_late()

    @property
    def is_busy(self) -> bool:
        """Whether a call is inside that a server which stops waits for."""
        calls = (stream.user for stream in self.connection.streams.values())
        return any(not cast(StreamCall, call).is_long_lived for call in calls if call is not None)

    def go_away(self, *, is_final: bool) -> None:
        """As `Http2Connection.go_away`. The answer to the ping tells that the client knows."""
        self.connection.go_away(is_final=is_final)
        if not is_final:
            self.connection.ping(_GOAWAY_PING)
        self.flush()

    def check(self, now: float) -> None:
        """Give up a client that never sent its first frame, or answers no ping."""
        if self.connection.is_greeted:
            self.check_alive(now, self.limits.ping_interval_s, self.limits.ping_timeout_s)
        elif now - self._opened_at > self.limits.handshake_s:
            self.abort()


_PROTOCOL_FIELDS: Final = frozenset(
    {"content-type", "te", "user-agent", "grpc-encoding", "grpc-accept-encoding", "grpc-timeout", "content-length"}
)


def call_head(
    headers: HeaderList, shared_memo: Callable[[str, Mapping[str, str]], dict[str, object]]
) -> CallHead | str:
    """The call's head; a text says why the request is none of gRPC. shared_memo: gives the one of a path and
    metadata."""
    path, method, kind, timeout, encoding = "", "", "", None, "identity"
    metadata: dict[str, str] = {}
    failure: CallFailure | None = None
    for raw, value in headers.fields:
        name, text = raw.decode("ascii"), value.decode("latin-1")
        if name == ":path":
            path = text
        elif name == ":method":
            method = text
        elif name == "content-type":
            kind = text
        elif name == "grpc-timeout":
            timeout = parse_timeout(text)
            if timeout is None:
                failure = CallFailure(GrpcStatus.INTERNAL, f"grpc-timeout {text!r:.40}")
        elif name == "grpc-encoding":
            encoding = text
        elif name.endswith("-bin"):
            try:
                decode_binary(value)
            except MessageMalformed as error:
                failure = CallFailure(GrpcStatus.INTERNAL, f"{name}: {error}")
        elif not name.startswith(":") and name not in _PROTOCOL_FIELDS:
            metadata[name] = text
    if method != "POST" or not kind.startswith("application/grpc"):
        return f"{method} of {kind!r:.80}"
    if encoding not in ("identity", "gzip"):
        accept = (("grpc-accept-encoding", "identity,gzip"),)
        failure = CallFailure(GrpcStatus.UNIMPLEMENTED, f"compression {encoding!r:.40}", accept)
    return CallHead(path, metadata, timeout, failure, shared_memo(path, metadata))


def repeated_head(headers: HeaderList, shared_fields: Collection[str]) -> CallHead | None:
    """As `call_head`, where the call says what the one before has said, but for a deadline and metadata beside
    `shared_fields`, as forwards do; None where it says another thing, or something malformed."""
    like, fields = headers.like, headers.fields
    before = None if like is None else like.parsed
    if like is None or not isinstance(before, CallHead) or before.failure is not None:
        return None
    if len(like.fields) != len(fields):
        return None
    metadata, timeout_s = dict(before.metadata), before.timeout_s
    for at in range(headers.same, len(fields)):
        raw, value = fields[at]
        raw_before, value_before = like.fields[at]
        if raw != raw_before:
            return None
        name, text = raw.decode("ascii"), value.decode("latin-1")
        if name in metadata:
            if name in shared_fields and value != value_before:
                return None
            metadata[name] = text  # though it be equal: the last of equal keys counts
        elif name == "grpc-timeout":
            timeout_s = parse_timeout(text)
            if timeout_s is None:
                return None
        elif value != value_before:  # one of the protocol's own, or of those in `-bin`
            return None
    return CallHead(before.path, metadata, timeout_s, None, before.shared_memo)
