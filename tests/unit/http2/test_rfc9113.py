"""What a server does with frames that break RFC 9113 or 7541: the list of h2spec, case by case."""

import struct
from dataclasses import dataclass, field

import pytest

from shoal.http2 import frames
from shoal.http2.connection import (
    CONNECTION_WINDOW,
    OVERHEAD_BURST,
    ConnectionFailed,
    Http2Connection,
    Http2Limits,
    Side,
    Stream,
)
from shoal.http2.frames import ErrorCode
from shoal.http2.header_blocks import MAX_BLOCK_BYTES, HeaderList, encode

REQUEST = ((b":method", b"POST"), (b":scheme", b"https"), (b":path", b"/x/Y"), (b":authority", b"a"))
STREAMS = 4


@dataclass
class Recorder:
    """Notes what a connection calls."""

    headers: list[tuple[int, bool]] = field(default_factory=list)
    data: list[tuple[int, bytes, bool]] = field(default_factory=list)
    closed: list[tuple[int, ErrorCode | None]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    pongs: list[bytes] = field(default_factory=list)
    goaways: list[tuple[int, int]] = field(default_factory=list)
    streams: dict[int, Stream] = field(default_factory=dict)

    def on_headers(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None:
        self.streams[stream.id] = stream
        self.headers.append((stream.id, is_end))

    def on_data(self, stream: Stream, data: memoryview, *, is_end: bool) -> None:
        self.data.append((stream.id, bytes(data), is_end))

    def on_closed(self, stream: Stream, error: ErrorCode | None) -> None:
        self.closed.append((stream.id, error))

    def on_sent(self, stream: Stream) -> None:
        self.sent.append(stream.id)

    def on_pong(self, payload: bytes) -> None:
        self.pongs.append(payload)

    def on_goaway(self, last_stream: int, error: int) -> None:
        self.goaways.append((last_stream, error))


@dataclass
class Server:
    """A server's side that has greeted a client."""

    user: Recorder
    connection: Http2Connection

    def receive(self, *data: bytes, now: float = 1.0) -> list[tuple[int, int, int, bytes]]:
        """What it sends thereupon, as (type, flags, stream, payload). Raises ConnectionFailed."""
        self.connection.receive(b"".join(data), now)
        return self.take()

    def take(self) -> list[tuple[int, int, int, bytes]]:
        sent = b""
        while output := self.connection.take_output():
            sent += output
        return split(sent)

    def failure(self, *data: bytes) -> ErrorCode:
        """The error that ends the connection, which GOAWAY names too."""
        with pytest.raises(ConnectionFailed) as failed:
            self.receive(*data)
        kind, _, _, payload = self.take()[-1]
        assert kind == frames.GOAWAY
        assert struct.unpack(">I", payload[4:8])[0] == failed.value.error
        return failed.value.error

    def reset(self, stream: int, *data: bytes) -> ErrorCode:
        """The error by which the stream ends, while the connection goes on."""
        found = [payload for kind, _, number, payload in self.receive(*data) if (kind, number) == (3, stream)]
        assert len(found) == 1
        assert self.receive(frames.ping(b"12345678")) == [(frames.PING, frames.ACK, 0, b"12345678")]
        return ErrorCode(int.from_bytes(found[0], "big"))


def split(data: bytes) -> list[tuple[int, int, int, bytes]]:
    found = []
    while data:
        size = int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frames.head(len(payload), kind, flags, stream) + payload


def headers(stream: int, *extra: tuple[bytes, bytes], flags: int = 4, of: object = REQUEST) -> bytes:
    """A HEADERS frame. flags: END_HEADERS alone by default."""
    assert isinstance(of, tuple)
    return frame(frames.HEADERS, flags, stream, encode((*of, *extra)))


def request(stream: int, *extra: tuple[bytes, bytes]) -> bytes:
    """A request without a body."""
    return headers(stream, *extra, flags=5)


@pytest.fixture
def server() -> Server:
    user = Recorder()
    made = Server(user, Http2Connection(Side.SERVER, user, Http2Limits(streams=STREAMS)))
    made.receive(frames.PREFACE, frames.settings(()))
    return made


PING8 = b"\0" * 8
SETTINGS_ON_STREAM = frame(frames.SETTINGS, 0, 1)

CONNECTION_ERRORS: dict[str, tuple[list[bytes], ErrorCode]] = {
    "4.2 a frame larger than allowed": (
        [frame(frames.DATA, 0, 1, bytes(frames.MIN_FRAME_BYTES + 1))], ErrorCode.FRAME_SIZE_ERROR),
    "4.2 a large HEADERS frame": (
        [frame(frames.HEADERS, 4, 1, bytes(frames.MIN_FRAME_BYTES + 1))], ErrorCode.FRAME_SIZE_ERROR),
    "4.3 a header block that is not HPACK": ([frame(frames.HEADERS, 5, 1, b"\xff\xff\xff\xff\xff\xff\xff")],
        ErrorCode.COMPRESSION_ERROR),
    "4.3 PRIORITY within a header block": (
        [headers(1, flags=0), frame(frames.PRIORITY, 0, 1, bytes(5))], ErrorCode.PROTOCOL_ERROR),
    "4.3 HEADERS of another stream within a header block": ([headers(1, flags=0), request(3)],
        ErrorCode.PROTOCOL_ERROR),
    "5.1 DATA on an idle stream": ([frame(frames.DATA, 0, 1, b"x")], ErrorCode.PROTOCOL_ERROR),
    "5.1 RST_STREAM on an idle stream": ([frames.rst_stream(1, 8)], ErrorCode.PROTOCOL_ERROR),
    "5.1 WINDOW_UPDATE on an idle stream": ([frames.window_update(1, 1)], ErrorCode.PROTOCOL_ERROR),
    "5.1 CONTINUATION on an idle stream": ([frame(frames.CONTINUATION, 4, 1, b"")], ErrorCode.PROTOCOL_ERROR),
    "5.1 DATA after END_STREAM": ([request(1), frame(frames.DATA, 1, 1, b"x")], ErrorCode.STREAM_CLOSED),
    "5.1 HEADERS after END_STREAM": ([request(1), request(1)], ErrorCode.STREAM_CLOSED),
    "5.1 CONTINUATION after END_STREAM": (
        [request(1), frame(frames.CONTINUATION, 4, 1, b"")], ErrorCode.PROTOCOL_ERROR),
    "5.1 DATA after RST_STREAM": (
        [headers(1), frames.rst_stream(1, 8), frame(frames.DATA, 1, 1, b"x")], ErrorCode.STREAM_CLOSED),
    "5.1 HEADERS after RST_STREAM": ([headers(1), frames.rst_stream(1, 8), request(1)], ErrorCode.STREAM_CLOSED),
    "5.1.1 an even stream": ([request(2)], ErrorCode.PROTOCOL_ERROR),
    "5.1.1 HEADERS on stream 0": ([request(0)], ErrorCode.PROTOCOL_ERROR),
    "5.3.1 a HEADERS frame that depends on itself": (
        [frame(frames.HEADERS, 0x25, 1, struct.pack(">IB", 1, 15) + encode(REQUEST))], ErrorCode.PROTOCOL_ERROR),
    "6.1 DATA on stream 0": ([frame(frames.DATA, 0, 0, b"x")], ErrorCode.PROTOCOL_ERROR),
    "6.1 more padding than payload": (
        [headers(1), frame(frames.DATA, frames.PADDED | 1, 1, b"\x08abc")], ErrorCode.PROTOCOL_ERROR),
    "6.1 padding without its length": (
        [headers(1), frame(frames.DATA, frames.PADDED | 1, 1, b"")], ErrorCode.PROTOCOL_ERROR),
    "6.2 HEADERS with more padding than payload": (
        [frame(frames.HEADERS, frames.PADDED | 5, 1, b"\xff" + encode(REQUEST))], ErrorCode.PROTOCOL_ERROR),
    "6.2 HEADERS without the priority that they announce": (
        [frame(frames.HEADERS, 0x25, 1, b"abc")], ErrorCode.FRAME_SIZE_ERROR),
    "6.3 PRIORITY on stream 0": ([frame(frames.PRIORITY, 0, 0, bytes(5))], ErrorCode.PROTOCOL_ERROR),
    "6.4 RST_STREAM on stream 0": ([frames.rst_stream(0, 8)], ErrorCode.PROTOCOL_ERROR),
    "6.4 RST_STREAM of three bytes": (
        [headers(1), frame(frames.RST_STREAM, 0, 1, b"\0\0\0")], ErrorCode.FRAME_SIZE_ERROR),
    "6.5 SETTINGS with ACK and a payload": (
        [frame(frames.SETTINGS, frames.ACK, 0, bytes(6))], ErrorCode.FRAME_SIZE_ERROR),
    "6.5 SETTINGS on a stream": ([SETTINGS_ON_STREAM], ErrorCode.PROTOCOL_ERROR),
    "6.5 SETTINGS of three bytes": ([frame(frames.SETTINGS, 0, 0, bytes(3))], ErrorCode.FRAME_SIZE_ERROR),
    "6.5.2 ENABLE_PUSH of 2": ([frames.settings([(frames.ENABLE_PUSH, 2)])], ErrorCode.PROTOCOL_ERROR),
    "6.5.2 a window of 2 GiB": (
        [frames.settings([(frames.INITIAL_WINDOW_SIZE, 2**31)])], ErrorCode.FLOW_CONTROL_ERROR),
    "6.5.2 frames below the least": ([frames.settings([(frames.MAX_FRAME_SIZE, 2**14 - 1)])], ErrorCode.PROTOCOL_ERROR),
    "6.5.2 frames above the most": ([frames.settings([(frames.MAX_FRAME_SIZE, 2**24)])], ErrorCode.PROTOCOL_ERROR),
    "6.6 PUSH_PROMISE of a client": ([frame(frames.PUSH_PROMISE, 4, 1, bytes(4))], ErrorCode.PROTOCOL_ERROR),
    "6.7 PING on a stream": ([frame(frames.PING, 0, 1, PING8)], ErrorCode.PROTOCOL_ERROR),
    "6.7 PING of six bytes": ([frame(frames.PING, 0, 0, bytes(6))], ErrorCode.FRAME_SIZE_ERROR),
    "6.8 GOAWAY on a stream": ([frame(frames.GOAWAY, 0, 1, bytes(8))], ErrorCode.PROTOCOL_ERROR),
    "6.8 GOAWAY of four bytes": ([frame(frames.GOAWAY, 0, 0, bytes(4))], ErrorCode.FRAME_SIZE_ERROR),
    "6.9 WINDOW_UPDATE by 0": ([frames.window_update(0, 0)], ErrorCode.PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of three bytes": ([frame(frames.WINDOW_UPDATE, 0, 0, bytes(3))], ErrorCode.FRAME_SIZE_ERROR),
    "6.9.1 a connection's window of 2 GiB": ([frames.window_update(0, 2**31 - 1)] * 2, ErrorCode.FLOW_CONTROL_ERROR),
    "6.9.2 a stream's window of 2 GiB by SETTINGS": (
        [headers(1), frames.window_update(1, 2**31 - 1 - frames.DEFAULT_WINDOW),
         frames.settings([(frames.INITIAL_WINDOW_SIZE, frames.DEFAULT_WINDOW + 1)])], ErrorCode.FLOW_CONTROL_ERROR),
    "6.10 CONTINUATION after END_HEADERS": (
        [headers(1), frame(frames.CONTINUATION, 4, 1, b"")], ErrorCode.PROTOCOL_ERROR),
    "6.10 CONTINUATION of stream 0": (
        [headers(1, flags=0), frame(frames.CONTINUATION, 4, 0, b"")], ErrorCode.PROTOCOL_ERROR),
    "6.10 DATA within a header block": (
        [headers(1, flags=0), frame(frames.DATA, 1, 1, b"x")], ErrorCode.PROTOCOL_ERROR),
    "7541 2.3.3 an index that is in no table": ([frame(frames.HEADERS, 5, 1, b"\xc0")], ErrorCode.COMPRESSION_ERROR),
    "7541 4.2 a table larger than allowed": (
        [frame(frames.HEADERS, 5, 1, b"\x3f\xe2\x1f" + encode(REQUEST))], ErrorCode.COMPRESSION_ERROR),
    "7541 5.2 a string that its block cuts off": ([frame(frames.HEADERS, 5, 1, b"\x00\x7fab")],
        ErrorCode.COMPRESSION_ERROR),
    "a flood of CONTINUATION": (
        [headers(1, flags=0), *[frame(frames.CONTINUATION, 0, 1, bytes(2**13))] * 5], ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of empty CONTINUATION": (
        [headers(1, flags=0), *[frame(frames.CONTINUATION, 0, 1)] * 2000], ErrorCode.ENHANCE_YOUR_CALM),
    "fields that expand beyond all measure": (
        [frame(frames.HEADERS, 5, 1, b"\x40\x01a\x7f\xa1\x1e" + bytes(4000).replace(b"\0", b"b") + b"\xbe" * 100)],
        ErrorCode.ENHANCE_YOUR_CALM),
}  # fmt: skip


@pytest.mark.parametrize("case", CONNECTION_ERRORS)
def test_a_connection_ends(server: Server, case: str) -> None:
    data, error = CONNECTION_ERRORS[case]
    assert server.failure(*data) is error
    assert server.receive(request(7)) == [], "nothing is received any more"
    assert (7, True) not in server.user.headers


STREAM_ERRORS: dict[str, tuple[list[bytes], ErrorCode]] = {
    "5.1.2 more streams than allowed": (
        [*[headers(number) for number in (3, 5, 7, 9)], headers(1 + 2 * 5)], ErrorCode.REFUSED_STREAM),
    "6.3 PRIORITY of four bytes": ([headers(11), frame(frames.PRIORITY, 0, 11, bytes(4))], ErrorCode.FRAME_SIZE_ERROR),
    "5.3.1 PRIORITY on itself": (
        [headers(11), frame(frames.PRIORITY, 0, 11, struct.pack(">IB", 11, 1))], ErrorCode.PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of a stream by 0": ([headers(11), frames.window_update(11, 0)], ErrorCode.PROTOCOL_ERROR),
    "6.9.1 a stream's window of 2 GiB": (
        [headers(11), frames.window_update(11, 2**31 - 1)], ErrorCode.FLOW_CONTROL_ERROR),
    "more data than the stream's window": (
        [headers(11), *[frame(frames.DATA, 0, 11, bytes(2**14))] * 4], ErrorCode.FLOW_CONTROL_ERROR),
    "8.1 trailers that do not end the stream": (
        [headers(11), headers(11, of=((b"x", b"y"),))], ErrorCode.PROTOCOL_ERROR),
    "8.1.2 an uppercase name": ([request(11, (b"X-Y", b"z"))], ErrorCode.PROTOCOL_ERROR),
    "8.1.2 a value with a line break": ([request(11, (b"x", b"y\r\nz"))], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.1 an unknown pseudo-header": ([request(11, (b":test", b"z"))], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.1 a pseudo-header of responses": ([request(11, (b":status", b"200"))], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.1 a pseudo-header in trailers": (
        [headers(11), headers(11, of=((b":method", b"POST"),), flags=5)], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.1 a pseudo-header after a field": (
        [headers(11, of=((b"x", b"y"), *REQUEST), flags=5)], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.2 connection": ([request(11, (b"connection", b"keep-alive"))], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.2 te that is not trailers": ([request(11, (b"te", b"gzip"))], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.3 an empty path": (
        [headers(11, of=tuple((k, b"" if k == b":path" else v) for k, v in REQUEST), flags=5)],
        ErrorCode.PROTOCOL_ERROR),
    "8.1.2.3 no method": ([headers(11, of=REQUEST[1:], flags=5)], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.3 no scheme": ([headers(11, of=(REQUEST[0], *REQUEST[2:]), flags=5)], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.3 no path": ([headers(11, of=(*REQUEST[:2], REQUEST[3]), flags=5)], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.3 two methods": ([request(11, REQUEST[0])], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.6 less data than content-length": (
        [headers(11, (b"content-length", b"5")), frame(frames.DATA, 1, 11, b"four")], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.6 more data than content-length": (
        [headers(11, (b"content-length", b"3")), frame(frames.DATA, 0, 11, b"fo"), frame(frames.DATA, 1, 11, b"ur")],
        ErrorCode.PROTOCOL_ERROR),
    "8.1.2.6 content-length without data": ([request(11, (b"content-length", b"1"))], ErrorCode.PROTOCOL_ERROR),
    "8.1.2.6 a content-length that is no number": (
        [headers(11, (b"content-length", b"-1"))], ErrorCode.PROTOCOL_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("case", STREAM_ERRORS)
def test_a_stream_ends_and_its_connection_goes_on(server: Server, case: str) -> None:
    data, error = STREAM_ERRORS[case]
    assert server.reset(11, *data) is error
    assert (11, True) not in server.user.headers
    assert 11 not in server.connection.streams
    if case.startswith("5.1.2"):
        server.receive(frames.rst_stream(3, 8))
    server.receive(request(13))
    assert (13, True) in server.user.headers


ALLOWED: dict[str, list[bytes]] = {
    "3.4 settings twice": [frames.settings([(frames.INITIAL_WINDOW_SIZE, 1)])] * 2,
    "4.1 an unknown frame": [frame(0xFF, 0xFF, 0, b"x"), frame(0xFF, 0, 99, b"x")],
    "4.1 unknown flags": [frame(frames.PING, 0xFE & ~frames.ACK, 0, PING8)],
    "4.1 the reserved bit": [struct.pack(">BHBBI", 0, 8, frames.PING, 0, 2**31) + PING8],
    "5.1 WINDOW_UPDATE and RST_STREAM after the end": [
        request(1), frames.window_update(1, 9), frames.rst_stream(1, 8), frames.window_update(1, 9)],
    "5.1 PRIORITY on an idle stream": [frame(frames.PRIORITY, 0, 99, struct.pack(">IB", 1, 1))],
    "5.3 HEADERS with a priority": [frame(frames.HEADERS, 0x25, 1, struct.pack(">IB", 0, 1) + encode(REQUEST))],
    "6.1 padding": [headers(1), frame(frames.DATA, frames.PADDED | 1, 1, b"\x02x\0\0")],
    "6.2 padded HEADERS": [frame(frames.HEADERS, frames.PADDED | 5, 1, b"\x02" + encode(REQUEST) + b"\0\0")],
    "6.5.3 an unknown setting": [frames.settings([(0xFF, 1)])],
    "6.7 a PING's acknowledgement": [frame(frames.PING, frames.ACK, 0, PING8)],
    "6.8 GOAWAY": [frames.goaway(0, 0, b"bye")],
    "6.10 CONTINUATION": [
        frame(frames.HEADERS, 1, 1, encode(REQUEST)[:7]), frame(frames.CONTINUATION, 0, 1, encode(REQUEST)[7:9]),
        frame(frames.CONTINUATION, 4, 1, encode(REQUEST)[9:])],
    "8.1 trailers": [headers(1), frame(frames.DATA, 0, 1, b"x"), headers(1, of=((b"x", b"y"),), flags=5)],
    "7541 6.3 a smaller table": [frame(frames.HEADERS, 5, 1, b"\x20" + encode(REQUEST))],
}  # fmt: skip


@pytest.mark.parametrize("case", ALLOWED)
@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_what_is_allowed_goes_on_however_it_is_cut(case: str, step: int) -> None:
    user = Recorder()
    server = Server(user, Http2Connection(Side.SERVER, user, Http2Limits(streams=STREAMS)))
    data = b"".join((frames.PREFACE, frames.settings(()), *ALLOWED[case], request(101)))
    for start in range(0, len(data), step):
        server.connection.receive(data[start : start + step], 1.0)
    assert server.user.headers[-1] == (101, True)
    assert server.receive(frames.ping(b"12345678"))[-1] == (frames.PING, frames.ACK, 0, b"12345678")
    if "padding" in case:
        assert user.data == [(1, b"x", True)]
    if "trailers" in case:
        assert (1, True) in user.headers


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", frames.PREFACE[:10] + b"x", b"\x16\x03\x01"])
def test_3_4_a_client_that_speaks_something_else(first: bytes) -> None:
    server = Server(Recorder(), Http2Connection(Side.SERVER, Recorder()))
    assert server.failure(first) is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("first", [frames.ping(PING8), request(1), frames.SETTINGS_ACK])
def test_3_4_the_first_frame_is_settings(first: bytes) -> None:
    server = Server(Recorder(), Http2Connection(Side.SERVER, Recorder()))
    assert server.failure(frames.PREFACE, first) is ErrorCode.PROTOCOL_ERROR


def test_data_beyond_the_connections_window_ends_it(server: Server) -> None:
    server.connection._receive_window = 10
    server.receive(headers(1))
    assert server.failure(frame(frames.DATA, 0, 1, bytes(11))) is ErrorCode.FLOW_CONTROL_ERROR


def test_the_connections_window_is_refilled_by_data_of_streams_that_are_over(server: Server) -> None:
    server.receive(headers(1))
    server.connection.reset(server.user.streams[1], ErrorCode.CANCEL)
    server.take()
    granted = 0
    for _ in range(2 * CONNECTION_WINDOW // 2**14):
        for kind, _, number, payload in server.receive(frame(frames.DATA, 0, 1, bytes(2**14))):
            assert (kind, number) == (frames.WINDOW_UPDATE, 0)
            granted += int.from_bytes(payload, "big")
    assert granted >= CONNECTION_WINDOW
    assert not server.user.data


FLOODS = {
    "ping": frames.ping(PING8),
    "settings": frames.settings(()),
    "empty data": frame(frames.DATA, 0, 1),
    "priority": frame(frames.PRIORITY, 0, 1, bytes(5)),
    "window": frames.window_update(0, 1),
    "unknown": frame(0xEE, 0, 0),
    "refused": request(2001, (b"X", b"")),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_frames_that_carry_nothing_are_bounded(server: Server, kind: str) -> None:
    """A burst is fine, and so is as many over a long time."""
    server.receive(headers(1))
    numbers = iter(range(3, 10**6, 2))

    def each() -> bytes:
        if kind != "refused":
            return FLOODS[kind]
        return headers(next(numbers), (b"X", b""), flags=5)

    burst = int(OVERHEAD_BURST) - 10
    server.receive(*(each() for _ in range(burst)))
    for second in range(2, 200):
        server.receive(*(each() for _ in range(90)), now=float(second))
    with pytest.raises(ConnectionFailed) as failed:
        server.receive(*(each() for _ in range(2 * burst)), now=200.0)
    assert failed.value.error is ErrorCode.ENHANCE_YOUR_CALM


def test_a_large_block_in_continuations_is_read(server: Server) -> None:
    block = encode((*REQUEST, *((f"x-{number}".encode(), bytes(1000).replace(b"\0", b"v")) for number in range(25))))
    assert 2**14 < len(block) < MAX_BLOCK_BYTES
    server.receive(frames.headers(1, block, 2**14, end_stream=True))
    assert server.user.headers == [(1, True)]
