"""Transfer to a device of which few models were measured: learnt on known devices, each in turn taken as new."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from shoal.coordinator.core.prediction.transfer.known import Floats, Indices, KnownLatencies
from shoal.coordinator.core.prediction.transfer.process import ProcessSettings, covariance, posterior
from shoal.coordinator.core.prediction.transfer.space import ModelSpace, space_for

COVERAGE: Final = 0.9
"""Of intervals."""
UNTAUGHT: Final = 4.0
"""Half an interval in standard deviations, where too few families are known to learn it. Twice and a half what
normal errors would have; the published tables teach 1.2 to 3.1."""
_SHARPNESS: Final = 30.0
"""How much a better way counts for more: exp(-30 x difference of log errors). With 12 or 100 the error on AI Hub's
table changes by less than 3 % of itself."""
_WORST_ERROR: Final = 3.0
"""A relative error counts at most this much when ways are compared, so that one model does not decide."""
_MOST_SHIFT: Final = 3.0
"""Of an estimate for its doubt, in logarithms."""
_TRIALS, _TRIED_MODELS, _LEARNT_MODELS = 3, 150, 1500
"""How often each family is taken as new, on how many models at most it is then judged, of how many in all."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to predict: in which space (`space_for`), and with which variances."""

    settings: ProcessSettings
    kinship: float
    smooth: bool


WAYS: Final = tuple(
    Way(ProcessSettings(noise=noise, nearby=nearby, distance=distance, freedom=freedom), kinship, smooth)
    for noise, (nearby, distance), freedom, kinship, smooth in product(
        (0.0007, 0.005), ((0.002, 1.2), (0.01, 0.6)), (2.0, 100.0), (0.0, 10.0), (False, True)
    )
)
"""Candidates, of which nested validation makes a weighted mean."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """Predicted latencies of some models on one device, in seconds; NaN where no known device ran the model."""

    # (models,): of least expected relative error.
    mid: Floats
    # (models,): ends of the interval that covers a measurement with COVERAGE.
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LearnedTransfer:
    """What the known devices teach about one new device."""

    ways: tuple[Way, ...]
    # Of each way, in the same order; their sum is 1.
    weights: Floats
    # The space of each way, for this device.
    spaces: tuple[ModelSpace, ...]
    # COVERAGE of the errors on known devices taken as new are below so many standard deviations.
    quantile: float

    def predict(self, rows: Indices, seconds: Floats, asked: Indices) -> Transferred:
        """The models `asked`, where `rows` took `seconds` on the device. All are rows of the known table.

        A measurement of a model that no known device ran says nothing about others, and is left out.
        """
        told = ~np.isnan(self.spaces[0].level[rows])
        return _mixed(_all_ways(self.ways, self.spaces, rows[told], np.log(seconds[told]), asked), self)

    def next_to_measure(self, rows: Indices, allowed: Indices) -> int:
        """The row among `allowed` whose measurement leaves the least doubt about all of `allowed`: of the best way,
        after `rows` were measured (Cohn, Ghahramani, Jordan, Active Learning with Statistical Models, 1996)."""
        best = int(self.weights.argmax())
        space, settings = self.spaces[best], self.ways[best].settings
        asked, known = space.rows(allowed), space.rows(rows)
        left = covariance(settings, asked, asked)
        if len(rows):
            across = covariance(settings, known, asked)
            given = covariance(settings, known, known) + settings.noise * np.eye(len(rows))
            left = left - across.T @ np.linalg.solve(given, across)
        gains = (left**2).sum(0) / (np.diag(left) + settings.noise)
        gains[np.isnan(gains) | np.isin(allowed, rows)] = -np.inf
        return int(allowed[gains.argmax()])


def learn(known: KnownLatencies, device: str, count: int, seed: int, ways: Sequence[Way] = WAYS) -> LearnedTransfer:
    """What `known`, without `device` and its family, teaches about it once `count` models are measured on it.

    Each known family in turn is predicted from the others by every way: better ways weigh more. With fewer than
    three families nothing can be tried: then names and features count for nothing, and UNTAUGHT is the quantile.
    """
    ways = tuple(way for way in ways if not way.smooth or known.features.shape[1])
    spaces = _spaces(known, device, ways)
    families = sorted(set(known.families))
    trials = [
        found
        for number, family in enumerate(families if len(families) > 2 else ())
        if (found := _trials(known, family, count, ways, np.random.default_rng([seed, number])))
    ]
    if not trials:
        plain = np.array([not way.kinship and not way.smooth for way in ways], float)
        return LearnedTransfer(ways, plain / plain.sum(), spaces, UNTAUGHT)
    losses = np.mean([np.log(np.mean([_losses(trial) for trial in family], 0)) for family in trials], 0)
    weights = np.exp(-_SHARPNESS * (losses - losses.min()))
    weights /= weights.sum()
    scores = [np.concatenate([_scores(trial, weights) for trial in family]) for family in trials]
    return LearnedTransfer(ways, weights, spaces, _pooled_quantile(scores))


@dataclass(frozen=True, slots=True)
class _Expected:
    """What every way says of some models."""

    # (ways, models): log seconds.
    mean: Floats
    # (ways, models): variance of that.
    variance: Floats
    # (ways,): variance of a measurement, beyond that.
    noise: Floats
    # How many models were measured.
    measured: int


@dataclass(frozen=True, slots=True)
class _Trial:
    """A known device taken as new."""

    # What every way says of models that were measured on it, but not shown.
    expected: _Expected
    # (models,): log seconds that they took.
    actual: Floats


def _spaces(known: KnownLatencies, device: str, ways: Sequence[Way]) -> tuple[ModelSpace, ...]:
    """One for each way; ways that share a space share the object."""
    keys = [(way.kinship, way.smooth) for way in ways]
    made = {key: space_for(known, device, *key) for key in set(keys)}
    return tuple(made[key] for key in keys)


def _trials(
    known: KnownLatencies, family: str, count: int, ways: Sequence[Way], chance: np.random.Generator
) -> list[_Trial]:
    """Several devices of the family, or several choices of measured models of its only one. Empty: too few models."""
    known = known.rows(chance.permutation(len(known.features))[:_LEARNT_MODELS])
    others = known.without(family)
    columns = chance.permutation([number for number, each in enumerate(known.families) if each == family])
    trials = []
    for column in np.resize(columns, _TRIALS).tolist():
        spaces = _spaces(others, known.devices[column], ways)
        told = known.log_seconds[:, column]
        rows = chance.permutation(np.flatnonzero(~np.isnan(told) & ~np.isnan(spaces[0].level)))
        shown, hidden = rows[:count], rows[count : count + _TRIED_MODELS]
        if len(hidden):
            trials.append(_Trial(_all_ways(ways, spaces, shown, told[shown], hidden), told[hidden]))
    return trials


def _all_ways(
    ways: Sequence[Way], spaces: Sequence[ModelSpace], rows: Indices, log_seconds: Floats, asked: Indices
) -> _Expected:
    found = []
    for way, space in zip(ways, spaces, strict=True):
        deviations = log_seconds - space.level[rows]
        found.append(posterior(way.settings, space.rows(rows), deviations, space.rows(asked)))
    return _Expected(
        np.array([each.mean for each in found]) + np.array([space.level[asked] for space in spaces]),
        np.array([each.variance for each in found]),
        np.array([each.noise for each in found]),
        len(rows),
    )


def _least_error(expected: _Expected) -> Floats:
    """(ways, models): the log estimate whose relative error is expected to be least.

    If a latency is log-normal with mean m and variance v of its logarithm, then E|q - y| / y is least at m - v: the
    median of the density that is proportional to p(y) / y. Before the first measurement it is m: nearly all of v is
    then how fast the device is, of which the few known devices tell too little.
    """
    return expected.mean - (np.minimum(expected.variance, _MOST_SHIFT) if expected.measured else 0.0)


def _mixed(expected: _Expected, learned: LearnedTransfer) -> Transferred:
    middle, spread = _middle_and_spread(expected, learned.weights)
    half = learned.quantile * spread
    mid = np.clip(learned.weights @ _least_error(expected), middle - half, middle + half)
    return Transferred(np.exp(mid), np.exp(middle - half), np.exp(middle + half))


def _middle_and_spread(expected: _Expected, weights: Floats) -> tuple[Floats, Floats]:
    """(models,) each: mean and standard deviation of the mixture of all ways, in logarithms."""
    middle = weights @ expected.mean
    variance = weights @ (expected.variance + expected.noise[:, None] + (expected.mean - middle) ** 2)
    return middle, np.sqrt(variance)


def _losses(trial: _Trial) -> Floats:
    """(ways,): mean relative error."""
    errors = np.abs(np.expm1(_least_error(trial.expected) - trial.actual))
    losses: Floats = np.minimum(errors, _WORST_ERROR).mean(1)
    return losses


def _scores(trial: _Trial, weights: Floats) -> Floats:
    """(models,): errors in standard deviations."""
    middle, spread = _middle_and_spread(trial.expected, weights)
    scores: Floats = np.abs(trial.actual - middle) / spread
    return scores


def _pooled_quantile(scores: Sequence[Floats]) -> float:
    """The COVERAGE quantile of scores, every family with the same weight however many models it has.

    Split conformal prediction (Vovk, Gammerman, Shafer, 2005), where families, not pairs, are exchangeable.
    """
    values = np.concatenate(scores)
    shares = np.concatenate([np.full(len(each), 1 / len(each) / len(scores)) for each in scores])
    order = values.argsort()
    found = values[order][np.searchsorted(shares[order].cumsum(), COVERAGE).clip(max=len(values) - 1)]
    return float(found * np.sqrt(1 + 1 / len(scores)))
