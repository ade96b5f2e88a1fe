"""First answers compared with the processor's: a model that was loaded stands in for one on a device, and another one
for what was pushed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

from harness.models.synthetic import FLOAT, INT64, digest_of, model, tensor
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker import load_comparison
from shoal.agent.worker.engine import Engine, WarmupResult, open_engine, run_options
from shoal.agent.worker.load_comparison import compare_with_processor
from shoal.agent.worker.memory import MemoryGrowth
from shoal.agent.worker.messages import LoadOrder
from shoal.agent.worker.model_loading import LoadTime, measure
from shoal.agent.worker.providers import CPU_PROVIDER, Provider
from shoal.artifacts.samples import SamplePack, read_pack
from shoal.types.assignment import Comparison, Work
from shoal.types.codes import Code, ShoalError
from shoal.types.device import EnergySource
from shoal.types.migration import Metric, Tolerance
from shoal.types.units import Bytes

CLOSE = Tolerance("", Metric.MAX_REL, 0.05)
NPU = "SomeNpuProvider"


def constant(name: str, value: ArrayLike) -> TensorProto:
    return numpy_helper.from_array(np.asarray(value, np.float32), name)


def scaling(by: float, beyond: float = 0.0) -> bytes:
    """y = x, and `by` times the part of x that is above `beyond`."""
    nodes = [
        helper.make_node("Sub", ["x", "beyond"], ["over"]),
        helper.make_node("Relu", ["over"], ["above"]),
        helper.make_node("Mul", ["above", "by"], ["more"]),
        helper.make_node("Add", ["x", "more"], ["y"]),
    ]
    weights = [constant("by", by), constant("beyond", beyond)]
    return model(nodes, [tensor("x", [4])], [tensor("y", [4])], weights).SerializeToString()


def engine_of(content: bytes) -> Engine:
    return open_engine(content, Provider(CPU_PROVIDER))


def order_of(folder: Path, pushed: bytes, comparison: Comparison | None, **more: Any) -> LoadOrder:
    path = folder / "pushed.onnx"
    path.write_bytes(pushed)
    values: dict[str, Any] = {
        "assignment": "a", "shared_by": "", "digest": digest_of(pushed), "path": str(path), "provider": NPU,
        "precision": "fp32", "threads": 1, "runners": 1, "queue": 1, "memory_bytes": 0, "max_request_bytes": 2**20,
        "warm_up_s": 60.0, "work": Work(), "weights": 1.0, "access": DeviceAccess(), "slots": (),
        "comparison": comparison, "arithmetic": "fp16",
    }  # fmt: skip
    return LoadOrder(**(values | more))


def warm_up_of(engine: Engine, values: Sequence[float] = (0.1, 0.2, 0.3, 0.4)) -> WarmupResult:
    feeds = {"x": np.array(values, np.float32)}
    return WarmupResult(feeds, engine.run(feeds, ["y"], run_options()), (0.001,), (0.001,))


def note_of(order: LoadOrder, engine: Engine, samples: SamplePack | None = None) -> str:
    return compare_with_processor(order, engine, warm_up_of(engine), samples, run_options())


def samples_of(folder: Path, engine: Engine, *rows: Sequence[float]) -> SamplePack:
    np.savez(folder / "samples.npz", x=np.array(rows, np.float32))
    return read_pack((folder / "samples.npz").read_bytes(), engine.inputs, engine.outputs)


def test_answers_within_the_tolerance_are_told(tmp_path: Path) -> None:
    engine = engine_of(scaling(0.01))
    note = note_of(order_of(tmp_path, scaling(0.0), Comparison((CLOSE,), 5)), engine)
    assert note.startswith("y max_rel 0.00")
    assert note.endswith(f"over 5 generated inputs on {NPU}, which computes fp32 in fp16")


def test_answers_beyond_it_are_refused_with_the_drift_the_tolerance_and_what_helps(tmp_path: Path) -> None:
    engine = engine_of(scaling(0.2))
    with pytest.raises(ShoalError) as refused:
        note_of(order_of(tmp_path, scaling(0.0), Comparison((CLOSE,), 3)), engine)
    refusal = refused.value.refusal
    assert refusal.code is Code.DRIFT_OVER
    assert refusal.found.startswith("y: max_rel 0.1667, at most 0.05, over 3 generated inputs")
    assert "tolerance" in refusal.remedy


def test_where_the_policy_takes_any_it_is_told_and_serves(tmp_path: Path) -> None:
    order = order_of(tmp_path, scaling(0.0), Comparison((CLOSE,), 3, advisory=True))
    assert note_of(order, engine_of(scaling(0.2))).startswith("advisory: y: max_rel 0.1667, at most 0.05")


def test_nothing_is_opened_where_no_comparison_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_comparison, "open_engine", None)
    assert note_of(order_of(tmp_path, scaling(0.0), None), engine_of(scaling(0.2))) == ""


def test_samples_show_what_generated_inputs_do_not(tmp_path: Path) -> None:
    """It differs above 100 alone."""
    engine = engine_of(scaling(0.2, beyond=100.0))
    order = order_of(tmp_path, scaling(0.0), Comparison((CLOSE,), 8))
    assert "8 generated inputs" in note_of(order, engine)
    near = samples_of(tmp_path, engine, [0.1] * 4, [0.2] * 4, [0.3] * 4)
    assert "over 3 samples" in note_of(order, engine, near)
    with pytest.raises(ShoalError) as refused:
        note_of(order, engine, samples_of(tmp_path, engine, [0.1] * 4, [0.2] * 4, [300.0] * 4))
    assert "over 3 samples" in refused.value.refusal.found


def test_no_more_inputs_than_are_asked_for(tmp_path: Path) -> None:
    engine = engine_of(scaling(0.2, beyond=100.0))
    samples = samples_of(tmp_path, engine, *([0.1] * 4,) * 3, [300.0] * 4)
    assert "over 3 samples" in note_of(order_of(tmp_path, scaling(0.0), Comparison((CLOSE,), 3)), engine, samples)


def test_an_input_that_the_processor_refuses_is_left_out(tmp_path: Path) -> None:
    gather = helper.make_node("Gather", ["table", "x"], ["y"])
    table = constant("table", [0, 1, 2, 3])
    content = model([gather], [tensor("x", [2], INT64)], [tensor("y", [2], FLOAT)], [table]).SerializeToString()
    engine = engine_of(content)
    feeds = {"x": np.array([0, 1])}
    warm = WarmupResult(feeds, engine.run(feeds, ["y"], run_options()), (0.001,), (0.001,))
    order = order_of(tmp_path, content, Comparison((CLOSE,), 8))
    note = compare_with_processor(order, engine, warm, None, run_options())
    assert "over 8 generated inputs" in note, "indices up to 15 are generated too"


def test_what_the_processor_cannot_open_serves_and_says_so(tmp_path: Path) -> None:
    unknown = helper.make_node("NoSuchOperator", ["x"], ["y"])
    pushed = model([unknown], [tensor("x", [4])], [tensor("y", [4])]).SerializeToString()
    note = note_of(order_of(tmp_path, pushed, Comparison((CLOSE,), 3)), engine_of(scaling(0.2)))
    assert note.startswith("not compared, the processor does not run it: ")


def test_time_that_is_up_ends_it_with_what_was_compared(tmp_path: Path) -> None:
    engine = engine_of(scaling(0.01))
    asked = Comparison((CLOSE,), 50)
    assert "over 1 of 50 generated inputs" in note_of(order_of(tmp_path, scaling(0.0), asked, warm_up_s=0.0), engine)
    options = run_options()
    options.terminate = True
    with pytest.raises(ShoalError) as refused:
        compare_with_processor(order_of(tmp_path, scaling(0.0), asked), engine, warm_up_of(engine), None, options)
    assert refused.value.code is Code.WARMUP_FAILED


def test_a_model_that_is_not_the_pushed_one_is_no_reference(tmp_path: Path) -> None:
    order = replace(order_of(tmp_path, scaling(0.0), Comparison((CLOSE,), 3)), digest=digest_of(b"other"))
    with pytest.raises(ShoalError) as refused:
        note_of(order, engine_of(scaling(0.0)))
    assert refused.value.code is Code.MODEL_DIGEST


def test_the_memory_of_the_reference_is_not_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def open_reference(*args: Any) -> Engine:
        done.append("reference opened")
        return open_engine(*args)

    def held_bytes() -> Bytes:
        done.append("memory read")
        return Bytes(123)

    monkeypatch.setattr(load_comparison, "open_engine", open_reference)
    order = order_of(tmp_path, scaling(0.0), Comparison((CLOSE,), 3), provider=CPU_PROVIDER)
    memory = cast(MemoryGrowth, SimpleNamespace(bytes=held_bytes))
    loaded = measure(order, engine_of(scaling(0.01)), run_options(), LoadTime(0.1, 0.1), memory)
    assert done == ["memory read", "reference opened"]
    assert loaded.measured.memory_bytes == 123
    assert loaded.measured.energy_source is EnergySource.ESTIMATED
    assert "over 3 generated inputs" in loaded.note


def test_what_serves_without_a_warm_up_says_that_it_was_not_compared(tmp_path: Path) -> None:
    gather = helper.make_node("Gather", ["table", "x"], ["y"])
    empty = numpy_helper.from_array(np.zeros(0, np.float32), "table")
    content = model([gather], [tensor("x", [2], INT64)], [tensor("y", [2], FLOAT)], [empty]).SerializeToString()
    order = order_of(tmp_path, content, Comparison((CLOSE,), 8), provider=CPU_PROVIDER, warm_up_optional=True)
    memory = cast(MemoryGrowth, SimpleNamespace(bytes=lambda: Bytes(1)))
    loaded = measure(order, engine_of(content), run_options(), LoadTime(0.1, 0.1), memory)
    assert loaded.note.startswith("serves without a warm-up: ")
    assert loaded.note.endswith("; not compared with the processor")
