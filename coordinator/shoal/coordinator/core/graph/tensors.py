"""Checks that a stored tensor is what it claims: its bytes are in the file, as many as its dims say, and nowhere
else."""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from onnx import SparseTensorProto, TensorProto

from shoal.coordinator.core.graph.rules import Rules
from shoal.coordinator.core.graph.values import BITS
from shoal.types.codes import Code, Refusal

_T = TensorProto

_EXTERNAL_KEYS: Final = frozenset({"location", "offset", "length", "checksum", "basepath"})
_RUNTIME_MEMORY: Final = "_ORT_MEM_ADDR_"
_LARGEST: Final = 2**63 - 1

_TYPED_FIELDS: Final[dict[int, str]] = {
    _T.FLOAT: "float_data", _T.COMPLEX64: "float_data", _T.DOUBLE: "double_data", _T.COMPLEX128: "double_data",
    _T.INT64: "int64_data", _T.UINT32: "uint64_data", _T.UINT64: "uint64_data", _T.STRING: "string_data",
}  # fmt: skip
"""The typed data field of an element type (onnx.proto, TensorProto); for all others int32_data."""


def tensor_problems(tensor: TensorProto | SparseTensorProto, rules: Rules) -> Iterator[Refusal]:
    """What is wrong with a stored tensor. A sparse tensor is also limited by its dense size, because the runtime
    expands it."""
    if isinstance(tensor, TensorProto):
        yield from _dense_problems(tensor)
        return
    yield from _dense_problems(tensor.values)
    yield from _dense_problems(tensor.indices)
    count = _count(tensor.dims)
    dense = None if count is None else count * BITS.get(tensor.values.data_type, 8) // 8
    if dense is None or dense > rules.max_size_bytes:
        yield _invalid(
            tensor.values,
            f"sparse, of {list(tensor.dims)}",
            f"dense at most {rules.max_size_bytes} bytes: it is expanded",
        )
    elif len(tensor.values.dims) != 1 or list(tensor.indices.dims)[:1] != list(tensor.values.dims):
        yield _invalid(tensor.values, "sparse, with as many indices as it likes", "one index for each value")


def _dense_problems(tensor: TensorProto) -> Iterator[Refusal]:
    if tensor.data_location == _T.EXTERNAL or tensor.external_data:
        yield _external_data_refusal(tensor)
        return
    bits = BITS.get(tensor.data_type)
    count = _count(tensor.dims)
    if bits is None:
        yield _invalid(tensor, f"element type {tensor.data_type}", "an element type of ONNX")
    elif any(axis < 0 for axis in tensor.dims):
        yield _invalid(tensor, f"dims {_show_dims(tensor.dims)}", "no negative length")
    elif count is None or count * bits > 8 * _LARGEST:
        yield _invalid(tensor, f"dims {_show_dims(tensor.dims)}", "a size below 2^63 bytes")
    elif tensor.HasField("segment"):
        yield _invalid(tensor, "a segment of a tensor", "whole tensors")
    else:
        yield from _content_problems(tensor, count, bits)


def _content_problems(tensor: TensorProto, count: int, bits: int) -> Iterator[Refusal]:
    """The content must be exactly the bytes (raw) or elements (typed) that the dims claim, in one field."""
    typed = _TYPED_FIELDS.get(tensor.data_type, "int32_data")
    if tensor.HasField("raw_data"):
        if tensor.data_type == _T.STRING:
            yield _invalid(tensor, "text in raw_data", "text in string_data")
            return
        unit, found, claimed = "bytes", len(tensor.raw_data), -(-count * bits // 8)
        if len(getattr(tensor, typed)):
            yield _invalid(tensor, f"both raw_data and {typed}", "one of them")
    else:
        per_item = {4: 2, 2: 4}.get(bits, 1)  # small integers are packed into each int32
        parts = 2 if tensor.data_type in (_T.COMPLEX64, _T.COMPLEX128) else 1
        unit, found, claimed = "elements", len(getattr(tensor, typed)), -(-count * parts // per_item)
    if found != claimed:
        yield _invalid(
            tensor, f"dims {_show_dims(tensor.dims)}, {claimed} {unit}, and brings {found}", "what it claims"
        )


def _external_data_refusal(tensor: TensorProto) -> Refusal:
    """Refuses external data entirely, because a pushed model is one file. The refusal names the worst problem.

    No path is looked up. Whether it is a link, a FIFO or a device makes no difference.
    """
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    location = dict(entries).get("location", "")
    why = _bad_location(location)
    if why is not None:
        return _path(tensor, location, why)
    for key, value in entries:
        if key not in _EXTERNAL_KEYS:
            return _invalid(
                tensor, f"external data with a field {key!r:.60}", f"only {', '.join(sorted(_EXTERNAL_KEYS))}"
            )
        if key in ("offset", "length") and not (value.isascii() and value.isdigit() and int(value[:20]) <= _LARGEST):
            return _invalid(tensor, f"external data with {key} {value!r:.40}", "a number from 0 to 2^63 - 1")
    if len({key for key, _ in entries}) != len(entries):
        return _invalid(tensor, "external data with a field given twice", "each field once")
    return _path(tensor, location, "it is another file")


def _bad_location(location: str) -> str | None:
    """What is wrong with the path of external data; None for a plain file name."""
    if _RUNTIME_MEMORY in location:
        return "an address in the runtime's memory"
    if "\0" in location:
        return "a NUL in the name"
    if location.startswith(("/", "\\")) or location[1:2] == ":":
        return "an absolute path"
    parts = location.replace("\\", "/").split("/")
    if ".." in parts:
        return "it climbs out of the model's folder"
    if len(parts) > 1 or location in ("", "."):
        return "it is not a plain file name"
    return None


def _count(dims: Iterable[int]) -> int | None:
    """Number of elements; None where a length is negative or the product of the nonzero lengths exceeds 2^63."""
    lengths = list(dims)
    if any(axis < 0 for axis in lengths) or len(lengths) > 64:
        return None
    return math.prod(lengths) if math.prod(axis or 1 for axis in lengths) <= _LARGEST else None


def _show_dims(dims: Iterable[int]) -> str:
    lengths = list(dims)
    return str(lengths) if len(lengths) <= 8 else f"[{len(lengths)} axes]"


def _path(tensor: TensorProto, location: str, why: str) -> Refusal:
    return Refusal(
        Code.MODEL_PATH,
        f"tensor {tensor.name!r:.60} keeps its data in {location!r:.80}: {why}",
        "one file with all weights inside",
        "save it with `onnx.save(model, path, save_as_external_data=False)`",
    )


def _invalid(tensor: TensorProto, found: str, asked: str) -> Refusal:
    return Refusal(Code.MODEL_INVALID, f"tensor {tensor.name!r:.60}: {found}", asked, "export the model again")
