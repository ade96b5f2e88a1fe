"""Requests joined and split along the first axis."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.worker.batches import NO_ROWS, Batch, group_of, has_batch_axis, row_bytes, rows_of
from shoal.agent.worker.request_reader import InferRequest, RequestNames
from shoal.types.assignment import Work
from shoal.types.profile import TensorSpec

NAMES = RequestNames(b"m", b"1", b"7")
ROWS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def feeds(rows: int, start: int) -> dict[str, Any]:
    return {
        "x": np.arange(start, start + rows * 6, dtype=np.float32).reshape(rows, 2, 3),
        "n": np.arange(start, start + rows, dtype=np.int64),
    }


@given(ROWS)
def test_law_what_was_joined_is_split_into_the_same(rows: list[int]) -> None:
    parts = [feeds(each, 100 * index) for index, each in enumerate(rows)]
    batch = Batch(parts, rows)
    joined = batch.join()
    assert rows_of(joined) == sum(rows)
    found = batch.split(joined)
    assert found is not None
    for part, own in zip(parts, found, strict=True):
        assert list(own) == ["x", "n"]
        for name, array in part.items():
            np.testing.assert_array_equal(own[name], array)
            assert own[name].dtype == array.dtype
            assert own[name].base is None, "it holds no memory of others"


@pytest.mark.parametrize("shape", [(), (5,), (7, 6)])
def test_an_output_of_other_rows_is_not_split(shape: tuple[int, ...]) -> None:
    batch = Batch([feeds(2, 0), feeds(4, 0)], [2, 4])
    assert batch.split({"y": np.zeros((6, 2)), "z": np.zeros(shape)}) is None


def test_requests_of_one_group_differ_in_rows_alone() -> None:
    one = InferRequest(NAMES, feeds(1, 0), ["y", "z"])
    same = InferRequest(RequestNames(b"", b"", b""), dict(reversed(feeds(3, 9).items())), ("y", "z"))
    assert group_of(one) == group_of(same)
    wider = {**feeds(1, 0), "x": np.zeros((1, 2, 4), np.float32)}
    others = [one._replace(feeds=wider), one._replace(outputs=["z", "y"]), one._replace(outputs=["y"])]
    assert all(group_of(each) != group_of(one) for each in others)


@pytest.mark.parametrize("shapes", [[(2, 3), (3, 3)], [(2,), ()], [(0, 3), (0,)]])
def test_inputs_of_unequal_or_no_rows_have_none(shapes: list[tuple[int, ...]]) -> None:
    assert rows_of({str(index): np.zeros(shape) for index, shape in enumerate(shapes)}) == NO_ROWS


@pytest.mark.parametrize(
    ("shapes", "dtype", "has"),
    [
        ([(-1, 3), (-1,)], "FP32", True),
        ([(-1, 3), (1,)], "FP32", False),
        ([(1, -1), (-1,)], "FP32", False),
        ([(), (-1,)], "FP32", False),
        ([(-1, 3), (-1,)], "BYTES", False),
        ([(-1, 3), (-1,)], "BOOL", False),
    ],
)
def test_the_first_axis_of_all_must_be_open(shapes: list[tuple[int, ...]], dtype: str, has: bool) -> None:
    given_, output = (TensorSpec(name, dtype, shape) for name, shape in zip("xy", shapes, strict=True))
    assert has_batch_axis([given_], [output]) is has
    assert not has_batch_axis([], [output])


def test_bytes_of_a_row_leave_out_the_first_axis() -> None:
    specs = [TensorSpec("x", "FP32", (-1, -1, 3)), TensorSpec("n", "INT64", (-1,))]
    assert row_bytes(specs, Work(shapes={"x": (4, 5, 3)})) == 5 * 3 * 4 + 8
