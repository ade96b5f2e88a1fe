"""The handover of sessions from one front to another: the source offers, releases and commits; the receiver keeps what
is offered, and runs it once it is committed (`core.sequences`)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import structlog

from shoal.agent.core import sequences
from shoal.agent.core.sequences import (
    OfferedSession,
    OwnedSession,
    SequenceKey,
    SessionSnapshot,
    SessionState,
    StateTensor,
)
from shoal.agent.dataplane.auth import agent_of
from shoal.agent.dataplane.forward_auth import ForwardAuth
from shoal.agent.dataplane.request import MAX_RANK, MAX_TENSORS, invalid
from shoal.agent.dataplane.session_lease import SessionLease
from shoal.agent.dataplane.session_table import SessionTable
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import PeerClients
from shoal.agent.metrics import SessionEvent
from shoal.agent.ports import AgentClock
from shoal.types.backoff import delay
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.migration import Handover, SessionSource
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import sessions_pb2
from shoal.wire import nouns
from shoal.wire.field_limits import CountLimits, parse

HANDOVER_TIMEOUT_S: Final = Seconds(3.0)
"""Longest time that a session waits while it is offered to another front."""
MAX_CONCURRENT_HANDOVERS: Final = 8
"""Sessions of one replica that are handed over at the same time."""
OFFER_LIMITS: Final = CountLimits(
    fields=8 * MAX_TENSORS,
    repeated=64,
    by_field={"shoal.v1.SessionOffer.state": MAX_TENSORS, "shoal.v1.StateTensor.shape": MAX_TENSORS * MAX_RANK},
)
"""Limits for a session that another agent hands over: as many state tensors as a request has inputs."""
COMMIT_LIMITS: Final = CountLimits(fields=256, repeated=64)

_log = structlog.get_logger(__name__)
T = TypeVar("T")


class HandoverSource:
    """Hands over the sessions of replicas here, for as long as the region asks for it. `node` is this agent's."""

    def __init__(self, node: str, clock: AgentClock, peers: PeerClients, table: SessionTable) -> None:
        self._node = node
        self._clock = clock
        self._peers = peers
        self._table = table
        self._handovers: dict[str, asyncio.Task[None]] = {}
        self._uncommitted: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()

    def uncommitted_count(self, assignment: str) -> int:
        """Sessions that this replica released, and whose receiver has not confirmed the commit yet."""
        return self._uncommitted[assignment]

    def start_handovers(self) -> None:
        """Begin the handover of each replica in the table that has one."""
        for name, replica in self._table.replicas.items():
            if replica.handover is not None and name not in self._handovers:
                self._handovers[name] = self._spawn(self._hand_over_all(name))

    def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _hand_over_all(self, name: str) -> None:
        """Hand over the replica's sessions while its handover lasts, also those that arrive meanwhile."""
        on_its_way: dict[SequenceKey, asyncio.Task[bool]] = {}
        failures: Counter[SequenceKey] = Counter()
        in_a_row = 0
        try:
            while (replica := self._table.replicas.get(name)) is not None and (to := replica.handover) is not None:
                mine = [key for key in self._table.sessions_at(name) if key not in on_its_way]
                # Failing and busy sessions go last, so that none of them delays the others.
                mine.sort(key=lambda key: (failures[key], self._table.turns.is_busy(key)))
                for key in mine[: MAX_CONCURRENT_HANDOVERS - len(on_its_way)]:
                    on_its_way[key] = self._spawn(self._hand_over(key, name, to))
                if not on_its_way:
                    await self._table.wait_for_change()
                    continue
                await asyncio.wait(on_its_way.values(), return_when=asyncio.FIRST_COMPLETED)
                for key in [key for key, task in on_its_way.items() if task.done()]:
                    given = on_its_way.pop(key).result()
                    failures[key] += not given
                    in_a_row = 0 if given else in_a_row + 1
                if in_a_row:
                    await asyncio.sleep(delay(name, in_a_row - 1, base_s=0.1, cap_s=1.0))
        finally:
            del self._handovers[name]

    async def _hand_over(self, key: SequenceKey, name: str, to: Handover) -> bool:
        """Hand over one session between two steps; its next step waits meanwhile. Returns False where that failed."""
        async with self._table.turns.hold(key):
            entry = self._table.get(key)
            replica = self._table.replicas.get(name)
            if (
                not isinstance(entry, OwnedSession)
                or entry.assignment != name
                or replica is None
                or replica.handover != to
            ):
                return True
            if to.node == self._node:
                there = self._table.replicas.get(to.assignment)
                if there is None or (there.workload, there.session) != (replica.workload, replica.session):
                    return False
                self._table.put(key, sequences.with_assignment(entry, to.assignment))
                self._table.event_counts[SessionEvent.GIVEN] += 1
                return True
            try:
                idle_s = Seconds(self._clock.now() - entry.used_at)
                kept = await self._offer(key, sequences.with_handover(entry.snapshot), to, idle_s)
            except ShoalError as error:
                self._table.event_counts[SessionEvent.NOT_GIVEN] += 1
                _log.warning(
                    "sequence_handover_failed", sequence=key.sequence, target=to.node, code=error.code, error=str(error)
                )
                return False
            self._table.put(key, sequences.release(entry, to, self._clock.now()))
            self._table.event_counts[SessionEvent.GIVEN] += 1
            if kept:
                self._uncommitted[name] += 1
                self._spawn(self._commit(key, sequences.with_handover(entry.snapshot), to, name))
        return True

    async def _offer(self, key: SequenceKey, snapshot: SessionSnapshot, to: Handover, idle_s: Seconds) -> bool:
        offer = sessions_pb2.SessionOffer(
            migration=to.migration,
            to=to.assignment,
            workload=nouns.to_wire(key.workload),
            sequence=key.sequence,
            run=snapshot.run_id,
            step=snapshot.step,
            state=[
                sessions_pb2.StateTensor(input=name, dtype=each.dtype, shape=each.shape, content=each.content)
                for name, each in snapshot.state.items()
            ],
            token=snapshot.token,
            asked=snapshot.request_sha256,
            answer=snapshot.answer,
            ended=snapshot.is_ended,
            hands=snapshot.handovers,
            idle_s=idle_s,
        )
        reply = await self._peers.hand_over(_endpoint(to), "Offer", offer.SerializeToString(), HANDOVER_TIMEOUT_S)
        return parse(sessions_pb2.SessionOffered, reply, COMMIT_LIMITS).kept

    async def _commit(self, key: SequenceKey, snapshot: SessionSnapshot, to: Handover, of: str) -> None:
        """Commit a released session, until the receiver confirms. The receiver runs nothing before, and nobody else
        will run it.

        `of` is the replica that the session left.
        """
        try:
            await self._send_commit(key, snapshot, to)
        finally:
            self._uncommitted[of] -= 1

    async def _send_commit(self, key: SequenceKey, snapshot: SessionSnapshot, to: Handover) -> None:
        commit = sessions_pb2.SessionCommit(
            migration=to.migration,
            to=to.assignment,
            workload=nouns.to_wire(key.workload),
            sequence=key.sequence,
            run=snapshot.run_id,
            hands=snapshot.handovers,
        ).SerializeToString()
        end, tries = self._clock.now() + sequences.OFFER_TTL_S, 0
        while self._clock.now() < end:
            try:
                await self._peers.hand_over(_endpoint(to), "Commit", commit, HANDOVER_TIMEOUT_S)
                return
            except ShoalError as error:
                if error.code is Code.SESSION_LOST:
                    break
                await asyncio.sleep(delay(key.sequence, tries, base_s=0.05, cap_s=1.0))
                tries += 1
        _log.warning("sequence_handover_unconfirmed", sequence=key.sequence, target=to.node)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class HandoverReceiver:
    """Takes sessions that fronts of this region hand over.

    `dates_at` gives the time at which a caller's certificate must be valid. `forward_auth` lists the fronts that may
    hand sessions over; None: all.
    """

    def __init__(
        self,
        region: str,
        clock: AgentClock,
        table: SessionTable,
        lease: SessionLease,
        dates_at: Callable[[], Wall],
        forward_auth: ForwardAuth | None,
    ) -> None:
        self._region = region
        self._clock = clock
        self._table = table
        self._lease = lease
        self._dates_at = dates_at
        self._forward_auth = forward_auth
        self._revoked: frozenset[str] = frozenset()

    def configure(self, revoked: Iterable[str]) -> None:
        """Refuse callers whose certificates have these serials."""
        self._revoked = frozenset(revoked)

    def admit(self, call: InboundCall) -> None:
        """Return if this caller may hand over anything at all: an agent of this region. Raises ShoalError."""
        self._agent(call)

    async def on_offer(self, call: InboundCall, message: bytes) -> bytes:
        """Answer a SessionOffer with a SessionOffered, both serialized. Raises ShoalError."""
        offer = parse(sessions_pb2.SessionOffer, message, OFFER_LIMITS)
        source = SessionSource(offer.migration, self._agent(call, "Offer").name)
        key = SequenceKey(nouns.from_wire(WorkloadKey, offer.workload), offer.sequence)
        self._check_source(source, key, offer.to)
        state: SessionState = {
            each.input: StateTensor(each.dtype, tuple(each.shape), each.content) for each in offer.state
        }  # fmt: skip
        if state.keys() != self._table.replicas[offer.to].session.keys():
            raise invalid(f"state of {', '.join(sorted(state))}", "the inputs that the workload's session names")
        standing = SessionSnapshot(
            offer.run, offer.step, state, offer.token, offer.asked, offer.answer, offer.ended, offer.hands
        )
        self._lease.check()
        self._table.check_size(key, standing)
        taken = sequences.receive_offer(
            self._table.get(key),
            standing,
            offer.to,
            source,
            self._clock.now(),
            Seconds(max(0.0, offer.idle_s)),
            busy=self._table.turns.is_busy(key),
        )
        match taken:
            case Refusal():
                raise ShoalError(taken)
            case sequences.OfferSuperseded():
                return sessions_pb2.SessionOffered(kept=False).SerializeToString()
            case sequences.OfferAccepted(entry):
                self._table.put(key, entry)
                return sessions_pb2.SessionOffered(kept=True).SerializeToString()

    async def on_commit(self, call: InboundCall, message: bytes) -> bytes:
        """Answer a SessionCommit with a SessionCommitted, both serialized. Raises ShoalError.

        The node that was authorized when it offered the session may commit it, because the migration may have been
        reversed or ended since.
        """
        commit = parse(sessions_pb2.SessionCommit, message, COMMIT_LIMITS)
        source = SessionSource(commit.migration, self._agent(call, "Commit").name)
        key = SequenceKey(nouns.from_wire(WorkloadKey, commit.workload), commit.sequence)
        before = self._table.get(key)
        after = sequences.commit_offer(before, commit.run, commit.hands)
        taken = isinstance(before, OwnedSession) and after is before  # a repeated commit changes nothing
        if not (taken or (isinstance(before, OfferedSession) and before.source == source)):
            self._check_source(source, key, commit.to)
        if isinstance(after, Refusal):
            raise ShoalError(after)
        if after is not before:
            self._table.put(key, after)
            self._table.event_counts[SessionEvent.TAKEN] += 1
            self._table.notify()
        return sessions_pb2.SessionCommitted().SerializeToString()

    def _agent(self, call: InboundCall, method: str = "") -> Identity:
        return agent_of(call, self._region, self._revoked, self._dates_at(), self._forward_auth, method)

    def _check_source(self, source: SessionSource, key: SequenceKey, to: str) -> None:
        """Raises ShoalError(ROLE_DENIED), also if there is no such replica: an unauthorized caller must learn
        nothing."""
        replica = self._table.replicas.get(to)
        if replica is None or replica.workload != key.workload or source not in replica.handover_sources:
            raise refuse(
                Code.ROLE_DENIED,
                f"agent {source.node}, which no move to {to!r:.80} names",
                "a source that the region named to this node",
                "it is tried again: this node may not have been told yet",
            )


def _endpoint(to: Handover) -> Endpoint:
    return Endpoint(to.assignment, to.node, EndpointKind.AGENT, to.address, 1.0, EndpointState.READY)
