"""The federation service: its members, the fan-out of solicitations, and how regions kept their agreements. It places
nothing itself.

All of its state is in the store, so any number of replicas may serve. Each replica watches the others' writes; its own
writes take effect at once.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.federation.reputation import REPORTS_MOST
from shoal.coordinator.controllers.identity.enrolment import ADMISSIONS
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.coordinator.core.federation.directory import (
    FederationState,
    directory_for,
    live_advertisements,
    make_directory,
    merge_deliveries,
    standing_of,
)
from shoal.coordinator.core.federation.rules import (
    REGIONS_MOST,
    check_advertisement,
    check_member,
    check_solicitation,
)
from shoal.coordinator.core.federation.shortlist import shortlist
from shoal.coordinator.core.negotiation import standing
from shoal.coordinator.core.negotiation.spans import fan_out_span
from shoal.coordinator.core.negotiation.standing import LedgerStandings
from shoal.coordinator.core.rate_limit import RateLimiter
from shoal.coordinator.ports import (
    CandidateRegions,
    Clock,
    Compacted,
    Meter,
    SpanExporter,
    StaleRevision,
    Store,
    StoreChange,
    Transaction,
    VerifiedMessage,
)
from shoal.host.egress_guard import refusal_of_peer
from shoal.types.agreement import Delivered, ReportContent
from shoal.types.chain import LedgerEntry, digest
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Advertisement, Answer, Directory, Member, Solicitation
from shoal.types.units import Elapsed, Seconds

SHARED_STATE: Final = "federation/"
"""Prefix of the state that every replica keeps in memory."""
MEMBERS: Final = SHARED_STATE + "members/"
ADVERTISEMENTS: Final = SHARED_STATE + "advertisements/"
DELIVERIES: Final = SHARED_STATE + "delivered/"
ASKERS: Final = SHARED_STATE + "askers/"
COPIES: Final = "copies/"
"""Copies of the regions' ledger entries: `copies/REGION/NNNN`."""
LAST_COPIES: Final = "copied/"
"""Newest copied entry of each region, which the next entry must follow."""
CHAINS: Final = "chains/"
"""Which ledger of each region is copied now (`CopiedChain`)."""
CHAIN_BURST: Final = 3.0
CHAINS_PER_S: Final = 1 / 3600
"""Ledgers that a region may begin: it is restored seldom, and each is an event."""
CLEARED_AT_ONCE: Final = 100
"""Old copies deleted in one transaction: etcd takes 128 operations."""
COPIES_KEPT: Final = 10_000
"""Newest entries kept of each region's ledger."""
SOLICITATION_BURST: Final = 500.0
SOLICITATIONS_PER_S: Final = 100.0
"""Rate for one region of full standing; at a lower standing each solicitation costs more of it."""
REPORT_BURST: Final = 20.0
REPORTS_PER_S: Final = 1.0
"""Of one region, which makes one in ten seconds (`reputation.REPORT_INTERVAL_S`)."""
RETRY_S: Final = Seconds(1.0)
ATTEMPTS: Final = 5
DIRECTORY_S: Final = Seconds(1.0)
"""Leases that end, standings that grow with time, and small changes of capacity, count in it that late."""
NO_EXTRA: Final = Transaction()


@dataclass(frozen=True, slots=True)
class Deliveries:
    """What one origin reported of one delegate, oldest first."""

    delivered: tuple[Delivered, ...]


@dataclass(frozen=True, slots=True)
class CopiedChain:
    """The ledger of a region that is copied now.

    A region whose store was restored has another one, which begins as the old one did. The copies of the one before are
    kept beside it.
    """

    # 0 or 1: where its copies are. Those of the one before are at the other place.
    place: int = 0
    # History of the region's store, as it said; empty: it says none, because it is of an older version.
    history: str = ""

    def name(self, region: str) -> str:
        """Name that its copies have in the store, which no region has."""
        return f"{region}@1" if self.place else region


@dataclass(frozen=True, slots=True)
class _MadeDirectory:
    """The directory as it was last made."""

    directory: Directory
    # From what.
    state: FederationState
    # When it is made again, whatever changed.
    until: Elapsed


class FederationController:
    """Serves members. Callers are authenticated: `VerifiedMessage.signer` is the calling region."""

    def __init__(
        self,
        name: str,
        store: Store,
        events: EventLog,
        clock: Clock,
        meter: Meter,
        candidates: CandidateRegions,
        *,
        kept: int = COPIES_KEPT,
        exporter: SpanExporter | None = None,
    ) -> None:
        """kept: entries kept of each region's ledger. exporter: receives a span for each solicitation; None: no
        tracing.
        """
        self._name = name
        self._store = store
        self._events = events
        self._clock = clock
        self._meter = meter
        self._candidates = candidates
        self._kept = kept
        self._exporter = exporter
        self._state = FederationState()
        self._made: _MadeDirectory | None = None
        self._revision = 0
        self._report_limits = RateLimiter(REPORT_BURST, REPORTS_PER_S, REGIONS_MOST)
        self._solicitation_limits = RateLimiter(SOLICITATION_BURST, SOLICITATIONS_PER_S, REGIONS_MOST)
        self._chain_limits = RateLimiter(CHAIN_BURST, CHAINS_PER_S, REGIONS_MOST)

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        await self._reload()

    async def run(self) -> None:
        """Loads what other replicas write, for ever."""
        is_whole = True
        while True:
            try:
                if not is_whole:
                    await self._reload()
                    is_whole = True
                async for change in self._store.watch(SHARED_STATE, self._revision):
                    self._apply_change(change)
            except Compacted as gone:
                self._revision = max(self._revision, gone.revision)
                is_whole = False
            except ShoalError:
                self._meter.count(metrics.WATCHES_FAILED)
                await self._clock.sleep(RETRY_S)

    def directory(self) -> Directory:
        """Made once for each change of members, of their capacity and of how they are trusted, and once in
        DIRECTORY_S: each member advertises more often than that."""
        now, made = self._clock.now(), self._made
        if made is None or now >= made.until or not made.state.has_same_directory(self._state):
            directory = make_directory(self._state, self._name, now, self._clock.wall())
            self._made = made = _MadeDirectory(directory, self._state, Elapsed(now + DIRECTORY_S))
        return made.directory

    def directory_for(self, region: str) -> Directory:
        """As the region is told it."""
        return directory_for(region, self.directory())

    def advertisements(self) -> tuple[Advertisement, ...]:
        """Of the members whose lease has not expired, as they sent them."""
        return live_advertisements(self._state, self._clock.now())

    def roots_of(self, region: str) -> tuple[str, ...]:
        member = self._state.members.get(region)
        return member.roots if member is not None else ()

    @property
    def roots(self) -> tuple[tuple[str, str], ...]:
        """(region, CA certificate in PEM) of all members, for TLS handshakes at the federation's port."""
        return tuple((region, root) for region, member in sorted(self._state.members.items()) for root in member.roots)

    async def admit(self, member: Member, *, by: str = "", extra: Transaction = NO_EXTRA) -> Directory:
        """Admits a region that redeemed a token. extra: committed in the same transaction.

        Raises ShoalError(FIELD_INVALID | SOURCE_DENIED | CONFLICT), StaleRevision as `extra` expects.
        """
        _check(check_member(member) or refusal_of_peer(member.address))
        if member.region == self._name:
            raise refuse(
                Code.CONFLICT, f"a region called {self._name}", "another name than the federation's", "rename it"
            )
        known = self._state.members.get(member.region)
        if known is not None and not {*known.roots} & {*member.roots}:
            raise refuse(
                Code.CONFLICT,
                f"another region is a member as {member.region}",
                "a name that is free",
                f"choose another name; or let the federation forget it: shoal delete region {member.region}",
            )
        event = LogEvent("REGION_JOINED", member.region, member.address, by or member.region)
        await self._put_member(member, event, extra)
        return self.directory_for(member.region)

    async def update(self, heard: VerifiedMessage[Member]) -> Directory:
        """Raises ShoalError(REGION_MISMATCH | REGION_UNKNOWN | FIELD_INVALID | SOURCE_DENIED)."""
        self._require_member(heard.signer)
        member = _require_own(heard, heard.content.region)
        _check(check_member(member) or refusal_of_peer(member.address))
        if self._state.members[heard.signer] != _bare(member):
            await self._put_member(
                member, LogEvent("REGION_CHANGED", heard.signer, member.address, heard.signer), NO_EXTRA
            )
        return self.directory_for(heard.signer)

    async def remove(self, region: str, by: str = "") -> None:
        """Raises ShoalError(REGION_UNKNOWN)."""
        self._require_member(region)
        event = LogEvent("REGION_LEFT", region, "", by or region)
        # Whoever joins under this name may have another ledger, or another store.
        ledgers = (CHAINS + region, *(LAST_COPIES + CopiedChain(place).name(region) for place in (0, 1)))
        deletes = (MEMBERS + region, ADVERTISEMENTS + region, ADMISSIONS + region, *ledgers)
        await self._events.commit({}, deletes=deletes, events=[event])
        self._state = self._state.without(region)

    async def expel(self, region: str, by: str) -> None:
        """Removes a region whose admission was revoked; it may have left before."""
        if region in self._state.members:
            await self.remove(region, by)
        else:
            await self._events.commit({}, deletes=(ADMISSIONS + region,))

    async def advertise(self, heard: VerifiedMessage[Advertisement]) -> Directory | None:
        """The directory, if the region's version is outdated; else None. Raises ShoalError(ADVERT_INVALID | REPLAYED |
        REGION_*).
        """
        self._require_member(heard.signer)
        advertisement = _require_own(heard, heard.content.region)
        live = self._state.advertisements.get(heard.signer)
        if (refusal := check_advertisement(advertisement, live.advertisement if live else None)) is not None:
            self._meter.count(metrics.ADVERTISEMENTS_REFUSED, code=refusal.code)
            raise ShoalError(refusal)
        if live is None or advertisement.sequence > live.advertisement.sequence:
            await self._events.commit_unfenced(Transaction({ADVERTISEMENTS + heard.signer: codec.dump(advertisement)}))
            self._state = self._state.with_advertisement(advertisement, self._clock.now())
        return self.directory_for(heard.signer) if self.directory().version != advertisement.directory else None

    async def solicit(self, heard: VerifiedMessage[Solicitation]) -> tuple[VerifiedMessage[Answer], ...]:
        """Asks the shortlisted members concurrently, and returns the answers that came within `answer_s`.

        Raises ShoalError(MESSAGE_INVALID | OVERLOADED | REGION_MISMATCH | REGION_UNKNOWN).
        """
        self._require_member(heard.signer)
        solicitation = _require_own(heard, heard.content.origin)
        _check(check_solicitation(solicitation))
        believed = standing_of(self._state, heard.signer, self._clock.wall())
        self._spend(heard.signer, believed)
        asked = shortlist(solicitation, self.directory().members, standing=believed)
        self._meter.count(metrics.SOLICITATIONS, indicative=str(solicitation.indicative).lower())
        began = self._clock.wall()
        heard_of = await asyncio.gather(*(self._ask(member, heard.evidence, solicitation) for member in asked))
        answers = tuple(answer for answer in heard_of if answer is not None)
        if self._exporter is not None and self._exporter.is_enabled and not solicitation.indicative:
            wall = self._clock.wall()
            self._exporter.export((fan_out_span(solicitation, self._name, len(asked), len(answers), began, wall),))
        return answers

    async def report(self, heard: VerifiedMessage[ReportContent]) -> int:
        """Returns the sequence of the first ledger entry that is lacking.

        Raises ShoalError(LEDGER_BROKEN | REGION_UNKNOWN | MESSAGE_INVALID | OVERLOADED | CONFLICT); CONFLICT if reports
        to several replicas keep colliding.
        """
        self._require_member(heard.signer)
        if (count := len(heard.content.delivered)) > REPORTS_MOST:
            raise refuse(Code.MESSAGE_INVALID, f"{count} deliveries", f"at most {REPORTS_MOST} in a report")
        bucket = self._report_limits.bucket_of(heard.signer, self._clock.now())
        if not bucket.allows(self._clock.now()):
            raise refuse(Code.OVERLOADED, f"too many reports of {heard.signer}", f"{REPORTS_PER_S:g} a second")
        bucket.spend(self._clock.now())
        for _ in range(ATTEMPTS):
            with suppress(StaleRevision):  # another replica stored some of it meanwhile
                return await self._report(heard.signer, heard.content)
        raise refuse(
            Code.CONFLICT, f"reports of {heard.signer} overtake each other", "one at a time", "it is told again"
        )

    async def _report(self, by: str, report: ReportContent) -> int:
        """Works on the stored state, which may be newer than this replica's memory."""
        held = _TrackedReads(self._store)
        puts, old = dict[str, bytes](), list[str]()
        deliveries = dict[str, tuple[Delivered, ...]]()
        for each in report.delivered:
            if each.region == by or each.region not in self._state.members:
                continue  # a region may not report on itself, and what is no member has no trust to keep
            key = f"{DELIVERIES}{by}/{each.region}"
            known = deliveries.get(each.region)
            if known is None:
                stored = await held.read(Deliveries, key)
                known = stored.delivered if stored is not None else ()
            deliveries[each.region] = merge_deliveries(known, (each,))
            puts[key] = codec.dump(Deliveries(deliveries[each.region]))
        chain = await held.read(CopiedChain, CHAINS + by) or CopiedChain()
        if chain.history and report.history and chain.history != report.history:
            await self._begin_chain(by, report.history, chain, held.revisions[CHAINS + by])
            return await self._report(by, replace(report, entries=()))
        name = chain.name(by)
        last, fresh = await held.read(LedgerEntry, LAST_COPIES + name), list[LedgerEntry]()
        for entry in report.entries:
            if last is not None and entry.sequence <= last.sequence:
                continue
            if last is not None and (entry.sequence, entry.previous) != (last.sequence + 1, digest(last)):
                if entry.sequence == last.sequence + 1:
                    if report.history == chain.history:
                        raise self._ledger_error(by, entry)
                    await self._begin_chain(by, report.history, chain, held.revisions[CHAINS + by])
                    return await self._report(by, replace(report, entries=()))
                break  # a gap: the return value requests the missing entries
            puts[_copy(name, entry.sequence)] = puts[LAST_COPIES + name] = codec.dump(entry)
            if entry.sequence > self._kept:
                gone = _copy(name, entry.sequence - self._kept)
                puts.pop(gone, None)
                old.append(gone)
            fresh.append(entry)
            last = entry
        if fresh and report.history not in ("", chain.history):
            puts[CHAINS + by] = codec.dump(replace(chain, history=report.history))
        members = self._state.members
        known_askers = await held.read(LedgerStandings, ASKERS + by) or LedgerStandings()
        askers = standing.with_entries(
            known_askers, (each for each in fresh if each.counterpart in members), self._clock.wall()
        )
        askers = replace(askers, standings={name: each for name, each in askers.standings.items() if name in members})
        if askers != known_askers:
            puts[ASKERS + by] = codec.dump(askers)
        if puts:
            await self._events.commit_unfenced(Transaction(puts, deletes=tuple(old), expect=held.revisions))
            self._state = self._state.with_deliveries(by, deliveries).with_askers(by, askers)
        return last.sequence + 1 if last is not None else 1

    async def copies(self, region: str, limit: int) -> Iterator[LedgerEntry]:
        """The newest entries of a region's ledger, oldest first. Each is parsed when it is taken: thousands at once
        would hold the loop."""
        held = _TrackedReads(self._store)
        name = (await held.read(CopiedChain, CHAINS + region) or CopiedChain()).name(region)
        last = await held.read(LedgerEntry, LAST_COPIES + name)
        if last is None:
            return iter(())
        found = await self._store.scan(f"{COPIES}{name}/", after=_copy(name, max(0, last.sequence - limit)))
        newest = _copy(name, last.sequence)  # of a region that left there may be others
        return (codec.load(LedgerEntry, record.value) for record in found if record.key <= newest)

    async def _begin_chain(self, region: str, history: str, before: CopiedChain, revision: int) -> None:
        """From now on the region's ledger is copied anew, beside the copies of the one before. revision: of the one
        before in the store.

        Raises StaleRevision, ShoalError(OVERLOADED | STORE_FULL | STORE_UNAVAILABLE).
        """
        now = self._clock.now()
        bucket = self._chain_limits.bucket_of(region, now)
        if not bucket.allows(now):
            found, most = f"another ledger of {region} again", f"{CHAINS_PER_S * 3600:g} an hour"
            raise refuse(Code.OVERLOADED, found, most, "look there why its store has another history: shoal events")
        chain = CopiedChain(1 - before.place, history)
        name = chain.name(region)
        while old := await self._store.scan(f"{COPIES}{name}/", limit=CLEARED_AT_ONCE):
            await self._events.commit_unfenced(Transaction(deletes=tuple(each.key for each in old)))
        event = LogEvent(
            "LEDGER_RESTARTED",
            region,
            f"its store has history {history[:80] or '(not told)'} after {before.history or '(not told)'}",
            region,
        )
        await self._events.commit(
            {CHAINS + region: codec.dump(chain)},
            deletes=(LAST_COPIES + name,),
            expect={CHAINS + region: revision},
            events=[event],
        )
        bucket.spend(now)

    def _spend(self, region: str, believed: float) -> None:
        """Charges one solicitation to the region's rate limit; a lower standing costs more. believed: its standing."""
        bucket = self._solicitation_limits.bucket_of(region, self._clock.now())
        if not bucket.allows(self._clock.now()):
            self._meter.count(metrics.SOLICITATIONS_REFUSED, counterpart=region)
            limit = f"{SOLICITATIONS_PER_S * believed:g} a second at a standing of {believed:.2f}"
            raise refuse(Code.OVERLOADED, f"too many solicitations of {region}", limit, "ask less; award what is held")
        bucket.spend(self._clock.now(), 1 / believed)

    def _ledger_error(self, region: str, entry: LedgerEntry) -> ShoalError:
        self._meter.count(metrics.LEDGERS_BROKEN, counterpart=region)
        return refuse(
            Code.LEDGER_BROKEN,
            f"entry {entry.sequence} of {region} does not follow from the one before it",
            "the ledger that it showed before",
            "look at it there: shoal doctor",
        )

    async def _ask(self, member: Member, asked: bytes, solicitation: Solicitation) -> VerifiedMessage[Answer] | None:
        try:
            async with asyncio.timeout(solicitation.answer_s):
                answer = await self._candidates.ask(member, asked, solicitation.answer_s)
        except TimeoutError:
            self._meter.count(metrics.BIDS_MISSING, code=Code.DEADLINE_EXCEEDED)
            return None
        except ShoalError as error:
            self._meter.count(metrics.BIDS_MISSING, code=error.code)
            return None
        return answer

    async def _put_member(self, member: Member, event: LogEvent, extra: Transaction) -> None:
        bare = _bare(member)
        puts = {**extra.puts, MEMBERS + member.region: codec.dump(bare)}
        await self._events.commit(puts, deletes=extra.deletes, expect=extra.expect, events=[event])
        self._state = self._state.with_member(bare)

    def _require_member(self, region: str) -> Member:
        member = self._state.members.get(region)
        if member is None:
            raise refuse(
                Code.REGION_UNKNOWN,
                f"region {region!r:.80}",
                f"a member of {self._name}",
                "join: shoal federation join",
            )
        return member

    async def _reload(self) -> None:
        """Reads all shared state again. Leases of known advertisements do not start over."""
        found = await self._store.scan(SHARED_STATE)
        self._state = FederationState(advertisements=self._state.advertisements)
        for record in found:
            self._apply_change(StoreChange(record.key, record.value, record.revision))

    def _apply_change(self, change: StoreChange) -> None:
        self._revision = max(self._revision, change.revision)
        kind, _, name = change.key.removeprefix(SHARED_STATE).partition("/")
        kind = f"{SHARED_STATE}{kind}/"
        if change.value is None:
            self._state = self._state.without(name) if kind == MEMBERS else self._state
        elif kind == MEMBERS:
            self._state = self._state.with_member(codec.load(Member, change.value))
        elif kind == ADVERTISEMENTS:
            advertisement = codec.load(Advertisement, change.value)
            self._state = self._state.with_advertisement(advertisement, self._clock.now())
        elif kind == DELIVERIES:
            origin, _, region = name.partition("/")
            delivered = codec.load(Deliveries, change.value).delivered
            self._state = self._state.with_deliveries(origin, {region: delivered})
        elif kind == ASKERS:
            self._state = self._state.with_askers(name, codec.load(LedgerStandings, change.value))


T = TypeVar("T")


class _TrackedReads:
    """Reads from the store. revisions: revision of each key that was read; 0 where the key was absent."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.revisions: dict[str, int] = {}

    async def read(self, kind: type[T], key: str) -> T | None:
        found = await self._store.read(key)
        self.revisions[key] = found.revision if found is not None else 0
        return codec.load(kind, found.value) if found is not None else None


def _require_own(heard: VerifiedMessage[T], region: str) -> T:
    """The content, if the region speaks about itself. Raises ShoalError(REGION_MISMATCH)."""
    if region != heard.signer:
        raise refuse(
            Code.REGION_MISMATCH,
            f"{heard.signer} in the name of {region!r:.80}",
            heard.signer,
            "a region speaks for itself alone",
        )
    return heard.content


def _copy(region: str, sequence: int) -> str:
    return f"{COPIES}{region}/{sequence:012}"


def _bare(member: Member) -> Member:
    """The entry without what only the federation may state: advertisement, trust and standing."""
    return replace(member, advertisement=None, trust=1.0, standing=1.0)


def _check(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise ShoalError(refusal)
