"""One end of a connection: received bytes to frames, frames to bytes that leave together.

Small frames of one turn of the event loop leave in one write. A large payload is neither joined nor copied here: the
kernel gets it where it lies, with the frames behind it, as much as it takes. The transport, which copies what the
kernel does not take, gets a small piece of the rest, and tells when there is room.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from shoal.agent.frames.format import (
    SMALL_BYTES,
    Frame,
    FrameError,
    FrameReader,
    FrameType,
    Header,
    encode_head,
    encode_json,
)
from shoal.host.flush_queue import flush_queue

Part = bytes | bytearray | memoryview

_JOINED_BYTES: Final = 2**17
"""Most bytes of small frames that are joined for one write."""
_WAITING_PIECE: Final = 2**16
"""Bytes of a large payload that the transport copies and holds while the kernel takes no more."""
_MOST_PARTS: Final = 64
"""Parts that the kernel is offered at once. Linux takes up to 1024 (IOV_MAX)."""
_SEND_BUFFER: Final = 2**20
"""Room in the kernel for what the peer has not read; Linux doubles it, and allows `net.core.wmem_max` (208 KiB or
more). By default one tensor of 100 KiB leaves none for the next. Each time that it is full, both ends wake up once
more: a Unix socket is ready again when three quarters of what it holds are read (`unix_writable` in Linux)."""
TURN_S: Final = 0.0002
"""Handlers of one turn of the event loop should take no longer together: what they wrote leaves only then. A send and a
turn take about a twentieth of it (decision 0024)."""


class _QueuedFrame:
    """A frame of which at least a part has not left yet."""

    __slots__ = ("call", "is_begun", "parts", "size")

    def __init__(self, call: int, parts: list[Part], size: int) -> None:
        self.call = call
        # What has not left of head and header, then of the payload.
        self.parts = parts
        # Bytes of all these parts together.
        self.size = size
        # A part of it has left.
        self.is_begun = False

    def drop(self, size: int) -> None:
        """The first `size` bytes have left; there are more."""
        self.is_begun = True
        self.size -= size
        left = 0
        while size >= len(self.parts[left]):
            size -= len(self.parts[left])
            left += 1
        del self.parts[:left]
        if size:
            self.parts[0] = memoryview(self.parts[0])[size:]


class FrameConnection(asyncio.BufferedProtocol):
    """Base of both ends. A subclass handles frames in `on_frame`, and the end of the connection in `on_lost`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        """Of the transport's socket; -1 where it has none."""
        self._reader = FrameReader()
        self._queue: deque[_QueuedFrame] = deque()
        self._queued_bytes = 0
        self._is_blocked = False
        self._is_flush_due = False
        self._flushes = flush_queue()
        self._is_handling = False
        self._is_reading_paused = False
        self._turn_ends_at = 0.0

    def on_frame(self, frame: Frame) -> None:
        """Raises FrameError if the peer may not send it."""
        raise NotImplementedError

    def on_lost(self, why: str) -> None:
        """The connection is over. Called once."""
        raise NotImplementedError

    def max_payload(self) -> int:
        """Most payload bytes of the next frame."""
        raise NotImplementedError

    def may_read(self) -> bool:
        """Whether the next frame may be handled now. `read_on` goes on after it was False."""
        return True

    @property
    def is_busy(self) -> bool:
        """Whether more frames are likely to be sent soon."""
        return False

    @property
    def is_turn_over(self) -> bool:
        """Whether the frames handled in this turn of the event loop have taken TURN_S or more."""
        return self._loop.time() >= self._turn_ends_at

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        held = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self._queued_bytes + held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)
        connected: socket.socket | None = transport.get_extra_info("socket")
        if connected is not None:
            self._descriptor = connected.fileno()
            with suppress(OSError):
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.on_received(nbytes)
        self._handle_frames()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_blocked = True

    def resume_writing(self) -> None:
        self._is_blocked = False
        self.flush()
        self.read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop()
        self._reader.release()
        self.on_lost(f"{type(exc).__name__}: {exc}" if exc is not None else "the peer closed the connection")

    def send(self, frame_type: FrameType, call: int, header: bytes, payload: Sequence[Part] = ()) -> None:
        """Queue a frame; it leaves in this turn of the event loop, or as soon as the peer reads. The parts of `payload`
        must not change until then. Raises ShoalError(TOO_LARGE). Does nothing once the connection is over."""
        size = sum(map(len, payload))
        head = encode_head(frame_type, call, header, size)
        if self._transport is None:
            return
        self._queue.append(_QueuedFrame(call, [head, *payload], len(head) + size))
        self._queued_bytes += len(head) + size
        if not (self._is_handling or self._is_flush_due or self._is_blocked):
            self._is_flush_due = True
            self._flushes.add(self.flush, may_wait=self.is_busy)

    def send_json(self, frame_type: FrameType, call: int, header: Header, payload: Sequence[Part] = ()) -> None:
        """As `send`."""
        self.send(frame_type, call, encode_json(header), payload)

    def unsend(self, call: int) -> bool:
        """Drop the frame of a call of which nothing has left. False if there is none."""
        for queued in self._queue:
            if queued.call == call and not queued.is_begun:
                self._queue.remove(queued)
                self._queued_bytes -= queued.size
                return True
        return False

    def flush(self) -> None:
        """Hand to the transport what the peer can take now."""
        self._is_flush_due = False
        while self._queue and not self._is_blocked and self._transport is not None:
            if self._queue[0].size <= SMALL_BYTES:
                self._transport.write(self._take_small())
            elif not self._send_now():
                self._wait_for_room(self._transport, self._queue[0])

    def read_on(self) -> None:
        """Handle the frames that `may_read` left for later."""
        if self._is_reading_paused and self._transport is not None and self.may_read():
            self._is_reading_paused = False
            self._transport.resume_reading()
            self._handle_frames()

    def disconnect(self) -> None:
        """End the connection after what the peer takes at once. Other frames in the queue are dropped."""
        self.flush()
        if self._transport is not None:
            self._transport.close()
        self._drop()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._drop()

    def _drop(self) -> None:
        self._transport = None
        self._queue.clear()
        self._queued_bytes = 0

    def _take_small(self) -> bytes:
        """The small frames at the head of the queue, and what is left of a large one that is as small."""
        parts: list[Part] = []
        size = 0
        while self._queue and (frame := self._queue[0]).size <= SMALL_BYTES and size < _JOINED_BYTES:
            self._queue.popleft()
            parts += frame.parts
            size += frame.size
        self._queued_bytes -= size
        return b"".join(parts)

    def _send_now(self) -> bool:
        """Have the kernel take what is in the queue; whether it took all that it was offered. An error is found again,
        and handled, by the transport that writes next."""
        if self._descriptor < 0:
            return False
        parts: list[Part] = []
        for frame in self._queue:
            parts += frame.parts
            if len(parts) >= _MOST_PARTS:
                break
        del parts[_MOST_PARTS:]
        try:
            sent = os.writev(self._descriptor, parts)
        except OSError:
            return False
        self._drop_sent(sent)
        return sent == sum(map(len, parts))

    def _wait_for_room(self, transport: asyncio.Transport, frame: _QueuedFrame) -> None:
        piece = memoryview(frame.parts[0])[:_WAITING_PIECE]
        transport.write(piece)
        self._drop_sent(len(piece))

    def _drop_sent(self, size: int) -> None:
        self._queued_bytes -= size
        while self._queue and (frame := self._queue[0]).size <= size:
            size -= frame.size
            self._queue.popleft()
        if size:
            self._queue[0].drop(size)

    def _handle_frames(self) -> None:
        if self._is_reading_paused or self._is_handling:
            return
        self._is_handling = True
        is_outermost = self._flushes.begin_event()
        self._turn_ends_at = self._loop.time() + TURN_S
        try:
            while self._transport is not None:
                if not self.may_read():
                    self._is_reading_paused = True
                    self._transport.pause_reading()
                    break
                frame = self._reader.next_frame(self.max_payload())
                if frame is None:
                    break
                self.on_frame(frame)
                del frame  # a payload must not live longer than its handler needs it
        except FrameError as error:
            self.disconnect()
            self.on_broken(f"FrameError: {error}")
        finally:
            self._is_handling = False
            try:
                self.flush()
            finally:
                if is_outermost:
                    self._flushes.end_event()

    def on_broken(self, why: str) -> None:
        """The peer broke the format, and the connection is being closed. `on_lost` follows."""
