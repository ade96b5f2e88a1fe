"""The sessions that this front owns: their steps, one at a time, and their handover to another front.

State lives only in this process. If a worker crashes during a step, the front waits for its replacement and runs the
step once more from the state before it. The front is the only owner of its sessions while the node's lease lasts. When
the lease ends every session stops. Sessions continue once the lease is extended, unless the region has declared the
node lost meanwhile.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

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
    SessionStep,
)
from shoal.agent.dataplane import session_state as tensors
from shoal.agent.dataplane.forward_auth import ForwardAuth
from shoal.agent.dataplane.request import fingerprint
from shoal.agent.dataplane.session_handover import HandoverReceiver, HandoverSource
from shoal.agent.dataplane.session_lease import SessionLease
from shoal.agent.dataplane.session_table import SessionTable
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.metrics import SessionEvent
from shoal.agent.ports import AgentClock, LocalWorker, StatefulReplica
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.metric import MetricReadings
from shoal.types.migration import Handover
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

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
METADATA_TIMEOUT_S: Final = Seconds(10.0)
WORKER_FAULTS: Final = frozenset({AttemptFault.CRASH, AttemptFault.REPLICA})

_log = structlog.get_logger(__name__)
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
        self._node = node
        self._clock = clock
        self._workers = workers
        self._table = SessionTable(clock, limits or SessionLimits())
        self._lease = SessionLease(node, clock)
        self._local_workers: Mapping[str, LocalWorker] = {}
        self._routed_replicas: frozenset[str] | None = None
        self._metadata: dict[str, oip.ModelMetadataResponse] = {}
        self._source = HandoverSource(node, clock, peers, self._table)
        self.receiver = HandoverReceiver(region, clock, self._table, self._lease, dates_at, forward_auth)
        """Takes the sessions that other fronts hand over."""
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
        self.receiver.configure(revoked)
        self._table.configure(stateful_replicas)
        self._metadata = {name: each for name, each in self._metadata.items() if name in self._table.replicas}
        self._source.start_handovers()
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
        self._source.close()

    # queries and steps

    @property
    def held_bytes(self) -> int:
        """Bytes of state and last answers."""
        return self._table.held_bytes

    def replicas(self, workload: WorkloadKey) -> frozenset[str]:
        """Stateful replicas of the workload here, whether or not their workers run now."""
        return frozenset(name for name, replica in self._table.replicas.items() if replica.workload == workload)

    def session_of(self, assignment: str) -> Mapping[str, str]:
        replica = self._table.replicas.get(assignment)
        return replica.session if replica is not None else {}

    def location(self, key: SequenceKey) -> str | Handover | None:
        """The replica here that has the session, or the handover by which it left; None for an unknown session."""
        entry = self._table.get(key)
        return entry.to if isinstance(entry, MovedSession) else entry.assignment if entry is not None else None

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Sessions of each replica here that removing it would lose. Expired sessions are dropped first.

        Sessions in transit count at both ends: the receiver is to have them, and the source must still commit them.
        """
        self._table.drop_expired()
        counts = self._table.counts()
        return tuple((name, counts[name] + self._source.uncommitted_count(name)) for name in self._table.replicas)

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
                # Not lost: its giver repeats what was not heard, so it is to be asked for here again.
                found = "a session that is on its way here, and was not let go of there yet"
                raise refuse(Code.MODEL_NOT_READY, found, "the session here", "send the step again")

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
        replica = self._table.replicas.get(name)
        if replica is None:
            raise refuse(Code.MODEL_NOT_READY, f"{name} keeps no sessions here", "its replica", "retry")
        await self._await_worker(name, None, until)
        with self._table.hold_room(key, ready):
            state = ready.state
            if state is None:
                state = tensors.zeros(await self._metadata_of(name), replica.session, self._table.limits.session_bytes)
            answer = await self._run_with_replay(name, tensors.with_state(request, state, replica.session), until, run)
        shown, after = tensors.without_state(answer, replica.session)
        kept = shown if len(shown) <= self._table.limits.answer_bytes else b""
        await self._wait_for_lease(key, step, until)  # the lease may have ended while the step ran
        ran = sequences.complete_step(ready, step, name, {} if step.end else after, kept, self._clock.now())
        now_known = self._table.get(key)
        overtaken = ready.state is None and isinstance(
            now_known, OfferedSession | OwnedSession
        )  # a session that used the name before this one
        if name not in self._table.replicas or not (now_known is known or overtaken):
            raise ShoalError(sequences.lost_session_refusal("its replica was taken away while it ran"))
        ran = replace(ran, snapshot=self._table.fit(key, ran.snapshot))
        self.event_counts[SessionEvent.RUN] += 1
        self.event_counts[SessionEvent.BEGUN] += ready.state is None
        self.event_counts[SessionEvent.ENDED] += step.end
        self._table.put(key, ran)
        if self._table.replicas[name].handover is not None:  # by now
            self._table.notify()  # only a hand-over waits for steps; it would wake all that wait for anything
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


def digest(request: bytes) -> bytes:
    """SHA-256 of a step's request without its id; the same for any caller."""
    return fingerprint(request)


def _moved_error(to: Handover) -> ShoalError:
    """`asked` of the refusal names the replica that has the session."""
    return refuse(Code.SESSION_MOVED, f"the session went to {to.node}", to.assignment, "ask there")
