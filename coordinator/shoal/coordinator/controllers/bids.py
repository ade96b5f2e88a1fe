"""What this region answers other regions that ask it to run something: bids, agreements, and what comes of them.

Each transition is committed with its ledger entry before it is answered. All of it happens while no step of the region
does, so that nothing is promised that a step gives away meanwhile.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.buckets import Buckets
from shoal.coordinator.controllers.catalog import Catalog, Guest
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.ledger import Draft, Ledger
from shoal.coordinator.controllers.lent import LentModels
from shoal.coordinator.controllers.models import ModelsController
from shoal.coordinator.controllers.workloads import WorkloadsController
from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.negotiation import hold, standing
from shoal.coordinator.core.negotiation.bid import answer, guest, outside_of, way_s
from shoal.coordinator.core.negotiation.hold import Granted, Held, State, Stopping, Terms
from shoal.coordinator.core.negotiation.peering import united
from shoal.coordinator.core.negotiation.standing import Standing
from shoal.coordinator.core.negotiation.trust import denied
from shoal.coordinator.core.placement.model import Reservation
from shoal.coordinator.core.workloads.delivered import delivered
from shoal.coordinator.core.workloads.invariants import Promise
from shoal.coordinator.core.workloads.routes import gateways, is_gateway
from shoal.coordinator.ports import Clock, Heard, Ids, Meter, Peers, StaleRevision, Store
from shoal.types.agreement import (
    GUESTS,
    Award,
    Grant,
    Notice,
    Release,
    Renewal,
    Renewed,
    Service,
    ServiceReport,
)
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Answer, Decline, Member, Offer, Solicitation
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey
from shoal.wire.identity import check_name

DEALS: Final = "deals/"
STANDINGS: Final = "standings"
ATTEMPTS: Final = 3
WRITTEN_EVERY_S: Final = 60.0
"""A renewal that changes nothing but the lease is written so often: what a restart forgets, it grants anew."""
NOTICE_S: Final = Seconds(30.0)
"""How long this region still serves what it gave notice of."""
RETRY_S: Final = Seconds(1.0)
SOLICITED_BURST: Final = 100.0
SOLICITED_PER_S: Final = 20.0
REGIONS_MOST: Final = 1000
SOLICITATION_BYTES: Final = 256 * 1024
MESSAGE_BYTES: Final = 64 * 1024
"""What a counterpart signed is kept as evidence: a long one is no message of this kind."""


class OriginSide(Protocol):
    """What the same messages mean for a region that has something run elsewhere."""

    async def noticed(self, notice: Heard[Notice]) -> None:
        """Raises ShoalError(AGREEMENT_UNKNOWN)."""
        ...

    async def lend(self, region: str, agreement: str, digest: str) -> None:
        """Raises ShoalError(AGREEMENT_UNKNOWN | TENANT_DENIED | RESIDENCY)."""
        ...


@dataclass(frozen=True, slots=True)
class StoredDeal:
    """since: when the bid was made."""

    state: State
    since: Wall


@dataclass(frozen=True, slots=True)
class Standings:
    """of: each region that holds were made for, as this one saw it."""

    of: Mapping[str, Standing] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deal:
    """revision, written_at: of what the store holds."""

    state: State
    since: Wall
    revision: int
    written_at: Elapsed

    @property
    def offer(self) -> Offer:
        return hold.offer_of(self.state)

    @property
    def granted(self) -> Granted | None:
        return hold.agreed(self.state)


async def stored_guests(store: Store, region: str) -> tuple[Guest, ...]:
    """What `region` runs for others by what is written, for who only reads."""
    stored = [records.load(StoredDeal, record.value) for record in await store.scan(DEALS)]
    return tuple(_guest(granted, region) for each in stored if (granted := hold.agreed(each.state)) is not None)


class BidsController:
    """Implements ports.PeerEvents. region: this one's name. changed: called when `peers` may have changed."""

    def __init__(
        self,
        region: str,
        store: Store,
        ledger: Ledger,
        workloads: WorkloadsController,
        models: ModelsController,
        fleet: Callable[[], Fleet],
        clock: Clock,
        ids: Ids,
        meter: Meter,
        *,
        peers: Peers,
        origin: OriginSide,
        listed: Callable[[str], Member | None],
        changed: Callable[[], None],
        terms: Terms = hold.DEFAULTS,
    ) -> None:
        """listed: a region as the federation's directory tells it."""
        self._region = region
        self._store = store
        self._ledger = ledger
        self._workloads = workloads
        self._fleet = fleet
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._peers = peers
        self._origin = origin
        self._listed = listed
        self._changed = changed
        self._terms = terms
        self._deals: dict[str, Deal] = {}
        self._open: dict[str, Deal] = {}
        """Those of which something is owed."""
        self._asks: dict[tuple[str, str, int], str] = {}
        """(origin, solicitation, round) -> bid."""
        self._agreements: dict[str, str] = {}
        """agreement -> bid."""
        self._unsure: set[str] = set()
        """Bids whose last commit was not answered."""
        self._served: set[str] = set()
        """Agreements that were in full service once."""
        self._holding: dict[str, Elapsed] = {}
        """Since when this process holds room for each bid that nobody answered yet."""
        self._standings = Standings()
        self._judged: Catalog | None = None
        self._drains_until = Elapsed(-math.inf)
        self._earned_at = clock.now()
        self._solicited = Buckets(SOLICITED_BURST, SOLICITED_PER_S, REGIONS_MOST)
        self._lent = LentModels(models, lambda: workloads.catalog, peers, clock, meter, unfit=self._end_at_once)
        self._notices: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """What was only held is over; agreements go on."""
        now = self._clock.now()
        if (found := await self._store.read(STANDINGS)) is not None:
            known = records.load(Standings, found.value).of  # perhaps by the clock of another coordinator
            self._standings = Standings({name: replace(each, at=min(each.at, now)) for name, each in known.items()})
        for record in await self._store.scan(DEALS):
            stored = records.load(StoredDeal, record.value)
            state = hold.restarted(stored.state, now, self._terms)
            self._put(record.key.removeprefix(DEALS), Deal(state, stored.since, record.revision, now))
        self._tell()

    def stop(self) -> None:
        self._lent.stop()
        for task in self._notices.values():
            task.cancel()

    # -- ports.PeerEvents ---------------------------------------------------------------------------------------------

    async def bid(self, asked: Heard[Solicitation]) -> Answer:
        told = await self._bid(asked)
        if isinstance(told, Decline):
            kind, code = "decline", str(told.refusal.code)
        else:
            kind, code = "counter" if told.is_counter else "offer", ""
        self._meter.count("bids", answer=kind, code=code, indicative=str(asked.what.indicative).lower())
        return told

    async def _bid(self, asked: Heard[Solicitation]) -> Answer:
        what = asked.what
        self._judge(asked, what.origin, SOLICITATION_BYTES)
        bucket = self._solicited.of(asked.by, self._clock.now())
        if not bucket.allows(self._clock.now()):
            self._meter.count("solicitations_refused", counterpart=asked.by)
            raise refuse(
                Code.OVERLOADED, f"too many solicitations of {asked.by}", f"{SOLICITED_PER_S:g} a second", "ask less"
            )
        bucket.spend(self._clock.now())
        async with self._alone():
            known = self._asks.get((what.origin, what.id, what.round))
            if known is not None:
                return self._as_before(self._deals[known].state, what)
            if (forbidden := self._forbids(what)) is not None:
                return Decline(what.id, what.round, self._region, forbidden)
            if self._is_draining:
                leaves = Refusal(Code.TRADE_DENIED, f"{self._region} leaves the federation", "a region that stays")
                return Decline(what.id, what.round, self._region, leaves)
            if not self._is_open():
                closed = Refusal(Code.NODE_NOT_READY, "no gateway answers", "one that other regions can call")
                return Decline(what.id, what.round, self._region, closed)
            name = self._ids.name("bid")
            catalog = self._workloads.catalog
            told = answer(
                what,
                self._workloads.inputs(),
                catalog.trades(self._region),
                bid=name,
                used=self._used(what.origin, Held | Granted | Stopping),
                cached=catalog.models.keys(),
                hold_s=self._terms.hold_s,
                held=self._used(what.origin, Held),
                standing=self.standing(what.origin),
            )
            if not told.reserved or not isinstance(told.answer, Offer):
                return told.answer
            held = Held(what, told.answer, told.reserved, Elapsed(self._clock.now() + self._terms.hold_s))
            fresh = Deal(held, self._clock.wall(), 0, self._clock.now())
            await self._write(name, fresh, held, [hold.Enter("offered")])
            return self._as_before(held, what)

    async def awarded(self, award: Heard[Award]) -> Grant:
        what = award.what
        self._judge(award, what.origin)
        check_name(what.agreement, "agreement")
        async with self._alone():
            if self._agreements.get(what.agreement, what.bid) != what.bid:
                found = f"agreement {what.agreement} of another bid"
                raise refuse(Code.REPLAYED, found, "a name of its own", "award it under a fresh name")
            deal = self._deal(what.bid, award.by)
            if isinstance(deal.state, Held) and (forbidden := self._forbids(deal.state.asked)) is not None:
                self._holding.pop(what.bid, None)  # that nothing comes of it is not its doing
                raise ShoalError(forbidden)
            lease_s = await self._asked(what.bid, hold.Awarded(what), award.evidence)
            return Grant(what.agreement, what.bid, self._region, lease_s, gateways(self._fleet()))

    async def released(self, release: Heard[Release]) -> None:
        what = release.what
        self._judge(release, what.origin)
        async with self._alone():
            deal = self._deals.get(what.bid)
            if deal is not None and deal.offer.origin == release.by:
                await self._advance(what.bid, hold.Released(), release.evidence)

    async def renewed(self, renewal: Heard[Renewal]) -> Renewed:
        what = renewal.what
        self._judge(renewal, renewal.by)
        async with self._alone():
            bid = self._bid_of(what.agreement, renewal.by)
            lease_s = await self._asked(bid, hold.Renewed(what), renewal.evidence)
            self._ledger.shown(renewal.by, what.ledger_head)
            return Renewed(
                agreement=what.agreement,
                nonce=what.nonce,
                lease_s=lease_s,
                service=self._service(self._deals[bid].state),
                report=self._report(self._deals[bid]),
                gateways=gateways(self._fleet()),
                ledger_head=self._ledger.head,
                revoked=self._workloads.revoked_gateways,
            )

    async def noticed(self, notice: Heard[Notice]) -> None:
        what = notice.what
        self._judge(notice, what.by)
        async with self._alone():
            bid = self._agreements.get(what.agreement)
            if bid is not None and self._deals[bid].offer.origin == notice.by:
                await self._asked_to(bid, hold.Noticed(what), notice.evidence)
                return
        await self._origin.noticed(notice)

    async def lend(self, region: str, agreement: str, digest: str) -> None:
        await self._origin.lend(region, agreement, digest)

    # -- what this region does of itself ------------------------------------------------------------------------------

    async def withdraw(self, agreement: str, code: Code, ends_s: Seconds = NOTICE_S) -> None:
        """Gives notice. Raises ShoalError(AGREEMENT_UNKNOWN | STORE_FULL | STORE_UNAVAILABLE)."""
        async with self._alone():
            bid = self._agreements.get(agreement)
            if bid is None:
                raise _unknown_agreement(agreement)
            await self._asked_to(bid, hold.Withdrawn(self._region, code, ends_s))
        self._work()

    def drain(self, until: Elapsed) -> None:
        """Until then it bids for nothing, and gives notice of what it runs for others."""
        self._drains_until = until

    @property
    def owed(self) -> int:
        """Agreements that are not over, and holds."""
        return len(self._open)

    async def tick(self) -> None:
        """Ends what is over, gives notice of what may not be any more, fetches models. Called often; never waits for
        the network. What the store does not take is tried again."""
        now = self._clock.now()
        self._earn(now)
        due = [name for name, deal in self._deals.items() if now >= _ends(deal.state)]
        unfit = self._unfit()
        if due or unfit or self._unsure:
            self._tell()  # what is over takes no room, whatever the store says
            try:
                async with self._alone():
                    for name in due:
                        await self._end(name)
                    for name, code in unfit.items():
                        if name in self._deals:
                            await self._advance(name, hold.Withdrawn(self._region, code, NOTICE_S))
            except (ShoalError, StaleRevision):
                self._meter.count("bids_unwritten")
        with suppress(ShoalError, StaleRevision):
            await self._ledger.save()
        self._work()

    @property
    def peers(self) -> tuple[PeerTrust, ...]:
        """Whose gateways may call this region's, and for what."""
        return united(
            PeerTrust(
                deal.offer.origin,
                member.roots if (member := self._listed(deal.offer.origin)) is not None else (),
                tuple(sorted(each.name for each in granted.gateways)),
                (granted.award.agreement,),
                granted.revoked,
            )
            for deal in self._open.values()
            if (granted := deal.granted) is not None
        )

    def standing(self, origin: str) -> float:
        """How far it is believed that what is held for it comes to something. What was seen here counts before what the
        federation says."""
        known = self._standings.of.get(origin)
        if known is not None:
            return standing.value(known, self._clock.now())
        member = self._listed(origin)
        return member.standing if member is not None else 1.0

    @property
    def states(self) -> Mapping[str, State]:
        """By bid."""
        return {name: deal.state for name, deal in self._deals.items()}

    @property
    def deals(self) -> Collection[Deal]:
        return self._deals.values()

    # -- transitions --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """No step of the region and no other transition runs meanwhile; what the store holds is known."""
        async with self._workloads.stepping:
            for name in sorted(self._unsure):
                await self._reload(name)
            yield

    async def _asked(self, name: str, event: hold.Event, evidence: bytes) -> Seconds:
        """The lease that the answer grants. Raises ShoalError as it was refused."""
        leases = [each.lease_s for each in await self._asked_to(name, event, evidence) if isinstance(each, hold.Answer)]
        return leases[0]

    async def _asked_to(self, name: str, event: hold.Event, evidence: bytes = b"") -> tuple[hold.Effect, ...]:
        effects = await self._advance(name, event, evidence)
        for effect in effects:
            if isinstance(effect, hold.Refuse):
                raise ShoalError(effect.refusal)
        return effects

    async def _advance(self, name: str, event: hold.Event, evidence: bytes = b"") -> tuple[hold.Effect, ...]:
        """Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE | CONFLICT): then nothing has changed that is known."""
        for _ in range(ATTEMPTS):
            deal = self._deals.get(name)
            if deal is None:
                raise _unknown_bid(name)
            after, effects = hold.step(deal.state, event, self._clock.now(), self._terms)
            if after == deal.state:
                return effects
            if isinstance(event, hold.Renewed) and self._is_small(deal, after):
                self._deals[name] = self._open[name] = replace(deal, state=after)
                return effects
            entries = [each for each in effects if isinstance(each, hold.Enter)]
            try:
                await self._write(name, deal, after, entries, evidence)
            except StaleRevision:
                await self._reload(name)
                continue
            return effects
        raise refuse(Code.CONFLICT, f"bid {name} is written by another", "one writer", "ask again")

    def _is_small(self, deal: Deal, after: State) -> bool:
        """Whether a renewal changes nothing but the lease, and was written not long ago."""
        before, now = deal.granted, hold.agreed(after)
        return (
            before is not None
            and now is not None
            and (before.gateways, before.revoked) == (now.gateways, now.revoked)
            and self._clock.now() - deal.written_at < WRITTEN_EVERY_S
        )

    async def _write(
        self, name: str, deal: Deal, after: State, entries: list[hold.Enter], evidence: bytes = b""
    ) -> None:
        key, now = DEALS + name, self._clock.now()
        agreement = hold.name_of(after) or hold.name_of(deal.state)
        workload = _workload(deal.state)
        drafts = [
            Draft(each.what, agreement or name, deal.offer.origin, workload, each.code, _terms(deal.offer), evidence)
            for each in entries
        ]
        guest_key = WorkloadKey(GUESTS, agreement)
        events = [
            Event(
                f"AGREEMENT_{each.what.upper()}",
                agreement,
                f"{workload} of {deal.offer.origin}{': ' + each.code if each.code else ''}",
                workload=guest_key,
            )
            for each in entries
            if agreement and each.what != "renewed"
        ]
        puts = {key: records.dump(StoredDeal(after, deal.since))}
        standings = self._standings_after(name, deal.state, after, now)
        if standings is not self._standings:
            puts[STANDINGS] = records.dump(standings)
        try:
            revision = await self._ledger.commit(
                puts,
                expect={key: deal.revision},
                events=events,
                drafts=drafts,
            )
        except ShoalError:
            self._unsure.add(name)
            raise
        self._standings = standings
        self._put(name, Deal(after, deal.since, revision, now))
        if isinstance(after, Held):
            self._holding[name] = now
        else:
            self._holding.pop(name, None)
        self._tell()

    def _standings_after(self, name: str, before: State, after: State, now: Elapsed) -> "Standings":
        """With what came of a hold, if it ends now. What this process did not hold itself, a restart has cut short."""
        since = self._holding.get(name)
        if since is None or isinstance(after, Held) or not isinstance(before, Held):
            return self._standings
        wasted = min(1.0, (now - since) / self._terms.hold_s) if isinstance(after, hold.Gone) else 0.0
        origin = before.offer.origin
        if wasted >= 1.0:
            self._meter.count("holds_unclaimed", counterpart=origin)
        known = {**self._standings.of, origin: standing.after(self._standings.of.get(origin), wasted, now)}
        oldest = min(known, key=lambda each: known[each].at) if len(known) > REGIONS_MOST else None
        return Standings({region: each for region, each in known.items() if region != oldest})

    async def _end(self, name: str) -> None:
        deal = self._deals.get(name)
        if deal is None:
            return
        if not isinstance(deal.state, hold.Gone):
            await self._advance(name, hold.Tick())
        elif self._clock.now() >= deal.state.until:
            try:
                await self._ledger.commit({}, deletes=(DEALS + name,), expect={DEALS + name: deal.revision})
            except ShoalError:
                self._unsure.add(name)
                raise
            self._put(name, None)

    async def _reload(self, name: str) -> None:
        """What the store holds is true, whatever was answered when it was written."""
        record = await self._store.read(DEALS + name)
        known = self._deals.get(name)
        if record is None:
            self._put(name, None)
        elif known is None or record.revision != known.revision:
            stored = records.load(StoredDeal, record.value)
            state = stored.state if known is None else hold.caught_up(stored.state, known.state)
            self._put(name, Deal(state, stored.since, record.revision, self._clock.now()))
        self._unsure.discard(name)
        self._tell()

    def _put(self, name: str, deal: Deal | None) -> None:
        known = self._deals.pop(name, None)
        self._open.pop(name, None)
        if known is not None and deal is None:
            self._asks.pop((known.offer.origin, known.offer.solicitation, known.offer.round), None)
            self._agreements.pop(hold.name_of(known.state), None)
        if deal is not None:
            self._deals[name] = deal
            if not isinstance(deal.state, hold.Gone):
                self._open[name] = deal
            self._asks[deal.offer.origin, deal.offer.solicitation, deal.offer.round] = name
            if agreement := hold.name_of(deal.state):
                self._agreements[agreement] = name

    def _tell(self) -> None:
        """The region's engine works with what is owed now."""
        now = self._clock.now()
        reserved, guests, promises = list[Reservation](), list[Guest](), list[Promise]()
        for name, deal in sorted(self._open.items()):
            room = self._room(name, deal.state, now)
            reserved += room
            if (granted := deal.granted) is not None:
                guests.append(_guest(granted, self._region))
            if room:
                promises.append(Promise(name, hold.name_of(deal.state), _ends(deal.state)))
        self._served &= self._agreements.keys()
        self._workloads.adopt_bids(guests=tuple(guests), reserved=tuple(reserved), promises=tuple(promises))
        self._changed()

    def _room(self, name: str, state: State, now: Elapsed) -> tuple[Reservation, ...]:
        """A hold that may have been granted, for all that is known, keeps its room."""
        return state.reserved if isinstance(state, Held) and name in self._unsure else hold.room(state, now)

    # -- what is answered ---------------------------------------------------------------------------------------------

    def _as_before(self, state: State, asked: Solicitation) -> Answer:
        """The first answer to a solicitation that came again, with what is left of its hold."""
        offer = hold.offer_of(state)
        granted = hold.agreed(state)
        first = state.asked if isinstance(state, Held) else granted.asked if granted is not None else asked
        if first != asked:
            found = f"solicitation {asked.id} in round {asked.round} with other content"
            raise refuse(Code.REPLAYED, found, "the same content, or a name of its own", "solicit under a fresh name")
        if isinstance(state, Held):
            left = Seconds(state.until - self._clock.now())
            if left > 0:
                return replace(offer, hold_s=left)
            gone = Refusal(Code.HOLD_EXPIRED, f"bid {offer.id}", "one that is held", "solicit anew")
            return Decline(asked.id, asked.round, self._region, gone)
        if isinstance(state, hold.Gone):
            gone = Refusal(state.code, f"bid {offer.id}", "one that is held", "solicit anew")
            return Decline(asked.id, asked.round, self._region, gone)
        return replace(offer, hold_s=Seconds(0.0))

    def _service(self, state: State) -> Service:
        if isinstance(state, Stopping):
            return Service.STOPPING
        agreement = hold.name_of(state)
        serving = self._workloads.endpoints(WorkloadKey(GUESTS, agreement))
        if serving >= hold.offer_of(state).replicas and self._is_open():
            self._served.add(agreement)
            return Service.READY
        return Service.SHORT if agreement in self._served else Service.STARTING

    def _is_open(self) -> bool:
        """Whether a gateway serves, by which another region's requests come in."""
        return any(
            is_gateway(state) and state.front_ready and state.liveness is Liveness.READY
            for state in self._fleet().nodes.values()
        )

    def _report(self, deal: Deal) -> ServiceReport:
        hours = max(0.0, self._clock.wall() - deal.since) / 3600
        agreement = hold.name_of(deal.state)
        report = delivered(self._fleet(), agreement, self._workloads.hosts(WorkloadKey(GUESTS, agreement)))
        return replace(report, cost_usd=deal.offer.cost * hours)

    def _earn(self, now: Elapsed) -> None:
        """What the time since the last look has brought, at the prices that were bid."""
        hours = (now - self._earned_at) / 3600
        self._earned_at = now
        for deal in self._open.values():
            if isinstance(deal.state, Granted | Stopping) and math.isfinite(deal.offer.cost):
                self._meter.add("earned_usd", deal.offer.cost * hours, counterpart=deal.offer.origin)

    def _judge(self, heard: Heard[Any], named: str, most: int = MESSAGE_BYTES) -> None:
        """named: who says it, by what is said."""
        if heard.by != named:
            raise refuse(Code.REGION_MISMATCH, f"{heard.by} speaks for {named}", "its own name", "speak for yourself")
        if len(heard.evidence) > most:
            raise refuse(Code.TOO_LARGE, f"{len(heard.evidence)} bytes", f"at most {most}", "send less")

    def _deal(self, bid: str, by: str) -> Deal:
        """Who did not ask does not learn that there is one."""
        deal = self._deals.get(bid)
        if deal is None or deal.offer.origin != by:
            raise _unknown_bid(bid)
        return deal

    def _bid_of(self, agreement: str, by: str) -> str:
        bid = self._agreements.get(agreement)
        if bid is None or self._deals[bid].offer.origin != by:
            raise _unknown_agreement(agreement)
        return bid

    def _used(self, origin: str, kinds: Any) -> list[Reservation]:
        """What its deals of these kinds take."""
        deals = (deal for deal in self._open.values() if deal.offer.origin == origin and isinstance(deal.state, kinds))
        return [each for deal in deals for each in hold.room(deal.state, self._clock.now())]

    def _unfit(self) -> dict[str, Code]:
        """Agreements that this region's documents do not allow any more, by bid."""
        if self._is_draining:
            return {name: Code.AGREEMENT_ENDED for name, deal in self._open.items() if isinstance(deal.state, Granted)}
        if self._workloads.catalog is self._judged:
            return {}
        found = {
            name: forbidden.code
            for name, deal in self._open.items()
            if isinstance(deal.state, Granted) and (forbidden := self._forbids(deal.state.asked)) is not None
        }
        if not found:
            self._judged = self._workloads.catalog
        return found

    @property
    def _is_draining(self) -> bool:
        return self._clock.now() < self._drains_until

    def _forbids(self, asked: Solicitation) -> Refusal | None:
        """Why this region's documents do not allow it, or not any more."""
        catalog = self._workloads.catalog
        forbidden = denied(catalog.trades(self._region), asked.origin, asked.workload.tenant)
        return forbidden or outside_of(asked, catalog.facts(self._region, {}))

    # -- work that waits for others -----------------------------------------------------------------------------------

    def _work(self) -> None:
        self._lent.want(granted for deal in self._open.values() if (granted := deal.granted) is not None)
        self._notices = {name: task for name, task in self._notices.items() if not task.done()}
        for name, deal in self._open.items():
            if isinstance(deal.state, Stopping) and not deal.state.told and name not in self._notices:
                self._notices[name] = asyncio.ensure_future(self._give_notice(name))

    async def _end_at_once(self, agreement: str, code: Code) -> None:
        await self.withdraw(agreement, code, Seconds(0.0))

    async def _give_notice(self, name: str) -> None:
        """Until the other side has heard it, or it is over."""
        while (deal := self._deals.get(name)) is not None and isinstance(state := deal.state, Stopping):
            if state.told:
                return
            left = Seconds(max(0.0, state.ends - self._clock.now()))
            notice = Notice(state.granted.award.agreement, self._region, state.code, left)
            try:
                await self._tell_origin(deal.offer.origin, notice)
                async with self._alone():
                    await self._advance(name, hold.Told())
            except (ShoalError, StaleRevision):
                await self._clock.sleep(RETRY_S)

    async def _tell_origin(self, region: str, notice: Notice) -> None:
        """Whatever it answers: it has heard it. Raises ShoalError(PEER_UNREACHABLE)."""
        try:
            await self._peers.notify(region, notice)
        except ShoalError as error:
            if error.code is Code.PEER_UNREACHABLE:
                raise


def _guest(granted: Granted, region: str) -> Guest:
    intent = guest(granted.asked, granted.offer, granted.award.agreement)
    return Guest(granted.offer.origin, intent, way_s(granted.asked, region))


def _ends(state: State) -> Elapsed:
    match state:
        case Held() | Granted() | hold.Gone():
            return state.until
        case Stopping():
            return min(state.granted.until, state.ends)


def _workload(state: State) -> str:
    match state:
        case Held() | Granted():
            return str(state.asked.workload)
        case Stopping():
            return str(state.granted.asked.workload)
        case hold.Gone():
            return ""


def _terms(offer: Offer) -> str:
    figures = [f"{offer.replicas} x {offer.model} {offer.precision}", f"p95 {offer.latency_p95_s:.6g} s"]
    figures += [f"{offer.cost:.6g} USD/h"] if math.isfinite(offer.cost) else []
    figures += [f"{offer.joules:.6g} J"] if math.isfinite(offer.joules) else []
    return ", ".join(figures)


def _unknown_bid(bid: str) -> ShoalError:
    return refuse(Code.BID_UNKNOWN, f"bid {bid!r:.80}", "a bid of this region for who awards it", "solicit anew")


def _unknown_agreement(agreement: str) -> ShoalError:
    return refuse(Code.AGREEMENT_UNKNOWN, f"agreement {agreement!r:.80}", "one with this region", "solicit anew")
