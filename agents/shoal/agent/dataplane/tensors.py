"""The protocol's REST form, both ways: JSON tensors and the binary tensor extension to and from the gRPC messages.

Everything becomes a ModelInferRequest with raw contents, so that there is one path for inference. Numbers go through
`struct`, which refuses what a datatype cannot hold; so a tensor that JSON can carry comes through bit for bit (FP32 and
FP16 are exact as decimal doubles). BF16 has no JSON form. NaN and infinities are written as Triton writes them.
"""

import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from shoal.agent.dataplane.request import elements, invalid, item_bytes, too_large
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, refuse
from shoal.wire.limits import INFER_BYTES

MAX_OBJECTS_BYTES: Final = 4 * INFER_BYTES
"""What the objects of a JSON body may take in memory: small text can grow by a factor of twenty."""
_NUMBER_BYTES: Final = 32
_NESTED_BYTES: Final = 72

FORMATS: Final[Mapping[str, str]] = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_INTEGERS: Final = frozenset({int})
_NUMBERS: Final = frozenset({int, float})
_ITEM_TYPES: Final[Mapping[str, frozenset[type]]] = {
    name: frozenset({bool}) if name == "BOOL" else _NUMBERS if name.startswith("FP") else _INTEGERS for name in FORMATS
}
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the answer's tensors shall travel: `named` outputs as said, all others by `binary`."""

    binary: bool
    named: Mapping[str, bool]

    def as_binary(self, name: str) -> bool:
        return self.named.get(name, self.binary)


def request_of(
    model: str, version: str, body: bytes, header_length: int | None
) -> tuple[oip.ModelInferRequest, Wanted]:
    """header_length: of the JSON part, by the binary tensor extension; None when the whole body is JSON.

    Raises ShoalError(INVALID_ARGUMENT | TOO_LARGE)."""
    split = len(body) if header_length is None else header_length
    if not 0 <= split <= len(body):
        raise invalid(f"Inference-Header-Content-Length {split}", f"at most the body's {len(body)}")
    document = load_json(body[:split])
    binary = memoryview(body)[split:]
    message = oip.ModelInferRequest(model_name=model, model_version=version, id=_text(document, "id"))
    whole = _object(document, "parameters")
    _put_parameters(message.parameters, whole, leave_out="binary_data_output")
    expanded, offset = 0, 0
    for asked in _objects(document, "inputs"):
        tensor = message.inputs.add(name=_text(asked, "name"), datatype=_text(asked, "datatype"))
        shape = _shape(asked, tensor.name)
        tensor.shape.extend(shape)
        parameters = _object(asked, "parameters")
        _put_parameters(tensor.parameters, parameters, leave_out="binary_data_size")
        count = elements(shape, tensor.name)
        expanded += count * item_bytes(tensor.datatype, tensor.name)
        if expanded > INFER_BYTES:
            raise too_large(f"inputs of at least {expanded} bytes")
        if "binary_data_size" in parameters:
            if "data" in asked:
                raise invalid(f"input {tensor.name!r:.80} both in JSON and binary", "one of them")
            size = parameters["binary_data_size"]
            if type(size) is not int or not 0 <= size <= len(binary) - offset:
                raise invalid(f"binary_data_size {size!r:.80} of input {tensor.name!r:.80}", "bytes that were sent")
            message.raw_input_contents.append(bytes(binary[offset : offset + size]))
            offset += size
        else:
            message.raw_input_contents.append(_raw(tensor.name, tensor.datatype, shape, count, asked.get("data")))
    if offset != len(binary):
        raise invalid(f"{len(binary) - offset} bytes that belong to no input", "binary_data_size of every binary input")
    named: dict[str, bool] = {}
    default = _flag(whole, "binary_data_output", False)
    for asked in _objects(document, "outputs", required=False):
        output = message.outputs.add(name=_text(asked, "name"))
        parameters = _object(asked, "parameters")
        named[output.name] = _flag(parameters, "binary_data", default)
        _put_parameters(output.parameters, parameters, leave_out="binary_data")
    return message, Wanted(default, named)


def response_of(response: bytes, wanted: Wanted) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON part when binary tensors follow it.

    Raises ShoalError(INVALID_ARGUMENT) for a tensor that JSON cannot carry, ShoalError(INTERNAL) for no response."""
    try:
        message = oip.ModelInferResponse.FromString(response)
    except DecodeError as error:
        raise refuse(
            Code.INTERNAL, "an answer that is no ModelInferResponse", "", "report this with the log"
        ) from error
    if len(message.raw_output_contents) != len(message.outputs):
        raise refuse(Code.INTERNAL, "an answer without raw contents", "", "report this with the log")
    binary: list[bytes] = []
    outputs: list[dict[str, Any]] = []
    for tensor, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        shown: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        parameters = _get_parameters(tensor.parameters)
        if wanted.as_binary(tensor.name):
            parameters["binary_data_size"] = len(raw)
            binary.append(raw)
        else:
            shown["data"] = _data(tensor.name, tensor.datatype, raw)
        if parameters:
            shown["parameters"] = parameters
        outputs.append(shown)
    document: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.id:
        document["id"] = message.id
    if message.parameters:
        document["parameters"] = _get_parameters(message.parameters)
    document["outputs"] = outputs
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return (b"".join((text, *binary)), len(text)) if binary else (text, None)


def load_json(text: bytes) -> Mapping[str, Any]:
    """An object whose parts would fit `MAX_OBJECTS_BYTES`, judged before anything is built from them.

    Raises ShoalError(INVALID_ARGUMENT | TOO_LARGE)."""
    objects = _NUMBER_BYTES * text.count(b",") + _NESTED_BYTES * (text.count(b"[") + text.count(b"{"))
    if objects > MAX_OBJECTS_BYTES:
        raise refuse(
            Code.TOO_LARGE,
            f"JSON that grows to some {objects} bytes",
            f"at most {MAX_OBJECTS_BYTES}",
            "send tensors by the binary tensor extension",
        )
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise invalid("JSON nested too deeply", "no deeper than the tensors") from error
    except ValueError as error:
        raise invalid(f"a body that is no JSON: {error}"[:200], "an object") from error
    if not isinstance(document, dict):
        raise invalid("JSON that is no object", "an object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _raw(name: str, datatype: str, shape: Sequence[int], count: int, data: Any) -> bytes:
    """Little-endian bytes of a JSON tensor, flat or nested as its shape."""
    if not isinstance(data, list):
        raise invalid(f"input {name!r:.80} without data", "`data`, or `binary_data_size` and its bytes")
    items = _flat(name, shape, data)
    if len(items) != count:
        raise invalid(f"{len(items)} elements of input {name!r:.80}", f"{count}, by its shape")
    if datatype == "BF16":
        raise invalid(f"input {name!r:.80}: BF16 in JSON", "the binary tensor extension, which carries it exactly")
    allowed = frozenset({str}) if datatype == "BYTES" else _ITEM_TYPES[datatype]
    wrong = set(map(type, items)) - allowed
    if wrong:
        kinds = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise invalid(f"{kinds} in input {name!r:.80}", f"what {datatype} holds")
    try:
        if datatype == "BYTES":
            texts = [item.encode() for item in items]
            return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))
        return struct.pack(f"<{count}{FORMATS[datatype]}", *items)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise invalid(f"input {name!r:.80}: {error}"[:300], f"what {datatype} holds") from error


def _flat(name: str, shape: Sequence[int], data: list[Any]) -> list[Any]:
    if len(shape) < 2 or not data or not isinstance(data[0], list):
        return data
    items = data
    if len(items) != shape[0]:
        raise invalid(f"{len(items)} rows of input {name!r:.80}", f"{shape[0]}, by its shape")
    for size in shape[1:]:
        if any(type(item) is not list or len(item) != size for item in items):
            raise invalid(f"lists of input {name!r:.80} that are not its shape", f"{list(shape)}, or one flat list")
        items = list(itertools.chain.from_iterable(items))
    return items


def _data(name: str, datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return [_decoded(name, text) for text in _strings(raw)]
    form = FORMATS.get(datatype)
    if form is None:
        raise invalid(f"output {name!r:.80}: {datatype} in JSON", "binary_data: true for this output")
    size = struct.calcsize(f"<{form}")
    return list(struct.unpack(f"<{len(raw) // size}{form}", raw))


def _strings(raw: bytes) -> list[bytes]:
    found: list[bytes] = []
    offset = 0
    while offset < len(raw):
        (size,) = _LENGTH.unpack_from(raw, offset)
        offset += _LENGTH.size
        found.append(raw[offset : offset + size])
        offset += size
    return found


def _decoded(name: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise invalid(
            f"output {name!r:.80}: strings that are not UTF-8", "binary_data: true for this output"
        ) from error


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key, "")
    if not isinstance(value, str):
        raise invalid(f"{key} {value!r:.80}", "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{key} with half a surrogate pair", "Unicode text") from error
    return value


def _object(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise invalid(f"{key} {value!r:.80}", "an object")
    return value


def _objects(document: Mapping[str, Any], key: str, *, required: bool = True) -> list[Mapping[str, Any]]:
    value = document.get(key, None if required else [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise invalid(f"{key} that are no list of objects", "a list of tensors")
    return value


def _shape(asked: Mapping[str, Any], name: str) -> list[int]:
    shape = asked.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and -(2**63) <= size < 2**63 for size in shape):
        raise invalid(f"shape of input {name!r:.80}", "a list of whole numbers")
    return shape


def _flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise invalid(f"{key} {value!r:.80}", "true or false")
    return value


def _put_parameters(into: Any, parameters: Mapping[str, Any], *, leave_out: str) -> None:
    for name, value in parameters.items():
        if name == leave_out:
            continue
        match value:
            case bool():
                into[name].bool_param = value
            case int() if -(2**63) <= value < 2**63:
                into[name].int64_param = value
            case int() if 0 <= value < 2**64:
                into[name].uint64_param = value
            case float():
                into[name].double_param = value
            case str():
                into[name].string_param = _text(parameters, name)
            case _:
                raise invalid(f"parameter {name!r:.80}: {value!r:.80}", "a string, a number or a boolean")


def _get_parameters(parameters: Mapping[str, oip.InferParameter]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        which = parameter.WhichOneof("parameter_choice")
        if which:
            found[name] = getattr(parameter, which)
    return found
