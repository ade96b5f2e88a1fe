"""An HTTP/2 connection (`shoal.http2`) on an asyncio transport: its output, back-pressure and keepalive."""

import asyncio
import socket
from contextlib import suppress
from typing import Final, cast

from shoal.host.flush_queue import flush_queue
from shoal.http2.connection import ConnectionFailed, ConnectionUser, Http2Connection, Http2Limits, Side, Stream
from shoal.http2.frames import DEFAULT_WINDOW, ErrorCode
from shoal.http2.grpc_messages import MessageReader

WINDOW_REFILL: Final = DEFAULT_WINDOW // 2
"""A stream's window is widened once this much of it is used."""
UNTAKEN_BYTES: Final = 2**22
"""Output for a peer that takes nothing of what it was sent before, and one frame of data: beyond that its connection
ends. Data of streams waits in their queues meanwhile, so that this is thousands of refusals, or of answers to pings. A
choice."""
_KEEPALIVE_PING: Final = b"alive\0\0\0"


class Http2Session(asyncio.Protocol):
    """One side of a connection. A subclass is its `ConnectionUser`, and calls `flush` or `flush_soon` after it sends.

    user_timeout_s: the kernel gives the connection up when sent data is not acknowledged for this long.
    """

    def __init__(self, side: Side, limits: Http2Limits, user_timeout_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.connection = Http2Connection(side, cast(ConnectionUser, self), limits)
        self._user_timeout_s = user_timeout_s
        self._transport: asyncio.Transport | None = None
        self._is_flush_due = False
        self._untaken_bytes = 0
        """Written since the peer took nothing more."""
        self._flushes = flush_queue()
        self._opened_at = self.loop.time()
        self._heard_at = self._opened_at
        self._pinged_at: float | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connected: socket.socket | None = transport.get_extra_info("socket")
        if connected is not None:
            with suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._user_timeout_s * 1000))
        self.flush()

    def data_received(self, data: bytes | memoryview) -> None:
        self._heard_at = now = self.loop.time()
        self._pinged_at = None
        is_outermost = self._flushes.begin_event()
        try:
            self.connection.receive(data, now)
            self.on_received()
            self.flush()
        except ConnectionFailed as failure:
            self.flush()
            self.on_failure(failure)
            self.close()
        finally:
            if is_outermost:
                self._flushes.end_event()

    def pause_writing(self) -> None:
        self.connection.can_send = False

    def resume_writing(self) -> None:
        self.connection.can_send = True
        self._untaken_bytes = 0
        self.connection.pump()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Every stream ends with CANCEL."""
        self._transport = None
        for stream in tuple(self.connection.streams.values()):
            self.connection.reset(stream, ErrorCode.CANCEL)

    # What a subclass may answer

    def on_received(self) -> None:
        """What arrived last is processed."""

    def on_failure(self, failure: ConnectionFailed) -> None:
        """The peer broke the protocol; the connection is being closed."""

    def on_untaken(self) -> None:
        """The peer takes nothing of what it asks for; the connection is being ended."""

    # For the subclass, and its calls

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def widen(self, stream: Stream, reader: MessageReader, window: int) -> None:
        """Let the peer send `window` bytes, unless it may send nearly as many, and the rest of the message that
        `reader` has begun."""
        more = window - stream.receive_window
        if more >= WINDOW_REFILL or (more > 0 and stream.receive_window < reader.missing_bytes):
            self.connection.widen(stream, more)
            self.flush_soon()

    def flush_soon(self) -> None:
        """Send the output after what runs now."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._flushes.add(self.flush, may_wait=len(self.connection.streams) > 1)

    def flush(self) -> None:
        """Send the output."""
        self._is_flush_due = False
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        while output := self.connection.take_output():
            if not self.connection.can_send:
                self._untaken_bytes += len(output)
                if self._untaken_bytes > UNTAKEN_BYTES + self.connection.peer_frame_bytes:
                    self.on_untaken()
                    transport.abort()
                    return
            transport.write(output)

    def close(self) -> None:
        """Close the connection once its output is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def check_alive(self, now: float, ping_interval_s: float, ping_timeout_s: float) -> None:
        """Ping a silent peer, and give up one that does not answer."""
        if self._pinged_at is not None:
            if now - self._pinged_at > ping_timeout_s:
                self.abort()
        elif now - self._heard_at > ping_interval_s:
            self._pinged_at = now
            self.connection.ping(_KEEPALIVE_PING)
            self.flush()


def wake(waiter: "asyncio.Future[None] | None") -> None:
    """End the wait of whoever awaits it; nothing where nobody does."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
