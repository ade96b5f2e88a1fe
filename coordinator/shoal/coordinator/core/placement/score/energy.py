"""The energy that the region spends more for each inference: the inference's own, and that of staying awake for it."""

import math
from collections.abc import Sequence
from typing import Final

from shoal.coordinator.core.placement.score.term import ObjectiveTerm
from shoal.types.units import show_joules

NAME: Final = "energy"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


TERM: Final = ObjectiveTerm(
    name=NAME,
    unit="J/inference",
    label="energy",
    show=show_joules,
    predict=lambda scope, option, intent, replicas: scope.energy_j(option, intent, replicas),
    read=lambda served: served.joules,
    combine=_mean,
    least=1e-6,  # a microjoule: below what any meter here resolves
)
