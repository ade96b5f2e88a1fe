"""Fixing a model's open axes: the rest of it stays as it is."""

import numpy as np
import onnx
import pytest
from onnx import helper

from harness.models.architectures import separable
from harness.models.engine_cases import model, value
from shoal.agent.worker.engine import open_engine, run_options
from shoal.agent.worker.providers import Provider
from shoal.agent.worker.shapes import fix_shapes
from shoal.types.codes import Code, ShoalError

CPU = Provider("CPUExecutionProvider")


def sum_of(first: list[int | str], second: list[int | str]) -> bytes:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    return model(nodes, [value("a", "FP32", first), value("b", "FP32", second)], [value("y", "FP32", first)])


def test_answers_are_the_same_and_another_shape_is_refused() -> None:
    feeds = {"x": np.random.default_rng(1).random((2, 8, 16, 16), dtype=np.float32)}
    plain, fixed = open_engine(separable(), CPU), open_engine(separable(), CPU, {"x": (2, 8, 16, 16)})
    before, after = (each.run(feeds, ["y"], run_options())["y"] for each in (plain, fixed))
    np.testing.assert_array_equal(before, after)
    assert [spec.shape for spec in fixed.inputs] == [(2, 8, 16, 16)]
    with pytest.raises(ShoalError) as refused:
        fixed.run({"x": feeds["x"][:1]}, ["y"], run_options())
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_an_axis_is_fixed_for_all_that_share_its_name() -> None:
    graph = onnx.load_from_string(fix_shapes(sum_of(["n", 3], ["n", 3]), {"a": (4, 3)})).graph
    shapes = [[axis.dim_value for axis in each.type.tensor_type.shape.dim] for each in (*graph.input, *graph.output)]
    assert shapes == [[4, 3], [4, 3], [4, 3]]


def test_names_that_say_nothing_tie_no_axes_together() -> None:
    graph = onnx.load_from_string(fix_shapes(sum_of(["?", "?"], ["?", "?"]), {"a": (4, 3), "b": (4, -1)})).graph
    assert [axis.dim_value for axis in graph.input[0].type.tensor_type.shape.dim] == [4, 3]
    assert graph.input[1].type.tensor_type.shape.dim[1].dim_param == "?"


@pytest.mark.parametrize("shapes", [{"a": (4,)}, {"a": (4, 5)}, {"a": (4, 3), "b": (5, 3)}])
def test_shapes_that_the_graph_does_not_have(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ShoalError) as refused:
        fix_shapes(sum_of(["n", 3], ["n", 3]), shapes)
    assert refused.value.code is Code.MODEL_INVALID


def test_bytes_that_are_no_model() -> None:
    with pytest.raises(ShoalError) as refused:
        fix_shapes(b"\xff" * 40, {"x": (1,)})
    assert refused.value.code is Code.MODEL_INVALID


def test_what_is_not_named_is_not_read() -> None:
    assert fix_shapes(b"anything", {}) == b"anything"
