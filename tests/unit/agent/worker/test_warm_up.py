"""What a warm-up is fed with: values that the graph implies, in a fixed order, and what comes of none that runs."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, helper

from harness.models.synthetic import FLOAT, INT64, digest_of, graph, model, real_models, tensor, weight
from shoal.agent.worker.engine import Engine, input_candidates, open_engine, run_options, warm_up
from shoal.agent.worker.providers import Provider
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.prediction.demand import work_of
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.profile import ModelProfile


def open_model(content: bytes) -> tuple[Engine, Work]:
    profile = profile_of(content, digest_of(content))
    assert isinstance(profile, ModelProfile), profile
    return open_engine(content, Provider("CPUExecutionProvider")), work_of(profile)


def node(
    operator: str, count: int, name: str, shape: Sequence[int], dtype: int = INT64, **attributes: Any
) -> ModelProto:
    """One operator of x [2, 1, 6, 4], whose input `name` is given; inputs are named by what they are."""
    named = helper.make_node(operator, ["x", *([""] * (count - 2)), name], ["y"], **attributes)
    return model([named], [tensor("x", [2, 1, 6, 4]), tensor(name, list(shape), dtype)], [tensor("y", None)])


MADE = {
    "reshape": (node("Reshape", 2, "shape", [2]), (-1, 1)),
    "expand": (node("Expand", 2, "shape", [4]), (1, 1, 1, 1)),
    "scales": (node("Resize", 3, "scales", [4], FLOAT), (1, 1, 1, 1)),
    "sizes": (node("Resize", 4, "sizes", [4]), (2, 1, 6, 4)),
    "sizes of axes": (node("Resize", 4, "sizes", [2], axes=[3, 2]), (4, 6)),
    "unsqueeze": (node("Unsqueeze", 2, "axes", [3]), (0, 1, 2)),
    "squeeze": (node("Squeeze", 2, "axes", [1]), (1,)),
    "reduce": (node("ReduceSum", 2, "axes", [2]), (0, 1)),
    "tile": (node("Tile", 2, "repeats", [4]), (1, 1, 1, 1)),
    "pad": (node("Pad", 2, "pads", [8]), (0,) * 8),
}


@pytest.mark.parametrize("name", sorted(MADE))
def test_what_an_operator_takes_as_a_shape_axes_or_sizes_follows_from_its_role(name: str) -> None:
    made, values = MADE[name]
    engine, work = open_model(made.SerializeToString())
    assert list(work.operands.values()) == [values]
    found = warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=run_options())
    assert found.skip_reason is None
    (given,) = (array for name, array in found.feeds.items() if name != "x")
    assert given.reshape(-1).tolist() == list(values), "the first that was tried"


def test_an_open_model_does_not_keep_the_bytes_of_its_file() -> None:
    content = bytes(bytearray(MADE["reshape"][0].SerializeToString()))
    before = sys.getrefcount(content)
    engine = open_engine(content, Provider("CPUExecutionProvider"))
    assert sys.getrefcount(content) == before
    assert engine.inputs


def test_lengths_of_a_split_add_up_and_slices_name_each_axis_once() -> None:
    named = helper.make_node("Split", ["x", "parts"], ["a", "b", "c"], axis=1)
    inputs = [tensor("x", [2, 7]), tensor("parts", [3], INT64)]
    made = model([named], inputs, [tensor(each, None) for each in "abc"], opset=13)
    engine, work = open_model(made.SerializeToString())
    assert work.operands == {"parts": (3, 2, 2)}
    warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=run_options())
    names = ["starts", "ends", "axes", "steps"]
    cut = helper.make_node("Slice", ["x", *names], ["y"])
    made = model([cut], [tensor("x", [3, 5]), *(tensor(each, [2], INT64) for each in names)], [tensor("y", [3, 5])])
    engine, work = open_model(made.SerializeToString())
    found = warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=run_options())
    assert work.operands["axes"] == (0, 1)
    assert found.feeds["steps"].tolist() == [1, 1]


def test_a_constant_that_an_input_is_compared_with_is_tried_in_subgraphs_too() -> None:
    """As exports with a rate do: one branch for 16000, another that fails on anything else."""
    taken = graph([helper.make_node("Identity", ["x"], ["a"])], [], [tensor("a", [4])])
    other = graph([helper.make_node("Reshape", ["x", "wrong"], ["b"])], [], [tensor("b", None)])
    made = model(
        [
            helper.make_node("Equal", ["rate", "wanted"], ["is"]),
            helper.make_node("If", ["is"], ["y"], then_branch=taken, else_branch=other),
        ],
        [tensor("x", [4]), tensor("rate", [], INT64)],
        [tensor("y", None)],
        [
            helper.make_tensor("wanted", INT64, [], [16000]),
            helper.make_tensor("wrong", INT64, [1], [3]),
        ],
    )
    engine, work = open_model(made.SerializeToString())
    found = warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=run_options())
    assert found.feeds["rate"] == 16000


def test_silero_as_it_is_exported_warms_up() -> None:
    engine, work = open_model(real_models()["vad"].read_bytes())
    found = warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=run_options())
    assert found.skip_reason is None
    assert found.feeds["sr"] == 16000


def stubborn() -> tuple[Engine, Work]:
    """Its new shape is a cast of floats: nothing says which."""
    made = model(
        [
            helper.make_node("Cast", ["rate"], ["n"], to=INT64),
            helper.make_node("Reshape", ["x", "n"], ["y"]),
        ],
        [tensor("x", [2, 3]), tensor("rate", [3])],
        [tensor("y", None)],
    )
    engine, work = open_model(made.SerializeToString())
    return engine, Work(shapes=work.shapes)


def test_samples_come_first_and_a_model_that_none_warms_up_is_admitted_only_where_that_is_said() -> None:
    engine, work = stubborn()
    options = run_options()
    with pytest.raises(ShoalError) as caught:
        warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=options)
    assert caught.value.code is Code.WARMUP_FAILED
    assert "--samples" in caught.value.refusal.remedy
    assert "warm_up: optional" in caught.value.refusal.remedy
    found = warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=options, optional=True)
    assert (found.feeds, found.times) == ({}, ())
    assert found.skip_reason is not None
    sample = {"x": np.ones((2, 3), np.float32), "rate": np.array([3, 2, 1], np.float32)}
    found = warm_up(engine, iter([lambda: sample]), runs=2, budget_s=0.0, options=options)
    assert (found.skip_reason, len(found.times)) == (None, 2)


def test_a_warm_up_that_is_told_to_end_admits_nothing() -> None:
    engine, work = stubborn()
    options: ort.RunOptions = run_options()
    options.terminate = True
    with pytest.raises(ShoalError) as caught:
        warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=options, optional=True)
    assert caught.value.code is Code.WARMUP_FAILED


def test_what_no_role_tells_is_left_to_ones_and_zeros() -> None:
    named = helper.make_node("Gather", ["table", "index"], ["y"])
    made = model([named], [tensor("index", [2], INT64)], [tensor("y", None)], [weight("table", [1, 4])])
    engine, work = open_model(made.SerializeToString())
    assert work.operands == {}
    found = warm_up(engine, input_candidates(engine, work), runs=1, budget_s=0.0, options=run_options())
    assert found.feeds["index"].tolist() == [0, 0]
