"""Profiles of real models against what ONNX Runtime makes of them: the runtime's own shapes, not ours."""

import math
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, ValueInfoProto, load, numpy_helper

from harness.models.synthetic import digest_of, real_models
from shoal.coordinator.core.graph import profile_of
from shoal.types.profile import ModelProfile

FEEDS: dict[str, dict[str, Any]] = {
    "det": {"x": np.zeros((1, 3, 224, 224), np.float32)},
    "rec": {"x": np.zeros((1, 3, 48, 320), np.float32)},
    "cls": {"x": np.zeros((1, 3, 224, 224), np.float32)},
    "magika": {"bytes": np.zeros((1, 2048), np.int32)},
}


@cache
def profile(name: str) -> ModelProfile:
    content = real_models()[name].read_bytes()
    found = profile_of(content, digest_of(content))
    assert isinstance(found, ModelProfile), found
    return found


def shapes_at_run_time(made: ModelProto, feeds: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape in one real run, all of them made outputs."""
    known = {info.name for info in made.graph.output}
    for node in made.graph.node:
        made.graph.output.extend(ValueInfoProto(name=name) for name in node.output if name and name not in known)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = {name: np.asarray(value).shape for name, value in zip(names, session.run(names, feeds), strict=True)}
    found.update({name: value.shape for name, value in feeds.items()})
    found.update({tensor.name: tuple(tensor.dims) for tensor in made.graph.initializer})
    return found


@pytest.mark.parametrize("name", FEEDS)
def test_multiply_adds_are_those_of_the_shapes_that_the_runtime_sees(name: str) -> None:
    made = load(real_models()[name])
    shapes = shapes_at_run_time(made, FEEDS[name])
    expected = {"Conv": 0, "MatMul": 0, "ConvTranspose": 0}
    for node in made.graph.node:
        out, given = math.prod(shapes[node.output[0]]), [shapes.get(item, ()) for item in node.input]
        if node.op_type == "Conv":
            expected["Conv"] += out * (2 * math.prod(given[1][1:]) + (len(given) > 2))
        elif node.op_type == "ConvTranspose":
            expected["ConvTranspose"] += 2 * math.prod(given[0]) * math.prod(given[1][1:]) + out * (len(given) > 2)
        elif node.op_type == "MatMul":
            expected["MatMul"] += 2 * out * given[0][-1]
    found = {cost.operator: cost.flops for cost in profile(name).costs}
    assert {operator: found.get(operator, 0) for operator in expected} == expected
    assert expected["Conv"] > 1e8


@pytest.mark.parametrize("name", FEEDS)
def test_reference_shapes_are_ones_that_the_network_takes(name: str) -> None:
    assert profile(name).reference_shapes == {key: value.shape for key, value in FEEDS[name].items()}
    assert profile(name).confident


@pytest.mark.parametrize("name", [*FEEDS, "vad"])
def test_weights_and_precision(name: str) -> None:
    made = load(real_models()[name])
    mine = profile(name)
    initializers = sum(numpy_helper.to_array(tensor).nbytes for tensor in made.graph.initializer)
    assert initializers <= mine.weight_bytes <= mine.size_bytes
    assert mine.weight_bytes > 0.9 * mine.size_bytes
    assert mine.precision == "fp32"


@pytest.mark.parametrize("name", FEEDS)
def test_live_tensors_never_exceed_all_of_them_and_hold_the_largest(name: str) -> None:
    made = load(real_models()[name])
    shapes = shapes_at_run_time(made, FEEDS[name])
    sizes = [4 * math.prod(shapes[node.output[0]]) for node in made.graph.node if node.op_type != "Constant"]
    assert max(sizes) <= profile(name).activation_bytes < sum(sizes) / 4


def test_the_stateful_one_lists_both_of_its_branches() -> None:
    vad = profile("vad")
    assert {"If", "Conv", "LSTM"} <= set(vad.operators)
    assert vad.reference_shapes["state"] == (2, 1, 128)
    assert vad.confident
