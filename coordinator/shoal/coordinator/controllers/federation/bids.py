"""Bids of this region as stored, found by what messages of other regions name."""

from dataclasses import dataclass
from typing import Any, Final

from shoal.coordinator import codec
from shoal.coordinator.core.catalog.model import Guest
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation.bid import guest_intent, origin_rtt_s
from shoal.coordinator.core.negotiation.hold import BidState, GrantedBid, HoldTerms
from shoal.coordinator.core.placement.model import Reservation
from shoal.coordinator.ports import Store
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.offer import Offer, Solicitation
from shoal.types.units import Elapsed, Wall

BIDS: Final = "bids/"


@dataclass(frozen=True, slots=True)
class StoredBid:
    """A bid as stored."""

    state: BidState
    # When the bid was made.
    since: Wall


@dataclass(frozen=True, slots=True)
class TrackedBid:
    """A bid with the revision of its stored state."""

    state: BidState
    # When the bid was made.
    since: Wall
    # Store revision of the stored state; 0: not stored yet.
    revision: int
    # When this process last wrote or read the stored state.
    written_at: Elapsed

    @property
    def offer(self) -> Offer:
        return hold.offer_of(self.state)

    @property
    def grant(self) -> GrantedBid | None:
        return hold.agreement_of(self.state)


async def load_guests(store: Store, region: str) -> tuple[Guest, ...]:
    """Guest workloads of `region` by the stored bids, for read-only followers."""
    stored = [codec.load(StoredBid, record.value) for record in await store.scan(BIDS)]
    return tuple(guest_of(granted, region) for each in stored if (granted := hold.agreement_of(each.state)) is not None)


def guest_of(granted: GrantedBid, region: str) -> Guest:
    """The workload of an agreement, as `region` runs it."""
    intent = guest_intent(granted.asked, granted.offer, granted.award.agreement)
    return Guest(granted.offer.origin, intent, origin_rtt_s(granted.asked, region))


class BidRepository:
    """All bids that are remembered, by id."""

    def __init__(self) -> None:
        self.all: dict[str, TrackedBid] = {}
        self.open: dict[str, TrackedBid] = {}
        """Bids that are not closed."""
        self._of_solicitation: dict[tuple[str, str, int], str] = {}
        """(origin, solicitation, round) -> bid."""
        self._of_agreement: dict[str, str] = {}
        """agreement -> bid."""

    async def start(self, store: Store, now: Elapsed, terms: HoldTerms) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        for record in await store.scan(BIDS):
            stored = codec.load(StoredBid, record.value)
            state = hold.restore(stored.state, now, terms)
            self.put(record.key.removeprefix(BIDS), TrackedBid(state, stored.since, record.revision, now))

    def of_solicitation(self, asked: Solicitation) -> TrackedBid | None:
        """The bid that answered it; None: none did."""
        name = self._of_solicitation.get((asked.origin, asked.id, asked.round))
        return self.all[name] if name is not None else None

    def of_agreement(self, agreement: str) -> str | None:
        """Id of the bid that became the agreement; None: none did."""
        return self._of_agreement.get(agreement)

    def require(self, bid: str, by: str) -> TrackedBid:
        """The bid, if `by` is its origin. Others do not learn that it exists. Raises ShoalError(BID_UNKNOWN)."""
        found = self.all.get(bid)
        if found is None or found.offer.origin != by:
            raise unknown_bid(bid)
        return found

    def require_agreement(self, agreement: str, by: str) -> str:
        """Id of the agreement's bid, if `by` is its origin. Raises ShoalError(AGREEMENT_UNKNOWN)."""
        bid = self._of_agreement.get(agreement)
        if bid is None or self.all[bid].offer.origin != by:
            raise unknown_agreement(agreement)
        return bid

    def reservations_of(self, origin: str, kinds: Any, now: Elapsed) -> list[Reservation]:
        """Reservations of the origin's bids in these states."""
        bids = (each for each in self.open.values() if each.offer.origin == origin and isinstance(each.state, kinds))
        return [room for each in bids for room in hold.reservations_of(each.state, now)]

    def put(self, name: str, bid: TrackedBid | None) -> None:
        """None: forgets it."""
        known = self.all.pop(name, None)
        self.open.pop(name, None)
        if known is not None and bid is None:
            self._of_solicitation.pop((known.offer.origin, known.offer.solicitation, known.offer.round), None)
            self._of_agreement.pop(hold.agreement_name(known.state), None)
        if bid is not None:
            self.all[name] = bid
            if not isinstance(bid.state, hold.ClosedBid):
                self.open[name] = bid
            self._of_solicitation[bid.offer.origin, bid.offer.solicitation, bid.offer.round] = name
            if agreement := hold.agreement_name(bid.state):
                self._of_agreement[agreement] = name

    def keep_renewal(self, name: str, bid: TrackedBid) -> None:
        """Takes a longer lease that is not written."""
        self.all[name] = self.open[name] = bid


def unknown_bid(bid: str) -> ShoalError:
    return refuse(Code.BID_UNKNOWN, f"bid {bid!r:.80}", "a bid of this region for who awards it", "solicit anew")


def unknown_agreement(agreement: str) -> ShoalError:
    return refuse(Code.AGREEMENT_UNKNOWN, f"agreement {agreement!r:.80}", "one with this region", "solicit anew")
