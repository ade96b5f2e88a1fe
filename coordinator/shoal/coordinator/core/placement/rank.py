"""How good a feasible candidate is: terms normalised over all of them, weighted by the policy; and the Pareto front."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import ScoreTerm
from shoal.types.workload import Intent, Weights

NAMES = ("latency", "cost", "energy")
UNITS = ("s", "USD/h", "J/inference")
WORSE = 1.0
"""Normalised value of a term that is unknown: no better than the worst that is known."""


def values(scope: Scope, option: Option, intent: Intent, replicas: int) -> tuple[float, float, float]:
    """(p95 latency s, USD/h, J per inference) as predicted; NaN where unknown."""
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
    normalised = np.where(known, (table - low) / np.where(span > 0, span, 1.0), WORSE)
    share = (weights.latency, weights.cost, weights.energy)
    terms = [
        tuple(
            ScoreTerm(name, weight, value, unit, part)
            for name, weight, value, unit, part in zip(NAMES, share, row, UNITS, parts, strict=True)
        )
        for row, parts in zip(figures, normalised.tolist(), strict=True)
    ]
    return terms, (normalised @ np.asarray(share)).tolist()


def gain(new: Sequence[float], old: Sequence[float], weights: Weights) -> float:
    """By what share `new` betters `old`: 1 - weighted mean of the ratios; a term that is unknown counts as even."""
    ratios = [a / b if math.isfinite(a) and math.isfinite(b) and b > 0 else 1.0 for a, b in zip(new, old, strict=True)]
    share = (weights.latency, weights.cost, weights.energy)
    return 1 - math.fsum(weight * ratio for weight, ratio in zip(share, ratios, strict=True)) / (math.fsum(share) or 1)


def pareto(figures: Sequence[tuple[float, float, float]]) -> list[bool]:
    """Rows that no other row matches or betters in every term and betters in one. Unknown counts as infinite.

    In lexical order only an earlier row can dominate, and a row on the front at that."""
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


def tie(seed: int, *names: str) -> bytes:
    """An order among equals that depends on the seed and the names alone, never on who was looked at first."""
    return hashlib.blake2b("\0".join((str(seed), *names)).encode(), digest_size=8).digest()
