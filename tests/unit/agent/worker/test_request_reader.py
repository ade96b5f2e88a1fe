"""The reader of usual requests agrees with protobuf on every input that it takes, and takes those that clients send."""

import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import helper

from harness.models.synthetic import ints, model, tensor
from shoal.agent.frames.format import FrameReader, FrameType, encode_head
from shoal.agent.worker.answer_writer import AnswerWriter
from shoal.agent.worker.engine import open_engine, run_options
from shoal.agent.worker.providers import Provider
from shoal.agent.worker.request_reader import InferRequest, RequestNames, RequestReader, align
from shoal.agent.worker.tensors import DATATYPES, Array
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.types.profile import TensorSpec

SIZED = tuple(name for name in DATATYPES if name != "BYTES")
INPUTS = (TensorSpec("f", "FP32", (-1, 2)), TensorSpec("b", "BOOL", (2,)), TensorSpec("h", "BF16", ()))
OUTPUTS = (TensorSpec("y", "FP32", (-1,)), TensorSpec("é", "FP32", (-1,)))
MAX_BYTES = 4096
MEAN = model(
    [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)],
    [tensor("x", [2, 10, 1024])],
    [tensor("y", [2, 10])],
    [ints("axes", [2])],
)


def reader(inputs: tuple[TensorSpec, ...] = INPUTS) -> RequestReader:
    return RequestReader(inputs, OUTPUTS, MAX_BYTES, lambda: None)


def assert_equal(found: InferRequest, expected: InferRequest) -> None:
    assert found.names == expected.names
    assert list(found.outputs) == list(expected.outputs)
    assert found.feeds.keys() == expected.feeds.keys()
    for name, array in found.feeds.items():
        other = expected.feeds[name]
        assert (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes())
        assert array.flags.aligned


def assert_agrees(data: bytes) -> bool:
    """Whether the reader took it; then protobuf takes it too, and means the same. What it read before changes
    nothing."""
    tested, other = reader(), reader()
    found = tested.read_usual(data)
    other.read_usual(USUAL)
    again = other.read_usual(data)
    assert (again is None) is (found is None)
    if found is not None and again is not None:
        assert_equal(again, found)
        assert_equal(found, tested._read_any(data))
        assert_equal(tested.read_usual(bytearray(data)) or found, found)
        assert_equal(tested.read(data), found)
    return found is not None


def varint(value: int, extra: int = 0) -> bytes:
    """`extra`: bytes more than the shortest form has."""
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    for _ in range(extra):
        content[-1] |= 0x80
        content.append(0)
    return bytes(content)


def field(number: int, value: bytes, wire: int = 2, extra: int = 0) -> bytes:
    size = varint(len(value), extra) if wire == 2 else b""
    return varint(number << 3 | wire) + size + value


def head(name: bytes, datatype: bytes, shape: tuple[int, ...], *, packed: bool = True, extra: int = 0) -> bytes:
    dims = [varint(dim % 2**64, extra) for dim in shape]
    shaped = field(3, b"".join(dims)) if packed else b"".join(field(3, dim, wire=0) for dim in dims)
    return field(1, name) + field(2, datatype) + shaped


SOUND = {
    "f": (field(5, head(b"f", b"FP32", (3, 2))), field(7, bytes(range(24)))),
    "b": (field(5, head(b"b", b"BOOL", (2,), packed=False)), field(7, b"\0\1")),
    "h": (field(5, head(b"h", b"BF16", ())), field(7, b"\x80\x3f")),
}
USUAL = b"".join([field(1, b"m"), *(each[0] for each in SOUND.values()), *(each[1] for each in SOUND.values())])
ODD = (
    field(1, b"other"),
    field(1, b"\xff"),
    field(2, b"1"),
    field(2, "é".encode()),
    field(3, b"id"),
    field(3, b""),
    field(4, field(1, b"p") + field(2, field(2, b"\1", wire=0))),
    field(4, b"\xff"),
    field(5, b""),
    field(5, head(b"f", b"FP32", (-1, 2))),
    field(5, head(b"f", b"FP32", (1, 2), extra=1)),
    field(5, head(b"f", b"FP32", (2**62, 2))),
    field(5, head(b"f", b"FP32", (0, 2))),
    field(5, head(b"f", b"FP32", (0, 2**63 - 1))),
    field(5, head(b"f", b"FP64", (3, 2))),
    field(5, head(b"f\xff", b"FP32", (3, 2))),
    field(5, head(b"f", b"FP32", (3,)) + field(3, b"\2")),
    field(5, head(b"b", b"BOOL", (2,)) + field(1, b"f")),
    field(5, head(b"b", b"BOOL", (2,)) + field(4, field(1, b"p"))),
    field(5, head(b"b", b"BOOL", (2,)) + field(5, field(1, b"\1"))),
    field(5, head(b"h", b"BF16", tuple([1] * 32))),
    field(5, head(b"h", b"BF16", tuple([1] * 33))),
    field(5, head(b"z", b"FP32", (1,))),
    field(6, field(1, b"y")),
    field(6, field(1, "é".encode())),
    field(6, field(1, b"y", extra=1)),
    field(6, field(1, b"y") + field(2, field(1, b"classification"))),
    field(6, field(1, b"none")),
    field(6, b""),
    field(7, b""),
    field(7, b"\0\2"),
    field(7, b"\0\1"),
    field(7, bytes(24)),
    field(7, bytes(range(24)), extra=1),
    field(7, bytes(range(24)), extra=4),
    field(7, bytes(range(24)), extra=5),
    field(9, b"unknown"),
    field(1, b"\1", wire=0),
    field(7, bytes(8), wire=1),
    field(7, bytes(4), wire=5),
    field(7, b"", wire=3) + field(7, b"", wire=4),
    b"\x2a",
    b"\x3a\xff\xff\xff\xff\x7f",
    b"\x3a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
)  # fmt: skip
FIELDS = st.sampled_from([*(part for pair in SOUND.values() for part in pair), field(1, b"m"), *ODD])


@given(st.lists(FIELDS, max_size=9).map(b"".join))
@settings(max_examples=400, deadline=None)
@example(USUAL)
def test_any_fields_in_any_order(data: bytes) -> None:
    assert_agrees(data)


@given(st.lists(st.sampled_from(ODD), max_size=2), st.integers(0, 7), st.integers(0, 7))
@settings(max_examples=400, deadline=None)
def test_a_usual_request_with_something_odd_in_it(odd: list[bytes], at: int, left_out: int) -> None:
    parts = [field(1, b"m"), *(each[0] for each in SOUND.values()), *(each[1] for each in SOUND.values())]
    if left_out < len(parts):
        del parts[left_out]
    parts[at:at] = odd
    assert_agrees(b"".join(parts))


@given(st.integers(0, len(USUAL)), st.integers(0, 3), st.binary(max_size=3))
@settings(max_examples=500, deadline=None)
def test_bytes_changed_anywhere(at: int, removed: int, added: bytes) -> None:
    assert_agrees(USUAL[:at] + added + USUAL[at + removed :])


@given(st.binary(max_size=60))
@settings(deadline=None)
def test_any_bytes(data: bytes) -> None:
    assert_agrees(data)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.hex()[:40])
def test_each_odd_field_beside_a_usual_request(odd: bytes) -> None:
    assert_agrees(USUAL + odd)
    assert_agrees(odd + USUAL)


def test_what_clients_send_is_usual() -> None:
    assert assert_agrees(USUAL)
    assert assert_agrees(USUAL + field(6, field(1, "é".encode())) + field(6, field(1, b"y")) + field(3, b"id"))
    interleaved = b"".join(b"".join(each) for each in SOUND.values())
    assert assert_agrees(interleaved)


@pytest.mark.parametrize("datatype", SIZED)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_datatype_and_shape(datatype: str, data: st.DataObject) -> None:
    dtype = DATATYPES[datatype].dtype
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=4)))
    size = math.prod(shape) * dtype.itemsize
    raw = bytes(size) if datatype == "BOOL" else data.draw(st.binary(min_size=size, max_size=size))
    name = data.draw(st.text(max_size=9))
    request = oip.ModelInferRequest(model_name=name, id=data.draw(st.text(max_size=5)))
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw)
    tested = reader((TensorSpec("x", datatype, ()),))
    for _ in range(2):  # the second time its head is known
        found = tested.read_usual(request.SerializeToString())
        assert found is not None
        assert (found.feeds["x"].dtype, found.feeds["x"].shape, found.feeds["x"].tobytes()) == (dtype, shape, raw)
        assert found.names == (name.encode(), b"", request.id.encode())
        assert list(found.outputs) == ["y", "é"]


@pytest.mark.parametrize("id_bytes", range(16))
def test_an_answer_does_not_depend_on_where_a_tensor_lies_in_its_request(id_bytes: int) -> None:
    """As a sum of the runtime does, whose kernels take 16 bytes at once."""
    session = open_engine(MEAN.SerializeToString(), Provider("CPUExecutionProvider"))
    values = np.random.default_rng(5).random((2, 10, 1024), np.float32)

    def answer(request_id: str) -> bytes:
        request = oip.ModelInferRequest(id=request_id)
        request.inputs.add(name="x", datatype="FP32", shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
        tested = RequestReader((TensorSpec("x", "FP32", values.shape),), OUTPUTS, 2**20, lambda: None)
        found = tested.read_usual(request.SerializeToString())
        assert found is not None
        assert found.feeds["x"].ctypes.data % 16 == 0
        (given,) = session.run(found.feeds, ("y",), run_options()).values()
        return bytes(np.asarray(given).tobytes())

    assert answer("i" * id_bytes) == answer("")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xff\xff\xff", Code.INVALID_ARGUMENT),
        (USUAL + SOUND["f"][0], Code.INVALID_ARGUMENT),
        (USUAL.replace(b"\0\1", b"\0\2"), Code.INVALID_ARGUMENT),
        (b"\x3a\0" * 5000, Code.FIELD_TOO_MANY),
    ],
    ids=["junk", "twice", "bool", "many"],
)
def test_what_is_invalid_is_refused_by_protobufs_path(data: bytes, code: Code) -> None:
    with pytest.raises(ShoalError) as refused:
        reader().read(data)
    assert refused.value.code is code


def test_too_large_a_tensor_is_refused() -> None:
    request = oip.ModelInferRequest()
    request.inputs.add(name="x", datatype="FP32", shape=(2000,))
    request.raw_input_contents.append(bytes(8000))
    tested = reader((TensorSpec("x", "FP32", (-1,)),))
    assert tested.read_usual(request.SerializeToString()) is None
    with pytest.raises(ShoalError) as refused:
        tested.read(request.SerializeToString())
    assert refused.value.code is Code.TOO_LARGE


def test_a_request_of_millions_of_fields_is_left_after_the_first_few() -> None:
    data = b"\x3a\0" * 2**21
    tested = reader()
    tracemalloc.start()
    try:
        assert tested.read_usual(data) is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_heads_that_are_kept_are_bounded() -> None:
    tested = reader((TensorSpec("x", "FP32", (-1,)),))
    for n in range(600):
        request = oip.ModelInferRequest()
        request.inputs.add(name="x", datatype="FP32", shape=(n,))
        request.raw_input_contents.append(bytes(4 * n))
        tested.read_usual(request.SerializeToString())
    assert len(tested._known) <= 256
    assert len(tested._layouts) <= 32


def test_requests_that_differ_in_their_contents_alone_are_not_read_again() -> None:
    tested = reader()
    first = tested.read_usual(USUAL)
    assert first is not None
    contents = field(7, bytes(range(24)))
    second = tested.read_usual(USUAL.replace(contents, field(7, bytes(24))))
    assert second is not None
    assert not second.feeds["f"].any()
    assert first.feeds["f"].any()
    assert second.names is first.names, "they were read again"
    assert second.outputs == first.outputs


def strings(texts: list[bytes]) -> Array:
    array = np.empty(len(texts), np.object_)
    array[:] = texts
    return array


ARRAYS: list[tuple[str, Callable[[], Array]]] = [
    ("small", lambda: np.arange(6, dtype=np.float32).reshape(2, 3)),
    ("large", lambda: np.arange(5000, dtype=np.int64).reshape(50, 100)),
    ("transposed", lambda: np.arange(5000, dtype=np.float64).reshape(50, 100).T),
    ("strided", lambda: np.arange(20_000, dtype=np.uint16)[::2]),
    ("halves", lambda: np.arange(5000).astype(ml_dtypes.bfloat16)),
    ("scalar", lambda: np.array(7, np.int8)),
    ("empty", lambda: np.zeros((0, 5), np.float16)),
    ("bool", lambda: np.ones((70, 80), np.bool_)),
    ("strings", lambda: strings([b"", b"a\0", b"x" * 9000])),
]


@given(
    st.lists(st.sampled_from(ARRAYS), max_size=5, unique_by=lambda each: each[0]),
    st.text(max_size=200),
    st.sampled_from(["", "1", "7"]),
    st.text(max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_an_answer_is_the_message_that_protobuf_writes(
    drawn: list[tuple[str, Callable[[], Array]]], model: str, version: str, request_id: str
) -> None:
    expected = oip.ModelInferResponse(model_name=model, model_version=version or "1", id=request_id)
    outputs: dict[str, Array] = {}
    names: dict[Any, str] = {each.dtype: each.name for each in DATATYPES.values()}
    for name, make in drawn:
        array = outputs[name] = make()
        expected.outputs.add(name=name, datatype=names[array.dtype], shape=array.shape)
        if array.dtype == np.object_:
            raw = b"".join(struct.pack("<I", len(each)) + each for each in array)
        else:
            raw = array.tobytes()
        expected.raw_output_contents.append(raw)
    writer = AnswerWriter()
    for _ in range(2):  # the second time its heads are known
        parts = writer.write(RequestNames(model.encode(), version.encode(), request_id.encode()), outputs)
        assert oip.ModelInferResponse.FromString(b"".join(parts)) == expected
        assert all(isinstance(part, bytes) or part.format == "B" for part in parts)


def test_a_large_output_is_not_copied() -> None:
    array = np.arange(5000, dtype=np.float32)
    parts = AnswerWriter().write(RequestNames(b"m", b"", b""), {"y": array})
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts if len(part) == array.nbytes)


@pytest.mark.parametrize("before", [1, 2, 7, 16])
def test_large_floats_at_the_end_of_a_request_are_not_copied(before: int) -> None:
    """`before`: bytes of the request's id, which shift what follows."""
    spec = TensorSpec("x", "FP32", (-1,))
    sent = np.arange(2**15, dtype=np.float32)
    request = oip.ModelInferRequest(id="i" * before, raw_input_contents=[sent.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=sent.shape)
    data = request.SerializeToString()
    frames = FrameReader()
    buffer = frames.buffer()
    head = encode_head(FrameType.INFER, 1, b"", len(data)) + data[:100]
    buffer[: len(head)] = head
    frames.on_received(len(head))
    assert frames.next_frame(len(data)) is None
    frames.buffer()[:] = data[100:]
    frames.on_received(len(data) - 100)
    frame = frames.next_frame(len(data))
    assert frame is not None
    found = RequestReader((spec,), OUTPUTS, len(data), lambda: None).read(frame.payload).feeds["x"]
    assert np.array_equal(found, sent)
    assert found.ctypes.data % 16 == 0
    assert np.shares_memory(found, np.frombuffer(frame.payload, np.uint8))


@pytest.mark.parametrize("before", range(8))
def test_views_have_the_same_contents_wherever_they_lie(before: int) -> None:
    """`before`: bytes of the request's id, which shift what follows."""
    inputs = tuple(spec for spec in INPUTS if spec.dtype != "BOOL")
    data = field(3, b"i" * (before + 1)) + b"".join(part for name in ("f", "h") for part in SOUND[name])
    tested = reader(inputs)
    whole, views = tested.read_usual(data), tested.read_views(data)
    assert whole is not None
    assert views is not None
    assert views.names == whole.names
    for name, array in views.feeds.items():
        assert (array.dtype, array.shape) == (whole.feeds[name].dtype, whole.feeds[name].shape)
        assert array.tobytes() == whole.feeds[name].tobytes()
        assert np.shares_memory(array, np.frombuffer(data, np.uint8)), "no copy"
        assert align(array).ctypes.data % 16 == 0


def test_booleans_have_no_views() -> None:
    data = b"".join(part for parts in SOUND.values() for part in parts)
    assert reader().read_usual(data) is not None
    assert reader().read_views(data) is None
