"""Answers to solicitations of other regions.

A bid takes as long as a plan of the region, so it is computed beside the loop, as moves are (`looks.py`): one at a
time, and no region has more than one among those that are next. What a bid holds must still be free when it is held.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.coordinator import metrics
from shoal.coordinator.controllers.federation.bid_transitions import BidTransitions
from shoal.coordinator.controllers.federation.bids import BidRepository
from shoal.coordinator.controllers.federation.guest_service import GuestService
from shoal.coordinator.controllers.federation.hosting_rules import HostingRules
from shoal.coordinator.controllers.federation.standings import REGIONS_MOST
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.runner import Compute
from shoal.coordinator.controllers.workloads.looks import MOST_LOOKS
from shoal.coordinator.controllers.workloads.node_marks import are_within
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation.bid import BidAnswer, answer_solicitation
from shoal.coordinator.core.negotiation.hold import BidState, GrantedBid, HeldBid, HoldTerms, StoppingBid
from shoal.coordinator.core.placement.model import Reservation
from shoal.coordinator.core.rate_limit import RateLimiter, TokenBucket
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Answer, Decline, Offer, Solicitation
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import TradeRule

SOLICITATION_BURST: Final = 100.0
SOLICITATIONS_PER_S: Final = 20.0
COMPUTING_SHARE: Final = 0.5
"""Of one processor, for the bids to one region: a second of computing counts as 40 solicitations."""
OPEN_OF_ORIGIN: Final = 8
"""Solicitations of one region that are answered at a time: the one that is computed and those that wait."""
OPEN_MOST: Final = 64
"""Of all regions."""


@dataclass(slots=True)
class _Origin:
    """The solicitations of one region."""

    # Held by the one that is computed, or is next among those of other regions.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    # That one and those that wait.
    open_count: int = 0


@dataclass(frozen=True, slots=True)
class _ShareTerms:
    """What the share of the region that an origin may hold depends on."""

    trades: tuple[TradeRule, ...]
    # What its open bids and agreements take.
    used: tuple[Reservation, ...]
    # The part of it that was not awarded.
    unawarded: tuple[Reservation, ...]

    def still_allow(self, now: "_ShareTerms") -> bool:
        """Whether what the origin could hold it still can: an origin that gives up or is granted what it holds changes
        nothing."""
        return (
            now.trades == self.trades and are_within(now.used, self.used) and are_within(now.unawarded, self.unawarded)
        )


class Bidder:
    """Makes the bids of a region."""

    def __init__(
        self,
        context: ControllerContext,
        workloads: WorkloadsController,
        bids: BidRepository,
        transitions: BidTransitions,
        rules: HostingRules,
        service: GuestService,
        terms: HoldTerms,
        *,
        standing: Callable[[str], float],
        exclusive: Callable[[], AbstractAsyncContextManager[None]],
        compute: Compute,
        thread_time: Callable[[], float],
    ) -> None:
        """standing: of an origin here. exclusive: held while bids change; no step of the region runs meanwhile.
        compute: where bids are computed. thread_time: seconds of processor time of the thread that asks.
        """
        self._region = context.name
        self._clock = context.clock
        self._ids = context.ids
        self._meter = context.meter
        self._workloads = workloads
        self._bids = bids
        self._transitions = transitions
        self._rules = rules
        self._service = service
        self._terms = terms
        self._standing = standing
        self._exclusive = exclusive
        self._compute = compute
        self._thread_time = thread_time
        self._limits = RateLimiter(SOLICITATION_BURST, SOLICITATIONS_PER_S, REGIONS_MOST)
        self._origins = dict[str, _Origin]()
        self._computing = asyncio.Lock()

    async def answer(self, asked: Solicitation) -> Answer:
        """An offer with a hold, an indicative offer or counter-offer without one, or a decline. A repeated solicitation
        gets the first answer again.

        Raises ShoalError(OVERLOADED | REPLAYED | STORE_FULL | STORE_UNAVAILABLE).
        """
        bucket = self._limits.bucket_of(asked.origin, self._clock.now())
        if not bucket.allows(self._clock.now()):
            raise self._overload(asked.origin, f"{SOLICITATIONS_PER_S:g} a second, and fewer of those that take long")
        bucket.spend(self._clock.now())
        async with self._exclusive():
            if (known := self._known_answer(asked)) is not None:
                return known
        late_at = Elapsed(self._clock.now() + asked.answer_s)
        async with self._turn(asked):
            return await self._bid(asked, bucket, late_at)

    @asynccontextmanager
    async def _turn(self, asked: Solicitation) -> AsyncIterator[None]:
        """Origins take turns."""
        origin = self._origins.get(asked.origin) or _Origin()
        if origin.open_count >= OPEN_OF_ORIGIN or sum(each.open_count for each in self._origins.values()) >= OPEN_MOST:
            raise self._overload(asked.origin, f"{OPEN_OF_ORIGIN} at a time, {OPEN_MOST} of all regions")
        self._origins[asked.origin] = origin
        origin.open_count += 1
        try:
            async with origin.turn, self._computing:
                yield
        finally:
            origin.open_count -= 1
            if not origin.open_count:
                del self._origins[asked.origin]

    def _overload(self, origin: str, limit: str) -> ShoalError:
        self._meter.count(metrics.SOLICITATIONS_REFUSED, counterpart=origin)
        return refuse(Code.OVERLOADED, f"too many solicitations of {origin}", limit, "ask less")

    def _check_time(self, asked: Solicitation, late_at: Elapsed) -> None:
        """A bid that its origin does not wait for any more holds nothing, and is not computed."""
        if self._clock.now() > late_at:
            raise self._overload(asked.origin, "what can be computed in the time that they wait")

    async def _bid(self, asked: Solicitation, bucket: TokenBucket, late_at: Elapsed) -> Answer:
        """What the bid depends on must still be there when it is held, or it is computed anew; the last time no step of
        the region runs meanwhile. An answer that holds nothing was true when it was asked for."""
        for _ in range(MOST_LOOKS - 1):
            self._check_time(asked, late_at)
            async with self._exclusive():
                if (known := self._known_answer(asked)) is not None:
                    return known
                work, still_holds = self._look(asked)
            told = await self._computed(work, bucket)
            async with self._exclusive():
                if (known := self._known_answer(asked)) is not None:
                    return known
                self._check_time(asked, late_at)
                if not told.reservations or still_holds(told):
                    return await self._hold(asked, told)
        async with self._exclusive():
            if (known := self._known_answer(asked)) is not None:
                return known
            work, _ = self._look(asked)
            told = await self._computed(work, bucket)
            self._check_time(asked, late_at)
            return await self._hold(asked, told)

    def _known_answer(self, asked: Solicitation) -> Answer | None:
        """The answer that needs no placement; None: there is none."""
        known = self._bids.of_solicitation(asked)
        if known is not None:
            return self._repeat_offer(known.state, asked)
        if (forbidden := self._rules.refusal_to_bid(asked)) is not None:
            return Decline(asked.id, asked.round, self._region, forbidden)
        if not self._service.has_ready_gateway():
            closed = Refusal(Code.NODE_NOT_READY, "no gateway answers", "one that other regions can call")
            return Decline(asked.id, asked.round, self._region, closed)
        return None

    def _look(self, asked: Solicitation) -> tuple[Callable[[], BidAnswer], Callable[[BidAnswer], bool]]:
        """What computes a bid from the region as it is now, and whether at a later time it can still be held."""
        name, catalog, standing = self._ids.name("bid"), self._workloads.catalog, self._standing(asked.origin)
        inputs, room, terms = self._workloads.inputs_as_of_now(), self._workloads.room(), self._share_terms(asked)

        def work() -> BidAnswer:
            return answer_solicitation(
                asked,
                inputs(),
                terms.trades,
                bid=name,
                used=terms.used,
                cached=catalog.models.keys(),
                hold_s=self._terms.hold_s,
                unawarded=terms.unawarded,
                standing=standing,
            )

        def still_holds(told: BidAnswer) -> bool:
            nodes = {each.slot.node for each in told.reservations}
            return terms.still_allow(self._share_terms(asked)) and room.still_has(self._workloads.room(), nodes)

        return work, still_holds

    def _share_terms(self, asked: Solicitation) -> _ShareTerms:
        now, origin = self._clock.now(), asked.origin
        return _ShareTerms(
            tuple(self._workloads.catalog.trades(self._region)),
            tuple(self._bids.reservations_of(origin, HeldBid | GrantedBid | StoppingBid, now)),
            tuple(self._bids.reservations_of(origin, HeldBid, now)),
        )

    async def _computed(self, work: Callable[[], BidAnswer], bucket: TokenBucket) -> BidAnswer:
        took_s = 0.0

        def run_timed() -> BidAnswer:
            nonlocal took_s
            began = self._thread_time()
            try:
                return work()
            finally:
                took_s = self._thread_time() - began

        try:
            return await self._compute(run_timed)
        finally:
            bucket.charge(self._clock.now(), SOLICITATIONS_PER_S * took_s / COMPUTING_SHARE)

    async def _hold(self, asked: Solicitation, told: BidAnswer) -> Answer:
        """The answer, once its room is held."""
        if not told.reservations or not isinstance(told.answer, Offer):
            return told.answer
        held = HeldBid(asked, told.answer, told.reservations, Elapsed(self._clock.now() + self._terms.hold_s))
        await self._transitions.offer(told.answer.id, held)
        return self._repeat_offer(held, asked)

    def _repeat_offer(self, state: BidState, asked: Solicitation) -> Answer:
        """The first answer to a repeated solicitation, with the remaining time of its hold."""
        offer = hold.offer_of(state)
        granted = hold.agreement_of(state)
        first = state.asked if isinstance(state, HeldBid) else granted.asked if granted is not None else asked
        if first != asked:
            found = f"solicitation {asked.id} in round {asked.round} with other content"
            raise refuse(Code.REPLAYED, found, "the same content, or a name of its own", "solicit under a fresh name")
        if isinstance(state, HeldBid):
            left = Seconds(state.until - self._clock.now())
            if left > 0:
                return replace(offer, hold_s=left)
            gone = Refusal(Code.HOLD_EXPIRED, f"bid {offer.id}", "one that is held", "solicit anew")
            return Decline(asked.id, asked.round, self._region, gone)
        if isinstance(state, hold.ClosedBid):
            gone = Refusal(state.code, f"bid {offer.id}", "one that is held", "solicit anew")
            return Decline(asked.id, asked.round, self._region, gone)
        return replace(offer, hold_s=Seconds(0.0))
