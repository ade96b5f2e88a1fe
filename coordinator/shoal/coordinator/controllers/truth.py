"""Which truth this coordinator speaks for: the region's record in the store, and commits that are fenced by it.

Every commit of the controllers is a compare-and-set on this record, so that a coordinator that was replaced (another
term, another history) can change nothing any more.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.events import Event, EventLog
from shoal.coordinator.ports import Ids, Meter, Store, Transaction
from shoal.types.assignment import Version
from shoal.types.codes import Code, ShoalError, refuse

KEY = "region"


PAST: Final = 100
"""Histories that are remembered as ended."""


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """term: of the leader's election; 1 where there is one coordinator. past: histories that have ended."""

    name: str
    history: str
    term: int
    past: tuple[str, ...] = ()


class Truth:
    def __init__(self, name: str, store: Store, events: EventLog, ids: Ids, meter: Meter) -> None:
        self._name = name
        self._store = store
        self._events = events
        self._ids = ids
        self._meter = meter
        self._record = RegionRecord(name, "", 1)
        self.changing = asyncio.Lock()
        """Held while documents or models change: each change is decided on what the one before it left."""

    async def start(self, *, elected: bool = False) -> None:
        """Resumes what the store holds. elected: one of several, so that a new term begins, and whoever led before
        writes nothing more, with its next breath. Raises ShoalError(REGION_MISMATCH) on another region's store."""
        stored = await self._store.read(KEY)
        if stored is None:
            return
        record, revision = records.load(RegionRecord, stored.value), stored.revision
        if record.name != self._name:
            raise refuse(
                Code.REGION_MISMATCH,
                f"the store of region {record.name}",
                f"one of {self._name}",
                f"start with --region {record.name}, or another --data-dir",
            )
        if elected:
            record = replace(record, term=record.term + 1)
            revision = await self._store.commit(Transaction({KEY: records.dump(record)}, expect={KEY: revision}))
        self._take(record, revision)

    def _take(self, record: RegionRecord, revision: int) -> None:
        self._record = record
        self._events.fence(KEY, revision)

    async def open_history(self, why: str, *, left: str = "") -> None:
        """From now on generations mean something new: agents accept lower ones, and stop nothing for it. left: another
        history that has ended, of which this store never knew."""
        ended = dict.fromkeys(each for each in (*self._record.past, self._record.history, left) if each)
        record = replace(self._record, history=self._ids.name("history"), past=tuple(ended)[-PAST:])
        event = Event("HISTORY_OPENED", record.history, why)
        expect = {} if self._record.history else {KEY: 0}
        self._take(record, await self._events.commit({KEY: records.dump(record)}, expect=expect, events=[event]))

    @property
    def history(self) -> str:
        return self._record.history

    @property
    def past(self) -> tuple[str, ...]:
        """Histories that have ended."""
        return self._record.past

    @property
    def term(self) -> int:
        return self._record.term

    def version(self, generation: int) -> Version:
        return Version(self._record.history, self._record.term, generation)

    async def commit(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: tuple[str, ...] = (),
        expect: Mapping[str, int] | None = None,
        events: Iterable[Event] = (),
    ) -> int:
        """Fenced, with its events in the same transaction. Raises StaleRevision, ShoalError(STORE_FULL | NOT_LEADER |
        ..)."""
        return await self._events.commit(puts, deletes=deletes, expect=expect, events=events)

    async def attest(self, actor: str, action: str, subject: str, outcome: str) -> None:
        """Into the audit log. Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        await self._events.audit(actor, action, subject, outcome)

    async def note(self, *events: Event) -> None:
        """Events about what was not written: dropped and counted when the store cannot take them."""
        try:
            await self._events.write(*events)
        except ShoalError as error:
            self._meter.count("events_dropped", code=error.code)
