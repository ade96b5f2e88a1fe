"""Header blocks: what is sent is read by HPACK's library as it was meant, and what it sends is read as it meant it."""

import pytest
from hpack import Decoder, Encoder, HeaderTuple, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from shoal.http2.header_blocks import (
    MAX_LIST_BYTES,
    HeaderDecoder,
    HeadersTooLarge,
    HeadersUnreadable,
    encode,
    field_error,
)

NAMES = st.sampled_from([b":status", b"content-type", b"grpc-status", b"x"]) | st.binary(min_size=1, max_size=200)
VALUES = st.sampled_from([b"200", b"404", b"", b"gzip, deflate"]) | st.binary(max_size=400)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=12)


@given(FIELDS)
def test_a_block_says_its_fields_and_leaves_no_trace(fields: list[tuple[bytes, bytes]]) -> None:
    decoder = Decoder(2**24)
    for _ in range(2):
        assert [(bytes(name), bytes(value)) for name, value in decoder.decode(encode(fields), raw=True)] == fields
        assert not decoder.header_table.dynamic_entries
    long = [(b"x", bytes(2**17))]
    assert [(bytes(name), bytes(value)) for name, value in decoder.decode(encode(long), raw=True)] == long


@given(st.lists(st.tuples(FIELDS, st.sampled_from(["own", "never", "indexed", "huffman"])), max_size=6))
def test_blocks_of_one_connection_are_read_in_whatever_form(
    blocks: list[tuple[list[tuple[bytes, bytes]], str]],
) -> None:
    encoder, decoder = Encoder(), HeaderDecoder()
    for fields, form in blocks:
        kind = HeaderTuple if form == "indexed" else NeverIndexedHeaderTuple
        block = encode(fields) if form == "own" else encoder.encode([kind(*each) for each in fields], form == "huffman")
        assert decoder.decode(block).fields == tuple(fields)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_the_library_reads_them(block: bytes) -> None:
    try:
        expected = tuple((bytes(name), bytes(value)) for name, value in Decoder(MAX_LIST_BYTES).decode(block, raw=True))
    except Exception:
        expected = None
    try:
        found = HeaderDecoder().decode(block).fields
    except (HeadersTooLarge, HeadersUnreadable):
        found = None
    assert found == expected


SIZES = st.sampled_from([0, 40, 100, 1000, 4096])
EDITS = st.tuples(st.integers(0, 80), st.integers(0, 2), st.binary(max_size=2)) | st.none()


@given(st.lists(st.tuples(FIELDS, st.booleans(), SIZES | st.none(), EDITS), max_size=8))
def test_a_table_that_fills_and_shrinks_is_the_librarys(
    blocks: list[tuple[list[tuple[bytes, bytes]], bool, int | None, tuple[int, int, bytes] | None]],
) -> None:
    """Entries leave it as others come, clients change its size, and somebody changes a few bytes. What the library does
    not read is not read here, and ends the connection."""
    encoder, decoder, library = Encoder(), HeaderDecoder(), Decoder(MAX_LIST_BYTES)
    for fields, is_huffman, size, edit in blocks:
        if size is not None:
            encoder.header_table_size = size
        block = encoder.encode([HeaderTuple(*each) for each in fields], is_huffman)
        if edit is not None:
            at, removed, added = edit
            block = block[:at] + added + block[at + removed :]
        try:
            expected = tuple((bytes(name), bytes(value)) for name, value in library.decode(block, raw=True))
        except Exception:
            expected = None
        try:
            found = decoder.decode(block).fields
        except (HeadersTooLarge, HeadersUnreadable):
            found = None
        assert found == expected
        if found is None:
            return
        assert list(decoder._table.dynamic_entries) == list(library.header_table.dynamic_entries)


def test_a41_many_fields_in_few_bytes_are_counted() -> None:
    for block in (b"\x88" * 2000, b"\x00\x01a\x00" * 2000):
        try:
            HeaderDecoder().decode(block)
        except HeadersTooLarge:
            continue
        raise AssertionError("a list that is too large was read")


STARTS = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=6)
ENDS = st.lists(st.tuples(st.integers(0, 6), FIELDS, st.booleans(), st.integers(0, 3)), min_size=2, max_size=8)


@given(STARTS, ENDS)
def test_blocks_that_begin_alike_are_read_as_the_library_reads_them(
    start: list[tuple[bytes, bytes]], ends: list[tuple[int, list[tuple[bytes, bytes]], bool, int]]
) -> None:
    """As those of a proxy's calls, which repeat their first fields. Some name entries of the table, some change it in
    between, and some are cut within their last field, which the next one must not be read by."""
    encoder, library = Encoder(), Decoder(MAX_LIST_BYTES)
    decoder = HeaderDecoder()
    library.decode(first := encoder.encode([HeaderTuple(*each) for each in start]), raw=True)
    decoder.decode(first)
    for count, fields, is_new, cut in ends:
        kind = HeaderTuple if is_new else NeverIndexedHeaderTuple
        block = encoder.encode([*(HeaderTuple(*each) for each in start[:count]), *(kind(*each) for each in fields)])
        if cut and not is_new and block:
            expected = _read_alone(library, block[:-cut])
            assert _read(decoder, block[:-cut]) == expected
            if expected is None:
                return
        assert _read(decoder, block) == tuple((bytes(n), bytes(v)) for n, v in library.decode(block, raw=True))


def _read_alone(library: Decoder, block: bytes) -> tuple[tuple[bytes, bytes], ...] | None:
    try:
        return tuple((bytes(name), bytes(value)) for name, value in library.decode(block, raw=True))
    except Exception:
        return None


def _read(decoder: HeaderDecoder, block: bytes) -> tuple[tuple[bytes, bytes], ...] | None:
    try:
        return decoder.decode(block).fields
    except (HeadersTooLarge, HeadersUnreadable):
        return None


def test_equal_bytes_are_another_field_once_the_table_has_changed() -> None:
    encoder, decoder, newest = Encoder(), HeaderDecoder(), b"\xbe"
    for number in (b"1", b"2"):
        decoder.decode(encoder.encode([HeaderTuple(b"x", number)]))
        for other in (b"a", b"b"):
            assert decoder.decode(newest + encode([(b"y", other)])).fields == ((b"x", number), (b"y", other))
    encoder.header_table_size = 0
    decoder.decode(encoder.encode([(b":method", b"GET")]))
    with pytest.raises(HeadersUnreadable):
        decoder.decode(newest + encode([(b"y", b"c")]))


def test_a41_fields_that_are_not_read_again_are_counted_again() -> None:
    decoder, half = HeaderDecoder(), [(b"x", bytes(300)), (b"y", bytes(300))]
    known = encode(half)
    assert decoder.decode(known).fields == tuple(half)
    rest = [(b"z", bytes(400))] * (MAX_LIST_BYTES // (400 + 33))
    assert sum(len(name) + len(value) + 32 for name, value in rest) <= MAX_LIST_BYTES
    with pytest.raises(HeadersTooLarge):
        decoder.decode(known + encode(rest))


def test_a41_a_block_of_many_fields_is_not_kept_to_read_the_next_one_by() -> None:
    """A connection would hold 73 KB for 1 KB that it received once."""
    decoder = HeaderDecoder()
    ok = (b":status", b"200")
    for count, most in ((1, 1), (64, 64), (65, 64), (1000, 64)):
        assert decoder.decode(b"\x88" * count).fields == (ok,) * count
        last = decoder._last
        assert last is not None
        reused: list[tuple[bytes, bytes]] = []
        last.copy_start(b"\x88" * 1000, reused, [], [])
        assert reused == [ok] * most


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_a_field_is_well_formed_as_rfc9113_says(name: bytes, value: bytes) -> None:
    """Section 8.2.1, byte by byte."""
    is_name = len(name) > 0 and all(0x21 <= byte <= 0x7E and not 0x41 <= byte <= 0x5A for byte in name)
    has_colon = b":" in name
    is_value = not set(value) & set(b"\0\r\n") and value == value.strip(b" \t")
    is_field = ((is_name and not has_colon) or name.startswith(b":")) and is_value
    assert (field_error(name, value) is None) == (is_field and name not in (b"te", b"upgrade"))
