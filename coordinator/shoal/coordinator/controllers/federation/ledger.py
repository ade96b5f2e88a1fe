"""The ledger of this region's agreements: a hash chain, written together with what it records.

An entry is part of the transaction that it records, so neither exists without the other. A change inside the chain is
detectable. A truncated end is detected because every counterpart keeps the last digest that it was shown.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.log.fencing import RegionFence
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.ports import Clock, StaleRevision, Store, StoreRecord
from shoal.types.chain import LedgerEntry, digest, first_break, show_evidence
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Wall

LEDGER: Final = "ledger/"
HEADS: Final = "heads/"
ENTRIES_KEPT: Final = 100_000
PAGE: Final = 1000
"""Entries that are read at a time to find the newest."""


@dataclass(frozen=True, slots=True)
class LedgerDraft:
    """A ledger entry without its place in the chain."""

    # The transition, such as `awarded` or `renewed` (`LedgerEntry.what`).
    what: str
    # The agreement; the bid where there is no agreement yet.
    agreement: str
    # The other region.
    counterpart: str
    # The workload as `tenant/name`; empty where it is no longer known.
    workload: str
    # Why, as a code of types.codes; empty for none.
    code: str = ""
    # Terms of the offer, for people and for sums; empty for none.
    terms: str = ""
    # The counterpart's signed message; empty where there is none.
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class LedgerWrites:
    """One fenced transaction with its ledger entries."""

    # Values by key.
    puts: Mapping[str, bytes] = field(default_factory=dict)
    # Keys to delete.
    deletes: tuple[str, ...] = ()
    # Revision read of each key; 0: the key must be absent. A key that is not listed is written unconditionally.
    expect: Mapping[str, int] = field(default_factory=dict)
    # For the region's event log.
    events: tuple[LogEvent, ...] = ()
    # Entries of the chain.
    drafts: tuple[LedgerDraft, ...] = ()


@dataclass(frozen=True, slots=True)
class LedgerHead:
    """The newest state of a counterpart's ledger that this region was shown."""

    # The counterpart.
    region: str
    # Digest of the newest entry.
    digest: str
    # When it was shown.
    at: Wall


class Ledger:
    """The one writer of the chain."""

    def __init__(self, store: Store, fence: RegionFence, clock: Clock, *, kept: int = ENTRIES_KEPT) -> None:
        self._store = store
        self._fence = fence
        self._clock = clock
        self._kept = kept
        self._next = 1
        self._head = ""
        self._heads: dict[str, LedgerHead] = {}
        self._unsaved: dict[str, LedgerHead] = {}
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        await self._find_tail()
        for record in await self._store.scan(HEADS):
            head = codec.load(LedgerHead, record.value)
            self._heads[head.region] = head

    @property
    def history(self) -> str:
        """History of the store: of another one another ledger may have the same numbers."""
        return self._fence.history

    @property
    def head(self) -> str:
        """Digest of the newest entry, for counterparts to keep; empty before the first."""
        return self._head

    @property
    def heads(self) -> Mapping[str, str]:
        """By counterpart, the digest that it showed last."""
        return {region: head.digest for region, head in self._heads.items()}

    def record_head(self, region: str, head: str) -> None:
        """Remembers the head of a counterpart's ledger. The next commit of this ledger stores it, or `save` does."""
        known = self._heads.get(region)
        if head and (known is None or known.digest != head):
            self._heads[region] = self._unsaved[region] = LedgerHead(region, head, self._clock.wall())

    async def save(self) -> None:
        """Stores heads that are not stored yet. Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        if self._unsaved:
            await self.commit(LedgerWrites())

    async def commit(self, writes: LedgerWrites) -> int:
        """The revision of the transaction. Raises StaleRevision, ShoalError(STORE_FULL | ..)."""
        async with self._writing:
            try:
                return await self._commit(writes)
            except StaleRevision:  # a commit that timed out may have stored its entries
                known = self._next
                await self._find_tail()
                if self._next == known:
                    raise
                return await self._commit(writes)

    async def entries_after(self, after: int, limit: int = 0) -> tuple[LedgerEntry, ...]:
        """Entries after number `after`, oldest first; limit 0: all."""
        found = await self._store.scan(LEDGER, after=_key(after), limit=limit)
        return tuple(codec.load(LedgerEntry, record.value) for record in found)

    async def newest(self, limit: int) -> tuple[LedgerEntry, ...]:
        """The newest `limit` entries, oldest first."""
        return tuple(await self.newest_iterator(limit))

    async def newest_iterator(self, limit: int) -> Iterator[LedgerEntry]:
        """As `newest`, but each entry is parsed when it is taken: thousands at once would hold the loop."""
        found = await self._store.scan(LEDGER, after=_key(max(0, self._next - 1 - limit)))
        return (codec.load(LedgerEntry, record.value) for record in found[-limit:])

    async def verify(self, peer_heads: Mapping[str, str], compute: Compute = inline) -> Refusal | None:
        """Why the stored chain is not the one that was written; None if it is. peer_heads: by counterpart, the head of
        this region's ledger that it keeps. compute: runs what takes seconds for a long ledger.
        """
        head = self._head
        return await compute(partial(_verify, await self._store.scan(LEDGER), head, dict(peer_heads)))

    async def _commit(self, writes: LedgerWrites) -> int:
        number, previous, written, old = self._next, self._head, dict[str, bytes](), list[str]()
        for draft in writes.drafts:
            entry = LedgerEntry(
                sequence=number,
                at=self._clock.wall(),
                what=draft.what,
                agreement=draft.agreement,
                counterpart=draft.counterpart,
                workload=draft.workload,
                code=draft.code,
                terms=draft.terms,
                evidence=show_evidence(draft.evidence),
                previous=previous,
            )
            written[_key(number)] = codec.dump(entry)
            if number > self._kept:
                old.append(_key(number - self._kept))
            number, previous = number + 1, digest(entry)
        heads = dict(self._unsaved)
        saved = {HEADS + region: codec.dump(head) for region, head in heads.items()}
        revision = await self._fence.commit(
            {**writes.puts, **saved, **written},
            deletes=(*writes.deletes, *old),
            expect={**writes.expect, **dict.fromkeys(written, 0)},
            events=writes.events,
        )
        self._next, self._head = number, previous
        for region, head in heads.items():
            if self._unsaved.get(region) == head:
                del self._unsaved[region]
        return revision

    async def _find_tail(self) -> None:
        """Finds the newest entry without validating it: doctor reports a corrupt one, and start must not fail on it.

        Reads those before it as well, a page at a time, and parses none of them.
        """
        newest = None
        while found := await self._store.scan(LEDGER, after=_key(self._next - 1), limit=PAGE):
            newest = found[-1]
            self._next = int(newest.key.removeprefix(LEDGER)) + 1
        if newest is not None:
            self._head = _digest(newest)


def _verify(stored: Sequence[StoreRecord], head: str, peer_heads: Mapping[str, str]) -> Refusal | None:
    """As `Ledger.verify`. head: digest of the newest entry before they were read; empty for none."""
    entries = list[LedgerEntry]()
    for record in stored:
        number = int(record.key.removeprefix(LEDGER))
        try:
            entries.append(codec.load(LedgerEntry, record.value))
        except ShoalError:
            return _ledger_refusal(f"entry {number} cannot be read")
        if entries[-1].sequence != number:
            return _ledger_refusal(f"entry {number} says that it is {entries[-1].sequence}")
    if (bad := first_break(entries)) is not None:
        return _ledger_refusal(f"entry {bad} does not follow from the one before it")
    known = {digest(entry) for entry in entries}
    if head and head not in known:
        return _ledger_refusal("the newest entries are not those that were written")
    dropped = bool(entries) and entries[0].sequence > 1
    cut = sorted(region for region, theirs in peer_heads.items() if theirs and theirs not in known)
    if cut and not dropped:
        return _ledger_refusal(f"entries that were shown to {', '.join(cut)} are not there: the end was cut, or forked")
    return None


def _digest(record: StoreRecord) -> str:
    try:
        return digest(codec.load(LedgerEntry, record.value))
    except ShoalError:
        return ""


def _ledger_refusal(found: str) -> Refusal:
    remedy = "compare with a counterpart's, the federation's, or a copy of the store in backups/"
    return Refusal(Code.LEDGER_BROKEN, found, "an unbroken chain", remedy)


def _key(sequence: int) -> str:
    return f"{LEDGER}{sequence:012}"
