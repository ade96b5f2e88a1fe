"""Standing of other regions here: how much of the capacity that was held for them they awarded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.core.negotiation import standing
from shoal.coordinator.core.negotiation.hold import BidState, ClosedBid, HeldBid, HoldTerms
from shoal.coordinator.core.negotiation.standing import RegionStanding
from shoal.types.units import Elapsed

STANDINGS: Final = "origins"
REGIONS_MOST: Final = 1000
"""Other regions of which something is remembered at most."""


@dataclass(frozen=True, slots=True)
class Standings:
    """Standing of the regions that bids were held for."""

    # By region that bids were held for, from this region's own experience.
    of: Mapping[str, RegionStanding] = field(default_factory=dict)


class StandingRepository:
    """The standings as stored. A bid that ends a hold writes them in its own transaction."""

    def __init__(self, context: ControllerContext, access: FederationAccess, terms: HoldTerms) -> None:
        self._store = context.store
        self._clock = context.clock
        self._meter = context.meter
        self._access = access
        self._hold_s = terms.hold_s
        self._current = Standings()
        self._held_since: dict[str, Elapsed] = {}
        """When this process began to hold capacity for each bid that is neither awarded nor released."""

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        if (found := await self._store.read(STANDINGS)) is not None:
            self._current = codec.load(Standings, found.value)

    def value(self, origin: str) -> float:
        """How much of what is held for a region is expected to be awarded. This region's own experience takes
        precedence over the federation's.
        """
        known = self._current.of.get(origin)
        if known is not None:
            return standing.value(known, self._clock.now())
        member = self._access.member_of(origin)
        return member.standing if member is not None else 1.0

    def after(self, bid: str, before: BidState, after: BidState, now: Elapsed) -> Standings | None:
        """The standings after this transition of the bid; None if it does not end a hold. Holds of an earlier process
        do not count, because the restart cut them short.
        """
        since = self._held_since.get(bid)
        if since is None or isinstance(after, HeldBid) or not isinstance(before, HeldBid):
            return None
        wasted = min(1.0, (now - since) / self._hold_s) if isinstance(after, ClosedBid) else 0.0
        origin = before.offer.origin
        if wasted >= 1.0:
            self._meter.count(metrics.HOLDS_UNCLAIMED, counterpart=origin)
        known = {**self._current.of, origin: standing.with_hold(self._current.of.get(origin), wasted, now)}
        oldest = min(known, key=lambda each: known[each].at) if len(known) > REGIONS_MOST else None
        return Standings({region: each for region, each in known.items() if region != oldest})

    def adopt(self, bid: str, after: BidState, stored: Standings | None, now: Elapsed) -> None:
        """Follows a stored transition. stored: the standings that it wrote; None: it wrote none."""
        if stored is not None:
            self._current = stored
        if isinstance(after, HeldBid):
            self._held_since[bid] = now
        else:
            self._held_since.pop(bid, None)

    def excuse(self, bid: str) -> None:
        """The end of this hold does not count, because this region refuses its award."""
        self._held_since.pop(bid, None)
