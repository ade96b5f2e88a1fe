"""Routes: where a front may send requests for a workload."""

from dataclasses import dataclass
from enum import StrEnum

from shoal.types.codes import Code
from shoal.types.workload import WorkloadKey


class EndpointKind(StrEnum):
    # A worker of this node; `assignment` names it.
    LOCAL = "local"
    # The front of another agent of this region, which must serve the request from a local worker.
    AGENT = "agent"
    # A gateway that leads to another region: its own gateway, or, for other nodes, one of this region.
    GATEWAY = "gateway"


class EndpointState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    # Takes requests when no ready endpoint does.
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica, or a gateway that leads to some."""

    # The replica's assignment id; `AGREEMENT/GATEWAY` for a gateway.
    assignment: str
    # Node that serves it: the name that the forwarder must see in its certificate.
    node: str
    # How it is reached.
    kind: EndpointKind
    # host:port of its front; empty for LOCAL.
    address: str
    # Share of new requests, relative to the other endpoints of the route; 0: none.
    weight: float
    # Whether it takes new requests.
    state: EndpointState
    # Region of the gateway; empty within this region.
    region: str = ""
    # Agreement under which the other region serves; empty within this region.
    agreement: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """All endpoints of one workload."""

    # Workload that it is for.
    workload: WorkloadKey
    # Grows with each change of the workload's routes.
    generation: int
    # Where requests may go; empty: nowhere yet.
    endpoints: tuple[Endpoint, ...]
    # Why there are no endpoints; empty where there are some.
    pending_code: str = ""
    # `pending_code` in words; empty where there is none.
    pending_reason: str = ""
    # True: requests are steps of sessions, and one replica holds each session.
    stateful: bool = False

    @property
    def is_unknown(self) -> bool:
        """Whether it answers a subscription to a workload that may not enter at the node, or does not exist."""
        return self.pending_code == Code.MODEL_NOT_FOUND
