"""A30: tensors that lie about their size or place are refused before anything is allocated."""

from pathlib import Path

import pytest
from onnx import TensorProto

from harness.models.push import push_refusal
from harness.models.synthetic import FLOAT, with_constant
from shoal.coordinator.blobs.inspect import InspectionLimits
from shoal.types.codes import Code
from shoal.types.units import Bytes


def external(key: str, value: str) -> TensorProto:
    made = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="location", value="weights.bin")
    made.external_data.add(key=key, value=value)
    return made


@pytest.mark.parametrize(
    "stored",
    [
        external("__class__", "x"), external("unknown", "x"), external("offset", "-8"), external("length", "-1"),
        external("length", "99999999999999999999"),
        TensorProto(name="w", data_type=FLOAT, dims=[-1], raw_data=b"0000"),
        TensorProto(name="w", data_type=FLOAT, dims=[2**33, 2**33], raw_data=b"0000"),
        TensorProto(name="w", data_type=FLOAT, dims=[2**40], raw_data=b"0000"),
        TensorProto(name="w", data_type=FLOAT, dims=[2**40]),
        TensorProto(name="w", data_type=FLOAT, dims=[1], raw_data=b"00000000"),
    ],
    ids=["dunder", "unknown", "offset", "length", "beyond", "negative", "overflow", "claims", "nothing", "too much"],
)  # fmt: skip
async def test_a_tensor_that_lies(tmp_path: Path, stored: TensorProto) -> None:
    """In a child with 256 MiB to spare, where allocating what is claimed would be seen as out of memory."""
    refusal = await push_refusal(tmp_path, with_constant(stored), InspectionLimits(memory_bytes=Bytes(256 * 2**20)))
    assert refusal.code is Code.MODEL_INVALID
    assert "memory" not in refusal.found
    assert "'w'" in refusal.found
