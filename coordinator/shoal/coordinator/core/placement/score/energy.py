"""The energy of one inference."""

import math
from collections.abc import Sequence
from typing import Final

from shoal.coordinator.core.placement.feasible import Option
from shoal.coordinator.core.placement.score.term import ObjectiveTerm
from shoal.types.units import show_joules

NAME: Final = "energy"


def _joules(option: Option) -> float:
    return math.nan if option.prediction is None else option.prediction.joules.mid


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


TERM: Final = ObjectiveTerm(
    name=NAME,
    unit="J/inference",
    label="energy",
    show=show_joules,
    predict=lambda _scope, option, _intent, _replicas: _joules(option),
    read=lambda served: served.joules,
    combine=_mean,
)
