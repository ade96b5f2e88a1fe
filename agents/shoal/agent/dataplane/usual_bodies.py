"""Small JSON bodies of inference requests in their usual form, converted at once.

Usual is a body of inputs with a name, a datatype, a shape and one flat list of numbers, perhaps with an id and names of
outputs. `tensors.convert_request` takes every other, and makes the same bytes of these: what is not usual is None here,
so that only it refuses. It takes four times as long (measured with 64 numbers), because it counts before it parses.
"""

import struct
from functools import lru_cache
from typing import Any, Final

import orjson

from shoal.agent.dataplane.json_tensors import FORMATS, ITEM_TYPES, STEP_BYTES
from shoal.agent.dataplane.request import MAX_TENSORS, elements
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import ShoalError
from shoal.wire.field_limits import encode_field

_KEYS: Final = frozenset({"inputs", "outputs", "id"})
_INPUT: Final = frozenset({"name", "datatype", "shape", "data"})
_OUTPUT: Final = frozenset({"name"})
_RAW: Final = oip.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_INTEGERS: Final = frozenset({int})
_MAX_NAME: Final = 256
"""Characters of an input's name whose head is remembered."""


def convert_usual(model: str, version: str, body: bytearray) -> bytes | None:
    """A serialized ModelInferRequest; None for a body that is large, not usual, or invalid."""
    if len(body) > STEP_BYTES or b"\\" in body:
        return None
    try:
        return _convert(model, version, orjson.loads(body), body.count(b":"))
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, OverflowError, ShoalError):
        return None


def _convert(model: str, version: str, document: dict[str, Any], colons: int) -> bytes | None:
    """`colons`: those of the text. There is one for each key, and more only where a key appears twice or a string has
    one."""
    inputs, outputs, name = document["inputs"], document.get("outputs", []), document.get("id", "")
    if colons != len(document) + len(inputs) * len(_INPUT) + len(outputs) * len(_OUTPUT):
        return None
    if not _KEYS.issuperset(document) or (type(inputs), type(outputs), type(name)) != (list, list, str):
        return None
    if len(outputs) > MAX_TENSORS:
        return None
    heads: list[bytes] = []
    raws: list[bytes] = []
    for each in inputs:
        datatype, shape, items = each["datatype"], each["shape"], each["data"]
        if each.keys() != _INPUT or type(items) is not list or not items or len(each["name"]) > _MAX_NAME:
            return None
        if not set(map(type, shape)) <= _INTEGERS or not set(map(type, items)) <= ITEM_TYPES[datatype]:
            return None
        head, count = _head(each["name"], datatype, tuple(shape))
        if len(items) != count:
            return None
        heads.append(head)
        raws.append(encode_field(_RAW, (struct.pack(f"<{count}{FORMATS[datatype]}", *items),)))
    if any(each.keys() != _OUTPUT or type(each["name"]) is not str for each in outputs):
        return None
    begin = oip.ModelInferRequest(model_name=model, model_version=version, id=name)
    named = oip.ModelInferRequest(outputs=outputs)
    return b"".join((begin.SerializeToString(), *heads, named.SerializeToString(), *raws))


@lru_cache(maxsize=256)
def _head(name: str, datatype: str, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """An input without its contents, as a field of the message; and the number of its elements. Raises ShoalError."""
    count = elements(shape, name)
    tensor = oip.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    return oip.ModelInferRequest(inputs=[tensor]).SerializeToString(), count
