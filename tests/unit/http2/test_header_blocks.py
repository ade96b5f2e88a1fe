"""Header blocks that are sent: HPACK's library reads them as they were meant, whatever it read before."""

from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from shoal.http2.header_blocks import encode

NAMES = st.sampled_from([b":status", b"content-type", b"grpc-status", b"x"]) | st.binary(min_size=1, max_size=200)
VALUES = st.sampled_from([b"200", b"404", b"", b"gzip, deflate"]) | st.binary(max_size=400)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=12))
def test_a_block_says_its_fields_and_leaves_no_trace(fields: list[tuple[bytes, bytes]]) -> None:
    decoder = Decoder(2**24)
    for _ in range(2):
        assert [(bytes(name), bytes(value)) for name, value in decoder.decode(encode(fields), raw=True)] == fields
        assert not decoder.header_table.dynamic_entries
    long = [(b"x", bytes(2**17))]
    assert [(bytes(name), bytes(value)) for name, value in decoder.decode(encode(long), raw=True)] == long
