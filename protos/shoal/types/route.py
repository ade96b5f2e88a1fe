"""Routes: where a front may send requests for a workload."""

from dataclasses import dataclass
from enum import StrEnum

from shoal.types.workload import WorkloadKey


class EndpointKind(StrEnum):
    LOCAL = "local"
    """A worker of this very node; `assignment` names it."""
    AGENT = "agent"
    """The front of another agent of this region, which must serve it from a local worker."""
    GATEWAY = "gateway"
    """The gateway of another region."""


class EndpointState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    STANDBY = "standby"
    """Takes requests when no ready one does."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica. node: who serves it (the certificate's name that the forwarder must see).

    region, agreement: of a gateway of another region, and under what it serves; empty for one's own."""

    assignment: str
    node: str
    kind: EndpointKind
    address: str
    weight: float
    state: EndpointState
    region: str = ""
    agreement: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """All replicas of one workload. `pending_code` says why there are none, when there are none. stateful: its requests
    are steps of sessions, each of which one replica has."""

    workload: WorkloadKey
    generation: int
    endpoints: tuple[Endpoint, ...]
    pending_code: str = ""
    pending_reason: str = ""
    stateful: bool = False
