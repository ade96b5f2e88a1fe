"""fp16: half the bytes, near by the arithmetic of a device that has it, or refused with the reason."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper

from harness.models.architectures import ARCHITECTURES, perceptron, samples_of, separable
from harness.models.engine_cases import model, value
from shoal.agent.preparation.answers import answer_of, open_on_processor, simplify
from shoal.agent.preparation.halve import halve
from shoal.agent.preparation.rounding import LARGEST, first_beyond, round_inputs, round_outputs
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import Metric, Tolerance
from shoal.types.tolerance import default

FP16 = default("fp32", "fp16")
ROW = [value("x", "FP32", [1, 4])], [value("y", "FP32", [1, 4])]
NO_WEIGHTS = helper.make_model(helper.make_graph([], "none", [], []))
NUMBERS = st.floats(-1e4, 1e4, width=32)


def make(content: bytes, samples: bytes, tmp_path: Path, tolerances: Sequence[Tolerance] = FP16) -> tuple[str, bytes]:
    made = tmp_path / "made.onnx"
    note = halve(content, samples, Work(), tolerances, {}, tmp_path, made)
    return note, made.read_bytes()


def row(*nodes: NodeProto, **weights: float) -> bytes:
    """A model of four numbers x to four numbers y. weights: constants by name."""
    tensors = [numpy_helper.from_array(np.array([number], np.float32), name) for name, number in weights.items()]
    return model(list(nodes), *ROW, tensors)


def refusal_of(content: bytes, samples: bytes, tmp_path: Path, tolerances: Sequence[Tolerance] = FP16) -> str:
    with pytest.raises(ShoalError) as refused:
        make(content, samples, tmp_path, tolerances)
    assert refused.value.code is Code.PREPARE_FAILED
    return refused.value.refusal.found


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("name", ["perceptron", "separable", "attention", "autoencoder", "pyramid"])
def test_answers_stay_near_and_weights_are_half(name: str, sampled: bool, tmp_path: Path) -> None:
    build, shapes = ARCHITECTURES[name]
    pushed, made = build(), tmp_path / "made.onnx"
    samples = samples_of(shapes["x"]) if sampled else b""
    note = halve(pushed, samples, Work(), FP16, shapes, tmp_path, made)
    assert note.startswith("fp16: y max_rel ")
    assert note.endswith("over 16 samples" if sampled else "over 8 generated inputs")
    graph = onnx.load(str(made)).graph
    weights = [each for each in graph.initializer if np.prod(each.dims) > 100]
    assert weights
    assert {each.data_type for each in weights} == {TensorProto.FLOAT16}
    assert {each.type.tensor_type.elem_type for each in (*graph.input, *graph.output)} == {TensorProto.FLOAT}
    feeds = {"x": np.random.default_rng(9).random(shapes["x"], dtype=np.float32)}
    before, after = (answer_of(open_on_processor(each), feeds)["y"] for each in (pushed, made.read_bytes()))
    assert before.dtype == after.dtype == np.float32, "clients see the same interface"
    assert 0 < np.abs(before - after).max() < 0.01 * np.abs(before).max()


def test_the_same_order_gives_the_same_bytes(tmp_path: Path) -> None:
    assert make(perceptron(), b"", tmp_path) == make(perceptron(), b"", tmp_path)


def test_a_bound_that_fp16_cannot_meet(tmp_path: Path) -> None:
    samples = samples_of(ARCHITECTURES["separable"][1]["x"])
    assert "16 samples, y max_rel" in refusal_of(separable(), samples, tmp_path, (Tolerance("", Metric.MAX_REL, 1e-6),))


def test_a_value_beyond_fp16_on_its_way_is_refused_by_name(tmp_path: Path) -> None:
    """The processor's provider rounds nothing between the two, and answers as in fp32."""
    squares = row(
        helper.make_node("Mul", ["x", "big"], ["huge"]), helper.make_node("Mul", ["huge", "small"], ["y"]),
        big=60_000.0, small=1 / 60_000,
    )  # fmt: skip
    found = refusal_of(squares, b"", tmp_path)
    assert "huge reaches" in found
    assert "fp16 ends at 65504" in found


def test_an_input_beyond_fp16_is_refused_by_name(tmp_path: Path) -> None:
    far = tmp_path / "far.npz"
    np.savez(far, x=np.full((8, 4), 1e5, np.float32))
    found = refusal_of(row(helper.make_node("Mul", ["x", "scale"], ["y"]), scale=0.5), far.read_bytes(), tmp_path)
    assert "x reaches 1e+05" in found


def test_constants_beyond_fp16_are_cut_and_said(tmp_path: Path) -> None:
    """A bound that nothing reaches is as good at 65504; a weight is not."""
    bounded = row(
        helper.make_node("Clip", ["x", "low", "high"], ["c"]), helper.make_node("Mul", ["c", "scale"], ["y"]),
        low=-3e38, high=3e38, scale=1.5,
    )  # fmt: skip
    scalars = onnx.load_from_string(bounded)
    for tensor in scalars.graph.initializer[:2]:
        del tensor.dims[:]
    note, _ = make(scalars.SerializeToString(), b"", tmp_path)
    assert note.endswith("2 constants cut to 65504")
    scaled = row(helper.make_node("Mul", ["x", "scale"], ["y"]), scale=1e6)
    assert "y reaches" in refusal_of(scaled, b"", tmp_path)


def test_what_is_endless_in_fp32_is_endless_in_fp16(tmp_path: Path) -> None:
    """A mask of infinities is no overflow."""
    masked = row(helper.make_node("Add", ["x", "mask"], ["m"]), helper.make_node("Exp", ["m"], ["y"]), mask=-np.inf)
    note, _ = make(masked, b"", tmp_path)
    assert "cosine 1" in note


def test_operators_in_branches_are_rounded_too(tmp_path: Path) -> None:
    """Each branch is a graph of its own."""
    out = value("b", "FP32", [1, 4])
    branches = [
        helper.make_graph(
            [helper.make_node("Mul", ["x", name], ["h"]), helper.make_node("Div", ["h", name], ["b"])], name, [], [out]
        )
        for name in ("big", "small")
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Less", ["sum", "limit"], ["is_less"]),
        helper.make_node("If", ["is_less"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    for limit, is_near in ((100.0, False), (-100.0, True)):
        weights = {"big": 60_000.0, "small": 2.0, "limit": limit}
        tensors = [numpy_helper.from_array(np.array(number, np.float32), name) for name, number in weights.items()]
        path = tmp_path / "simplified.onnx"
        simplify(model(nodes, *ROW, tensors), path)
        rounded = open_on_processor(round_outputs(onnx.load(str(path)), NO_WEIGHTS).SerializeToString())
        answer = answer_of(rounded, {"x": np.full((1, 4), 3.0, np.float32)})["y"]
        assert np.allclose(answer, 3.0) == is_near, limit


def branching() -> bytes:
    """Each branch takes weights of the graph around it."""
    branches = [
        helper.make_graph([helper.make_node("Mul", ["x", name], ["b"])], name, [], [value("b", "FP32", [1, 4])])
        for name in ("seven", "three")
    ]
    return row(
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Less", ["sum", "three"], ["is_less"]),
        helper.make_node("If", ["is_less"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        seven=7.0,
        three=3.0,
    )


def with_weights_as_inputs() -> bytes:
    """As before IR version 4."""
    old = onnx.load_from_string(row(helper.make_node("Mul", ["x", "scale"], ["y"]), scale=0.3))
    old.ir_version = 3
    old.graph.input.append(value("scale", "FP32", [1]))
    del old.opset_import[:]
    old.opset_import.add(domain="", version=9)
    return old.SerializeToString()


ODD = {
    "branches": branching(),
    "weights as inputs": with_weights_as_inputs(),
    "an operator that stays in fp32, and its weight": row(
        helper.make_node("Max", ["x", "half"], ["m"]), helper.make_node("Mul", ["m", "half"], ["y"]), half=0.5
    ),
    "by way of fp64": row(
        helper.make_node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["d"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "third"], ["y"]),
        third=1 / 3,
    ),
    "an output that is an input": row(helper.make_node("Identity", ["x"], ["y"])),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_keep_their_answers(name: str, tmp_path: Path) -> None:
    _, made = make(ODD[name], b"", tmp_path)
    feeds = {"x": np.linspace(-1, 2, 4, dtype=np.float32).reshape(1, 4)}
    before, after = (answer_of(open_on_processor(each), feeds)["y"] for each in (ODD[name], made))
    assert before.dtype == after.dtype
    assert np.allclose(before, after, rtol=2**-9)


def test_a_model_that_takes_no_generated_input_needs_samples(tmp_path: Path) -> None:
    ninth = onnx.load_from_string(row(helper.make_node("Gather", ["x", "at"], ["y"], axis=1)))
    ninth.graph.initializer.append(numpy_helper.from_array(np.array([0, 1, 2, 9]), "at"))
    assert "none of the inputs" in refusal_of(ninth.SerializeToString(), b"", tmp_path)


def test_a_model_of_an_old_opset(tmp_path: Path) -> None:
    old = onnx.load_from_string(separable())
    del old.opset_import[:]
    old.opset_import.add(domain="", version=12)
    note, _ = make(old.SerializeToString(), samples_of((1, 8, 16, 16)), tmp_path)
    assert note.startswith("fp16")


def test_samples_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as refused:
        make(separable(), samples_of((1, 16)), tmp_path)
    assert refused.value.code is Code.MODEL_INVALID


def test_bytes_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as refused:
        make(b"\x00" * 64, b"", tmp_path)
    assert refused.value.code in (Code.MODEL_INVALID, Code.LOAD_FAILED, Code.OP_UNSUPPORTED)


@given(st.lists(NUMBERS, min_size=4, max_size=4), NUMBERS, NUMBERS)
def test_each_step_is_rounded_as_ieee_754_says(numbers: list[float], factor: float, term: float) -> None:
    steps = helper.make_node("Mul", ["x", "factor"], ["m"]), helper.make_node("Add", ["m", "term"], ["y"])
    chain = onnx.shape_inference.infer_shapes(onnx.load_from_string(row(*steps, factor=factor, term=term)))
    feeds = {"x": np.array([numbers], np.float32)}
    got = answer_of(open_on_processor(round_outputs(chain, NO_WEIGHTS).SerializeToString()), round_inputs(feeds))["y"]
    with np.errstate(over="ignore"):
        x = feeds["x"].astype(np.float16).astype(np.float32)
        product = (x * np.float32(factor)).astype(np.float16).astype(np.float32)
        wanted = (product + np.float32(term)).astype(np.float16).astype(np.float32)
    assert np.array_equal(got, wanted)
    exact = feeds["x"] * np.float32(factor)
    is_beyond = any(np.abs(step).max() > LARGEST for step in (feeds["x"], exact, exact + np.float32(term)))
    assert bool(first_beyond(chain, [feeds])) == is_beyond
