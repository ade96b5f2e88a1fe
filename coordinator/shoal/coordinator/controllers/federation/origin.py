"""Workloads of this region that other regions run: each workload's trade is persisted, then acted upon.

Calls to other regions are separate tasks, whose outcomes come back as events, so they never delay the region's step. A
call that a crash left unsent is retried by the trade machine, or given up by `trade.restore`.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, Final, Protocol, TypeVar

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.ledger import Ledger, LedgerDraft, LedgerWrites
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Transition, TransitionRunner
from shoal.coordinator.core.negotiation import reputation, trade, trade_times
from shoal.coordinator.core.negotiation.model import (
    Active,
    AwardFailed,
    AwardGranted,
    Awarding,
    Compare,
    ComparisonDone,
    DelegateNotice,
    DelegationDemand,
    DelegationNeed,
    IdleTrade,
    NoticeConfirmed,
    NoticeFailed,
    OriginAgreement,
    RecordDelivery,
    ReleaseConfirmed,
    ReleaseFailed,
    RenewalConfirmed,
    RenewalFailed,
    RoundAnswered,
    SendAward,
    SendNotice,
    SendRelease,
    SendRenewal,
    Solicit,
    Soliciting,
    TradeEffect,
    TradeEvent,
    TradeNote,
    TradePhase,
    WorkloadTrade,
)
from shoal.coordinator.core.negotiation.offer_selection import (
    DelegationTerms,
    OfferSelection,
    choose,
    request_hash,
    terms_for,
)
from shoal.coordinator.core.negotiation.peering import merge_peers
from shoal.coordinator.core.negotiation.spans import FINAL_EVENTS
from shoal.coordinator.core.negotiation.trust import matches_any
from shoal.coordinator.core.placement.model import without_standby
from shoal.coordinator.core.placement.rank import TermValues
from shoal.coordinator.core.workloads.cross_region_state import (
    CrossRegionState,
    DrainingHere,
    DrainingThere,
    MoveBackFailed,
    MovedForGood,
    MoveOutFailed,
    MovingBack,
    MovingOut,
    ReturnCooldown,
)
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.coordinator.core.workloads.schedule import demand_of
from shoal.coordinator.ports import (
    FederationLink,
    StoreRecord,
    VerifiedMessage,
)
from shoal.types.agreement import Award, Delivered, GatewayRef, Notice, Renewal, ServiceReport
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Answer, Offer, Solicitation
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import DelegationMode, Intent, Relaxation, WorkloadKey

T = TypeVar("T")

TRADES: Final = "trading/"
REPUTATION: Final = "reputation"
FEDERATION_S: Final = Seconds(trade_times.ANSWER_S + 1.0)
"""A federation that has not answered a solicitation by then counts as unreachable."""
DIRECT_ASKS_MOST: Final = 16
"""Regions solicited directly at most, while the federation is unreachable."""
ACCOUNT_INTERVAL_S: Final = Seconds(60.0)
"""Interval at which a live agreement's delivery counts in its region's reputation."""
REPORTS_MOST: Final = 1000
FAILING_S: Final = Seconds(1.0)
"""Gateways report their counts once a heartbeat: failures matter after this long without a success."""
OBSERVATIONS_KEPT: Final = 64
OBSERVATION_S: Final = Seconds(0.25)
"""Minimum time between two kept observations, so that those kept reach back beyond `FAILING_S`."""
ALL_FAILING_S: Final = Seconds(10.0)
"""A delegate that reports READY is left when at least `ALL_FAILING_LEAST` requests failed for this long and none
succeeded. This is longer than a delegate needs to notice and report a loss."""
ALL_FAILING_LEAST: Final = 5
REPORT_INTERVAL_S: Final = Seconds(10.0)
ENTRIES_MOST: Final = 200
"""Ledger entries in one report. Every REPORT_INTERVAL_S the federation gets deliveries and copies of entries."""
OUTCOME_UNKNOWN: Final = Refusal(Code.PEER_UNREACHABLE)
UNCERTAIN_CODES: Final = frozenset((Code.PEER_UNREACHABLE, Code.REGION_UNKNOWN))
"""A region that is no longer listed may come back, and what it did before still holds."""
ENDED_CODES: Final = frozenset(
    (
        Code.BID_UNKNOWN,
        Code.HOLD_EXPIRED,
        Code.HOLD_RELEASED,
        Code.AGREEMENT_UNKNOWN,
        Code.AGREEMENT_ENDED,
    )
)
LEDGER_NOTES: Final = frozenset(
    ("awarded", "granted", "renewed", "noticed", "released", "expired", "breached", "ended")
)


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """How a workload is placed in this region."""

    # True: this region has room for all its replicas now, even while another region runs it.
    is_placeable: bool
    # True: all wanted replicas serve here, and no route leads to another region.
    serves: bool


class LocalRegion(Protocol):
    """What the origin controller needs of its region."""

    def intents(self) -> tuple[Intent, ...]:
        """The region's own workloads, without guests."""
        ...

    def profiles(self) -> Mapping[str, ModelProfile]: ...
    def placement(self, key: WorkloadKey) -> LocalPlacement: ...
    def cross_region_state(self, key: WorkloadKey) -> CrossRegionState | None:
        """State of the workload's cross-region migration; None: there is none."""
        ...

    def may_leave(self, intent: Intent) -> bool:
        """Whether a move to another region that is not urgent may begin now."""
        ...

    def exclusions(self, key: WorkloadKey) -> frozenset[tuple[str, str]]:
        """Regions that gave wrong answers for the workload, each with the model's digest."""
        ...

    @property
    def moves_live(self) -> bool:
        """Whether workloads return to this region by a live move."""
        ...

    def figures(self, key: WorkloadKey) -> TermValues | None:
        """Figures of the best placement here (`offer_selection.own_values`); None: it has no place here."""
        ...

    def gateways(self) -> tuple[GatewayRef, ...]: ...
    def gateway_revocations(self) -> tuple[str, ...]:
        """Revoked serials of its gateways' certificates, which other regions must refuse."""
        ...

    def service_report(self, agreement: str) -> ServiceReport:
        """Service under an agreement as this region's gateways measured it."""
        ...


@dataclass(frozen=True, slots=True)
class Reputation:
    """What this region experienced of others."""

    # By region, from this region's own experience.
    trust: Mapping[str, float] = field(default_factory=dict)
    # Deliveries that the federation has not received yet.
    unreported: tuple[Delivered, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredTrade:
    """A trade as last written."""

    trade: WorkloadTrade
    # Store revision of that write.
    revision: int


@dataclass(frozen=True, slots=True)
class ServiceObservation:
    """Counts of this region's gateways under an agreement at one time, since the agreement began."""

    # When they were counted.
    at: Elapsed
    # Requests without an error.
    succeeded: int
    # Requests that failed.
    errors: int


@dataclass(frozen=True, slots=True)
class IndicativeResult:
    """The selection among indicative offers, and the terms that it was made by."""

    # All answers ranked, and the winner.
    selection: OfferSelection
    # What the answers were ranked by.
    terms: DelegationTerms
    # In the second round, which bound was relaxed; empty in the first.
    relaxation: str


class OriginController:
    """The origin's side of agreements: the loop of its trades, notices from delegates and fetches of lent models."""

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
        self.reputation = Reputation()
        self.delegations: Mapping[WorkloadKey, DelegatedWorkload] = {}
        self.peers: tuple[PeerTrust, ...] = ()
        """Regions whose gateways this region's gateways may connect to, because they run its workloads."""
        self._region = context.name
        self._store = context.store
        self._ledger = ledger
        self._local_region = local_region
        self._access = access
        self._peers = access.peers
        self._clock = context.clock
        self._ids = context.ids
        self._meter = context.meter
        self._federation = access.federation
        self._rtt = access.rtt
        self._on_change = on_change
        self._on_end = on_end
        self._runner = TransitionRunner[WorkloadKey, LedgerWrites](ledger.commit, self._read_again)
        self._reputation_runner = TransitionRunner[str, LedgerWrites](ledger.commit, self._read_reputation)
        self._stored: dict[WorkloadKey, StoredTrade] = {}
        self._awards: dict[str, Award] = {}
        self._last_accounts: dict[str, tuple[Elapsed, int]] = {}
        self._began_at: dict[str, Elapsed] = {}
        self._intents: tuple[tuple[Intent, ...], dict[WorkloadKey, Intent]] = ((), {})
        self._request_hashes: dict[WorkloadKey, tuple[Intent, str]] = {}
        self._observations: dict[str, tuple[ServiceObservation, ...]] = {}
        self._last_demands: dict[WorkloadKey, tuple[DelegationDemand, WorkloadTrade | None]] = {}
        """Each workload's last handled demand and the trade after it: handled again when either changed or is due."""
        self._report_at = Elapsed(-math.inf)
        self._drains_until = Elapsed(-math.inf)
        self._next_entry: int | None = None
        """Sequence of the first ledger entry that the federation lacks; None before the first report."""
        self._stepping = asyncio.Lock()
        self.calls = set[asyncio.Task[None]]()
        """Calls to other regions in progress."""

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        now = self._clock.now()
        for record in await self._store.scan(TRADES):
            stored = codec.load(WorkloadTrade, record.value)
            self._stored[stored.workload] = StoredTrade(stored, record.revision)
            self.trades[stored.workload] = trade.restore(stored, now)
        found = await self._store.read(REPUTATION)
        if found is not None:
            self.reputation = codec.load(Reputation, found.value)
        self._publish()

    def stop(self) -> None:
        """Cancels the calls in progress; after the next start their outcomes are requested again."""
        for call in self.calls:
            call.cancel()

    async def tick(self) -> None:
        """Advances every workload that is, or may be, delegated. Waits for the store only."""
        may = {
            key
            for key, intent in self._by_key().items()
            if intent.delegation.mode is not DelegationMode.NEVER and self.may_trade and not self._is_draining
        }
        self._last_demands = {key: told for key, told in self._last_demands.items() if key in self.trades}
        for key in sorted(may | self.trades.keys()):
            wish = self._demand(key, self._intent(key) if key in may else None)
            if self._is_due(key, wish):
                await self.handle(key, wish)
                self._last_demands[key] = (wish, self.trades.get(key))
        await self._account()
        self._publish()
        if self._federation is not None and self._clock.now() >= self._report_at and self.may_trade:
            self._report_at = Elapsed(self._clock.now() + REPORT_INTERVAL_S)
            self._start_call(self._report(self._federation))

    def _is_due(self, key: WorkloadKey, wish: DelegationDemand) -> bool:
        state = self.trades.get(key)
        if state is None or key in self._runner.uncertain or self._clock.now() >= trade.wake_at(state, wish.need):
            return True
        told, after = self._last_demands.get(key, (None, None))
        return told != wish or after is not state

    async def handle(self, key: WorkloadKey, event: TradeEvent) -> None:
        """Applies one event to one workload's trade. If the store takes no write, nothing changes, and it is tried
        again.
        """
        async with self._stepping:
            before = self.trades.get(key, WorkloadTrade(key))
            try:
                effects = await self._runner.run(key, lambda: self._step(key, event))
            except ShoalError:
                self._meter.count(metrics.TRADE_WRITES_FAILED)
                return
        for effect in effects:
            self._start_call(self._perform(key, effect))
        self._publish_of(key, before)

    async def on_notice(self, notice: VerifiedMessage[Notice]) -> None:
        """Handles the delegate's notice. Raises ShoalError(AGREEMENT_UNKNOWN) when no agreement here matches."""
        key = self._key_of(notice.content.agreement, notice.signer)
        await self.handle(key, DelegateNotice(notice.content, notice.evidence))

    async def authorise_fetch(self, region: str, agreement: str, digest: str) -> None:
        """Checks that a delegate may have these bytes: exactly the model of its bid, under an agreement in force.

        Raises ShoalError(AGREEMENT_UNKNOWN | TENANT_DENIED | RESIDENCY).
        """
        key = self._key_of(agreement, region)
        offer = _offer_of(self.trades[key], agreement)
        intent = self._intent(key)
        if offer is None or intent is None or digest != offer.model:
            raise refuse(Code.TENANT_DENIED, "a model that this agreement is not about", "the model of its bid")
        if not _may_go(intent, offer):
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
    def may_trade(self) -> bool:
        """Whether the region is in a federation."""
        return self._access.directory() is not None

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
        if not self.may_trade:
            return None
        name, terms = self._ids.name("t"), self._terms(intent, own)
        choice = await self._choose_indicative(
            self._solicitation(intent, profiles, name, 1, None, indicative=True), terms
        )
        step = choice.relaxation
        if step is None:
            return IndicativeResult(choice, terms, "")
        terms = replace(terms, require=step.require, limits=step.limits)
        asked = self._solicitation(intent, profiles, name, 2, step, indicative=True)
        return IndicativeResult(await self._choose_indicative(asked, terms), terms, step.change)

    async def _choose_indicative(self, asked: Solicitation, terms: DelegationTerms) -> OfferSelection:
        return choose([each.content for each in await self._ask(asked)], terms, indicative=True)

    # -- delegation demand -------------------------------------------------------------------------------------------

    def _demand(self, key: WorkloadKey, intent: Intent | None) -> DelegationDemand:
        """The workload's delegation demand now. intent: None where it must not be delegated."""
        if intent is None:
            return DelegationDemand(
                DelegationNeed.NOTHING,
                "",
                is_served_locally=self._intent(key) is None or self._serves_or_has_no_place(key),
            )
        standing, crossing = self._local_region.placement(key), self._local_region.cross_region_state(key)
        better = intent.delegation.mode is DelegationMode.WHEN_BETTER
        asked, live = self._request_hash(intent), self._local_region.moves_live
        fails, unmet = self._is_failing(key), self._failing_agreement(key) if standing.is_placeable else ""
        phase = self.trades.get(key, WorkloadTrade(key)).phase
        # The workload returned here recently: it leaves again only if it must, or if its documents changed since.
        if isinstance(crossing, ReturnCooldown):
            better = better and (isinstance(phase, Active) or crossing.request_hash not in ("", asked))
        if better and standing.is_placeable and isinstance(phase, IdleTrade):
            better = self._local_region.may_leave(intent)
        demand = partial(
            DelegationDemand,
            request_hash=asked,
            is_served_locally=standing.serves,
            is_failing=fails,
            failing_agreement=unmet,
        )
        match crossing:
            case MoveOutFailed() | DrainingThere() if standing.is_placeable:
                return demand(DelegationNeed.HOME)
            # An outbound migration whose agreement has ended says nothing: another agreement belongs to another one.
            case MovingOut() if crossing.agreement in ("", _agreement(phase)):
                return demand(DelegationNeed.MOVED, to=crossing.region)
            case DrainingHere(is_permanent=permanent) if crossing.agreement == _agreement(phase):
                return demand(DelegationNeed.MOVED, to=crossing.region, is_permanent=permanent)
            case MovedForGood() if crossing.agreement == _agreement(phase):
                return demand(DelegationNeed.MOVED, to=crossing.region, is_permanent=True)
            case MovingBack() | MoveBackFailed():
                return demand(DelegationNeed.HELD)
            case (
                None
                | ReturnCooldown()
                | MoveOutFailed()
                | DrainingThere()
                | MovingOut()
                | DrainingHere()
                | MovedForGood()
            ):
                pass
        if isinstance(phase, Active) and phase.stays:
            return demand(DelegationNeed.MOVED, to=phase.deal.region)
        if not standing.is_placeable:
            return demand(DelegationNeed.SHORT, by_live_move=live)
        return demand(DelegationNeed.BETTER if better else DelegationNeed.CONTENT, by_live_move=live)

    def _is_failing(self, key: WorkloadKey) -> bool:
        """Whether requests failed under the agreement since its delegate last answered, and none succeeded for
        FAILING_S.
        """
        state, now = self.trades.get(key), self._clock.now()
        deal = state.active_agreement if state is not None else None
        if deal is None or now - deal.heard_at < trade_times.LOST_S / 2:
            return False
        seen = self._observe(deal.agreement, self._local_region.service_report(deal.agreement))
        before = [each for each in seen if each.at <= deal.heard_at] or seen[:1]
        lately = [each for each in seen if each.at <= now - FAILING_S]
        newest = seen[-1]
        return bool(lately) and newest.succeeded == lately[-1].succeeded and newest.errors > before[-1].errors

    def _failing_agreement(self, key: WorkloadKey) -> str:
        """The agreement under which requests failed for ALL_FAILING_S up to now, and none succeeded, by the counts of
        each renewal; empty: none.
        """
        state, now = self.trades.get(key), self._clock.now()
        for deal in trade.serving_agreements(state, now) if state is not None else ():
            seen = self._observations.get(deal.agreement, ())
            before = [each for each in seen if each.at <= now - ALL_FAILING_S]
            half = [each for each in seen if each.at <= now - ALL_FAILING_S / 2]
            if before and seen[-1].succeeded == before[-1].succeeded:
                failed, lately = seen[-1].errors - before[-1].errors, seen[-1].errors - half[-1].errors
                if failed >= ALL_FAILING_LEAST and lately:
                    return deal.agreement
        return ""

    def _observe(self, agreement: str, report: ServiceReport) -> tuple[ServiceObservation, ...]:
        sight = ServiceObservation(self._clock.now(), report.requests - report.errors, report.errors)
        seen = self._observations.get(agreement, ())
        if len(seen) > 1 and seen[-1].at - seen[-2].at < OBSERVATION_S:
            seen = seen[:-1]  # too close to the one before: the newest replaces it
        self._observations[agreement] = (*seen, sight)[-OBSERVATIONS_KEPT:]
        return self._observations[agreement]

    def _serves_or_has_no_place(self, key: WorkloadKey) -> bool:
        """Whether there is nothing to wait for in this region."""
        standing = self._local_region.placement(key)
        return standing.serves or not standing.is_placeable

    def _request_hash(self, intent: Intent) -> str:
        """Cached for each adopted intent, because there may be many and every tick needs the hash."""
        known = self._request_hashes.get(intent.key)
        if known is None or known[0] is not intent:
            known = self._request_hashes[intent.key] = (intent, request_hash(intent))
        return known[1]

    def _terms(self, intent: Intent, own: TermValues | None) -> DelegationTerms:
        return terms_for(intent, own, self._rtt(), self._trust(), self._local_region.exclusions(intent.key))

    def _terms_of(self, key: WorkloadKey) -> DelegationTerms | None:
        intent = self._intent(key)
        if intent is None or intent.delegation.mode is DelegationMode.NEVER:
            return None
        return self._terms(intent, self._local_region.figures(key))

    def _trust(self) -> Mapping[str, float]:
        """Trust by region. This region's own experience takes precedence over the directory."""
        said = {each.region: each.trust for each in self._access.members}
        return {**said, **self.reputation.trust}

    def _intent(self, key: WorkloadKey) -> Intent | None:
        return self._by_key().get(key)

    def _by_key(self) -> Mapping[WorkloadKey, Intent]:
        intents = self._local_region.intents()
        if self._intents[0] is not intents:
            self._intents = (intents, {intent.key: intent for intent in intents})
            self._request_hashes = {
                key: known for key, known in self._request_hashes.items() if key in self._intents[1]
            }
        return self._intents[1]

    def _term_s(self, key: WorkloadKey) -> Seconds:
        intent = self._intent(key)
        return intent.delegation.term_s if intent is not None else Seconds(0.0)

    def _key_of(self, agreement: str, region: str) -> WorkloadKey:
        for key, state in self.trades.items():
            if (offer := _offer_of(state, agreement)) is not None and offer.region == region:
                return key
        raise refuse(Code.AGREEMENT_UNKNOWN, f"agreement {agreement!r:.80}", "one between these two regions that holds")

    def _publish(self) -> None:
        """Publishes delegations and peers to the region, from its next step on."""
        now = self._clock.now()
        delegated = {
            key: each
            for key, state in self.trades.items()
            if (each := _delegation_of(state, now, self._intent(key), self._rtt())) is not None
        }
        self._notify_region(delegated, self._peer_trust())

    def _publish_of(self, key: WorkloadKey, before: WorkloadTrade) -> None:
        """Publishes after a change of this one trade only, because there may be very many trades."""
        state = self.trades.get(key, WorkloadTrade(key))
        known = self.delegations.get(key)
        each = _delegation_of(state, self._clock.now(), self._intent(key), self._rtt())
        delegated = self.delegations
        if each != known:
            delegated = {other: one for other, one in delegated.items() if other != key}
            delegated |= {key: each} if each is not None else {}
        self._notify_region(delegated, self.peers if _peers_of(state) == _peers_of(before) else self._peer_trust())

    def _notify_region(self, delegated: Mapping[WorkloadKey, DelegatedWorkload], peers: tuple[PeerTrust, ...]) -> None:
        if (delegated, peers) != (self.delegations, self.peers):
            self.delegations, self.peers = delegated, peers
            self._on_change()

    def _peer_trust(self) -> tuple[PeerTrust, ...]:
        roots = {each.region: each.roots for each in self._access.members}
        met = sorted({each for state in self.trades.values() for each in _peers_of(state)})
        return merge_peers(
            PeerTrust(region, roots[region], names, (), revoked) for region, names, revoked in met if region in roots
        )

    # -- persisting --------------------------------------------------------------------------------------------------

    def _step(self, key: WorkloadKey, event: TradeEvent) -> Transition[LedgerWrites, tuple[TradeEffect, ...]]:
        """Stores state, ledger, events and reputation in one transaction, if any of them changed."""
        stepped = trade.step(
            self.trades.get(key, WorkloadTrade(key)),
            event,
            self._clock.now(),
            self._ids.name("t"),
            origin=self._region,
            term_s=self._term_s(key),
        )
        after, told = stepped.trade, self._reputation_after(stepped.effects)
        over = after.is_over and isinstance(event, DelegationDemand) and event.need is DelegationNeed.NOTHING
        stored, at = self._stored.get(key), _store_key(key)
        puts, deletes = dict[str, bytes](), tuple[str, ...]()
        if over and stored is not None:
            deletes = (at,)
        elif not over and trade.durable(stored.trade if stored else WorkloadTrade(key)) != trade.durable(after):
            puts[at] = codec.dump(after)
        expect = {at: stored.revision if stored else 0} if puts or deletes else {}
        if told is not self.reputation:
            puts[REPUTATION] = codec.dump(told)

        def adopt(revision: int) -> None:
            self.reputation = told
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
        writes = doubtful.writes
        follow_reputation = (
            await self._read_reputation(REPUTATION, doubtful) if writes and REPUTATION in writes.puts else None
        )

        def follow_store() -> None:
            self._follow_store(key, record)
            if follow_reputation is not None:
                follow_reputation()

        return follow_store

    def _follow_store(self, key: WorkloadKey, record: StoreRecord | None) -> None:
        """Adopts the stored trade, unless it is the one that memory goes on from."""
        known = self._stored.get(key)
        if record is None:
            if known is not None:
                self.trades.pop(key, None)
                self._stored.pop(key, None)
        elif known is None or record.revision != known.revision:
            stored = codec.load(WorkloadTrade, record.value)
            self.trades[key], self._stored[key] = stored, StoredTrade(stored, record.revision)

    async def _read_reputation(self, key: str, doubtful: Transition[LedgerWrites, Any]) -> Callable[[], None]:
        record = await self._store.read(key)
        stored = codec.load(Reputation, record.value) if record is not None else Reputation()

        def follow_store() -> None:
            self.reputation = stored

        return follow_store

    def _reputation_after(self, effects: Iterable[TradeEffect]) -> Reputation:
        told = self.reputation
        for effect in effects:
            if isinstance(effect, RecordDelivery):
                told = _with_delivery(told, self._delivery_of(effect))
        return told

    def _delivery_of(self, account: RecordDelivery) -> Delivered:
        """Delivered service as this region's gateways measured it, minus the RTT."""
        seen = self._local_region.service_report(account.agreement)
        way_s = self._rtt().get(account.region, 0.0)
        return Delivered(
            region=account.region,
            agreement=account.agreement,
            promised_p95_s=account.promised_p95_s,
            delivered_p95_s=Seconds(max(0.0, seen.latency_p95_s - way_s)),
            requests=seen.requests,
            breached=account.breached,
        )

    async def _account(self) -> None:
        """Counts agreements in the reputation while they last. Or else a region that lies could win everything before
        its first agreement ends.
        """
        now, lasting = self._clock.now(), list[Delivered]()
        deals = [deal for state in self.trades.values() if (deal := state.active_agreement) is not None]
        known = {deal.agreement: self._last_accounts.get(deal.agreement, (now, 0)) for deal in deals}
        for deal in deals:
            at, counted = known[deal.agreement]
            if now - at < ACCOUNT_INTERVAL_S:
                continue
            delivered = self._delivery_of(
                RecordDelivery(deal.region, deal.agreement, deal.offer.latency_p95_s, breached=False)
            )
            known[deal.agreement] = (now, delivered.requests)
            lasting += [delivered] if delivered.requests > counted else []
        self._last_accounts = known
        self._began_at = {name: since for name, since in self._began_at.items() if name in known}
        held = {deal.agreement for state in self.trades.values() for deal in _live_agreements(state)}
        self._observations = {name: seen for name, seen in self._observations.items() if name in held}
        if lasting:
            await self._update_reputation(lambda told: reduce(_with_delivery, lasting, told))

    async def _update_reputation(self, change: Callable[[Reputation], Reputation]) -> None:
        def step() -> Transition[LedgerWrites, None]:
            told = change(self.reputation)

            def adopt(revision: int) -> None:
                self.reputation = told

            return Transition(None, LedgerWrites({REPUTATION: codec.dump(told)}), adopt)

        async with self._stepping:
            try:
                await self._reputation_runner.run(REPUTATION, step)
            except ShoalError:
                self._meter.count(metrics.TRADE_WRITES_FAILED)

    async def _report(self, federation: FederationLink) -> None:
        told = self.reputation.unreported
        entries = (
            await self._ledger.entries_after(self._next_entry - 1, ENTRIES_MOST) if self._next_entry is not None else ()
        )
        if self._next_entry is not None and not told and not entries:
            return
        try:
            async with asyncio.timeout(FEDERATION_S):
                self._next_entry = max(1, await federation.report(told, entries))
        except (TimeoutError, ShoalError):
            self._meter.count(metrics.REPORTS_FAILED)
            return
        if told:
            sent = frozenset(told)
            await self._update_reputation(
                lambda now: replace(now, unreported=tuple(each for each in now.unreported if each not in sent))
            )

    # -- acting ------------------------------------------------------------------------------------------------------

    def _start_call(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(call)
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)

    async def _perform(self, key: WorkloadKey, effect: TradeEffect) -> None:
        match effect:
            case Solicit():
                await self._solicit(key, effect)
            case SendAward():
                await self._award(key, effect)
            case SendRelease(region=region, release=release):
                over = await self._has_ended(self._peers.release(region, release))
                await self.handle(key, ReleaseConfirmed(release.bid) if over else ReleaseFailed(release.bid))
            case SendNotice(region=region, notice=notice):
                over, name = await self._has_ended(self._peers.notify(region, notice)), notice.agreement
                await self.handle(key, NoticeConfirmed(name, notice.ends_s) if over else NoticeFailed(name))
            case SendRenewal():
                await self._send_renewal(key, effect)
            case Compare():
                await self._compare(key, effect)
            case RecordDelivery():
                pass  # `_step` stored it with the state

    async def _solicit(self, key: WorkloadKey, effect: Solicit) -> None:
        intent = self._intent(key)
        heard: tuple[VerifiedMessage[Answer], ...] = ()
        if intent is not None and self._request_hash(intent) == effect.request_hash:
            step = effect.relaxation
            asked = self._solicitation(intent, self._local_region.profiles(), effect.solicitation, effect.round, step)
            heard = await self._ask(replace(asked, to=(effect.to,)) if effect.to else asked)
        answers = tuple(each.content for each in heard)
        evidence = {each.signer: each.evidence for each in heard}
        await self.handle(key, RoundAnswered(effect.solicitation, effect.round, answers, self._terms_of(key), evidence))

    async def _compare(self, key: WorkloadKey, effect: Compare) -> None:
        intent, terms = self._intent(key), self._terms_of(key)
        if intent is None or terms is None:
            return
        best: Offer | None = None
        if effect.with_other_regions:
            name = self._ids.name("t")
            asked = self._solicitation(intent, self._local_region.profiles(), name, 1, None, indicative=True)
            best = (await self._choose_indicative(asked, replace(terms, own=None))).winner
        await self.handle(key, ComparisonDone(effect.agreement, terms, best, self._local_region.moves_live))

    async def _award(self, key: WorkloadKey, effect: SendAward) -> None:
        name = effect.award.agreement
        award = self._awards.setdefault(name, replace(effect.award, gateways=self._local_region.gateways()))
        asked_at = self._clock.now()
        outcome = await self._call(self._peers.award(effect.region, award))
        if isinstance(outcome, VerifiedMessage):
            await self.handle(key, AwardGranted(outcome.content, asked_at, outcome.evidence))
        else:
            await self.handle(key, AwardFailed(name, None if outcome is OUTCOME_UNKNOWN else outcome))
        if not isinstance(self.trades.get(key, WorkloadTrade(key)).phase, Awarding):
            self._awards.pop(name, None)

    async def _send_renewal(self, key: WorkloadKey, effect: SendRenewal) -> None:
        report = self._service_report(key, effect.agreement)
        home, head = self._local_region, self._ledger.head
        renewal = Renewal(
            effect.agreement, effect.sequence, effect.nonce, report, home.gateways(), head, home.gateway_revocations()
        )
        outcome = await self._call(self._peers.renew(effect.region, renewal))
        if isinstance(outcome, VerifiedMessage):
            self._ledger.record_head(effect.region, outcome.content.ledger_head)
            await self.handle(key, RenewalConfirmed(outcome.content, outcome.evidence))
        else:
            refusal = None if outcome is OUTCOME_UNKNOWN else outcome
            await self.handle(key, RenewalFailed(effect.agreement, effect.nonce, refusal))

    def _service_report(self, key: WorkloadKey, agreement: str) -> ServiceReport:
        """What this region's gateways counted since this process began to count, and what that time costs at the bid's
        price.
        """
        report, state = self._local_region.service_report(agreement), self.trades.get(key)
        self._observe(agreement, report)
        offer = _offer_of(state, agreement) if state is not None else None
        now = self._clock.now()
        hours = (now - self._began_at.setdefault(agreement, now)) / 3600
        return replace(report, cost_usd=offer.cost * hours) if offer is not None else report

    async def _call(self, call: Coroutine[Any, Any, T]) -> T | Refusal:
        """The other region's answer, or its refusal. OUTCOME_UNKNOWN: the call may have taken effect, or not."""
        try:
            async with asyncio.timeout(trade_times.CALL_S):
                return await call
        except TimeoutError:
            return OUTCOME_UNKNOWN
        except ShoalError as error:
            return OUTCOME_UNKNOWN if error.code in UNCERTAIN_CODES else error.refusal

    async def _has_ended(self, call: Coroutine[Any, Any, None]) -> bool:
        """Whether the other region confirmed the end, or does not know the bid or agreement."""
        outcome = await self._call(call)
        return outcome is None or outcome.code in ENDED_CODES

    # -- soliciting --------------------------------------------------------------------------------------------------

    def _solicitation(
        self,
        intent: Intent,
        profiles: Mapping[str, ModelProfile],
        name: str,
        number: int,
        step: Relaxation | None,
        *,
        indicative: bool = False,
    ) -> Solicitation:
        """The solicitation for one round. It asks for no standby: the standby stays in this region, where it does not
        fail together with the other region.
        """
        return Solicitation(
            id=name,
            round=number,
            origin=self._region,
            workload=intent.key,
            models=tuple(profiles[model.digest] for model in intent.models if model.digest in profiles),
            require=without_standby(step.require if step is not None else intent.require),
            limits=step.limits if step is not None else intent.limits,
            weights=intent.weights,
            traffic=demand_of(intent.traffic),
            max_batch=intent.max_batch,
            term_s=intent.delegation.term_s,
            answer_s=trade_times.ANSWER_S,
            indicative=indicative,
            to=intent.delegation.to,
            way_s=dict(self._rtt()),
        )

    async def _ask(self, asked: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        """Asks through the federation; if that is unreachable, asks each known region directly."""
        heard: tuple[VerifiedMessage[Answer], ...] | None = None
        if self._federation is not None:
            try:
                async with asyncio.timeout(FEDERATION_S):
                    heard = await self._federation.solicit(asked)
            except (TimeoutError, ShoalError):
                self._meter.count(metrics.SOLICITATIONS_DIRECT)
        if heard is None:
            heard = await self._ask_directly(asked)
        return tuple(each for each in heard if self._is_valid_answer(each, asked))

    async def _ask_directly(self, asked: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        regions = [
            each.region
            for each in sorted(
                self._access.members, key=lambda each: (self._rtt().get(each.region, math.inf), each.region)
            )
            if each.region != self._region and matches_any(asked.to, each.region)
        ]

        async def ask(region: str) -> VerifiedMessage[Answer] | None:
            try:
                async with asyncio.timeout(asked.answer_s):
                    return await self._peers.request_bid(region, asked)
            except (TimeoutError, ShoalError):
                return None

        found = await asyncio.gather(*(ask(region) for region in regions[:DIRECT_ASKS_MOST]))
        return tuple(each for each in found if each is not None)

    def _is_valid_answer(self, heard: VerifiedMessage[Answer], asked: Solicitation) -> bool:
        """Whether the answer is by its signer and to this solicitation. Others are left out and counted."""
        answer = heard.content
        fits = (answer.region, answer.solicitation, answer.round) == (heard.signer, asked.id, asked.round)
        if fits and isinstance(answer, Offer):
            models = {model.digest for model in asked.models}
            fits = answer.origin == self._region and answer.model in models and answer.region != self._region
        if not fits:
            self._meter.count(metrics.ANSWERS_INVALID)
        return fits


# -- values ----------------------------------------------------------------------------------------------------------


def _may_go(intent: Intent, offer: Offer) -> bool:
    """Whether residency allows the data of this workload in the region of that offer."""
    return intent.require.may_be_in(offer.region, offer.residency)


def _delegation_of(
    state: WorkloadTrade, now: Elapsed, intent: Intent | None, rtt_s: Mapping[str, Seconds]
) -> DelegatedWorkload | None:  # fmt: skip
    """intent: as the documents are now; they may forbid what was agreed before, and then nothing waits for its end."""
    wanted = trade.is_relied_on(state, now)
    returns = state.phase.returns if isinstance(state.phase, Active) and wanted else ""
    noticed = [each for each in state.leaving if each.code is not Code.BREACHED]
    ends = {each.deal.agreement: f"notice was given ({each.code})" for each in noticed}

    def entry(deal: OriginAgreement, *, ready: bool) -> DelegatedWorkload:
        way = Seconds(round(rtt_s.get(deal.region, 0.0), 3))  # rounded: every change of it causes a step
        return DelegatedWorkload(
            deal.agreement, deal.region, deal.gateways, is_ready=ready, is_wanted=wanted, model=deal.offer.model,
            precision=deal.offer.precision, return_reason=ends.get(deal.agreement, returns), rtt_s=way, bid=deal.offer,
            joules=deal.joules,
        )  # fmt: skip

    serving = [deal for deal in trade.serving_agreements(state, now) if intent is None or _may_go(intent, deal.offer)]
    if serving:
        return entry(serving[0], ready=True)
    deal = state.active_agreement
    if deal is not None and (intent is None or _may_go(intent, deal.offer)):
        return entry(deal, ready=False)
    return None


def _agreement(phase: TradePhase) -> str:
    return phase.deal.agreement if isinstance(phase, Active) else ""


def _live_agreements(state: WorkloadTrade) -> tuple[OriginAgreement, ...]:
    """Agreements under which requests may still be in flight."""
    deal = state.active_agreement
    leaving = [each.deal for each in state.leaving if each.code is not Code.BREACHED or each.deal.is_serving]
    return (*(() if deal is None else (deal,)), *leaving)


def _peers_of(state: WorkloadTrade) -> frozenset[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Regions that work for this trade, with the names of their gateways and the revoked serials of these."""
    return frozenset(
        (deal.region, tuple(sorted(each.name for each in deal.gateways)), deal.revoked)
        for deal in _live_agreements(state)
    )


def _offer_of(state: WorkloadTrade, agreement: str) -> Offer | None:
    """The offer behind an agreement that is awarded and not over."""
    if isinstance(state.phase, Awarding) and state.phase.award.agreement == agreement:
        return state.phase.offer
    deal = trade.agreement_of(state, agreement)
    return deal.offer if deal is not None else None


def _with_delivery(told: Reputation, delivered: Delivered) -> Reputation:
    unreported = (*told.unreported, delivered)[-REPORTS_MOST:]
    return Reputation(reputation.with_delivery(told.trust, delivered), unreported)


def _store_key(key: WorkloadKey) -> str:
    return f"{TRADES}{key}"


def _log_event(key: WorkloadKey, note: TradeNote) -> LogEvent:
    parts = (note.counterpart, note.code, note.terms)
    return LogEvent(note.what.upper(), note.agreement, "  ".join(part for part in parts if part), workload=key)


def _ledger_draft(key: WorkloadKey, note: TradeNote) -> LedgerDraft:
    return LedgerDraft(note.what, note.agreement, note.counterpart, str(key), note.code, note.terms, note.evidence)
