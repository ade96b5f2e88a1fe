"""Triton's generate extension: one JSON object of values by input name in, one of values by output name out.

(protocol/extension_generate.md of triton-inference-server.) Triton gives no shapes in it: a value is a scalar or a flat
list, and its shape is the model's.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shoal.agent.dataplane import json_tensors, tensors
from shoal.agent.dataplane.request import MAX_PARAMETERS, invalid
from shoal.agent.dataplane.tensors import Steps
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, refuse

MAX_BODY_BYTES: Final = json_tensors.MAX_HEAD_BYTES
"""Largest body. It is parsed whole, unlike the `data` of an infer request, and has at most MAX_HEAD_VALUES values."""


def convert_request(described: oip.ModelMetadataResponse, version: str, body: bytearray) -> Steps[bytes]:
    """A serialized ModelInferRequest. described: the model's inputs.

    A value by the name of an input, at the top or in `parameters`, is that input; `id` is the request's id. Every other
    scalar is a parameter of the request.

    Raises ShoalError(INVALID_ARGUMENT | FIELD_TOO_MANY).
    """
    document = tensors.load_json(bytes(body))
    nested = document.get("parameters", {})
    if not isinstance(nested, dict):
        raise invalid(f"parameters {nested!r:.80}", "an object")
    if twice := sorted(nested.keys() & document.keys() - {"parameters"}):
        raise invalid(f"{twice[0]!r:.80} both at the top and in parameters", "one of them")
    values = {**{name: value for name, value in document.items() if name != "parameters"}, **nested}
    message = oip.ModelInferRequest(model_name=described.name, model_version=version)
    inputs = {tensor.name: tensor for tensor in described.inputs}
    if "id" in values and "id" not in inputs:
        message.id = _id(values.pop("id"))
    yield
    for name, value in values.items():
        if (tensor := inputs.get(name)) is None:
            continue
        items = value if isinstance(value, list) else [value]
        message.inputs.add(name=name, datatype=tensor.datatype, shape=shape_of(name, list(tensor.shape), len(items)))
        message.raw_input_contents.append(_pack(items, name, tensor.datatype))
        yield
    others = {name: value for name, value in values.items() if name not in inputs}
    if len(others) > MAX_PARAMETERS:
        raise json_tensors.too_many(f"{len(others)} parameters", MAX_PARAMETERS)
    tensors.put_parameters(message.parameters, others, leave_out="")
    return message.SerializeToString()


def shape_of(name: str, dims: Sequence[int], count: int) -> list[int]:
    """The shape of `count` elements of an input: the model's, whose last open dimension takes what the others leave.
    Other open dimensions are 1. dims: as the model says; -1 is open.

    Raises ShoalError(INVALID_ARGUMENT).
    """
    fixed = math.prod(size for size in dims if size >= 0)
    open_at = [index for index, size in enumerate(dims) if size < 0]
    shape = [max(1, size) if size < 0 else size for size in dims]
    if open_at and fixed and count % fixed == 0:
        shape[open_at[-1]] = count // fixed
    if math.prod(shape) != count:
        asked = f"a multiple of {fixed}" if open_at else f"{fixed}"
        raise invalid(f"{count} values of input {name!r:.80}", f"{asked}, by its shape {list(dims)}")
    return shape


def _pack(items: list[Any], name: str, datatype: str) -> bytes:
    if datatype == "BF16":
        raise invalid(f"input {name!r:.80}: BF16 in JSON", "an infer request with the binary tensor extension")
    if any(isinstance(item, list | dict) for item in items):
        raise invalid(f"input {name!r:.80} that is nested", "a value, or one flat list")
    return json_tensors.pack_items(items, name, datatype)


def _id(value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(f"id {value!r:.80}", "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid("id with half a surrogate pair", "Unicode text") from error
    return value


def convert_response(response: bytes) -> Steps[bytes]:
    """The answer as one line of JSON: an output of one element is a scalar, any other one a flat list.

    Raises ShoalError(INVALID_ARGUMENT) for a tensor that JSON cannot carry, ShoalError(TOO_LARGE | INTERNAL).
    """
    message, raws = tensors.split_response(response)
    if len(raws) != len(message.outputs):
        raise refuse(Code.INTERNAL, "an answer without raw contents", "", "report this with the log")
    yield
    names = {tensor.name for tensor in message.outputs}
    document: Mapping[str, Any] = {
        name: value
        for name, value in (("model_name", message.model_name), ("model_version", message.model_version))
        if name not in names
    }
    if message.id and "id" not in names:
        document = {**document, "id": message.id}
    made = io.BytesIO()
    made.write(tensors.to_json(document)[:-1])
    for tensor, raw in zip(message.outputs, raws, strict=True):
        made.write((b"," if made.tell() > 1 else b"") + tensors.to_json(tensor.name) + b":")
        is_list = math.prod(tensor.shape) != 1
        made.write(b"[" if is_list else b"")
        yield from json_tensors.write_json(tensor.name, tensor.datatype, raw, made, tensors.MAX_JSON_BYTES)
        made.write(b"]" if is_list else b"")
    made.write(b"}")
    return made.getvalue()


def event(text: bytes) -> bytes:
    """One server-sent event. text: one line."""
    return b"data: " + text + b"\n\n"


def error_event(refusal: Refusal, retry_s: float | None) -> bytes:
    """The event that ends a stream with a refusal."""
    document: dict[str, Any] = {
        "error": str(refusal),
        "code": str(refusal.code),
        "found": refusal.found,
        "wanted": refusal.asked,
        "try": refusal.remedy,
    }
    if retry_s is not None:
        document["retry_after_ms"] = max(1, round(retry_s * 1000))
    return event(tensors.to_json(document))
