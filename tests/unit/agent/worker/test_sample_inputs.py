"""Inputs that are made up: within what the graph takes, varied, the same again."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.worker.sample_inputs import sample_input
from shoal.agent.worker.tensors import DATATYPES, decode, make_request
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Work
from shoal.types.profile import TensorSpec

INTEGERS = ("INT8", "UINT8", "INT16", "INT32", "UINT32", "INT64", "UINT64")
SPECS = tuple(TensorSpec(f"x_{name}", name, (-1, 3)) for name in DATATYPES)
numbers = st.integers(0, 2**63 - 1)


@given(numbers, st.integers(0, 100))
def test_every_datatype_is_drawn_as_a_request_that_is_taken(seed: int, index: int) -> None:
    feeds = sample_input(SPECS, Work(shapes={spec.name: (2, 3) for spec in SPECS}), seed, index)
    sent = oip.ModelInferRequest.FromString(make_request(feeds).SerializeToString())
    for name, array in decode(sent, SPECS).items():
        assert array.shape == (2, 3)
        assert array.dtype == feeds[name].dtype
        assert np.array_equal(array, feeds[name])


@pytest.mark.parametrize("datatype", INTEGERS)
@given(numbers, st.integers(1, 2**40), st.integers(0, 20))
def test_an_index_is_below_its_bound(datatype: str, seed: int, bound: int, index: int) -> None:
    spec = TensorSpec("ids", datatype, (64,))
    drawn = sample_input((spec,), Work(below={"ids": bound}), seed, index)["ids"]
    assert drawn.min() >= 0
    assert int(drawn.max()) < bound


def test_inputs_vary_and_come_back_the_same() -> None:
    spec = TensorSpec("x", "FP32", (8,))

    def some(seed: int) -> list[Any]:
        return [sample_input((spec,), Work(), seed, index)["x"] for index in range(4)]

    one, again, other = some(1), some(1), some(2)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert len({array.tobytes() for array in one}) == 4
    assert any(array.min() < 0 for array in one)
    assert any(array.min() >= 0 for array in one)


def test_integers_of_unknown_meaning_are_now_and_then_what_a_warm_up_has() -> None:
    spec = TensorSpec("length", "INT64", (1,))
    drawn = [int(sample_input((spec,), Work(), 1, index)["length"][0]) for index in range(8)]
    assert drawn[0] == drawn[4] == 1
    assert all(0 <= value <= 15 for value in drawn)


def test_what_a_graph_implies_is_drawn_as_it_is() -> None:
    specs = (TensorSpec("axes", "INT64", (2,)), TensorSpec("scales", "FP32", (4,)), TensorSpec("x", "FP32", (3,)))
    work = Work(operands={"axes": (0, 1), "scales": (1, 1, 1, 1), "x": (1,)})
    for index in range(8):
        feeds = sample_input(specs, work, 1, index)
        assert feeds["axes"].tolist() == [0, 1]
        assert feeds["scales"].tolist() == [1.0] * 4
        assert feeds["x"].shape == (3,), "a count that does not fit is passed over"
