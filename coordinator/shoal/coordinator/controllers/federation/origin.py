"""Workloads of this region that other regions run: each workload's trade is persisted, then acted upon.

Calls to other regions are separate tasks, whose outcomes come back as events, so they never delay the region's step. A
call that a crash left unsent is retried by the trade machine, or given up by `trade.restore`.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.delegations import DelegationPublisher, may_go
from shoal.coordinator.controllers.federation.demands import DelegationDemands
from shoal.coordinator.controllers.federation.intents import IntentIndex
from shoal.coordinator.controllers.federation.ledger import Ledger, LedgerDraft, LedgerWrites
from shoal.coordinator.controllers.federation.local_region import LocalRegion
from shoal.coordinator.controllers.federation.observations import ServiceObservations
from shoal.coordinator.controllers.federation.reputation import REPUTATION, Reputation, ReputationRepository
from shoal.coordinator.controllers.federation.solicit import IndicativeResult, Solicitor
from shoal.coordinator.controllers.federation.trade_calls import TradeCalls
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Transition, TransitionRunner
from shoal.coordinator.core.negotiation import trade
from shoal.coordinator.core.negotiation.model import (
    DelegateNotice,
    DelegationDemand,
    DelegationNeed,
    IdleTrade,
    RegionAnswer,
    RoundAnswered,
    Soliciting,
    TradeEffect,
    TradeEvent,
    TradeNote,
    WorkloadTrade,
)
from shoal.coordinator.core.negotiation.spans import FINAL_EVENTS
from shoal.coordinator.core.placement.rank import TermValues
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.coordinator.ports import VerifiedMessage
from shoal.types.agreement import Notice
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, UsdPerHour
from shoal.types.workload import DelegationMode, Intent, WorkloadKey

TRADES: Final = "trading/"
LEDGER_NOTES: Final = frozenset(
    ("awarded", "granted", "renewed", "noticed", "released", "expired", "breached", "ended")
)


@dataclass(frozen=True, slots=True)
class StoredTrade:
    """A trade as last written."""

    trade: WorkloadTrade
    # Store revision of that write.
    revision: int


class OriginController:
    """The origin's side of agreements: the loop of its trades, notices from delegates and fetches of guest models."""

    def __init__(
        self,
        context: ControllerContext,
        ledger: Ledger,
        local_region: LocalRegion,
        access: FederationAccess,
        *,
        on_change: Callable[[], None],
        on_end: Callable[[str], None] = lambda name: None,
    ) -> None:
        """on_change: called when `delegations` or `peers` changed. on_end: called with the solicitation or agreement of
        a negotiation that ended.
        """
        self.trades: dict[WorkloadKey, WorkloadTrade] = {}
        self._stored: dict[WorkloadKey, StoredTrade] = {}
        self._region = context.name
        self._store = context.store
        self._clock = clock = context.clock
        self._ids = context.ids
        self._meter = context.meter
        self._access = access
        self._on_end = on_end
        self._last_demands: dict[WorkloadKey, tuple[DelegationDemand, WorkloadTrade | None]] = {}
        """Each workload's last handled demand and the trade after it: handled again when either changed or is due."""
        self._drains_until = Elapsed(-math.inf)
        self._stepping = asyncio.Lock()
        """Held while trades and the reputation are computed and committed, and never during a call."""
        self._runner = TransitionRunner[WorkloadKey, LedgerWrites](ledger.commit, self._read_again)
        self._local_region = local_region
        self._intents = IntentIndex(local_region)
        self._observations = ServiceObservations(local_region.service_report, clock)
        self._demands = DelegationDemands(local_region, self._intents, self._observations, clock)
        self._reputation = ReputationRepository(context, ledger, access, local_region.service_report, self._stepping)
        self._solicitor = Solicitor(context, access, local_region, self._intents, self._reputation)
        self._publisher = DelegationPublisher(self.trades, self._intents, access, clock, on_change)
        self._calls = TradeCalls(
            access,
            ledger,
            local_region,
            self._solicitor,
            self._observations,
            clock=clock,
            trade_of=self._trade_of,
            on_outcome=self.handle,
        )

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        now = self._clock.now()
        for record in await self._store.scan(TRADES):
            stored = codec.load(WorkloadTrade, record.value)
            self._stored[stored.workload] = StoredTrade(stored, record.revision)
            self.trades[stored.workload] = trade.restore(stored, now)
        await self._reputation.start()
        self._publisher.publish()

    def stop(self) -> None:
        """Cancels the calls in progress; after the next start their outcomes are requested again."""
        self._calls.stop()

    async def tick(self) -> None:
        """Advances every workload that is, or may be, delegated. Waits for the store only."""
        may = {
            key
            for key, intent in self._intents.by_key().items()
            if intent.delegation.mode is not DelegationMode.NEVER and self.may_trade and not self._is_draining
        }
        self._last_demands = {key: last for key, last in self._last_demands.items() if key in self.trades}
        for key in sorted(may | self.trades.keys()):
            demand = self._demands.demand(self._trade_of(key), self._intents.get(key) if key in may else None)
            if self._is_due(key, demand):
                await self.handle(key, demand)
                self._last_demands[key] = (demand, self.trades.get(key))
        await self._account()
        self._publisher.publish()
        if self.may_trade and (report := self._reputation.next_report()) is not None:
            self._calls.start(report)

    def _is_due(self, key: WorkloadKey, demand: DelegationDemand) -> bool:
        state = self.trades.get(key)
        if state is None or key in self._runner.uncertain or self._clock.now() >= trade.wake_at(state, demand.need):
            return True
        last, after = self._last_demands.get(key, (None, None))
        return last != demand or after is not state

    async def handle(self, key: WorkloadKey, event: TradeEvent) -> None:
        """Applies one event to one workload's trade. If the store takes no write, nothing changes, and it is tried
        again.
        """
        if isinstance(event, RoundAnswered) and event.terms is not None and self._local_region.has_budget(key):
            # The region's step and other awards wait, so that what is left of the budget is given out once.
            async with self._local_region.step_lock:
                if await self._read_uncertain():
                    terms = replace(event.terms, budget=self._local_region.budget_left(key))
                    await self._handle(key, replace(event, terms=terms))
        else:
            await self._handle(key, event)

    async def _read_uncertain(self) -> bool:
        """Reads trades again whose last write may have taken effect: an award among them counts. Returns whether that
        worked."""
        async with self._stepping:
            try:
                await self._runner.reload_all()
            except ShoalError:
                self._meter.count(metrics.TRADE_WRITES_FAILED)
                return False
        self._publisher.publish()
        return True

    async def _handle(self, key: WorkloadKey, event: TradeEvent) -> None:
        async with self._stepping:
            before = self._trade_of(key)
            try:
                effects = await self._runner.run(key, lambda: self._step(key, event))
            except ShoalError:
                self._meter.count(metrics.TRADE_WRITES_FAILED)
                return
        for effect in effects:
            self._calls.start(self._calls.perform(key, effect))
        self._publisher.publish_one(key, before)

    async def on_notice(self, notice: VerifiedMessage[Notice]) -> None:
        """Handles the delegate's notice. Raises ShoalError(AGREEMENT_UNKNOWN) when no agreement here matches."""
        key = self._key_of(notice.content.agreement, notice.signer)
        await self.handle(key, DelegateNotice(notice.content, notice.evidence))

    async def authorise_fetch(self, region: str, agreement: str, digest: str) -> None:
        """Checks that a delegate may have these bytes: exactly the model of its bid, under an agreement in force.

        Raises ShoalError(AGREEMENT_UNKNOWN | TENANT_DENIED | RESIDENCY).
        """
        key = self._key_of(agreement, region)
        offer = trade.offer_of(self.trades[key], agreement)
        intent = self._intents.get(key)
        if offer is None or intent is None or digest != offer.model:
            raise refuse(Code.TENANT_DENIED, "a model that this agreement is not about", "the model of its bid")
        if not may_go(intent, offer):
            allowed = ", ".join(intent.require.residency)
            raise refuse(Code.RESIDENCY, f"{region} lies in {offer.residency or region}", allowed)

    def drain(self, until: Elapsed) -> None:
        """Until then no trade begins, and existing ones end as if no policy delegated: after the workload serves
        locally.
        """
        self._drains_until = until

    @property
    def _is_draining(self) -> bool:
        return self._clock.now() < self._drains_until

    @property
    def open_count(self) -> int:
        """Agreements and awards that are not over."""
        return sum(
            len(state.leaving) + (not isinstance(state.phase, IdleTrade | Soliciting)) for state in self.trades.values()
        )

    @property
    def last_refusals(self) -> Mapping[WorkloadKey, Refusal]:
        """Why the last trade of each workload failed."""
        resting = ((key, state.phase) for key, state in self.trades.items() if isinstance(state.phase, IdleTrade))
        return {key: phase.refusal for key, phase in resting if phase.refusal is not None}

    @property
    def region_answers(self) -> Mapping[WorkloadKey, tuple[RegionAnswer, ...]]:
        """What each region answered in the last round of each workload that found no region."""
        return {key: state.answers for key, state in self.trades.items() if state.answers}

    @property
    def may_trade(self) -> bool:
        """Whether the region is in a federation."""
        return self._access.directory() is not None

    @property
    def delegations(self) -> Mapping[WorkloadKey, DelegatedWorkload]:
        """Workloads that other regions run, or are to run."""
        return self._publisher.delegations

    @property
    def awarded_prices(self) -> Mapping[WorkloadKey, UsdPerHour | None]:
        """What each workload with an open award or agreement costs, in USD/h; None: unknown."""
        return self._publisher.awarded_prices

    @property
    def peers(self) -> tuple[PeerTrust, ...]:
        """Regions whose gateways this region's gateways may connect to, because they run its workloads."""
        return self._publisher.peers

    @property
    def reputation(self) -> Reputation:
        return self._reputation.current

    @property
    def report_refusal(self) -> Refusal | None:
        """Why the federation refuses this region's reports; None: it does not."""
        return self._reputation.report_refusal

    @property
    def calls(self) -> set[asyncio.Task[None]]:
        """Calls to other regions in progress."""
        return self._calls.tasks

    async def preview_offers(
        self, intent: Intent, profiles: Mapping[str, ModelProfile], own: TermValues | None
    ) -> IndicativeResult | None:
        """What others would offer for a proposed workload, in both rounds; nothing is held. None: it would not be
        solicited, because its policy never delegates, or only without a local place, or because the region is in no
        federation.
        """
        mode = intent.delegation.mode
        if mode is DelegationMode.NEVER or (mode is DelegationMode.WHEN_INFEASIBLE and own is not None):
            return None
        return await self._solicitor.preview_offers(intent, profiles, own) if self.may_trade else None

    def _trade_of(self, key: WorkloadKey) -> WorkloadTrade:
        return self.trades.get(key, WorkloadTrade(key))

    def _key_of(self, agreement: str, region: str) -> WorkloadKey:
        for key, state in self.trades.items():
            if (offer := trade.offer_of(state, agreement)) is not None and offer.region == region:
                return key
        raise refuse(Code.AGREEMENT_UNKNOWN, f"agreement {agreement!r:.80}", "one between these two regions that holds")

    async def _account(self) -> None:
        active = [agreement for state in self.trades.values() if (agreement := state.active_agreement) is not None]
        live = {agreement.id for state in self.trades.values() for agreement in trade.live_agreements(state)}
        self._observations.drop_others({agreement.id for agreement in active}, live)
        await self._reputation.account(active)

    def _step(self, key: WorkloadKey, event: TradeEvent) -> Transition[LedgerWrites, tuple[TradeEffect, ...]]:
        """Stores state, ledger, events and reputation in one transaction, if any of them changed."""
        stepped = trade.step(
            self._trade_of(key),
            event,
            self._clock.now(),
            self._ids.name("t"),
            origin=self._region,
            term_s=self._intents.term_s(key),
        )
        after, reputation = stepped.trade, self._reputation.after(stepped.effects)
        over = after.is_over and isinstance(event, DelegationDemand) and event.need is DelegationNeed.NOTHING
        stored, at = self._stored.get(key), _store_key(key)
        puts, deletes = dict[str, bytes](), tuple[str, ...]()
        if over and stored is not None:
            deletes = (at,)
        elif not over and trade.durable(stored.trade if stored else WorkloadTrade(key)) != trade.durable(after):
            puts[at] = codec.dump(after)
        expect = {at: stored.revision if stored else 0} if puts or deletes else {}
        if reputation is not self.reputation:
            puts[REPUTATION] = codec.dump(reputation)

        def adopt(revision: int) -> None:
            self._reputation.adopt(reputation)
            for note in stepped.notes:
                if note.what in FINAL_EVENTS:
                    self._on_end(note.agreement)
            if over:
                self.trades.pop(key, None)
                self._stored.pop(key, None)
                return
            self.trades[key] = after
            if at in puts:
                self._stored[key] = StoredTrade(after, revision)

        writes = LedgerWrites(
            puts,
            deletes,
            expect,
            tuple(_log_event(key, note) for note in stepped.notes),
            tuple(_ledger_draft(key, note) for note in stepped.notes if note.what in LEDGER_NOTES),
        )
        return Transition(stepped.effects, writes if puts or deletes or stepped.notes else None, adopt)

    async def _read_again(self, key: WorkloadKey, doubtful: Transition[LedgerWrites, Any]) -> Callable[[], None]:
        record = await self._store.read(_store_key(key))
        stored = StoredTrade(codec.load(WorkloadTrade, record.value), record.revision) if record is not None else None
        follow_reputation = await self._reputation.read_again(REPUTATION, doubtful)

        def follow_store() -> None:
            self._follow_store(key, stored)
            follow_reputation()

        return follow_store

    def _follow_store(self, key: WorkloadKey, stored: StoredTrade | None) -> None:
        """Adopts the stored trade, unless it is the one that memory goes on from."""
        known = self._stored.get(key)
        if stored is None:
            if known is not None:
                self.trades.pop(key, None)
                self._stored.pop(key, None)
        elif known is None or stored.revision != known.revision:
            self.trades[key], self._stored[key] = stored.trade, stored


def _store_key(key: WorkloadKey) -> str:
    return f"{TRADES}{key}"


def _log_event(key: WorkloadKey, note: TradeNote) -> LogEvent:
    parts = (note.counterpart, note.code, note.terms)
    return LogEvent(note.what.upper(), note.agreement, "  ".join(part for part in parts if part), workload=key)


def _ledger_draft(key: WorkloadKey, note: TradeNote) -> LedgerDraft:
    return LedgerDraft(note.what, note.agreement, note.counterpart, str(key), note.code, note.terms, note.evidence)
