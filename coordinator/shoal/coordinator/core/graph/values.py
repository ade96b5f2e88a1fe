"""What is known of one tensor before anything runs: element type, shape, and the content of small constants."""

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, TypeProto, helper, numpy_helper

SMALL: Final = 1024
"""Constants of up to this many elements keep their content: shapes, axes, pads, scales, trip counts."""

_T = TensorProto

BITS: Final[dict[int, int]] = {
    _T.FLOAT: 32, _T.UINT8: 8, _T.INT8: 8, _T.UINT16: 16, _T.INT16: 16, _T.INT32: 32, _T.INT64: 64, _T.STRING: 256,
    _T.BOOL: 8, _T.FLOAT16: 16, _T.DOUBLE: 64, _T.UINT32: 32, _T.UINT64: 64, _T.COMPLEX64: 64, _T.COMPLEX128: 128,
    _T.BFLOAT16: 16, _T.FLOAT8E4M3FN: 8, _T.FLOAT8E4M3FNUZ: 8, _T.FLOAT8E5M2: 8, _T.FLOAT8E5M2FNUZ: 8,
    _T.UINT4: 4, _T.INT4: 4, _T.FLOAT4E2M1: 4, _T.FLOAT8E8M0: 8, _T.UINT2: 2, _T.INT2: 2,
}  # fmt: skip
"""Bits of one element. STRING: the runtime's handle (a std::string of 32 bytes), not the text."""

OIP: Final[dict[int, str]] = {
    _T.BOOL: "BOOL", _T.UINT8: "UINT8", _T.UINT16: "UINT16", _T.UINT32: "UINT32", _T.UINT64: "UINT64",
    _T.INT8: "INT8", _T.INT16: "INT16", _T.INT32: "INT32", _T.INT64: "INT64", _T.FLOAT16: "FP16", _T.FLOAT: "FP32",
    _T.DOUBLE: "FP64", _T.STRING: "BYTES", _T.BFLOAT16: "BF16",
}  # fmt: skip
"""Element types that the Open Inference Protocol can carry, with its names."""

PRECISION: Final[dict[int, str]] = {
    _T.FLOAT: "fp32", _T.FLOAT16: "fp16", _T.BFLOAT16: "bf16", _T.DOUBLE: "fp64", _T.INT8: "int8", _T.UINT8: "int8",
    _T.INT4: "int4", _T.UINT4: "int4", _T.INT2: "int2", _T.UINT2: "int2", _T.FLOAT4E2M1: "fp4",
    _T.FLOAT8E4M3FN: "fp8", _T.FLOAT8E4M3FNUZ: "fp8", _T.FLOAT8E5M2: "fp8", _T.FLOAT8E5M2FNUZ: "fp8",
}  # fmt: skip
"""Element types of weights that define a precision. Others (indices, shapes, text) do not."""


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of one tensor."""

    # TensorProto.DataType; 0 where unknown.
    dtype: int = 0
    # None where any axis is unknown.
    shape: tuple[int, ...] | None = None
    # Content of a small constant; None where unknown or larger than SMALL elements.
    data: NDArray[Any] | None = None
    # True: it is stored in the model, or computed from what is.
    constant: bool = field(default=False, compare=False)

    @property
    def elements(self) -> int | None:
        return None if self.shape is None else math.prod(self.shape)

    @property
    def nbytes(self) -> int | None:
        """Dense size in bytes; None where shape or type is unknown."""
        bits = BITS.get(self.dtype)
        return None if self.shape is None or bits is None else -(-math.prod(self.shape) * bits // 8)

    def type_proto(self) -> TypeProto:
        proto = TypeProto()
        proto.tensor_type.elem_type = self.dtype
        if self.shape is not None:
            proto.tensor_type.shape.SetInParent()
            for axis in self.shape:
                proto.tensor_type.shape.dim.add().dim_value = axis
        return proto


UNKNOWN: Final = Value()


def value_from_type(proto: TypeProto) -> Value:
    """A value of this declared or inferred type. Its shape is unknown where an axis has no fixed length."""
    if proto.WhichOneof("value") != "tensor_type":
        return UNKNOWN
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return Value(tensor.elem_type)
    axes = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return Value(tensor.elem_type, axes if all(axis >= 0 for axis in axes) else None)


def value_from_tensor(tensor: TensorProto) -> Value:
    """A stored constant that has passed `check`. Its content is kept where it is small and numeric."""
    shape = tuple(tensor.dims)
    keep = math.prod(shape) <= SMALL and tensor.data_type not in (_T.STRING, _T.UNDEFINED)
    return Value(tensor.data_type, shape, numpy_helper.to_array(tensor) if keep else None, constant=True)


def value_from_array(array: NDArray[Any]) -> Value:
    return Value(helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array)


def value_from_constant(attributes: dict[str, Any]) -> Value:
    """The value of a Constant node, from whichever attribute carries it."""
    for name, given in attributes.items():
        match name:
            case "value":
                return value_from_tensor(given)
            case "sparse_value":
                return Value(given.values.data_type, tuple(given.dims))
            case "value_float" | "value_floats":
                return value_from_array(np.asarray(given, np.float32))
            case "value_int" | "value_ints":
                return value_from_array(np.asarray(given, np.int64))
            case "value_string":
                return Value(_T.STRING, ())
            case "value_strings":
                return Value(_T.STRING, (len(given),))
    return UNKNOWN
