"""For whom this region runs workloads: by its documents, and as long as it does not leave its federation."""

import math
from collections.abc import Mapping
from typing import Final

from shoal.coordinator.controllers.federation.bids import TrackedBid
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.catalog.model import Catalog
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation.bid import residency_refusal
from shoal.coordinator.core.negotiation.hold import BidState, StoppingBid
from shoal.coordinator.core.negotiation.trust import trade_refusal
from shoal.coordinator.ports import Clock
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Solicitation
from shoal.types.units import Elapsed, Seconds

NOTICE_S: Final = Seconds(30.0)
"""How long this region still serves after it gave notice."""


class HostingRules:
    """By the documents as they are applied now."""

    def __init__(self, region: str, workloads: WorkloadsController, clock: Clock) -> None:
        self._region = region
        self._workloads = workloads
        self._clock = clock
        self._checked_catalog: Catalog | None = None
        self._drains_until = Elapsed(-math.inf)

    def drain(self, until: Elapsed) -> None:
        """Until then there are no bids, and every agreement is forbidden."""
        self._drains_until = until

    def refusal(self, asked: Solicitation) -> Refusal | None:
        """Why this region's documents do not allow it; None if they do."""
        catalog = self._workloads.catalog
        forbidden = trade_refusal(catalog.trades(self._region), asked.origin, asked.workload.tenant)
        return forbidden or residency_refusal(asked, catalog.facts(self._region, {}))

    def refusal_to_bid(self, asked: Solicitation) -> Refusal | None:
        """As `refusal`, for a new bid."""
        if (forbidden := self.refusal(asked)) is not None or not self._is_draining:
            return forbidden
        return Refusal(Code.TRADE_DENIED, f"{self._region} leaves the federation", "a region that stays")

    def forbidden_agreements(self, bids: Mapping[str, TrackedBid]) -> dict[str, Code]:
        """Agreements that this region may no longer keep, by bid. Among them are those whose origin gave notice, until
        this region has given a shorter one."""
        granted = {
            name: agreement
            for name, bid in bids.items()
            if (agreement := hold.agreement_of(bid.state)) is not None and not self._ends_soon(bid.state)
        }
        if self._is_draining:
            return dict.fromkeys(granted, Code.AGREEMENT_ENDED)
        if self._workloads.catalog is self._checked_catalog:
            return {}
        found = {
            name: forbidden.code
            for name, state in granted.items()
            if (forbidden := self.refusal(state.asked)) is not None
        }
        if not found:
            self._checked_catalog = self._workloads.catalog
        return found

    def _ends_soon(self, state: BidState) -> bool:
        """Whether a notice of this region would end it no earlier."""
        return isinstance(state, StoppingBid) and state.ends <= self._clock.now() + NOTICE_S

    @property
    def _is_draining(self) -> bool:
        return self._clock.now() < self._drains_until
