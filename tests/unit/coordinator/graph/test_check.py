"""Every way in that is closed, on models crafted for it; A29 to A34 in the integration tests go through the child."""

import contextlib
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper

from harness.models.synthetic import (
    BOOL,
    FLOAT,
    INT64,
    digest_of,
    graph,
    ints,
    length_delimited_field,
    model,
    relu,
    tensor,
    weight,
    with_constant,
)  # fmt: skip
from shoal.coordinator.core.graph import Rules, profile_of
from shoal.coordinator.core.graph.scan import scan
from shoal.types.codes import Code, Refusal


def refusal_of(content: bytes, rules: Rules | None = None) -> Refusal:
    found = profile_of(content, digest_of(content), rules or Rules())
    assert isinstance(found, Refusal), found
    assert found.found
    assert found.asked
    assert found.remedy
    return found


def relu_with_tensor(**fields: object) -> bytes:
    """relu() with an initializer of these TensorProto fields."""
    return with_constant(TensorProto(name="w", **fields))  # type: ignore[arg-type]


def external(*pairs: tuple[str, str]) -> bytes:
    made = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in pairs:
        made.external_data.add(key=key, value=value)
    return with_constant(made)


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("../weights.bin", "climbs out"), ("a/../../b", "climbs out"), ("..\\w.bin", "climbs out"),
        ("/etc/shadow", "absolute"), ("C:\\w.bin", "absolute"), ("\\\\host\\w", "absolute"),
        ("w\0.bin", "NUL"), ("folder/w.bin", "plain file name"), ("", "plain file name"), (".", "plain file name"),
        ("*/_ORT_MEM_ADDR_/*", "memory"), ("weights.bin", "another file"),
    ],
)  # fmt: skip
def test_external_data_is_refused_and_the_worst_is_named(location: str, why: str) -> None:
    refusal = refusal_of(external(("location", location)))
    assert refusal.code is Code.MODEL_PATH
    assert why in refusal.found


@pytest.mark.parametrize(
    "pair",
    [
        ("__class__", "x"), ("sha", "x"), ("offset", "-1"), ("length", "-4"), ("offset", "1e3"), ("length", "9" * 30),
        ("offset", "٣"), ("location", "w.bin"),
    ],
)  # fmt: skip
def test_external_data_fields(pair: tuple[str, str]) -> None:
    assert refusal_of(external(("location", "w.bin"), pair)).code is Code.MODEL_INVALID


def test_external_data_in_any_place_is_found() -> None:
    """In a Constant's attribute, in a subgraph's initializer, in a function."""
    outside = TensorProto(name="w", data_type=FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="../w")
    constant = helper.make_node("Constant", [], ["c"], value=outside)
    body = graph([helper.make_node("Identity", ["w"], ["r"])], [], [tensor("r", [1])], [outside])
    branch = helper.make_node("If", ["q"], ["y2"], then_branch=body, else_branch=body)
    function = helper.make_function("own", "F", [], ["c"], [constant], [helper.make_opsetid("", 18)])
    call = helper.make_node("F", [], ["y2"], domain="own")
    for extra, functions in ((constant, []), (branch, []), (call, [function])):
        made = model(
            [helper.make_node("Relu", ["x"], ["y"]), extra],
            [tensor("x", [1]), tensor("q", [], BOOL)],
            [tensor("y", [1])],
            domains={"own": 1},
            functions=functions,
        )
        assert refusal_of(made.SerializeToString()).code is Code.MODEL_PATH


@pytest.mark.parametrize(
    "content",
    [
        relu_with_tensor(data_type=FLOAT, dims=[-1], raw_data=b""),
        relu_with_tensor(data_type=FLOAT, dims=[-2, -2], raw_data=b"0" * 16),
        relu_with_tensor(data_type=FLOAT, dims=[2**62, 2**62, 0], raw_data=b""),
        relu_with_tensor(data_type=FLOAT, dims=[2**31, 2**31, 2], raw_data=b""),
        relu_with_tensor(data_type=FLOAT, dims=[1] * 65, raw_data=b"0000"),
        relu_with_tensor(data_type=FLOAT, dims=[2**40], raw_data=b"0000"),
        relu_with_tensor(data_type=FLOAT, dims=[2], raw_data=b"0" * 12),
        relu_with_tensor(data_type=FLOAT, dims=[3], float_data=[1.0]),
        relu_with_tensor(data_type=FLOAT, dims=[2**40]),
        relu_with_tensor(data_type=FLOAT, dims=[1], raw_data=b"0000", float_data=[1.0]),
        relu_with_tensor(data_type=TensorProto.INT4, dims=[5], int32_data=[1, 2]),
        relu_with_tensor(data_type=TensorProto.COMPLEX64, dims=[2], float_data=[1.0, 2.0]),
        relu_with_tensor(data_type=TensorProto.STRING, dims=[1], raw_data=b"text"),
        relu_with_tensor(data_type=0, dims=[1], raw_data=b"0000"),
        relu_with_tensor(data_type=99, dims=[1], raw_data=b"0000"),
        relu_with_tensor(data_type=FLOAT, dims=[1], float_data=[1.0], segment=TensorProto.Segment(begin=0, end=9)),
    ],
)
def test_a_tensor_brings_exactly_what_it_claims(content: bytes) -> None:
    assert refusal_of(content).code is Code.MODEL_INVALID


@pytest.mark.parametrize(
    "content",
    [
        relu_with_tensor(data_type=FLOAT, dims=[], float_data=[1.0]),
        relu_with_tensor(data_type=FLOAT, dims=[0, 7], raw_data=b""),
        relu_with_tensor(data_type=TensorProto.INT4, dims=[5], int32_data=[1, 2, 3]),
        relu_with_tensor(data_type=TensorProto.INT4, dims=[5], raw_data=b"123"),
        relu_with_tensor(data_type=TensorProto.COMPLEX64, dims=[1], float_data=[1.0, 2.0]),
        relu_with_tensor(data_type=TensorProto.STRING, dims=[2], string_data=[b"a", b"b"]),
        relu_with_tensor(data_type=TensorProto.BOOL, dims=[2], int32_data=[1, 0]),
    ],
)
def test_honest_tensors_of_every_form_are_taken(content: bytes) -> None:
    assert not isinstance(profile_of(content, digest_of(content)), Refusal)


def test_a_sparse_tensor_that_explodes() -> None:
    made = relu()
    sparse = made.graph.sparse_initializer.add(dims=[2**20, 2**20])
    sparse.values.CopyFrom(weight("w", (1,)))
    sparse.indices.CopyFrom(ints("", [0]))
    assert refusal_of(made.SerializeToString()).code is Code.MODEL_INVALID


def _zip() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("../../model.onnx", relu().SerializeToString())
    return held.getvalue()


def _tar() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.onnx"), io.BytesIO())
    return held.getvalue()


@pytest.mark.parametrize(
    "make", [_zip, _tar, lambda: gzip.compress(b"0" * 10**6), lambda: b"BZh91AY", lambda: b"Rar!\x1a\x07\1"]
)
def test_archives_are_not_accepted(make: Callable[[], bytes]) -> None:
    refusal = refusal_of(make())
    assert refusal.code is Code.MODEL_ARCHIVE
    assert "not accepted" in refusal.remedy


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x00", b"{\"irVersion\": \"8\"}", b"\x08", b"\x3a\xff\xff\xff\xff\x0f", b"\xff" * 11, b"\x0b\x0c",
        b"\x10\0\0\0ORTM", b"not a model at all", b"\x3a\x05\x0a\x7f", b"\x0d\1\2",
    ],
)  # fmt: skip
def test_what_is_no_model(content: bytes) -> None:
    assert refusal_of(content).code is Code.MODEL_INVALID


def test_depth_fields_nodes_and_size_are_limited_before_parsing() -> None:
    content = relu().SerializeToString()
    deep = b""
    for _ in range(40):  # node 1, attribute 5, graph 6 of each other
        deep = length_delimited_field(1, length_delimited_field(5, length_delimited_field(6, deep)))
    for made, rules in (
        (length_delimited_field(7, deep), Rules()),
        (length_delimited_field(7, length_delimited_field(1, b"") * 100_001), Rules()),
        (b"\x12\x00" * 5_000, Rules(max_fields=4_000)),
    ):
        assert (scan(made, rules) or Refusal(Code.INTERNAL)).code is Code.MODEL_INVALID
    assert refusal_of(content, Rules(max_size_bytes=10)).code is Code.MODEL_TOO_LARGE  # type: ignore[arg-type]


def test_bytes_of_a_weight_are_no_structure() -> None:
    """A tensor full of what looks like nested fields passes."""
    hostile = length_delimited_field(7, length_delimited_field(1, b"") * 20) * 100
    content = with_constant(helper.make_tensor("w", TensorProto.UINT8, [len(hostile)], hostile, raw=True))
    assert scan(content, Rules(max_fields=100)) is None


def nested_ifs(levels: int) -> ModelProto:
    inner = graph([helper.make_node("Identity", ["x"], [f"r{levels}"])], [], [tensor(f"r{levels}", [1])])
    for level in reversed(range(levels)):
        node = helper.make_node("If", ["q"], [f"r{level}"], then_branch=inner, else_branch=inner)
        inner = graph([node], [], [tensor(f"r{level}", [1])])
    return model(list(inner.node), [tensor("x", [1]), tensor("q", [], BOOL)], [tensor("r0", [1])])


def test_nested_subgraphs() -> None:
    assert refusal_of(nested_ifs(6).SerializeToString(), Rules(max_subgraph_depth=5)).code is Code.MODEL_INVALID
    assert not isinstance(profile_of(nested_ifs(6).SerializeToString(), "d", Rules(max_subgraph_depth=6)), Refusal)


def with_functions(*calls: tuple[str, list[str]]) -> bytes:
    """Functions by name with whom each calls, one after the other; the graph calls the first."""
    functions = []
    for name, called in calls:
        nodes = [helper.make_node(other, [f"t{i}"], [f"t{i + 1}"], domain="own") for i, other in enumerate(called)]
        nodes.append(helper.make_node("Relu", [f"t{len(called)}"], ["out"]))
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
        functions.append(helper.make_function("own", name, ["t0"], ["out"], nodes, imports))
    call: NodeProto = helper.make_node(calls[0][0], ["x"], ["y"], domain="own")
    made = model([call], [tensor("x", [1])], [tensor("y", [1])], domains={"own": 1}, functions=functions)
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(
    "content",
    [
        with_functions(("A", ["A"])),
        with_functions(("A", ["B"]), ("B", ["C"]), ("C", ["A"])),
        with_functions(("A", []), ("A", [])),
        with_functions(*[(f"F{i}", [f"F{i + 1}"] * 2) for i in range(40)], ("F40", [])),  # 2^40 nodes written out
        with_functions(*[(f"F{i}", [f"F{i + 1}"]) for i in range(80)], ("F80", [])),
    ],
    ids=["itself", "ring", "twice", "doubling", "deep"],
)
def test_functions(content: bytes) -> None:
    assert refusal_of(content).code is Code.MODEL_INVALID


def node_of(domain: str, operator: str, **attributes: Any) -> ModelProto:
    node = helper.make_node(operator, ["x"], ["y"], domain=domain, **attributes)
    return model([node], [tensor("x", [1])], [tensor("y", [1])], domains={domain: 1} if domain else None)


@pytest.mark.parametrize(
    "made",
    [
        node_of("com.evil", "RunShell"),
        node_of("ai.onnx.contrib", "StringRegexReplace"),
        node_of("trt.plugins", "Plugin"),
        node_of("com.microsoft", "EPContext", embed_mode=1, ep_cache_context=b"\0\1"),
        node_of("com.microsoft", "PythonOp", func_name="f"),
    ],
)
def test_custom_operators_need_the_operators_word(made: ModelProto) -> None:
    content = made.SerializeToString()
    assert refusal_of(content).code is Code.CUSTOM_OP_DENIED
    trusted = Rules(trusted_digests=frozenset({digest_of(content)}))
    assert not isinstance(profile_of(content, digest_of(content), trusted), Refusal)


def test_a_context_that_names_a_file_is_a_path_even_if_trusted() -> None:
    content = node_of("com.microsoft", "EPContext", embed_mode=0, ep_cache_context=b"../ctx.bin").SerializeToString()
    trusted = Rules(trusted_digests=frozenset({digest_of(content)}))
    assert refusal_of(content, trusted).code is Code.MODEL_PATH


@pytest.mark.parametrize(
    "key", ["ort_config", "session.use_ort_model_bytes_directly", "ep.context_file_path", "Session.Intra_Op", " ep.x"]
)
def test_options_in_metadata(key: str) -> None:
    made = relu()
    helper.set_model_props(made, {key: "1"})
    assert refusal_of(made.SerializeToString()).code is Code.CUSTOM_OP_DENIED


def _with(change: Callable[[ModelProto], object]) -> bytes:
    made = relu()
    change(made)
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(
    "content",
    [
        _with(lambda m: m.ClearField("graph")),
        _with(lambda m: m.ClearField("opset_import")),
        _with(lambda m: m.graph.ClearField("output")),
        _with(lambda m: m.graph.node.pop()),
        _with(lambda m: m.graph.node.append(m.graph.node[0])),
        _with(lambda m: m.graph.node[0].input.__setitem__(0, "nobody")),
        _with(lambda m: m.graph.node.insert(0, helper.make_node("Relu", ["y"], ["z"]))),
        _with(lambda m: m.graph.output.append(tensor("nobody", [1]))),
        _with(lambda m: m.graph.node[0].__setattr__("op_type", "NoSuchOperator")),
        _with(lambda m: m.graph.input.append(tensor("a\x1b[2J", [1]))),
        _with(lambda m: m.graph.input.append(tensor("x", [1]))),
        _with(lambda m: m.graph.input.append(tensor("n", [-7]))),
        _with(lambda m: m.graph.input.append(tensor("n", [2**40, 2**40]))),
        _with(lambda m: m.graph.input.append(tensor("n", [1], TensorProto.COMPLEX64))),
        _with(lambda m: m.graph.output.append(helper.make_tensor_sequence_value_info("y", FLOAT, [1]))),
        _with(lambda m: m.training_info.add()),
        _with(lambda m: m.graph.node.append(helper.make_node("If", ["x"], ["z"]))),
    ],
)  # fmt: skip
def test_graphs_that_do_not_hold_together(content: bytes) -> None:
    assert refusal_of(content).code is Code.MODEL_INVALID


@pytest.mark.parametrize(("count", "characters"), [(1_025, 8), (200, 400)], ids=["many", "long names"])
def test_a_signature_that_no_status_has_room_for(count: int, characters: int) -> None:
    """A node tells its replicas' signatures; the region would refuse all that it says."""
    names = [f"y{number:0{characters - 1}}" for number in range(count)]
    nodes = [helper.make_node("Relu", ["x"], [name]) for name in names]
    content = model(nodes, [tensor("x", [1])], [tensor(name, [1]) for name in names]).SerializeToString()
    refusal = refusal_of(content)
    assert refusal.code is Code.MODEL_INVALID
    assert f"{count} outputs" in refusal.found


def test_a_few_bytes_that_want_four_tebibytes() -> None:
    made = model(
        [helper.make_node("ConstantOfShape", ["n"], ["y"])], [], [tensor("y", None)], [ints("n", [2**40])]
    )  # fmt: skip
    content = made.SerializeToString()
    assert len(content) < 120
    refusal = refusal_of(content)
    assert refusal.code is Code.MODEL_INVALID
    assert "4TiB" in refusal.found


def test_a_loop_of_2_to_the_60_trips_is_only_a_number() -> None:
    """It is read, never run: its cost says what it would take, for placement to refuse by latency."""
    body = graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Relu", ["s"], ["s2"])],
        [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [4])],
        [tensor("c2", [], BOOL), tensor("s2", [4])],
    )
    content = model(
        [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)],
        [tensor("x", [4])], [tensor("y", [4])], [ints("n", 2**60)],
    ).SerializeToString()  # fmt: skip
    profile = profile_of(content, digest_of(content))
    assert not isinstance(profile, Refusal)
    assert profile.flops == 2.0**62


@given(st.binary(max_size=300))
def test_no_bytes_make_the_scan_fail_otherwise(content: bytes) -> None:
    found = scan(content, Rules())
    assert found is None or found.code in (Code.MODEL_INVALID, Code.MODEL_ARCHIVE)


@settings(max_examples=200)
@given(st.integers(min_value=0, max_value=10**6), st.binary(min_size=1, max_size=3))
@example(435441, b"\x00\x00\x02")  # a field of number 0, which no parser takes
@example(97, b":")  # packed numbers, of which the last is cut short: nothing that the scan looks at
def test_what_the_scan_passes_is_no_deeper_than_allowed(at: int, patch: bytes) -> None:
    """Random damage to a nested model: the scan refuses it, or protobuf's own parser does, or reads it at that depth or
    less."""
    content = bytearray(nested_ifs(4).SerializeToString())
    at %= len(content)
    content[at : at + len(patch)] = patch
    if scan(bytes(content), Rules(max_depth=20)) is None:
        made = ModelProto()
        with contextlib.suppress(DecodeError):
            made.ParseFromString(bytes(content))
        assert _depth(made) <= 20


def _depth(message: object) -> int:
    below = 0
    for kind, value in message.ListFields():  # type: ignore[attr-defined]
        if kind.type == kind.TYPE_MESSAGE:
            values = [value] if hasattr(value, "ListFields") else list(value)
            below = max([below, *(_depth(item) for item in values)])
    return 1 + below
