"""Two sides of a connection with each other: what is sent arrives, whatever the windows and the cuts."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.http2 import frames
from shoal.http2.connection import (
    OUTPUT_BYTES,
    GoAwayReceived,
    Http2Connection,
    Http2Limits,
    Side,
    Stream,
)
from shoal.http2.frames import DEFAULT_WINDOW, ErrorCode
from shoal.http2.header_blocks import HeaderList, encode

REQUEST = encode(((b":method", b"POST"), (b":scheme", b"https"), (b":path", b"/x/Y")))
HEAD = encode(((b":status", b"200"),))
TRAILERS = encode(((b"grpc-status", b"0"),))


@dataclass
class End:
    """One side with what it received, by stream."""

    side: Side
    # Bytes of a frame that it allows.
    frame_bytes: int = frames.MIN_FRAME_BYTES
    connection: Http2Connection = field(init=False)
    streams: dict[int, Stream] = field(default_factory=dict)
    heads: dict[int, list[tuple[tuple[bytes, bytes], ...]]] = field(default_factory=dict)
    bodies: dict[int, bytearray] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    closed: dict[int, ErrorCode | None] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    seen: list[HeaderList] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection = Http2Connection(self.side, self, Http2Limits(8, self.frame_bytes))

    def on_headers(self, stream: Stream, headers: HeaderList, *, is_end: bool) -> None:
        assert stream.id not in self.closed
        self.streams[stream.id] = stream
        self.heads.setdefault(stream.id, []).append(headers.fields)
        self.seen.append(headers)
        if is_end:
            self.ended.append(stream.id)

    def on_data(self, stream: Stream, data: memoryview, *, is_end: bool) -> None:
        assert stream.id not in self.closed
        self.bodies.setdefault(stream.id, bytearray()).extend(data)
        self.order.append(stream.id)
        if is_end:
            self.ended.append(stream.id)

    def on_closed(self, stream: Stream, error: ErrorCode | None) -> None:
        assert stream.id not in self.closed
        self.closed[stream.id] = error

    def on_sent(self, stream: Stream) -> None:
        assert stream.id not in self.closed
        self.sent.append(stream.id)

    def on_pong(self, payload: bytes) -> None: ...

    def on_goaway(self, last_stream: int, error: int) -> None: ...


def exchange(one: End, other: End, step: int = 10**9) -> None:
    """Carry what both have to say, in pieces of `step` bytes, until neither has any more."""
    while True:
        quiet = True
        for source, target in ((one, other), (other, one)):
            while output := source.connection.take_output():
                quiet = False
                for start in range(0, len(output), step):
                    target.connection.receive(output[start : start + step], 1.0)
        if quiet:
            return


def data_frames(output: bytes) -> list[int]:
    """Sizes of the DATA frames in it."""
    sizes, start = list[int](), 0
    while start < len(output):
        high, low, kind, _, _ = frames.HEAD.unpack_from(output, start)
        start += frames.HEAD_BYTES + (high << 16 | low)
        if kind == frames.DATA:
            sizes.append(high << 16 | low)
    return sizes


@pytest.fixture
def ends() -> tuple[End, End]:
    client, server = End(Side.CLIENT), End(Side.SERVER)
    exchange(client, server)
    return client, server


@given(
    bodies=st.lists(st.integers(0, 40_000), min_size=1, max_size=3),
    window=st.integers(1, 100_000),
    grant=st.integers(1_000, 100_000),
    step=st.sampled_from([97, 1_000, 16_393, 10**9]),
)
def test_bodies_arrive_whole_whatever_the_windows(bodies: list[int], window: int, grant: int, step: int) -> None:
    client, server = End(Side.CLIENT), End(Side.SERVER)
    exchange(client, server)
    client.connection.receive(frames.settings([(frames.INITIAL_WINDOW_SIZE, window)]), 1.0)
    opened = [client.connection.open_stream(REQUEST) for _ in bodies]
    for stream, size in zip(opened, bodies, strict=True):
        client.connection.send_data(stream, bytes([stream.id]) * size)
        client.connection.end(stream)
    exchange(client, server, step)
    while len(server.ended) < len(bodies):
        for number, stream in server.streams.items():
            if number not in server.ended:
                server.connection.widen(stream, grant)
        exchange(client, server, step)
    for stream, size in zip(opened, bodies, strict=True):
        assert bytes(server.bodies.get(stream.id, b"")) == bytes([stream.id]) * size
        server.connection.respond(server.streams[stream.id], HEAD, (bytes(size),), TRAILERS)
    exchange(client, server, step)
    for stream in opened:
        if stream.id not in client.closed:
            client.connection.widen(stream, 10**6)
    exchange(client, server, step)
    assert client.closed == server.closed == dict.fromkeys((each.id for each in opened), None)
    assert {number: len(body) for number, body in client.bodies.items()} == {
        stream.id: size for stream, size in zip(opened, bodies, strict=True) if size
    } or all(len(client.bodies.get(stream.id, b"")) == size for stream, size in zip(opened, bodies, strict=True))
    assert not client.connection.streams
    assert not client.connection._waiting
    assert not server.connection._waiting


def test_streams_share_what_is_sent(ends: tuple[End, End]) -> None:
    """A large body does not hold up a small one that came later."""
    client, server = ends
    large, small = client.connection.open_stream(REQUEST), client.connection.open_stream(REQUEST)
    client.connection.can_send = False
    client.connection.send_data(large, bytes(60_000))
    client.connection.send_data(small, b"x")
    client.connection.can_send = True
    client.connection.pump()
    exchange(client, server)
    assert server.order.index(small.id) == 1
    assert client.sent == [small.id, large.id]


@pytest.mark.parametrize("frame_bytes", [2**14, 2**16])
def test_a_lone_answer_leaves_in_the_largest_frames_that_are_allowed(frame_bytes: int) -> None:
    size = 2**20 - 1
    client, server = End(Side.CLIENT, frame_bytes), End(Side.SERVER)
    client.connection.open_stream(REQUEST, is_end=True)
    exchange(client, server)
    exchange(client, server)
    client.connection.widen(client.connection.streams[1], size)
    exchange(client, server)
    server.connection.respond(server.streams[1], HEAD, (bytes(5), bytes(size - 5)), TRAILERS)
    sizes = list[int]()
    while output := server.connection.take_output():
        sizes += data_frames(output)
        client.connection.receive(output, 1.0)
    assert client.bodies[1] == bytes(size)
    assert max(sizes) == frame_bytes
    assert len(sizes) <= size // frame_bytes + 2, "the prefix, whole frames, and the rest"


def test_output_is_bounded_while_nobody_takes_it(ends: tuple[End, End]) -> None:
    client, server = ends
    stream = client.connection.open_stream(REQUEST, is_end=True)
    exchange(client, server)
    client.connection.widen(stream, 2**24)
    exchange(client, server)
    server.connection.respond(server.streams[stream.id], HEAD, (bytes(2**22), bytes(2**22)), TRAILERS)
    first = server.connection.take_output()
    assert OUTPUT_BYTES <= len(first) < 2 * OUTPUT_BYTES
    server.connection.can_send = False
    server.connection.take_output()
    assert not server.connection.take_output()
    server.connection.can_send = True
    server.connection.pump()
    assert server.connection.take_output()


def test_an_early_answer_ends_a_request_that_is_still_sent(ends: tuple[End, End]) -> None:
    client, server = ends
    stream = client.connection.open_stream(REQUEST)
    client.connection.send_data(stream, bytes(10 * DEFAULT_WINDOW))
    exchange(client, server)
    server.connection.respond(server.streams[stream.id], HEAD, (b"n", b"o"), TRAILERS)
    exchange(client, server)
    assert client.bodies[stream.id] == b"no"
    assert client.heads[stream.id][-1] == ((b"grpc-status", b"0"),)
    assert client.closed[stream.id] is ErrorCode.NO_ERROR
    assert not client.connection._waiting
    again = client.connection.open_stream(REQUEST, is_end=True)
    exchange(client, server)
    assert again.id in server.ended


def test_a_reset_ends_both_sides_and_its_queue(ends: tuple[End, End]) -> None:
    client, server = ends
    stream = client.connection.open_stream(REQUEST)
    client.connection.send_data(stream, bytes(10 * DEFAULT_WINDOW))
    client.connection.reset(stream, ErrorCode.CANCEL)
    exchange(client, server)
    assert client.closed == server.closed == {stream.id: ErrorCode.CANCEL}
    client.connection.send_data(stream, b"x")
    client.connection.end(stream)
    client.connection.reset(stream, ErrorCode.CANCEL)
    assert not client.connection.take_output()


def test_a_side_that_goes_away_answers_what_it_took(ends: tuple[End, End]) -> None:
    client, server = ends
    first = client.connection.open_stream(REQUEST, is_end=True)
    exchange(client, server)
    server.connection.go_away(is_final=False)
    late = client.connection.open_stream(REQUEST, is_end=True)  # before it knows
    exchange(client, server)
    assert late.id in server.ended
    with pytest.raises(GoAwayReceived):
        client.connection.open_stream(REQUEST)
    server.connection.go_away(is_final=True)
    for stream in (first, late):
        server.connection.respond(server.streams[stream.id], HEAD, (b"",), TRAILERS)
    exchange(client, server)
    assert client.closed == {first.id: None, late.id: None}


def test_after_the_last_goaway_nothing_is_processed(ends: tuple[End, End]) -> None:
    client, server = ends
    server.connection.go_away(is_final=True)
    late = client.connection.open_stream(REQUEST)
    client.connection.send_data(late, b"x")
    exchange(client, server)
    assert late.id not in server.streams


def test_equal_blocks_are_one_object_until_the_table_changes(ends: tuple[End, End]) -> None:
    from hpack import Encoder

    client, server = ends
    encoder = Encoder()
    fields = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", b"/x/Y")]
    seen: list[HeaderList] = []
    server.seen = seen
    for extra in ((), (), (), ((b"trace", b"1"),), (), ((b"trace", b"1"),), ()):
        block = encoder.encode([*fields, *extra])
        client.connection.open_stream(block, is_end=True)
        exchange(client, server)
    assert [each.fields for each in seen] == [
        tuple(fields), tuple(fields), tuple(fields), (*fields, (b"trace", b"1")), tuple(fields),
        (*fields, (b"trace", b"1")), tuple(fields),
    ]  # fmt: skip
    assert seen[1] is seen[2]
    assert seen[4] is seen[6]


@given(st.binary(max_size=3_000), st.integers(1, 64))
def test_bytes_of_any_kind_end_a_connection_or_are_processed(data: bytes, step: int) -> None:
    """No other exception than ConnectionFailed, and nothing without a bound is kept."""
    from shoal.http2.connection import ConnectionFailed

    server = End(Side.SERVER)
    try:
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            server.connection.receive((frames.PREFACE + frames.settings(()) if start == 0 else b"") + piece, 1.0)
    except ConnectionFailed:
        pass
    assert len(server.connection._rest) <= frames.HEAD_BYTES + frames.MIN_FRAME_BYTES
