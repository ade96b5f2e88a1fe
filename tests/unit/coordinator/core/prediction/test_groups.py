"""Which measurements count as one, and which are compared."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.prediction.demand import OperatorClass
from shoal.coordinator.core.prediction.groups import (
    number_architectures,
    number_keys,
    quantile_of_groups,
    spread_rows,
)
from shoal.coordinator.core.prediction.residuals import DeviceClass, Residual
from shoal.coordinator.core.prediction.shared_covariance import common

BOARD, CARD = DeviceClass("CPUExecutionProvider", "maker board"), DeviceClass("CUDAExecutionProvider", "maker card")


def measurement(model: str, conv: float, where: DeviceClass = BOARD) -> Residual:
    return Residual(model, where, (conv, 1 - conv, *(0.0 for _ in range(len(OperatorClass) - 1))), math.nan)


def architectures(*of: Residual) -> list[int]:
    found: list[int] = number_architectures(of, common(of, of).apart).tolist()
    return found


def test_near_copies_and_theirs_are_of_one_architecture() -> None:
    assert architectures(
        measurement("a", 0.5), measurement("b", 0.9), measurement("c", 0.53), measurement("d", 0.56)
    ) == [0, 1, 0, 0]
    chain = [measurement(f"m{number:02}", 0.2 + 0.01 * (number * 7 % 50)) for number in range(50)]
    assert architectures(*chain) == [0] * 50, "whatever their order"


def test_a_model_is_of_one_architecture_wherever_it_runs() -> None:
    assert architectures(
        measurement("a", 0.5), measurement("a", 0.9, CARD), measurement("b", 0.9, CARD), measurement("c", 0.9)
    ) == [0, 0, 0, 1]


@pytest.mark.parametrize(("count", "rank"), [(8, 8), (9, 9), (10, 9.9), (19, 18), (20, 18.9), (40, 36.9)])
def test_the_quantile_is_that_of_a_further_group(count: int, rank: float) -> None:
    """Of n exchangeable scores a further one is at most the k-th with the probability k / (n + 1)."""
    scores = np.random.default_rng(count).permutation(np.arange(1.0, count + 1))
    assert quantile_of_groups(scores, np.arange(count), 0.9) == pytest.approx(rank)


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 30)), min_size=1, max_size=30))
def test_a_group_counts_once_however_many_scores_it_has(of: list[tuple[float, int]]) -> None:
    alone = quantile_of_groups(np.array([score for score, _ in of]), np.arange(len(of)), 0.9)
    groups = np.repeat(np.arange(len(of)), [times for _, times in of])
    assert quantile_of_groups(np.array([of[group][0] for group in groups]), groups, 0.9) == pytest.approx(alone)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=300), st.integers(1, 64))
def test_no_more_rows_are_compared_than_may_be_and_each_once(of: list[int], most: int) -> None:
    rows = spread_rows(number_keys(of), most)
    assert len(rows) == min(most, len(of))
    assert sorted({*rows.tolist()}) == rows.tolist()


@pytest.mark.parametrize(("classes", "models"), [(2, 33), (2, 128), (3, 43), (4, 64), (8, 32), (16, 16), (5, 51)])
def test_all_classes_and_models_are_compared(classes: int, models: int) -> None:
    """Rows are in the order of models, and of each model in that of classes."""
    of = np.tile(np.arange(classes), models)
    rows = spread_rows(of, 64)
    counts = np.bincount(of[rows], minlength=classes)
    assert counts.max() - counts.min() <= 2
    assert len({*(rows // classes).tolist()}) >= min(models, 64) * 0.75
