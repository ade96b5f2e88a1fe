"""What this region and others owe each other, as it came to be: a hash chain, written with what it tells about.

An entry is part of the transaction that it stands for, so neither is ever there alone. Nothing inside can be changed
unseen; that the end was cut is seen because every counterpart keeps the last digest that it was shown.
"""

import asyncio
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.ports import Clock, Record, StaleRevision, Store
from shoal.types.chain import LedgerEntry, digest, first_broken
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Wall

LEDGER: Final = "ledger/"
HEADS: Final = "heads/"
ENTRIES_KEPT: Final = 100_000


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry but for its place in the chain. agreement: or the bid. evidence: the counterpart's signed message."""

    what: str
    agreement: str
    counterpart: str
    workload: str
    code: str = ""
    terms: str = ""
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """Digest of the newest entry of a counterpart's ledger that this region was shown, and when."""

    region: str
    digest: str
    at: Wall


class Ledger:
    """The one writer of the chain."""

    def __init__(self, store: Store, truth: Truth, clock: Clock, *, kept: int = ENTRIES_KEPT) -> None:
        self._store = store
        self._truth = truth
        self._clock = clock
        self._kept = kept
        self._next = 1
        self._head = ""
        self._heads: dict[str, Head] = {}
        self._unsaved: dict[str, Head] = {}
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        await self._find_tail()
        for record in await self._store.scan(HEADS):
            head = records.load(Head, record.value)
            self._heads[head.region] = head

    @property
    def head(self) -> str:
        """Digest of the newest entry, for counterparts to keep; empty before the first."""
        return self._head

    @property
    def heads(self) -> Mapping[str, str]:
        """By counterpart, the digest that it showed last."""
        return {region: head.digest for region, head in self._heads.items()}

    def shown(self, region: str, head: str) -> None:
        """A counterpart told the head of its ledger. It is written with the next commit of this one, or by `save`."""
        known = self._heads.get(region)
        if head and (known is None or known.digest != head):
            self._heads[region] = self._unsaved[region] = Head(region, head, self._clock.wall())

    async def save(self) -> None:
        """Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        if self._unsaved:
            await self.commit({})

    async def commit(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: tuple[str, ...] = (),
        expect: Mapping[str, int] | None = None,
        events: Iterable[Event] = (),
        drafts: Sequence[Draft] = (),
    ) -> int:
        """A fenced transaction with its ledger entries. Raises StaleRevision, ShoalError(STORE_FULL | ..)."""
        async with self._writing:
            told = tuple(events)
            try:
                return await self._commit(puts, deletes, expect or {}, told, drafts)
            except StaleRevision:  # entries whose commit was not answered are there all the same
                known = self._next
                await self._find_tail()
                if self._next == known:
                    raise
                return await self._commit(puts, deletes, expect or {}, told, drafts)

    async def past(self, after: int, limit: int = 0) -> tuple[LedgerEntry, ...]:
        """Entries after number `after`, oldest first; limit 0: all."""
        found = await self._store.scan(LEDGER, after=_key(after), limit=limit)
        return tuple(records.load(LedgerEntry, record.value) for record in found)

    async def newest(self, limit: int) -> tuple[LedgerEntry, ...]:
        """Oldest first."""
        return await self.past(max(0, self._next - 1 - limit))

    async def broken(self, shown: Mapping[str, str]) -> Refusal | None:
        """Why the stored chain is not the one that was written. shown: by counterpart, the head of this region's ledger
        that it keeps."""
        head, entries = self._head, list[LedgerEntry]()
        for record in await self._store.scan(LEDGER):
            number = int(record.key.removeprefix(LEDGER))
            try:
                entries.append(records.load(LedgerEntry, record.value))
            except ShoalError:
                return _broken(f"entry {number} cannot be read")
            if entries[-1].sequence != number:
                return _broken(f"entry {number} says that it is {entries[-1].sequence}")
        if (bad := first_broken(entries)) is not None:
            return _broken(f"entry {bad} does not follow from the one before it")
        known = {digest(entry) for entry in entries}
        if head and head not in known:
            return _broken("the newest entries are not those that were written")
        dropped = bool(entries) and entries[0].sequence > 1
        cut = sorted(region for region, theirs in shown.items() if theirs and theirs not in known)
        if cut and not dropped:
            return _broken(f"entries that were shown to {', '.join(cut)} are not there: the end was cut, or forked")
        return None

    async def _commit(
        self,
        puts: Mapping[str, bytes],
        deletes: tuple[str, ...],
        expect: Mapping[str, int],
        events: Iterable[Event],
        drafts: Sequence[Draft],
    ) -> int:
        number, previous, written, old = self._next, self._head, dict[str, bytes](), list[str]()
        for draft in drafts:
            entry = LedgerEntry(
                sequence=number,
                at=self._clock.wall(),
                what=draft.what,
                agreement=draft.agreement,
                counterpart=draft.counterpart,
                workload=draft.workload,
                code=draft.code,
                terms=draft.terms,
                evidence=b64encode(draft.evidence).decode(),
                previous=previous,
            )
            written[_key(number)] = records.dump(entry)
            if number > self._kept:
                old.append(_key(number - self._kept))
            number, previous = number + 1, digest(entry)
        heads = dict(self._unsaved)
        saved = {HEADS + region: records.dump(head) for region, head in heads.items()}
        revision = await self._truth.commit(
            {**puts, **saved, **written},
            deletes=(*deletes, *old),
            expect={**expect, **dict.fromkeys(written, 0)},
            events=events,
        )
        self._next, self._head = number, previous
        for region, head in heads.items():
            if self._unsaved.get(region) == head:
                del self._unsaved[region]
        return revision

    async def _find_tail(self) -> None:
        """Whatever it says: an entry that somebody spoilt is for doctor to tell, and keeps nothing from starting."""
        for record in await self._store.scan(LEDGER, after=_key(self._next - 1)):
            self._next, self._head = int(record.key.removeprefix(LEDGER)) + 1, _digest(record)


def _digest(record: Record) -> str:
    try:
        return digest(records.load(LedgerEntry, record.value))
    except ShoalError:
        return ""


def _broken(found: str) -> Refusal:
    remedy = "compare with a counterpart's, the federation's, or a copy of the store in backups/"
    return Refusal(Code.LEDGER_BROKEN, found, "an unbroken chain", remedy)


def _key(sequence: int) -> str:
    return f"{LEDGER}{sequence:012}"
