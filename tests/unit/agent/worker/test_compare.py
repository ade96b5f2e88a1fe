"""Two replicas' answers compared: what counts as the same, what no tolerance excuses, and laws of the metrics."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from shoal.agent.worker.compare import compare, measure
from shoal.types.migration import Metric, Tolerance

TIGHT = (Tolerance("", Metric.MAX_REL, 1e-3), Tolerance("", Metric.COSINE, 0.9999))
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, max_side=5)
PLAIN = st.floats(-1e6, 1e6, width=32)
ANY_OF = st.sampled_from([np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16])


def floats(*, any_value: bool = False) -> st.SearchStrategy[NDArray[Any]]:
    return arrays.arrays(np.float32, SHAPES, elements=st.floats(width=32) if any_value else PLAIN)


def one(wanted: Any, found: Any, *tolerances: Tolerance) -> tuple[bool, str]:
    result = compare({"y": np.asarray(wanted)}, {"y": np.asarray(found)}, tolerances or TIGHT)
    return all(drift.passed for drift in result.drifts), result.fault


@given(floats(any_value=True), ANY_OF)
def test_what_is_the_same_passes_whatever_it_is(array: NDArray[Any], kind: Any) -> None:
    with np.errstate(all="ignore"):
        array = array.astype(kind)
    every = tuple(Tolerance("", metric, 0.0 if metric.startswith("max") else 1.0) for metric in Metric)
    result = compare({"y": array}, {"y": array.copy()}, every)
    assert result.fault == ""
    assert all(drift.passed for drift in result.drifts)
    assert all(math.isfinite(drift.worst) for drift in result.drifts), "the wire takes no infinity"


@given(floats(), floats())
def test_metrics_are_symmetric_and_bounded(a: NDArray[Any], b: NDArray[Any]) -> None:
    size = min(a.size, b.size)
    x, y = a.flatten()[:size].astype(float), b.flatten()[:size].astype(float)
    for metric in (Metric.MAX_ABS, Metric.MAX_REL, Metric.COSINE):
        assert measure(metric, x, y) == pytest.approx(measure(metric, y, x), rel=1e-9, abs=1e-12)
    assert 0 <= measure(Metric.MAX_REL, x, y) <= 2
    assert -1 <= measure(Metric.COSINE, x, y) <= 1
    assert 0 <= measure(Metric.TOP_K, x, y, 3) <= 1
    assert measure(Metric.MAX_ABS, x, y) == pytest.approx(float(np.abs(x - y).max(initial=0.0)), rel=1e-9, abs=1e-30)


@given(floats().filter(lambda a: a.size > 0), st.data())
def test_one_value_that_is_no_number_is_never_excused(array: NDArray[Any], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, array.size - 1))
    broken = array.flatten()
    broken[at] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    loose = Tolerance("", Metric.MAX_ABS, 1e30)
    for wanted, found in ((array, broken.reshape(array.shape)), (broken.reshape(array.shape), array)):
        assert one(wanted, found, loose)[1], "NaN or an infinity on one side alone"


@given(floats().filter(lambda a: float(np.abs(a).max(initial=0)) > 1e-3), st.floats(0.01, 10))
def test_max_rel_sees_what_cosine_does_not(array: NDArray[Any], more: float) -> None:
    a = array.astype(float)
    assert measure(Metric.COSINE, a, a * (1 + more)) == pytest.approx(1.0)
    assert measure(Metric.MAX_REL, a, a * (1 + more)) == pytest.approx(more / (1 + more))


@pytest.mark.parametrize(
    ("wanted", "found", "why"),
    [
        (np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), "shape [3, 2], expected [2, 3]"),
        (np.zeros(2, np.float32), np.zeros(2, np.float64), "datatype float64, expected float32"),
        (np.array([1, 2, 3]), np.array([1, 2, 4]), "1 of 3 values differ"),
        (np.array([True]), np.array([False]), "1 of 1 values differ"),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), "1 of 2 values differ"),
        (np.array([-np.inf], np.float32), np.array([np.inf], np.float32), "infinite value"),
    ],
)
def test_what_no_tolerance_excuses(wanted: NDArray[Any], found: NDArray[Any], why: str) -> None:
    assert why in one(wanted, found)[1]


def test_other_outputs_are_refused() -> None:
    assert "outputs x, expected y" in compare({"y": np.zeros(1)}, {"x": np.zeros(1)}, TIGHT).fault


def test_a_mask_of_infinities_that_agrees_hides_nothing() -> None:
    wanted = np.array([-np.inf, 1.0, np.nan], np.float32)
    assert one(wanted, wanted.copy()) == (True, "")
    assert one(wanted, np.array([-np.inf, 1.1, np.nan], np.float32)) == (False, "")


def test_an_output_that_is_named_is_judged_by_its_own_tolerances_alone() -> None:
    wanted, found = {"a": np.array([1.0]), "n": np.array([7, 8])}, {"a": np.array([1.5]), "n": np.array([7, 9])}
    named = (Tolerance("a", Metric.MAX_ABS, 0.6), Tolerance("n", Metric.MAX_ABS, 1.0), *TIGHT)
    result = compare(wanted, found, named)
    assert [(drift.output, drift.metric, drift.passed) for drift in result.drifts] == [
        ("a", Metric.MAX_ABS, True),
        ("n", Metric.MAX_ABS, True),
    ]
    assert not result.fault
    assert compare(wanted, found, TIGHT).fault == "n: 1 of 2 values differ"


def test_what_no_tolerance_judges_has_not_passed() -> None:
    outputs = {"boxes": np.array([1.0]), "scores": np.array([1.0])}
    other = {"boxes": np.array([1.0]), "scores": np.array([-1000.0])}
    boxes = Tolerance("boxes", Metric.MAX_ABS, 0.1)
    assert compare(outputs, other, (boxes,)).fault == "scores: no tolerance says how far it may be"
    assert "a tolerance for 'bxes'" in compare(outputs, outputs, (Tolerance("bxes", Metric.MAX_ABS, 0.1), *TIGHT)).fault
    assert not compare(outputs, other, (boxes, *TIGHT)).drifts[1].passed
    whole = {"ids": np.array([1, 2])}
    assert compare(whole, whole, ()).fault == "", "what must be equal needs none"


def test_top_k_counts_places_and_takes_ties_either_way() -> None:
    rows = np.array([[9.0, 8.0, 1.0, 0.0], [9.0, 8.0, 1.0, 0.0]])
    other = np.array([[8.0, 9.0, 1.0, 0.0], [0.0, 1.0, 8.0, 9.0]])
    assert measure(Metric.TOP_K, rows, other, 2) == 0.5
    assert measure(Metric.TOP_K, np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0]), 1) == 1.0
    assert measure(Metric.TOP_K, rows, other, 99) == 1.0


def test_the_largest_numbers_there_are_stay_finite() -> None:
    most = np.finfo(np.float64).max
    result = compare(
        {"y": np.array([most])}, {"y": np.array([-most])}, tuple(Tolerance("", metric, 0.0) for metric in Metric)
    )
    assert all(math.isfinite(drift.worst) for drift in result.drifts)
    assert not result.drifts[0].passed


def test_only_what_was_compared_counts() -> None:
    assert compare({"y": np.zeros((0, 4))}, {"y": np.zeros((0, 4))}, TIGHT).elements == 0
    assert compare({"y": np.full(3, np.nan)}, {"y": np.full(3, np.nan)}, TIGHT).elements == 0
    assert compare({"y": np.zeros(3)}, {"y": np.zeros(3)}, TIGHT).elements == 3
