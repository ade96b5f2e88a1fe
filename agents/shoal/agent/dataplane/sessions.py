"""The sessions that this front has: their steps, one after the other, and their way to another front.

State lives in this process alone. A worker that crashes under a step is waited for, and the step is run once more from
the state before it. What is had here is had alone, for as long as the node's lease lasts: then every session stops.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog
from google.protobuf.message import DecodeError, Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.agent.core import routing, sequences
from shoal.agent.core.backoff import delay
from shoal.agent.core.routing import Fault
from shoal.agent.core.sequences import Entry, Key, Left, Limits, Offered, Owned, Run, Standing, State, Step, Tensor
from shoal.agent.dataplane import state as tensors
from shoal.agent.dataplane.auth import agent_of
from shoal.agent.dataplane.forward import AttemptFailed, Errand, Peers, Workers
from shoal.agent.dataplane.request import invalid
from shoal.agent.dataplane.transport import Call, Refused
from shoal.agent.ports import Clock, Keeper, LocalWorker
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import Giver, Handover
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import sessions_pb2
from shoal.wire import nouns
from shoal.wire.identity import Identity

CUT_S: Final = Seconds(3.0)
"""For so long a session waits at most while it is offered to another front."""
SETTLED_S: Final = Seconds(3.0)
"""For so long a step waits at most for its session to be let go of elsewhere."""
BACK_S: Final = Seconds(30.0)
"""For so long a step waits at most for its worker."""
ANOTHER_S: Final = Seconds(2.0)
"""For so long it waits for another after one failed that is still there: it may only have hung."""
AT_ONCE: Final = 8
"""Sessions that are handed over at the same time."""
METADATA_S: Final = Seconds(10.0)
WORKER_FAULTS: Final = frozenset({Fault.CRASH, Fault.REPLICA})

_log = structlog.get_logger(__name__)
M = TypeVar("M", bound=Message)
T = TypeVar("T")
Runner = Callable[[str, bytes], Awaitable[bytes]]
"""Runs a request on the worker of an assignment here, once. Raises AttemptFailed."""


@dataclass(slots=True, eq=False)
class _Turn:
    """users: that have it, or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Sessions:
    """node, region: of this agent. dates_at: the moment at which who calls must be valid."""

    def __init__(
        self,
        region: str,
        node: str,
        clock: Clock,
        workers: Workers,
        peers: Peers,
        dates_at: Callable[[], Wall],
        limits: Limits | None = None,
    ) -> None:
        self._region = region
        self._node = node
        self._clock = clock
        self._workers = workers
        self._peers = peers
        self._dates_at = dates_at
        self._limits = limits or Limits()
        self._keepers: Mapping[str, Keeper] = {}
        self._there: Mapping[str, LocalWorker] = {}
        self._revoked: frozenset[str] = frozenset()
        self._listed: frozenset[str] | None = None
        self._entries: dict[Key, Entry] = {}
        self._bytes: Counter[str] = Counter()
        """Of each tenant's sessions."""
        self._beginning: set[Key] = set()
        self._turns: dict[Key, _Turn] = {}
        self._news = asyncio.Event()
        self._metadata: dict[str, oip.ModelMetadataResponse] = {}
        self._leased_until = Elapsed(float("-inf"))
        self._giving: dict[str, asyncio.Task[None]] = {}
        self._uncommitted: Counter[str] = Counter()
        """Sessions that a replica here let go of, and whose receiver has not heard so yet."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.counted: Counter[str] = Counter()
        """Sessions that were begun, ended, lost, given away, taken over; steps that were run, replayed, answered again;
        offers that failed."""

    # what is told

    def configure(
        self,
        keepers: Iterable[Keeper],
        workers: Iterable[LocalWorker],
        revoked: Iterable[str] = (),
        listed: Iterable[str] | None = None,
    ) -> None:
        """The whole truth, each time. Sessions of a replica that is none of this node's any more are lost. listed:
        replicas in the routes, here and elsewhere."""
        self._listed = None if listed is None else frozenset(listed)
        self._keepers = {keeper.assignment: keeper for keeper in keepers}
        self._there = {worker.assignment: worker for worker in workers}
        self._revoked = frozenset(revoked)
        self._metadata = {name: each for name, each in self._metadata.items() if name in self._keepers}
        for key, entry in tuple(self._entries.items()):
            if not isinstance(entry, Left) and entry.assignment not in self._keepers:
                self._lose(key, "its replica was taken away")
        for name, keeper in self._keepers.items():
            if keeper.handover is not None and name not in self._giving:
                self._giving[name] = self._beside(self._give(name))
        self._tell()

    def lease(self, until: Elapsed) -> None:
        """What is had here is had so long. One that had ended has ended all sessions, also those not asked for."""
        self._stop_unleased()
        self._leased_until = Elapsed(max(self._leased_until, until))

    def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    # what is asked

    def replicas(self, workload: WorkloadKey) -> frozenset[str]:
        """Here, whether or not their workers are there now."""
        return frozenset(name for name, keeper in self._keepers.items() if keeper.workload == workload)

    def session_of(self, assignment: str) -> Mapping[str, str]:
        keeper = self._keepers.get(assignment)
        return keeper.session if keeper is not None else {}

    def where(self, key: Key) -> str | Handover | None:
        """The replica here that has it, or where it went; None where nothing is known of it."""
        entry = self._entries.get(key)
        return entry.to if isinstance(entry, Left) else entry.assignment if entry is not None else None

    def counts(self) -> tuple[tuple[str, int], ...]:
        """How many each replica has. What has outlived its time is forgotten here."""
        self._stop_unleased()
        now = self._clock.now()
        for key, entry in tuple(self._entries.items()):
            if sequences.outlived(entry, now, self._limits) and key not in self._turns:
                self._forget(key)
        return tuple((name, self._count(name)) for name in self._keepers)

    async def step(self, key: Key, step: Step, request: bytes, begin_at: str, until: Elapsed, run: Runner) -> bytes:
        """One step, after those before it. begin_at: the replica that a new session begins at.

        Raises ShoalError(SESSION_LOST | SESSION_MOVED | SESSION_STEP | LEASE_ENDED | DEADLINE_EXCEEDED | ...), and what
        `run` raises: then the session is as it was before."""
        async with self._turn(key, until):
            self._check_lease()
            judged = await self._judged(key, step, until)
            match judged:
                case sequences.Replay(answer):
                    self.counted["answered_again"] += 1
                    return answer
                case sequences.Go(to):
                    raise _moved(to)
                case Run():
                    return await self._run(key, judged, step, request, begin_at, until, run)

    # one step

    async def _judged(self, key: Key, step: Step, until: Elapsed) -> Run | sequences.Replay | sequences.Go:
        settled = min(until, self._clock.now() + SETTLED_S)
        while True:
            judged = sequences.judge(self._entries.get(key), step, self._listed)
            if isinstance(judged, Refusal):
                raise ShoalError(judged)
            if not isinstance(judged, sequences.Wait):
                return judged
            if not await self._until_news(Elapsed(settled)):
                raise ShoalError(sequences.lost("it is on its way here, and was not let go of there in time"))

    async def _run(
        self, key: Key, ready: Run, step: Step, request: bytes, begin_at: str, until: Elapsed, run: Runner
    ) -> bytes:
        known = self._entries.get(key)
        name = known.assignment if isinstance(known, Owned) else begin_at
        keeper = self._keepers.get(name)
        if keeper is None:
            raise refuse(Code.MODEL_NOT_READY, f"{name} keeps no sessions here", "its replica", "retry")
        await self._worker(name, None, until)
        with self._room_for(key, ready):
            state = ready.state
            if state is None:
                state = tensors.zeros(await self._metadata_of(name), keeper.session, self._limits.session_bytes)
            answer = await self._run_once_more(name, tensors.with_state(request, state, keeper.session), until, run)
        shown, after = tensors.without_state(answer, keeper.session)
        kept = shown if len(shown) <= self._limits.answer_bytes else b""
        ran = sequences.ran(ready, step, name, {} if step.end else after, kept, self._clock.now())
        self._check_lease()
        now_known = self._entries.get(key)
        overtaken = ready.state is None and isinstance(now_known, Offered | Owned)  # of the session before this one
        if name not in self._keepers or not (now_known is known or overtaken):
            raise ShoalError(sequences.lost("its replica was taken away while it ran"))
        self._check_fits(key, ran.standing)
        self.counted["run"] += 1
        self.counted["begun"] += ready.state is None
        self.counted["ended"] += step.end
        self._put(key, ran)
        self._tell()
        return shown

    async def _run_once_more(self, name: str, request: bytes, until: Elapsed, run: Runner) -> bytes:
        """On a worker that is there, or comes back; once more on the next where the first is lost under it."""
        worker = await self._worker(name, None, until)
        try:
            return await run(name, request)
        except AttemptFailed as error:
            if routing.fault_of(error.code) not in WORKER_FAULTS:
                raise
            await self._worker(name, worker, until, error)  # it may live: one that only hung answers again
        self.counted["replayed"] += 1
        _log.info("step_replayed", assignment=name)
        return await run(name, request)

    async def _worker(
        self, name: str, but: LocalWorker | None, until: Elapsed, failure: AttemptFailed | None = None
    ) -> LocalWorker:
        """Another than `but`, or that one again if it stays. Raises `failure`, or that there is none in time."""
        now = self._clock.now()
        end, another_by = Elapsed(min(until, now + BACK_S)), Elapsed(min(until, now + ANOTHER_S))
        while (worker := self._there.get(name)) is None or worker == but:
            if name not in self._keepers:
                raise ShoalError(sequences.lost("its replica was taken away"))
            if await self._until_news(end if worker is None else another_by):
                continue
            if worker is None:
                raise failure or refuse(Code.MODEL_NOT_READY, f"{name} has no worker", "a ready replica", "retry")
            return worker
        return worker

    async def _metadata_of(self, name: str) -> oip.ModelMetadataResponse:
        if name not in self._metadata:
            self._metadata[name] = await self._workers.metadata(name, Errand("", self._node, "session", METADATA_S))
        return self._metadata[name]

    @asynccontextmanager
    async def _turn(self, key: Key, until: Elapsed | None = None) -> AsyncIterator[None]:
        """Steps of one session run one at a time, in the order in which they came. Raises ShoalError."""
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

    @contextmanager
    def _room_for(self, key: Key, ready: Run) -> Iterator[None]:
        """Held while its first step runs. Raises Refused."""
        if ready.state is not None:
            yield
            return
        here = {each for each, entry in self._entries.items() if not isinstance(entry, Left)}
        others = (here | self._beginning) - {key}
        mine = sum(each.workload.tenant == key.workload.tenant for each in others)
        refusal = sequences.room(len(others), mine, self._bytes.total(), self._limits)
        if refusal is not None:
            raise Refused(refusal, Seconds(1.0))
        self._beginning.add(key)
        try:
            yield
        finally:
            self._beginning.discard(key)

    def _check_fits(self, key: Key, standing: Standing) -> None:
        """Raises ShoalError(SESSION_INVALID), Refused."""
        known, tenant = _size(self._entries.get(key)), key.workload.tenant
        of_tenant, of_all = self._bytes[tenant] - known, self._bytes.total() - known
        refusal = sequences.fits(standing.size, of_tenant, of_all, self._limits)
        if refusal is not None:
            raise Refused(refusal, Seconds(1.0) if refusal.code is Code.OVERLOADED else None)

    # leases and bounds

    def _check_lease(self) -> None:
        self._stop_unleased()
        if self._clock.now() >= self._leased_until:
            raise ShoalError(
                Refusal(
                    Code.LEASE_ENDED,
                    f"{self._node} has not heard from its region: nobody may hold sessions there",
                    "a node that is linked",
                    "begin the session anew (sequence_start) at another front, or here once it is linked again",
                )
            )

    def _stop_unleased(self) -> None:
        if self._clock.now() >= self._leased_until:
            for key, entry in tuple(self._entries.items()):
                if not isinstance(entry, Left):
                    self._lose(key, "the node's lease ended")

    def _count(self, assignment: str) -> int:
        """Those on their way count at either end: who takes a replica away that is to have one, or to tell of one, has
        lost it."""
        here = sum(
            _is_at(entry, assignment) or (isinstance(entry, Offered) and entry.assignment == assignment)
            for entry in self._entries.values()
        )
        return here + self._uncommitted[assignment]

    def _put(self, key: Key, entry: Entry) -> None:
        self._bytes[key.workload.tenant] += _size(entry) - _size(self._entries.get(key))
        self._entries[key] = entry

    def _forget(self, key: Key) -> None:
        self._bytes[key.workload.tenant] -= _size(self._entries.pop(key, None))

    def _lose(self, key: Key, why: str) -> None:
        self._forget(key)
        self.counted["lost"] += 1
        _log.warning("session_lost", workload=str(key.workload), sequence=key.sequence, reason=why)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _until_news(self, end: Elapsed) -> bool:
        """False when the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end - self._clock.now())):
                await self._news.wait()
                return True
        return False

    # given away

    async def _give(self, name: str) -> None:
        """For as long as the replica's sessions are to go: also those that come to it meanwhile."""
        on_its_way: dict[Key, asyncio.Task[bool]] = {}
        failures: Counter[Key] = Counter()
        in_a_row = 0
        try:
            while (keeper := self._keepers.get(name)) is not None and (to := keeper.handover) is not None:
                mine = [key for key, entry in self._entries.items() if _is_at(entry, name) and key not in on_its_way]
                mine.sort(key=lambda key: (failures[key], key in self._turns))  # none that hangs holds up the others
                for key in mine[: AT_ONCE - len(on_its_way)]:
                    on_its_way[key] = self._beside(self._give_one(key, name, to))
                if not on_its_way:
                    await self._news.wait()
                    continue
                await asyncio.wait(on_its_way.values(), return_when=asyncio.FIRST_COMPLETED)
                for key in [key for key, task in on_its_way.items() if task.done()]:
                    given = on_its_way.pop(key).result()
                    failures[key] += not given
                    in_a_row = 0 if given else in_a_row + 1
                if in_a_row:
                    await asyncio.sleep(delay(name, in_a_row - 1, base_s=0.1, cap_s=1.0))
        finally:
            del self._giving[name]

    async def _give_one(self, key: Key, name: str, to: Handover) -> bool:
        """At a step boundary: whoever asks for its next step waits meanwhile."""
        async with self._turn(key):
            entry = self._entries.get(key)
            keeper = self._keepers.get(name)
            if not isinstance(entry, Owned) or entry.assignment != name or keeper is None or keeper.handover != to:
                return True
            if to.node == self._node:
                there = self._keepers.get(to.assignment)
                if there is None or (there.workload, there.session) != (keeper.workload, keeper.session):
                    return False
                self._put(key, sequences.moved_within(entry, to.assignment))
                self.counted["given"] += 1
                return True
            try:
                idle_s = Seconds(self._clock.now() - entry.used_at)
                kept = await self._offer(key, sequences.handed(entry.standing), to, idle_s)
            except ShoalError as error:
                self.counted["not_given"] += 1
                _log.warning("session_not_given", sequence=key.sequence, to=to.node, refusal=str(error.refusal))
                return False
            self._put(key, sequences.let_go(entry, to, self._clock.now()))
            self.counted["given"] += 1
            if kept:
                self._uncommitted[name] += 1
                self._beside(self._commit(key, sequences.handed(entry.standing), to, name))
        return True

    async def _offer(self, key: Key, standing: Standing, to: Handover, idle_s: Seconds) -> bool:
        offer = sessions_pb2.SessionOffer(
            migration=to.migration,
            to=to.assignment,
            workload=nouns.to_wire(key.workload),
            sequence=key.sequence,
            run=standing.run,
            step=standing.step,
            state=[
                sessions_pb2.StateTensor(input=name, dtype=each.dtype, shape=each.shape, content=each.content)
                for name, each in standing.state.items()
            ],
            token=standing.token,
            asked=standing.asked,
            answer=standing.answer,
            ended=standing.ended,
            hands=standing.hands,
            idle_s=idle_s,
        )
        reply = await self._peers.hand_over(_endpoint(to), "Offer", offer.SerializeToString(), CUT_S)
        return sessions_pb2.SessionOffered.FromString(reply).kept

    async def _commit(self, key: Key, standing: Standing, to: Handover, of: str) -> None:
        """Until the receiver has heard it: it runs nothing before, and nobody else ever will. of: the replica that it
        was at."""
        try:
            await self._tell_commit(key, standing, to)
        finally:
            self._uncommitted[of] -= 1

    async def _tell_commit(self, key: Key, standing: Standing, to: Handover) -> None:
        commit = sessions_pb2.SessionCommit(
            migration=to.migration,
            to=to.assignment,
            workload=nouns.to_wire(key.workload),
            sequence=key.sequence,
            run=standing.run,
            hands=standing.hands,
        ).SerializeToString()
        end, tries = self._clock.now() + sequences.OFFERED_S, 0
        while self._clock.now() < end:
            try:
                await self._peers.hand_over(_endpoint(to), "Commit", commit, CUT_S)
                return
            except ShoalError as error:
                if error.code is Code.SESSION_LOST:
                    break
                await asyncio.sleep(delay(key.sequence, tries, base_s=0.05, cap_s=1.0))
                tries += 1
        _log.warning("session_not_committed", sequence=key.sequence, to=to.node)

    # taken over

    def admit(self, call: Call) -> None:
        """Returns if this caller may hand anything over at all: an agent of this region. Raises ShoalError."""
        self._agent(call)

    async def offered(self, call: Call, message: bytes) -> bytes:
        """A SessionOffer to a SessionOffered, both serialized. Raises ShoalError."""
        offer = _parse(sessions_pb2.SessionOffer, message)
        giver = Giver(offer.migration, self._agent(call).name)
        key = Key(nouns.from_wire(WorkloadKey, offer.workload), offer.sequence)
        self._check_named(giver, key, offer.to)
        state: State = {
            each.input: Tensor(each.dtype, tuple(each.shape), each.content) for each in offer.state
        }  # fmt: skip
        if state.keys() != self._keepers[offer.to].session.keys():
            raise invalid(f"state of {', '.join(sorted(state))}", "the inputs that the workload's session names")
        standing = Standing(
            offer.run, offer.step, state, offer.token, offer.asked, offer.answer, offer.ended, offer.hands
        )
        self._check_lease()
        self._check_fits(key, standing)
        taken = sequences.offered(
            self._entries.get(key),
            standing,
            offer.to,
            giver,
            self._clock.now(),
            Seconds(max(0.0, offer.idle_s)),
            busy=key in self._turns,
        )
        match taken:
            case Refusal():
                raise ShoalError(taken)
            case sequences.Newer():
                return sessions_pb2.SessionOffered(kept=False).SerializeToString()
            case sequences.Taken(entry):
                self._put(key, entry)
                return sessions_pb2.SessionOffered(kept=True).SerializeToString()

    async def committed(self, call: Call, message: bytes) -> bytes:
        """A SessionCommit to a SessionCommitted, both serialized. Raises ShoalError.

        Who was named when it offered the session may let go of it: the move may have turned since, or be over."""
        commit = _parse(sessions_pb2.SessionCommit, message)
        giver = Giver(commit.migration, self._agent(call).name)
        key = Key(nouns.from_wire(WorkloadKey, commit.workload), commit.sequence)
        before = self._entries.get(key)
        after = sequences.committed(before, commit.run, commit.hands)
        taken = isinstance(before, Owned) and after is before  # it was told before: nothing comes of it
        if not (taken or (isinstance(before, Offered) and before.giver == giver)):
            self._check_named(giver, key, commit.to)
        if isinstance(after, Refusal):
            raise ShoalError(after)
        if after is not before:
            self._put(key, after)
            self.counted["taken"] += 1
            self._tell()
        return sessions_pb2.SessionCommitted().SerializeToString()

    def _agent(self, call: Call) -> Identity:
        return agent_of(call, self._region, self._revoked, self._dates_at())

    def _check_named(self, giver: Giver, key: Key, to: str) -> None:
        """Raises ShoalError(ROLE_DENIED) also where there is no such replica: who may not ask learns nothing."""
        keeper = self._keepers.get(to)
        if keeper is None or keeper.workload != key.workload or giver not in keeper.givers:
            raise refuse(
                Code.ROLE_DENIED,
                f"agent {giver.node}, which no move to {to!r:.80} names",
                "a giver that the region named to this node",
                "it is tried again: this node may not have been told yet",
            )

    def _beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class SessionCollector(Collector):
    """`shoal_front_session*`, made when scraped."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("shoal_front_sessions", "sessions whose state is here", labels=("assignment",))
        for name, count in self._sessions.counts():
            held.add_metric((name,), count)
        yield held
        events = CounterMetricFamily(
            "shoal_front_session_events", "what became of sessions and their steps", labels=("what",)
        )
        for what, count in tuple(self._sessions.counted.items()):
            events.add_metric((what,), count)
        yield events


def digest(request: bytes) -> bytes:
    """SHA-256 of a step's tensors: the same whoever asks, and under whatever id."""
    message = oip.ModelInferRequest.FromString(request)
    message.id = ""
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def _is_at(entry: Entry, assignment: str) -> bool:
    return isinstance(entry, Owned) and entry.assignment == assignment and not entry.standing.ended


def _size(entry: Entry | None) -> int:
    return entry.standing.size if isinstance(entry, Owned | Offered) else 0


def _endpoint(to: Handover) -> Endpoint:
    return Endpoint(to.assignment, to.node, EndpointKind.AGENT, to.address, 1.0, EndpointState.READY)


def _moved(to: Handover) -> ShoalError:
    """`asked` names the replica that has it."""
    return refuse(Code.SESSION_MOVED, f"the session went to {to.node}", to.assignment, "ask there")


def _parse(kind: type[M], message: bytes) -> M:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise invalid(f"bytes that are no {kind.__name__}", "a message of shoal.v1.Sessions") from error
