"""The sessions that this front owns: their steps, one at a time, and their handover to another front.

State lives only in this process. If a worker crashes during a step, the front waits for its replacement and runs the
step once more from the state before it. The front is the only owner of its sessions while the node's lease lasts. When
the lease ends every session stops. Sessions continue once the lease is extended, unless the region has declared the
node lost meanwhile.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar

import structlog

from shoal.agent import metrics
from shoal.agent.core import routing, sequences
from shoal.agent.core.routing import AttemptFault
from shoal.agent.core.sequences import (
    MovedSession,
    OfferedSession,
    OwnedSession,
    RunStep,
    SequenceKey,
    SessionLimits,
    SessionSnapshot,
    SessionState,
    SessionStep,
    StateTensor,
)
from shoal.agent.dataplane import session_state as tensors
from shoal.agent.dataplane.auth import agent_of
from shoal.agent.dataplane.forward_auth import ForwardAuth
from shoal.agent.dataplane.request import MAX_RANK, MAX_TENSORS, fingerprint, invalid
from shoal.agent.dataplane.session_lease import SessionLease
from shoal.agent.dataplane.session_table import SessionTable
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.metrics import SessionEvent
from shoal.agent.ports import AgentClock, LocalWorker, StatefulReplica
from shoal.host.metrics import MetricReadings
from shoal.inference import open_inference_pb2 as oip
from shoal.types.backoff import delay
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.migration import Giver, Handover
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import sessions_pb2
from shoal.wire import nouns
from shoal.wire.field_limits import CountLimits, parse

HANDOVER_TIMEOUT_S: Final = Seconds(3.0)
"""Longest time that a session waits while it is offered to another front."""
LEASE_WAIT_S: Final = 30.0
"""How long a step waits for a lease that has ended. With the default `partition.lost_after` of 10 s, a coordinator that
returns within 39 s costs no step whose client waits as long."""
DEADLINE_MARGIN_S: Final = 0.2
"""A waiting step is refused this long before its deadline, so that its client learns why it waited."""
HANDOVER_WAIT_S: Final = Seconds(3.0)
"""Longest time that a step waits for its session to be released by another front."""
WORKER_WAIT_S: Final = Seconds(30.0)
"""Longest time that a step waits for its worker."""
REPLACEMENT_WAIT_S: Final = Seconds(2.0)
"""How long a step waits for a replacement after a failed worker that still exists: that one may only have hung."""
MAX_CONCURRENT_HANDOVERS: Final = 8
"""Sessions of one replica that are handed over at the same time."""
METADATA_TIMEOUT_S: Final = Seconds(10.0)
WORKER_FAULTS: Final = frozenset({AttemptFault.CRASH, AttemptFault.REPLICA})
OFFER_LIMITS: Final = CountLimits(
    fields=8 * MAX_TENSORS,
    repeated=64,
    by_field={"shoal.v1.SessionOffer.state": MAX_TENSORS, "shoal.v1.StateTensor.shape": MAX_TENSORS * MAX_RANK},
)
"""Limits for a session that another agent hands over: as many state tensors as a request has inputs."""
COMMIT_LIMITS: Final = CountLimits(fields=256, repeated=64)

_log = structlog.get_logger(__name__)
T = TypeVar("T")
Runner = Callable[[str, bytes], Awaitable[bytes]]
"""Runs a request once on the local worker of an assignment. Raises AttemptFailed."""


class FrontSessions:
    """The sessions of one front.

    `node` and `region` are this agent's. `dates_at` gives the time at which a caller's certificate must be valid.
    `forward_auth` lists the fronts that may hand sessions over; None: all.
    """

    def __init__(
        self,
        region: str,
        node: str,
        clock: AgentClock,
        workers: WorkerClients,
        peers: PeerClients,
        dates_at: Callable[[], Wall],
        limits: SessionLimits | None = None,
        forward_auth: ForwardAuth | None = None,
    ) -> None:
        self._forward_auth = forward_auth
        self._region = region
        self._node = node
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._dates_at = dates_at
        self._table = SessionTable(clock, limits or SessionLimits())
        self._lease = SessionLease(node, clock)
        self._local_workers: Mapping[str, LocalWorker] = {}
        self._revoked: frozenset[str] = frozenset()
        self._routed_replicas: frozenset[str] | None = None
        self._metadata: dict[str, oip.ModelMetadataResponse] = {}
        self._handovers: dict[str, asyncio.Task[None]] = {}
        self._uncommitted: Counter[str] = Counter()
        """Sessions that a replica here released, and whose receiver has not confirmed the commit yet, by replica."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.event_counts = self._table.event_counts

    # configuration

    def configure(
        self,
        stateful_replicas: Iterable[StatefulReplica],
        workers: Iterable[LocalWorker],
        revoked: Iterable[str] = (),
        routed_replicas: Iterable[str] | None = None,
    ) -> None:
        """Apply a complete configuration. Sessions of a replica that is no longer on this node are lost.

        `routed_replicas` are the replicas in the routes, on this node and elsewhere; None where unknown.
        """
        self._routed_replicas = None if routed_replicas is None else frozenset(routed_replicas)
        self._local_workers = {worker.assignment: worker for worker in workers}
        self._revoked = frozenset(revoked)
        self._table.configure(stateful_replicas)
        self._metadata = {name: each for name, each in self._metadata.items() if name in self._table.replicas}
        for name, keeper in self._table.replicas.items():
            if keeper.handover is not None and name not in self._handovers:
                self._handovers[name] = self._spawn(self._hand_over_all(name))
        self._table.notify()

    def lease(self, until: Elapsed, claim: str = "") -> None:
        """Set the end of the lease.

        After a gap, sessions continue if `claim` is the same: then the region did not declare this node lost, so nobody
        else has them. Otherwise all sessions have ended, also idle ones.
        """
        if not self._lease.extend(until, claim):
            self._table.lose_all("the region gave this node up")
        self._table.notify()

    def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    # queries and steps

    def replicas(self, workload: WorkloadKey) -> frozenset[str]:
        """Stateful replicas of the workload here, whether or not their workers run now."""
        return frozenset(name for name, keeper in self._table.replicas.items() if keeper.workload == workload)

    def session_of(self, assignment: str) -> Mapping[str, str]:
        keeper = self._table.replicas.get(assignment)
        return keeper.session if keeper is not None else {}

    def location(self, key: SequenceKey) -> str | Handover | None:
        """The replica here that has the session, or the handover by which it left; None for an unknown session."""
        entry = self._table.get(key)
        return entry.to if isinstance(entry, MovedSession) else entry.assignment if entry is not None else None

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Sessions of each replica here that removing it would lose. Expired sessions are dropped first.

        Sessions in transit count at both ends: the receiver is to have them, and the source must still commit them.
        """
        self._table.drop_expired()
        return tuple((name, self._table.count(name) + self._uncommitted[name]) for name in self._table.replicas)

    def readings(self) -> MetricReadings:
        """What the front's page says of sessions."""
        return {
            metrics.FRONT_SESSIONS: {(name,): count for name, count in self.counts()},
            metrics.FRONT_SESSION_EVENTS: {(event,): count for event, count in tuple(self.event_counts.items())},
        }

    async def step(
        self, key: SequenceKey, step: SessionStep, request: bytes, begin_at: str, until: Elapsed, run: Runner
    ) -> bytes:
        """Run one step, after those before it. A new session begins at the replica `begin_at`.

        Raises ShoalError(SESSION_LOST | SESSION_MOVED | SESSION_STEP | LEASE_ENDED | DEADLINE_EXCEEDED | ...), and what
        `run` raises; after that the session is as it was before.
        """
        async with self._table.turns.hold(key, until):
            await self._wait_for_lease(key, step, until)
            judged = await self._decide(key, step, until)
            match judged:
                case sequences.ReplayAnswer(answer):
                    self.event_counts[SessionEvent.ANSWERED_AGAIN] += 1
                    return answer
                case sequences.Redirect(to):
                    raise _moved_error(to)
                case RunStep():
                    return await self._run(key, judged, step, request, begin_at, until, run)

    # one step

    async def _decide(
        self, key: SequenceKey, step: SessionStep, until: Elapsed
    ) -> RunStep | sequences.ReplayAnswer | sequences.Redirect:
        settled = min(until, self._clock.now() + HANDOVER_WAIT_S)
        while True:
            judged = sequences.decide_step(self._table.get(key), step, self._routed_replicas)
            if isinstance(judged, Refusal):
                raise ShoalError(judged)
            if not isinstance(judged, sequences.AwaitHandover):
                return judged
            if not await self._table.wait_for_change(Elapsed(settled)):
                raise ShoalError(
                    sequences.lost_session_refusal("it is on its way here, and was not let go of there in time")
                )

    async def _run(
        self,
        key: SequenceKey,
        ready: RunStep,
        step: SessionStep,
        request: bytes,
        begin_at: str,
        until: Elapsed,
        run: Runner,
    ) -> bytes:
        known = self._table.get(key)
        name = known.assignment if isinstance(known, OwnedSession) else begin_at
        keeper = self._table.replicas.get(name)
        if keeper is None:
            raise refuse(Code.MODEL_NOT_READY, f"{name} keeps no sessions here", "its replica", "retry")
        await self._await_worker(name, None, until)
        with self._table.hold_room(key, ready):
            state = ready.state
            if state is None:
                state = tensors.zeros(await self._metadata_of(name), keeper.session, self._table.limits.session_bytes)
            answer = await self._run_with_replay(name, tensors.with_state(request, state, keeper.session), until, run)
        shown, after = tensors.without_state(answer, keeper.session)
        kept = shown if len(shown) <= self._table.limits.answer_bytes else b""
        await self._wait_for_lease(key, step, until)  # the lease may have ended while the step ran
        ran = sequences.complete_step(ready, step, name, {} if step.end else after, kept, self._clock.now())
        now_known = self._table.get(key)
        overtaken = ready.state is None and isinstance(
            now_known, OfferedSession | OwnedSession
        )  # a session that used the name before this one
        if name not in self._table.replicas or not (now_known is known or overtaken):
            raise ShoalError(sequences.lost_session_refusal("its replica was taken away while it ran"))
        self._table.check_size(key, ran.snapshot)
        self.event_counts[SessionEvent.RUN] += 1
        self.event_counts[SessionEvent.BEGUN] += ready.state is None
        self.event_counts[SessionEvent.ENDED] += step.end
        self._table.put(key, ran)
        self._table.notify()
        return shown

    async def _run_with_replay(self, name: str, request: bytes, until: Elapsed, run: Runner) -> bytes:
        """Run a request on the replica's worker; once more on the next worker if the first is lost during the run."""
        worker = await self._await_worker(name, None, until)
        try:
            return await run(name, request)
        except AttemptFailed as error:
            if routing.fault_of(error.code) not in WORKER_FAULTS:
                raise
            await self._await_worker(name, worker, until, error)  # the same one if it stays: it may only have hung
        self.event_counts[SessionEvent.REPLAYED] += 1
        _log.info("sequence_step_replayed", assignment=name)
        return await run(name, request)

    async def _await_worker(
        self, name: str, but: LocalWorker | None, until: Elapsed, failure: AttemptFailed | None = None
    ) -> LocalWorker:
        """Wait for a worker other than `but`, or return `but` itself if it stays.

        Raises `failure`, or ShoalError(MODEL_NOT_READY) where there is no worker in time.
        """
        now = self._clock.now()
        end, another_by = Elapsed(min(until, now + WORKER_WAIT_S)), Elapsed(min(until, now + REPLACEMENT_WAIT_S))
        while (worker := self._local_workers.get(name)) is None or worker == but:
            if name not in self._table.replicas:
                raise ShoalError(sequences.lost_session_refusal("its replica was taken away"))
            if await self._table.wait_for_change(end if worker is None else another_by):
                continue
            if worker is None:
                raise failure or refuse(Code.MODEL_NOT_READY, f"{name} has no worker", "a ready replica", "retry")
            return worker
        return worker

    async def _metadata_of(self, name: str) -> oip.ModelMetadataResponse:
        if name not in self._metadata:
            self._metadata[name] = await self._workers.metadata(
                name, CallContext("", self._node, "session", METADATA_TIMEOUT_S)
            )
        return self._metadata[name]

    async def _wait_for_lease(self, key: SequenceKey, step: SessionStep, until: Elapsed) -> None:
        """Wait for the lease. Raises ShoalError(LEASE_ENDED).

        A coordinator that is away for a moment extends the lease when it is back, so a step of a session here waits for
        that. A step that begins a session does not wait, because it can begin at another front.
        """
        if isinstance(self._table.get(key), OwnedSession) and not step.start:
            now = self._clock.now()
            end = Elapsed(min(now + LEASE_WAIT_S, until - DEADLINE_MARGIN_S))
            while self._lease.is_over and await self._table.wait_for_change(end):
                pass
        self._lease.check()

    # handover, source side

    async def _hand_over_all(self, name: str) -> None:
        """Hand over the replica's sessions while its handover lasts, also those that arrive meanwhile."""
        on_its_way: dict[SequenceKey, asyncio.Task[bool]] = {}
        failures: Counter[SequenceKey] = Counter()
        in_a_row = 0
        try:
            while (keeper := self._table.replicas.get(name)) is not None and (to := keeper.handover) is not None:
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
            keeper = self._table.replicas.get(name)
            if (
                not isinstance(entry, OwnedSession)
                or entry.assignment != name
                or keeper is None
                or keeper.handover != to
            ):
                return True
            if to.node == self._node:
                there = self._table.replicas.get(to.assignment)
                if there is None or (there.workload, there.session) != (keeper.workload, keeper.session):
                    return False
                self._table.put(key, sequences.with_assignment(entry, to.assignment))
                self.event_counts[SessionEvent.GIVEN] += 1
                return True
            try:
                idle_s = Seconds(self._clock.now() - entry.used_at)
                kept = await self._offer(key, sequences.with_handover(entry.snapshot), to, idle_s)
            except ShoalError as error:
                self.event_counts[SessionEvent.NOT_GIVEN] += 1
                _log.warning(
                    "sequence_handover_failed", sequence=key.sequence, target=to.node, code=error.code, error=str(error)
                )
                return False
            self._table.put(key, sequences.release(entry, to, self._clock.now()))
            self.event_counts[SessionEvent.GIVEN] += 1
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

    # handover, receiver side

    def admit(self, call: InboundCall) -> None:
        """Return if this caller may hand over anything at all: an agent of this region. Raises ShoalError."""
        self._agent(call)

    async def on_offer(self, call: InboundCall, message: bytes) -> bytes:
        """Answer a SessionOffer with a SessionOffered, both serialized. Raises ShoalError."""
        offer = parse(sessions_pb2.SessionOffer, message, OFFER_LIMITS)
        giver = Giver(offer.migration, self._agent(call, "Offer").name)
        key = SequenceKey(nouns.from_wire(WorkloadKey, offer.workload), offer.sequence)
        self._check_source(giver, key, offer.to)
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
            giver,
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
        giver = Giver(commit.migration, self._agent(call, "Commit").name)
        key = SequenceKey(nouns.from_wire(WorkloadKey, commit.workload), commit.sequence)
        before = self._table.get(key)
        after = sequences.commit_offer(before, commit.run, commit.hands)
        taken = isinstance(before, OwnedSession) and after is before  # a repeated commit changes nothing
        if not (taken or (isinstance(before, OfferedSession) and before.source == giver)):
            self._check_source(giver, key, commit.to)
        if isinstance(after, Refusal):
            raise ShoalError(after)
        if after is not before:
            self._table.put(key, after)
            self.event_counts[SessionEvent.TAKEN] += 1
            self._table.notify()
        return sessions_pb2.SessionCommitted().SerializeToString()

    def _agent(self, call: InboundCall, method: str = "") -> Identity:
        return agent_of(call, self._region, self._revoked, self._dates_at(), self._forward_auth, method)

    def _check_source(self, source: Giver, key: SequenceKey, to: str) -> None:
        """Raises ShoalError(ROLE_DENIED), also if there is no such replica: an unauthorized caller must learn
        nothing."""
        keeper = self._table.replicas.get(to)
        if keeper is None or keeper.workload != key.workload or source not in keeper.givers:
            raise refuse(
                Code.ROLE_DENIED,
                f"agent {source.node}, which no move to {to!r:.80} names",
                "a giver that the region named to this node",
                "it is tried again: this node may not have been told yet",
            )

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def digest(request: bytes) -> bytes:
    """SHA-256 of a step's request without its id; the same for any caller."""
    return fingerprint(request)


def _endpoint(to: Handover) -> Endpoint:
    return Endpoint(to.assignment, to.node, EndpointKind.AGENT, to.address, 1.0, EndpointState.READY)


def _moved_error(to: Handover) -> ShoalError:
    """`asked` of the refusal names the replica that has the session."""
    return refuse(Code.SESSION_MOVED, f"the session went to {to.node}", to.assignment, "ask there")
