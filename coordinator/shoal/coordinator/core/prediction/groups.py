"""Which measurements count as one: those of a model and its near-copies, or of a device class."""

import math
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np

from shoal.coordinator.core.prediction.residuals import Residual
from shoal.coordinator.core.prediction.transfer.known import Floats, Indices

_COPY: Final = 0.05
"""Two models whose mixes with one provider are nearer than this are near-copies: questions are rounded to as much. The
recorded runs (docs/benchmarks.md) do not tell it from 0, 0.02 or 0.1: of 157 cases 143 to 146 are covered with each."""


def number_keys(keys: Sequence[Hashable]) -> Indices:
    """Equal keys have equal numbers, from 0 on, in the order in which they come."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.intp)


def number_architectures(seen: Sequence[Residual], apart: Floats) -> Indices:
    """By row. A model, its near-copies and theirs are of one: a hundred of them tell no more of another than one does.
    apart: squared distances of the mixes."""
    models = number_keys([each.model for each in seen])
    providers = number_keys([each.device_class.provider for each in seen])
    is_near = (apart < _COPY**2) & (providers[:, None] == providers)
    is_same = is_near | (models[:, None] == models)
    groups = np.arange(len(seen))
    while True:
        least = np.where(is_same, groups, len(seen)).min(1)
        least = least[least]  # a group's number is one of its rows
        if (least == groups).all():
            return number_keys(least.tolist())
        groups = least


def quantile_of_groups(scores: Floats, groups: Indices, share: float) -> float:
    """Below which a further group's score is with the probability `share`: each counts once, however many scores it
    has. Of too few groups the largest score.

    Of n scores a further one is at most the k-th with the probability k / (n + 1); between two of them it is taken to
    grow linearly, as in definition 6 of Hyndman, Fan, Sample quantiles in statistical packages, The American
    Statistician 50(4), 1996.
    """
    count = int(groups.max()) + 1
    values, which = np.unique(scores, return_inverse=True)
    counted = np.cumsum(np.bincount(which, 1 / np.bincount(groups)[groups]))
    return float(np.interp(share * (count + 1), counted, values))


def spread_rows(classes: Indices, most: int) -> Indices:
    """At most so many rows, of all device classes alike. classes: by row, which are in the order of their models. Of
    each class every second, third... row is taken, from another one on than of the class before, so that models are
    spread as well."""
    if len(classes) <= most:
        return np.arange(len(classes))
    every = math.ceil(len(classes) / most)
    places, met = np.zeros(len(classes), np.intp), np.zeros(classes.max() + 1, np.intp)
    for row, number in enumerate(classes):
        places[row], met[number] = met[number], met[number] + 1
    return np.sort(np.argsort((places - classes) % every, kind="stable")[:most])
