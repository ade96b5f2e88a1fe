"""The federation: who is in it, who asked whom for what, and how regions kept their word. It places nothing itself.

All of its state is in the store, so any number of replicas may serve. Each watches what the others write; what it hears
itself counts at once.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.buckets import Buckets
from shoal.coordinator.controllers.events import Event, EventLog
from shoal.coordinator.core.federation.directory import Book, listed, merged, standing_of
from shoal.coordinator.core.federation.rules import (
    REGIONS_MOST,
    judge_advertisement,
    judge_member,
    judge_solicitation,
)
from shoal.coordinator.core.federation.shortlist import shortlist
from shoal.coordinator.core.negotiation import standing
from shoal.coordinator.core.negotiation.spans import carried
from shoal.coordinator.core.negotiation.standing import Askers
from shoal.coordinator.ports import (
    Candidates,
    Change,
    Clock,
    Compacted,
    Heard,
    Meter,
    StaleRevision,
    Store,
    Traces,
    Transaction,
)
from shoal.types.agreement import Delivered, ReportContent
from shoal.types.chain import LedgerEntry, digest
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Advertisement, Answer, Directory, Member, Solicitation
from shoal.types.units import Seconds
from shoal.wire.outbound import refusal_of_peer

KNOWN: Final = "federation/"
"""What every replica keeps in mind."""
MEMBERS: Final = KNOWN + "members/"
ADVERTISEMENTS: Final = KNOWN + "advertisements/"
DELIVERED: Final = KNOWN + "delivered/"
ASKERS: Final = KNOWN + "askers/"
COPIES: Final = "copies/"
"""Of the regions' ledgers: `copies/REGION/NNNN`."""
COPIED: Final = "copied/"
"""The newest entry of each, by which the next one is judged."""
COPIES_KEPT: Final = 10_000
"""Of each region, the newest."""
SOLICITED_BURST: Final = 500.0
SOLICITED_PER_S: Final = 100.0
"""Of one region of full standing; one whose solicitations come to nothing spends more on each."""
RETRY_S: Final = Seconds(1.0)
TRIES: Final = 5
NOTHING_MORE: Final = Transaction()


@dataclass(frozen=True, slots=True)
class Deliveries:
    """What one origin saw of one delegate, oldest first."""

    delivered: tuple[Delivered, ...]


class FederationController:
    """Callers have been authenticated: `Heard.by` is who said it."""

    def __init__(
        self,
        name: str,
        store: Store,
        events: EventLog,
        clock: Clock,
        meter: Meter,
        candidates: Candidates,
        *,
        kept: int = COPIES_KEPT,
        traces: Traces | None = None,
    ) -> None:
        """kept: of each region's ledger, so many entries. traces: who is told of what was solicited, if anybody."""
        self._name = name
        self._store = store
        self._events = events
        self._clock = clock
        self._meter = meter
        self._candidates = candidates
        self._kept = kept
        self._traces = traces
        self._book = Book()
        self._revision = 0
        self._solicited = Buckets(SOLICITED_BURST, SOLICITED_PER_S, REGIONS_MOST)

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        await self._list()

    async def run(self) -> None:
        """Takes in what other replicas write."""
        is_whole = True
        while True:
            try:
                if not is_whole:
                    await self._list()
                    is_whole = True
                async for change in self._store.watch(KNOWN, self._revision):
                    self._take(change)
            except Compacted as gone:
                self._revision = max(self._revision, gone.revision)
                is_whole = False
            except ShoalError:
                self._meter.count("watches_failed")
                await self._clock.sleep(RETRY_S)

    def directory(self) -> Directory:
        return listed(self._book, self._name, self._clock.now(), self._clock.wall())

    def roots_of(self, region: str) -> tuple[str, ...]:
        member = self._book.members.get(region)
        return member.roots if member is not None else ()

    @property
    def roots(self) -> tuple[str, ...]:
        """Of all members: whom this federation's port lets shake hands."""
        return tuple(root for _, member in sorted(self._book.members.items()) for root in member.roots)

    async def admit(self, member: Member, *, by: str = "", extra: Transaction = NOTHING_MORE) -> Directory:
        """What a redeemed token leads to. extra: written with it, or not at all.

        Raises ShoalError(FIELD_INVALID | SOURCE_DENIED | CONFLICT), StaleRevision as `extra` expects.
        """
        _check(judge_member(member) or refusal_of_peer(member.address))
        if member.region == self._name:
            raise refuse(
                Code.CONFLICT, f"a region called {self._name}", "another name than the federation's", "rename it"
            )
        known = self._book.members.get(member.region)
        if known is not None and not {*known.roots} & {*member.roots}:
            raise refuse(
                Code.CONFLICT,
                f"another region is a member as {member.region}",
                "a name that is free",
                f"choose another name; or let the federation forget it: shoal delete region {member.region}",
            )
        event = Event("REGION_JOINED", member.region, member.address, by or member.region)
        await self._put_member(member, event, extra)
        return self.directory()

    async def updated(self, heard: Heard[Member]) -> Directory:
        """Raises ShoalError(REGION_MISMATCH | REGION_UNKNOWN | FIELD_INVALID | SOURCE_DENIED)."""
        self._member(heard.by)
        member = _own(heard, heard.what.region)
        _check(judge_member(member) or refusal_of_peer(member.address))
        if self._book.members[heard.by] != _bare(member):
            await self._put_member(member, Event("REGION_CHANGED", heard.by, member.address, heard.by), NOTHING_MORE)
        return self.directory()

    async def left(self, region: str, by: str = "") -> None:
        """Raises ShoalError(REGION_UNKNOWN)."""
        self._member(region)
        event = Event("REGION_LEFT", region, "", by or region)
        await self._events.commit({}, deletes=(MEMBERS + region, ADVERTISEMENTS + region), events=[event])
        self._book = self._book.without(region)

    async def advertised(self, heard: Heard[Advertisement]) -> Directory | None:
        """The directory where the region has another. Raises ShoalError(ADVERT_INVALID | REPLAYED | REGION_*)."""
        self._member(heard.by)
        advertisement = _own(heard, heard.what.region)
        live = self._book.live.get(heard.by)
        if (refusal := judge_advertisement(advertisement, live.advertisement if live else None)) is not None:
            self._meter.count("advertisements_refused", code=refusal.code)
            raise ShoalError(refusal)
        if live is None or advertisement.sequence > live.advertisement.sequence:
            await self._events.put(Transaction({ADVERTISEMENTS + heard.by: records.dump(advertisement)}))
            self._book = self._book.with_advertisement(advertisement, self._clock.now())
        now = self.directory()
        return now if now.version != advertisement.directory else None

    async def solicited(self, heard: Heard[Solicitation]) -> tuple[Heard[Answer], ...]:
        """Asks whom it may concern, all at once, and returns what came within `answer_s`.

        Raises ShoalError(MESSAGE_INVALID | OVERLOADED | REGION_MISMATCH | REGION_UNKNOWN).
        """
        self._member(heard.by)
        solicitation = _own(heard, heard.what.origin)
        _check(judge_solicitation(solicitation))
        believed = standing_of(self._book, heard.by, self._clock.wall())
        self._spend(heard.by, believed)
        asked = shortlist(solicitation, self.directory().members, standing=believed)
        self._meter.count("solicitations", indicative=str(solicitation.indicative).lower())
        began = self._clock.wall()
        heard_of = await asyncio.gather(*(self._ask(member, heard.evidence, solicitation) for member in asked))
        answers = tuple(answer for answer in heard_of if answer is not None)
        if self._traces is not None and self._traces.wanted and not solicitation.indicative:
            wall = self._clock.wall()
            self._traces.told((carried(solicitation, self._name, len(asked), len(answers), began, wall),))
        return answers

    async def reported(self, heard: Heard[ReportContent]) -> int:
        """The first ledger entry that is lacking.

        Raises ShoalError(LEDGER_BROKEN | REGION_UNKNOWN | CONFLICT): told to two replicas at once."""
        self._member(heard.by)
        for _ in range(TRIES):
            with suppress(StaleRevision):  # another replica took in something of it meanwhile
                return await self._reported(heard.by, heard.what)
        raise refuse(Code.CONFLICT, f"reports of {heard.by} overtake each other", "one at a time", "it is told again")

    async def _reported(self, by: str, report: ReportContent) -> int:
        """As the store has it, which may be newer than what this replica knows."""
        held = _Held(self._store)
        puts, old = dict[str, bytes](), list[str]()
        deliveries = dict[str, tuple[Delivered, ...]]()
        for each in report.delivered:
            if each.region == by:
                continue  # nobody is his own judge
            key = f"{DELIVERED}{by}/{each.region}"
            known = deliveries.get(each.region)
            if known is None:
                stored = await held.read(Deliveries, key)
                known = stored.delivered if stored is not None else ()
            deliveries[each.region] = merged(known, (each,))
            puts[key] = records.dump(Deliveries(deliveries[each.region]))
        last, fresh = await held.read(LedgerEntry, COPIED + by), list[LedgerEntry]()
        for entry in report.entries:
            if last is not None and entry.sequence <= last.sequence:
                continue
            if last is not None and (entry.sequence, entry.previous) != (last.sequence + 1, digest(last)):
                if entry.sequence == last.sequence + 1:
                    raise self._broken(by, entry)
                break  # a gap: it is asked for
            puts[_copy(by, entry.sequence)] = puts[COPIED + by] = records.dump(entry)
            if entry.sequence > self._kept:
                gone = _copy(by, entry.sequence - self._kept)
                puts.pop(gone, None)
                old.append(gone)
            fresh.append(entry)
            last = entry
        members = self._book.members
        known_askers = await held.read(Askers, ASKERS + by) or Askers()
        askers = standing.read(
            known_askers, (each for each in fresh if each.counterpart in members), self._clock.wall()
        )
        askers = replace(askers, standings={name: each for name, each in askers.standings.items() if name in members})
        if askers != known_askers:
            puts[ASKERS + by] = records.dump(askers)
        if puts:
            await self._events.put(Transaction(puts, deletes=tuple(old), expect=held.revisions))
            for region, delivered in deliveries.items():
                self._book = self._book.with_delivered(by, region, delivered)
            self._book = self._book.with_askers(by, askers)
        return last.sequence + 1 if last is not None else 1

    async def copies(self, region: str, limit: int) -> tuple[LedgerEntry, ...]:
        """The newest of a region's ledger, oldest first."""
        last = await self._last_copy(region)
        if last is None:
            return ()
        after = _copy(region, max(0, last.sequence - limit))
        found = await self._store.scan(f"{COPIES}{region}/", after=after)
        return tuple(records.load(LedgerEntry, record.value) for record in found)

    def _spend(self, region: str, believed: float) -> None:
        """Of what a region may ask. believed: its standing."""
        bucket = self._solicited.of(region, self._clock.now())
        if not bucket.allows(self._clock.now()):
            self._meter.count("solicitations_refused", counterpart=region)
            limit = f"{SOLICITED_PER_S * believed:g} a second at a standing of {believed:.2f}"
            raise refuse(Code.OVERLOADED, f"too many solicitations of {region}", limit, "ask less; award what is held")
        bucket.spend(self._clock.now(), 1 / believed)

    def _broken(self, region: str, entry: LedgerEntry) -> ShoalError:
        self._meter.count("ledgers_broken", counterpart=region)
        return refuse(
            Code.LEDGER_BROKEN,
            f"entry {entry.sequence} of {region} does not follow from the one before it",
            "the ledger that it showed before",
            "look at it there: shoal doctor",
        )

    async def _last_copy(self, region: str) -> LedgerEntry | None:
        found = await self._store.read(COPIED + region)
        return records.load(LedgerEntry, found.value) if found is not None else None

    async def _ask(self, member: Member, asked: bytes, solicitation: Solicitation) -> Heard[Answer] | None:
        try:
            async with asyncio.timeout(solicitation.answer_s):
                answer = await self._candidates.ask(member, asked, solicitation.answer_s)
        except TimeoutError:
            self._meter.count("bids_missing", code=Code.DEADLINE_EXCEEDED)
            return None
        except ShoalError as error:
            self._meter.count("bids_missing", code=error.code)
            return None
        return answer

    async def _put_member(self, member: Member, event: Event, extra: Transaction) -> None:
        bare = _bare(member)
        puts = {**extra.puts, MEMBERS + member.region: records.dump(bare)}
        await self._events.commit(puts, deletes=extra.deletes, expect=extra.expect, events=[event])
        self._book = self._book.with_member(bare)

    def _member(self, region: str) -> Member:
        member = self._book.members.get(region)
        if member is None:
            raise refuse(
                Code.REGION_UNKNOWN,
                f"region {region!r:.80}",
                f"a member of {self._name}",
                "join: shoal federation join",
            )
        return member

    async def _list(self) -> None:
        """Everything, anew; nobody's lease begins again for it."""
        found = await self._store.scan(KNOWN)
        self._book = Book(live=self._book.live)
        for record in found:
            self._take(Change(record.key, record.value, record.revision))

    def _take(self, change: Change) -> None:
        self._revision = max(self._revision, change.revision)
        kind, _, name = change.key.removeprefix(KNOWN).partition("/")
        kind = f"{KNOWN}{kind}/"
        if change.value is None:
            self._book = self._book.without(name) if kind == MEMBERS else self._book
        elif kind == MEMBERS:
            self._book = self._book.with_member(records.load(Member, change.value))
        elif kind == ADVERTISEMENTS:
            advertisement = records.load(Advertisement, change.value)
            self._book = self._book.with_advertisement(advertisement, self._clock.now())
        elif kind == DELIVERED:
            origin, _, region = name.partition("/")
            delivered = records.load(Deliveries, change.value).delivered
            self._book = self._book.with_delivered(origin, region, delivered)
        elif kind == ASKERS:
            self._book = self._book.with_askers(name, records.load(Askers, change.value))


T = TypeVar("T")


class _Held:
    """What the store has now. revisions: of all that was read, 0 where there was nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.revisions: dict[str, int] = {}

    async def read(self, kind: type[T], key: str) -> T | None:
        found = await self._store.read(key)
        self.revisions[key] = found.revision if found is not None else 0
        return records.load(kind, found.value) if found is not None else None


def _own(heard: Heard[T], region: str) -> T:
    """What a region said of itself."""
    if region != heard.by:
        raise refuse(
            Code.REGION_MISMATCH,
            f"{heard.by} in the name of {region!r:.80}",
            heard.by,
            "a region speaks for itself alone",
        )
    return heard.what


def _copy(region: str, sequence: int) -> str:
    return f"{COPIES}{region}/{sequence:012}"


def _bare(member: Member) -> Member:
    """As a region may say of itself."""
    return replace(member, advertisement=None, trust=1.0, standing=1.0)


def _check(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise ShoalError(refusal)
