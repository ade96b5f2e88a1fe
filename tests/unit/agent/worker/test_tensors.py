"""Requests as arrays: every datatype both ways, and everything that a stranger may get wrong (A43)."""

import struct
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.agent.worker.answer_writer import AnswerWriter
from shoal.agent.worker.request_reader import RequestNames
from shoal.agent.worker.tensors import DATATYPES, decode, output_names, tensor_specs, to_raw
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.types.profile import TensorSpec

SPECS = (
    TensorSpec("f", "FP32", (-1, 2)),
    TensorSpec("i", "INT8", (2,)),
    TensorSpec("b", "BOOL", (2,)),
    TensorSpec("s", "BYTES", (-1,)),
)


def good() -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name="m")
    for name, datatype, shape, raw in (
        ("f", "FP32", (3, 2), np.arange(6, dtype=np.float32).tobytes()),
        ("i", "INT8", (2,), b"\x80\x7f"),
        ("b", "BOOL", (2,), b"\x00\x01"),
        ("s", "BYTES", (2,), b"\x01\x00\x00\x00a\x00\x00\x00\x00"),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(raw)
    return request


def typed_request(datatype: str, field: str, values: list[object], shape: tuple[int, ...]) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest()
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    getattr(tensor.contents, field).extend(values)
    return request


def test_raw_contents() -> None:
    feeds = decode(good(), SPECS)
    assert feeds["f"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert feeds["i"].tolist() == [-128, 127]
    assert feeds["b"].tolist() == [False, True]
    assert feeds["s"].tolist() == ["a", ""]


@pytest.mark.parametrize(
    "datatype", [name for name in DATATYPES if name not in ("BYTES", "BOOL")], ids=lambda name: str(name)
)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_bit_pattern_survives(datatype: str, data: st.DataObject) -> None:
    dtype = DATATYPES[datatype].dtype
    count = data.draw(st.integers(0, 9))
    raw = data.draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    request = oip.ModelInferRequest(id="q")
    request.inputs.add(name="x", datatype=datatype, shape=(count,))
    request.raw_input_contents.append(raw)
    feeds = decode(request, (TensorSpec("x", datatype, (-1,)),))
    assert feeds["x"].dtype == dtype
    parts = AnswerWriter().write(RequestNames(b"m", b"", b"q"), {"y": feeds["x"]})
    answer = oip.ModelInferResponse.FromString(b"".join(parts))
    assert (answer.id, answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("q", datatype, [count])
    assert answer.raw_output_contents[0] == raw


@given(st.lists(st.text(), max_size=6))
def test_strings_survive(items: list[str]) -> None:
    raw = b"".join(struct.pack("<I", len(text)) + text for text in (item.encode() for item in items))
    request = oip.ModelInferRequest()
    request.inputs.add(name="x", datatype="BYTES", shape=(len(items),))
    request.raw_input_contents.append(raw)
    feeds = decode(request, (TensorSpec("x", "BYTES", (-1,)),))
    assert feeds["x"].tolist() == items
    assert to_raw(feeds["x"]) == raw


def test_bytes_that_are_not_utf8() -> None:
    assert decode(typed_request("BYTES", "bytes_contents", [b"\xff", b"a"], (2,)), (TensorSpec("x", "BYTES", (2,)),))[
        "x"
    ].tolist() == [b"\xff", b"a"]
    with pytest.raises(ShoalError) as refused:
        decode(typed_request("BYTES", "bytes_contents", [b"\xff\x00"], (1,)), (TensorSpec("x", "BYTES", (1,)),))
    assert refused.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", 128),
        ("INT8", "int_contents", -129),
        ("INT16", "int_contents", 2**15),
        ("UINT8", "uint_contents", 256),
        ("UINT16", "uint_contents", 2**16),
    ],
)
def test_typed_values_outside_their_datatype(datatype: str, field: str, value: int) -> None:
    spec = TensorSpec("x", datatype, (1,))
    with pytest.raises(ShoalError) as refused:
        decode(typed_request(datatype, field, [value], (1,)), (spec,))
    assert refused.value.code is Code.INVALID_ARGUMENT
    limits = np.iinfo(DATATYPES[datatype].dtype)
    for edge in (limits.min, limits.max):
        assert decode(typed_request(datatype, field, [int(edge)], (1,)), (spec,))["x"].tolist() == [edge]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_come_raw_only(datatype: str) -> None:
    with pytest.raises(ShoalError) as refused:
        decode(typed_request(datatype, "fp32_contents", [1.0], (1,)), (TensorSpec("x", datatype, (1,)),))
    assert refused.value.code is Code.INVALID_ARGUMENT


def _twice(r: oip.ModelInferRequest) -> None:
    r.inputs.add().CopyFrom(r.inputs[0])
    r.raw_input_contents.append(r.raw_input_contents[0])


def _shape(*dims: int) -> Callable[[oip.ModelInferRequest], None]:
    def change(r: oip.ModelInferRequest) -> None:
        del r.inputs[0].shape[:]
        r.inputs[0].shape.extend(dims)

    return change


def _raw(index: int, raw: bytes) -> Callable[[oip.ModelInferRequest], None]:
    return lambda r: r.raw_input_contents.__setitem__(index, raw)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda r: setattr(r.inputs[0], "name", "g"), Code.INVALID_ARGUMENT, "'g' is unknown"),
        (lambda r: r.inputs.pop(), Code.INVALID_ARGUMENT, "'s' is missing"),
        (_twice, Code.INVALID_ARGUMENT, "'f' is given twice"),
        (lambda r: setattr(r.inputs[0], "datatype", "FP64"), Code.INVALID_ARGUMENT, "datatype 'FP64'"),
        (lambda r: setattr(r.inputs[0], "datatype", "fp32"), Code.INVALID_ARGUMENT, "datatype 'fp32'"),
        (_shape(3), Code.INVALID_ARGUMENT, "shape [3]"),
        (_shape(2, 3), Code.INVALID_ARGUMENT, "shape [2, 3]"),
        (_shape(-3, 2), Code.INVALID_ARGUMENT, "shape [-3, 2]"),
        (_shape(2**62, 2), Code.INVALID_ARGUMENT, "shape"),
        (_shape(2**40, 2), Code.TOO_LARGE, "over its limit"),
        (_shape(4, 2), Code.INVALID_ARGUMENT, "24 raw bytes"),
        (_raw(0, b""), Code.INVALID_ARGUMENT, "0 raw bytes"),
        (_raw(2, b"\x00\x02"), Code.INVALID_ARGUMENT, "neither 0 nor 1"),
        (_raw(3, b"\x01\x00\x00\x00a"), Code.INVALID_ARGUMENT, "1 elements"),
        (_raw(3, b"\xff\xff\xff\xff" + b"a" * 8), Code.INVALID_ARGUMENT, "claims 4294967295 bytes"),
        (_raw(3, bytes(8) + b"\x00"), Code.INVALID_ARGUMENT, "left over"),
        (_raw(3, bytes(12)), Code.INVALID_ARGUMENT, "left over"),
        (lambda r: r.raw_input_contents.pop(), Code.INVALID_ARGUMENT, "3 raw contents for 4 inputs"),
        (lambda r: r.inputs[0].contents.fp32_contents.append(1), Code.INVALID_ARGUMENT, "raw and typed"),
        (
            lambda r: r.inputs[0].parameters["shared_memory_region"].MergeFrom(oip.InferParameter(string_param="/x")),
            Code.UNIMPLEMENTED,
            "shared memory",
        ),
    ],
)
def test_what_is_refused(change: Callable[[oip.ModelInferRequest], object], code: Code, says: str) -> None:
    request = good()
    change(request)
    with pytest.raises(ShoalError) as refused:
        decode(request, SPECS)
    assert refused.value.code is code
    assert says in refused.value.refusal.found
    assert refused.value.refusal.remedy


def test_wrong_typed_field_and_count() -> None:
    spec = (TensorSpec("x", "FP32", (2,)),)
    for request in (
        typed_request("FP32", "fp64_contents", [1.0, 2.0], (2,)),
        typed_request("FP32", "fp32_contents", [1.0], (2,)),
        typed_request("FP32", "fp32_contents", [], (2,)),
    ):
        with pytest.raises(ShoalError) as refused:
            decode(request, spec)
        assert refused.value.code is Code.INVALID_ARGUMENT


def test_the_cap_is_on_the_expanded_size_of_all_inputs() -> None:
    request = good()
    assert decode(request, SPECS, 24 + 2 + 2 + 2 * 64 + 1)
    with pytest.raises(ShoalError) as refused:
        decode(request, SPECS, 24 + 2 + 2 + 2 * 64)
    assert refused.value.code is Code.TOO_LARGE
    # sixteen million empty strings are 64 MiB of lengths and much more once they are objects
    many = oip.ModelInferRequest()
    many.inputs.add(name="s", datatype="BYTES", shape=(2**21,))
    many.raw_input_contents.append(bytes(2**23))
    with pytest.raises(ShoalError) as refused:
        decode(many, (TensorSpec("s", "BYTES", (-1,)),))
    assert refused.value.code is Code.TOO_LARGE
    # one long string that is not UTF-8 must not make every other element as long
    wide = typed_request("BYTES", "bytes_contents", [b"\xff" * 2**20, *[b"a"] * 200], (201,))
    with pytest.raises(ShoalError) as refused:
        decode(wide, (TensorSpec("x", "BYTES", (-1,)),))
    assert refused.value.code is Code.TOO_LARGE


@given(seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 4))
@settings(max_examples=1500, deadline=None)
def test_a43_mutated_requests_are_answered_or_refused(seed: int, flips: int) -> None:
    generator = np.random.default_rng(seed)
    data = bytearray(good().SerializeToString())
    for _ in range(flips):
        data[generator.integers(len(data))] = generator.integers(256)
    try:
        request = oip.ModelInferRequest.FromString(bytes(data))
    except Exception:
        return  # the parser's own refusal, INVALID_ARGUMENT at the worker
    outcome = _outcome(request, len(data))
    assert outcome in (None, Code.INVALID_ARGUMENT, Code.TOO_LARGE, Code.UNIMPLEMENTED)


def _outcome(request: oip.ModelInferRequest, size: int) -> Code | None:
    try:
        feeds = decode(request, SPECS)
    except ShoalError as refused:
        return refused.code
    assert sum(feed.nbytes for feed in feeds.values()) <= 4 * size
    assert set(feeds) == {spec.name for spec in SPECS}
    return None


def test_requested_outputs() -> None:
    outputs = (TensorSpec("y", "FP32", (-1,)), TensorSpec("z", "FP32", (-1,)))
    assert output_names(oip.ModelInferRequest(), outputs) == ["y", "z"]
    request = oip.ModelInferRequest()
    request.outputs.add(name="z")
    assert output_names(request, outputs) == ["z"]
    request.outputs.add(name="z")
    for wrong in (request, _request_output("w")):
        with pytest.raises(ShoalError) as refused:
            output_names(wrong, outputs)
        assert refused.value.code is Code.INVALID_ARGUMENT
    ranked = _request_output("y")
    ranked.outputs[0].parameters["classification"].int64_param = 3
    with pytest.raises(ShoalError) as refused:
        output_names(ranked, outputs)
    assert refused.value.code is Code.UNIMPLEMENTED


def _request_output(name: str) -> oip.ModelInferRequest:
    return oip.ModelInferRequest(outputs=[oip.ModelInferRequest.InferRequestedOutputTensor(name=name)])


class _Argument:
    def __init__(self, kind: str, shape: list[object]) -> None:
        self.name, self.type, self.shape = "v", kind, shape


def test_signatures() -> None:
    assert tensor_specs([_Argument("tensor(bfloat16)", ["n", 3, None])]) == (TensorSpec("v", "BF16", (-1, 3, -1)),)
    assert np.dtype(ml_dtypes.bfloat16) == DATATYPES["BF16"].dtype
    for kind in ("seq(tensor(float))", "optional(tensor(float))", "tensor(complex64)", "sparse_tensor(float)"):
        with pytest.raises(ShoalError) as refused:
            tensor_specs([_Argument(kind, [])])
        assert refused.value.code is Code.MODEL_INVALID
