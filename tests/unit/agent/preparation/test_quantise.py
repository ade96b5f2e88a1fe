"""int8 by samples: whole, near, or refused with the drift."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from harness.models.architectures import ARCHITECTURES, samples_of, separable
from shoal.agent.preparation.quantise import quantise
from shoal.agent.worker.engine import open_engine, run_options
from shoal.agent.worker.providers import CPU_PROVIDER, Provider
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import Metric, Tolerance
from shoal.types.tolerance import default

INT8 = default("fp32", "int8")


def make(model: bytes, name: str, tmp_path: Path, tolerances: Sequence[Tolerance] = INT8) -> tuple[str, bytes]:
    made, shapes = tmp_path / "made.onnx", ARCHITECTURES[name][1]
    note = quantise(model, samples_of(shapes["x"]), tolerances, shapes, tmp_path, made)
    return note, made.read_bytes()


@pytest.mark.parametrize("name", ["separable", "perceptron", "attention"])
def test_answers_stay_near_and_weights_shrink(name: str, tmp_path: Path) -> None:
    build, shapes = ARCHITECTURES[name]
    pushed = build()
    note, made = make(pushed, name, tmp_path)
    assert note.startswith("int8, activations in ")
    assert "16 samples, 4 of them held out" in note
    graph = onnx.load_from_string(made).graph
    assert {"QuantizeLinear", "DequantizeLinear"} <= {each.op_type for each in graph.node}
    eight_bits = {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    weights = [each for each in graph.initializer if np.prod(each.dims) > 100]
    assert weights
    assert {each.data_type for each in weights} <= eight_bits
    feeds = {"x": np.random.default_rng(9).random(shapes["x"], dtype=np.float32)}
    before, after = (
        open_engine(each, Provider(CPU_PROVIDER)).run(feeds, ["y"], run_options())["y"] for each in (pushed, made)
    )
    assert before.dtype == after.dtype == np.float32, "clients see the same interface"
    assert 0 < np.abs(before - after).max() < 0.1 * np.abs(before).max()


def test_more_bits_where_a_bound_asks_for_them(tmp_path: Path) -> None:
    """In 8 bits the activations alone are further off than this."""
    rough, _ = make(separable(), "separable", tmp_path, (Tolerance("", Metric.MAX_REL, 0.2),))
    assert "activations in 8 bits" in rough
    worst = float(rough.split("max_rel ")[1].split(" ")[0])
    fine, _ = make(separable(), "separable", tmp_path, (Tolerance("", Metric.MAX_REL, 0.95 * worst),))
    assert "activations in 16 bits" in fine


def test_a_bound_that_int8_cannot_meet(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as refused:
        make(separable(), "separable", tmp_path, default("fp32", "fp32"))
    assert refused.value.code is Code.PREPARE_FAILED
    assert "max_rel" in refused.value.refusal.found


def test_a_model_of_an_old_opset(tmp_path: Path) -> None:
    """Opset 12 has no scale for each channel."""
    old = onnx.load_from_string(separable())
    del old.opset_import[:]
    old.opset_import.add(domain="", version=12)
    note, _ = make(old.SerializeToString(), "separable", tmp_path)
    assert note.startswith("int8")


def test_samples_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as refused:
        quantise(separable(), samples_of((1, 16)), INT8, {}, tmp_path, tmp_path / "made.onnx")
    assert refused.value.code is Code.MODEL_INVALID


def test_bytes_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as refused:
        quantise(b"\x00" * 64, samples_of((1, 16)), INT8, {}, tmp_path, tmp_path / "made.onnx")
    assert refused.value.code in (Code.MODEL_INVALID, Code.LOAD_FAILED, Code.OP_UNSUPPORTED)
