"""One HTTP/2 connection without I/O (RFC 9113): bytes in, calls of `ConnectionUser` and bytes out.

What a peer can make it hold is bounded: streams, header blocks, bytes of each stream (its window, which the user widens
as it admits a body), and frames that carry nothing (`OVERHEAD_BURST`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol

from shoal.http2 import frames
from shoal.http2.frames import DEFAULT_WINDOW, MAX_WINDOW, ErrorCode
from shoal.http2.header_blocks import (
    MAX_BLOCK_BYTES,
    MAX_LIST_BYTES,
    HeaderDecoder,
    HeaderList,
    HeadersTooLarge,
    HeadersUnreadable,
    request_error,
    trailer_error,
)

CONNECTION_WINDOW: Final = 2**24
"""Bytes of all streams that may be on their way. The windows of the streams bound what is held."""
OUTPUT_BYTES: Final = 2**18
"""Data of streams that is moved to the output at once."""
OVERHEAD_BURST: Final = 1000.0
"""Frames that carry neither a request nor data which a peer may send at once: nghttp2's limit of its kind."""
OVERHEAD_PER_S: Final = 100.0
"""Such frames that a peer may send in the long run, besides those that answer data of this side."""
_OVERHEAD_OF_REQUEST: Final = 2.0
"""Such frames that go with a request: grpc's clients measure the connection with a ping, and widen its window."""
_REMEMBERED_STREAMS: Final = 128
"""Streams that the peer ended, whose further frames are an error; those of older ones are ignored."""


class Side(Enum):
    CLIENT = auto()
    SERVER = auto()


class ConnectionFailed(Exception):
    """The connection is over: GOAWAY is in the output, and nothing more is to be received."""

    def __init__(self, error: ErrorCode, reason: str) -> None:
        super().__init__(f"{error.name}: {reason}")
        self.error = error


class GoAwayReceived(Exception):
    """A stream cannot be opened any more: the peer ends the connection, or there are no more numbers for streams."""


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """What this side allows its peer."""

    # Streams that a client may have open at once.
    streams: int = 256
    # Bytes of one frame.
    frame_bytes: int = frames.MIN_FRAME_BYTES
    # Bytes of a new stream that may be sent before the user widens its window.
    window_bytes: int = DEFAULT_WINDOW


class Stream:
    """One stream."""

    __slots__ = (
        "declared_bytes",
        "id",
        "is_local_open",
        "is_remote_open",
        "queue",
        "queued_bytes",
        "receive_window",
        "received_bytes",
        "send_window",
        "trailers",
        "user",
    )  # fmt: skip

    def __init__(self, stream_id: int, send_window: int, receive_window: int) -> None:
        self.id = stream_id
        self.user: Any = None
        """For the user of the connection."""
        self.is_remote_open = True
        """Whether the peer may still send."""
        self.is_local_open = True
        """Whether this side may still send."""
        self.receive_window = receive_window
        """Bytes that the peer may still send."""
        self.send_window = send_window
        self.received_bytes = 0
        self.declared_bytes = -1
        """From the field content-length; -1 without it."""
        self.queue: list[memoryview] = []
        """Data that waits for a window; few, because who sends waits for `on_sent`."""
        self.queued_bytes = 0
        self.trailers: bytes | None = None
        """Block to send after the queue; empty for the end of the stream with its last data."""


class ConnectionUser(Protocol):
    """What a connection calls while it receives. No call may raise."""

    def on_headers(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None:
        """A request's head, a response's head, or trailers (then `is_end` is true). At a server a stream is new at its
        first headers."""

    def on_data(self, stream: Stream, data: memoryview, *, is_end: bool) -> None:
        """`data` is valid during the call only. It is empty at an end without data."""

    def on_closed(self, stream: Stream, error: ErrorCode | None) -> None:
        """Both sides have ended the stream, or one has reset it (`error`). No call for this stream follows."""

    def on_sent(self, stream: Stream) -> None:
        """All data that waited for a window has been moved to the output."""

    def on_pong(self, payload: bytes) -> None:
        """The peer answered a ping."""

    def on_goaway(self, last_stream: int, error: int) -> None:
        """The peer opens no streams, and has not processed those after `last_stream`."""


class Http2Connection:
    """One side of a connection. The user sends `take_output` after each call, until it is empty."""

    def __init__(self, side: Side, user: ConnectionUser, limits: Http2Limits | None = None) -> None:
        self._side = side
        self._user = user
        self._limits = limits or Http2Limits()
        self.streams: dict[int, Stream] = {}
        """Open streams by id."""
        self.out: list[bytes | bytearray | memoryview] = []
        self._moved_bytes = 0
        """Data of streams in the output."""
        self.can_send = True
        """False while the output is not taken: then data stays in the streams' queues."""
        self.is_greeted = False
        """Whether the peer's first SETTINGS have arrived."""
        self.is_going_away = False
        """Whether no more streams can be opened: a peer's GOAWAY has arrived, or there are no more numbers for them."""
        self.peer_max_streams = 2**31 - 1
        self._rest = bytearray()
        """A frame that has not arrived whole, unless it is one of data."""
        self._data_left = 0
        """Bytes of a DATA frame that are still to come."""
        self._data_stream: Stream | None = None
        """Its stream; None: nobody wants them."""
        self._data_is_end = False
        self._is_prefaced = side is Side.CLIENT
        self._decoder = HeaderDecoder()
        self._block: bytearray | None = None
        """A header block whose CONTINUATION frames are awaited."""
        self._block_stream = 0
        self._block_is_end = False
        self._next_stream = 1
        self._last_stream = 0
        """Highest stream that the peer opened."""
        self._refused_after = frames.MAX_STREAM_ID
        """Streams above it are not processed, once this side has sent GOAWAY."""
        self._peer_frame_bytes = frames.MIN_FRAME_BYTES
        self._peer_window = DEFAULT_WINDOW
        self._send_window = DEFAULT_WINDOW
        self._receive_window = CONNECTION_WINDOW
        self._waiting: deque[Stream] = deque()
        """Streams with data in their queues, the next to send first."""
        self._ended_by_peer: dict[int, None] = {}
        self._overhead = 0.0
        self._overhead_at = 0.0
        self._now = 0.0
        self._is_over = False
        values = [
            (frames.MAX_FRAME_SIZE, self._limits.frame_bytes),
            (frames.MAX_HEADER_LIST_SIZE, MAX_LIST_BYTES),
        ]
        if self._limits.window_bytes != DEFAULT_WINDOW:
            values.append((frames.INITIAL_WINDOW_SIZE, self._limits.window_bytes))
        if side is Side.SERVER:
            values.append((frames.MAX_CONCURRENT_STREAMS, self._limits.streams))
        else:
            values.append((frames.ENABLE_PUSH, 0))
            self.out.append(frames.PREFACE)
        self.out.append(frames.settings(values))
        self.out.append(frames.window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW))

    # Receiving

    def receive(self, data: bytes | memoryview, now: float) -> None:
        """Process what arrived at `now` (seconds of any monotonic clock). Raises ConnectionFailed."""
        if self._is_over:
            return
        data = memoryview(data)
        self._now = now
        if not self.is_greeted:
            self._overhead_at = now
        start = 0
        if not self._is_prefaced:
            start = self._take_preface(data)
            if start < 0:
                return
        if self._data_left:
            start = self._continue_data(data, start)
        elif self._rest:
            start = self._complete_rest(data, start)
            if start < 0:
                return
        start = self._receive_frames(data, start)
        if start < len(data) and not self._is_over:
            self._rest += data[start:]

    def _take_preface(self, data: memoryview) -> int:
        """Where the frames begin in `data`; -1 while the preface is not whole."""
        missing = len(frames.PREFACE) - len(self._rest)
        self._rest += data[:missing]
        if not frames.PREFACE.startswith(self._rest):
            raise self._fail(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
        if len(self._rest) < len(frames.PREFACE):
            return -1
        self._rest.clear()
        self._is_prefaced = True
        return missing

    def _complete_rest(self, data: memoryview, start: int) -> int:
        """Where the next frame begins in `data`, once the one in `_rest` is whole and processed; -1 before."""
        if len(self._rest) < frames.HEAD_BYTES:
            more = frames.HEAD_BYTES - len(self._rest)
            self._rest += data[start : start + more]
            start += more
            if len(self._rest) < frames.HEAD_BYTES:
                return -1
        length = int.from_bytes(self._rest[:3], "big")
        if length > self._limits.frame_bytes:
            raise self._fail(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        more = frames.HEAD_BYTES + length - len(self._rest)
        self._rest += data[start : start + more]
        if len(self._rest) < frames.HEAD_BYTES + length:
            return -1
        whole, self._rest = memoryview(self._rest), bytearray()
        self._receive_frames(whole, 0)
        return start + more

    def _receive_frames(self, data: memoryview, start: int) -> int:
        """Process the whole frames from `start` on; return where the first that is not whole begins."""
        size, most = len(data), self._limits.frame_bytes
        while size - start >= frames.HEAD_BYTES:
            high, low, kind, flags, number = frames.HEAD.unpack_from(data, start)
            length, number = high << 16 | low, number & frames.MAX_STREAM_ID
            if length > most:
                raise self._fail(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            begin = start + frames.HEAD_BYTES
            end = begin + length
            if end > size and (kind != frames.DATA or flags & frames.PADDED):
                break
            start = end
            if self._block is not None and kind != frames.CONTINUATION:
                raise self._fail(ErrorCode.PROTOCOL_ERROR, "another frame within a header block")
            if not self.is_greeted and (kind != frames.SETTINGS or flags & frames.ACK):
                raise self._fail(ErrorCode.PROTOCOL_ERROR, "a first frame that is no SETTINGS")
            if end > size:
                self._begin_data(data[begin:], length, flags, number)
                return size
            if kind == frames.DATA:
                self._on_data(data[begin:end], flags, number)
            elif kind == frames.HEADERS:
                self._on_headers(bytes(data[begin:end]), flags, number)
            else:
                self._on_control(kind, flags, number, bytes(data[begin:end]))
            if self._is_over:
                return size
        return start

    def _on_data(self, payload: memoryview, flags: int, number: int) -> None:
        size, stream = len(payload), self.streams.get(number)
        if (
            not flags
            and stream is not None
            and stream.is_remote_open
            and 0 < size <= stream.receive_window
            and self._receive_window - size >= CONNECTION_WINDOW // 2
        ):  # most frames of a large message: nothing to do but to count them
            self._receive_window -= size
            stream.receive_window -= size
            stream.received_bytes += size
            self._user.on_data(stream, payload, is_end=False)
            return
        stream = self._open_data(size, flags, number)
        if flags & frames.PADDED:
            payload = self._without_padding(payload)
        if stream is not None:
            self._pass_data(stream, payload, is_end=bool(flags & frames.END_STREAM))

    def _begin_data(self, payload: memoryview, length: int, flags: int, number: int) -> None:
        """A frame of `length` bytes, of which the first have arrived: data need not wait for the rest."""
        self._data_stream = stream = self._open_data(length, flags, number)
        self._data_left = length - len(payload)
        self._data_is_end = bool(flags & frames.END_STREAM)
        if stream is not None and payload:
            self._pass_data(stream, payload, is_end=False)

    def _continue_data(self, data: memoryview, start: int) -> int:
        """Pass on what arrived of a frame that has begun; return where it ends in `data`."""
        end = min(len(data), start + self._data_left)
        self._data_left -= end - start
        stream, is_last = self._data_stream, not self._data_left
        if is_last:
            self._data_stream = None
        if stream is not None and stream.is_remote_open:
            self._pass_data(stream, data[start:end], is_end=is_last and self._data_is_end)
        return end

    def _open_data(self, length: int, flags: int, number: int) -> Stream | None:
        """The stream of a DATA frame, whose bytes are charged to the windows; None: nobody wants them. Raises
        ConnectionFailed."""
        stream = self.streams.get(number)
        if number == 0 or (stream is None and self._is_idle(number)):
            raise self._fail(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {number}")
        self._receive_window -= length
        if self._receive_window < 0:
            raise self._fail(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        if self._receive_window < CONNECTION_WINDOW // 2:
            self.out.append(frames.window_update(0, CONNECTION_WINDOW - self._receive_window))
            self._receive_window = CONNECTION_WINDOW
        if length == 0 and not flags & frames.END_STREAM:
            self._charge_overhead()
        if stream is None or not stream.is_remote_open:
            self._on_frame_after_end(number)
            return None
        stream.receive_window -= length
        if stream.receive_window < 0:
            self.reset(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return None
        return stream

    def _pass_data(self, stream: Stream, payload: memoryview, *, is_end: bool) -> None:
        stream.received_bytes += len(payload)
        if is_end and stream.declared_bytes >= 0 and stream.declared_bytes != stream.received_bytes:
            self.reset(stream, ErrorCode.PROTOCOL_ERROR)
            return
        if is_end:
            stream.is_remote_open = False
        self._user.on_data(stream, payload, is_end=is_end)
        if is_end:
            self._end_remote(stream)

    def _without_padding(self, payload: memoryview) -> memoryview:
        if not payload or payload[0] >= len(payload):
            raise self._fail(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
        return payload[1 : len(payload) - payload[0]]

    def _on_headers(self, payload: bytes, flags: int, number: int) -> None:
        if number == 0 or (self._side is Side.SERVER and number % 2 == 0):
            raise self._fail(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & frames.PADDED:
            payload = bytes(self._without_padding(memoryview(payload)))
        if flags & frames.HAS_PRIORITY:
            if len(payload) < 5:
                raise self._fail(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without the priority that they announce")
            if int.from_bytes(payload[:4], "big") & MAX_WINDOW == number:
                raise self._fail(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
            payload = payload[5:]
        is_end = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._on_block(number, payload, is_end=is_end)
        else:
            self._block, self._block_stream, self._block_is_end = bytearray(payload), number, is_end

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None or number != self._block_stream:
            raise self._fail(ErrorCode.PROTOCOL_ERROR, "CONTINUATION outside a header block")
        self._charge_overhead()
        self._block += payload
        if len(self._block) > MAX_BLOCK_BYTES:
            raise self._fail(ErrorCode.ENHANCE_YOUR_CALM, f"a header block of more than {MAX_BLOCK_BYTES} bytes")
        if flags & frames.END_HEADERS:
            block, self._block = bytes(self._block), None
            self._on_block(number, block, is_end=self._block_is_end)

    def _on_block(self, number: int, block: bytes, *, is_end: bool) -> None:
        try:
            headers = self._decoder.decode(block)
        except HeadersTooLarge:
            raise self._fail(ErrorCode.ENHANCE_YOUR_CALM, f"fields of more than {MAX_LIST_BYTES} bytes") from None
        except HeadersUnreadable as error:
            raise self._fail(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        stream = self.streams.get(number)
        if stream is not None:
            self._on_later_block(stream, headers, is_end=is_end)
        elif self._side is Side.CLIENT or number <= self._last_stream:
            if self._is_idle(number):
                raise self._fail(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {number}")
            self._on_frame_after_end(number)
        else:
            self._open_remote(number, headers, is_end=is_end)

    def _open_remote(self, number: int, headers: HeaderList, *, is_end: bool) -> None:
        self._last_stream = number
        if number > self._refused_after:
            return  # after this side's GOAWAY: the peer knows that it is not processed
        if headers.parsed is None and request_error(headers) is not None:
            self._refuse(number, ErrorCode.PROTOCOL_ERROR)
            return
        if len(self.streams) >= self._limits.streams:
            self._refuse(number, ErrorCode.REFUSED_STREAM)
            return
        self._overhead = max(self._overhead - _OVERHEAD_OF_REQUEST, 0.0)
        stream = Stream(number, self._peer_window, self._limits.window_bytes)
        self.streams[number] = stream
        if not self._has_valid_length(stream, headers, is_end=is_end):
            self.reset(stream, ErrorCode.PROTOCOL_ERROR)
            return
        self._pass_headers(stream, headers, is_end=is_end)

    def _on_later_block(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None:
        """A response's head, or trailers."""
        if not stream.is_remote_open:
            raise self._fail(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream.id}, which has ended")
        is_head, error = (False, trailer_error(headers)) if self._side is Side.SERVER else headers.response_error()
        is_cut = is_end and stream.declared_bytes >= 0 and stream.declared_bytes != stream.received_bytes
        if error is not None or is_cut or not (is_head or is_end):
            self.reset(stream, ErrorCode.PROTOCOL_ERROR)
            return
        self._pass_headers(stream, headers, is_end=is_end)

    def _pass_headers(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None:
        if is_end:
            stream.is_remote_open = False
        self._user.on_headers(stream, headers, is_end=is_end)
        if is_end:
            self._end_remote(stream)

    def _has_valid_length(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> bool:
        declared = headers.declared_bytes()
        if declared is None:
            return False
        stream.declared_bytes = declared
        return not (is_end and declared > 0)

    def _on_control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Any frame but DATA and HEADERS."""
        if kind == frames.WINDOW_UPDATE:
            self._on_window_update(number, payload)
        elif kind == frames.RST_STREAM:
            self._on_rst_stream(number, payload)
        elif kind == frames.CONTINUATION:
            self._on_continuation(flags, number, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, number, payload)
        elif kind == frames.PING:
            self._on_ping(flags, number, payload)
        elif kind == frames.GOAWAY:
            self._on_goaway(number, payload)
        elif kind == frames.PRIORITY:
            self._on_priority(number, payload)
        elif kind == frames.PUSH_PROMISE:
            raise self._fail(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE")
        else:
            self._charge_overhead()

    def _on_window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise self._fail(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        self._charge_overhead()
        increment = int.from_bytes(payload, "big") & MAX_WINDOW
        if number == 0:
            if increment == 0:
                raise self._fail(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self._send_window += increment
            if self._send_window > MAX_WINDOW:
                raise self._fail(ErrorCode.FLOW_CONTROL_ERROR, "a window of 2 GiB and more")
        else:
            stream = self.streams.get(number)
            if stream is None:
                if self._is_idle(number):
                    raise self._fail(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {number}")
                return
            stream.send_window += increment
            if increment == 0 or stream.send_window > MAX_WINDOW:
                self.reset(stream, ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR)
                return
        self.pump()

    def _on_rst_stream(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise self._fail(ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        self._charge_overhead()
        stream = self.streams.get(number)
        if stream is None:
            if number == 0 or self._is_idle(number):
                raise self._fail(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {number}")
            return
        self._remember_end(number)
        self._close(stream, _error_code(int.from_bytes(payload, "big")))

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number != 0:
            raise self._fail(ErrorCode.PROTOCOL_ERROR, f"SETTINGS on stream {number}")
        if flags & frames.ACK:
            if payload:
                raise self._fail(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            return
        if len(payload) % 6:
            raise self._fail(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        self._charge_overhead()
        window = self._peer_window
        for key, value in frames.parse_settings(payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise self._fail(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                window = value
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.MIN_FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                    raise self._fail(ErrorCode.PROTOCOL_ERROR, f"frames of {value} bytes")
                self._peer_frame_bytes = value
            elif key == frames.ENABLE_PUSH and value > 1:
                raise self._fail(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
            elif key == frames.MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
        if window != self._peer_window:
            for stream in self.streams.values():
                stream.send_window += window - self._peer_window
                if stream.send_window > MAX_WINDOW:
                    raise self._fail(ErrorCode.FLOW_CONTROL_ERROR, "a window of 2 GiB and more")
            self._peer_window = window
        self.is_greeted = True
        self.out.append(frames.SETTINGS_ACK)
        self.pump()

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number != 0:
            raise self._fail(ErrorCode.PROTOCOL_ERROR, f"PING on stream {number}")
        if len(payload) != 8:
            raise self._fail(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if flags & frames.ACK:
            self._user.on_pong(payload)
            return
        self._charge_overhead()
        self.out.append(frames.ping(payload, ack=True))

    def _on_goaway(self, number: int, payload: bytes) -> None:
        if number != 0:
            raise self._fail(ErrorCode.PROTOCOL_ERROR, f"GOAWAY on stream {number}")
        if len(payload) < 8:
            raise self._fail(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        self._charge_overhead()
        self.is_going_away = True
        self._user.on_goaway(int.from_bytes(payload[:4], "big") & MAX_WINDOW, int.from_bytes(payload[4:8], "big"))

    def _on_priority(self, number: int, payload: bytes) -> None:
        """Priorities are ignored (RFC 9113, section 5.3)."""
        if number == 0:
            raise self._fail(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        self._charge_overhead()
        is_wrong_size = len(payload) != 5
        if is_wrong_size or int.from_bytes(payload[:4], "big") & MAX_WINDOW == number:
            error = ErrorCode.FRAME_SIZE_ERROR if is_wrong_size else ErrorCode.PROTOCOL_ERROR
            stream = self.streams.get(number)
            if stream is None:
                self.out.append(frames.rst_stream(number, error))
            else:
                self.reset(stream, error)

    def _on_frame_after_end(self, number: int) -> None:
        """A frame of a stream that is over, or whose peer has ended it. One that this side reset is ignored: the peer
        may not know yet."""
        if number in self._ended_by_peer or number in self.streams:
            raise self._fail(ErrorCode.STREAM_CLOSED, f"a frame on stream {number}, which has ended")

    def _is_idle(self, number: int) -> bool:
        """Whether the stream was never opened. Those between two that the peer opened count as idle no more."""
        if (number % 2 == 1) == (self._side is Side.SERVER):
            return number > self._last_stream
        return self._side is Side.SERVER or number >= self._next_stream

    def _charge_overhead(self) -> None:
        """Count a frame that carries nothing. Raises ConnectionFailed for a flood of them."""
        self._overhead += 1.0
        if self._overhead > OVERHEAD_BURST:
            self._overhead -= (self._now - self._overhead_at) * OVERHEAD_PER_S
            self._overhead_at = self._now
            if self._overhead > OVERHEAD_BURST:
                raise self._fail(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing")
            self._overhead = max(self._overhead, 0.0)

    def _end_remote(self, stream: Stream) -> None:
        """After the peer has ended the stream, and the user knows."""
        self._remember_end(stream.id)
        if not stream.is_local_open and not stream.queue and stream.trailers is None:
            self._close(stream, None)

    def _remember_end(self, number: int) -> None:
        self._ended_by_peer[number] = None
        if len(self._ended_by_peer) > _REMEMBERED_STREAMS:
            del self._ended_by_peer[next(iter(self._ended_by_peer))]

    # Sending

    def open_stream(self, block: bytes, *, is_end: bool = False) -> Stream:
        """Open a stream as a client, by a request's header block. Raises GoAwayReceived."""
        if self.is_going_away:
            raise GoAwayReceived
        stream = Stream(self._next_stream, self._peer_window, self._limits.window_bytes)
        self._next_stream += 2
        self.is_going_away = self._next_stream > frames.MAX_STREAM_ID
        self.streams[stream.id] = stream
        self.send_headers(stream, block)
        if is_end:
            self.end(stream)
        return stream

    def send_headers(self, stream: Stream, block: bytes) -> None:
        """A response's head, or a request's."""
        self.out.append(frames.headers(stream.id, block, self._peer_frame_bytes, end_stream=False))

    def send_data(self, stream: Stream, data: bytes | bytearray | memoryview) -> None:
        """Send data, or queue what no window allows now."""
        if not stream.is_local_open or not data:
            return
        stream.queue.append(memoryview(data))
        stream.queued_bytes += len(data)
        if len(stream.queue) == 1:
            self._waiting.append(stream)
        self.pump()

    def send_last(self, stream: Stream, data: bytes) -> None:
        """Send data, and end this side of the stream with it."""
        size = len(data)
        if 0 < size <= self._peer_frame_bytes and self.has_room(stream, size):
            self._send_window -= size
            stream.send_window -= size
            self.out += (frames.head(size, frames.DATA, frames.END_STREAM, stream.id), data)
            stream.is_local_open = False
            self._end_local(stream)
        else:
            self.send_data(stream, data)
            self.end(stream)

    def end(self, stream: Stream, trailers: bytes = b"") -> None:
        """End this side of the stream, after its data; `trailers` is a header block."""
        if not stream.is_local_open:
            return
        stream.is_local_open = False
        stream.trailers = trailers
        if not stream.queue:
            self._send_end(stream)

    @property
    def peer_frame_bytes(self) -> int:
        """The largest frame that the peer takes."""
        return self._peer_frame_bytes

    def has_room(self, stream: Stream, size: int) -> bool:
        """Whether `size` bytes would be sent at once, without waiting for a window or for other streams."""
        return self.can_send and not self._waiting and size <= stream.send_window and size <= self._send_window

    def respond(
        self, stream: Stream, head: bytes, parts: Sequence[bytes | bytearray | memoryview], trailers: bytes
    ) -> None:
        """Send a whole response: two header blocks, and the parts of its data between."""
        size = sum(map(len, parts))
        if (
            size <= self._peer_frame_bytes
            and self.has_room(stream, size)
            and len(head) <= frames.MIN_FRAME_BYTES
            and len(trailers) <= frames.MIN_FRAME_BYTES
        ):
            self._send_window -= size
            number, pack = stream.id, frames.head
            self.out += (
                pack(len(head), frames.HEADERS, frames.END_HEADERS, number), head,
                pack(size, frames.DATA, 0, number), *parts,
                pack(len(trailers), frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number), trailers,
            )  # fmt: skip
            stream.is_local_open = False
            self._end_local(stream)
            return
        self.send_headers(stream, head)
        for part in parts:
            self.send_data(stream, part)
        self.end(stream, trailers)

    def reset(self, stream: Stream, error: ErrorCode) -> None:
        """End both sides of the stream at once."""
        if stream.id in self.streams:
            self.out.append(frames.rst_stream(stream.id, error))
            self._close(stream, error)

    def widen(self, stream: Stream, size: int) -> None:
        """Let the peer send `size` bytes more than its window allows now."""
        size = min(size, MAX_WINDOW - stream.receive_window)
        if size > 0 and stream.is_remote_open:
            stream.receive_window += size
            self.out.append(frames.window_update(stream.id, size))

    def ping(self, payload: bytes) -> None:
        """`payload` has eight bytes."""
        self.out.append(frames.ping(payload))

    def go_away(self, *, is_final: bool) -> None:
        """Tell the peer that the connection ends. The first time all streams on their way are still processed; with
        `is_final` those that have not arrived are not."""
        last = self._last_stream if is_final else frames.MAX_STREAM_ID
        self._refused_after = last
        self.out.append(frames.goaway(last, ErrorCode.NO_ERROR))

    def take_output(self) -> bytes:
        """What is to be sent now; data of streams at most OUTPUT_BYTES and one frame, so that `can_send` counts."""
        if not self.out:
            return b""
        found = b"".join(self.out)
        self.out.clear()
        if self._moved_bytes:
            self._moved_bytes = 0
            self.pump()
        return found

    def pump(self) -> None:
        """Move queued data to the output, as far as windows allow and the output is taken: a frame of each stream in
        turn."""
        while self._waiting and self.can_send and self._send_window > 0 and self._moved_bytes < OUTPUT_BYTES:
            stream = self._next_sendable()
            if stream is None:
                return
            self._send_frames(stream)
            if stream.queue:
                self._waiting.append(stream)
                continue
            if stream.id in self.streams:
                self._user.on_sent(stream)
            if stream.trailers is not None:
                self._send_end(stream)

    def _next_sendable(self) -> Stream | None:
        """Take the first waiting stream that has a window."""
        for _ in range(len(self._waiting)):
            stream = self._waiting.popleft()
            if stream.send_window > 0 and stream.queue:
                return stream
            if stream.queue:
                self._waiting.append(stream)
        return None

    def _send_frames(self, stream: Stream) -> None:
        """Move a frame of the stream's data to the output; where no other stream waits, as many as may be moved. Both
        windows have room."""
        queue, out, number, most = stream.queue, self.out, stream.id, self._peer_frame_bytes
        window = min(self._send_window, stream.send_window)
        room = 1 if self._waiting else OUTPUT_BYTES - self._moved_bytes
        sent, is_last = 0, False
        while queue and sent < room and sent < window:
            first = queue[0]
            size = min(len(first), most, window - sent)
            if size == len(first):
                del queue[0]
                is_last = not queue and stream.trailers == b""
            else:
                queue[0] = first[size:]
            sent += size
            out += (frames.head(size, frames.DATA, frames.END_STREAM if is_last else 0, number), first[:size])
            self._overhead = max(self._overhead - 1.0, 0.0)  # the peer answers data with WINDOW_UPDATE
        stream.queued_bytes -= sent
        stream.send_window -= sent
        self._moved_bytes += sent
        self._send_window -= sent
        if is_last:
            stream.trailers = None
            self._end_local(stream)

    def _send_end(self, stream: Stream) -> None:
        trailers, stream.trailers = stream.trailers, None
        if trailers:
            self.out.append(frames.headers(stream.id, trailers, self._peer_frame_bytes, end_stream=True))
        else:
            self.out.append(frames.head(0, frames.DATA, frames.END_STREAM, stream.id))
        self._end_local(stream)

    def _end_local(self, stream: Stream) -> None:
        """After the end of this side is in the output. A server that answered early needs no more of the request."""
        if not stream.is_remote_open:
            self._close(stream, None)
        elif self._side is Side.SERVER:
            self.reset(stream, ErrorCode.NO_ERROR)

    def _close(self, stream: Stream, error: ErrorCode | None) -> None:
        if self.streams.pop(stream.id, None) is None:
            return
        stream.is_local_open = stream.is_remote_open = False
        if stream.queue:
            stream.queue.clear()
            stream.queued_bytes = 0
            self._waiting.remove(stream)
        stream.trailers = None
        self._user.on_closed(stream, error)

    def _refuse(self, number: int, error: ErrorCode) -> None:
        self._charge_overhead()
        self.out.append(frames.rst_stream(number, error))

    def _fail(self, error: ErrorCode, reason: str) -> ConnectionFailed:
        """The exception to raise, once GOAWAY is in the output."""
        self._is_over = True
        self.out.append(frames.goaway(self._last_stream, error, reason.encode()[:200]))
        return ConnectionFailed(error, reason)


def _error_code(value: int) -> ErrorCode:
    """The code; INTERNAL_ERROR for one that RFC 9113 does not name, as its section 7 allows."""
    return ErrorCode(value) if value in ErrorCode.__members__.values() else ErrorCode.INTERNAL_ERROR
