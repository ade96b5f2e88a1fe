"""Header blocks: what is sent is read by HPACK's library as it was meant, and what it sends is read as it meant it."""

from hpack import Decoder, Encoder, HeaderTuple, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from shoal.http2.header_blocks import MAX_LIST_BYTES, HeaderDecoder, HeadersTooLarge, HeadersUnreadable, encode

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
