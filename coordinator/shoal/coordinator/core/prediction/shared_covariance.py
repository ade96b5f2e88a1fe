"""By how much measurements of models on devices are alike: what they have in common, times its variance."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from shoal.coordinator.core.prediction.groups import number_keys
from shoal.coordinator.core.prediction.residuals import Residual
from shoal.coordinator.core.prediction.shared_variances import SharedVariances
from shoal.coordinator.core.prediction.transfer.known import Floats, Indices

_REACH: Final = 0.3
"""Over which shares of the seconds two models are alike: a third of the time in other operators."""
_KINDS_TIMES, _OPERATORS_TIMES, _REACHES = (1.0, 4.0), (1.0, 0.25), (_REACH, 2 * _REACH)
"""What the region's own measurements choose from; first what is assumed before there are enough."""


class Assumption(NamedTuple):
    """What is assumed of a region before its measurements are looked at."""

    # What measurements share.
    variances: SharedVariances
    # Over which shares of the seconds two models are alike.
    reach: float = _REACH


class Common(NamedTuple):
    """What two lists of measurements have in common, one with each other: (one, other)."""

    # Whether they are with the same provider: 0 or 1.
    provider: Floats
    # Whether they are on the same device class.
    device_class: Floats
    # Whether they are of the same model.
    model: Floats
    # Squared distance of their mixes.
    apart: Floats


def common(one: Sequence[Residual], other: Sequence[Residual]) -> Common:
    def same(key: Callable[[Residual], Hashable]) -> Floats:
        numbers = number_keys([key(each) for each in (*one, *other)])
        found: Floats = (numbers[: len(one), None] == numbers[len(one) :]).astype(np.float64)
        return found

    left, right = mixes(one), mixes(other)
    apart: Floats = np.maximum((left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T, 0.0)
    return Common(
        same(lambda each: each.device_class.provider),
        same(lambda each: each.device_class),
        same(lambda each: each.model),
        apart,
    )


class CommonWith:
    """What questions have in common with measurements that stay the same: as `common([asked], seen)`, without a look at
    each of these again."""

    def __init__(self, seen: Sequence[Residual]) -> None:
        self._mixes = mixes(seen)
        self._squares = (self._mixes**2).sum(1)
        self._none = np.zeros(len(seen))
        self._providers = _where(each.device_class.provider for each in seen)
        self._classes = _where(each.device_class for each in seen)
        self._models = _where(each.model for each in seen)

    def of(self, asked: Residual) -> Common:
        one = mixes([asked])
        apart: Floats = np.maximum((one**2).sum(1)[:, None] + self._squares - 2 * one @ self._mixes.T, 0.0)
        return Common(
            self._providers.get(asked.device_class.provider, self._none)[None],
            self._classes.get(asked.device_class, self._none)[None],
            self._models.get(asked.model, self._none)[None],
            apart,
        )


def _where(keys: Iterable[Hashable]) -> dict[Hashable, Floats]:
    """By key: 1 where it stands, else 0."""
    numbers = number_keys(known := [*keys])
    return {known[at]: (numbers == number).astype(np.float64) for number, at in enumerate(_firsts(numbers))}


def _firsts(numbers: Indices) -> list[int]:
    """Where each number from 0 on stands first."""
    found: list[int] = np.unique(numbers, return_index=True)[1].tolist()
    return found


def mixes(of: Sequence[Residual]) -> Floats:
    """Shares that add up to 1, which those of a question do not that was rounded; all 0 where a mix is."""
    found = np.array([each.mix for each in of], float)
    sums = found.sum(1, keepdims=True)
    shares: Floats = found / np.where(sums > 0, sums, 1.0)
    return shares


def covariance(assumption: Assumption, shared: Common, shares: Floats, others: Floats) -> Floats:
    """(one, other): of the values. shares, others: of the seconds of each, by kind of kernel."""
    variances, reach = assumption
    alike = np.exp(-shared.apart / (2 * reach**2))
    found: Floats = (
        variances.region
        + shared.provider * (variances.provider + variances.operators * alike + variances.kinds * (shares @ others.T))
        + shared.device_class * variances.device_class
        + shared.model * (variances.model + shared.provider * variances.model_and_provider)
    )
    return found


def assumptions(variances: SharedVariances) -> tuple[Assumption, ...]:
    """Those that a region chooses from: how much of a model's error is that of its kinds of kernels, and how far what
    is left of it reaches. One alone where neither counts."""
    if not variances.kinds:
        return (Assumption(variances),)
    return tuple(
        Assumption(variances._replace(kinds=kinds * variances.kinds, operators=operators * variances.operators), reach)
        for kinds, operators, reach in product(_KINDS_TIMES, _OPERATORS_TIMES, _REACHES)
    )
