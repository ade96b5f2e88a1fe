"""What this region has others run: each workload's trade is persisted, then acted upon.

Calls to other regions are tasks of their own, whose outcomes come back as events; nothing here keeps the region's step
waiting. What a kill left unsent is sent again by the machine's own retries, or given up by `trade.restarted`.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final, Protocol, TypeVar

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.events import Event as LogEvent
from shoal.coordinator.controllers.ledger import Draft, Ledger
from shoal.coordinator.core.negotiation import reputation, trade
from shoal.coordinator.core.negotiation.choice import Choice, Figures, Terms, asked_of, choose, terms_for
from shoal.coordinator.core.negotiation.model import (
    Account,
    Active,
    Answered,
    AwardFailed,
    Awarding,
    Compare,
    Compared,
    Deal,
    Effect,
    Event,
    Granted,
    Need,
    Noted,
    NoticedBy,
    NoticeFailed,
    NoticeTaken,
    Phase,
    Released,
    ReleaseFailed,
    RenewalFailed,
    RenewedBy,
    Resting,
    SendAward,
    SendNotice,
    SendRelease,
    SendRenewal,
    Solicit,
    Soliciting,
    Stepped,
    Trade,
    Wish,
)
from shoal.coordinator.core.negotiation.peering import united
from shoal.coordinator.core.negotiation.spans import LAST
from shoal.coordinator.core.negotiation.trust import fits
from shoal.coordinator.core.placement.model import without_standby
from shoal.coordinator.core.workloads.model import Course, Delegated
from shoal.coordinator.core.workloads.schedule import demanded
from shoal.coordinator.ports import Clock, FederationLink, Heard, Ids, Meter, Peers, StaleRevision, Store
from shoal.types.agreement import Award, Delivered, GatewayRef, Notice, Renewal, ServiceReport
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Answer, Directory, Offer, Solicitation
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import DelegationMode, Intent, Relaxation, WorkloadKey

T = TypeVar("T")

TRADES: Final = "trades/"
REPUTATION: Final = "reputation"
FEDERATION_S: Final = Seconds(trade.ANSWER_S + 1.0)
"""A federation that has not answered a solicitation by then is taken as out of reach."""
ASKED_MOST: Final = 16
"""Regions that are asked directly, where the federation cannot be reached."""
ACCOUNT_S: Final = Seconds(60.0)
"""What an agreement delivers counts in its region's reputation so often while it lasts."""
UNREPORTED_MOST: Final = 1000
FAILING_S: Final = Seconds(1.0)
"""Gateways tell what they counted once a heartbeat: without a success for so long, failures count."""
SIGHTS_KEPT: Final = 64
SIGHT_S: Final = Seconds(0.25)
"""Between two that are kept, however often it is looked: so that they reach back beyond `FAILING_S`."""
UNMET_S: Final = Seconds(10.0)
"""A delegate that says that it serves is left when requests have failed for so long, `UNMET_LEAST` of them, and none
has not: longer than a loss there takes to be noticed and told."""
UNMET_LEAST: Final = 5
REPORT_S: Final = Seconds(10.0)
ENTRIES_MOST: Final = 200
"""The federation is told what was delivered, and given copies of so many ledger entries, so often."""
UNHEARD: Final = Refusal(Code.PEER_UNREACHABLE)
UNCERTAIN: Final = frozenset((Code.PEER_UNREACHABLE, Code.REGION_UNKNOWN))
"""A region that is listed no more may come back, and what it did before stands."""
OVER: Final = frozenset(
    (
        Code.BID_UNKNOWN,
        Code.HOLD_EXPIRED,
        Code.HOLD_RELEASED,
        Code.AGREEMENT_UNKNOWN,
        Code.AGREEMENT_ENDED,
    )
)
IN_LEDGER: Final = frozenset(("awarded", "granted", "renewed", "noticed", "released", "expired", "breached", "ended"))


@dataclass(frozen=True, slots=True)
class Standing:
    """How a workload stands at home. placed: it could have all its replicas here now, also while another region runs
    it. serves: all that is wanted serves here, and its route leads nowhere else."""

    placed: bool
    serves: bool


class Home(Protocol):
    """What trades need of their region."""

    def intents(self) -> tuple[Intent, ...]:
        """Its own workloads; no guests."""
        ...

    def profiles(self) -> Mapping[str, ModelProfile]: ...
    def standing(self, key: WorkloadKey) -> Standing: ...
    def course(self, key: WorkloadKey) -> Course | None:
        """On its way to another region or home; None: it is not."""
        ...

    def may_leave(self, intent: Intent) -> bool:
        """Whether a move to another region that could as well wait may begin now."""
        ...

    def barred(self, key: WorkloadKey) -> frozenset[tuple[str, str]]:
        """Regions that gave wrong answers for it, each with the model's digest."""
        ...

    @property
    def moves_live(self) -> bool:
        """Whether what is to come home does so by a live move."""
        ...

    def figures(self, key: WorkloadKey) -> Figures | None:
        """Of the best at home (`choice.own_figures`); None: it has no place here."""
        ...

    def gateways(self) -> tuple[GatewayRef, ...]: ...
    def revoked(self) -> tuple[str, ...]:
        """Serials of its gateways' certificates that others shall refuse."""
        ...

    def delivered(self, agreement: str) -> ServiceReport:
        """As this region's gateways saw it."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTrade:
    """at: the elapsed time of the coordinator that wrote it."""

    at: Elapsed
    trade: Trade


@dataclass(frozen=True, slots=True)
class Reputation:
    """trust: by region, of this region's own experience. unreported: what the federation was not told yet."""

    trust: Mapping[str, float] = field(default_factory=dict)
    unreported: tuple[Delivered, ...] = ()


@dataclass(frozen=True, slots=True)
class Sight:
    """What this region's gateways had counted under an agreement at some time, since it began."""

    at: Elapsed
    succeeded: int
    errors: int


@dataclass(frozen=True, slots=True)
class Indicative:
    """relaxed: in the second round, what had to give."""

    choice: Choice
    terms: Terms
    relaxed: str


class TradesController:
    """Region's side of OriginSide (notices, loans of bytes) and the loop of its trades."""

    def __init__(
        self,
        region: str,
        store: Store,
        ledger: Ledger,
        home: Home,
        peers: Peers,
        clock: Clock,
        ids: Ids,
        meter: Meter,
        *,
        federation: FederationLink | None,
        directory: Callable[[], Directory | None],
        rtt: Callable[[], Mapping[str, Seconds]],
        changed: Callable[[], None],
        ended: Callable[[str], None] = lambda name: None,
    ) -> None:
        """directory: None where the region is in no federation. rtt: round trips to other regions. changed: called when
        `delegated` or `peers` are others than before. ended: a negotiation did, of this solicitation or agreement."""
        self.trades: dict[WorkloadKey, Trade] = {}
        self.reputation = Reputation()
        self.delegated: Mapping[WorkloadKey, Delegated] = {}
        self.peers: tuple[PeerTrust, ...] = ()
        """Regions whose gateways this region's may meet because they work for it."""
        self._region = region
        self._store = store
        self._ledger = ledger
        self._home = home
        self._peers = peers
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._federation = federation
        self._directory = directory
        self._rtt = rtt
        self._changed = changed
        self._ended = ended
        self._unsure = set[WorkloadKey]()
        self._stored: dict[WorkloadKey, Trade] = {}
        self._awards: dict[str, Award] = {}
        self._accounted: dict[str, tuple[Elapsed, int]] = {}
        self._began: dict[str, Elapsed] = {}
        self._intents: tuple[tuple[Intent, ...], dict[WorkloadKey, Intent]] = ((), {})
        self._asked: dict[WorkloadKey, tuple[Intent, str]] = {}
        self._sights: dict[str, tuple[Sight, ...]] = {}
        self._told: dict[WorkloadKey, tuple[Wish, Trade | None]] = {}
        """Each workload's wish that was told last, and what came of it: told again when either is another, or in time.
        """
        self._report_at = Elapsed(-math.inf)
        self._drains_until = Elapsed(-math.inf)
        self._lacks: int | None = None
        """The first ledger entry that the federation lacks; None before it was asked."""
        self._stepping = asyncio.Lock()
        self.calls = set[asyncio.Task[None]]()
        """Under way to other regions."""

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        now = self._clock.now()
        for record in await self._store.scan(TRADES):
            stored = records.load(StoredTrade, record.value)
            self._stored[stored.trade.workload] = stored.trade
            self.trades[stored.trade.workload] = trade.restarted(stored.trade, stored.at, now)
        found = await self._store.read(REPUTATION)
        if found is not None:
            self.reputation = records.load(Reputation, found.value)
        self._publish()

    def stop(self) -> None:
        """Ends the calls under way; what came of them is asked again after the next start."""
        for call in self.calls:
            call.cancel()

    async def tick(self) -> None:
        """Looks at every workload that is, or may be, elsewhere. Waits for the store alone."""
        may = {
            key
            for key, intent in self._by_key().items()
            if intent.delegation.mode is not DelegationMode.NEVER and self.may_trade and not self._is_draining
        }
        self._told = {key: told for key, told in self._told.items() if key in self.trades}
        for key in sorted(may | self.trades.keys()):
            wish = self._wish(key, self._intent(key) if key in may else None)
            if self._is_news(key, wish):
                await self.tell(key, wish)
                self._told[key] = (wish, self.trades.get(key))
        await self._account()
        self._publish()
        if self._federation is not None and self._clock.now() >= self._report_at and self.may_trade:
            self._report_at = Elapsed(self._clock.now() + REPORT_S)
            self._begin(self._report(self._federation))

    def _is_news(self, key: WorkloadKey, wish: Wish) -> bool:
        state = self.trades.get(key)
        if state is None or key in self._unsure or self._clock.now() >= trade.wake_at(state, wish.need):
            return True
        told, after = self._told.get(key, (None, None))
        return told != wish or after is not state

    async def tell(self, key: WorkloadKey, event: Event) -> None:
        """One event of one workload's trade; a store that takes nothing leaves all as it was, to be tried again."""
        async with self._stepping:
            state = self.trades.get(key, Trade(key))
            stepped = trade.step(
                state,
                event,
                self._clock.now(),
                self._ids.name("t"),
                origin=self._region,
                term_s=self._term_s(key),
            )
            try:
                await self._persist(key, stepped, event)
            except (ShoalError, StaleRevision):
                self._unsure.add(key)  # it may be stored all the same
                self._meter.count("trades_not_stored")
                return
        for effect in stepped.effects:
            self._begin(self._perform(key, effect))
        self._publish_of(key, state)

    async def noticed(self, notice: Heard[Notice]) -> None:
        """The delegate's notice. Raises ShoalError(AGREEMENT_UNKNOWN) when it is not of an agreement of ours."""
        key = self._key_of(notice.what.agreement, notice.by)
        await self.tell(key, NoticedBy(notice.what, notice.evidence))

    async def lend(self, region: str, agreement: str, digest: str) -> None:
        """Whether a delegate may have these bytes: of the very model of its bid, under an agreement that holds.

        Raises ShoalError(AGREEMENT_UNKNOWN | TENANT_DENIED | RESIDENCY)."""
        key = self._key_of(agreement, region)
        offer = _offer_of(self.trades[key], agreement)
        intent = self._intent(key)
        if offer is None or intent is None or digest != offer.model:
            raise refuse(Code.TENANT_DENIED, "a model that this agreement is not about", "the model of its bid")
        if not _may_go(intent, offer):
            allowed = ", ".join(intent.require.residency)
            raise refuse(Code.RESIDENCY, f"{region} lies in {offer.residency or region}", allowed)

    def drain(self, until: Elapsed) -> None:
        """Until then no trade begins, and those that are end as if no policy delegated: home first."""
        self._drains_until = until

    @property
    def _is_draining(self) -> bool:
        return self._clock.now() < self._drains_until

    @property
    def owed(self) -> int:
        """Agreements, and awards, that are not over."""
        return sum(
            len(state.leaving) + (not isinstance(state.phase, Resting | Soliciting)) for state in self.trades.values()
        )

    @property
    def turned(self) -> Mapping[WorkloadKey, Refusal]:
        """Why the last trade of a workload came to nothing."""
        resting = ((key, state.phase) for key, state in self.trades.items() if isinstance(state.phase, Resting))
        return {key: phase.refusal for key, phase in resting if phase.refusal is not None}

    @property
    def may_trade(self) -> bool:
        """Whether there is anybody to trade with."""
        return self._directory() is not None

    async def indicative(
        self, intent: Intent, profiles: Mapping[str, ModelProfile], own: Figures | None
    ) -> Indicative | None:
        """What others would offer for a workload as it is proposed, in both rounds; nothing is held. None: it would not
        be solicited: its policy delegates never, or only what has no place at home, or there is nobody to ask."""
        mode = intent.delegation.mode
        if mode is DelegationMode.NEVER or (mode is DelegationMode.WHEN_INFEASIBLE and own is not None):
            return None
        if not self.may_trade:
            return None
        name, terms = self._ids.name("t"), self._terms(intent, own)
        choice = await self._indicative(self._solicitation(intent, profiles, name, 1, None, indicative=True), terms)
        step = choice.relaxation
        if step is None:
            return Indicative(choice, terms, "")
        terms = replace(terms, require=step.require, limits=step.limits)
        asked = self._solicitation(intent, profiles, name, 2, step, indicative=True)
        return Indicative(await self._indicative(asked, terms), terms, step.change)

    async def _indicative(self, asked: Solicitation, terms: Terms) -> Choice:
        return choose([each.what for each in await self._ask(asked)], terms, indicative=True)

    # -- how things stand --------------------------------------------------------------------------------------------

    def _wish(self, key: WorkloadKey, intent: Intent | None) -> Wish:
        """intent: None where it must not be delegated."""
        if intent is None:
            return Wish(Need.NOTHING, "", home_serves=self._intent(key) is None or self._serves_or_cannot(key))
        standing, course = self._home.standing(key), self._home.course(key)
        better = intent.delegation.mode is DelegationMode.WHEN_BETTER
        asked, live = self._asked_of(intent), self._home.moves_live
        fails, unmet = self._fails(key), self._unmet(key) if standing.placed else ""
        phase = self.trades.get(key, Trade(key)).phase
        if course is not None and course.rests:
            better = better and (isinstance(phase, Active) or course.asked not in ("", asked))
            course = None
        if better and standing.placed and isinstance(phase, Resting):
            better = self._home.may_leave(intent)
        need = (Need.BETTER if better else Need.CONTENT) if standing.placed else Need.SHORT
        if course is not None and course.leaves and standing.placed:
            return Wish(Need.HOME, asked, standing.serves, fails, unmet)
        over = course is not None and course.agreement not in ("", _agreement(phase))
        if course is not None and course.goes and over:
            course = None  # what it goes towards has ended: another agreement is another move's
        if course is not None and not course.leaves and course.goes:
            return Wish(Need.MOVED, asked, standing.serves, fails, unmet, course.region, stays=course.stays)
        if course is not None and not course.leaves:
            return Wish(Need.HELD, asked, standing.serves, fails, unmet)
        if isinstance(phase, Active) and phase.stays:
            return Wish(Need.MOVED, asked, standing.serves, fails, unmet, phase.deal.region)
        return Wish(need, asked, standing.serves, fails, unmet, live=live)

    def _fails(self, key: WorkloadKey) -> bool:
        """Whether, since its delegate was last heard, requests failed under the agreement, and for a moment none did
        not."""
        state, now = self.trades.get(key), self._clock.now()
        if state is None or not isinstance(state.phase, Active) or now - state.phase.deal.heard_at < trade.LOST_S / 2:
            return False
        deal = state.phase.deal
        seen = self._see(deal.agreement, self._home.delivered(deal.agreement))
        before = [each for each in seen if each.at <= deal.heard_at] or seen[:1]
        lately = [each for each in seen if each.at <= now - FAILING_S]
        newest = seen[-1]
        return bool(lately) and newest.succeeded == lately[-1].succeeded and newest.errors > before[-1].errors

    def _unmet(self, key: WorkloadKey) -> str:
        """The agreement under which its requests have failed for `UNMET_S`, to the end of it, and none has not, as was
        counted for each renewal; empty: none."""
        state, now = self.trades.get(key), self._clock.now()
        for deal in trade.serving(state, now) if state is not None else ():
            seen = self._sights.get(deal.agreement, ())
            before = [each for each in seen if each.at <= now - UNMET_S]
            half = [each for each in seen if each.at <= now - UNMET_S / 2]
            if before and seen[-1].succeeded == before[-1].succeeded:
                failed, lately = seen[-1].errors - before[-1].errors, seen[-1].errors - half[-1].errors
                if failed >= UNMET_LEAST and lately:
                    return deal.agreement
        return ""

    def _see(self, agreement: str, report: ServiceReport) -> tuple[Sight, ...]:
        sight = Sight(self._clock.now(), report.requests - report.errors, report.errors)
        seen = self._sights.get(agreement, ())
        if len(seen) > 1 and seen[-1].at - seen[-2].at < SIGHT_S:
            seen = seen[:-1]  # too near the one before: the newest stands for both
        self._sights[agreement] = (*seen, sight)[-SIGHTS_KEPT:]
        return self._sights[agreement]

    def _serves_or_cannot(self, key: WorkloadKey) -> bool:
        """Whether nothing is to be waited for at home."""
        standing = self._home.standing(key)
        return standing.serves or not standing.placed

    def _asked_of(self, intent: Intent) -> str:
        """Once for each intent that is adopted: there may be many, and they are looked at all the time."""
        known = self._asked.get(intent.key)
        if known is None or known[0] is not intent:
            known = self._asked[intent.key] = (intent, asked_of(intent))
        return known[1]

    def _terms(self, intent: Intent, own: Figures | None) -> Terms:
        return terms_for(intent, own, self._rtt(), self._trust(), self._home.barred(intent.key))

    def _terms_of(self, key: WorkloadKey) -> Terms | None:
        intent = self._intent(key)
        if intent is None or intent.delegation.mode is DelegationMode.NEVER:
            return None
        return self._terms(intent, self._home.figures(key))

    def _trust(self) -> Mapping[str, float]:
        """What this region has seen of another counts before what the federation says of it."""
        directory = self._directory()
        said = {each.region: each.trust for each in directory.members} if directory is not None else {}
        return {**said, **self.reputation.trust}

    def _intent(self, key: WorkloadKey) -> Intent | None:
        return self._by_key().get(key)

    def _by_key(self) -> Mapping[WorkloadKey, Intent]:
        intents = self._home.intents()
        if self._intents[0] is not intents:
            self._intents = (intents, {intent.key: intent for intent in intents})
            self._asked = {key: known for key, known in self._asked.items() if key in self._intents[1]}
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
        """What the region reads, from its next step on."""
        now = self._clock.now()
        delegated = {
            key: each
            for key, state in self.trades.items()
            if (each := _delegated(state, now, self._intent(key), self._rtt())) is not None
        }
        self._tell_region(delegated, self._peers_met())

    def _publish_of(self, key: WorkloadKey, before: Trade) -> None:
        """The same where nothing but this trade is another than before: there may be very many."""
        state = self.trades.get(key, Trade(key))
        known = self.delegated.get(key)
        each = _delegated(state, self._clock.now(), self._intent(key), self._rtt())
        delegated = self.delegated
        if each != known:
            delegated = {other: one for other, one in delegated.items() if other != key}
            delegated |= {key: each} if each is not None else {}
        self._tell_region(delegated, self.peers if _met(state) == _met(before) else self._peers_met())

    def _tell_region(self, delegated: Mapping[WorkloadKey, Delegated], peers: tuple[PeerTrust, ...]) -> None:
        if (delegated, peers) != (self.delegated, self.peers):
            self.delegated, self.peers = delegated, peers
            self._changed()

    def _peers_met(self) -> tuple[PeerTrust, ...]:
        directory = self._directory()
        roots = {each.region: each.roots for each in directory.members} if directory is not None else {}
        met = sorted({each for state in self.trades.values() for each in _met(state)})
        return united(
            PeerTrust(region, roots[region], names, (), revoked) for region, names, revoked in met if region in roots
        )

    # -- persisting --------------------------------------------------------------------------------------------------

    async def _persist(self, key: WorkloadKey, stepped: Stepped, event: Event) -> None:
        """State, ledger, log and reputation in one transaction, where anything in them changed."""
        after = stepped.trade
        over = after.is_over and isinstance(event, Wish) and event.need is Need.NOTHING
        stored = self._stored.get(key)
        unsure = key in self._unsure
        told = self._reputation_after(stepped.effects)
        puts, deletes = dict[str, bytes](), tuple[str, ...]()
        if over and (stored is not None or unsure):
            deletes = (_stored_at(key),)
        elif not over and (unsure or trade.durable(stored or Trade(key)) != trade.durable(after)):
            puts[_stored_at(key)] = records.dump(StoredTrade(self._clock.now(), after))
        if told is not self.reputation:
            puts[REPUTATION] = records.dump(told)
        if puts or deletes or stepped.notes:
            await self._ledger.commit(
                puts,
                deletes=deletes,
                events=[_logged(key, note) for note in stepped.notes],
                drafts=[_drafted(key, note) for note in stepped.notes if note.what in IN_LEDGER],
            )
        self.reputation = told
        self._unsure.discard(key)
        for note in stepped.notes:
            if note.what in LAST:
                self._ended(note.agreement)
        if over:
            self.trades.pop(key, None)
            self._stored.pop(key, None)
            return
        self.trades[key] = after
        if _stored_at(key) in puts:
            self._stored[key] = after

    def _reputation_after(self, effects: Iterable[Effect]) -> Reputation:
        told = self.reputation
        for effect in effects:
            if isinstance(effect, Account):
                told = _with(told, self._delivered(effect))
        return told

    def _delivered(self, account: Account) -> Delivered:
        """As this region's gateways saw it, the way taken off."""
        seen = self._home.delivered(account.agreement)
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
        """Agreements that last count while they last: a region that lies would else win all it can before the first
        one ends."""
        now, lasting = self._clock.now(), list[Delivered]()
        deals = [state.phase.deal for state in self.trades.values() if isinstance(state.phase, Active)]
        known = {deal.agreement: self._accounted.get(deal.agreement, (now, 0)) for deal in deals}
        for deal in deals:
            at, counted = known[deal.agreement]
            if now - at < ACCOUNT_S:
                continue
            delivered = self._delivered(Account(deal.region, deal.agreement, deal.offer.latency_p95_s, breached=False))
            known[deal.agreement] = (now, delivered.requests)
            lasting += [delivered] if delivered.requests > counted else []
        self._accounted = known
        self._began = {name: since for name, since in self._began.items() if name in known}
        held = {deal.agreement for state in self.trades.values() for deal in _deals(state)}
        self._sights = {name: seen for name, seen in self._sights.items() if name in held}
        if lasting:
            await self._keep(lambda told: reduce(_with, lasting, told))

    async def _keep(self, change: Callable[[Reputation], Reputation]) -> None:
        async with self._stepping:
            told = change(self.reputation)
            try:
                await self._ledger.commit({REPUTATION: records.dump(told)})
            except (ShoalError, StaleRevision):
                self._meter.count("trades_not_stored")
                return
            self.reputation = told

    async def _report(self, federation: FederationLink) -> None:
        told = self.reputation.unreported
        entries = await self._ledger.past(self._lacks - 1, ENTRIES_MOST) if self._lacks is not None else ()
        if self._lacks is not None and not told and not entries:
            return
        try:
            async with asyncio.timeout(FEDERATION_S):
                self._lacks = max(1, await federation.report(told, entries))
        except (TimeoutError, ShoalError):
            self._meter.count("reports_failed")
            return
        if told:
            sent = frozenset(told)
            await self._keep(
                lambda now: replace(now, unreported=tuple(each for each in now.unreported if each not in sent))
            )

    # -- acting ------------------------------------------------------------------------------------------------------

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(call)
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)

    async def _perform(self, key: WorkloadKey, effect: Effect) -> None:
        match effect:
            case Solicit():
                await self._solicit(key, effect)
            case SendAward():
                await self._award(key, effect)
            case SendRelease(region=region, release=release):
                over = await self._is_over(self._peers.release(region, release))
                await self.tell(key, Released(release.bid) if over else ReleaseFailed(release.bid))
            case SendNotice(region=region, notice=notice):
                over, name = await self._is_over(self._peers.notify(region, notice)), notice.agreement
                await self.tell(key, NoticeTaken(name, notice.ends_s) if over else NoticeFailed(name))
            case SendRenewal():
                await self._renew(key, effect)
            case Compare():
                await self._compare(key, effect)
            case Account():
                pass  # written with the state that it came with

    async def _solicit(self, key: WorkloadKey, effect: Solicit) -> None:
        intent = self._intent(key)
        heard: tuple[Heard[Answer], ...] = ()
        if intent is not None and self._asked_of(intent) == effect.asked:
            step = effect.relaxation
            asked = self._solicitation(intent, self._home.profiles(), effect.solicitation, effect.round, step)
            heard = await self._ask(replace(asked, to=(effect.to,)) if effect.to else asked)
        answers = tuple(each.what for each in heard)
        evidence = {each.by: each.evidence for each in heard}
        await self.tell(key, Answered(effect.solicitation, effect.round, answers, self._terms_of(key), evidence))

    async def _compare(self, key: WorkloadKey, effect: Compare) -> None:
        intent, terms = self._intent(key), self._terms_of(key)
        if intent is None or terms is None:
            return
        best: Offer | None = None
        if effect.abroad:
            name = self._ids.name("t")
            asked = self._solicitation(intent, self._home.profiles(), name, 1, None, indicative=True)
            best = (await self._indicative(asked, replace(terms, own=None))).winner
        await self.tell(key, Compared(effect.agreement, terms, best, self._home.moves_live))

    async def _award(self, key: WorkloadKey, effect: SendAward) -> None:
        name = effect.award.agreement
        award = self._awards.setdefault(name, replace(effect.award, gateways=self._home.gateways()))
        asked_at = self._clock.now()
        outcome = await self._reach(self._peers.award(effect.region, award))
        if isinstance(outcome, Heard):
            await self.tell(key, Granted(outcome.what, asked_at, outcome.evidence))
        else:
            await self.tell(key, AwardFailed(name, None if outcome is UNHEARD else outcome))
        if not isinstance(self.trades.get(key, Trade(key)).phase, Awarding):
            self._awards.pop(name, None)

    async def _renew(self, key: WorkloadKey, effect: SendRenewal) -> None:
        report = self._metered(key, effect.agreement)
        home, head = self._home, self._ledger.head
        renewal = Renewal(
            effect.agreement, effect.sequence, effect.nonce, report, home.gateways(), head, home.revoked()
        )
        outcome = await self._reach(self._peers.renew(effect.region, renewal))
        if isinstance(outcome, Heard):
            self._ledger.shown(effect.region, outcome.what.ledger_head)
            await self.tell(key, RenewedBy(outcome.what, outcome.evidence))
        else:
            refusal = None if outcome is UNHEARD else outcome
            await self.tell(key, RenewalFailed(effect.agreement, effect.nonce, refusal))

    def _metered(self, key: WorkloadKey, agreement: str) -> ServiceReport:
        """What this region's gateways counted since this process began to, and what that time costs at the bid's
        price."""
        report, state = self._home.delivered(agreement), self.trades.get(key)
        self._see(agreement, report)
        offer = _offer_of(state, agreement) if state is not None else None
        now = self._clock.now()
        hours = (now - self._began.setdefault(agreement, now)) / 3600
        return replace(report, cost_usd=offer.cost * hours) if offer is not None else report

    async def _reach(self, call: Coroutine[Any, Any, T]) -> T | Refusal:
        """What another region answered, or why it refused; UNHEARD: it may have been done, or not."""
        try:
            async with asyncio.timeout(trade.CALL_S):
                return await call
        except TimeoutError:
            return UNHEARD
        except ShoalError as error:
            return UNHEARD if error.code in UNCERTAIN else error.refusal

    async def _is_over(self, call: Coroutine[Any, Any, None]) -> bool:
        """Whether the other region said that it has ended what it was told to end, or knows of none."""
        outcome = await self._reach(call)
        return outcome is None or outcome.code in OVER

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
        """A standby is for home to keep, where it does not fall with the other region."""
        return Solicitation(
            id=name,
            round=number,
            origin=self._region,
            workload=intent.key,
            models=tuple(profiles[model.digest] for model in intent.models if model.digest in profiles),
            require=without_standby(step.require if step is not None else intent.require),
            limits=step.limits if step is not None else intent.limits,
            weights=intent.weights,
            traffic=demanded(intent.traffic),
            max_batch=intent.max_batch,
            term_s=intent.delegation.term_s,
            answer_s=trade.ANSWER_S,
            indicative=indicative,
            to=intent.delegation.to,
            way_s=dict(self._rtt()),
        )

    async def _ask(self, asked: Solicitation) -> tuple[Heard[Answer], ...]:
        """Through the federation; each region that is known directly where that cannot be reached."""
        heard: tuple[Heard[Answer], ...] | None = None
        if self._federation is not None:
            try:
                async with asyncio.timeout(FEDERATION_S):
                    heard = await self._federation.solicit(asked)
            except (TimeoutError, ShoalError):
                self._meter.count("solicitations_direct")
        if heard is None:
            heard = await self._ask_directly(asked)
        return tuple(each for each in heard if self._is_answer(each, asked))

    async def _ask_directly(self, asked: Solicitation) -> tuple[Heard[Answer], ...]:
        directory = self._directory()
        members = directory.members if directory is not None else ()
        regions = [
            each.region
            for each in sorted(members, key=lambda each: (self._rtt().get(each.region, math.inf), each.region))
            if each.region != self._region and fits(asked.to, each.region)
        ]

        async def ask(region: str) -> Heard[Answer] | None:
            try:
                async with asyncio.timeout(asked.answer_s):
                    return await self._peers.bid(region, asked)
            except (TimeoutError, ShoalError):
                return None

        found = await asyncio.gather(*(ask(region) for region in regions[:ASKED_MOST]))
        return tuple(each for each in found if each is not None)

    def _is_answer(self, heard: Heard[Answer], asked: Solicitation) -> bool:
        """Of whom it says, and to what was asked. Anything else is left out and counted."""
        answer = heard.what
        fits = (answer.region, answer.solicitation, answer.round) == (heard.by, asked.id, asked.round)
        if fits and isinstance(answer, Offer):
            models = {model.digest for model in asked.models}
            fits = answer.origin == self._region and answer.model in models and answer.region != self._region
        if not fits:
            self._meter.count("answers_invalid")
        return fits


# -- values ----------------------------------------------------------------------------------------------------------


def _may_go(intent: Intent, offer: Offer) -> bool:
    """Whether the data of this workload may go to the region of that offer."""
    return intent.require.may_be_in(offer.region, offer.residency)


def _delegated(
    state: Trade, now: Elapsed, intent: Intent | None, way_s: Mapping[str, Seconds]
) -> Delegated | None:  # fmt: skip
    """intent: as its documents say now, which may forbid what was agreed before: then nothing waits for its end."""
    wanted = trade.is_relied_on(state, now)
    returns = state.phase.returns if isinstance(state.phase, Active) and wanted else ""
    noticed = [each for each in state.leaving if each.code is not Code.BREACHED]
    ends = {each.deal.agreement: f"notice was given ({each.code})" for each in noticed}

    def told(deal: Deal, *, ready: bool) -> Delegated:
        way = Seconds(round(way_s.get(deal.region, 0.0), 3))  # every change of it is a step of the region
        return Delegated(
            deal.agreement, deal.region, deal.gateways, ready=ready, wanted=wanted, model=deal.offer.model,
            precision=deal.offer.precision, returns=ends.get(deal.agreement, returns), way_s=way, bid=deal.offer,
            joules=deal.joules,
        )  # fmt: skip

    serving = [deal for deal in trade.serving(state, now) if intent is None or _may_go(intent, deal.offer)]
    if serving:
        return told(serving[0], ready=True)
    if isinstance(state.phase, Active) and (intent is None or _may_go(intent, state.phase.deal.offer)):
        return told(state.phase.deal, ready=False)
    return None


def _agreement(phase: Phase) -> str:
    return phase.deal.agreement if isinstance(phase, Active) else ""


def _deals(state: Trade) -> tuple[Deal, ...]:
    """Agreements under which requests may still be on their way."""
    active = (state.phase.deal,) if isinstance(state.phase, Active) else ()
    return (*active, *(each.deal for each in state.leaving if each.code is not Code.BREACHED or each.deal.serves))


def _met(state: Trade) -> frozenset[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Regions that work for this trade, their gateways for it, and which certificates of these are refused."""
    return frozenset(
        (deal.region, tuple(sorted(each.name for each in deal.gateways)), deal.revoked) for deal in _deals(state)
    )


def _offer_of(state: Trade, agreement: str) -> Offer | None:
    """What was bid for an agreement that is awarded and not over."""
    if isinstance(state.phase, Awarding) and state.phase.award.agreement == agreement:
        return state.phase.offer
    deal = trade.deal_of(state, agreement)
    return deal.offer if deal is not None else None


def _with(told: Reputation, delivered: Delivered) -> Reputation:
    unreported = (*told.unreported, delivered)[-UNREPORTED_MOST:]
    return Reputation(reputation.after(told.trust, delivered), unreported)


def _stored_at(key: WorkloadKey) -> str:
    return f"{TRADES}{key}"


def _logged(key: WorkloadKey, note: Noted) -> LogEvent:
    parts = (note.counterpart, note.code, note.terms)
    return LogEvent(note.what.upper(), note.agreement, "  ".join(part for part in parts if part), workload=key)


def _drafted(key: WorkloadKey, note: Noted) -> Draft:
    return Draft(note.what, note.agreement, note.counterpart, str(key), note.code, note.terms, note.evidence)
