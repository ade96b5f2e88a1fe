"""REST bodies: JSON and binary tensors to messages and back, bit for bit, and what is refused."""

import json
import math
import re
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.dataplane import json_tensors
from shoal.agent.dataplane.request import parse_request
from shoal.agent.dataplane.tensors import OutputFormat, convert_request, convert_response, load_json, run_steps
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError

FORMATS = {
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


def request_of(
    model: str, version: str, text: bytes, header_length: int | None
) -> tuple[oip.ModelInferRequest, OutputFormat]:
    request, wanted = run_steps(convert_request(model, version, bytearray(text), header_length))
    return oip.ModelInferRequest.FromString(request), wanted


def response_of(response: bytes, wanted: OutputFormat) -> tuple[bytes, int | None]:
    return run_steps(convert_response(response, wanted))


def body(**tensor: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", **tensor}]}).encode()


def echo(message: oip.ModelInferRequest) -> bytes:
    return oip.ModelInferResponse(
        model_name=message.model_name,
        id=message.id,
        outputs=[
            oip.ModelInferResponse.InferOutputTensor(name=t.name, datatype=t.datatype, shape=t.shape)
            for t in message.inputs
        ],
        raw_output_contents=message.raw_input_contents,
    ).SerializeToString()


@st.composite
def raw_tensors(draw: st.DrawFn) -> tuple[str, list[int], bytes]:
    datatype = draw(st.sampled_from(sorted(FORMATS)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    size = struct.calcsize(f"<{FORMATS[datatype]}")
    if datatype == "BOOL":
        return datatype, shape, draw(st.lists(st.integers(0, 1), min_size=count, max_size=count).map(bytes))
    raw = draw(st.binary(min_size=count * size, max_size=count * size))
    # JSON has one NaN only: its payload does not survive
    numbers = struct.unpack(f"<{count}{FORMATS[datatype]}", raw)
    raw = struct.pack(f"<{count}{FORMATS[datatype]}", *(0 if number != number else number for number in numbers))
    return datatype, shape, raw


@given(raw_tensors(), st.booleans())
def test_json_carries_every_number_exactly(tensor: tuple[str, list[int], bytes], nested: bool) -> None:
    datatype, shape, raw = tensor
    count = math.prod(shape)
    data: list[Any] = list(struct.unpack(f"<{count}{FORMATS[datatype]}", raw))
    if nested and count:
        for size in reversed(shape[1:]):
            data = [data[i : i + size] for i in range(0, len(data), size)]
    message, wanted = request_of("m", "", body(shape=shape, datatype=datatype, data=data), None)
    assert message.raw_input_contents[0] == raw
    text, json_length = response_of(echo(message), wanted)
    assert json_length is None
    output = json.loads(text)["outputs"][0]
    again, _ = request_of("m", "", json.dumps({"inputs": [output]}).encode(), None)
    assert again.raw_input_contents[0] == raw


USUAL = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["x", "y", "\u00e9"]),
            "datatype": st.sampled_from(["FP32", "FP16", "INT8", "UINT64", "BOOL", "BYTES", "BF16"]),
            "shape": st.sampled_from([[1], [2], [1, 2], [], [1.0], [True], [-1], "2"]),
            "data": st.lists(st.sampled_from([0, 1, -1, 0.5, 300, 2**64, 1e300, True, None, "a", [1]]), max_size=2),
        },
        optional={"parameters": st.sampled_from([{}, {"a": 1.0}, {"binary_data_size": 0}])},
    ),
    max_size=2,
)


def outcome_of(text: bytes) -> tuple[bytes, bool] | Code:
    try:
        request, wanted = run_steps(convert_request("m", "1", bytearray(text), None))
    except ShoalError as error:
        return error.code
    return request, wanted.is_binary("y")


@given(
    USUAL,
    st.sampled_from(
        [
            *({}, {"id": "i"}, {"id": "a:b"}, {"id": 7}, {"outputs": {}}),
            *({"outputs": [{"name": name}]} for name in ("y", "", None, 7)),
        ]
    ),
    st.sampled_from(["", ',"inputs":[]', ',"id":"twice"', ',"data":[1]', "}"]),
)
def test_small_bodies_are_taken_as_large_ones_are(inputs: list[Any], more: dict[str, Any], end: str) -> None:
    """Those of the usual form are converted at once; spaces make them too large for that."""
    text = json.dumps({"inputs": inputs, **more})[:-1] + end + "}"
    assert outcome_of(text.encode()) == outcome_of((text + " " * json_tensors.STEP_BYTES).encode())


def test_contents_have_the_length_that_workers_read_at_once() -> None:
    """Large bodies too; not the longer forms of the same length."""
    whole = body(shape=[100], data=[0.5] * 100) + b" " * json_tensors.STEP_BYTES
    request, _ = run_steps(convert_request("m", "", bytearray(whole), None))
    assert request == oip.ModelInferRequest.FromString(request).SerializeToString()


@st.composite
def nearly_arrays(draw: st.DrawFn) -> tuple[list[int], str]:
    """A shape, and an array of it with up to three mistakes: characters too many or too few, or in the wrong order."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    data: list[Any] = list(range(1, math.prod(shape) + 1))
    for size in reversed(shape[1:] if draw(st.booleans()) else ()):
        data = [data[i : i + size] for i in range(0, len(data), size)]
    text = json.dumps(data)
    for _ in range(draw(st.integers(0, 3))):
        at, more = draw(st.integers(0, len(text))), draw(st.sampled_from(["", "[", "]", ",", "7", " ", "][", "],["]))
        cut = draw(st.integers(0, 2))
        text = text[:at] + (text[at : at + 2][::-1] if cut == 2 else more) + text[at + cut :]
    return shape, text


def shape_in(data: Any) -> list[int] | None:
    """None where lists of one level are of different lengths, or hold numbers and lists."""
    if not isinstance(data, list):
        return []
    first, *others = [shape_in(each) for each in data] or [None]
    return None if first is None or any(each != first for each in others) else [len(data), *first]


@given(nearly_arrays(), st.integers(4, 40))
def test_arrays_of_numbers_are_those_that_json_and_the_shape_allow(case: tuple[list[int], str], step: int) -> None:
    """However the text is cut."""
    shape, text = case
    try:
        data = json.loads(text)
        expected = isinstance(data, list) and shape_in(data) in (shape, [math.prod(shape)])
    except ValueError:
        expected = False
    whole = b'{"inputs":[{"name":"x","shape":%b,"datatype":"FP32","data":%b}]}' % (
        json.dumps(shape).encode(),
        text.encode(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_tensors, "STEP_BYTES", step)
        refused: ShoalError | None = None
        try:
            message, _ = request_of("m", "", whole, None)
        except ShoalError as error:
            refused = error
        else:
            assert expected, (shape, text)
            flat = [float(number) for number in re.findall(r"\d+", text)]
            assert message.raw_input_contents[0] == struct.pack(f"<{len(flat)}f", *flat)
    assert refused is None or refused.code is Code.INVALID_ARGUMENT
    assert refused is None or not expected or step < len(text), (shape, text)


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=4))
def test_json_carries_text(texts: list[str]) -> None:
    message, wanted = request_of("m", "", body(shape=[len(texts)], datatype="BYTES", data=texts), None)
    answer, _ = response_of(echo(message), wanted)
    assert json.loads(answer)["outputs"][0]["data"] == texts


def test_special_numbers_travel_as_triton_writes_them() -> None:
    text = b'{"inputs":[{"name":"x","shape":[3],"datatype":"FP32","data":[NaN,Infinity,-Infinity]}]}'
    message, wanted = request_of("m", "", text, None)
    answer, _ = response_of(echo(message), wanted)
    assert b'"data":[NaN,Infinity,-Infinity]' in answer


def test_binary_both_ways_and_mixed() -> None:
    bf16, text = b"\x01\x02\x03\x04", struct.pack("<I", 1) + b"\xff"
    document = {
        "id": "i",
        "parameters": {"sequence_id": 7, "p": True, "q": 1.5, "s": "t"},
        "inputs": [
            {"name": "a", "shape": [2], "datatype": "BF16", "parameters": {"binary_data_size": 4}},
            {"name": "j", "shape": [1], "datatype": "INT8", "data": [-3]},
            {"name": "b", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}},
        ],
        "outputs": [
            {"name": "a", "parameters": {"binary_data": True, "classification": 3}},
            {"name": "j"},
            {"name": "b", "parameters": {"binary_data": True}},
        ],
    }
    head = json.dumps(document).encode()
    message, wanted = request_of("m", "1", head + bf16 + text, len(head))
    assert list(message.raw_input_contents) == [bf16, b"\xfd", text]
    assert message.parameters["sequence_id"].int64_param == 7
    assert message.outputs[0].parameters["classification"].int64_param == 3
    assert parse_request(message.SerializeToString()).session == "7"
    answer, json_length = response_of(echo(message), wanted)
    assert json_length is not None
    found = json.loads(answer[:json_length])
    assert [o.get("data") for o in found["outputs"]] == [None, [-3], None]
    assert answer[json_length:] == bf16 + text


NO_LISTS = (
    *(b"[1", b"1]", b"[1]]", b"[[1]", b"[1 2]", b"[,1]", b"[1,]", b"[1}]", b"[{}]", b"[1][2]", b"[01]", b"[1]2"),
    *(b"[" + b" " * 20_000 + b"1]", b"[" + b"1" * 20_000 + b"]", b'["a""b"]', b'["a" 1]', b'["a]', b'["a","b"}'),
)
"""`data` that is no JSON, or no number with a comma within reach."""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", Code.INVALID_ARGUMENT),
        (b"[]", Code.INVALID_ARGUMENT),
        (b"\xff\xfe", Code.INVALID_ARGUMENT),
        (b"{}", Code.INVALID_ARGUMENT),
        (b'{"inputs":{}}', Code.INVALID_ARGUMENT),
        (b'{"inputs":[7]}', Code.INVALID_ARGUMENT),
        (b'{"inputs":[],"inputs":[]}', Code.INVALID_ARGUMENT),
        (b'{"inputs":[],"id":7}', Code.INVALID_ARGUMENT),
        (b'{"inputs":[],"id":"\\ud800"}', Code.INVALID_ARGUMENT),
        (b'{"inputs":[],"parameters":{"\\ud800":1}}', Code.INVALID_ARGUMENT),
        (body(parameters={"\ud800": True}), Code.INVALID_ARGUMENT),
        (b'{"inputs":[],"outputs":[{"name":"y","parameters":{"\\udc00":"s"}}]}', Code.INVALID_ARGUMENT),
        (b'{"inputs":[],"parameters":{"a":{}}}', Code.INVALID_ARGUMENT),
        (b'{"inputs":[],"parameters":{"a":99999999999999999999}}', Code.INVALID_ARGUMENT),
        (b'{"inputs":' + b"[" * 10_000, Code.INVALID_ARGUMENT),
        (b'{"inputs":' + b"[" * 100_000, Code.FIELD_TOO_MANY),
        (b'{"a":' * 10_000, Code.INVALID_ARGUMENT),
        (b'{"a":' * 50_000, Code.FIELD_TOO_MANY),
        (b'{"inputs":[' + b"{}," * 5000 + b"{}]}", Code.FIELD_TOO_MANY),
        (json.dumps({"inputs": [], "parameters": {str(n): n for n in range(4097)}}).encode(), Code.FIELD_TOO_MANY),
        (b'{"inputs":[],"data":[1]}', Code.INVALID_ARGUMENT),
        (body(data=[0], parameters={"data": [1]}), Code.INVALID_ARGUMENT),
        (body(data="x"), Code.INVALID_ARGUMENT),
        *((body(data=None).replace(b"null", text), Code.INVALID_ARGUMENT) for text in NO_LISTS),
        (b'{"inputs":[' + b"9" * 5000 + b"]}", Code.INVALID_ARGUMENT),
        (b"[" * 900_000, Code.FIELD_TOO_MANY),
        (b"[" * 4_000_000, Code.TOO_LARGE),
        (b'{"inputs":[{"data":[' + b"0," * 9_000_000 + b"0]}]}", Code.INVALID_ARGUMENT),
        (body(data=[0], shape=[2**24 + 1]), Code.TOO_LARGE),
        (body(), Code.INVALID_ARGUMENT),
        (body(data=7), Code.INVALID_ARGUMENT),
        (body(data=[1, 2]), Code.INVALID_ARGUMENT),
        (body(data=[]), Code.INVALID_ARGUMENT),
        (body(data=["1"]), Code.INVALID_ARGUMENT),
        (body(data=[True]), Code.INVALID_ARGUMENT),
        (body(data=[None]), Code.INVALID_ARGUMENT),
        (body(data=[[1]]), Code.INVALID_ARGUMENT),
        (body(data=[1e300]), Code.INVALID_ARGUMENT),
        (body(data=[70000.0], datatype="FP16"), Code.INVALID_ARGUMENT),
        (body(data=[128], datatype="INT8"), Code.INVALID_ARGUMENT),
        (body(data=[-1], datatype="UINT64"), Code.INVALID_ARGUMENT),
        (body(data=[1.0], datatype="INT32"), Code.INVALID_ARGUMENT),
        (body(data=[1], datatype="BOOL"), Code.INVALID_ARGUMENT),
        (body(data=[1.0], datatype="BF16"), Code.INVALID_ARGUMENT),
        (body(data=["\ud800"], datatype="BYTES"), Code.INVALID_ARGUMENT),
        (body(data=[1], datatype="FP8"), Code.INVALID_ARGUMENT),
        (body(data=[1], shape=[-1]), Code.INVALID_ARGUMENT),
        (body(data=[1], shape=[True]), Code.INVALID_ARGUMENT),
        (body(data=[1], shape=[2**63]), Code.INVALID_ARGUMENT),
        (body(data=[1], shape="1"), Code.INVALID_ARGUMENT),
        (body(data=[1], shape=[1] * 33), Code.INVALID_ARGUMENT),
        (body(data=[1], shape=[2**31, 2**31]), Code.TOO_LARGE),
        (body(data=[1], shape=[2**24 + 1]), Code.TOO_LARGE),
        (body(data=[[1, 2], [3]], shape=[2, 2]), Code.INVALID_ARGUMENT),
        (body(data=[[1, 2], 3, 4], shape=[2, 2]), Code.INVALID_ARGUMENT),
        (body(parameters={"binary_data_size": 1}), Code.INVALID_ARGUMENT),
        (body(parameters={"binary_data_size": -1}), Code.INVALID_ARGUMENT),
        (body(data=[1], parameters={"binary_data_size": 0}), Code.INVALID_ARGUMENT),
    ],
)
def test_what_is_refused(text: bytes, code: Code) -> None:
    with pytest.raises(ShoalError) as refused:
        request_of("m", "", text, None)
    assert refused.value.code is code
    assert len(str(refused.value)) < 1000


SHAPE = [3, 2]
BROKEN = (
    b"[[1,2],[3,4]5,[6]]",
    b"[[1,2],[3,4],5[,6]]",
    b"[[1,2],[3,4],[5],6]",
    b"[[1,2],[3,4],[[5,6]]]",
    b"[[1,2],[3,4]]",
)


@pytest.mark.parametrize("text", BROKEN)
def test_nested_lists_are_their_shape_or_refused(text: bytes) -> None:
    request_of("m", "", body(data=[[1, 2], [3, 4], [5, 6]], shape=SHAPE), None)
    with pytest.raises(ShoalError) as refused:
        request_of("m", "", body(data=None, shape=SHAPE).replace(b"null", text), None)
    assert refused.value.code is Code.INVALID_ARGUMENT


BEFORE = (b"", b"7," * (2 * json_tensors.STEPS_OF_NUMBERS * json_tensors.STEP_BYTES // 3))
"""Of a list, so that what follows is in its first piece, and in a later one."""
PARTS = b"""1 -2.5 1e3 , , , [ ] { } : "a" "]" " true null""".split()


@given(st.sampled_from(BEFORE), st.lists(st.sampled_from([*PARTS, b" ", b"\n"]), max_size=8))
def test_a_list_of_numbers_is_what_one_parse_takes_for_one(before: bytes, parts: list[bytes]) -> None:
    spaces = b" " * json_tensors.STEP_BYTES  # so that it is no small body
    text = body(data=None).replace(b"null", b"[" + before + b"".join(parts) + b"]" + spaces)
    try:
        items = json.loads(text)["inputs"][0]["data"]
    except ValueError:
        items = []
    is_right = bool(items) and {int, float}.issuperset(map(type, items))
    text = text.replace(b'"shape": [1]', b'"shape": [%d]' % max(1, len(items)))
    if is_right:
        assert request_of("m", "", text, None)[0].raw_input_contents == [struct.pack(f"<{len(items)}f", *items)]
        return
    with pytest.raises(ShoalError) as refused:
        request_of("m", "", text, None)
    assert refused.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("shape", [[17_000], [17_000, 1], [1, 17_000], [20, 2, 500], [2] * 14])
@pytest.mark.parametrize("datatype", ["INT64", "BYTES"])
def test_lists_of_many_steps(shape: list[int], datatype: str) -> None:
    """As one parse would have it, before and after the keys that say what it is, spaces or not."""
    count = math.prod(shape)
    flat: list[Any] = [f'"]],[{n}\\' for n in range(count)] if datatype == "BYTES" else list(range(-count, 0))
    nested = flat
    for size in reversed(shape[1:]):
        nested = [nested[i : i + size] for i in range(0, len(nested), size)]
    texts = [item.encode() for item in flat] if datatype == "BYTES" else []
    packed = b"".join(struct.pack("<I", len(text)) + text for text in texts) or struct.pack(f"<{count}q", *flat)
    for data in (flat, nested):
        for spaces in ((",", ":"), (" , ", " : ")):
            tensor = {"data": data, "name": "x", "shape": shape, "datatype": datatype}
            for order in (tensor, dict(reversed(tensor.items()))):
                text = json.dumps({"inputs": [order, order]}, separators=spaces).encode()
                message, _ = request_of("m", "", text, None)
                assert list(message.raw_input_contents) == [packed, packed]


@pytest.mark.parametrize(("shape", "data"), [([0], []), ([0, 7], []), ([2, 0], [[], []]), ([2, 0, 3], [])])
def test_lists_of_nothing(shape: list[int], data: list[Any]) -> None:
    message, _ = request_of("m", "", body(data=data, shape=shape), None)
    assert list(message.raw_input_contents) == [b""]


@pytest.mark.parametrize("header_length", [-1, 10_000])
def test_a_header_length_that_lies(header_length: int) -> None:
    with pytest.raises(ShoalError):
        request_of("m", "", b'{"inputs":[]}', header_length)


def test_bytes_that_belong_to_nobody() -> None:
    with pytest.raises(ShoalError) as refused:
        request_of("m", "", b'{"inputs":[]}xyz', 13)
    assert "3 bytes" in str(refused.value)


@pytest.mark.parametrize(("datatype", "raw"), [("BF16", b"\0\0"), ("BYTES", struct.pack("<I", 1) + b"\xff")])
def test_outputs_that_json_cannot_carry(datatype: str, raw: bytes) -> None:
    answer = oip.ModelInferResponse(
        outputs=[oip.ModelInferResponse.InferOutputTensor(name="y", datatype=datatype, shape=[1])],
        raw_output_contents=[raw],
    ).SerializeToString()
    with pytest.raises(ShoalError) as refused:
        response_of(answer, OutputFormat(False, {}))
    assert "binary_data" in refused.value.refusal.asked


def test_brackets_in_text_do_not_count_against_it_until_there_are_millions() -> None:
    assert load_json(json.dumps({"a": "[{," * 10_000}).encode())


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"\xff\xff", Code.INVALID_ARGUMENT),
        (oip.ModelInferRequest().SerializeToString(), Code.INVALID_ARGUMENT),
        (
            oip.ModelInferRequest(
                model_name="m",
                inputs=[oip.ModelInferRequest.InferInputTensor(name="x", datatype="INT64", shape=[2**40])],
            ).SerializeToString(),
            Code.TOO_LARGE,
        ),
        (
            oip.ModelInferRequest(
                model_name="m",
                inputs=[oip.ModelInferRequest.InferInputTensor(name="x", datatype="BYTES", shape=[2**22])],
            ).SerializeToString(),
            Code.TOO_LARGE,
        ),
        (
            oip.ModelInferRequest(
                model_name="m", parameters={"timeout": oip.InferParameter(string_param="soon")}
            ).SerializeToString(),
            Code.INVALID_ARGUMENT,
        ),
    ],
)
def test_what_no_model_may_get(request_: bytes, code: Code) -> None:
    with pytest.raises(ShoalError) as refused:
        parse_request(request_)
    assert refused.value.code is code


@pytest.mark.parametrize("parameter", ["shared_memory_region", "shared_memory_offset", "shared_memory_of_tomorrow"])
def test_shared_memory_is_seen(parameter: str) -> None:
    parameters = {parameter: oip.InferParameter(string_param="r")}
    of_input = oip.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1], parameters=parameters)
    of_output = oip.ModelInferRequest.InferRequestedOutputTensor(name="y", parameters=parameters)
    sequence = {"sequence_id": oip.InferParameter(int64_param=7)}
    for extra in ({}, sequence):
        plain = oip.ModelInferRequest(model_name="m", parameters=extra)
        assert not parse_request(plain.SerializeToString()).uses_shared_memory
        for inputs, outputs in (([of_input], []), ([], [of_output])):
            message = oip.ModelInferRequest(model_name="m", parameters=extra, inputs=inputs, outputs=outputs)
            assert parse_request(message.SerializeToString()).uses_shared_memory


def test_what_the_front_reads() -> None:
    asked = parse_request(
        oip.ModelInferRequest(
            model_name="m",
            id="7",
            parameters={
                "timeout": oip.InferParameter(int64_param=1500),
                "sequence_id": oip.InferParameter(string_param="s"),
            },
        ).SerializeToString()
    )
    assert (asked.model, asked.id, asked.session, asked.timeout_s) == ("m", "7", "s", 0.0015)
