"""Which models' runs are bounded by the size of a request."""

import pytest
from onnx import NodeProto, TensorProto, helper

from harness.models import engine_cases as models
from shoal.agent.worker.value_dependence import is_bounded_by_size


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
def test_bounded_by_size(model: bytes, bounded: bool) -> None:
    assert is_bounded_by_size(model) is bounded


def test_a_function_of_the_model_is_looked_into() -> None:
    tile = helper.make_node("Tile", ["x", "n"], ["y"])
    function = helper.make_function("", "Mine", ["x", "n"], ["y"], [tile], [helper.make_opsetid("", 21)])
    graph = helper.make_graph([helper.make_node("Mine", ["x", "n"], ["y"])], "m", [], [])
    model = helper.make_model(graph, functions=[function])
    assert not is_bounded_by_size(model.SerializeToString())
    function.node[0].op_type = "Add"
    assert is_bounded_by_size(helper.make_model(graph, functions=[function]).SerializeToString())


def test_the_angle_classifier_is_bounded() -> None:
    assert is_bounded_by_size(models.recogniser().with_name("ch_ppocr_mobile_v2.0_cls_infer.onnx").read_bytes())
