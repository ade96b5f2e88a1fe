"""Workloads that this region runs for other regions: bids, agreements, and their end.

Each transition is committed with its ledger entry before it is answered. It holds the step lock, so that no step uses
capacity that is being promised.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol

from shoal.coordinator import metrics
from shoal.coordinator.controllers.documents.models import ModelsController
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.bid_transitions import BidTransitions
from shoal.coordinator.controllers.federation.bidder import Bidder
from shoal.coordinator.controllers.federation.bids import (
    BidRepository,
    TrackedBid,
    guest_of,
    unknown_agreement,
)
from shoal.coordinator.controllers.federation.guest_models import GuestModels
from shoal.coordinator.controllers.federation.guest_service import GuestService
from shoal.coordinator.controllers.federation.hosting_rules import NOTICE_S, HostingRules
from shoal.coordinator.controllers.federation.ledger import Ledger
from shoal.coordinator.controllers.federation.notices import NoticeSender
from shoal.coordinator.controllers.federation.standings import StandingRepository
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.catalog.model import Guest
from shoal.coordinator.core.federation.rules import SOLICITATION_BYTES
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation.hold import BidState, GrantedBid, HeldBid, HoldTerms, StoppingBid
from shoal.coordinator.core.negotiation.peering import merge_peers
from shoal.coordinator.core.placement.model import Reservation
from shoal.coordinator.core.workloads.invariants import Promise
from shoal.coordinator.core.workloads.routes import gateways
from shoal.coordinator.ports import StaleRevision, VerifiedMessage
from shoal.types.agreement import Award, Grant, Notice, Release, Renewal, Renewed, ServiceState
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import check_name
from shoal.types.offer import Answer, Decline, Solicitation
from shoal.types.units import Elapsed, Seconds

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
        compute: Compute = inline,
        thread_time: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """compute, thread_time: as of `Bidder`."""
        self._region = context.name
        self._clock = clock = context.clock
        self._meter = meter = context.meter
        self._store = context.store
        self._ledger = ledger
        self._workloads = workloads
        self._access = access
        self._origin = origin
        self._on_change = on_change
        self._terms = terms
        self._bids = BidRepository()
        self._standings = StandingRepository(context, access, terms)
        self._transitions = BidTransitions(context, ledger, self._bids, self._standings, terms, self._publish)
        self._rules = HostingRules(context.name, workloads, clock)
        self._service = GuestService(workloads, clock, meter)
        self._notices = NoticeSender(context.name, self._bids, access.peers, clock, self._on_notice_acknowledged)
        self._guest_models = GuestModels(
            models, lambda: workloads.catalog, access.peers, clock, meter, on_unusable=self._end_at_once
        )
        self._bidder = Bidder(
            context,
            workloads,
            self._bids,
            self._transitions,
            self._rules,
            self._service,
            terms,
            standing=self.standing,
            exclusive=self._exclusive,
            compute=compute,
            thread_time=thread_time,
        )

    async def start(self) -> None:
        """Loads bids and standings. Bids that were only held are over; agreements continue."""
        await self._standings.start()
        await self._bids.start(self._store, self._clock.now(), self._terms)
        self._publish()

    def stop(self) -> None:
        self._guest_models.stop()
        self._notices.stop()

    # -- ports.PeerEvents ---------------------------------------------------------------------------------------------

    async def on_solicitation(self, solicitation: VerifiedMessage[Solicitation]) -> Answer:
        """As `Bidder.answer`. Raises ShoalError(REGION_MISMATCH | TOO_LARGE), too."""
        self._check_sender(solicitation, solicitation.content.origin, SOLICITATION_BYTES)
        told = await self._bidder.answer(solicitation.content)
        if isinstance(told, Decline):
            kind, code = "decline", str(told.refusal.code)
        else:
            kind, code = "counter" if told.is_counter else "offer", ""
        self._meter.count(metrics.BIDS, answer=kind, code=code, indicative=str(solicitation.content.indicative).lower())
        return told

    async def on_award(self, award: VerifiedMessage[Award]) -> Grant:
        what = award.content
        self._check_sender(award, what.origin)
        check_name(what.agreement, "agreement")
        async with self._exclusive():
            if self._bids.of_agreement(what.agreement) not in (None, what.bid):
                found = f"agreement {what.agreement} of another bid"
                raise refuse(Code.REPLAYED, found, "a name of its own", "award it under a fresh name")
            state = self._bids.require(what.bid, award.signer).state
            if isinstance(state, HeldBid) and (forbidden := self._rules.refusal(state.asked)) is not None:
                self._standings.excuse(what.bid)
                raise ShoalError(forbidden)
            event = hold.AwardReceived(what, self._clock.wall())
            lease_s = await self._transitions.advance_for_lease(what.bid, event, award.evidence)
            return Grant(what.agreement, what.bid, self._region, lease_s, gateways(self._workloads.fleet))

    async def on_release(self, release: VerifiedMessage[Release]) -> None:
        what = release.content
        self._check_sender(release, what.origin)
        async with self._exclusive():
            bid = self._bids.all.get(what.bid)
            if bid is not None and bid.offer.origin == release.signer:
                await self._transitions.advance(what.bid, hold.ReleaseReceived(), release.evidence)

    async def on_renewal(self, renewal: VerifiedMessage[Renewal]) -> Renewed:
        what = renewal.content
        self._check_sender(renewal, renewal.signer)
        async with self._exclusive():
            name = self._bids.require_agreement(what.agreement, renewal.signer)
            service = self._service.state(self._bids.all[name].state)
            event = hold.RenewalReceived(what, is_ready=service is ServiceState.READY)
            lease_s = await self._transitions.advance_for_lease(name, event, renewal.evidence)
            self._ledger.record_head(renewal.signer, what.ledger_head)
            bid = self._bids.all[name]
            return Renewed(
                agreement=what.agreement,
                nonce=what.nonce,
                lease_s=lease_s,
                service=service,
                report=self._service.report(bid),
                gateways=gateways(self._workloads.fleet),
                ledger_head=self._ledger.head,
                revoked=self._workloads.revoked_gateways,
            )

    async def on_notice(self, notice: VerifiedMessage[Notice]) -> None:
        what = notice.content
        self._check_sender(notice, what.by)
        async with self._exclusive():
            bid = self._bids.of_agreement(what.agreement)
            if bid is not None and self._bids.all[bid].offer.origin == notice.signer:
                await self._transitions.advance_or_raise(bid, hold.OriginNotice(what), notice.evidence)
                return
        await self._origin.on_notice(notice)

    async def authorise_fetch(self, region: str, agreement: str, digest: str) -> None:
        await self._origin.authorise_fetch(region, agreement, digest)

    # -- what this region does of itself ------------------------------------------------------------------------------

    async def withdraw(self, agreement: str, code: Code, ends_s: Seconds = NOTICE_S) -> None:
        """Gives notice to the origin. Raises ShoalError(AGREEMENT_UNKNOWN | STORE_FULL | STORE_UNAVAILABLE)."""
        async with self._exclusive():
            bid = self._bids.of_agreement(agreement)
            if bid is None:
                raise unknown_agreement(agreement)
            await self._transitions.advance_or_raise(bid, hold.OwnNotice(self._region, code, ends_s))
        self._start_tasks()

    def drain(self, until: Elapsed) -> None:
        """Until then it makes no bids, and gives notice of every agreement."""
        self._rules.drain(until)

    @property
    def open_count(self) -> int:
        """Agreements and holds that are not over."""
        return len(self._bids.open)

    async def tick(self) -> None:
        """Ends what has expired, gives notice of agreements that documents now forbid, and fetches models. Called
        often; never waits for the network. What the store does not take is tried again.
        """
        now = self._clock.now()
        self._service.earn(self._bids.open.values())
        due = [name for name, bid in self._bids.all.items() if now >= _ends_at(bid.state)]
        unfit = self._rules.forbidden_agreements(self._bids.open)
        expelled = [
            name
            for name, bid in self._bids.open.items()
            if isinstance(bid.state, HeldBid) and self._access.member_of(bid.offer.origin) is None
        ]
        if due or unfit or expelled or self._transitions.uncertain:
            self._publish()  # expired bids free their capacity even if the store takes no write
            try:
                async with self._exclusive():
                    for name in due:
                        await self._transitions.end(name)
                    for name in expelled:  # calls of an unlisted region are refused, so it could not award the bid
                        if name in self._bids.all:
                            await self._transitions.advance(name, hold.ReleaseReceived())
                    for name, code in unfit.items():
                        if name in self._bids.all:
                            await self._transitions.advance(name, hold.OwnNotice(self._region, code, NOTICE_S))
            except ShoalError:
                self._meter.count(metrics.BID_WRITES_FAILED)
        with suppress(ShoalError, StaleRevision):
            await self._ledger.save()
        self._start_tasks()

    @property
    def peers(self) -> tuple[PeerTrust, ...]:
        """Regions whose gateways may call this region's gateways, and under which agreements."""
        return merge_peers(
            PeerTrust(
                bid.offer.origin,
                member.roots if (member := self._access.member_of(bid.offer.origin)) is not None else (),
                tuple(sorted(each.name for each in granted.gateways)),
                (granted.award.agreement,),
                granted.revoked,
            )
            for bid in self._bids.open.values()
            if (granted := bid.grant) is not None
        )

    def standing(self, origin: str) -> float:
        """How much of what is held for a region is expected to be awarded."""
        return self._standings.value(origin)

    @property
    def states(self) -> Mapping[str, BidState]:
        """By bid."""
        return {name: bid.state for name, bid in self._bids.all.items()}

    @property
    def bids(self) -> Collection[TrackedBid]:
        return self._bids.all.values()

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """No step of the region and no other transition runs meanwhile. Bids whose last commit failed are reloaded
        first.
        """
        async with self._workloads.step_lock:
            await self._transitions.reload()
            yield

    def _publish(self) -> None:
        """Publishes open bids to the workloads controller: reservations, guests and promises."""
        now = self._clock.now()
        reserved, guests, promises = list[Reservation](), list[Guest](), list[Promise]()
        for name, bid in sorted(self._bids.open.items()):
            room = self._room(name, bid.state, now)
            reserved += room
            if (granted := bid.grant) is not None:
                guests.append(guest_of(granted, self._region))
            if room:
                promises.append(Promise(name, hold.agreement_name(bid.state), _ends_at(bid.state)))
        self._workloads.adopt_guests(guests=tuple(guests), reservations=tuple(reserved), promises=tuple(promises))
        self._on_change()

    def _room(self, name: str, state: BidState, now: Elapsed) -> tuple[Reservation, ...]:
        """The reservations of a bid. A hold whose grant may have been committed keeps its capacity."""
        return (
            state.reserved
            if isinstance(state, HeldBid) and name in self._transitions.uncertain
            else hold.reservations_of(state, now)
        )

    def _check_sender(self, heard: VerifiedMessage[Any], named: str, most: int = MESSAGE_BYTES) -> None:
        """Checks that the signer is `named`, the sender by the message itself, and that the message is not too long."""
        if heard.signer != named:
            raise refuse(
                Code.REGION_MISMATCH, f"{heard.signer} speaks for {named}", "its own name", "speak for yourself"
            )
        if len(heard.evidence) > most:
            raise refuse(Code.TOO_LARGE, f"{len(heard.evidence)} bytes", f"at most {most}", "send less")

    # -- work that waits for others -----------------------------------------------------------------------------------

    def _start_tasks(self) -> None:
        self._guest_models.reconcile(granted for bid in self._bids.open.values() if (granted := bid.grant) is not None)
        self._notices.start_due()

    async def _end_at_once(self, agreement: str, code: Code) -> None:
        await self.withdraw(agreement, code, Seconds(0.0))

    async def _on_notice_acknowledged(self, name: str) -> None:
        async with self._exclusive():
            await self._transitions.advance(name, hold.NoticeAcknowledged())


def _ends_at(state: BidState) -> Elapsed:
    match state:
        case HeldBid() | GrantedBid() | hold.ClosedBid():
            return state.until
        case StoppingBid():
            return min(state.granted.until, state.ends)
