"""Messages in a stream's data, and the fields of gRPC."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.http2.grpc_messages import (
    MAX_DETAILS_BYTES,
    PREFIX_BYTES,
    MessageMalformed,
    MessageReader,
    decode_binary,
    decode_details,
    encode_details,
    encode_metadata,
    format_timeout,
    frame_message,
    parse_timeout,
)


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1))
def test_messages_arrive_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frame_message(each) for each in messages)
    reader, found, at, turn = MessageReader(), [], 0, 0
    while at < len(data):
        reader.receive(data[at : at + cuts[turn % len(cuts)]])
        at, turn = at + cuts[turn % len(cuts)], turn + 1
        if turn % 2:  # several may have arrived before anybody takes one
            while (message := reader.take()) is not None:
                found.append(message)
    while (message := reader.take()) is not None:
        found.append(message)
    assert found == messages
    assert (reader.held_bytes, reader.size) == (0, None)


def test_a_messages_size_is_known_before_the_message() -> None:
    reader = MessageReader()
    reader.receive(b"\0\0\0")
    assert (reader.size, reader.missing_bytes) == (None, 2)
    reader.receive(b"\x01\0ab")
    assert (reader.size, reader.missing_bytes, reader.held_bytes) == (256, 254, PREFIX_BYTES + 2)
    reader.receive(bytes(254))
    assert (reader.missing_bytes, reader.take()) == (0, b"ab" + bytes(254))


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(1, 60), min_size=1))
def test_parts_in_the_middle_of_a_message_go_to_its_place(message: bytes, cuts: list[int]) -> None:
    data, at, turn = frame_message(message), PREFIX_BYTES, 0
    reader = MessageReader()
    reader.receive(data[:at])
    assert not reader.has_taken(data[at:])  # there is no place yet
    reader.expect()
    while at < len(data):
        assert reader.whole is None
        piece = data[at : at + cuts[turn % len(cuts)]]
        at, turn = at + len(piece), turn + 1
        is_last = at == len(data)
        assert reader.has_taken(piece) is not is_last
        if is_last:
            reader.receive(piece)
    assert reader.whole == reader.take() == message


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_a_flag_that_there_is_not(cut: int) -> None:
    reader = MessageReader()
    reader.receive(b"\x02\0\0\0\0"[:cut])
    with pytest.raises(MessageMalformed):
        reader.receive(b"\x02\0\0\0\0"[cut:])


def test_a_bad_flag_after_a_good_message() -> None:
    reader = MessageReader()
    reader.receive(frame_message(b"a") + b"\x07\0\0\0\0")
    with pytest.raises(MessageMalformed):
        reader.take()


@pytest.mark.parametrize(
    ("text", "seconds"), [("1H", 3600.0), ("2M", 120.0), ("99999999S", 99999999.0), ("5m", 0.005), ("0n", 0.0)]
)
def test_timeouts(text: str, seconds: float) -> None:
    assert parse_timeout(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "S", "1", "1s", "-1S", "1.5S", "123456789S", "1 S", "١S"])
def test_timeouts_that_are_none(text: str) -> None:
    assert parse_timeout(text) is None


@given(st.floats(0.0, 3e9))
def test_a_timeout_is_told_at_least_as_long(seconds: float) -> None:
    told = parse_timeout(format_timeout(seconds))
    assert told is not None
    assert told >= seconds * (1 - 1e-12)
    assert told - seconds <= max(2e-6, 0.01 * seconds)


@given(st.text(max_size=300))
def test_details_of_any_text(text: str) -> None:
    told = encode_details(text)
    assert all(0x20 <= each < 0x7F for each in told)
    assert decode_details(told) == text


def test_long_details_are_cut_and_broken_ones_read() -> None:
    assert len(encode_details("x" * 10 * MAX_DETAILS_BYTES)) == MAX_DETAILS_BYTES
    assert decode_details(b"50%") == "50%"
    assert "a" in decode_details(b"%FFa")


@given(st.binary(max_size=100))
def test_binary_metadata(value: bytes) -> None:
    key, content = encode_metadata("x-bin", value)
    assert (key, decode_binary(content)) == (b"x-bin", value)
    assert decode_binary(content + b"=" * (-len(content) % 4)) == value


def test_binary_metadata_that_is_none() -> None:
    with pytest.raises(MessageMalformed):
        decode_binary(b"!!")


def test_no_deadline_is_longer_than_the_field_can_say() -> None:
    assert parse_timeout(format_timeout(math.pow(10, 12))) == 99999999 * 3600.0
