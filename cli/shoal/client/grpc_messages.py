"""The messages of the Open Inference Protocol that an inference needs, as protobuf writes them.

By hand, because another client's stubs (tritonclient's) describe the same messages, and protobuf takes one description
of a message in a process. Pure.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from shoal.client.tensors import (
    InferenceResult,
    ModelMetadata,
    Parameters,
    Tensors,
    TensorSpec,
    datatype_of,
    from_raw,
    plain_parameter,
    to_raw,
    unreadable_answer,
)
from shoal.wire.varint import varint

_VARINT, _64_BIT, _BYTES, _32_BIT = 0, 1, 2, 5
"""Wire types. Source: https://protobuf.dev/programming-guides/encoding/"""
_MAX_VARINT_BYTES: Final = 10

Field = tuple[int, int | memoryview]
"""Number and value; a memoryview is a string, bytes or a message."""


def encode_request(
    model: str, inputs: Tensors, datatypes: Mapping[str, str] | None = None, parameters: Parameters | None = None
) -> bytes:
    """ModelInferRequest with raw contents. datatypes: of inputs whose array does not determine it. Raises
    ShoalError(INVALID_ARGUMENT)."""
    parts = [_text(1, model)]
    parts += [
        _bytes(4, _text(1, name) + _bytes(2, _parameter(plain_parameter(name, value))))
        for name, value in (parameters or {}).items()
    ]
    known = {name: datatype_of(value, (datatypes or {}).get(name, "")) for name, value in inputs.items()}
    for name, value in inputs.items():
        shape = b"".join(map(varint, value.shape))
        parts.append(_bytes(5, _text(1, name) + _text(2, known[name]) + (_bytes(3, shape) if shape else b"")))
    parts += [_bytes(7, to_raw(value, known[name], name)) for name, value in inputs.items()]
    return b"".join(parts)


def decode_response(message: bytes | memoryview) -> InferenceResult:
    """ModelInferResponse with raw contents. Raises ShoalError(MESSAGE_INVALID)."""
    try:
        heads, raws = list[TensorSpec](), list[memoryview]()
        for number, value in _fields(memoryview(message)):
            if number == 5:
                heads.append(_tensor(_view(value)))
            elif number == 6:
                raws.append(_view(value))
        outputs = {head.name: from_raw(raw, head.datatype, head.shape) for head, raw in zip(heads, raws, strict=True)}
        return InferenceResult(outputs, datatypes={head.name: head.datatype for head in heads})
    except (ValueError, KeyError, OverflowError) as cause:
        raise unreadable_answer(f"an answer that cannot be read: {cause}") from cause


def decode_stream_response(message: bytes) -> InferenceResult | str:
    """ModelStreamInferResponse: an answer, or the words of a refusal. Raises ShoalError(MESSAGE_INVALID)."""
    try:
        fields = dict(_fields(memoryview(message)))
        if error := bytes(_view(fields.get(1, memoryview(b"")))):
            return error.decode()
        return decode_response(_view(fields.get(2, memoryview(b""))))
    except ValueError as cause:
        raise unreadable_answer(f"an answer that cannot be read: {cause}") from cause


def encode_metadata_request(model: str) -> bytes:
    """ModelMetadataRequest."""
    return _text(1, model)


def decode_metadata(message: bytes) -> ModelMetadata:
    """ModelMetadataResponse. Raises ShoalError(MESSAGE_INVALID)."""
    found: dict[int, list[TensorSpec]] = {4: [], 5: []}
    try:
        for number, value in _fields(memoryview(message)):
            if number in found:
                found[number].append(_tensor(_view(value)))
    except ValueError as cause:
        raise unreadable_answer(f"metadata that cannot be read: {cause}") from cause
    return ModelMetadata(tuple(found[4]), tuple(found[5]))


def _tensor(message: memoryview) -> TensorSpec:
    name, datatype, shape = "", "", list[int]()
    for number, value in _fields(message):
        if number == 1:
            name = bytes(_view(value)).decode()
        elif number == 2:
            datatype = bytes(_view(value)).decode()
        elif number == 3 and isinstance(value, int):
            shape.append(_signed(value))
        elif number == 3:
            at, packed = 0, _view(value)
            while at < len(packed):
                axis, at = _read_varint(packed, at)
                shape.append(_signed(axis))
    return TensorSpec(name, datatype, tuple(shape))


def _fields(message: memoryview) -> Iterator[Field]:
    """Raises ValueError for bytes that are no message."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        size = {_64_BIT: 8, _32_BIT: 4}.get(kind)
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError(f"field {key >> 3} of wire type {kind}")
        yield key >> 3, message[at : at + size]
        at += size


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """The value, and where it ends. Raises ValueError."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at
    raise ValueError("a number that does not end")


def _view(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where bytes belong")
    return value


def _signed(value: int) -> int:
    """int64 of a varint."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _parameter(value: str | int | bool | float) -> bytes:
    """InferParameter."""
    if isinstance(value, bool):
        return bytes((1 << 3 | _VARINT,)) + varint(value)
    if isinstance(value, int):
        return bytes((2 << 3 | _VARINT,)) + varint(value)
    if isinstance(value, float):
        return bytes((4 << 3 | _64_BIT,)) + struct.pack("<d", value)
    return bytes((3 << 3 | _BYTES,)) + varint(len(encoded := value.encode())) + encoded


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode()) if value else b""


def _bytes(number: int, value: bytes) -> bytes:
    return bytes((number << 3 | _BYTES,)) + varint(len(value)) + value
