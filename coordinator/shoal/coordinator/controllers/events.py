"""Events (an entry for every decision) and the audit log (an entry for every operator's or stranger's act).

Both live in the store under fixed-width sequence numbers, so that they are written in the same transaction as what they
tell about, and are kept to a stated number of entries. An audit entry carries the SHA-256 of the one before it.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.finish import finish
from shoal.coordinator.ports import Clock, Compacted, Record, StaleRevision, Store, Transaction
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey

EVENTS = "events/"
AUDIT = "audit/"
LOOK_S: Final = Seconds(5.0)
"""Between two looks at the store."""
UNSTAMPED = Wall(0.0)


@dataclass(frozen=True, slots=True)
class Event:
    """code: of types.codes where it is a refusal or wait, else a word of its own (`NODE_READY`, `PLACED`, ..)."""

    code: str
    subject: str
    message: str
    actor: str = "coordinator"
    node: str = ""
    workload: WorkloadKey | None = None
    at: Wall = UNSTAMPED
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """actor: a certificate's URI name, or `anonymous`. previous: SHA-256 of the entry before, empty for the first."""

    sequence: int
    at: Wall
    actor: str
    action: str
    subject: str
    outcome: str
    previous: str


@dataclass(frozen=True, slots=True)
class Entries:
    """Store operations that go into the caller's transaction."""

    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()


class EventLog:
    """The one writer of both logs. Numbers are taken when entries are made: a gap is a transaction that failed.

    shared: others write to the same store at the same time, and a number that one of them took is not taken again.
    """

    def __init__(self, store: Store, clock: Clock, *, kept: int, audit_kept: int, shared: bool = False) -> None:
        self._store = store
        self._shared = shared
        self._numbering = asyncio.Lock()
        self._clock = clock
        self._kept = kept
        self._audit_kept = audit_kept
        self._next = 1
        self._audit_next = 1
        self._audit_head = ""
        self._auditing = asyncio.Lock()
        self._fence: Mapping[str, int] = {}
        self.deposed = asyncio.Event()
        """Set once another coordinator was found to lead."""
        self.refusal: Refusal | None = None
        """Why the newest write was refused, or a look not answered; None when it was taken."""

    def fence(self, key: str, revision: int) -> None:
        """From now on nothing but the audit log, in which each coordinator tells of its own acts, is written unless
        `key` stands at `revision`."""
        self._fence = {key: revision}

    async def start(self) -> None:
        await self._find_number()
        await self._find_tail()

    def entries(self, events: Iterable[Event]) -> Entries:
        """The events stamped and numbered, and the old ones that they push out."""
        puts, deletes = {}, []
        for event in events:
            sequence, self._next = self._next, self._next + 1
            puts[_key(EVENTS, sequence)] = records.dump(replace(event, at=self._clock.wall(), sequence=sequence))
            if sequence > self._kept:
                deletes.append(_key(EVENTS, sequence - self._kept))
        return Entries(puts, tuple(deletes))

    async def commit(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: tuple[str, ...] = (),
        expect: Mapping[str, int] | None = None,
        events: Iterable[Event] = (),
    ) -> int:
        """A transaction with its events. On a full disk a mere delete goes without them: it is the way out.

        Raises StaleRevision, ShoalError(STORE_FULL | STORE_UNAVAILABLE | NOT_LEADER).
        """
        if self._shared:
            return await self._commit_among_others(puts, deletes, expect or {}, tuple(events))
        entries = self.entries(events)
        try:
            return await self._commit(Transaction({**puts, **entries.puts}, (*deletes, *entries.deletes), expect or {}))
        except ShoalError as error:
            if error.code is not Code.STORE_FULL or puts or not deletes:
                raise
        return await self._commit(Transaction(deletes=deletes, expect=expect or {}))

    async def write(self, *events: Event) -> None:
        """On their own. Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE | NOT_LEADER)."""
        await self.commit({}, events=events)

    async def put(self, transaction: Transaction) -> int:
        """For what needs no fence. Raises StaleRevision, ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        try:
            revision = await self._store.commit(transaction)
        except ShoalError as error:
            self.refusal = error.refusal
            raise
        if transaction.puts:
            self.refusal = None
        return revision

    async def run(self) -> None:
        """Looks at the store, until cancelled: for days nobody may write, and `refusal` is for alerts."""
        while True:
            await self._clock.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Whether it answers; where a write was refused, whether it takes one again: the event that says so."""
        if (refused := self.refusal) is not None:
            with suppress(ShoalError, StaleRevision):
                await self.write(Event("STORE_BACK", "store", f"takes writes again; it said {refused.code}"))
            return
        try:
            await self._store.read(EVENTS)
        except ShoalError as error:
            self.refusal = error.refusal

    async def _commit_among_others(
        self, puts: Mapping[str, bytes], deletes: tuple[str, ...], expect: Mapping[str, int], events: tuple[Event, ...]
    ) -> int:
        async with self._numbering:
            while True:
                await self._find_number()
                entries = self.entries(events)
                expected = {**expect, **dict.fromkeys(entries.puts, 0)}
                try:
                    return await self._commit(
                        Transaction({**puts, **entries.puts}, (*deletes, *entries.deletes), expected)
                    )
                except StaleRevision:
                    taken = [await self._store.read(key) for key in entries.puts]
                    if not any(taken):
                        raise  # what the caller expected, then

    async def _find_number(self) -> None:
        for record in await self._store.scan(EVENTS, after=_key(EVENTS, self._next - 1)):
            self._next = int(record.key.removeprefix(EVENTS)) + 1

    async def _commit(self, transaction: Transaction) -> int:
        fence = self._fence
        try:
            return await self.put(replace(transaction, expect={**fence, **transaction.expect}))
        except StaleRevision:
            if self._fence is not fence:  # this very coordinator has opened another history meanwhile
                return await self._commit(transaction)
            for key, revision in self._fence.items():
                found = await self._store.read(key)
                if found is None or found.revision != revision:
                    self.deposed.set()
                    raise refuse(
                        Code.NOT_LEADER,
                        "another coordinator was elected since",
                        "the one that leads",
                        "connect again",
                    ) from None
            raise

    async def audit(self, actor: str, action: str, subject: str, outcome: str) -> None:
        """Chained in the order of calls, whether or not the caller waits. What was not written is not linked to.

        Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE).
        """
        await finish(self._chain(actor, action, subject, outcome))

    @property
    def audit_head(self) -> str:
        """Digest of the newest audit entry; empty before the first."""
        return self._audit_head

    async def _chain(self, actor: str, action: str, subject: str, outcome: str) -> None:
        async with self._auditing:
            try:
                await self._append(actor, action, subject, outcome)
            except StaleRevision:  # an entry whose commit was not answered is there all the same
                await self._find_tail()
                await self._append(actor, action, subject, outcome)

    async def _append(self, actor: str, action: str, subject: str, outcome: str) -> None:
        entry = AuditEntry(self._audit_next, self._clock.wall(), actor, action, subject, outcome, self._audit_head)
        key = _key(AUDIT, entry.sequence)
        deletes = (_key(AUDIT, entry.sequence - self._audit_kept),) if entry.sequence > self._audit_kept else ()
        value = records.dump(entry)
        await self.put(Transaction({key: value}, deletes, expect={key: 0}))
        self._audit_next, self._audit_head = entry.sequence + 1, digest_of(value)

    async def _find_tail(self) -> None:
        """Whatever it says: an entry that somebody spoilt is for doctor to tell, and keeps nothing from starting."""
        for record in await self._store.scan(AUDIT, after=_key(AUDIT, self._audit_next - 1)):
            self._audit_next, self._audit_head = _number(record) + 1, digest_of(record.value)

    async def past(self, after: int, limit: int) -> tuple[Event, ...]:
        """The newest `limit` events after number `after`, oldest first."""
        found = await self._store.scan(EVENTS, after=_key(EVENTS, max(after, self._next - 1 - limit)))
        return tuple(records.load(Event, record.value) for record in found)

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Past events from `after` on, then new ones as they are committed. A slow reader lists again."""
        revision = 0
        while True:
            for record in await self._store.scan(EVENTS, after=_key(EVENTS, after)):
                event = records.load(Event, record.value)
                after, revision = event.sequence, max(revision, record.revision)
                yield event
            try:
                async for change in self._store.watch(EVENTS, revision):
                    if change.value is not None:
                        event = records.load(Event, change.value)
                        revision = change.revision
                        if event.sequence > after:
                            after = event.sequence
                            yield event
            except Compacted as gone:
                revision = gone.revision


def broken_link(stored: Iterable[Record]) -> int | None:
    """The number of the first stored audit entry that cannot be read or does not follow from the one before it; None
    when all do. By the stored bytes: a later version may know an entry's fields otherwise."""
    previous: Record | None = None
    for record in stored:
        number = _number(record)
        try:
            entry = records.load(AuditEntry, record.value)
        except ShoalError:
            return number
        follows = previous is None or (entry.previous == digest_of(previous.value) and number == _number(previous) + 1)
        if entry.sequence != number or not follows:
            return number
        previous = record
    return None


def digest_of(value: bytes) -> str:
    """Of a stored audit entry, as the next one carries it."""
    return hashlib.sha256(value).hexdigest()


def _number(record: Record) -> int:
    return int(record.key.removeprefix(AUDIT))


def _key(prefix: str, sequence: int) -> str:
    return f"{prefix}{sequence:012}"
