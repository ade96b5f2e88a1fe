"""Requests and answers as the client writes and reads them, beside protobuf's own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.client.grpc_messages import (
    decode_metadata,
    decode_response,
    decode_stream_response,
    encode_metadata_request,
    encode_request,
)
from shoal.client.tensors import DTYPES, ModelMetadata, TensorSpec, datatype_of, to_raw
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError

NAMES = st.text(max_size=200)
NUMBERS = st.sampled_from([np.dtype(kind) for kind in DTYPES.values()]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)
STRINGS = arrays.arrays(np.object_, arrays.array_shapes(max_dims=2, max_side=4), elements=st.binary(max_size=40))
TENSORS = st.dictionaries(NAMES.filter(bool), NUMBERS | STRINGS, max_size=4)
PARAMETERS = st.dictionaries(
    NAMES.filter(bool),
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    max_size=4,
)


def answer_of(tensors: dict[str, Any]) -> oip.ModelInferResponse:
    known = {name: datatype_of(value) for name, value in tensors.items()}
    return oip.ModelInferResponse(
        model_name="m",
        model_version="1",
        parameters={"triton_final_response": oip.InferParameter(bool_param=True)},
        outputs=[
            oip.ModelInferResponse.InferOutputTensor(name=name, datatype=known[name], shape=value.shape)
            for name, value in tensors.items()
        ],
        raw_output_contents=[to_raw(value, known[name], name) for name, value in tensors.items()],
    )


def are_equal(found: Any, expected: Any) -> bool:
    return found.shape == expected.shape and (found.tobytes() == expected.tobytes() or bool((found == expected).all()))


@given(NAMES, TENSORS, PARAMETERS)
def test_protobuf_reads_what_is_written(model: str, tensors: dict[str, Any], parameters: dict[str, Any]) -> None:
    found = oip.ModelInferRequest.FromString(encode_request(model, tensors, parameters=parameters))
    assert found.model_name == model
    assert [each.name for each in found.inputs] == list(tensors)
    assert [tuple(each.shape) for each in found.inputs] == [value.shape for value in tensors.values()]
    assert [each.datatype for each in found.inputs] == [datatype_of(value) for value in tensors.values()]
    assert list(found.raw_input_contents) == [to_raw(value, datatype_of(value), "") for value in tensors.values()]
    said = {name: getattr(each, str(each.WhichOneof("parameter_choice"))) for name, each in found.parameters.items()}
    assert said == parameters
    assert [type(said[name]) for name in parameters] == [type(value) for value in parameters.values()]


@given(TENSORS)
def test_what_protobuf_writes_is_read(tensors: dict[str, Any]) -> None:
    found = decode_response(answer_of(tensors).SerializeToString())
    assert list(found.outputs) == list(tensors)
    assert all(are_equal(found.outputs[name], value) for name, value in tensors.items())
    assert found.datatypes == {name: datatype_of(value) for name, value in tensors.items()}


def test_bf16_becomes_float32() -> None:
    values = np.array([1.5, -2.0, 0.0], np.float32)
    answer = oip.ModelInferResponse(
        outputs=[oip.ModelInferResponse.InferOutputTensor(name="y", datatype="BF16", shape=(3,))],
        raw_output_contents=[to_raw(values, "BF16", "y")],
    )
    found = decode_response(answer.SerializeToString())
    assert found.outputs["y"].dtype == np.float32
    assert (found.outputs["y"] == values).all()
    assert found.datatypes == {"y": "BF16"}


def test_a_stream_has_answers_and_refusals() -> None:
    answer = oip.ModelStreamInferResponse(infer_response=answer_of({"y": np.arange(3)}))
    found = decode_stream_response(answer.SerializeToString())
    assert not isinstance(found, str)
    assert found.outputs["y"].tolist() == [0, 1, 2]
    refused = oip.ModelStreamInferResponse(error_message="found: none (OVERLOADED)")
    assert decode_stream_response(refused.SerializeToString()) == "found: none (OVERLOADED)"


def test_metadata_of_a_model() -> None:
    assert oip.ModelMetadataRequest.FromString(encode_metadata_request("reader")).name == "reader"
    tensor = oip.ModelMetadataResponse.TensorMetadata
    answer = oip.ModelMetadataResponse(
        name="reader",
        inputs=[tensor(name="x", datatype="FP32", shape=(-1, 4))],
        outputs=[tensor(name="y", datatype="INT64")],
    )
    found = decode_metadata(answer.SerializeToString())
    assert found == ModelMetadata((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "INT64", ()),))


def test_an_array_of_another_kind_is_refused() -> None:
    with pytest.raises(ShoalError) as refused:
        encode_request("m", {"x": np.zeros(2, np.complex64)})
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_an_answer_without_its_bytes_is_refused() -> None:
    answer = answer_of({"y": np.zeros(4, np.float32)})
    answer.raw_output_contents[0] = b"\0" * 15
    with pytest.raises(ShoalError) as refused:
        decode_response(answer.SerializeToString())
    assert refused.value.code is Code.MESSAGE_INVALID
    del answer.raw_output_contents[:]
    with pytest.raises(ShoalError):
        decode_response(answer.SerializeToString())


def code_of(read: Callable[[bytes], object], message: bytes) -> Code | None:
    """None where it is read."""
    try:
        read(message)
    except ShoalError as error:
        return error.code
    return None


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_a_refusal(message: bytes) -> None:
    for read in (decode_response, decode_stream_response, decode_metadata):
        assert code_of(read, message) in (None, Code.MESSAGE_INVALID)


@given(TENSORS, st.data())
def test_no_changed_byte_raises_anything_but_a_refusal(tensors: dict[str, Any], data: st.DataObject) -> None:
    message = bytearray(answer_of(tensors).SerializeToString())
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    assert code_of(decode_response, bytes(message)) in (None, Code.MESSAGE_INVALID)
