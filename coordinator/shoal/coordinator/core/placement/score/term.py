"""What placement, migration and negotiation ask of a score term."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.types.workload import Intent


class ServedFigures(Protocol):
    """What replicas do, or what another region offers. NaN where unknown."""

    @property
    def latency_p95_s(self) -> float: ...

    @property
    def cost(self) -> float: ...

    @property
    def joules(self) -> float: ...

    @property
    def carbon(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ObjectiveTerm:
    """One quantity that an objective weighs. Lower is better."""

    # Name in `optimize` of a policy and in explanations. Of a move's cause too, if a cause has this name.
    name: str
    # Unit of its values.
    unit: str
    # What its value is called in the reason of a move.
    label: str
    # Renders a value.
    show: Callable[[float], str]
    # Predicted value of one replica on a candidate, out of this number of replicas; NaN where unknown.
    predict: Callable[[Scope, Option, Intent, int], float]
    # Value of what is served or offered; NaN where unknown.
    read: Callable[[ServedFigures], float]
    # Value of several replicas together. At least one value is given.
    combine: Callable[[Sequence[float]], float]
    # Smaller values count as this one, so that a figure of 0 is not infinitely better than any other. Above 0.
    least: float
