"""Heads of calls on one connection, each read with what is known of the one before."""

import asyncio
from collections.abc import Mapping
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from shoal.host.connections import Connections
from shoal.host.grpc_server import (
    CallHead,
    GrpcServer,
    GrpcServerLimits,
    GrpcSession,
    ServerMethod,
    StreamCall,
    call_head,
    repeated_head,
)
from shoal.http2 import frames
from shoal.http2.connection import Stream
from shoal.http2.header_blocks import HeaderDecoder, HeaderList, encode, request_error

Field = tuple[bytes, bytes]
SHARED = ("tenant", "token")
FIRST = ((b":method", b"POST"), (b":scheme", b"https"), (b":path", b"/x/Y"), (b"content-type", b"application/grpc"))
FORWARD = (*FIRST, (b"tenant", b"acme"), (b"id", b"1"), (b"grpc-timeout", b"1S"), (b"token", b"t"))
VALUES = st.sampled_from([b"1", b"2", b"1S", b"5m", b"POST", b"/x/Y", b"application/grpc", b"gzip", b"\xff", b" bad"])
NAMES = st.sampled_from(
    [
        b":path",
        b":method",
        b"content-type",
        b"tenant",
        b"token",
        b"id",
        b"grpc-timeout",
        b"grpc-encoding",
        b"x-bin",
        b"X",
    ]
)
FIELDS = st.tuples(NAMES, VALUES)
CHANGES = st.lists(st.tuples(st.integers(0, 8), FIELDS, st.booleans()), max_size=2)


def with_changes(fields: list[Field], changes: list[tuple[int, Field, bool]]) -> list[Field]:
    found = list(fields)
    for at, field, is_new in changes:
        found[at : at + (not is_new)] = [field]
    return found


def content_of(head: CallHead | str) -> object:
    """What it says; the memo is known by what it was made for."""
    if isinstance(head, str):
        return head
    failure = None if head.failure is None else str(head.failure)
    return head.path, dict(head.metadata), head.timeout_s, failure, head.shared_memo


def memo_of(path: str, metadata: Mapping[str, str]) -> dict[str, object]:
    return {"made for": (path, *[metadata.get(name) for name in SHARED])}


@given(st.lists(CHANGES, min_size=1, max_size=5))
def test_a_head_says_what_it_would_without_the_one_before(each_time: list[list[tuple[int, Field, bool]]]) -> None:
    decoder, fields = HeaderDecoder(), list(FORWARD)
    for changes in each_time:
        fields = with_changes(fields, changes)
        found = decoder.decode(encode(fields))
        alone = HeaderList(tuple(fields))
        assert request_error(found) == request_error(alone)
        if request_error(alone) is None:
            found.parsed = repeated_head(found, SHARED) or call_head(found, memo_of)
            assert content_of(found.parsed) == content_of(call_head(alone, memo_of))


def test_a_head_that_differs_in_its_id_and_deadline_is_not_read_anew() -> None:
    decoder = HeaderDecoder()
    first = decoder.decode(encode(FORWARD))
    assert request_error(first) is None
    assert repeated_head(first, SHARED) is None
    first.parsed = call_head(first, memo_of)
    changed = [(name, {b"id": b"2", b"grpc-timeout": b"5m"}.get(name, value)) for name, value in FORWARD]
    second = decoder.decode(encode(changed))
    assert request_error(second) is None
    head = repeated_head(second, SHARED)
    assert head is not None
    assert isinstance(first.parsed, CallHead)
    assert head.shared_memo is first.parsed.shared_memo
    assert (head.metadata["id"], head.timeout_s) == ("2", 0.005)
    other_tenant = [(name, value + b"2" if name == b"tenant" else value) for name, value in FORWARD]
    third = decoder.decode(encode(other_tenant))
    assert repeated_head(third, SHARED) is None
    assert first.like is None
    assert second.like is None, "each refers to the one before at most"


async def test_a_stream_keeps_no_head_but_its_own() -> None:
    """A block that changes the table is not the one that the next is compared with."""
    kept = list[HeaderList]()

    class Handshake:
        def getpeercert(self, *, binary_form: bool) -> None:
            """No certificate."""

    class Wire(asyncio.Transport):
        def write(self, data: object) -> None:
            pass

        def is_closing(self) -> bool:
            return False

        def get_extra_info(self, name: str, default: object = None) -> object:
            return {"peername": ("127.0.0.1", 1), "ssl_object": Handshake()}.get(name, default)

    def keep(_: GrpcSession, stream: Stream, headers: HeaderList) -> StreamCall:
        kept.append(headers)
        return cast(StreamCall, headers)

    def no_method(path: str) -> ServerMethod:
        raise AssertionError(path)

    connections = Connections(8, 8)
    limits = GrpcServerLimits(256, 2**20, 5, 60, 60)
    server = GrpcServer(no_method, limits, connections, lambda _: True, keep, SHARED)
    place = connections.add("127.0.0.1", lambda: None)
    assert place is not None
    session = server.session(place)
    session.connection_made(Wire())
    session.data_received(frames.PREFACE + frames.settings(()))
    other = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", b"/v2/models/x/infer"), (b"a", b"1")]
    into_table = encode(other[:3]) + b"\x40\x01a\x011"
    for number, block in enumerate((encode(other), into_table, encode(other))):
        stream = (2 * number + 1).to_bytes(4, "big")
        session.data_received(bytes((0, 0, len(block), frames.HEADERS, frames.END_HEADERS)) + stream + block)
    assert [len(each.fields) for each in kept] == [4, 4, 4]
    assert [each.like for each in kept] == [None, None, None]
