"""Requests of unequal lengths in one batch: inputs filled up, outputs cut back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.agent.worker.batches import Batch, group_of
from shoal.agent.worker.padding import PaddedAxis, Padding, halves, most_of_its_digits, padded_axis
from shoal.agent.worker.request_reader import InferRequest, RequestNames

AXIS = PaddedAxis("s", {"x": (1,), "pairs": (1, 2)}, {"y": (1,)})
SIZES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=6)


def feeds(rows: int, length: int, start: int = 1) -> dict[str, Any]:
    count = rows * length
    return {
        "x": np.arange(start, start + count, dtype=np.float32).reshape(rows, length),
        "pairs": np.ones((rows, length, length), np.int64),
        "fixed": np.arange(rows * 2, dtype=np.int8).reshape(rows, 2),
    }


def request(fed: dict[str, Any]) -> InferRequest:
    return InferRequest(RequestNames(b"m", b"", b""), fed, ("y",))


@settings(deadline=None)
@given(SIZES)
def test_law_what_was_filled_up_is_cut_back_to_the_same(sizes: list[tuple[int, int]]) -> None:
    parts = [feeds(rows, length, 100 * index + 1) for index, (rows, length) in enumerate(sizes)]
    batch = Batch(parts, [rows for rows, _ in sizes], AXIS)
    joined = batch.join()
    total, longest = sum(rows for rows, _ in sizes), max(length for _, length in sizes)
    assert {name: array.shape for name, array in joined.items()} == {
        "x": (total, longest), "pairs": (total, longest, longest), "fixed": (total, 2)
    }  # fmt: skip
    assert joined["pairs"].sum() == sum(rows * length**2 for rows, length in sizes), "the rest is zeros"
    found = batch.split({"y": joined["x"], "z": joined["fixed"]})
    assert found is not None
    for part, own in zip(parts, found, strict=True):
        np.testing.assert_array_equal(own["y"], part["x"])
        np.testing.assert_array_equal(own["z"], part["fixed"])
        assert {array.dtype for array in own.values()} == {np.dtype(np.float32), np.dtype(np.int8)}
        assert all(array.base is None for array in own.values()), "it holds no memory of others"


@pytest.mark.parametrize("shape", [(3, 4), (3, 6), (2, 5)])
def test_an_output_of_another_length_or_rows_is_not_cut(shape: tuple[int, int]) -> None:
    batch = Batch([feeds(1, 2), feeds(2, 5)], [1, 2], AXIS)
    assert batch.split({"y": np.zeros((3, 5))}) is not None
    assert batch.split({"z": np.zeros((3, 2))}) is not None, "only some outputs are asked for"
    assert batch.split({"y": np.zeros(shape)}) is None


def test_requests_of_one_group_differ_in_rows_and_length_alone() -> None:
    one, longer = request(feeds(1, 3)), request(feeds(2, 7))
    assert group_of(one, AXIS) == group_of(longer, AXIS)
    assert group_of(one) != group_of(longer)
    wider = request({**feeds(1, 3), "fixed": np.zeros((1, 3), np.int8)})
    assert group_of(one, AXIS) not in (group_of(wider, AXIS), group_of(one._replace(outputs=("z",)), AXIS))


def test_only_requests_of_one_length_inside_the_bounds_are_filled_up() -> None:
    padding = Padding(AXIS, 4, 15)
    assert [length for length in range(20) if padding.is_for(feeds(1, length))] == list(range(4, 16))
    assert not padding.is_for({**feeds(1, 8), "x": np.zeros((1, 9), np.float32)}), "it has two lengths"


@pytest.mark.parametrize(
    ("inputs", "outputs", "found"),
    [
        ({"x": ("n", "s")}, {"y": ("n", "s", 4)}, PaddedAxis("s", {"x": (1,)}, {"y": (1,)})),
        ({"x": ("n", "s"), "p": ("m", "s", "s")}, {"y": ("n", 2)}, PaddedAxis("s", {"x": (1,), "p": (1, 2)}, {})),
        ({"x": ("n", 3)}, {"y": ("n", "s")}, "no input has"),
        ({"x": ("n", 3, None)}, {"y": ("n",)}, "axis 2 of 'x' is open and has no name"),
        ({"x": ("n", "?")}, {"y": ("n",)}, "has no name"),
        ({"x": ("n", -1)}, {"y": ("n",)}, "has no name"),
        ({"x": ("n", "h", "w")}, {"y": ("n",)}, "more than one length may differ: h, w"),
        ({"x": ("n", "n")}, {"y": ("n",)}, "names a first axis too"),
        ({"x": ("n", "s")}, {"y": ("s",)}, "names a first axis too"),
    ],
)
def test_one_open_axis_with_a_name_is_filled_up(inputs: Any, outputs: Any, found: PaddedAxis | str) -> None:
    axis = padded_axis(inputs, outputs)
    assert found in axis if isinstance(found, str) and isinstance(axis, str) else axis == found


def test_a_length_stands_for_all_of_its_binary_digits() -> None:
    assert [most_of_its_digits(length) for length in (1, 2, 3, 4, 100, 128)] == [1, 3, 3, 7, 127, 255]
    assert [halves(length) for length in (1, 2, 9)] == [[], [1], [4, 2, 1]]
