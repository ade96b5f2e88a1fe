"""How far a guest workload's service is, as its origin is told."""

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.negotiation.hold import BidState, GrantedBid
from shoal.coordinator.core.workloads.routes import has_reachable_gateway
from shoal.types.agreement import ServiceState


def service_state(bid: BidState, routed: int, fleet: Fleet) -> ServiceState:
    """READY with all replicas routed and a gateway that answers; otherwise SHORT if it was READY before, else STARTING.

    routed: its replicas in the routes, on nodes that are not silent. A gateway that has not reported since this
    coordinator started is judged like a replica in the routes: what the origin was last told stands until the gateway
    reports, or is silent for too long. The origin would otherwise take a workload out of its routes that is served.
    """
    if not isinstance(bid, GrantedBid):
        return ServiceState.STOPPING
    # Of a bid that an older version wrote, the stored routes tell.
    has_served = bid.has_served if bid.has_served is not None else routed > 0
    if routed >= bid.offer.replicas and has_reachable_gateway(fleet, has_served=has_served):
        return ServiceState.READY
    return ServiceState.SHORT if has_served else ServiceState.STARTING
