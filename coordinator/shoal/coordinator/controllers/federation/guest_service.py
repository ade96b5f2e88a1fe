"""How guest workloads are served here: what their origins are told, and what this region earns."""

import math
from collections.abc import Iterable
from dataclasses import replace

from shoal.coordinator import metrics
from shoal.coordinator.controllers.federation.bids import TrackedBid
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation.hold import BidState, GrantedBid, StoppingBid
from shoal.coordinator.core.negotiation.service_state import service_state
from shoal.coordinator.core.workloads.routes import has_reachable_gateway
from shoal.coordinator.core.workloads.service_reports import service_report
from shoal.coordinator.ports import Clock, Meter
from shoal.types.agreement import GUEST_TENANT, ServiceReport, ServiceState
from shoal.types.workload import WorkloadKey


class GuestService:
    """By the last step of the region, and by its fleet now."""

    def __init__(self, workloads: WorkloadsController, clock: Clock, meter: Meter) -> None:
        self._workloads = workloads
        self._clock = clock
        self._meter = meter
        self._earned_at = clock.now()

    def state(self, bid: BidState) -> ServiceState:
        """As `core.negotiation.service_state` defines it."""
        routed = self._workloads.endpoints(WorkloadKey(GUEST_TENANT, hold.agreement_name(bid)))
        return service_state(bid, routed, self._workloads.fleet)

    def has_ready_gateway(self) -> bool:
        """Whether a gateway serves, through which other regions' requests arrive."""
        return has_reachable_gateway(self._workloads.fleet, has_served=False)

    def report(self, bid: TrackedBid) -> ServiceReport:
        """What was served under the bid's agreement, and what that costs."""
        hours = max(0.0, self._clock.wall() - bid.since) / 3600
        agreement = hold.agreement_name(bid.state)
        hosts = self._workloads.hosts(WorkloadKey(GUEST_TENANT, agreement))
        report = service_report(self._workloads.fleet, agreement, hosts)
        return replace(report, cost_usd=bid.offer.cost * hours)

    def earn(self, bids: Iterable[TrackedBid]) -> None:
        """Adds the revenue since the last call, at the prices that were bid."""
        now = self._clock.now()
        hours = (now - self._earned_at) / 3600
        self._earned_at = now
        for bid in bids:
            if isinstance(bid.state, GrantedBid | StoppingBid) and math.isfinite(bid.offer.cost):
                self._meter.add(metrics.EARNED, bid.offer.cost * hours, counterpart=bid.offer.origin)
