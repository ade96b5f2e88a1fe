"""The region record in the store, and commits fenced by it, each with the floor of the region's clock.

Every commit of the controllers is a compare-and-set on this record, so a coordinator that was replaced (another term,
another history) can no longer change anything.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.coordinator.controllers.log.region_clock import CLOCK, FLOOR_INTERVAL_S, ClockFloor, RegionClock
from shoal.coordinator.ports import IdSource, Meter, Store, Transaction
from shoal.types.assignment import Version
from shoal.types.codes import Code, ShoalError, refuse

KEY = "region"


HISTORIES_KEPT: Final = 100
"""Ended histories that the region record keeps."""


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """The region's identity in the store. It fences every commit."""

    # The region's name; start fails on another region's store.
    name: str
    # Id of the current history.
    history: str
    # Term of the leader's election; 1 where there is only one coordinator.
    term: int
    # Ids of ended histories, oldest first; at most HISTORIES_KEPT.
    past: tuple[str, ...] = ()


class RegionFence:
    """Reads and updates the region record, and commits for the other controllers."""

    def __init__(
        self, name: str, store: Store, events: EventLog, clock: RegionClock, ids: IdSource, meter: Meter
    ) -> None:
        """clock: continued from the store by `start`; of the times that are committed here."""
        self._name = name
        self._store = store
        self._events = events
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._record = RegionRecord(name, "", 1)
        self._revision = 0
        """Revision of the region record that commits require; 0 while the store has none."""
        self._floor_at = clock.now()
        self.documents_lock = asyncio.Lock()
        """Held while documents or models change, because each change is computed from the result of the one before."""

    async def start(self, *, elected: bool = False) -> None:
        """Resumes from the store. elected: this coordinator won an election, so it begins a new term, which fences off
        the previous leader's next write. Raises ShoalError(REGION_MISMATCH) on another region's store.
        """
        stored = await self._store.read(KEY)
        if stored is None:
            return
        record, revision = codec.load(RegionRecord, stored.value), stored.revision
        if record.name != self._name:
            raise refuse(
                Code.REGION_MISMATCH,
                f"the store of region {record.name}",
                f"one of {self._name}",
                f"start with --region {record.name}, or another --data-dir",
            )
        if elected:
            record = replace(record, term=record.term + 1)
            revision = await self._store.commit(Transaction({KEY: codec.dump(record)}, expect={KEY: revision}))
        self._adopt(record, revision)
        if (floor := await self._store.read(CLOCK)) is not None:
            self._clock.resume(codec.load(ClockFloor, floor.value).now)
            self._floor_at = self._clock.now()

    def _adopt(self, record: RegionRecord, revision: int) -> None:
        self._record, self._revision = record, revision
        self._events.set_fence(KEY, revision)

    async def is_current(self) -> bool:
        """Whether the store would still take this coordinator's commits: for effects outside of it, which it cannot
        refuse. Raises ShoalError(STORE_UNAVAILABLE)."""
        found = await self._store.read(KEY)
        return (0 if found is None else found.revision) == self._revision

    async def open_history(self, why: str, *, unknown_history: str = "") -> None:
        """Begins a new history, in which generations restart: agents accept lower ones and stop no replica because of
        it. unknown_history: a history to record as ended that this store never knew.
        """
        ended = dict.fromkeys(each for each in (*self._record.past, self._record.history, unknown_history) if each)
        record = replace(self._record, history=self._ids.name("history"), past=tuple(ended)[-HISTORIES_KEPT:])
        event = LogEvent("HISTORY_OPENED", record.history, why)
        expect = {} if self._record.history else {KEY: 0}
        puts = {KEY: codec.dump(record), **self._floor()}
        self._adopt(record, await self._events.commit(puts, expect=expect, events=[event]))

    @property
    def history(self) -> str:
        return self._record.history

    @property
    def old_histories(self) -> tuple[str, ...]:
        """Histories that have ended, oldest first."""
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
        events: Iterable[LogEvent] = (),
    ) -> int:
        """A fenced transaction that includes its events. Raises StaleRevision, ShoalError(STORE_FULL | NOT_LEADER |
        ..).
        """
        if puts:  # deletes alone must pass on a full disk
            puts = {**puts, **self._floor()}
        return await self._events.commit(puts, deletes=deletes, expect=expect, events=events)

    def _floor(self) -> Mapping[str, bytes]:
        self._floor_at = self._clock.now()
        return {CLOCK: codec.dump(ClockFloor(self._floor_at))}

    async def save_clock(self) -> None:
        """Writes the floor of the clock where nothing else has been written for FLOOR_INTERVAL_S. Raises
        ShoalError(STORE_FULL | NOT_LEADER | ..).
        """
        if self._clock.now() - self._floor_at >= FLOOR_INTERVAL_S:
            await self._events.commit(self._floor())

    async def confirm(self) -> None:
        """Writes to the store, which fails once another coordinator leads: before a change outside of the store. Raises
        ShoalError(STORE_FULL | NOT_LEADER | ..).
        """
        await self._events.commit(self._floor())

    async def attest(self, actor: str, action: str, subject: str, outcome: str) -> None:
        """Appends to the audit log; a failed write is raised. Raises ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        await self._events.audit(actor, action, subject, outcome)

    async def note(self, *events: LogEvent) -> None:
        """Events about something that was not written: dropped and counted when the store cannot take them."""
        try:
            await self._events.write(*events)
        except ShoalError as error:
            self._meter.count(metrics.EVENTS_DROPPED, code=error.code)

    async def audit(self, actor: str, action: str, subject: str, outcome: str) -> None:
        """An audit entry about a refusal: dropped and counted when the store cannot take it."""
        try:
            await self._events.audit(actor, action, subject, outcome)
        except ShoalError as error:
            self._meter.count(metrics.AUDIT_DROPPED, code=error.code)
