"""A Gaussian process over (model, device class): measurements share what they have in common."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.core.prediction.model import Basis, Interval
from shoal.coordinator.core.prediction.residuals import Residual
from shoal.coordinator.core.prediction.shared_variances import NORMAL_QUANTILE, SharedVariances
from shoal.coordinator.core.prediction.transfer.process import ProcessSettings, robust_solution

_COVERAGE: Final = 0.9
_MOST_DEVIATIONS, _LEAST_DEVIATION = 3.0, 0.35
"""How far from the median one measurement may pull the predictions of other models; a deviation is 1.48 times the
median absolute one, and at least a factor of 1.4."""
_REACH: Final = 0.3
"""Over which shares of the seconds two models are alike: a third of the time in other operators."""


class ResidualProcess:
    """Predicts one figure of models on device classes from those that were seen.

    Few measurements on a new class transfer to all its models, and those of a model to other classes.
    """

    def __init__(
        self,
        seen: Sequence[Residual],
        values: Sequence[float],
        shared: SharedVariances,
        noise: float,
        mean: float = 0.0,
    ) -> None:
        """seen: models and classes, each pair once. values: of the figure, in the same order. noise: the variance
        between two measurements of one pair. mean: what is expected before any was seen."""
        self._seen, self._shared, self._mean = tuple(seen), shared, mean
        self._settings = ProcessSettings(noise=noise)
        self._values = np.array(values, float) - mean
        self._bounded = _bound(self._values)
        self._keys = frozenset((each.model, each.device_class) for each in self._seen)
        self._classes = frozenset(each.device_class for each in self._seen)

    def learn(self) -> None:
        """Does now what the first estimate would wait for."""
        if self._seen:
            _ = self._quantiles

    def estimate(self, asked: Residual) -> Interval:
        """Of the figure. asked: model, device class and mix; nothing else of it counts."""
        own = float(_covariance(self._shared, [asked], [asked])[0, 0])
        if not self._seen:
            half = NORMAL_QUANTILE * math.sqrt(own + self._settings.noise)
            return Interval(self._mean - half, self._mean, self._mean + half)
        inverse, scale = self._solution
        across = _covariance(self._shared, [asked], self._seen)[0]
        own_model = np.array([each.model == asked.model for each in self._seen])
        solved = inverse @ np.where(own_model, self._values, self._bounded)
        middle = self._mean + float(across @ solved)
        variance = scale * (max(own - float(across @ inverse @ across), 0.0) + self._settings.noise)
        half = self._quantiles[self.basis(asked)] * math.sqrt(variance)
        return Interval(middle - half, middle, middle + half)

    def basis(self, asked: Residual) -> Basis:
        """What an estimate is learnt from."""
        if not self._seen:
            return Basis.GUESS
        if (asked.model, asked.device_class) in self._keys:
            return Basis.SAME_CLASS
        return Basis.CALIBRATED if asked.device_class in self._classes else Basis.TRANSFERRED

    @cached_property
    def _solution(self) -> tuple[NDArray[np.float64], float]:
        """The inverse of the covariance, and the scale of all variances."""
        given = _covariance(self._shared, self._seen, self._seen)
        inverse, _, scale = robust_solution(self._settings, given, self._bounded)
        return inverse, scale

    @cached_property
    def _quantiles(self) -> dict[Basis, float]:
        """Half an interval in standard deviations, by leaving out all of a model, or all of a device class."""
        models = self._left_out(lambda each: each.model)
        classes = self._left_out(lambda each: each.device_class.product)
        return {Basis.SAME_CLASS: NORMAL_QUANTILE, Basis.CALIBRATED: models, Basis.TRANSFERRED: classes}

    def _left_out(self, group_of: Callable[[Residual], str]) -> float:
        """The quantile of errors in standard deviations, each group predicted from the others.

        Source: the leave-one-out residuals of a Gaussian process in closed form, here by block (Rasmussen, Williams,
        2006, equations 5.10 to 5.12).
        """
        groups = defaultdict[str, list[int]](list)
        for number, each in enumerate(self._seen):
            groups[group_of(each)].append(number)
        inverse, scale = self._solution
        solved = inverse @ self._bounded
        scores = []
        for rows in groups.values() if len(groups) > 1 else ():
            block = np.linalg.inv(inverse[np.ix_(rows, rows)])
            scores += [*(np.abs(block @ solved[rows]) / np.sqrt(scale * np.diag(block)))]
        if not scores:
            return NORMAL_QUANTILE
        rank = min(len(scores), math.ceil(_COVERAGE * (len(scores) + 1)))
        return max(NORMAL_QUANTILE, float(np.sort(scores)[rank - 1]))


def _bound(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values, none further from their median than what is believed of others: a model that is unlike all others, or
    a node that errs or lies, decides what is predicted of that model alone."""
    if not len(values):
        return values
    middle = np.median(values)
    most = _MOST_DEVIATIONS * max(1.4826 * float(np.median(np.abs(values - middle))), _LEAST_DEVIATION)
    bounded: NDArray[np.float64] = values.clip(middle - most, middle + most)
    return bounded


def _covariance(
    variances: SharedVariances, one: Sequence[Residual], other: Sequence[Residual]
) -> NDArray[np.float64]:  # fmt: skip
    """(one, other): of the values."""

    def same(key: Callable[[Residual], object]) -> NDArray[np.float64]:
        numbers: dict[object, int] = {}
        left = np.array([numbers.setdefault(key(each), len(numbers)) for each in one])
        right = np.array([numbers.setdefault(key(each), len(numbers)) for each in other])
        found: NDArray[np.float64] = (left[:, None] == right).astype(np.float64)
        return found

    mixes, others = np.array([each.mix for each in one]), np.array([each.mix for each in other])
    apart = ((mixes[:, None] - others) ** 2).sum(2)
    provider = same(lambda each: each.device_class.provider)
    model = same(lambda each: each.model)
    shared: NDArray[np.float64] = (
        variances.region
        + provider * (variances.provider + variances.operators * np.exp(-apart / (2 * _REACH**2)))
        + provider * variances.kinds * (mixes @ others.T)
        + same(lambda each: each.device_class) * variances.device_class
        + model * (variances.model + provider * variances.model_and_provider)
    )
    return shared
