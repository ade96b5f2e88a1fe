"""Models as ONNX Runtime's own optimiser writes them, and older forms of operators."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from harness.models.synthetic import digest_of, graph, model, tensor, weight
from shoal.coordinator.core.graph import profile_of
from shoal.types.profile import ModelProfile, OperatorCost, TensorSpec

CONV = (
    helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
    [weight("w", [4, 3, 3, 3]), weight("b", [4])],
    [1, 3, 8, 8],
    (1, 4, 4, 4),
)
GEMM = (
    helper.make_node("Gemm", ["x", "w", "b"], ["c"], transB=1),
    [weight("w", [3, 4]), weight("b", [3])],
    [2, 4],
    (2, 3),
)


def profile_model(content: bytes) -> ModelProfile:
    profile = profile_of(content, digest_of(content))
    assert isinstance(profile, ModelProfile), profile
    return profile


@pytest.mark.parametrize(("plain", "fused"), [(CONV, "FusedConv"), (GEMM, "FusedGemm")])
@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", "Tanh"])
def test_what_the_runtimes_optimiser_fuses_costs_what_it_was_made_of(
    tmp_path: Path, plain: tuple[onnx.NodeProto, list[onnx.TensorProto], list[int], tuple[int, ...]], fused: str,
    activation: str,
) -> None:  # fmt: skip
    node, weights, taken, given = plain
    made = model([node, helper.make_node(activation, ["c"], ["y"])], [tensor("x", taken)], [tensor("y", None)], weights)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    content = (tmp_path / "optimised.onnx").read_bytes()
    assert [node.op_type for node in onnx.load_from_string(content).graph.node] == [fused]
    profile = profile_model(content)
    assert profile.outputs == (TensorSpec("y", "FP32", given),)
    assert np.asarray(session.run(None, {"x": np.zeros(taken, np.float32)})[0]).shape == given
    assert profile.confident
    (cost,) = profile.costs
    (first, _) = sorted(profile_model(made.SerializeToString()).costs, key=lambda each: each.flops, reverse=True)
    assert (cost.operator, cost.nodes) == (f"com.microsoft:{fused}", 1)
    assert cost.flops >= first.flops


def test_attributes_that_onnx_does_not_know_leave_a_shape_open_and_refuse_no_model() -> None:
    node = helper.make_node("FusedConv", ["x", "w"], ["y"], domain="com.microsoft", of_a_later_release=1)
    made = model([node], [tensor("x", [1, 3, 8, 8])], [tensor("y", None)], [weight("w", [4, 3, 3, 3])])
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    profile = profile_model(made.SerializeToString())
    assert not profile.confident


def test_scan_of_opset_8_has_a_batch_axis() -> None:
    """As ONNX's own example: [batch, sequence, 2], states of [batch, 2]."""
    body = graph(
        [helper.make_node("Add", ["s", "e"], ["out"]), helper.make_node("Identity", ["out"], ["row"])],
        [tensor("s", [2]), tensor("e", [2])],
        [tensor("out", [2]), tensor("row", [2])],
    )
    node = helper.make_node("Scan", ["", "initial", "x"], ["last", "rows"], num_scan_inputs=1, body=body)
    made = model(
        [node], [tensor("initial", [5, 2]), tensor("x", [5, 3, 2])], [tensor("last", None), tensor("rows", None)],
        opset=8,
    )  # fmt: skip
    made.ir_version = 3
    content = made.SerializeToString()
    profile = profile_model(content)
    assert [spec.shape for spec in profile.outputs] == [(-1, -1), (-1, -1, -1)], "as declared: open"
    assert profile.confident
    assert OperatorCost("Add", 1, 5 * 3 * 2.0, 5 * 3 * 3 * 2 * 4.0) in profile.costs
    feeds = {"initial": np.zeros((5, 2), np.float32), "x": np.ones((5, 3, 2), np.float32)}
    last, rows = map(np.asarray, ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, feeds))
    assert (last.shape, rows.shape) == ((5, 2), (5, 3, 2))
