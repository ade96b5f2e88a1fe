"""Transitions of bids: each is committed with its ledger entries before it is answered."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.federation.bids import (
    BIDS,
    BidRepository,
    StoredBid,
    TrackedBid,
    unknown_bid,
)
from shoal.coordinator.controllers.federation.ledger import Ledger, LedgerDraft, LedgerWrites
from shoal.coordinator.controllers.federation.standings import STANDINGS, StandingRepository
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Transition, TransitionRunner
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation.hold import BidState, GrantedBid, HeldBid, HoldTerms, StoppingBid
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import ShoalError
from shoal.types.offer import Offer
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

RENEWAL_WRITE_S: Final = 60.0
"""A renewal that changes only the lease is written at this interval: after a restart the lease is granted again."""


class BidTransitions:
    """Called under the region's step lock, so that no step uses capacity that is being promised."""

    def __init__(
        self,
        context: ControllerContext,
        ledger: Ledger,
        bids: BidRepository,
        standings: StandingRepository,
        terms: HoldTerms,
        publish: Callable[[], None],
    ) -> None:
        """publish: called when bids have changed."""
        self._store = context.store
        self._clock = context.clock
        self._bids = bids
        self._standings = standings
        self._terms = terms
        self._publish = publish
        self._runner = TransitionRunner[str, LedgerWrites](ledger.commit, self._read_again)

    @property
    def uncertain(self) -> Collection[str]:
        """Bids whose last commit failed, so that it may have taken effect."""
        return self._runner.uncertain

    async def reload(self) -> None:
        """Reads the uncertain bids again. Raises ShoalError."""
        await self._runner.reload_all()

    async def offer(self, name: str, held: HeldBid) -> None:
        """Makes a bid. Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE | CONFLICT): then there is none."""
        bid = TrackedBid(held, self._clock.wall(), 0, self._clock.now())
        await self._runner.run(name, lambda: self._transition(name, bid, held, (hold.LedgerTransition("offered"),)))

    async def advance(self, name: str, event: hold.BidEvent, evidence: bytes = b"") -> tuple[hold.BidEffect, ...]:
        """Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE | CONFLICT): then the state in memory is unchanged."""
        return await self._runner.run(name, lambda: self._step(name, event, evidence))

    async def advance_or_raise(
        self, name: str, event: hold.BidEvent, evidence: bytes = b""
    ) -> tuple[hold.BidEffect, ...]:
        """As `advance`. Raises ShoalError with the refusal, too."""
        effects = await self.advance(name, event, evidence)
        for effect in effects:
            if isinstance(effect, hold.Refuse):
                raise ShoalError(effect.refusal)
        return effects

    async def advance_for_lease(self, name: str, event: hold.BidEvent, evidence: bytes) -> Seconds:
        """The lease that the answer grants. Raises ShoalError with the refusal."""
        leases = [
            each.lease_s
            for each in await self.advance_or_raise(name, event, evidence)
            if isinstance(each, hold.LeaseAnswer)
        ]
        return leases[0]

    async def end(self, name: str) -> None:
        """Closes a bid whose time is over, or forgets a closed one."""
        bid = self._bids.all.get(name)
        if bid is None:
            return
        if not isinstance(bid.state, hold.ClosedBid):
            await self.advance(name, hold.ClockTick())
        elif self._clock.now() >= bid.state.until:
            await self._runner.run(name, lambda: self._forget(name))

    def _step(
        self, name: str, event: hold.BidEvent, evidence: bytes
    ) -> Transition[LedgerWrites, tuple[hold.BidEffect, ...]]:
        bid = self._bids.all.get(name)
        if bid is None:
            raise unknown_bid(name)
        after, effects = hold.step(bid.state, event, self._clock.now(), self._terms)
        if after == bid.state:
            return Transition(effects)
        if isinstance(event, hold.RenewalReceived) and self._renews_lease_only(bid, after):
            return Transition(effects, adopt=lambda _: self._bids.keep_renewal(name, replace(bid, state=after)))
        return self._transition(name, bid, after, effects, evidence)

    def _renews_lease_only(self, bid: TrackedBid, after: BidState) -> bool:
        """Whether a renewal changes nothing to keep but the lease, and the bid was written less than RENEWAL_WRITE_S
        ago."""
        before, now = bid.grant, hold.agreement_of(after)
        return (
            before is not None
            and now is not None
            and (before.gateways, before.revoked, before.has_served) == (now.gateways, now.revoked, now.has_served)
            and self._clock.now() - bid.written_at < RENEWAL_WRITE_S
        )

    def _transition(
        self,
        name: str,
        bid: TrackedBid,
        after: BidState,
        effects: tuple[hold.BidEffect, ...],
        evidence: bytes = b"",
    ) -> Transition[LedgerWrites, tuple[hold.BidEffect, ...]]:
        """Stores the new state with its ledger entries, events and standings, then publishes it."""
        key, now = BIDS + name, self._clock.now()
        agreement = hold.agreement_name(after) or hold.agreement_name(bid.state)
        workload = _workload(bid.state)
        entries = [each for each in effects if isinstance(each, hold.LedgerTransition)]
        drafts = tuple(
            LedgerDraft(
                each.what, agreement or name, bid.offer.origin, workload, each.code, _terms(bid.offer), evidence
            )
            for each in entries
        )
        guest_key = WorkloadKey(GUEST_TENANT, agreement)
        events = tuple(
            LogEvent(
                f"AGREEMENT_{each.what.upper()}",
                agreement,
                f"{workload} of {bid.offer.origin}{': ' + each.code if each.code else ''}",
                workload=guest_key,
            )
            for each in entries
            if agreement and each.what != "renewed"
        )
        puts = {key: codec.dump(StoredBid(after, bid.since))}
        standings = self._standings.after(name, bid.state, after, now)
        if standings is not None:
            puts[STANDINGS] = codec.dump(standings)

        def adopt(revision: int) -> None:
            self._standings.adopt(name, after, standings, now)
            self._bids.put(name, TrackedBid(after, bid.since, revision, now))
            self._publish()

        return Transition(effects, LedgerWrites(puts, (), {key: bid.revision}, events, drafts), adopt)

    def _forget(self, name: str) -> Transition[LedgerWrites, None]:
        bid = self._bids.all.get(name)
        if bid is None:
            return Transition(None)
        writes = LedgerWrites(deletes=(BIDS + name,), expect={BIDS + name: bid.revision})
        return Transition(None, writes, lambda _: self._bids.put(name, None))

    async def _read_again(self, name: str, doubtful: Transition[LedgerWrites, Any]) -> Callable[[], None]:
        record = await self._store.read(BIDS + name)
        if record is None:
            return lambda: self._follow_store(name, None)
        stored = codec.load(StoredBid, record.value)
        bid = TrackedBid(stored.state, stored.since, record.revision, self._clock.now())
        return lambda: self._follow_store(name, bid)

    def _follow_store(self, name: str, stored: TrackedBid | None) -> None:
        """Adopts the stored state, whatever the last commit returned."""
        known = self._bids.all.get(name)
        if stored is None:
            self._bids.put(name, None)
        elif known is None:
            self._bids.put(name, stored)
        elif stored.revision != known.revision:
            state = hold.with_unwritten_renewals(stored.state, known.state)
            self._bids.put(name, replace(stored, state=state))
        self._publish()


def _workload(state: BidState) -> str:
    match state:
        case HeldBid() | GrantedBid():
            return str(state.asked.workload)
        case StoppingBid():
            return str(state.granted.asked.workload)
        case hold.ClosedBid():
            return ""


def _terms(offer: Offer) -> str:
    figures = [f"{offer.replicas} x {offer.model} {offer.precision}", f"p95 {offer.latency_p95_s:.6g} s"]
    figures += [f"{offer.cost:.6g} USD/h"] if math.isfinite(offer.cost) else []
    figures += [f"{offer.joules:.6g} J"] if math.isfinite(offer.joules) else []
    figures += [offer.stand_in] if offer.stand_in else []
    return ", ".join(figures)
