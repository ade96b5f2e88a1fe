"""Of which models the shapes of a request decide how long a run is."""

from collections.abc import Sequence

import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from harness.models import engine_cases as models
from shoal.agent.worker.value_dependence import is_bounded_by_shapes


def inside(body: list[NodeProto], domain: str = "") -> bytes:
    """A node of its own kind that holds a graph in an attribute."""
    graph = helper.make_graph(body, "g", [], [])
    node = helper.make_node("Scan", ["x"], ["y"], domain=domain, body=graph)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    return helper.make_model(helper.make_graph([node], "m", [value], [value])).SerializeToString()


@pytest.mark.parametrize(
    ("model", "bounded"),
    [
        (models.add_one(), True),
        (models.identity(("FP32", "INT64")), True),
        (models.divide(), True),
        (models.loop(-1), False),
        (models.square(), False),
        (inside([helper.make_node("Add", ["a", "b"], ["c"])]), True),
        (inside([helper.make_node("Range", ["a", "b", "c"], ["d"])]), False),
        (inside([helper.make_node("Add", ["a", "b"], ["c"])], domain="com.example"), False),
        (inside([helper.make_node("RoiAlign", ["a", "b", "c"], ["d"])]), False),
        (b"\xff", False),
    ],
    ids=["add", "identity", "divide", "loop", "square", "inner-add", "inner-range", "domain", "boxes", "junk"],
)
def test_bounded_by_shapes(model: bytes, bounded: bool) -> None:
    assert is_bounded_by_shapes(model) is bounded


def reading(*nodes: NodeProto, inputs: Sequence[str] = ("x",), initializers: Sequence[str] = ()) -> bytes:
    """A graph with such nodes."""
    values = [helper.make_tensor_value_info(each, TensorProto.FLOAT, [1]) for each in inputs]
    made = [helper.make_tensor(each, TensorProto.FLOAT, [1], [2.0]) for each in initializers]
    return helper.make_model(helper.make_graph(nodes, "m", values, values[:1], made)).SerializeToString()


CONSTANT = helper.make_node("Constant", [], ["c"], value_float=2.0)
RESIZED = helper.make_node("Resize", ["x", "", "c"], ["y"])
TILED = helper.make_node("Tile", ["x", "d"], ["y"])


@pytest.mark.parametrize(
    ("model", "bounded"),
    [
        (reading(CONSTANT, RESIZED), True),
        (reading(RESIZED, initializers=["c"]), True),
        (reading(RESIZED, inputs=("x", "c")), False),
        (reading(RESIZED, inputs=("x", "c"), initializers=["c"]), False),
        (reading(CONSTANT, helper.make_node("Add", ["c", "c"], ["d"]), TILED), True),
        (reading(CONSTANT, helper.make_node("Add", ["c", "x"], ["d"]), TILED), False),
        (reading(RESIZED, CONSTANT), False),
        (reading(helper.make_node("Shape", ["x"], ["c"]), RESIZED), True),
        (reading(helper.make_node("RandomUniform", [], ["c"], shape=[1]), RESIZED), False),
        (reading(CONSTANT, helper.make_node("RandomUniformLike", ["c"], ["d"]), TILED), False),
        (reading(helper.make_node("Pad", ["x", "c", "x"], ["y"]), initializers=["c"]), True),
        (reading(helper.make_node("Pad", ["x", "c", "", "x"], ["y"]), initializers=["c"]), False),
    ],
    ids=[
        "constant", "initializer", "input", "initializer-that-is-an-input", "of-constants", "of-a-value", "later",
        "shape", "random", "random-like", "pads", "axes",
    ],
)  # fmt: skip
def test_what_constants_alone_decide_is_as_long_in_every_run(model: bytes, bounded: bool) -> None:
    assert is_bounded_by_shapes(model) is bounded


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [
        ("NonZero", ["x"]), ("Compress", ["x", "c"]), ("Unique", ["x"]), ("NonMaxSuppression", ["x", "x", "c"]),
        ("Reshape", ["x", "n"]), ("Slice", ["x", "c", "n"]), ("TopK", ["x", "n"]), ("Split", ["x", "n"]),
        ("SplitToSequence", ["x", "n"]), ("LSTM", ["x", "c", "c", "", "n"]), ("MaxRoiPool", ["x", "n"]),
        ("ImageDecoder", ["x"]), ("Attention", ["x", "x", "x", "", "", "", "n"]), ("Mod", ["x", "n"]),
    ],
)  # fmt: skip
def test_results_as_large_as_values_say_are_not_bounded(operator: str, inputs: list[str]) -> None:
    node = helper.make_node(operator, inputs, ["y"])
    assert not is_bounded_by_shapes(reading(CONSTANT, node, inputs=("x", "n")))


def test_shapes_by_shapes_are_bounded() -> None:
    """As exporters flatten: by the lengths of the first axes."""
    shape = helper.make_node("Shape", ["x"], ["s"])
    kept = helper.make_node("Slice", ["s", "c", "c"], ["k"])
    target = helper.make_node("Concat", ["k", "c"], ["t"], axis=0)
    assert is_bounded_by_shapes(reading(CONSTANT, shape, kept, target, helper.make_node("Reshape", ["x", "t"], ["y"])))


def test_a_field_of_another_wire_type_names_nothing() -> None:
    """A parser skips it, whatever its number: the node stays a Loop, and the tensor no constant."""
    loop = helper.make_node("Loop", ["x", "x"], ["y"]).SerializeToString() + b"\x21Identity"
    assert not is_bounded_by_shapes(_with_nodes(loop))
    named = b"\x2a\x09\x41" + b"x" + bytes(7)  # an initializer whose name is eight bytes of a fixed64
    tile = helper.make_node("Tile", ["x", "x" + "\0" * 7], ["y"]).SerializeToString()
    assert not is_bounded_by_shapes(_with_nodes(tile, more=named))


def _with_nodes(*nodes: bytes, more: bytes = b"") -> bytes:
    graph = b"".join(b"\x0a" + bytes([len(node)]) + node for node in nodes) + more
    return b"\x3a" + bytes([len(graph)]) + graph


def test_a_graph_inside_knows_no_constants() -> None:
    model = onnx.load_from_string(inside([helper.make_node("Tile", ["a", "c"], ["d"])]))
    model.graph.node.insert(0, CONSTANT)
    assert not is_bounded_by_shapes(model.SerializeToString())


def test_a_function_of_the_model_is_looked_into() -> None:
    tile = helper.make_node("Tile", ["x", "n"], ["y"])
    function = helper.make_function("", "Mine", ["x", "n"], ["y"], [tile], [helper.make_opsetid("", 21)])
    graph = helper.make_graph([helper.make_node("Mine", ["x", "n"], ["y"])], "m", [], [])
    model = helper.make_model(graph, functions=[function])
    assert not is_bounded_by_shapes(model.SerializeToString())
    function.node[0].op_type = "Add"
    assert is_bounded_by_shapes(helper.make_model(graph, functions=[function]).SerializeToString())


@pytest.mark.parametrize("name", ["ch_ppocr_mobile_v2.0_cls_infer.onnx", "ch_PP-OCRv4_det_infer.onnx"])
def test_models_of_wheels_are_bounded(name: str) -> None:
    """The detector's six Resize take their scales from constants."""
    assert is_bounded_by_shapes(models.recogniser().with_name(name).read_bytes())
