"""What a front knows of each session, the room that sessions take, and the turns of their steps."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

import structlog

from shoal.agent.core import sequences
from shoal.agent.core.sequences import (
    MovedSession,
    OfferedSession,
    OwnedSession,
    RunStep,
    SequenceKey,
    SessionEntry,
    SessionLimits,
    SessionSnapshot,
)
from shoal.agent.dataplane.transport import CallRefused
from shoal.agent.metrics import SessionEvent
from shoal.agent.ports import AgentClock, StatefulReplica
from shoal.host.event_wait import wait_or_timeout
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.units import Elapsed, Seconds

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Turn:
    """The lock of one session. `users` counts who holds it or waits for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class SessionTurns:
    """Lets one at a time work at a session: a step, or its handover."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._turns: dict[SequenceKey, _Turn] = {}

    def is_busy(self, key: SequenceKey) -> bool:
        """Whether the session's turn is held or waited for."""
        return key in self._turns

    @asynccontextmanager
    async def hold(self, key: SequenceKey, until: Elapsed | None = None) -> AsyncIterator[None]:
        """Hold the session's lock: its steps run one at a time, in the order of their arrival.

        Raises ShoalError(DEADLINE_EXCEEDED).
        """
        turn = self._turns.setdefault(key, _Turn())
        turn.users += 1
        try:
            try:
                async with asyncio.timeout(None if until is None else max(0.0, until - self._clock.now())):
                    await turn.lock.acquire()
            except TimeoutError as error:
                raise refuse(
                    Code.DEADLINE_EXCEEDED, "earlier steps of the session took too long", "an answer", "allow more"
                ) from error
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[key]


class SessionTable:
    """The sessions of this front, and the replicas here that keep them."""

    def __init__(self, clock: AgentClock, limits: SessionLimits) -> None:
        self._clock = clock
        self.limits = limits
        self.turns = SessionTurns(clock)
        self.replicas: Mapping[str, StatefulReplica] = {}
        """Stateful replicas of this node by assignment, whether or not their workers run now."""
        self.event_counts: Counter[SessionEvent] = Counter()
        """Sessions begun, ended, lost, given to another front, taken from one; steps run, replayed, answered again;
        offers that failed."""
        self._entries: dict[SequenceKey, SessionEntry] = {}
        self._bytes: Counter[str] = Counter()
        """Bytes of each tenant's sessions."""
        self._ended: dict[str, OrderedDict[SequenceKey, None]] = {}
        """Sessions that ended here and are kept to answer a repeated last step, by tenant, the oldest first. They take
        no room from others: as many are kept as may be open, and they give way where their bytes are missing."""
        self._beginning: set[SequenceKey] = set()
        self._change = asyncio.Event()

    def configure(self, replicas: Iterable[StatefulReplica]) -> None:
        """Sessions of a replica that is no longer on this node are lost."""
        self.replicas = {replica.assignment: replica for replica in replicas}
        for key, entry in tuple(self._entries.items()):
            if not isinstance(entry, MovedSession) and entry.assignment not in self.replicas:
                self._lose(key, "its replica was taken away")

    # entries

    @property
    def held_bytes(self) -> int:
        """Bytes of all sessions."""
        return self._bytes.total()

    def get(self, key: SequenceKey) -> SessionEntry | None:
        return self._entries.get(key)

    def put(self, key: SequenceKey, entry: SessionEntry) -> None:
        tenant = key.workload.tenant
        self._bytes[tenant] += _size(entry) - _size(self._entries.get(key))
        self._entries[key] = entry
        self._unlist_ended(key)
        if not _has_ended(entry):
            return
        own = self._ended.setdefault(tenant, OrderedDict())
        own[key] = None
        if len(own) > self.limits.per_tenant:
            self._drop_ended(tenant)
        elif sum(map(len, self._ended.values())) > self.limits.max_sessions:
            self._drop_ended(max(self._ended, key=lambda each: len(self._ended[each])))

    def lose_all(self, why: str) -> None:
        """All sessions of this front have ended, also idle ones."""
        for key, entry in tuple(self._entries.items()):
            if not isinstance(entry, MovedSession):
                self._lose(key, why)

    def drop_expired(self) -> None:
        now = self._clock.now()
        for key, entry in tuple(self._entries.items()):
            if sequences.is_expired(entry, now, self.limits) and not self.turns.is_busy(key):
                self._forget(key)

    def sessions_at(self, assignment: str) -> list[SequenceKey]:
        """Sessions that run at the replica and have not ended."""
        return [key for key, entry in self._entries.items() if _is_at(entry, assignment)]

    def counts(self) -> Counter[str]:
        """Sessions that run at each replica, or are offered to it."""
        return Counter(
            entry.assignment
            for entry in self._entries.values()
            if not (isinstance(entry, MovedSession) or _has_ended(entry))
        )

    def _forget(self, key: SequenceKey) -> None:
        self._bytes[key.workload.tenant] -= _size(self._entries.pop(key, None))
        self._unlist_ended(key)

    def _unlist_ended(self, key: SequenceKey) -> None:
        own = self._ended.get(key.workload.tenant)
        if own is not None:
            own.pop(key, None)
            if not own:
                del self._ended[key.workload.tenant]

    def _drop_ended(self, tenant: str) -> bool:
        """Forget the tenant's oldest session that has ended, and that no step asks for. False where there is none."""
        oldest = next((key for key in self._ended.get(tenant, ()) if not self.turns.is_busy(key)), None)
        if oldest is not None:
            self._forget(oldest)
        return oldest is not None

    def _lose(self, key: SequenceKey, why: str) -> None:
        """Forget a session, which is lost unless it has ended."""
        has_ended = _has_ended(self._entries[key])
        self._forget(key)
        if has_ended:
            return
        self.event_counts[SessionEvent.LOST] += 1
        _log.warning("sequence_lost", workload=str(key.workload), sequence=key.sequence, reason=why)

    # room

    @contextmanager
    def hold_room(self, key: SequenceKey, ready: RunStep) -> Iterator[None]:
        """Reserve room for a new session while its first step runs. Raises CallRefused."""
        if ready.state is not None:
            yield
            return
        here = {each for each, entry in self._entries.items() if _takes_place(entry)}
        others = (here | self._beginning) - {key}
        mine = sum(each.workload.tenant == key.workload.tenant for each in others)
        refusal = sequences.check_room(len(others), mine, self._bytes.total(), self.limits)
        if refusal is not None:
            raise CallRefused(refusal, Seconds(1.0))
        self._beginning.add(key)
        try:
            yield
        finally:
            self._beginning.discard(key)

    def fit(self, key: SequenceKey, snapshot: SessionSnapshot) -> SessionSnapshot:
        """The session as it is kept: without its last answer, where there is only room for its state. So one that ends
        is never refused. Raises as `check_size`."""
        try:
            self.check_size(key, snapshot)
        except CallRefused as refused:
            if refused.code is not Code.OVERLOADED:
                raise
            snapshot = replace(snapshot, answer=b"")
            self.check_size(key, snapshot)
        return snapshot

    def check_size(self, key: SequenceKey, snapshot: SessionSnapshot) -> None:
        """Sessions that have ended give way. Raises CallRefused(SESSION_INVALID | OVERLOADED)."""
        while (refusal := self._refuse_size(key, snapshot)) is not None:
            if refusal.code is not Code.OVERLOADED:
                raise CallRefused(refusal, None)
            if not self._drop_ended(self._most_in_the_way(key, snapshot)):
                raise CallRefused(refusal, Seconds(1.0))

    def _refuse_size(self, key: SequenceKey, snapshot: SessionSnapshot) -> Refusal | None:
        known, tenant = _size(self._entries.get(key)), key.workload.tenant
        of_tenant, of_all = self._bytes[tenant] - known, self._bytes.total() - known
        return sequences.check_size(snapshot.size, of_tenant, of_all, self.limits)

    def _most_in_the_way(self, key: SequenceKey, snapshot: SessionSnapshot) -> str:
        """The tenant whose sessions that ended give way first: this one where its own bytes are the limit, else of
        those with any the one that holds most."""
        tenant = key.workload.tenant
        own = self._bytes[tenant] - _size(self._entries.get(key)) + snapshot.size
        if own > self.limits.tenant_bytes:
            return tenant
        return max(self._ended, key=lambda each: self._bytes[each], default=tenant)

    # changes

    def notify(self) -> None:
        """Wake whoever waits for a change: of an entry, of the lease or of the configuration."""
        news, self._change = self._change, asyncio.Event()
        news.set()

    async def wait_for_change(self, end: Elapsed | None = None) -> bool:
        """Wait for any change. Returns False at `end`."""
        left = None if end is None else max(0.0, end - self._clock.now())
        return await wait_or_timeout(self._change, left)


def _has_ended(entry: SessionEntry) -> bool:
    return isinstance(entry, OwnedSession) and entry.snapshot.is_ended


def _takes_place(entry: SessionEntry) -> bool:
    """Whether it is one of the sessions that a front may have at once."""
    return not isinstance(entry, MovedSession) and not _has_ended(entry)


def _is_at(entry: SessionEntry, assignment: str) -> bool:
    return isinstance(entry, OwnedSession) and entry.assignment == assignment and not entry.snapshot.is_ended


def _size(entry: SessionEntry | None) -> int:
    return entry.snapshot.size if isinstance(entry, OwnedSession | OfferedSession) else 0
