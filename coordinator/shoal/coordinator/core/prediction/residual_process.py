"""A Gaussian process over (model, device class): measurements share what they have in common."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.core.prediction.groups import number_architectures, number_keys, quantile_of_groups, spread_rows
from shoal.coordinator.core.prediction.model import Basis, Interval
from shoal.coordinator.core.prediction.residuals import MOST_RATIO, Residual
from shoal.coordinator.core.prediction.shared_covariance import (
    Assumption,
    Common,
    CommonWith,
    assumptions,
    common,
    covariance,
    mixes,
)
from shoal.coordinator.core.prediction.shared_variances import COVERAGE, LEAST_GROUPS, NORMAL_QUANTILE, SharedVariances
from shoal.coordinator.core.prediction.transfer.known import Floats, Indices
from shoal.coordinator.core.prediction.transfer.process import ProcessSettings, robust_solution

_MOST_DEVIATIONS, _LEAST_DEVIATION = 3.0, 0.35
"""How far from the median one measurement may pull the predictions of other models; a deviation is 1.48 times the
median absolute one, and at least a factor of 1.4."""
_MOST_COMPARED: Final = 64
"""Measurements by which assumptions are compared: eight times 64^3 operations are half of what 256^3 are."""
_MOST_KIND: Final = math.log(MOST_RATIO)
"""A kind of kernel is taken to miss its rate by no more than what is believed of a model, so that the step does not go
astray: further on, one kind would count as all of a model of which it is little. None comes near in the recorded runs
(guide, section 3)."""


class _Kinds(NamedTuple):
    """Models as sums of kinds of kernels, each of which misses its rate by a factor. The logarithm of such a sum is
    taken as linear about what is known of the factors."""

    # (models, kinds): shares of the seconds once each kind is corrected.
    shares: Floats
    # What the logarithm of the corrected sum goes beyond `shares` times the logarithms of the factors.
    offsets: Floats


class _Solution(NamedTuple):
    """The process, given what was measured."""

    # What was chosen to assume.
    assumption: Assumption
    # By provider: logarithms of the factors, by kind.
    factors: Mapping[str, Floats]
    # What was measured has in common.
    shared: Common
    # Of what was measured.
    kinds: _Kinds
    # Of the covariance, with noise.
    inverse: Floats
    # Of all variances.
    scale: float


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
        self._seen, self._mean = tuple(seen), mean
        self._assumptions = assumptions(shared)
        self._settings = ProcessSettings(noise=noise)
        self._values = np.array(values, float) - mean
        self._bounded = _bound(self._values, np.array([not each.imported_from for each in self._seen], bool))
        self._keys = frozenset((each.model, each.device_class) for each in self._seen)
        self._classes = frozenset(each.device_class for each in self._seen)

    def learn(self) -> None:
        """Does now what the first estimate would wait for."""
        if self._seen:
            _ = self._quantiles

    def estimate(self, asked: Residual) -> Interval:
        """Of the figure. asked: model, device class and mix; nothing else of it counts."""
        noise, one = self._settings.noise, mixes([asked])
        itself = common([asked], [asked])
        if not self._seen:
            half = NORMAL_QUANTILE * math.sqrt(float(covariance(self._assumptions[0], itself, one, one)[0, 0]) + noise)
            return Interval(self._mean - half, self._mean, self._mean + half)
        assumption, factors, _, seen, inverse, scale = self._solution
        kinds = _kinds([asked], one, factors)
        own = float(covariance(assumption, itself, kinds.shares, kinds.shares)[0, 0])
        shared = self._common_with_seen.of(asked)
        across = covariance(assumption, shared, kinds.shares, seen.shares)[0]
        solved = inverse @ (np.where(shared.model[0] > 0, self._values, self._bounded) - seen.offsets)
        middle = self._mean + float(kinds.offsets[0] + across @ solved)
        variance = scale * (max(own - float(across @ inverse @ across), 0.0) + noise)
        # No narrower than what two measurements of one pair differ by.
        least = NORMAL_QUANTILE * math.sqrt(scale * noise)
        half = max(self._quantiles[self.basis(asked)] * math.sqrt(variance), least)
        return Interval(middle - half, middle, middle + half)

    @cached_property
    def _common_with_seen(self) -> CommonWith:
        return CommonWith(self._seen)

    def basis(self, asked: Residual) -> Basis:
        """What an estimate is learnt from."""
        if not self._seen:
            return Basis.GUESS
        if (asked.model, asked.device_class) in self._keys:
            return Basis.SAME_CLASS
        return Basis.CALIBRATED if asked.device_class in self._classes else Basis.TRANSFERRED

    @cached_property
    def _solution(self) -> _Solution:
        shared, promised = common(self._seen, self._seen), mixes(self._seen)
        assumption = self._choice(shared, promised)

        def solve(factors: Mapping[str, Floats]) -> _Solution:
            kinds = _kinds(self._seen, promised, factors)
            given = covariance(assumption, shared, kinds.shares, kinds.shares)
            inverse, _, scale = robust_solution(self._settings, given, self._bounded - kinds.offsets)
            return _Solution(assumption, factors, shared, kinds, inverse, scale)

        found = solve({})
        # Without a variance of kinds no factor is known.
        return solve(self._factors(found)) if assumption.variances.kinds else found

    def _choice(self, shared: Common, promised: Floats) -> Assumption:
        """The assumption under which what was measured is likeliest, all variances being known up to their scale.

        Source: Rasmussen, Williams, 2006, equation 5.8; with the scale integrated out, Shah, Wilson, Ghahramani, 2014.
        """
        if len({each.model for each in self._seen}) < LEAST_GROUPS or len(self._assumptions) == 1:
            return self._assumptions[0]
        rows = spread_rows(number_keys([each.device_class for each in self._seen]), _MOST_COMPARED)
        shared, promised = Common(*(each[np.ix_(rows, rows)] for each in shared)), promised[rows]
        values = self._bounded[rows]
        noise, freedom = self._settings.noise * np.eye(len(values)), self._settings.scale_freedom

        def surprise(each: Assumption) -> float:
            root = np.linalg.cholesky(covariance(each, shared, promised, promised) + noise)
            whitened = np.linalg.solve(root, values)
            likely = (freedom + len(values)) / 2 * math.log(freedom + float(whitened @ whitened))
            return float(np.log(np.diag(root)).sum()) + likely

        return min(self._assumptions, key=surprise)

    def _factors(self, known: _Solution) -> dict[str, Floats]:
        """What is expected of the kinds' factors, by provider: a Gauss-Newton step. A second one changes no mean error
        by more than 0.02 points."""
        found, kinds = dict[str, Floats](), known.kinds
        solved = known.inverse @ (self._bounded - kinds.offsets)
        for provider in {each.device_class.provider for each in self._seen}:
            rows = [number for number, each in enumerate(self._seen) if each.device_class.provider == provider]
            expected = known.assumption.variances.kinds * (solved[rows] @ kinds.shares[rows])
            found[provider] = expected.clip(-_MOST_KIND, _MOST_KIND)
        return found

    @cached_property
    def _quantiles(self) -> dict[Basis, float]:
        """Half an interval in standard deviations, by leaving out all of a model, or all of a device class."""
        models = number_keys([each.model for each in self._seen])
        architectures = number_architectures(self._seen, self._solution.shared.apart)
        classes = number_keys([each.device_class.product for each in self._seen])
        of_models = self._left_out(models, architectures, self._least_quantile(architectures))
        return {
            Basis.SAME_CLASS: NORMAL_QUANTILE,
            Basis.CALIBRATED: of_models,
            # Another model there is at least as unknown as it is on a class that was measured.
            Basis.TRANSFERRED: max(of_models, self._left_out(classes, classes, NORMAL_QUANTILE)),
        }

    def _least_quantile(self, architectures: Indices) -> float:
        """That of normal errors whose scale is known from as many measurements as there are architectures."""
        count, known, scale = int(architectures.max()) + 1, self._settings.scale_freedom, self._solution.scale
        squares = scale * (known + len(architectures)) - known
        fewer = (known + squares * count / len(architectures)) / (known + count)
        return NORMAL_QUANTILE * math.sqrt(max(1.0, fewer / scale))

    def _left_out(self, groups: Indices, counted: Indices, least: float) -> float:
        """The quantile of errors in standard deviations, each group predicted from the others. counted: which rows
        count as one together. least: what the quantile is at least where those are too few. Both by row.

        Source: the leave-one-out residuals of a Gaussian process in closed form, here by block (Rasmussen, Williams,
        2006, equations 5.10 to 5.12), as scores of conformal prediction (Vovk, Gammerman, Shafer, Algorithmic Learning
        in a Random World, 2005), which holds for errors of any distribution where what counts as one is exchangeable.
        Here it nearly holds: all rows chose the assumption, and bound the values, also those that are left out.
        """
        if not groups.any():
            return least
        _, _, shared, kinds, inverse, scale = self._solution
        # By column: what that row's prediction is made from, as in `estimate`; of its own group, what was measured.
        solved = inverse @ (np.where(shared.model > 0, self._values, self._bounded) - kinds.offsets).T
        scores = np.zeros(len(groups))
        for group in range(int(groups.max()) + 1):
            rows = np.flatnonzero(groups == group)
            block = np.linalg.inv(inverse[np.ix_(rows, rows)])
            errors = np.einsum("ij,ji->i", block, solved[np.ix_(rows, rows)])
            scores[rows] = np.abs(errors) / np.sqrt(scale * np.diag(block))
        found = quantile_of_groups(scores, counted, COVERAGE)
        return found if counted.max() + 1 >= LEAST_GROUPS else max(least, found)


def _kinds(of: Sequence[Residual], promised: Floats, factors: Mapping[str, Floats]) -> _Kinds:
    """promised: their mixes, each of which adds up to 1 or is of no kind at all. factors: by provider; of one that is
    missing, every kind takes what it promises."""
    none = np.zeros(promised.shape[1])
    known = np.array([factors.get(each.device_class.provider, none) for each in of])
    taken = promised * np.exp(known)
    sums = taken.sum(1)
    sums[sums <= 0] = 1.0
    shares: Floats = taken / sums[:, None]
    offsets: Floats = np.log(sums) - (shares * known).sum(1)
    return _Kinds(shares, offsets)


def _bound(values: NDArray[np.float64], own: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The values, none further from their median than what is believed of others: a model that is unlike all others, or
    a node or a region that errs or lies, decides what is predicted of that model alone.

    own: by row, whether this region measured it. Once it has enough of its own, these say what the median and the
    deviation are: a region that lies may say more than this one ever measured.
    """
    if not len(values):
        return values
    known = values[own] if np.count_nonzero(own) >= LEAST_GROUPS else values
    middle = np.median(known)
    most = _MOST_DEVIATIONS * max(1.4826 * float(np.median(np.abs(known - middle))), _LEAST_DEVIATION)
    bounded: NDArray[np.float64] = values.clip(middle - most, middle + most)
    return bounded
