"""Ranks candidates by one objective, for placing, moving, bidding and consolidating.

The objective of a place is the weighted geometric mean of its terms: the product of (value / scale) to the power of the
term's weight, 0 best. It is kept as its logarithm. Whatever the scales are, they multiply the objective of all places
of a workload by the same factor. So no scale, and no device that is not chosen, ever decides between two others; any
other mean of several quantities needs scales that do (docs/decisions/0034-objective.md).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import ScoreTerm
from shoal.coordinator.core.placement.score.term import ServedFigures
from shoal.types import stable_hash
from shoal.types.workload import Intent, Weights

TermValues = tuple[float, ...]
"""One value for each of `score.TERMS`, in its order; NaN where unknown."""
UNKNOWN: Final = 1e6
"""Logarithm that an unknown value counts as: worse than any known one, whatever the others are."""
PREFERENCE: Final = 1e7
"""What each alternative of `prefer` that comes before a place adds to the logarithm: more than any objective."""
WORST: Final = 1e6
"""The largest ratio of two objectives that is told apart."""


def predicted_values(scope: Scope, option: Option, intent: Intent, replicas: int) -> TermValues:
    """Values predicted for a replica on a candidate."""
    return tuple(term.predict(scope, option, intent, replicas) for term in score.TERMS)


def weighed_values(scope: Scope, option: Option, intent: Intent, replicas: int) -> TermValues:
    """The same with NaN for terms without a weight: what ranking needs, in less time."""
    return tuple(
        term.predict(scope, option, intent, replicas) if intent.weights.get(term.name) else math.nan
        for term in score.TERMS
    )


def served_values(served: ServedFigures) -> TermValues:
    """Values of what is served or offered."""
    return tuple(term.read(served) for term in score.TERMS)


def shares(weights: Weights) -> NDArray[np.float64]:
    """The weight of each term; their sum is 1, or 0 where no term has a weight."""
    found = np.array([weights.get(term.name, 0.0) for term in score.TERMS])
    return found / (found.sum() or 1.0)


def logarithms(figures: Sequence[TermValues]) -> NDArray[np.float64]:
    """The logarithm of each value, shaped (rows, terms); UNKNOWN where the value is not finite."""
    table = np.asarray(figures, dtype=np.float64).reshape(len(figures), len(score.TERMS))
    least = np.array([term.least for term in score.TERMS])
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(table), np.log(np.maximum(table, least)), UNKNOWN)


def objectives(figures: Sequence[TermValues], weights: Weights) -> NDArray[np.float64]:
    """The logarithm of the objective of each row, lower is better.

    Equal rows have equal objectives, whatever other rows there are: a product of matrices may round them by where they
    stand."""
    found = np.zeros(len(figures))
    for column, share in zip(logarithms(figures).T, shares(weights), strict=True):
        found += column * share
    return found


def objective(values: TermValues, weights: Weights) -> float:
    """The logarithm of one objective."""
    return float(objectives([values], weights)[0])


def explain_scores(figures: Sequence[TermValues], weights: Weights) -> tuple[list[tuple[ScoreTerm, ...]], list[float]]:
    """Terms and score of each row of `figures`, as multiples of those of the best row: 1 is as good as the best."""
    if not figures:
        return [], []
    logs, share = logarithms(figures), shares(weights)
    total = logs @ share
    best = int(np.argmin(total))
    with np.errstate(over="ignore"):
        parts, scores = np.exp(logs - logs[best]), np.exp(total - total[best])
    terms = [
        tuple(
            ScoreTerm(term.name, weight, value, term.unit, part if math.isfinite(value) else math.nan)
            for term, weight, value, part in zip(score.TERMS, share.tolist(), row, ratios, strict=True)
        )
        for row, ratios in zip(figures, parts.tolist(), strict=True)
    ]
    return terms, scores.tolist()


def gain(new: TermValues, old: TermValues, weights: Weights) -> float:
    """The share by which `new` is better than `old`: 1 - the ratio of their objectives. A term whose old value is
    unknown counts as equal, so that nothing moves because a figure became known. One whose new value alone is unknown
    makes it WORST times worse."""
    was, will = logarithms([old])[0], logarithms([new])[0]
    change = np.where(was >= UNKNOWN, 0.0, will - was) @ shares(weights)
    return 1.0 - math.exp(min(float(change), math.log(WORST)))


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


def tie_breaks_of(seed: int, workload: str, places: Iterable[tuple[str, str, str]]) -> list[int]:
    """An order among equals that depends on the seed and the names alone, never on the order of evaluation. places:
    node, device and variant of each."""
    numbers = [place_number(node, device) ^ variant_number(variant) for node, device, variant in places]
    return [int(each) for each in tie_breaks(seed, workload, np.array(numbers, dtype=np.uint64))]


def tie_breaks(seed: int, workload: str, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`tie_breaks_of` places whose numbers are known: of each, the bits in which `place_number` and `variant_number`
    differ.

    The finaliser of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014) spreads
    what differs over all bits. So the order of two places in one workload tells nothing of that in another."""
    found = places ^ np.uint64(_number(str(seed), workload))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    return found ^ (found >> np.uint64(31))


def place_number(node: str, device: str) -> int:
    """64 bits that stand for a device where equals are put in order."""
    return _number("place", node, device)


def variant_number(variant: str) -> int:
    """64 bits that stand for a model's variant where equals are put in order."""
    return _number("variant", variant)


def _number(*names: str) -> int:
    return int.from_bytes(stable_hash.digest(*names))
