"""numpy arrays as tensors of the Open Inference Protocol: names of datatypes, raw bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.types.codes import Code, ShoalError, refuse

DTYPES: Final = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
BF16: Final = "BF16"
BYTES: Final = "BYTES"
_NAMES: Final = {np.dtype(kind): name for name, kind in DTYPES.items()}

Tensors = Mapping[str, NDArray[Any]]
Parameters = Mapping[str, str | int | bool | float]
"""Parameters of a request, by name, such as `sequence_id`."""


def unreadable_answer(found: str) -> ShoalError:
    return refuse(Code.MESSAGE_INVALID, found, "an answer of the Open Inference Protocol", "update both sides")


def plain_parameter(name: str, value: object) -> str | int | bool | float:
    """A parameter as the protocol has it; numpy's scalars become Python's. Raises ShoalError(INVALID_ARGUMENT)."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        if not -(2**63) <= (whole := int(value)) < 2**63:
            raise refuse(
                Code.INVALID_ARGUMENT, f"parameter {name}: {whole}", "an integer of 64 bits", "another, or as text"
            )
        return whole
    if isinstance(value, Real):
        return float(value)
    raise refuse(
        Code.INVALID_ARGUMENT,
        f"parameter {name} of {type(value).__name__}",
        "text, a number or a boolean",
        "convert it",
    )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """datatype: in the protocol's names. shape: -1 is an axis of any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a model takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """outputs: by name; their memory may be read-only. headers: of REST, as the gateway sent them, names in lower
    case."""

    outputs: dict[str, NDArray[Any]]
    headers: dict[str, str] = field(default_factory=dict)
    datatypes: dict[str, str] = field(default_factory=dict)
    """By output, in the protocol's names. BF16 becomes float32, which holds each of its values exactly."""


def datatype_of(value: NDArray[Any], declared: str = "") -> str:
    """The protocol's name. declared: what the caller says; only BF16 changes anything. Raises
    ShoalError(INVALID_ARGUMENT)."""
    if declared == BF16:
        return declared
    if value.dtype.kind in "OSU":
        return BYTES
    name = _NAMES.get(value.dtype)
    if name is None:
        asked = ", ".join((*DTYPES, BYTES, BF16))
        raise refuse(Code.INVALID_ARGUMENT, f"dtype {value.dtype}", asked, "convert the array")
    return name


def to_raw(value: NDArray[Any], datatype: str, name: str) -> bytes:
    """Row-major, little-endian; each string after its length in 4 bytes. Raises ShoalError(INVALID_ARGUMENT)."""
    if datatype == BF16:
        return bfloat16(value, name).tobytes()
    if datatype != BYTES:
        return np.ascontiguousarray(value).tobytes()
    items = (item if isinstance(item, bytes) else str(item).encode() for item in value.ravel())
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)


def from_raw(raw: memoryview, datatype: str, shape: Sequence[int]) -> NDArray[Any]:
    """The array; numbers are not copied. Raises ValueError for another size than the shape's, KeyError for a datatype
    that numpy has not."""
    if datatype == BYTES:
        return _strings(bytes(raw)).reshape(shape)
    if datatype == BF16:
        return float32(np.frombuffer(raw, np.uint16)).reshape(shape)
    return np.frombuffer(raw, DTYPES[datatype]).reshape(shape)


def bfloat16(value: NDArray[Any], name: str) -> NDArray[np.uint16]:
    """The bits of BF16 values. value: the bits themselves (uint16, or the two-byte values that numpy reads of what
    ml_dtypes wrote), or floats that are exact in BF16. Raises ShoalError(INVALID_ARGUMENT)."""
    plain = np.ascontiguousarray(value)
    if plain.dtype == np.uint16 or (plain.dtype.kind == "V" and plain.dtype.itemsize == 2):
        return plain.view(np.uint16).reshape(value.shape)
    if plain.dtype.kind in "fiu":
        with np.errstate(over="ignore"):
            wide = plain.astype(np.float32)
        bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
        if np.array_equal(float32(bits), plain, equal_nan=plain.dtype.kind == "f"):
            return bits.reshape(value.shape)
    found = f"input {name!r:.80}: {plain.dtype} that BF16 does not hold exactly"
    remedy = "round it yourself: send the upper two bytes of each float32 as uint16, or what ml_dtypes' bfloat16 gives"
    raise refuse(Code.INVALID_ARGUMENT, found, "BF16", remedy)


def float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _strings(data: bytes) -> NDArray[Any]:
    items, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        items.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return np.array(items, dtype=object)
