"""Ranks feasible candidates: terms normalised over all of them and weighted by the policy, and the Pareto front."""

import math
from collections.abc import Sequence

import numpy as np

from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import ScoreTerm
from shoal.coordinator.core.placement.score.term import ServedFigures
from shoal.types import stable_hash
from shoal.types.workload import Intent, Weights

TermValues = tuple[float, ...]
"""One value for each of `score.TERMS`, in its order; NaN where unknown."""
UNKNOWN_SCORE = 1.0
"""Normalised value of an unknown term: no better than the worst known value."""


def predicted_values(scope: Scope, option: Option, intent: Intent, replicas: int) -> TermValues:
    """Values predicted for a replica on a candidate."""
    return tuple(term.predict(scope, option, intent, replicas) for term in score.TERMS)


def served_values(served: ServedFigures) -> TermValues:
    """Values of what is served or offered."""
    return tuple(term.read(served) for term in score.TERMS)


def shares(weights: Weights) -> tuple[float, ...]:
    """The weight of each term."""
    return tuple(weights.get(term.name, 0.0) for term in score.TERMS)


def scores_of(figures: Sequence[TermValues], weights: Weights) -> tuple[list[tuple[ScoreTerm, ...]], list[float]]:
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
    share = shares(weights)
    terms = [
        tuple(
            ScoreTerm(term.name, weight, value, term.unit, part)
            for term, weight, value, part in zip(score.TERMS, share, row, parts, strict=True)
        )
        for row, parts in zip(figures, normalised.tolist(), strict=True)
    ]
    return terms, (normalised @ np.asarray(share)).tolist()


def gain(new: TermValues, old: TermValues, weights: Weights) -> float:
    """The share by which `new` is better than `old`: 1 - weighted mean of the ratios. An unknown term counts as
    equal."""
    ratios = [a / b if math.isfinite(a) and math.isfinite(b) and b > 0 else 1.0 for a, b in zip(new, old, strict=True)]
    share = shares(weights)
    return 1 - math.fsum(weight * ratio for weight, ratio in zip(share, ratios, strict=True)) / (math.fsum(share) or 1)


def pareto(figures: Sequence[TermValues]) -> list[bool]:
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
