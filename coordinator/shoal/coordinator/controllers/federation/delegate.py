"""Workloads that this region runs for other regions: bids, agreements, and their end.

Each transition is committed with its ledger entry before it is answered. It holds the step lock, so that no step uses
capacity that is being promised.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.documents.models import ModelsController
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.guest_models import GuestModels
from shoal.coordinator.controllers.federation.ledger import Ledger, LedgerDraft, LedgerWrites
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Transition, TransitionRunner
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.catalog.model import Catalog, Guest
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.negotiation import hold, standing
from shoal.coordinator.core.negotiation.bid import answer_solicitation, guest_intent, origin_rtt_s, residency_refusal
from shoal.coordinator.core.negotiation.hold import BidState, GrantedBid, HeldBid, HoldTerms, StoppingBid
from shoal.coordinator.core.negotiation.peering import merge_peers
from shoal.coordinator.core.negotiation.standing import RegionStanding
from shoal.coordinator.core.negotiation.trust import trade_refusal
from shoal.coordinator.core.placement.model import Reservation
from shoal.coordinator.core.rate_limit import RateLimiter
from shoal.coordinator.core.workloads.invariants import Promise
from shoal.coordinator.core.workloads.routes import gateways, is_gateway
from shoal.coordinator.core.workloads.service_reports import service_report
from shoal.coordinator.ports import StaleRevision, Store, StoreRecord, VerifiedMessage
from shoal.types.agreement import (
    GUEST_TENANT,
    Award,
    Grant,
    Notice,
    Release,
    Renewal,
    Renewed,
    ServiceReport,
    ServiceState,
)
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import check_name
from shoal.types.offer import Answer, Decline, Offer, Solicitation
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

BIDS: Final = "deals/"
STANDINGS: Final = "origins"
RENEWAL_WRITE_S: Final = 60.0
"""A renewal that changes only the lease is written at this interval: after a restart the lease is granted again."""
NOTICE_S: Final = Seconds(30.0)
"""How long this region still serves after it gave notice."""
RETRY_S: Final = Seconds(1.0)
SOLICITATION_BURST: Final = 100.0
SOLICITATIONS_PER_S: Final = 20.0
REGIONS_MOST: Final = 1000
SOLICITATION_BYTES: Final = 256 * 1024
MESSAGE_BYTES: Final = 64 * 1024
"""Maximum size of other messages. They are kept as evidence, and valid ones are never longer."""


class OriginEvents(Protocol):
    """Handlers of the same messages where this region is the origin."""

    async def on_notice(self, notice: VerifiedMessage[Notice]) -> None:
        """Raises ShoalError(AGREEMENT_UNKNOWN)."""
        ...

    async def authorise_fetch(self, region: str, agreement: str, digest: str) -> None:
        """Raises ShoalError(AGREEMENT_UNKNOWN | TENANT_DENIED | RESIDENCY)."""
        ...


@dataclass(frozen=True, slots=True)
class StoredBid:
    """A bid as stored."""

    state: BidState
    # When the bid was made.
    since: Wall


@dataclass(frozen=True, slots=True)
class Standings:
    """Standing of the regions that bids were held for."""

    # By region that bids were held for, from this region's own experience.
    of: Mapping[str, RegionStanding] = field(default_factory=dict)


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
    return tuple(_guest(granted, region) for each in stored if (granted := hold.agreement_of(each.state)) is not None)


class DelegateController:
    """Implements ports.PeerEvents. on_change: called when `peers` may have changed."""

    def __init__(
        self,
        context: ControllerContext,
        ledger: Ledger,
        workloads: WorkloadsController,
        models: ModelsController,
        access: FederationAccess,
        *,
        origin: OriginEvents,
        on_change: Callable[[], None],
        terms: HoldTerms = hold.DEFAULTS,
    ) -> None:
        self._region = context.name
        self._store = context.store
        self._ledger = ledger
        self._workloads = workloads
        self._clock = context.clock
        self._ids = context.ids
        self._meter = context.meter
        self._access = access
        self._origin = origin
        self._on_change = on_change
        self._terms = terms
        self._bids: dict[str, TrackedBid] = {}
        self._open: dict[str, TrackedBid] = {}
        """Bids that are not closed."""
        self._bid_of_solicitation: dict[tuple[str, str, int], str] = {}
        """(origin, solicitation, round) -> bid."""
        self._bid_of_agreement: dict[str, str] = {}
        """agreement -> bid."""
        self._runner = TransitionRunner[str, LedgerWrites](ledger.commit, self._read_again)
        self._once_ready: set[str] = set()
        """Agreements that were READY at least once."""
        self._held_since: dict[str, Elapsed] = {}
        """When this process began to hold capacity for each bid that is neither awarded nor released."""
        self._standings = Standings()
        self._checked_catalog: Catalog | None = None
        self._drains_until = Elapsed(-math.inf)
        self._earned_at = self._clock.now()
        self._solicitation_limits = RateLimiter(SOLICITATION_BURST, SOLICITATIONS_PER_S, REGIONS_MOST)
        self._guest_models = GuestModels(
            models, lambda: workloads.catalog, access.peers, self._clock, self._meter, on_unusable=self._end_at_once
        )
        self._notices: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Loads bids and standings. Bids that were only held are over; agreements continue."""
        now = self._clock.now()
        if (found := await self._store.read(STANDINGS)) is not None:
            self._standings = codec.load(Standings, found.value)
        for record in await self._store.scan(BIDS):
            stored = codec.load(StoredBid, record.value)
            state = hold.restore(stored.state, now, self._terms)
            self._put(record.key.removeprefix(BIDS), TrackedBid(state, stored.since, record.revision, now))
        self._publish()

    def stop(self) -> None:
        self._guest_models.stop()
        for task in self._notices.values():
            task.cancel()

    # -- ports.PeerEvents ---------------------------------------------------------------------------------------------

    async def on_solicitation(self, solicitation: VerifiedMessage[Solicitation]) -> Answer:
        told = await self._answer(solicitation)
        if isinstance(told, Decline):
            kind, code = "decline", str(told.refusal.code)
        else:
            kind, code = "counter" if told.is_counter else "offer", ""
        self._meter.count(metrics.BIDS, answer=kind, code=code, indicative=str(solicitation.content.indicative).lower())
        return told

    async def _answer(self, asked: VerifiedMessage[Solicitation]) -> Answer:
        """An offer with a hold, an indicative offer or counter-offer without one, or a decline. A repeated solicitation
        gets the first answer again.
        """
        what = asked.content
        self._check_sender(asked, what.origin, SOLICITATION_BYTES)
        bucket = self._solicitation_limits.bucket_of(asked.signer, self._clock.now())
        if not bucket.allows(self._clock.now()):
            self._meter.count(metrics.SOLICITATIONS_REFUSED, counterpart=asked.signer)
            raise refuse(
                Code.OVERLOADED,
                f"too many solicitations of {asked.signer}",
                f"{SOLICITATIONS_PER_S:g} a second",
                "ask less",
            )
        bucket.spend(self._clock.now())
        async with self._exclusive():
            known = self._bid_of_solicitation.get((what.origin, what.id, what.round))
            if known is not None:
                return self._repeat_offer(self._bids[known].state, what)
            if (forbidden := self._refusal_by_documents(what)) is not None:
                return Decline(what.id, what.round, self._region, forbidden)
            if self._is_draining:
                leaves = Refusal(Code.TRADE_DENIED, f"{self._region} leaves the federation", "a region that stays")
                return Decline(what.id, what.round, self._region, leaves)
            if not self._has_ready_gateway():
                closed = Refusal(Code.NODE_NOT_READY, "no gateway answers", "one that other regions can call")
                return Decline(what.id, what.round, self._region, closed)
            name = self._ids.name("bid")
            catalog = self._workloads.catalog
            told = answer_solicitation(
                what,
                self._workloads.inputs(),
                catalog.trades(self._region),
                bid=name,
                used=self._reservations_of(what.origin, HeldBid | GrantedBid | StoppingBid),
                cached=catalog.models.keys(),
                hold_s=self._terms.hold_s,
                unawarded=self._reservations_of(what.origin, HeldBid),
                standing=self.standing(what.origin),
            )
            if not told.reservations or not isinstance(told.answer, Offer):
                return told.answer
            held = HeldBid(what, told.answer, told.reservations, Elapsed(self._clock.now() + self._terms.hold_s))
            fresh = TrackedBid(held, self._clock.wall(), 0, self._clock.now())
            await self._runner.run(
                name, lambda: self._transition(name, fresh, held, (hold.LedgerTransition("offered"),))
            )
            return self._repeat_answer(held, what)

    async def on_award(self, award: VerifiedMessage[Award]) -> Grant:
        what = award.content
        self._check_sender(award, what.origin)
        check_name(what.agreement, "agreement")
        async with self._exclusive():
            if self._bid_of_agreement.get(what.agreement, what.bid) != what.bid:
                found = f"agreement {what.agreement} of another bid"
                raise refuse(Code.REPLAYED, found, "a name of its own", "award it under a fresh name")
            deal = self._require_bid(what.bid, award.signer)
            if (
                isinstance(deal.state, HeldBid)
                and (forbidden := self._refusal_by_documents(deal.state.asked)) is not None
            ):
                self._held_since.pop(what.bid, None)  # the origin's standing must not suffer: this region refuses
                raise ShoalError(forbidden)
            lease_s = await self._advance_for_lease(what.bid, hold.AwardReceived(what), award.evidence)
            return Grant(what.agreement, what.bid, self._region, lease_s, gateways(self._workloads.fleet))

    async def on_release(self, release: VerifiedMessage[Release]) -> None:
        what = release.content
        self._check_sender(release, what.origin)
        async with self._exclusive():
            deal = self._bids.get(what.bid)
            if deal is not None and deal.offer.origin == release.signer:
                await self._advance(what.bid, hold.ReleaseReceived(), release.evidence)

    async def on_renewal(self, renewal: VerifiedMessage[Renewal]) -> Renewed:
        what = renewal.content
        self._check_sender(renewal, renewal.signer)
        async with self._exclusive():
            bid = self._require_agreement(what.agreement, renewal.signer)
            lease_s = await self._advance_for_lease(bid, hold.RenewalReceived(what), renewal.evidence)
            self._ledger.record_head(renewal.signer, what.ledger_head)
            return Renewed(
                agreement=what.agreement,
                nonce=what.nonce,
                lease_s=lease_s,
                service=self._service(self._bids[bid].state),
                report=self._report(self._bids[bid]),
                gateways=gateways(self._workloads.fleet),
                ledger_head=self._ledger.head,
                revoked=self._workloads.revoked_gateways,
            )

    async def on_notice(self, notice: VerifiedMessage[Notice]) -> None:
        what = notice.content
        self._check_sender(notice, what.by)
        async with self._exclusive():
            bid = self._bid_of_agreement.get(what.agreement)
            if bid is not None and self._bids[bid].offer.origin == notice.signer:
                await self._advance_or_raise(bid, hold.OriginNotice(what), notice.evidence)
                return
        await self._origin.on_notice(notice)

    async def authorise_fetch(self, region: str, agreement: str, digest: str) -> None:
        await self._origin.authorise_fetch(region, agreement, digest)

    # -- what this region does of itself ------------------------------------------------------------------------------

    async def withdraw(self, agreement: str, code: Code, ends_s: Seconds = NOTICE_S) -> None:
        """Gives notice to the origin. Raises ShoalError(AGREEMENT_UNKNOWN | STORE_FULL | STORE_UNAVAILABLE)."""
        async with self._exclusive():
            bid = self._bid_of_agreement.get(agreement)
            if bid is None:
                raise _unknown_agreement(agreement)
            await self._advance_or_raise(bid, hold.OwnNotice(self._region, code, ends_s))
        self._start_tasks()

    def drain(self, until: Elapsed) -> None:
        """Until then it makes no bids, and gives notice of every agreement."""
        self._drains_until = until

    @property
    def open_count(self) -> int:
        """Agreements and holds that are not over."""
        return len(self._open)

    async def tick(self) -> None:
        """Ends what has expired, gives notice of agreements that documents now forbid, and fetches models. Called
        often; never waits for the network. What the store does not take is tried again.
        """
        now = self._clock.now()
        self._earn(now)
        due = [name for name, deal in self._bids.items() if now >= _ends_at(deal.state)]
        unfit = self._forbidden_agreements()
        expelled = [
            name
            for name, deal in self._open.items()
            if isinstance(deal.state, HeldBid) and self._access.member_of(deal.offer.origin) is None
        ]
        if due or unfit or expelled or self._runner.uncertain:
            self._publish()  # expired bids free their capacity even if the store takes no write
            try:
                async with self._exclusive():
                    for name in due:
                        await self._end(name)
                    for name in expelled:  # calls of an unlisted region are refused, so it could not award the bid
                        if name in self._bids:
                            await self._advance(name, hold.ReleaseReceived())
                    for name, code in unfit.items():
                        if name in self._bids:
                            await self._advance(name, hold.OwnNotice(self._region, code, NOTICE_S))
            except (ShoalError, StaleRevision):
                self._meter.count(metrics.BID_WRITES_FAILED)
        with suppress(ShoalError, StaleRevision):
            await self._ledger.save()
        self._start_tasks()

    @property
    def peers(self) -> tuple[PeerTrust, ...]:
        """Regions whose gateways may call this region's gateways, and under which agreements."""
        return merge_peers(
            PeerTrust(
                deal.offer.origin,
                member.roots if (member := self._access.member_of(deal.offer.origin)) is not None else (),
                tuple(sorted(each.name for each in granted.gateways)),
                (granted.award.agreement,),
                granted.revoked,
            )
            for deal in self._open.values()
            if (granted := deal.grant) is not None
        )

    def standing(self, origin: str) -> float:
        """How much of what is held for a region is expected to be awarded. This region's own experience takes
        precedence over the federation's.
        """
        known = self._standings.of.get(origin)
        if known is not None:
            return standing.value(known, self._clock.now())
        member = self._access.member_of(origin)
        return member.standing if member is not None else 1.0

    @property
    def states(self) -> Mapping[str, BidState]:
        """By bid."""
        return {name: deal.state for name, deal in self._bids.items()}

    @property
    def bids(self) -> Collection[TrackedBid]:
        return self._bids.values()

    # -- transitions --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """No step of the region and no other transition runs meanwhile. Bids whose last commit failed are reloaded
        first.
        """
        async with self._workloads.step_lock:
            await self._runner.reload_all()
            yield

    async def _advance_for_lease(self, name: str, event: hold.BidEvent, evidence: bytes) -> Seconds:
        """The lease that the answer grants. Raises ShoalError with the refusal."""
        leases = [
            each.lease_s
            for each in await self._advance_or_raise(name, event, evidence)
            if isinstance(each, hold.LeaseAnswer)
        ]
        return leases[0]

    async def _advance_or_raise(
        self, name: str, event: hold.BidEvent, evidence: bytes = b""
    ) -> tuple[hold.BidEffect, ...]:
        effects = await self._advance(name, event, evidence)
        for effect in effects:
            if isinstance(effect, hold.Refuse):
                raise ShoalError(effect.refusal)
        return effects

    async def _advance(self, name: str, event: hold.BidEvent, evidence: bytes = b"") -> tuple[hold.BidEffect, ...]:
        """Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE | CONFLICT): then the state in memory is unchanged."""
        return await self._runner.run(name, lambda: self._step(name, event, evidence))

    def _step(
        self, name: str, event: hold.BidEvent, evidence: bytes
    ) -> Transition[LedgerWrites, tuple[hold.BidEffect, ...]]:
        deal = self._bids.get(name)
        if deal is None:
            raise _unknown_bid(name)
        after, effects = hold.step(deal.state, event, self._clock.now(), self._terms)
        if after == deal.state:
            return Transition(effects)
        if isinstance(event, hold.RenewalReceived) and self._renews_lease_only(deal, after):
            return Transition(effects, adopt=lambda _: self._keep_renewal(name, replace(deal, state=after)))
        return self._transition(name, deal, after, effects, evidence)

    def _keep_renewal(self, name: str, deal: TrackedBid) -> None:
        self._bids[name] = self._open[name] = deal

    def _renews_lease_only(self, deal: TrackedBid, after: BidState) -> bool:
        """Whether a renewal changes only the lease, and the bid was written less than RENEWAL_WRITE_S ago."""
        before, now = deal.grant, hold.agreement_of(after)
        return (
            before is not None
            and now is not None
            and (before.gateways, before.revoked) == (now.gateways, now.revoked)
            and self._clock.now() - deal.written_at < RENEWAL_WRITE_S
        )

    def _transition(
        self,
        name: str,
        deal: TrackedBid,
        after: BidState,
        effects: tuple[hold.BidEffect, ...],
        evidence: bytes = b"",
    ) -> Transition[LedgerWrites, tuple[hold.BidEffect, ...]]:
        """Stores the new state with its ledger entries, events and standings, then publishes it."""
        key, now = BIDS + name, self._clock.now()
        agreement = hold.agreement_name(after) or hold.agreement_name(deal.state)
        workload = _workload(deal.state)
        entries = [each for each in effects if isinstance(each, hold.LedgerTransition)]
        drafts = tuple(
            LedgerDraft(
                each.what, agreement or name, deal.offer.origin, workload, each.code, _terms(deal.offer), evidence
            )
            for each in entries
        )
        guest_key = WorkloadKey(GUEST_TENANT, agreement)
        events = tuple(
            LogEvent(
                f"AGREEMENT_{each.what.upper()}",
                agreement,
                f"{workload} of {deal.offer.origin}{': ' + each.code if each.code else ''}",
                workload=guest_key,
            )
            for each in entries
            if agreement and each.what != "renewed"
        )
        puts = {key: codec.dump(StoredBid(after, deal.since))}
        standings = self._standings_after(name, deal.state, after, now)
        if standings is not self._standings:
            puts[STANDINGS] = codec.dump(standings)

        def adopt(revision: int) -> None:
            self._standings = standings
            self._put(name, TrackedBid(after, deal.since, revision, now))
            if isinstance(after, HeldBid):
                self._held_since[name] = now
            else:
                self._held_since.pop(name, None)
            self._publish()

        return Transition(effects, LedgerWrites(puts, (), {key: deal.revision}, events, drafts), adopt)

    def _standings_after(self, name: str, before: BidState, after: BidState, now: Elapsed) -> "Standings":
        """The standings after this transition, if it ends a hold. Holds of an earlier process do not count, because the
        restart cut them short.
        """
        since = self._held_since.get(name)
        if since is None or isinstance(after, HeldBid) or not isinstance(before, HeldBid):
            return self._standings
        wasted = min(1.0, (now - since) / self._terms.hold_s) if isinstance(after, hold.ClosedBid) else 0.0
        origin = before.offer.origin
        if wasted >= 1.0:
            self._meter.count(metrics.HOLDS_UNCLAIMED, counterpart=origin)
        known = {**self._standings.of, origin: standing.with_hold(self._standings.of.get(origin), wasted, now)}
        oldest = min(known, key=lambda each: known[each].at) if len(known) > REGIONS_MOST else None
        return Standings({region: each for region, each in known.items() if region != oldest})

    async def _end(self, name: str) -> None:
        deal = self._bids.get(name)
        if deal is None:
            return
        if not isinstance(deal.state, hold.ClosedBid):
            await self._advance(name, hold.ClockTick())
        elif self._clock.now() >= deal.state.until:
            await self._runner.run(name, lambda: self._forget(name))

    def _forget(self, name: str) -> Transition[LedgerWrites, None]:
        deal = self._bids.get(name)
        if deal is None:
            return Transition(None)
        key = BIDS + name
        writes = LedgerWrites(deletes=(key,), expect={key: deal.revision})
        return Transition(None, writes, lambda _: self._put(name, None))

    async def _read_again(self, name: str, doubtful: Transition[LedgerWrites, Any]) -> Callable[[], None]:
        record = await self._store.read(BIDS + name)
        return lambda: self._follow_store(name, record)

    def _follow_store(self, name: str, record: StoreRecord | None) -> None:
        """Adopts the stored state, whatever the last commit returned."""
        known = self._bids.get(name)
        if record is None:
            self._put(name, None)
        elif known is None or record.revision != known.revision:
            stored = codec.load(StoredBid, record.value)
            state = stored.state if known is None else hold.with_unwritten_renewals(stored.state, known.state)
            self._put(name, TrackedBid(state, stored.since, record.revision, self._clock.now()))
        self._publish()

    def _put(self, name: str, deal: TrackedBid | None) -> None:
        known = self._bids.pop(name, None)
        self._open.pop(name, None)
        if known is not None and deal is None:
            self._bid_of_solicitation.pop((known.offer.origin, known.offer.solicitation, known.offer.round), None)
            self._bid_of_agreement.pop(hold.agreement_name(known.state), None)
        if deal is not None:
            self._bids[name] = deal
            if not isinstance(deal.state, hold.ClosedBid):
                self._open[name] = deal
            self._bid_of_solicitation[deal.offer.origin, deal.offer.solicitation, deal.offer.round] = name
            if agreement := hold.agreement_name(deal.state):
                self._bid_of_agreement[agreement] = name

    def _publish(self) -> None:
        """Publishes open bids to the workloads controller: reservations, guests and promises."""
        now = self._clock.now()
        reserved, guests, promises = list[Reservation](), list[Guest](), list[Promise]()
        for name, deal in sorted(self._open.items()):
            room = self._room(name, deal.state, now)
            reserved += room
            if (granted := deal.grant) is not None:
                guests.append(_guest(granted, self._region))
            if room:
                promises.append(Promise(name, hold.agreement_name(deal.state), _ends_at(deal.state)))
        self._once_ready &= self._bid_of_agreement.keys()
        self._workloads.adopt_guests(guests=tuple(guests), reservations=tuple(reserved), promises=tuple(promises))
        self._on_change()

    def _room(self, name: str, state: BidState, now: Elapsed) -> tuple[Reservation, ...]:
        """The reservations of a bid. A hold whose grant may have been committed keeps its capacity."""
        return (
            state.reserved
            if isinstance(state, HeldBid) and name in self._runner.uncertain
            else hold.reservations_of(state, now)
        )

    # -- what is answered ---------------------------------------------------------------------------------------------

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

    def _service(self, state: BidState) -> ServiceState:
        """READY with all replicas routed and a ready gateway. Otherwise SHORT if it was READY before, else STARTING."""
        if isinstance(state, StoppingBid):
            return ServiceState.STOPPING
        agreement = hold.agreement_name(state)
        serving = self._workloads.endpoints(WorkloadKey(GUEST_TENANT, agreement))
        if serving >= hold.offer_of(state).replicas and self._has_ready_gateway():
            self._once_ready.add(agreement)
            return ServiceState.READY
        return ServiceState.SHORT if agreement in self._once_ready else ServiceState.STARTING

    def _has_ready_gateway(self) -> bool:
        """Whether a gateway serves, through which other regions' requests arrive."""
        return any(
            is_gateway(state) and state.front_ready and state.liveness is Liveness.READY
            for state in self._workloads.fleet.nodes.values()
        )

    def _report(self, deal: TrackedBid) -> ServiceReport:
        hours = max(0.0, self._clock.wall() - deal.since) / 3600
        agreement = hold.agreement_name(deal.state)
        report = service_report(
            self._workloads.fleet, agreement, self._workloads.hosts(WorkloadKey(GUEST_TENANT, agreement))
        )
        return replace(report, cost_usd=deal.offer.cost * hours)

    def _earn(self, now: Elapsed) -> None:
        """Adds the revenue since the last call, at the prices that were bid."""
        hours = (now - self._earned_at) / 3600
        self._earned_at = now
        for deal in self._open.values():
            if isinstance(deal.state, GrantedBid | StoppingBid) and math.isfinite(deal.offer.cost):
                self._meter.add(metrics.EARNED, deal.offer.cost * hours, counterpart=deal.offer.origin)

    def _check_sender(self, heard: VerifiedMessage[Any], named: str, most: int = MESSAGE_BYTES) -> None:
        """Checks that the signer is `named`, the sender by the message itself, and that the message is not too long."""
        if heard.signer != named:
            raise refuse(
                Code.REGION_MISMATCH, f"{heard.signer} speaks for {named}", "its own name", "speak for yourself"
            )
        if len(heard.evidence) > most:
            raise refuse(Code.TOO_LARGE, f"{len(heard.evidence)} bytes", f"at most {most}", "send less")

    def _require_bid(self, bid: str, by: str) -> TrackedBid:
        """The bid, if `by` is its origin. Others do not learn that it exists."""
        deal = self._bids.get(bid)
        if deal is None or deal.offer.origin != by:
            raise _unknown_bid(bid)
        return deal

    def _require_agreement(self, agreement: str, by: str) -> str:
        bid = self._bid_of_agreement.get(agreement)
        if bid is None or self._bids[bid].offer.origin != by:
            raise _unknown_agreement(agreement)
        return bid

    def _reservations_of(self, origin: str, kinds: Any) -> list[Reservation]:
        """Reservations of the origin's bids in these states."""
        deals = (deal for deal in self._open.values() if deal.offer.origin == origin and isinstance(deal.state, kinds))
        return [each for deal in deals for each in hold.reservations_of(deal.state, self._clock.now())]

    def _forbidden_agreements(self) -> dict[str, Code]:
        """Agreements that this region's documents no longer allow, by bid."""
        if self._is_draining:
            return {
                name: Code.AGREEMENT_ENDED for name, deal in self._open.items() if isinstance(deal.state, GrantedBid)
            }
        if self._workloads.catalog is self._checked_catalog:
            return {}
        found = {
            name: forbidden.code
            for name, deal in self._open.items()
            if isinstance(deal.state, GrantedBid)
            and (forbidden := self._refusal_by_documents(deal.state.asked)) is not None
        }
        if not found:
            self._checked_catalog = self._workloads.catalog
        return found

    @property
    def _is_draining(self) -> bool:
        return self._clock.now() < self._drains_until

    def _refusal_by_documents(self, asked: Solicitation) -> Refusal | None:
        """Why this region's documents do not allow it; None if they do."""
        catalog = self._workloads.catalog
        forbidden = trade_refusal(catalog.trades(self._region), asked.origin, asked.workload.tenant)
        return forbidden or residency_refusal(asked, catalog.facts(self._region, {}))

    # -- work that waits for others -----------------------------------------------------------------------------------

    def _start_tasks(self) -> None:
        self._guest_models.reconcile(granted for deal in self._open.values() if (granted := deal.grant) is not None)
        self._notices = {name: task for name, task in self._notices.items() if not task.done()}
        for name, deal in self._open.items():
            if isinstance(deal.state, StoppingBid) and not deal.state.told and name not in self._notices:
                self._notices[name] = asyncio.ensure_future(self._send_notice(name))

    async def _end_at_once(self, agreement: str, code: Code) -> None:
        await self.withdraw(agreement, code, Seconds(0.0))

    async def _send_notice(self, name: str) -> None:
        """Retries until the origin received it, or the agreement is over."""
        while (deal := self._bids.get(name)) is not None and isinstance(state := deal.state, StoppingBid):
            if state.told:
                return
            left = Seconds(max(0.0, state.ends - self._clock.now()))
            notice = Notice(state.granted.award.agreement, self._region, state.code, left)
            try:
                await self._notify_origin(deal.offer.origin, notice)
                async with self._exclusive():
                    await self._advance(name, hold.NoticeAcknowledged())
            except (ShoalError, StaleRevision):
                await self._clock.sleep(RETRY_S)

    async def _notify_origin(self, region: str, notice: Notice) -> None:
        """Sends a notice. Any answer, even a refusal, means that the origin received it. Raises
        ShoalError(PEER_UNREACHABLE).
        """
        try:
            await self._access.peers.notify(region, notice)
        except ShoalError as error:
            if error.code is Code.PEER_UNREACHABLE:
                raise


def _guest(granted: GrantedBid, region: str) -> Guest:
    intent = guest_intent(granted.asked, granted.offer, granted.award.agreement)
    return Guest(granted.offer.origin, intent, origin_rtt_s(granted.asked, region))


def _ends_at(state: BidState) -> Elapsed:
    match state:
        case HeldBid() | GrantedBid() | hold.ClosedBid():
            return state.until
        case StoppingBid():
            return min(state.granted.until, state.ends)


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
    figures += ["emulated"] if offer.emulated else []
    return ", ".join(figures)


def _unknown_bid(bid: str) -> ShoalError:
    return refuse(Code.BID_UNKNOWN, f"bid {bid!r:.80}", "a bid of this region for who awards it", "solicit anew")


def _unknown_agreement(agreement: str) -> ShoalError:
    return refuse(Code.AGREEMENT_UNKNOWN, f"agreement {agreement!r:.80}", "one with this region", "solicit anew")
