"""Protobuf's variable-length integers, as protobuf itself reads and writes them."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.inference import open_inference_pb2 as oip
from shoal.wire.varint import varint

INT64 = st.integers(-(2**63), 2**63 - 1)
TAG = bytes((oip.InferParameter.INT64_PARAM_FIELD_NUMBER << 3,))


@given(INT64)
def test_law_protobuf_writes_the_same(value: int) -> None:
    assert TAG + varint(value) == oip.InferParameter(int64_param=value).SerializeToString()


@given(INT64, st.integers(1, 10))
def test_law_protobuf_reads_a_padded_one(value: int, least: int) -> None:
    written = varint(value, least)
    assert len(written) == max(least, len(varint(value)))
    assert oip.InferParameter.FromString(TAG + written).int64_param == value
