"""The p95 latency as the policy measures it."""

import math
from collections.abc import Sequence
from typing import Final

from shoal.coordinator.core.placement.score.term import ObjectiveTerm
from shoal.types.units import show_seconds

NAME: Final = "latency"


def _slowest(values: Sequence[float]) -> float:
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


TERM: Final = ObjectiveTerm(
    name=NAME,
    unit="s",
    label="p95",
    show=show_seconds,
    predict=lambda scope, option, intent, replicas: scope.latency_s(option, intent, replicas),
    read=lambda served: served.latency_p95_s,
    combine=_slowest,
    least=1e-6,  # a microsecond: no request of a model takes less
)
