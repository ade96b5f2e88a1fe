"""Converts the protocol's REST form to and from the gRPC messages: JSON tensors and the binary tensor extension.

Everything becomes a ModelInferRequest with raw contents, so that inference has one path. Numbers are converted by
`struct`, which refuses what a datatype cannot hold. So a tensor that JSON can carry is preserved bit for bit (FP32 and
FP16 are exact as decimal doubles). BF16 has no JSON form. NaN and infinities are written as Triton writes them.
"""

import io
import json
import math
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import orjson
from google.protobuf.message import DecodeError

from shoal.agent.dataplane import json_tensors
from shoal.agent.dataplane.request import (
    MAX_FIELDS,
    MAX_PARAMETERS,
    MAX_RANK,
    MAX_TENSORS,
    elements,
    invalid,
    item_bytes,
    too_large,
)
from shoal.agent.dataplane.usual_bodies import convert_usual
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, refuse
from shoal.wire.field_limits import CountLimits, check_counts, fields_of
from shoal.wire.limits import INFER_BYTES
from shoal.wire.varint import varint

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Work in steps of about a millisecond, with its result."""
_RAW: Final = bytes((oip.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2,))
_LENGTH_BYTES: Final = 5
"""Bytes reserved for a length that is not known yet: those of the longest, which every parser accepts."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Which of the answer's tensors are sent as binary data."""

    # Whether outputs that are not in `by_output` are sent as binary data.
    binary: bool
    # Whether each named output is sent as binary data.
    by_output: Mapping[str, bool]

    def is_binary(self, name: str) -> bool:
        return self.by_output.get(name, self.binary)


def run_steps(steps: Steps[_T]) -> _T:
    """Run all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            result: _T = over.value
            return result


def convert_request(
    model: str, version: str, body: bytearray, header_length: int | None
) -> Steps[tuple[bytes, OutputFormat]]:
    """A serialized ModelInferRequest.

    `body` is emptied while it is converted. `header_length` is the length of the JSON part in the binary tensor
    extension; None when the whole body is JSON.

    Raises ShoalError(INVALID_ARGUMENT | TOO_LARGE | FIELD_TOO_MANY).
    """
    usual = convert_usual(model, version, body) if header_length is None else None
    if usual is not None:
        body.clear()
        return usual, OutputFormat(False, {})
    size = len(body)
    end = size if header_length is None else header_length
    if not 0 <= end <= size:
        raise invalid(f"Inference-Header-Content-Length {end}", f"at most the body's {size}")
    text = json_tensors.Body(body)
    split = yield from json_tensors.split(text, end)
    document = load_json(split.head)
    message = oip.ModelInferRequest(model_name=model, model_version=version, id=_text(document, "id"))
    whole = _object(document, "parameters")
    put_parameters(message.parameters, whole, leave_out="binary_data_output")
    asked_inputs = _objects(document, "inputs")
    shapes = _put_inputs(message, asked_inputs)
    named = _put_outputs(
        message, _objects(document, "outputs", required=False), _flag(whole, "binary_data_output", False)
    )
    _check_parameters(message)
    yield
    made = io.BytesIO()
    made.write(message.SerializeToString())
    used, offset = 0, end
    for asked, tensor, shape in zip(asked_inputs, message.inputs, shapes, strict=True):
        sent = _object(asked, "parameters").get("binary_data_size")
        if is_shared(tensor.parameters):
            if sent is not None or "data" in asked:
                raise invalid(f"input {tensor.name!r:.80} in shared memory and in the body", "one of them")
        elif sent is not None:
            if "data" in asked:
                raise invalid(f"input {tensor.name!r:.80} both in JSON and binary", "one of them")
            if type(sent) is not int or not 0 <= sent <= size - offset:
                raise invalid(f"binary_data_size {sent!r:.80} of input {tensor.name!r:.80}", "bytes that were sent")
            made.write(_RAW + varint(sent))
            for start in range(offset, offset + sent, _PIECE):
                made.write(text.read(start, min(start + _PIECE, offset + sent)))
                yield
            offset += sent
        else:
            span = split.data.get(asked["data"]) if isinstance(asked.get("data"), str) else None
            if span is None:
                raise invalid(f"input {tensor.name!r:.80} without data", "`data`, or `binary_data_size` and its bytes")
            used += 1
            yield from _pack(text, span, tensor, shape, made)
    if used != len(split.data):
        raise invalid("`data` that is no input's", "`data` in the inputs alone")
    if offset != size:
        raise invalid(f"{size - offset} bytes that belong to no input", "binary_data_size of every binary input")
    body.clear()
    return made.getvalue(), named


_PIECE: Final = 2**20
"""Bytes copied in one step."""


def _pack(
    text: json_tensors.Body, span: tuple[int, int], tensor: Any, shape: list[int], made: io.BytesIO
) -> Steps[None]:
    """Append a tensor of JSON as raw contents. Their length is in its shortest form where it is known beforehand: that
    is the form which workers read without protobuf."""
    count = math.prod(shape)
    length = varint(0, _LENGTH_BYTES)
    if tensor.datatype in json_tensors.FORMATS:
        length = varint(count * item_bytes(tensor.datatype, tensor.name))
    made.write(_RAW + length)
    start = made.tell()
    yield from json_tensors.pack(text, span, tensor.name, tensor.datatype, shape, count, made)
    if tensor.datatype not in json_tensors.FORMATS:
        size = made.tell() - start
        made.seek(start - _LENGTH_BYTES)
        made.write(varint(size, _LENGTH_BYTES))
        made.seek(0, io.SEEK_END)


def _put_inputs(message: oip.ModelInferRequest, asked: list[Mapping[str, Any]]) -> list[list[int]]:
    """Add the inputs to the message; return their shapes."""
    shapes: list[list[int]] = []
    expanded = 0
    for each in asked:
        tensor = message.inputs.add(name=_text(each, "name"), datatype=_text(each, "datatype"))
        shape = _shape(each, tensor.name)
        tensor.shape.extend(shape)
        put_parameters(tensor.parameters, _object(each, "parameters"), leave_out="binary_data_size")
        expanded += elements(shape, tensor.name) * item_bytes(tensor.datatype, tensor.name)
        if expanded > INFER_BYTES:
            raise too_large(f"inputs of at least {expanded} bytes")
        shapes.append(shape)
    return shapes


def is_shared(parameters: Mapping[str, oip.InferParameter]) -> bool:
    """Whether the tensor with these parameters lies in shared memory."""
    return "shared_memory_region" in parameters


def _put_outputs(message: oip.ModelInferRequest, asked: list[Mapping[str, Any]], default: bool) -> OutputFormat:
    named: dict[str, bool] = {}
    for each in asked:
        output = message.outputs.add(name=_text(each, "name"))
        parameters = _object(each, "parameters")
        named[output.name] = _flag(parameters, "binary_data", default)
        put_parameters(output.parameters, parameters, leave_out="binary_data")
    return OutputFormat(default, named)


def _check_parameters(message: oip.ModelInferRequest) -> None:
    tensors: tuple[Any, ...] = (message, *message.inputs, *message.outputs)
    count = sum(len(tensor.parameters) for tensor in tensors)
    if count > MAX_PARAMETERS:
        raise json_tensors.too_many(f"{count} parameters", MAX_PARAMETERS)


def convert_response(response: bytes, output_format: OutputFormat) -> Steps[tuple[bytes, int | None]]:
    """(body, length of its JSON part), or (body, None) when no binary tensors follow.

    Raises ShoalError(INVALID_ARGUMENT) for a tensor that JSON cannot carry, ShoalError(TOO_LARGE) for one that takes
    too much, ShoalError(INTERNAL) for a malformed response.
    """
    message, raws = split_response(response)
    if len(raws) != len(message.outputs):
        raise refuse(Code.INTERNAL, "an answer without raw contents", "", "report this with the log")
    yield
    document: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.id:
        document["id"] = message.id
    if message.parameters:
        document["parameters"] = _get_parameters(message.parameters)
    made = io.BytesIO()
    made.write(to_json(document)[:-1] + b',"outputs":[')
    binary: list[int] = []
    for number, tensor in enumerate(message.outputs):
        shown: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        parameters = _get_parameters(tensor.parameters)
        raw = raws[number]
        is_elsewhere = is_shared(tensor.parameters)
        is_binary = not is_elsewhere and output_format.is_binary(tensor.name)
        if is_binary:
            parameters["binary_data_size"] = len(raw)
            binary.append(number)
        if parameters:
            shown["parameters"] = parameters
        made.write((b"," if number else b"") + to_json(shown)[:-1])
        if not is_binary and not is_elsewhere:
            made.write(b',"data":[')
            yield from json_tensors.write_json(tensor.name, tensor.datatype, raw, made, MAX_JSON_BYTES)
            made.write(b"]")
        made.write(b"}")
    made.write(b"]}")
    length = made.tell()
    for number in binary:
        for start in range(0, len(raws[number]), _PIECE):
            made.write(raws[number][start : start + _PIECE])
            yield
    return made.getvalue(), length if binary else None


def split_response(response: bytes) -> tuple[oip.ModelInferResponse, list[memoryview]]:
    """(answer without its raw contents, these contents without a copy). Raises ShoalError(INTERNAL)."""
    if len(response) <= MAX_TENSORS:  # it cannot have more of anything than the smallest limit
        with suppress(DecodeError):
            whole = oip.ModelInferResponse.FromString(response)
            contents = [memoryview(raw) for raw in whole.raw_output_contents]
            whole.ClearField("raw_output_contents")
            return whole, contents
    view = memoryview(response)
    head: list[memoryview] = []
    raws: list[memoryview] = []
    if check_counts(oip.ModelInferResponse.DESCRIPTOR, response, _RESPONSE) is None:
        for number, start, content, end in fields_of(view, 0, len(view)):
            if number == oip.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER:
                raws.append(view[content:end])
            else:
                head.append(view[start:end])
        with suppress(DecodeError):
            return oip.ModelInferResponse.FromString(b"".join(head)), raws
    raise refuse(Code.INTERNAL, "an answer that is no ModelInferResponse", "", "report this with the log")


_RESPONSE: Final = CountLimits(
    fields=MAX_FIELDS,
    repeated=MAX_PARAMETERS,
    by_field={"inference.ModelInferResponse.InferOutputTensor.shape": MAX_TENSORS * MAX_RANK},
)
"""Limits for an answer: a model has no more outputs than a request may ask for."""
MAX_JSON_BYTES: Final = INFER_BYTES + 2**20
"""Bytes of an answer in JSON."""


def to_json(document: Mapping[str, Any] | str) -> bytes:
    """As one line of JSON."""
    if "parameters" not in document:
        return orjson.dumps(document)
    # it writes numbers that JSON does not have too, as Triton does
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def load_json(text: bytes) -> Mapping[str, Any]:
    """Parse an object with few values, which are counted before anything is built from them.

    Raises ShoalError(INVALID_ARGUMENT | FIELD_TOO_MANY).
    """
    shown = json_tensors.outline(text)
    values = shown.count(b",") + shown.count(b"[") + shown.count(b"{")
    if values > json_tensors.MAX_HEAD_VALUES:
        raise json_tensors.too_many(f"up to {values} values beside `data` of tensors", json_tensors.MAX_HEAD_VALUES)
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise invalid("JSON nested too deeply", "no deeper than the tensors") from error
    except ValueError as error:
        # Not where: `data` of tensors is no longer in this text.
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        wanted = "an object, with `data` of each tensor one list, flat or nested as its shape"
        raise invalid(f"a body that is no JSON: {reason}"[:200], wanted) from error
    if not isinstance(document, dict):
        raise invalid("JSON that is no object", "an object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key, "")
    if not isinstance(value, str):
        raise invalid(f"{key} {value!r:.80}", "a string")
    _check_text(value, key)
    return value


def _check_text(text: str, of: str) -> None:
    """Messages have no half of a surrogate pair, which JSON's escapes may spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{of:.80} with half a surrogate pair", "Unicode text") from error


def _object(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise invalid(f"{key} {value!r:.80}", "an object")
    return value


def _objects(document: Mapping[str, Any], key: str, *, required: bool = True) -> list[Mapping[str, Any]]:
    value = document.get(key, None if required else [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise invalid(f"{key} that are no list of objects", "a list of tensors")
    if len(value) > MAX_TENSORS:
        raise json_tensors.too_many(f"{len(value)} {key}", MAX_TENSORS)
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


def put_parameters(into: Any, parameters: Mapping[str, Any], *, leave_out: str) -> None:
    """Adds parameters to a message, but the one named `leave_out`. Raises ShoalError(INVALID_ARGUMENT)."""
    for name, value in parameters.items():
        if name == leave_out:
            continue
        _check_text(name, "a parameter's name")
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
