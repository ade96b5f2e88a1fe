"""Triton's generate extension: values by name become tensors of the model's type and shape, and back."""

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.dataplane import generate, json_tensors
from shoal.agent.dataplane.tensors import run_steps
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError

INPUTS = {
    "text_input": ("BYTES", [-1, 1]),
    "tokens": ("INT64", [-1, -1]),
    "temperature": ("FP32", [1]),
    "flags": ("BOOL", [2]),
    "scale": ("FP16", []),
    "exact": ("BF16", [1]),
}


def model_metadata() -> oip.ModelMetadataResponse:
    model = oip.ModelMetadataResponse(name="m")
    for name, (datatype, shape) in INPUTS.items():
        model.inputs.add(name=name, datatype=datatype, shape=shape)
    return model


def convert(document: Any, version: str = "") -> oip.ModelInferRequest:
    steps = generate.convert_request(model_metadata(), version, bytearray(json.dumps(document).encode()))
    return oip.ModelInferRequest.FromString(run_steps(steps))


def test_values_become_inputs_of_the_models_type_and_shape_and_the_rest_parameters() -> None:
    message = convert(
        {
            "id": "r-1",
            "text_input": "héllo\n",
            "tokens": [1, 2, 3],
            "flags": [True, False],
            "stream": False,
            "parameters": {"temperature": 0, "top_k": 5, "stop": "."},
        },
        "1",
    )
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "r-1")
    text = "héllo\n".encode()
    found = [(t.name, t.datatype, list(t.shape)) for t in message.inputs]
    assert found == [
        ("text_input", "BYTES", [1, 1]),
        ("tokens", "INT64", [1, 3]),
        ("flags", "BOOL", [2]),
        ("temperature", "FP32", [1]),
    ]
    assert list(message.raw_input_contents) == [
        struct.pack("<I", len(text)) + text,
        struct.pack("<3q", 1, 2, 3),
        b"\1\0",
        struct.pack("<f", 0.0),
    ]
    assert message.parameters.keys() == {"stream", "top_k", "stop"}
    assert message.parameters["stream"].WhichOneof("parameter_choice") == "bool_param"
    assert message.parameters["top_k"].int64_param == 5
    assert message.parameters["stop"].string_param == "."


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ([], "JSON that is no object"),
        ({"parameters": []}, "parameters []"),
        ({"tokens": [1], "parameters": {"tokens": [2]}}, "'tokens' both at the top and in parameters"),
        ({"tokens": [[1, 2]]}, "input 'tokens' that is nested"),
        ({"tokens": {"a": 1}}, "input 'tokens' that is nested"),
        ({"tokens": [1.5]}, "float in input 'tokens'"),
        ({"tokens": [2**70]}, "input 'tokens'"),
        ({"flags": [True]}, "1 values of input 'flags'"),
        ({"scale": [1.0, 2.0]}, "2 values of input 'scale'"),
        ({"exact": 1}, "input 'exact': BF16 in JSON"),
        ({"temperature": None}, "NoneType in input 'temperature'"),
        ({"other": [1, 2]}, "parameter 'other'"),
        ({"id": 7}, "id 7"),
        ({"text_input": "\ud800"}, "input 'text_input'"),
        ({"\ud800": 1}, "a parameter's name with half a surrogate pair"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(document: Any, found: str) -> None:
    with pytest.raises(ShoalError) as refused:
        convert(document)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert found in refused.value.refusal.found


def test_a14_many_values_are_counted_before_they_are_made() -> None:
    body = bytearray(b'{"tokens":[' + b"1," * json_tensors.MAX_HEAD_VALUES + b"1]}")
    with pytest.raises(ShoalError, match=Code.FIELD_TOO_MANY):
        run_steps(generate.convert_request(model_metadata(), "", body))
    with pytest.raises(ShoalError, match=Code.FIELD_TOO_MANY):
        convert({f"p{number}": 1 for number in range(5000)})


@given(st.lists(st.integers(-1, 4), max_size=4), st.integers(0, 40))
def test_law_a_shape_holds_exactly_the_values_and_keeps_what_the_model_fixes(dims: list[int], count: int) -> None:
    fixed = math.prod(size for size in dims if size >= 0)
    fits = count == fixed if -1 not in dims else count == 0 if fixed == 0 else count % fixed == 0
    if not fits:
        with pytest.raises(ShoalError, match=Code.INVALID_ARGUMENT):
            generate.shape_of("x", dims, count)
        return
    shape = generate.shape_of("x", dims, count)
    assert math.prod(shape) == count
    assert len(shape) == len(dims)
    assert all(found == size for found, size in zip(shape, dims, strict=True) if size >= 0)
    variable = [found for found, size in zip(shape, dims, strict=True) if size < 0]
    assert all(size == 1 for size in variable[:-1])


def answer(*outputs: tuple[str, str, list[int], bytes], **more: Any) -> bytes:
    made = oip.ModelInferResponse(model_name="m", model_version="1", **more)
    for name, datatype, shape, raw in outputs:
        made.outputs.add(name=name, datatype=datatype, shape=shape)
        made.raw_output_contents.append(raw)
    return made.SerializeToString()


def test_one_element_is_a_scalar_and_more_are_a_list() -> None:
    text = "a\n\u2028b".encode()
    body = run_steps(
        generate.convert_response(
            answer(
                ("text_output", "BYTES", [1, 1], struct.pack("<I", len(text)) + text),
                ("scores", "FP32", [2, 1], struct.pack("<2f", 0.5, 1.5)),
                ("none", "INT64", [0], b""),
                id="r-1",
            )
        )
    )
    assert b"\n" not in body
    assert b"\r" not in body
    assert json.loads(body) == {
        "model_name": "m",
        "model_version": "1",
        "id": "r-1",
        "text_output": "a\n\u2028b",
        "scores": [0.5, 1.5],
        "none": [],
    }
    named = run_steps(generate.convert_response(answer(("model_name", "INT8", [], b"\7"))))
    assert json.loads(named) == {"model_version": "1", "model_name": 7}


def test_a_refusal_is_one_event_with_all_its_parts() -> None:
    refusal = Refusal(Code.OVERLOADED, "a queue\nof 9", "room", "come back")
    sent = generate.error_event(refusal, 0.25)
    assert sent.startswith(b"data: ")
    assert sent.endswith(b"\n\n")
    assert sent.count(b"\n") == 2
    shown = json.loads(sent[6:])
    assert (shown["code"], shown["found"], shown["wanted"], shown["try"], shown["retry_after_ms"]) == (
        "OVERLOADED",
        "a queue\nof 9",
        "room",
        "come back",
        250,
    )
