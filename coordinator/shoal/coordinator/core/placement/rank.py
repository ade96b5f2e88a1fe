"""Ranks feasible candidates: terms normalised over all of them and weighted by the policy, and the Pareto front."""

import math
from collections.abc import Sequence

import numpy as np

from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import ScoreTerm
from shoal.types import stable_hash
from shoal.types.workload import Intent, Weights

TERM_NAMES = ("latency", "cost", "energy")
TERM_UNITS = ("s", "USD/h", "J/inference")
UNKNOWN_SCORE = 1.0
"""Normalised value of an unknown term: no better than the worst known value."""


def score_values(scope: Scope, option: Option, intent: Intent, replicas: int) -> tuple[float, float, float]:
    """Predicted (p95 latency s, USD/h, J per inference); NaN where unknown."""
    joules = math.nan if option.prediction is None else option.prediction.joules.mid
    return scope.latency_s(option, intent, replicas), option.cost, joules


def score(
    figures: Sequence[tuple[float, float, float]], weights: Weights
) -> tuple[list[tuple[ScoreTerm, ...]], list[float]]:
    """Terms and weighted sum (0 best, 1 worst) of each row of `figures`."""
    if not figures:
        return [], []
    table = np.asarray(figures, dtype=np.float64)
    table[~np.isfinite(table)] = np.nan
    known = ~np.isnan(table)
    low = np.min(np.where(known, table, np.inf), axis=0)
    high = np.max(np.where(known, table, -np.inf), axis=0)
    span = np.where(known.any(axis=0), high - low, 0.0)
    normalised = np.where(known, (table - low) / np.where(span > 0, span, 1.0), UNKNOWN_SCORE)
    share = (weights.latency, weights.cost, weights.energy)
    terms = [
        tuple(
            ScoreTerm(name, weight, value, unit, part)
            for name, weight, value, unit, part in zip(TERM_NAMES, share, row, TERM_UNITS, parts, strict=True)
        )
        for row, parts in zip(figures, normalised.tolist(), strict=True)
    ]
    return terms, (normalised @ np.asarray(share)).tolist()


def gain(new: Sequence[float], old: Sequence[float], weights: Weights) -> float:
    """The share by which `new` is better than `old`: 1 - weighted mean of the ratios. An unknown term counts as
    equal."""
    ratios = [a / b if math.isfinite(a) and math.isfinite(b) and b > 0 else 1.0 for a, b in zip(new, old, strict=True)]
    share = (weights.latency, weights.cost, weights.energy)
    return 1 - math.fsum(weight * ratio for weight, ratio in zip(share, ratios, strict=True)) / (math.fsum(share) or 1)


def pareto(figures: Sequence[tuple[float, float, float]]) -> list[bool]:
    """True for rows that no other row dominates. A row dominates another if it is as good in every term and better in
    one. Unknown counts as infinite.

    Only an earlier row in lexical order can dominate, and only a row on the front, so one pass over the sorted rows is
    enough.
    """
    rows = [tuple(math.inf if math.isnan(value) else value for value in row) for row in figures]
    front = list[tuple[float, ...]]()
    on_front = [False] * len(rows)
    for index in sorted(range(len(rows)), key=rows.__getitem__):
        row = rows[index]
        if not any(best != row and all(a <= b for a, b in zip(best, row, strict=True)) for best in front):
            on_front[index] = True
            if not front or front[-1] != row:
                front.append(row)
    return on_front


def tie_break(seed: int, *names: str) -> bytes:
    """An order among equals that depends on the seed and the names alone, never on the order of evaluation."""
    return stable_hash.digest(str(seed), *names)
