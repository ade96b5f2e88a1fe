"""Open Inference Protocol messages to arrays and back, bit for bit; invalid requests are refused.

Every size is computed from the declared shape before anything of that size is allocated.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.profile import TensorSpec

Array = NDArray[Any]

MAX_EXPANDED_BYTES: Final = 64 * 2**20
MAX_RANK: Final = 32
_STRING_OVERHEAD: Final = 64
"""Bytes that one string element costs beside its text, so that many empty strings count for the memory they take."""


@dataclass(frozen=True, slots=True)
class Datatype:
    """One datatype of the protocol."""

    # Name in the protocol, for example FP32.
    name: str
    # Name in ONNX Runtime, for example tensor(float).
    runtime: str
    # NumPy type of the array, if it is one of NumPy's own.
    own_dtype: np.dtype[Any] | None
    # Field of InferTensorContents. None: only raw bytes can carry this datatype.
    field: str | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy type of the array."""
        return self.own_dtype if self.own_dtype is not None else bfloat16()


@lru_cache(maxsize=1)
def bfloat16() -> np.dtype[Any]:
    """The type that NumPy lacks. What has it is imported with the first tensor of it: 2 MiB of a worker."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Imports nothing for a type of NumPy's own, but for two bytes without a meaning."""
    return dtype.kind == "V" and dtype.itemsize == 2 and dtype == bfloat16()


def _table(rows: Iterable[tuple[str, str, Any, str | None]]) -> dict[str, Datatype]:
    return {
        name: Datatype(name, f"tensor({runtime})", np.dtype(dtype) if dtype is not None else None, field)
        for name, runtime, dtype, field in rows
    }


DATATYPES: Final = _table(
    [
        ("BOOL", "bool", np.bool_, "bool_contents"),
        ("UINT8", "uint8", np.uint8, "uint_contents"),
        ("UINT16", "uint16", np.uint16, "uint_contents"),
        ("UINT32", "uint32", np.uint32, "uint_contents"),
        ("UINT64", "uint64", np.uint64, "uint64_contents"),
        ("INT8", "int8", np.int8, "int_contents"),
        ("INT16", "int16", np.int16, "int_contents"),
        ("INT32", "int32", np.int32, "int_contents"),
        ("INT64", "int64", np.int64, "int64_contents"),
        ("FP16", "float16", np.float16, None),
        ("BF16", "bfloat16", None, None),
        ("FP32", "float", np.float32, "fp32_contents"),
        ("FP64", "double", np.float64, "fp64_contents"),
        ("BYTES", "string", np.object_, "bytes_contents"),
    ]
)
_BY_RUNTIME: Final = {datatype.runtime: datatype for datatype in DATATYPES.values()}
_BY_DTYPE: Final = {each.own_dtype: each for each in DATATYPES.values() if each.own_dtype is not None}


def _datatype_of(array: Array) -> Datatype:
    return DATATYPES["BF16"] if is_bfloat16(array.dtype) else _BY_DTYPE[array.dtype]


def tensor_specs(values: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Specs of a session's NodeArgs; -1 for a dynamic axis. Raises ShoalError(MODEL_INVALID) for a value that is no
    tensor."""
    specs = []
    for value in values:
        datatype = _BY_RUNTIME.get(value.type)
        if datatype is None:
            raise refuse(
                Code.MODEL_INVALID,
                f"{value.name!r:.80} is a {value.type}",
                f"a tensor of {', '.join(DATATYPES)}",
                "the protocol has no such value: cast it inside the graph",
            )
        shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in value.shape)
        specs.append(TensorSpec(value.name, datatype.name, shape))
    return tuple(specs)


def decode(
    request: oip.ModelInferRequest, inputs: Sequence[TensorSpec], max_bytes: int = MAX_EXPANDED_BYTES
) -> dict[str, Array]:
    """The request's arrays by input name. BYTES become arrays of `str`, or of `bytes` if one element is not UTF-8.

    Raises ShoalError(INVALID_ARGUMENT), or TOO_LARGE if the tensors would take more than `max_bytes`.
    """
    wanted = {spec.name: spec for spec in inputs}
    given = [tensor.name for tensor in request.inputs]
    if len(set(given)) != len(given):
        raise _invalid(f"input {_first_duplicate(given)!r:.80} is given twice", "each input once")
    unknown = [name for name in given if name not in wanted]
    if unknown:
        raise _invalid(f"input {unknown[0]!r:.80} is unknown", f"{', '.join(wanted)}")
    missing = [name for name in wanted if name not in given]
    if missing:
        raise _invalid(f"input {missing[0]!r:.80} is missing", f"{', '.join(wanted)}")
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise _invalid(f"{len(raws)} raw contents for {len(request.inputs)} inputs", "one each, or none at all")
    left = max_bytes
    feeds = {}
    for index, tensor in enumerate(request.inputs):
        datatype, count = _check(tensor, wanted[tensor.name], left)
        if raws and tensor.HasField("contents"):
            raise _invalid(f"input {tensor.name!r:.80} has raw and typed contents", "one of the two")
        if raws:
            flat = _from_raw(tensor.name, datatype, count, raws[index], left)
        else:
            flat = _from_contents(tensor, datatype, count, left)
        left -= _memory_bytes(flat)
        feeds[tensor.name] = flat.reshape(tuple(tensor.shape))
    return feeds


def output_names(request: oip.ModelInferRequest, outputs: Sequence[TensorSpec]) -> list[str]:
    """Names of the outputs to compute; all if the request names none. Raises ShoalError(INVALID_ARGUMENT)."""
    known = [spec.name for spec in outputs]
    if not request.outputs:
        return known
    names = [tensor.name for tensor in request.outputs]
    for tensor in request.outputs:
        if tensor.name not in known:
            raise _invalid(f"output {tensor.name!r:.80} is unknown", ", ".join(known))
        if "classification" in tensor.parameters or "shared_memory_region" in tensor.parameters:
            raise refuse(Code.UNIMPLEMENTED, f"parameters of output {tensor.name!r:.80}", "plain tensors", "leave out")
    if len(set(names)) != len(names):
        raise _invalid(f"output {_first_duplicate(names)!r:.80} is asked for twice", "each output once")
    return names


def datatype_of(array: Array) -> str:
    """Name in the protocol."""
    return _datatype_of(array).name


def batch_input(inputs: Iterable[TensorSpec]) -> str | None:
    """The input whose first axis is as long as a request has inputs: the first whose first axis is dynamic. None: a
    request is one input."""
    return next((spec.name for spec in inputs if spec.shape and spec.shape[0] < 0), None)


def make_request(feeds: Mapping[str, Array]) -> oip.ModelInferRequest:
    """A request with these inputs as raw contents, which `decode` accepts."""
    request = oip.ModelInferRequest()
    for name, array in feeds.items():
        request.inputs.add(name=name, datatype=_datatype_of(array).name, shape=array.shape)
        request.raw_input_contents.append(to_raw(array))
    return request


def decode_response(
    response: oip.ModelInferResponse, outputs: Sequence[TensorSpec], max_bytes: int = MAX_EXPANDED_BYTES
) -> dict[str, Array]:
    """The arrays of an answer with all outputs, by name. Checked as strictly as a client's request. Raises as
    `decode`."""
    mirrored = oip.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    for tensor in response.outputs:
        mirrored.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return decode(mirrored, outputs, max_bytes)


def to_raw(array: Array) -> bytes:
    """Little-endian, row-major. For BYTES, each element follows its length in four bytes."""
    if array.dtype != np.object_:
        return array.tobytes()
    parts = []
    for item in array.flat:
        text = item.encode() if isinstance(item, str) else bytes(item)
        parts.append(struct.pack("<I", len(text)))
        parts.append(text)
    return b"".join(parts)


def _check(tensor: oip.ModelInferRequest.InferInputTensor, spec: TensorSpec, left: int) -> tuple[Datatype, int]:
    """The tensor's datatype and element count. Raises if they do not fit the model's signature and the bytes left."""
    if tensor.datatype != spec.dtype:
        raise _invalid(f"input {spec.name!r:.80} has datatype {tensor.datatype!r:.20}", spec.dtype)
    if "shared_memory_region" in tensor.parameters:
        raise refuse(Code.UNIMPLEMENTED, f"input {spec.name!r:.80} lies in shared memory", "bytes", "send the bytes")
    shape = tuple(tensor.shape)
    # the runtime gives () for a scalar and for an unknown rank alike, and checks those itself
    fits = not spec.shape or (
        len(shape) == len(spec.shape) and all(b in (-1, a) for a, b in zip(shape, spec.shape, strict=True))
    )
    if not fits or len(shape) > MAX_RANK or any(dim < 0 for dim in shape):
        raise _invalid(f"input {spec.name!r:.80} has shape {list(shape)!s:.200}", f"{list(spec.shape)}")
    datatype = DATATYPES[spec.dtype]
    count = math.prod(shape)
    if count > 2**63 - 1:
        raise _invalid(f"input {spec.name!r:.80} has shape {list(shape)!s:.200}", "a product of at most 2^63 - 1")
    size = count * (_STRING_OVERHEAD if datatype.name == "BYTES" else datatype.dtype.itemsize)
    if size > left:
        raise _too_large(spec.name, left)
    return datatype, count


def _from_raw(name: str, datatype: Datatype, count: int, raw: bytes, left: int) -> Array:
    if datatype.name == "BYTES":
        return _strings(name, _split(name, raw, count), left)
    if len(raw) != count * datatype.dtype.itemsize:
        raise _invalid(
            f"input {name!r:.80} has {len(raw)} raw bytes", f"{count} x {datatype.dtype.itemsize} for its shape"
        )
    if datatype.name == "BOOL" and raw.translate(None, b"\x00\x01"):
        raise _invalid(f"input {name!r:.80} has a byte that is neither 0 nor 1", "BOOL")
    return np.frombuffer(raw, dtype=datatype.dtype)


def _from_contents(tensor: oip.ModelInferRequest.InferInputTensor, datatype: Datatype, count: int, left: int) -> Array:
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    if datatype.field is None and count:
        raise _invalid(f"input {tensor.name!r:.80} of {datatype.name} has no raw contents", "raw_input_contents")
    if any(name != datatype.field for name in filled):
        raise _invalid(f"input {tensor.name!r:.80} has {', '.join(filled)}", f"only {datatype.field}")
    values = getattr(tensor.contents, datatype.field) if datatype.field else ()
    if len(values) != count:
        raise _invalid(f"input {tensor.name!r:.80} has {len(values)} elements", f"{count} for its shape")
    if datatype.name == "BYTES":
        return _strings(tensor.name, list(values), left)
    array = np.array(values, dtype=np.int64 if datatype.field in ("int_contents", "uint_contents") else datatype.dtype)
    if array.dtype == datatype.dtype:
        return array
    limits = np.iinfo(datatype.dtype)
    if count and (array.min() < limits.min or array.max() > limits.max):
        raise _invalid(
            f"input {tensor.name!r:.80} has a value outside {datatype.name}", f"{limits.min} to {limits.max}"
        )
    return array.astype(datatype.dtype)


def _split(name: str, raw: bytes, count: int) -> list[bytes]:
    items: list[bytes] = []
    at = 0
    while at < len(raw):
        if len(items) == count or at + 4 > len(raw):
            raise _invalid(f"input {name!r:.80} has bytes left over after {len(items)} elements", f"{count} elements")
        (size,) = struct.unpack_from("<I", raw, at)
        at += 4
        if size > len(raw) - at:
            raise _invalid(
                f"element {len(items)} of input {name!r:.80} claims {size} bytes", f"at most the {len(raw) - at} left"
            )
        items.append(raw[at : at + size])
        at += size
    if len(items) != count:
        raise _invalid(f"input {name!r:.80} has {len(items)} elements", f"{count} for its shape")
    return items


def _strings(name: str, items: list[bytes], left: int) -> Array:
    """ONNX Runtime's binding accepts `str` (as UTF-8), or fixed-width bytes, which lose trailing NULs."""
    if sum(map(len, items)) + len(items) * _STRING_OVERHEAD > left:
        raise _too_large(name, left)
    array = np.empty(len(items), dtype=np.object_)
    try:
        array[:] = [item.decode() for item in items]
    except UnicodeDecodeError as error:
        longest = max(map(len, items))
        if any(item.endswith(b"\x00") for item in items):
            raise _invalid(
                f"input {name!r:.80} holds bytes that are not UTF-8 and end in NUL", "UTF-8, or no NUL at the end"
            ) from error
        if longest * len(items) > left:
            raise _too_large(name, left) from error
        return np.array(items, dtype=f"S{longest}")
    return array


def _memory_bytes(array: Array) -> int:
    if array.dtype == np.object_:
        return sum(map(len, array)) + array.size * _STRING_OVERHEAD
    return array.nbytes


def _first_duplicate(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _invalid(found: str, asked: str) -> ShoalError:
    return refuse(Code.INVALID_ARGUMENT, found, asked, "see the model's metadata for its names, datatypes and shapes")


def _too_large(name: str, left: int) -> ShoalError:
    return refuse(
        Code.TOO_LARGE,
        f"input {name!r:.80} takes the request over its limit",
        f"at most {left} bytes more",
        "send less",
    )
