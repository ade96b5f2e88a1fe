"""A gRPC client on `shoal.http2` and asyncio: one channel to one address, calls of any shape, bytes as messages.

A channel connects when it is first used or told to, and again after its connection broke. A call on a connection that
breaks fails with UNAVAILABLE; whether the server can have begun to answer it is known (`CallError.was_processed`).
"""

import asyncio
import secrets
import ssl
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final, cast

from shoal.host.event_wait import wait_or_timeout
from shoal.host.http2_session import Http2Session, wake
from shoal.host.tls import TlsConnection
from shoal.http2.connection import Http2Limits, Side, Stream
from shoal.http2.frames import DEFAULT_WINDOW, ErrorCode
from shoal.http2.grpc_messages import (
    GrpcStatus,
    MessageMalformed,
    MessageReader,
    decode_binary,
    decode_details,
    encode_metadata,
    format_timeout,
    frame_message,
    prefix_of,
)
from shoal.http2.header_blocks import HeaderList, encode
from shoal.http2.keepalive import Keepalive
from shoal.http2.stream_shares import StreamShares
from shoal.types.address import HostPort
from shoal.types.backoff import delay

RECONNECT_BASE_S: Final = 0.1
RECONNECT_CAP_S: Final = 2.0
"""Seconds between two attempts to connect: from the first to the second value, doubled each time."""
MAX_REFUSALS: Final = 5
"""Times that a call is sent again after its server refused it unread."""
REFUSAL_BASE_S: Final = 0.01
REFUSAL_CAP_S: Final = 0.1
"""Seconds before it is: from the first to the second value, doubled each time."""
USER_AGENT: Final = b"shoal"
ANSWER_FRAME_BYTES: Final = 2**16
"""Largest frame of an answer. An answer of 1 MiB takes 112 us of CPU here in frames of 16 KiB, which is the least that
may be allowed (RFC 9113, section 6.5.2), 74 in these and 64 in ones of 256 KiB, behind which other answers wait."""
ANSWER_WINDOW_BYTES: Final = 2**21
"""Bytes of an answer that its server may send before it is told to go on, where the only answer of a call is read as it
comes (`begin_unary`): as soon as its length is known the server is let send all of it anyway. So an answer of 1 MiB
with its fields costs no message back, and none of these is waited for. A choice."""
_JOINED_BYTES: Final = 2**14
"""A smaller request leaves in one frame; a larger one is not copied for that."""

_GRPC_HEAD: Final = object()
_STATUS_OK: Final = object()
"""What was made of a block (`HeaderList.parsed`) that is the head of an answer, or its end. A server repeats both."""

Metadata = Sequence[tuple[str, str]]
MakeMetadata = Callable[[], Metadata]
"""Makes what is said with a call once it has a stream: what is signed is not to grow old while it waits for one."""

_HTTP_STATUSES: Final = {
    400: GrpcStatus.INTERNAL,
    401: GrpcStatus.UNAUTHENTICATED,
    403: GrpcStatus.PERMISSION_DENIED,
    404: GrpcStatus.UNIMPLEMENTED,
    429: GrpcStatus.UNAVAILABLE,
    502: GrpcStatus.UNAVAILABLE,
    503: GrpcStatus.UNAVAILABLE,
    504: GrpcStatus.UNAVAILABLE,
}
"""Source: https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md"""


class ChannelState(Enum):
    IDLE = auto()
    CONNECTING = auto()
    READY = auto()
    FAILED = auto()
    """The last attempt to connect failed; the next one comes after a back-off."""
    CLOSED = auto()


class ChannelClosed(Exception):
    """The channel was closed by its user."""


class CallError(Exception):
    """A call ended with another status than OK.

    metadata: trailers; bytes for keys in `-bin`. was_processed: False if the server has certainly not begun to answer,
    so that the call may be repeated. was_refused: such a call was refused by the server, not lost on the way there.
    """

    def __init__(
        self,
        status: GrpcStatus,
        details: str,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
        *,
        was_processed: bool = True,
        was_refused: bool = False,
    ) -> None:
        super().__init__(f"{status.name}: {details}")
        self.status = status
        self.details = details
        self.metadata = metadata
        self.was_processed = was_processed and not was_refused
        self.was_refused = was_refused


class ClientCall:
    """One call. Its user writes messages and half-closes, reads messages until None, and closes it."""

    def __init__(self, session: "ClientSession", payer: str, max_bytes: int) -> None:
        self.payer = payer
        """Whose share of the connection's streams it uses."""
        self._session = session
        self._max_bytes = max_bytes
        self._stream: Stream | None = None
        self._reader = MessageReader()
        self._waiter: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._error: CallError | None = None
        self._is_over = False
        self._has_head = False
        self._has_status = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    async def write(self, message: bytes) -> None:
        """Send one message; return when all of it is on its way. One writer at a time. Raises CallError."""
        self._send(message)
        await self.drain()

    async def drain(self) -> None:
        """Return when all messages are on their way. Raises CallError."""
        while self._stream is not None and self._stream.queue and not self._is_over:
            self._writer = self._session.loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        if self._error is not None:
            raise self._error

    def half_close(self) -> None:
        """Send no more messages."""
        if self._stream is not None and not self._is_over:
            self._session.connection.end(self._stream)
            self._session.flush_soon()

    async def read(self) -> bytes | None:
        """The next message; None once the server has ended the call with OK. One reader at a time.

        Raises CallError.
        """
        reader = self._reader
        while True:
            if reader.size is not None and reader.size > self._max_bytes:
                raise self._fail(
                    GrpcStatus.RESOURCE_EXHAUSTED,
                    f"message of {reader.size} bytes is larger than max {self._max_bytes}",
                )
            try:
                message = reader.take()
            except MessageMalformed as error:
                raise self._fail(GrpcStatus.INTERNAL, str(error)) from error
            if message is not None:
                self._widen(max(0, DEFAULT_WINDOW - reader.held_bytes))
                return message
            if self._error is not None:
                raise self._error
            if self._is_over:
                if reader.held_bytes:
                    raise CallError(GrpcStatus.INTERNAL, "the server ended the call within a message")
                return None
            reader.expect()
            self._widen(max(reader.missing_bytes, DEFAULT_WINDOW - reader.held_bytes))
            self._waiter = self._session.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def cancel(self) -> None:
        """End the call. Its reader and writer get CANCELLED."""
        self._fail(GrpcStatus.CANCELLED, "cancelled here")

    def expire(self) -> None:
        """End the call because its time is over."""
        self._fail(GrpcStatus.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _send(self, message: bytes) -> None:
        if self._error is not None:
            raise self._error
        if self._stream is None or self._is_over:
            raise CallError(GrpcStatus.UNAVAILABLE, "the call is over")
        self._session.connection.send_data(self._stream, frame_message(message))
        self._session.flush_soon()

    def _fail(self, status: GrpcStatus, details: str) -> CallError:
        """End the call from this side; the error that it ended with."""
        if not self._is_over and self._error is None:
            self._error = CallError(status, details)
        stream = self._stream
        if stream is not None:
            self._session.connection.reset(stream, ErrorCode.CANCEL)
            self._session.flush_soon()
        return self._error or CallError(status, details)

    def _widen(self, window: int) -> None:
        """As `Http2Session.widen`, while the call is open."""
        if self._stream is not None:
            self._session.widen(self._stream, self._reader, window)

    # Called by the session

    def on_open(self, stream: Stream) -> None:
        self._stream = stream

    def on_headers(self, headers: HeaderList, *, is_end: bool) -> None:
        if not self._has_head:
            self._has_head = True
            if headers.parsed is _GRPC_HEAD and not is_end:
                return
            code = headers.get(b":status") or b""
            if code != b"200" or not (headers.get(b"content-type") or b"").startswith(b"application/grpc"):
                found = code.decode("latin-1")
                status = _HTTP_STATUSES.get(int(found) if found.isdigit() else 0, GrpcStatus.UNKNOWN)
                self._fail(status, f"HTTP status {found} without gRPC")
                return
            headers.parsed = _GRPC_HEAD
        if is_end:
            self._has_status = True
            if headers.parsed is not _STATUS_OK:
                error = _status_error(headers)
                if error is None:
                    headers.parsed = _STATUS_OK
                self._error = self._error or error

    def on_data(self, data: memoryview) -> None:
        try:
            self._reader.receive(data)
        except MessageMalformed as error:
            self._fail(GrpcStatus.INTERNAL, str(error))
        wake(self._waiter)

    def on_sent(self) -> None:
        wake(self._writer)

    def on_closed(self, error: ErrorCode | None, *, is_lost: bool) -> None:
        """`error` resets the stream; `is_lost` says that it did so because the connection was lost."""
        self._is_over = True
        if self._error is None and error is not None and error is not ErrorCode.NO_ERROR:
            self._error = CallError(
                _STATUS_OF_RESET.get(error, GrpcStatus.INTERNAL) if not is_lost else GrpcStatus.UNAVAILABLE,
                "the connection was lost" if is_lost else f"the server reset the call: {error.name}",
                was_refused=error is ErrorCode.REFUSED_STREAM,
            )
        elif self._error is None and not self._has_status:
            self._error = CallError(GrpcStatus.INTERNAL, "the server ended the call without a status")
        self._stream = None
        wake(self._waiter)
        wake(self._writer)

    def on_unprocessed(self) -> None:
        """The server's GOAWAY says that it has not begun to answer."""
        self._error = self._error or CallError(GrpcStatus.UNAVAILABLE, "the server goes away", was_refused=True)


OnAnswer = Callable[[bytes | None, CallError | None], None]
"""Takes the only message of an answer, or why there is none."""


class UnaryCall(ClientCall):
    """A call of one message each way, whose outcome `on_answer` gets, without a task. It is called once, not after
    `withdraw`, and must not raise."""

    def __init__(self, session: "ClientSession", payer: str, max_bytes: int, on_answer: OnAnswer) -> None:
        super().__init__(session, payer, max_bytes)
        self._on_answer: OnAnswer | None = on_answer

    def end_at(self, deadline: float) -> None:
        """Its time is over at `deadline`, by the event loop's clock."""
        if not self._is_over:
            self._session.add_deadline(self, deadline)

    def withdraw(self) -> None:
        """Nobody waits for the answer any more. Idempotent."""
        self._on_answer = None
        self.cancel()

    def on_data(self, data: memoryview) -> None:
        reader = self._reader
        if reader.has_taken(data):
            return
        super().on_data(data)
        if reader.size is not None and reader.size > self._max_bytes:
            found = f"message of {reader.size} bytes is larger than max {self._max_bytes}"
            self._fail(GrpcStatus.RESOURCE_EXHAUSTED, found)
        elif reader.missing_bytes:
            reader.expect()
            self._widen(reader.missing_bytes)

    def on_closed(self, error: ErrorCode | None, *, is_lost: bool) -> None:
        super().on_closed(error, is_lost=is_lost)
        self._session.drop_deadline(self)
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            answer = self._answer()
            on_answer(*((None, answer) if isinstance(answer, CallError) else (answer, None)))

    def _answer(self) -> bytes | CallError:
        if self._error is not None:
            return self._error
        try:
            answer = self._reader.take()
        except MessageMalformed as error:
            return CallError(GrpcStatus.INTERNAL, str(error))
        if answer is None:
            return CallError(GrpcStatus.INTERNAL, "an answer without a whole message")
        if self._reader.held_bytes:
            return CallError(GrpcStatus.INTERNAL, "more than one message in an answer")
        return answer


class ClientSession(Http2Session):
    """One connection of a channel."""

    def __init__(
        self,
        channel: "GrpcChannel",
        keepalive: Keepalive,
        *,
        is_shared: bool = False,
        answer_window: int = DEFAULT_WINDOW,
    ) -> None:
        """`is_shared` and `answer_window` as in `GrpcChannel`."""
        limits = Http2Limits(frame_bytes=ANSWER_FRAME_BYTES, window_bytes=answer_window)
        super().__init__(Side.CLIENT, limits, keepalive.user_timeout_s)
        self.greeted = asyncio.Event()
        """Set when the server's settings have arrived, or the connection is lost."""
        self._channel = channel
        self._shares = StreamShares[asyncio.Future[bool]](is_shared=is_shared)
        """Whose the streams are. What waits is told whether it has one now, or never will."""
        self._ended = asyncio.Event()
        """Set when a call has ended."""
        self._is_lost = False
        self.loss: OSError | None = None
        """Why the connection was lost, where the transport knows."""
        self._deadlines: dict[UnaryCall, float] = {}
        """By the event loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """For the first of them, or an earlier one: nearly every call ends before its own."""

    async def open(
        self, payer: str, make_block: Callable[[], bytes], request: bytes | None, max_bytes: int
    ) -> ClientCall:
        """Open a call once its payer may have a stream; `make_block` makes its header block then. A `request` is its
        only message. Raises CallError."""
        if self.has_stream(payer):
            self._shares.take(payer)
        else:
            await self._wait_for_stream(payer)
        try:
            refusal = self._refusal()
            if refusal is not None:
                raise refusal
            block = make_block()
        except BaseException:
            self._free_stream(payer)
            raise
        call = ClientCall(self, payer, max_bytes)
        self._send_head(call, block, request)
        return call

    def has_stream(self, payer: str) -> bool:
        """Whether a call of the payer may begin now."""
        connection = self.connection
        is_open = self.is_open and not connection.is_going_away
        return is_open and self._shares.may_take(payer, connection.peer_max_streams)

    def begin(self, call: ClientCall, block: bytes, request: bytes | None) -> None:
        """Begin a call whose payer `has_stream`, by its header block; a `request` is its only message."""
        self._shares.take(call.payer)
        self._send_head(call, block, request)

    async def _wait_for_stream(self, payer: str) -> None:
        """Return when the payer has a stream, which is to be freed. Raises CallError."""
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        granted: asyncio.Future[bool] = self.loop.create_future()
        self._shares.wait(payer, granted)
        try:
            has_stream = await granted
        except asyncio.CancelledError:
            is_late = not self._shares.withdraw(payer, granted)
            if is_late and not granted.cancelled() and granted.result():
                self._free_stream(payer)
            raise
        if not has_stream:
            raise self._refusal() or _lost()

    def add_deadline(self, call: UnaryCall, deadline: float) -> None:
        """End the call at `deadline`, by the event loop's clock."""
        self._deadlines[call] = deadline
        self._set_timer(deadline)

    def drop_deadline(self, call: UnaryCall) -> None:
        """The call is over. Idempotent."""
        self._deadlines.pop(call, None)

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            if deadline >= self._timer.when():
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(deadline, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        now = self.loop.time()
        try:
            for call in [each for each, deadline in self._deadlines.items() if deadline <= now]:
                self.drop_deadline(call)
                call.expire()
        finally:  # one call that fails leaves the others theirs
            later = min(self._deadlines.values(), default=None)
            if later is not None:
                self._set_timer(later)

    def _refusal(self) -> CallError | None:
        """Why no call can begin here any more."""
        if self.connection.is_going_away:
            return CallError(GrpcStatus.UNAVAILABLE, "the server goes away", was_refused=True)
        return None if self.is_open else _lost()

    def _send_head(self, call: ClientCall, block: bytes, request: bytes | None) -> None:
        """Send the header block of a call that has a stream, and a `request` that is its only message."""
        connection = self.connection
        stream = connection.open_stream(block)
        stream.user = call
        call.on_open(stream)
        if connection.is_going_away:  # that was the last number for a stream
            self._channel.on_session_leaving(self)
            self._end_waits()
        if request is not None and len(request) < _JOINED_BYTES:
            connection.send_last(stream, frame_message(request))
        elif request is not None:
            connection.send_data(stream, prefix_of(request))
            connection.send_last(stream, request)
        self.flush_soon()

    def _free_stream(self, payer: str) -> None:
        """One of the payer's streams is used no longer: others go on."""
        self._shares.leave(payer)
        if self._shares.lines:
            self._grant_streams()
        self._ended.set()

    def _grant_streams(self) -> None:
        shares, most = self._shares, self.connection.peer_max_streams
        while (found := shares.grant(most)) is not None:
            payer, granted = found
            if granted.done():  # whoever waited for it is about to withdraw
                shares.leave(payer)
            else:
                granted.set_result(True)

    def _end_waits(self) -> None:
        """No call begins here any more."""
        for granted in self._shares.end_waits():
            if not granted.done():
                granted.set_result(False)

    def data_received(self, data: bytes | memoryview) -> None:
        super().data_received(data)
        if self.connection.is_greeted:
            self.greeted.set()
        if self._shares.lines:  # the server may allow more streams now
            self._grant_streams()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self.loss = exc if isinstance(exc, OSError) else None
        self._end_waits()
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.greeted.set()
        self._channel.on_session_lost(self)

    async def wait_until_idle(self, within_s: float) -> None:
        """Return when no call is left, or after `within_s`."""
        end = self.loop.time() + within_s
        while self._shares.total and (left_s := end - self.loop.time()) > 0:
            self._ended.clear()
            await wait_or_timeout(self._ended, left_s)

    def close_when_idle(self) -> None:
        """Close the connection once no call is left on it."""
        if not self.connection.streams:
            self.close()

    # ConnectionUser

    def on_headers(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None:
        call: ClientCall = stream.user
        call.on_headers(headers, is_end=is_end)

    def on_data(self, stream: Stream, data: memoryview, *, is_end: bool) -> None:
        call: ClientCall = stream.user
        call.on_data(data)

    def on_closed(self, stream: Stream, error: ErrorCode | None) -> None:
        call: ClientCall | None = stream.user
        if call is not None:
            self._free_stream(call.payer)  # first: who is told of the end may begin another call
            call.on_closed(error, is_lost=self._is_lost)
            stream.user = None
        if self.connection.is_going_away:
            self.close_when_idle()

    def on_sent(self, stream: Stream) -> None:
        call: ClientCall = stream.user
        call.on_sent()

    def on_pong(self, payload: bytes) -> None:
        pass  # whatever arrives shows that the server lives

    def on_goaway(self, last_stream: int, error: int) -> None:
        self._channel.on_session_leaving(self)
        self._end_waits()
        for stream in tuple(self.connection.streams.values()):
            if stream.id > last_stream and stream.user is not None:  # the end of another call may have ended it
                cast(ClientCall, stream.user).on_unprocessed()
                self.connection.reset(stream, ErrorCode.CANCEL)
        self.close_when_idle()


class GrpcChannel:
    """Calls to one address.

    context: called for each connection, so that renewed certificates count from the next one on; it may raise OSError.
    None for a connection without TLS.
    server_name: the DNS name that the server's certificate must prove. max_bytes: largest message of an answer.
    is_shared: several payers use it, none of whom gets all the streams that the server allows (`StreamShares`).
    answer_window: bytes of a call's answer that may arrive before its reader asks for them.
    """

    def __init__(
        self,
        address: str,
        server_name: str,
        context: Callable[[], ssl.SSLContext] | None,
        keepalive: Keepalive,
        max_bytes: int,
        *,
        is_shared: bool = False,
        answer_window: int = DEFAULT_WINDOW,
    ) -> None:
        self._address = address
        # So that clients whose server went away do not come back together.
        self._name = secrets.token_hex(4)
        self._server_name = server_name
        self._context = context
        self._keepalive = keepalive
        self._max_bytes = max_bytes
        self._is_shared = is_shared
        self._answer_window = answer_window
        self._state = ChannelState.IDLE
        self._changed = asyncio.Event()
        self._session: ClientSession | None = None
        self._leaving: set[ClientSession] = set()
        """Connections whose server goes away, with the last calls on them."""
        self._connecting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._attempts = 0
        self.failure: OSError | None = None
        """Why the last attempt to connect failed."""
        self._blocks: dict[str, bytes] = {}
        """By path: the part of a call's header block that does not change."""

    @property
    def state(self) -> ChannelState:
        return self._state

    def connect(self) -> ChannelState:
        """Begin to connect if the channel is idle; its state."""
        if self._state is ChannelState.IDLE:
            self._set_state(ChannelState.CONNECTING)
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        return self._state

    async def wait_for_change(self, state: ChannelState) -> None:
        """Return when the channel's state is not `state`."""
        while self._state is state:
            await self._changed.wait()

    async def unary(
        self,
        path: str,
        request: bytes,
        timeout_s: float | None = None,
        metadata: Metadata | MakeMetadata = (),
        payer: str = "",
    ) -> bytes:
        """Send one message, for which `payer` has a stream, and return the only one of the answer. A call that a server
        refuses unread, because too many are open or because it goes away, is sent again.

        Raises CallError, ChannelClosed.
        """
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        for attempt in range(MAX_REFUSALS):
            try:
                return await self._unary(path, request, deadline, metadata, payer)
            except CallError as error:
                if not error.was_refused:
                    raise
            await asyncio.sleep(delay(path, attempt, base_s=REFUSAL_BASE_S, cap_s=REFUSAL_CAP_S))
        return await self._unary(path, request, deadline, metadata, payer)

    async def _unary(
        self, path: str, request: bytes, deadline: float | None, metadata: Metadata | MakeMetadata, payer: str
    ) -> bytes:
        """`unary` once; `deadline` is by the event loop's clock."""
        call = await self._open(path, deadline, metadata, request, payer)
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, call.expire)
        try:
            answer = await call.read()
            if answer is None:
                raise CallError(GrpcStatus.INTERNAL, "an answer without a message")
            if await call.read() is not None:
                raise CallError(GrpcStatus.INTERNAL, "more than one message in an answer")
            return answer
        finally:
            if timer is not None:
                timer.cancel()
            if not call.is_over:
                call.cancel()

    def can_begin(self, payer: str = "") -> bool:
        """Whether `begin_unary` would begin a call of the payer. False begins to connect."""
        return self.connect() is ChannelState.READY and self._session is not None and self._session.has_stream(payer)

    def begin_unary(
        self,
        path: str,
        request: bytes,
        timeout_s: float,
        metadata: Metadata | MakeMetadata,
        on_answer: OnAnswer,
        payer: str = "",
    ) -> UnaryCall | None:
        """As `unary`, without a task, and sent once; None where it would have to wait for a connection or a stream."""
        session = self._session
        if self.connect() is not ChannelState.READY or session is None or not session.has_stream(payer):
            return None
        call = UnaryCall(session, payer, self._max_bytes, on_answer)
        session.begin(call, self._call_block(path, timeout_s, metadata), request)
        call.end_at(session.loop.time() + timeout_s)
        return call

    async def stream(self, path: str, metadata: Metadata = (), request: bytes | None = None) -> ClientCall:
        """Open a call whose messages are sent and read one by one; a `request` is the only one that is sent. The caller
        ends it. Raises CallError, ChannelClosed."""
        return await self._open(path, None, metadata, request, "")

    async def __aenter__(self) -> "GrpcChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace_s: float | None = None) -> None:
        """Close the channel; calls in flight have `grace_s` to end. Idempotent."""
        self._set_state(ChannelState.CLOSED)
        if self._connecting is not None:
            self._connecting.cancel()
        sessions = [*self._leaving, *([self._session] if self._session is not None else [])]
        loop = asyncio.get_running_loop()
        end = loop.time() + (grace_s or 0.0)
        for session in sessions:
            await session.wait_until_idle(end - loop.time())
            for stream in tuple(session.connection.streams.values()):
                cast(ClientCall, stream.user).cancel()
            session.flush()
            session.close()
        if self._watching is not None:
            self._watching.cancel()

    async def _open(
        self,
        path: str,
        deadline: float | None,
        metadata: Metadata | MakeMetadata,
        request: bytes | None,
        payer: str,
    ) -> ClientCall:
        """`deadline` is by the event loop's clock."""
        loop = asyncio.get_running_loop()

        def make_block() -> bytes:
            left_s = None if deadline is None else max(0.0, deadline - loop.time())
            return self._call_block(path, left_s, metadata)

        try:
            async with asyncio.timeout_at(deadline):
                session = await self._ready_session()
                return await session.open(payer, make_block, request, self._max_bytes)
        except TimeoutError:
            raise CallError(GrpcStatus.DEADLINE_EXCEEDED, "Deadline Exceeded", was_processed=False) from None

    def _call_block(self, path: str, timeout_s: float | None, metadata: Metadata | MakeMetadata) -> bytes:
        """A call's header block."""
        said = metadata() if callable(metadata) else metadata
        block = self._blocks.get(path) or self._block_of(path)
        if timeout_s is None and not said:
            return block
        extra = [encode_metadata(key, value) for key, value in said]
        if timeout_s is not None:
            extra.append((b"grpc-timeout", format_timeout(timeout_s).encode()))
        return block + encode(extra)

    def _block_of(self, path: str) -> bytes:
        scheme = b"http" if self._context is None else b"https"
        block = encode(
            (
                (b":method", b"POST"), (b":scheme", scheme), (b":path", path.encode()),
                (b":authority", self._server_name.encode()), (b"te", b"trailers"),
                (b"content-type", b"application/grpc"), (b"user-agent", USER_AGENT),
            )
        )  # fmt: skip
        self._blocks[path] = block
        return block

    async def _ready_session(self) -> ClientSession:
        """The open connection. Raises CallError where the last attempt failed, ChannelClosed."""
        while True:
            match self.connect():
                case ChannelState.READY:
                    assert self._session is not None
                    return self._session
                case ChannelState.FAILED:
                    found = f"failed to connect to {self._address}: {self.failure}"
                    raise CallError(GrpcStatus.UNAVAILABLE, found, was_processed=False)
                case ChannelState.CLOSED:
                    raise ChannelClosed
                case state:
                    await self.wait_for_change(state)

    async def _connect(self) -> None:
        session = await self._try_to_connect()
        if isinstance(session, OSError):
            await self._back_off(session)
            return
        self._attempts = 0
        self.failure = None
        self._session = session
        self._set_state(ChannelState.READY)
        self._watching = asyncio.get_running_loop().create_task(self._watch(session))

    async def _try_to_connect(self) -> ClientSession | OSError:
        """The connection, or why there is none."""
        try:
            async with asyncio.timeout(self._keepalive.connect_timeout_s):
                return await self._connect_once()
        except (OSError, TimeoutError, ValueError) as error:
            return error if isinstance(error, OSError) and str(error) else OSError(f"{type(error).__name__}: {error}")

    async def _connect_once(self) -> ClientSession:
        """Raises OSError."""
        target = HostPort.parse(self._address)
        loop = asyncio.get_running_loop()
        # A result, because nobody may be left to take it: an exception would be logged then.
        failed: asyncio.Future[OSError] = loop.create_future()
        session = ClientSession(self, self._keepalive, is_shared=self._is_shared, answer_window=self._answer_window)

        def on_failure(error: OSError) -> None:
            if not failed.done():
                failed.set_result(error)

        context = None if self._context is None else self._context()

        def make_lowest() -> asyncio.BaseProtocol:
            if context is None:
                return session
            within_s = self._keepalive.connect_timeout_s
            return TlsConnection(
                context, lambda _: session, on_failure, handshake_s=within_s, server_name=self._server_name
            )

        transport, _ = await loop.create_connection(make_lowest, target.host, target.port)
        greeting = asyncio.ensure_future(session.greeted.wait())
        try:
            await asyncio.wait((failed, greeting), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
        except BaseException:
            transport.abort()
            raise
        finally:
            greeting.cancel()
            failed.cancel()
        if not session.is_open:
            raise session.loss or ConnectionResetError("the server closed the connection")
        return session

    async def _back_off(self, failure: OSError) -> None:
        self.failure = failure
        self._set_state(ChannelState.FAILED)
        wait_s = delay(self._name, self._attempts, base_s=RECONNECT_BASE_S, cap_s=RECONNECT_CAP_S)
        self._attempts += 1
        await asyncio.sleep(wait_s)
        self._set_state(ChannelState.IDLE)

    async def _watch(self, session: ClientSession) -> None:
        """Ping the server while the connection is silent."""
        loop, keepalive = asyncio.get_running_loop(), self._keepalive
        while session.is_open:
            await asyncio.sleep(min(keepalive.ping_interval_s, keepalive.ping_timeout_s) / 2)
            if keepalive.without_calls or session.connection.streams:
                session.check_alive(loop.time(), keepalive.ping_interval_s, keepalive.ping_timeout_s)

    # Called by sessions

    def on_session_leaving(self, session: ClientSession) -> None:
        self._leaving.add(session)
        self._forget(session)

    def on_session_lost(self, session: ClientSession) -> None:
        self._leaving.discard(session)
        self._forget(session)

    def _forget(self, session: ClientSession) -> None:
        if self._session is session:
            self._session = None
            if self._state is ChannelState.READY:
                self._set_state(ChannelState.IDLE)

    def _set_state(self, state: ChannelState) -> None:
        if self._state is not ChannelState.CLOSED:
            self._state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


def _lost() -> CallError:
    return CallError(GrpcStatus.UNAVAILABLE, "the connection was lost", was_processed=False)


_STATUS_OF_RESET: Final = {
    ErrorCode.NO_ERROR: GrpcStatus.INTERNAL,
    ErrorCode.REFUSED_STREAM: GrpcStatus.UNAVAILABLE,
    ErrorCode.CANCEL: GrpcStatus.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: GrpcStatus.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: GrpcStatus.PERMISSION_DENIED,
}
"""Others are INTERNAL. Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#errors"""


def _status_error(headers: HeaderList) -> CallError | None:
    """The status in trailers; None: OK."""
    status, details = GrpcStatus.UNKNOWN, ""
    metadata: list[tuple[str, str | bytes]] = []
    for raw, value in headers.fields:
        name = raw.decode("latin-1")
        if name == "grpc-status":
            text = value.decode("latin-1")
            known = text.isdigit() and int(text) in GrpcStatus.__members__.values()
            status = GrpcStatus(int(text)) if known else GrpcStatus.UNKNOWN
        elif name == "grpc-message":
            details = decode_details(value)
        elif name.endswith("-bin"):
            try:
                metadata.append((name, decode_binary(value)))
            except MessageMalformed:
                continue
        elif not name.startswith(":"):
            metadata.append((name, value.decode("latin-1")))
    return None if status is GrpcStatus.OK else CallError(status, details, tuple(metadata))
