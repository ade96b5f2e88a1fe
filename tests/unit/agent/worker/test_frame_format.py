"""The frame format without a socket: frames survive any cut, hostile bytes are refused, little is kept."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.compiled import interpreted_frames
from shoal.agent.frames import format as frames
from shoal.agent.frames.format import (
    END_ALIGNMENT,
    KEPT_BYTES,
    MAX_HEADER,
    SMALL_BYTES,
    Frame,
    FrameError,
    FrameReader,
    FrameType,
    InferHeader,
    decode_infer,
    decode_json,
    encode_head,
    encode_infer,
    encode_json,
    read_refusal,
)
from shoal.types.codes import Code, ShoalError

LIMIT = 500_000
SIZES = st.sampled_from(
    [0, 1, 100, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, KEPT_BYTES, LIMIT, LIMIT + 1, 2 * LIMIT]
)


def encode(frame: Frame) -> bytes:
    return encode_head(frame.frame_type, frame.call, frame.header, len(frame.payload)) + frame.payload


def receive(reader: FrameReader, data: bytes, most: int) -> list[Frame]:
    """Feeds `data` as a socket does: at most `most` bytes at a time, and never more than the buffer takes."""
    found = []
    at = 0
    while at < len(data):
        buffer = reader.buffer()
        count = min(len(buffer), most, len(data) - at)
        assert count > 0, "a buffer without room"
        buffer[:count] = data[at : at + count]
        reader.on_received(count)
        at += count
        while (frame := reader.next_frame(LIMIT)) is not None:
            found.append(frame)
    return found


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(FrameType)),
            st.integers(0, 2**64 - 1),
            st.integers(0, MAX_HEADER),
            SIZES,
        ),
        max_size=6,
    ),
    st.sampled_from([1013, 4096, 70_000, 10**7]),
)
@settings(deadline=None, max_examples=60)
def test_frames_survive_any_cut(drawn: list[tuple[FrameType, int, int, int]], most: int) -> None:
    sent = [
        Frame(kind, call, bytes([number]) * header, bytes([number + 100]) * size)
        for number, (kind, call, header, size) in enumerate(drawn)
    ]
    got = receive(FrameReader(), b"".join(map(encode, sent)), most)
    expected = [
        each if len(each.payload) <= LIMIT else each._replace(payload=b"", oversized_bytes=len(each.payload))
        for each in sent
    ]
    assert got == expected


def test_a_large_payload_is_not_kept_by_the_reader() -> None:
    reader = FrameReader()
    (frame,) = receive(reader, encode(Frame(FrameType.INFER, 1, b"", bytes(LIMIT))), 10**7)
    assert isinstance(frame.payload, bytearray), "the buffer that it was received into"
    assert len(reader.buffer()) == KEPT_BYTES
    frame.payload.append(0)  # which a buffer that is lent out refuses


@interpreted_frames
def test_a_declared_payload_without_memory_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: int) -> bytearray:
        raise MemoryError

    reader = FrameReader()
    monkeypatch.setattr(frames, "bytearray", none_left, raising=False)
    data = encode(Frame(FrameType.INFER, 1, b"h", bytes(LIMIT))) + encode(Frame(FrameType.CANCEL, 1, b"{}", b""))
    first, second = receive(reader, data, 50_000)
    assert first == Frame(FrameType.INFER, 1, b"h", b"", LIMIT)
    assert second.frame_type is FrameType.CANCEL


@pytest.mark.parametrize("size", [SMALL_BYTES + 1, 110_651, KEPT_BYTES + 7])
@pytest.mark.parametrize("most", [1000, KEPT_BYTES])
def test_a_large_request_ends_where_an_array_needs_no_copy(size: int, most: int) -> None:
    sent = [Frame(FrameType.INFER, number, b"header", bytes([number]) * size) for number in range(3)]
    received = receive(FrameReader(), b"".join(map(encode, sent)), most)
    assert received == sent
    for frame in received:
        address = np.frombuffer(frame.payload, np.uint8).ctypes.data
        assert (address + size) % END_ALIGNMENT == 0


@given(st.binary(max_size=300), st.integers(1, 50))
def test_hostile_bytes_end_in_frames_or_a_frame_error(data: bytes, most: int) -> None:
    try:
        received = receive(FrameReader(), data, most)
    except FrameError:
        return
    assert sum(len(encode(each)) for each in received if not each.oversized_bytes) <= len(data)


@pytest.mark.parametrize(
    ("frame_type", "header", "size"),
    [(0, 0, 0), (99, 0, 0), (int(FrameType.CALL), MAX_HEADER + 1, 0)],
    ids=["type-0", "type-99", "header"],
)
def test_a_head_out_of_bounds_is_an_error(frame_type: int, header: int, size: int) -> None:
    with pytest.raises(FrameError):
        receive(FrameReader(), frames._HEAD.pack(frames._MAGIC, frame_type, header, size, 1), 10**7)


def test_what_is_too_large_is_not_sent() -> None:
    for header, size in ((MAX_HEADER + 1, 0), (0, frames.MAX_PAYLOAD + 1)):
        with pytest.raises(ShoalError) as refused:
            encode_head(FrameType.CALL, 1, bytes(header), size)
        assert refused.value.code is Code.TOO_LARGE


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=60), st.floats(allow_nan=False))
def test_an_infer_header_survives(assignment: str, origin: str, trace: str, deadline: float) -> None:
    try:
        header = encode_infer(InferHeader(assignment, origin, trace, deadline))
    except UnicodeEncodeError:
        return  # a lone surrogate is no text
    assert decode_infer(header) == InferHeader(assignment, origin, trace, deadline)


def test_an_infer_header_may_say_nan_and_no_text_is_cut() -> None:
    assert math.isnan(decode_infer(encode_infer(InferHeader("a", "", "", math.nan))).deadline)
    with pytest.raises(ShoalError) as refused:
        encode_infer(InferHeader("a" * 65_536, "", "", 1.0))
    assert refused.value.code is Code.TOO_LARGE


@given(st.binary(max_size=80))
def test_any_infer_header_decodes_or_is_a_frame_error(header: bytes) -> None:
    try:
        found = decode_infer(header)
    except FrameError:
        return
    assert encode_infer(found) == header or math.isnan(found.deadline)


@pytest.mark.parametrize("header", [b"", b"[]", b"{", b"\xff", b"[" * 60_000], ids=str)
def test_a_json_header_that_is_none_is_a_frame_error(header: bytes) -> None:
    with pytest.raises(FrameError):
        decode_json(header)


def test_a_refusal_of_another_version_is_still_one() -> None:
    found = read_refusal(encode_json({"code": "OF_TOMORROW", "found": "x", "more": 1}))
    assert (found.code, found.found, found.remedy) == (Code.CODE_UNKNOWN, "x", "")
