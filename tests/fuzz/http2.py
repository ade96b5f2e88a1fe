"""The HTTP/2 connection without sockets: a client's bytes in, gRPC messages out and back."""

from hpack import Encoder

from shoal.host.grpc_server import call_head
from shoal.http2 import frames
from shoal.http2.connection import ConnectionFailed, Http2Connection, Http2Limits, Side, Stream
from shoal.http2.frames import DEFAULT_WINDOW, ErrorCode
from shoal.http2.grpc_messages import RESPONSE_HEAD, TRAILERS_OK, MessageMalformed, MessageReader, frame_message
from shoal.http2.header_blocks import HeaderList

OK = "OK"
UNREADABLE = "unreadable"
STREAMS = 8
GREETING = frames.PREFACE + frames.settings(())


class Echo:
    """A server that answers each call with its first message."""

    def __init__(self) -> None:
        self.connection = Http2Connection(Side.SERVER, self, Http2Limits(STREAMS))
        self.answered = 0

    def on_headers(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None:
        if stream.user is None:
            call_head(headers, lambda _path, _metadata: {})
            stream.user = MessageReader()

    def on_data(self, stream: Stream, data: memoryview, *, is_end: bool) -> None:
        reader = stream.user
        assert isinstance(reader, MessageReader)
        try:
            reader.receive(data)
            message = reader.take()
        except MessageMalformed:
            self.connection.reset(stream, ErrorCode.INTERNAL_ERROR)
            return
        assert reader.held_bytes <= DEFAULT_WINDOW
        if message is not None and stream.is_local_open:
            self.answered += 1
            self.connection.respond(stream, RESPONSE_HEAD, (frame_message(message),), TRAILERS_OK)

    def on_closed(self, stream: Stream, error: ErrorCode | None) -> None:
        stream.user = None

    def on_sent(self, stream: Stream) -> None: ...

    def on_pong(self, payload: bytes) -> None: ...

    def on_goaway(self, last_stream: int, error: int) -> None: ...


def take(data: bytes) -> str:
    """Whatever a client sends is answered, or ends its connection. The first byte says how much arrives at once."""
    if not data:
        return UNREADABLE
    server, step = Echo(), 1 + 40 * data[0]
    connection = server.connection
    try:
        connection.receive(GREETING, 1.0)
        for start in range(1, len(data), step):
            connection.receive(data[start : start + step], 1.0 + start / 1000)
            connection.take_output()
            assert len(connection.streams) <= STREAMS
    except ConnectionFailed:
        return UNREADABLE
    return OK if server.answered else UNREADABLE


def seeds() -> list[bytes]:
    encoder = Encoder()
    fields = (
        (":method", "POST"), (":scheme", "https"), (":path", "/x/Y"), (":authority", "a"), ("te", "trailers"),
        ("content-type", "application/grpc"), ("grpc-timeout", "5S"), ("trace-bin", "AAE"),
    )  # fmt: skip
    body = frame_message(b"abc")
    calls = b"".join(
        frames.headers(number, encoder.encode(fields), 2**14, end_stream=False)
        + frames.head(len(body), frames.DATA, frames.END_STREAM, number)
        + body
        for number in (1, 3)
    )
    cut = frames.headers(5, encoder.encode(fields), 3, end_stream=False) + frames.head(8, frames.DATA, 9, 5)
    padded = cut + b"\x02" + frame_message(b"")[:5] + b"\0\0"
    control = frames.ping(b"12345678") + frames.window_update(0, 9) + frames.settings([(4, 10), (5, 2**15)])
    return [b"\xff" + calls, b"\x00" + calls + padded, b"\xff" + control + calls + frames.rst_stream(1, 8)]
