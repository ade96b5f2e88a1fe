"""Events (an entry for every decision) and the audit log (an entry for every act of an operator or an unauthenticated
caller).

Both live in the store under fixed-width sequence numbers. So an entry is written in the same transaction as the change
it describes, and each log keeps a stated number of entries. An audit entry carries the SHA-256 of the previous one.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.ports import Clock, Compacted, StaleRevision, Store, StoreRecord, Transaction
from shoal.coordinator.uncancelled import run_to_completion
from shoal.types.backoff import delay
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey

EVENTS = "events/"
AUDIT = "audit/"
STORE_PROBE_S: Final = Seconds(5.0)
"""Interval between two probes of the store."""
UNSTAMPED = Wall(0.0)
AUDIT_ATTEMPTS: Final = 20
"""Attempts to append to the audit log, which other coordinators append to at the same time: of those that try at once
one succeeds, and the others pause."""
AUDIT_PAUSE_S: Final = 0.01
AUDIT_PAUSE_MOST_S: Final = 0.2
"""Longest pause between two attempts; all pauses together take less than 4 s."""
NODE_EVENTS_KEPT: Final = 256
"""Entries kept for each node that caused some; counted apart from the others, so a node cannot displace those."""
OVERDUE_EVICTED: Final = 16
"""Entries beyond the limit that one transaction deletes, in addition to one for each that it adds. They are there after
a lower limit was set, say; all at once could be more than a transaction of etcd takes."""
MADE_AT_ONCE: Final = 256
"""Entries between two turns of others on the loop, of one transaction: 9 us each of an AMD EPYC, to number and to write
out."""
_NODE_CODES: Final = frozenset(
    {
        "NODE_CONNECTED",
        "NODE_DISCONNECTED",
        "NODE_TRUSTED",
        "RECEIPT_KEPT",
        Code.NODE_QUARANTINED,
        Code.CLOCK_SKEW,
        Code.DUPLICATE_IDENTITY,
    }
)


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One entry of the event log."""

    # A code of types.codes for a refusal or wait, else an event name such as `NODE_READY` or `PLACED`.
    code: str
    # What the event is about, such as a node, an assignment or a digest.
    subject: str
    # Details, for people.
    message: str
    # Who caused it: `coordinator`, `agent NODE`, or a certificate's URI name.
    actor: str = "coordinator"
    # The node that it concerns; empty for none.
    node: str = ""
    # The workload that it concerns; None for none.
    workload: WorkloadKey | None = None
    # When it was written; UNSTAMPED before that.
    at: Wall = UNSTAMPED
    # Number in the event log; 0 before it is written.
    sequence: int = 0
    # What stands in for real hardware on `node`: `emulated` or `simulated`; empty: nothing. Set when the event is
    # written.
    stand_in: str = ""

    @property
    def cause(self) -> str:
        """The node that can cause such entries at will; empty for the region's own decisions."""
        said = self.actor.startswith("agent ") or self.code in _NODE_CODES
        return self.node if said else ""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry of the audit log, chained to the previous one."""

    # Number in the audit log, from 1.
    sequence: int
    # When it was written.
    at: Wall
    # A certificate's URI name, or `anonymous`.
    actor: str
    # The method or act, such as `Redeem` or `Verify`.
    action: str
    # What it acted on, such as a migration id or the caller's address.
    subject: str
    # The result: a code, or words and a digest.
    outcome: str
    # SHA-256 of the previous stored entry, hex; empty for the first.
    previous: str


@dataclass(frozen=True, slots=True)
class StoreWrites:
    """Store operations to add to the caller's transaction."""

    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EventWrites:
    """Store operations for events, to add to the caller's transaction, and the numbers behind them."""

    # The first number that was free before.
    first: int
    # Entries by key.
    puts: Mapping[str, bytes]
    # Numbers of the entries that are added, by cause.
    added: Mapping[str, tuple[int, ...]]
    # Numbers of the old entries that they displace, by the same causes, oldest first.
    evicted: Mapping[str, tuple[int, ...]]

    @property
    def deletes(self) -> tuple[str, ...]:
        return tuple(_key(EVENTS, number) for numbers in self.evicted.values() for number in numbers)


class EventLog:
    """The one writer of both logs. An entry's number is taken when the entry is made: a gap is a transaction that
    failed.

    shared: other coordinators write to the same store at the same time, so a number that one of them took is skipped.
    """

    def __init__(self, store: Store, clock: Clock, *, kept: int, audit_kept: int, shared: bool = False) -> None:
        self._store = store
        self._shared = shared
        self._numbering = asyncio.Lock()
        self._clock = clock
        self._kept = kept
        self._audit_kept = audit_kept
        self._next = 1
        self._stored_before = 1
        """Above the newest number that is known to be stored: `_next` counts those that are being made, too."""
        self._numbers: dict[str, deque[int]] = {}
        """Numbers of the kept entries, oldest first, by the node that caused them; the empty name has all others."""
        self._audit_next = 1
        self._audit_head = ""
        self._auditing = asyncio.Lock()
        self._fence: Mapping[str, int] = {}
        self.stand_in: Callable[[str], str] = lambda node: ""
        """What stands in for real hardware on the node of that name."""
        self.leadership_loss = asyncio.Event()
        """Set once a failed commit showed that another coordinator leads."""
        self.refusal: Refusal | None = None
        """Why the newest write or probe failed; None when it succeeded."""

    def set_fence(self, key: str, revision: int) -> None:
        """From now on every write requires `key` to be at `revision`. The audit log is exempt: each coordinator records
        its own acts there.
        """
        self._fence = {key: revision}

    async def start(self) -> None:
        await self._find_number()
        await self._find_tail()

    async def entries(self, events: Iterable[LogEvent]) -> EventWrites:
        """Writes for the stamped and numbered events, and deletes for the old entries that they displace. If they are
        not committed, `_take_back` must undo this. Call it under `_numbering`, and commit before others number.
        """
        first, puts, added = self._next, dict[str, bytes](), dict[str, list[int]]()
        for made, event in enumerate(events):
            if made and made % MADE_AT_ONCE == 0:
                await self._clock.sleep(Seconds(0.0))
            sequence, self._next = self._next, self._next + 1
            puts[_key(EVENTS, sequence)] = codec.dump(self._stamp(event, sequence))
            added.setdefault(event.cause, []).append(sequence)
        evicted, overdue = dict[str, tuple[int, ...]](), OVERDUE_EVICTED
        for cause, new in added.items():
            evicted[cause] = self._evict(cause, len(new), overdue)
            overdue -= max(0, len(evicted[cause]) - len(new))
            self._numbers[cause].extend(new)
        return EventWrites(first, puts, {cause: tuple(new) for cause, new in added.items()}, evicted)

    def _evict(self, cause: str, count: int, overdue: int) -> tuple[int, ...]:
        """Numbers of the oldest entries with this cause that exceed the limit once `count` are added, but at most
        `overdue` more than that.
        """
        numbers = self._numbers.setdefault(cause, deque())
        most = min(NODE_EVENTS_KEPT, self._kept) if cause else self._kept
        excess = min(len(numbers) + count - most, count + overdue, len(numbers))
        return tuple(numbers.popleft() for _ in range(excess))

    def _take_back(self, writes: EventWrites) -> None:
        """After a failed commit: what it would have displaced is still there, and its own entries are not. One that was
        stored all the same, after a timeout, is found at the next start.
        """
        for cause, evicted in writes.evicted.items():
            known, gone = self._numbers[cause], {*writes.added[cause]}
            self._numbers[cause] = deque(sorted((*evicted, *(number for number in known if number not in gone))))
        if self._shared:
            self._next = writes.first  # `_find_number` reads what is there: nobody took a number meanwhile

    def _stamp(self, event: LogEvent, sequence: int) -> LogEvent:
        stand_in = self.stand_in(event.node) if event.node else ""
        return replace(event, at=self._clock.wall(), sequence=sequence, stand_in=stand_in)

    async def commit(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: tuple[str, ...] = (),
        expect: Mapping[str, int] | None = None,
        events: Iterable[LogEvent] = (),
    ) -> int:
        """A transaction with its events. On a full disk a transaction of deletes alone is committed without events,
        because deleting is the way to free space.

        Raises StaleRevision, ShoalError(STORE_FULL | STORE_UNAVAILABLE | NOT_LEADER).
        """
        try:
            if self._shared:
                return await self._commit_shared(puts, deletes, expect or {}, tuple(events))
            async with self._numbering:  # a reader who saw a number asks for higher ones alone
                entries = await self.entries(events)
            return await self._commit_entries(puts, deletes, expect or {}, entries)
        except ShoalError as error:
            if error.code is not Code.STORE_FULL or puts or not deletes:
                raise
        return await self._commit(Transaction(deletes=deletes, expect=expect or {}))

    async def write(self, *events: LogEvent) -> None:
        """Commits events without other changes. Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE | NOT_LEADER)."""
        await self.commit({}, events=events)

    async def commit_unfenced(self, transaction: Transaction) -> int:
        """A commit without the fence. Raises StaleRevision, ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        try:
            revision = await self._store.commit(transaction)
        except ShoalError as error:
            self.refusal = error.refusal
            raise
        if transaction.puts:
            self.refusal = None
        return revision

    async def run(self) -> None:
        """Probes the store until cancelled. The region may write nothing for days, and alerts read `refusal`."""
        while True:
            await self._clock.sleep(STORE_PROBE_S)
            await self.probe()

    async def probe(self) -> None:
        """Reads the store, and sets `refusal` on failure. After a refused write, writes a STORE_BACK event instead; if
        the store takes it, `refusal` is cleared.
        """
        if (refused := self.refusal) is not None:
            with suppress(ShoalError, StaleRevision):
                await self.write(LogEvent("STORE_BACK", "store", f"takes writes again; it said {refused.code}"))
            return
        try:
            await self._store.read(EVENTS)
        except ShoalError as error:
            self.refusal = error.refusal

    async def _commit_shared(
        self,
        puts: Mapping[str, bytes],
        deletes: tuple[str, ...],
        expect: Mapping[str, int],
        events: tuple[LogEvent, ...],
    ) -> int:
        """Takes numbers that no other coordinator took: each entry's key must be absent, and a taken number is retried
        with the next.
        """
        async with self._numbering:
            while True:
                await self._find_number()
                entries = await self.entries(events)
                expected = {**expect, **dict.fromkeys(entries.puts, 0)}
                try:
                    return await self._commit_entries(puts, deletes, expected, entries)
                except StaleRevision:
                    taken = [await self._store.read(key) for key in entries.puts]
                    if not any(taken):
                        raise  # the numbers are free: one of the caller's own keys is stale

    async def _commit_entries(
        self, puts: Mapping[str, bytes], deletes: tuple[str, ...], expect: Mapping[str, int], entries: EventWrites
    ) -> int:
        try:
            found = await self._commit(Transaction({**puts, **entries.puts}, (*deletes, *entries.deletes), expect))
        except BaseException:
            self._take_back(entries)
            raise
        self._stored_before = max(self._stored_before, entries.first + len(entries.puts))
        return found

    async def _find_number(self) -> None:
        for record in await self._store.scan(EVENTS, after=_key(EVENTS, self._next - 1)):
            sequence = int(record.key.removeprefix(EVENTS))
            self._next = self._stored_before = sequence + 1
            self._numbers.setdefault(_cause_of(record), deque()).append(sequence)

    async def _commit(self, transaction: Transaction) -> int:
        """A fenced commit. When the fence itself is stale, sets `leadership_loss` and raises ShoalError(NOT_LEADER)."""
        fence = self._fence
        try:
            return await self.commit_unfenced(replace(transaction, expect={**fence, **transaction.expect}))
        except StaleRevision:
            if self._fence is not fence:  # this coordinator itself opened a new history meanwhile
                return await self._commit(transaction)
            for key, revision in self._fence.items():
                found = await self._store.read(key)
                if found is None or found.revision != revision:
                    self.leadership_loss.set()
                    raise refuse(
                        Code.NOT_LEADER,
                        "another coordinator was elected since",
                        "the one that leads",
                        "connect again",
                    ) from None
            raise

    async def audit(self, actor: str, action: str, subject: str, outcome: str) -> None:
        """Appends an audit entry, chained in the order of calls, whether or not the caller waits. A failed entry is not
        linked to.

        Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE).
        """
        await run_to_completion(self._chain(actor, action, subject, outcome))

    @property
    def audit_head(self) -> str:
        """Digest of the newest audit entry; empty before the first."""
        return self._audit_head

    async def _chain(self, actor: str, action: str, subject: str, outcome: str) -> None:
        async with self._auditing:
            for attempt in range(AUDIT_ATTEMPTS):
                if attempt:  # after an entry of another coordinator, or of a commit that timed out and stored its own
                    name = f"{actor} {action} {subject} {self._clock.wall()}"
                    await self._clock.sleep(delay(name, attempt - 1, base_s=AUDIT_PAUSE_S, cap_s=AUDIT_PAUSE_MOST_S))
                    await self._find_tail()
                with suppress(StaleRevision):
                    return await self._append(actor, action, subject, outcome)
        found = f"{AUDIT_ATTEMPTS} entries of others, each at the moment of this one"
        raise refuse(Code.STORE_UNAVAILABLE, found, "a place in the audit log", "try again")

    async def _append(self, actor: str, action: str, subject: str, outcome: str) -> None:
        entry = AuditEntry(self._audit_next, self._clock.wall(), actor, action, subject, outcome, self._audit_head)
        key = _key(AUDIT, entry.sequence)
        deletes = (_key(AUDIT, entry.sequence - self._audit_kept),) if entry.sequence > self._audit_kept else ()
        value = codec.dump(entry)
        await self.commit_unfenced(Transaction({key: value}, deletes, expect={key: 0}))
        self._audit_next, self._audit_head = entry.sequence + 1, digest_of(value)

    async def _find_tail(self) -> None:
        """Finds the newest audit entry without validating it: doctor reports a corrupt entry, and start must not fail
        on it.
        """
        for record in await self._store.scan(AUDIT, after=_key(AUDIT, self._audit_next - 1)):
            self._audit_next, self._audit_head = _number(record) + 1, digest_of(record.value)

    async def events_after(self, after: int, limit: int) -> tuple[LogEvent, ...]:
        """The newest `limit` events after number `after`, oldest first."""
        return tuple(await self.event_iterator(after, limit))

    async def event_iterator(self, after: int, limit: int) -> Iterator[LogEvent]:
        """As `events_after`, but each event is parsed when it is taken: thousands at once would hold the loop."""
        back = limit
        while True:
            start = max(after, self._stored_before - 1 - back)
            found = await self._store.scan(EVENTS, after=_key(EVENTS, start))
            if len(found) >= limit or start <= after:
                return (codec.load(LogEvent, record.value) for record in found[max(0, len(found) - limit) :])
            back *= 4  # refused transactions left gaps

    async def follow(self, after: int) -> AsyncIterator[LogEvent]:
        """Past events from `after` on, then new ones as they are committed. A reader too slow for the watch lists
        again.
        """
        revision = 0
        while True:
            for record in await self._store.scan(EVENTS, after=_key(EVENTS, after)):
                event = codec.load(LogEvent, record.value)
                after, revision = event.sequence, max(revision, record.revision)
                yield event
            try:
                async for change in self._store.watch(EVENTS, revision):
                    if change.value is not None:
                        event = codec.load(LogEvent, change.value)
                        revision = change.revision
                        if event.sequence > after:
                            after = event.sequence
                            yield event
            except Compacted as gone:
                revision = gone.revision


def first_broken_entry(stored: Iterable[StoreRecord]) -> int | None:
    """The number of the first stored audit entry that is unreadable or not chained to the one before it; None when the
    chain holds. Compares stored bytes, because a later version may parse an entry's fields differently.
    """
    previous: StoreRecord | None = None
    for record in stored:
        number = _number(record)
        try:
            entry = codec.load(AuditEntry, record.value)
        except ShoalError:
            return number
        follows = previous is None or (entry.previous == digest_of(previous.value) and number == _number(previous) + 1)
        if entry.sequence != number or not follows:
            return number
        previous = record
    return None


def digest_of(value: bytes) -> str:
    """SHA-256 of a stored audit entry, hex, as the next entry carries it."""
    return hashlib.sha256(value).hexdigest()


def _cause_of(record: StoreRecord) -> str:
    """`LogEvent.cause` of a stored event; empty for an unreadable entry, which doctor reports."""
    try:
        return codec.load(LogEvent, record.value).cause
    except ShoalError:
        return ""


def _number(record: StoreRecord) -> int:
    return int(record.key.removeprefix(AUDIT))


def _key(prefix: str, sequence: int) -> str:
    return f"{prefix}{sequence:012}"
