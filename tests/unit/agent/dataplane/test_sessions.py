"""The sessions of two fronts, their workers and the way between them made up: what becomes of one in every turn."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import pytest_asyncio

from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.sequences import SequenceKey, SessionEntry, SessionLimits, SessionStep
from shoal.agent.dataplane import sessions as module
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.metrics import SessionEvent
from shoal.agent.ports import LocalWorker, StatefulReplica
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.migration import Handover, SessionSource
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import sessions_pb2
from shoal.wire import nouns

WORKLOAD = WorkloadKey("acme", "counting")
STATE = {"s": "sn"}
OLD, NEW = "a-old", "a-new"
WAIT_S = 10.0
CALL_S = 20.0


@dataclass
class Front:
    """Its worker adds one to the state at each step, and answers the sum."""

    name: str
    replica: str
    fronts: dict[str, "Front"]
    limits: SessionLimits = field(default_factory=SessionLimits)
    shape: tuple[int, ...] = (1,)
    answer_bytes: int = 1
    cut: frozenset[str] = frozenset()
    """Calls to others that do not come through."""
    failing: list[Code] = field(default_factory=list)
    """How the next runs fail."""
    runs: int = 0
    meanwhile: Callable[[], None] = field(default=lambda: None)
    """What happens while the next step runs."""
    sessions: FrontSessions = field(init=False)

    def __post_init__(self) -> None:
        clock = SystemClock()
        workers, peers = cast("WorkerClients", self), cast("PeerClients", self)
        self.sessions = FrontSessions("west", self.name, clock, workers, peers, lambda: Wall(1.0), self.limits)
        self.sessions.lease(Elapsed(clock.now() + 300.0))
        self.configure()

    def configure(self, handover: Handover | None = None, *handover_sources: SessionSource, nonce: str = "1") -> None:
        keeper = StatefulReplica(self.replica, WORKLOAD, STATE, handover, handover_sources)
        self.sessions.configure((keeper,), (LocalWorker(self.replica, WORKLOAD, "/socket", nonce),))

    async def metadata(self, assignment: str, context: CallContext) -> oip.ModelMetadataResponse:
        spec = oip.ModelMetadataResponse.TensorMetadata(name="s", datatype="UINT8", shape=self.shape)
        return oip.ModelMetadataResponse(inputs=[spec])

    async def hand_over(self, endpoint: Endpoint, method: str, request: bytes, timeout_s: Seconds) -> bytes:
        if method in self.cut:
            refusal = Refusal(Code.REPLICA_UNREACHABLE, "nobody", "an answer")
            raise AttemptFailed(refusal, was_sent=True)
        call = InboundCall(Identity("west", Role.AGENT, self.name, Wall(0.0), Wall(2.0), "1"))
        there = self.fronts[endpoint.node].sessions.receiver
        answers = {"Offer": there.on_offer, "Commit": there.on_commit}
        return await answers[method](call, request)

    async def run(self, assignment: str, request: bytes) -> bytes:
        self.runs += 1
        if self.failing:
            raise AttemptFailed(Refusal(self.failing.pop(0), "made up", "an answer"), was_sent=True)
        self.meanwhile()
        asked = oip.ModelInferRequest.FromString(request)
        (state,) = asked.raw_input_contents
        answer = oip.ModelInferResponse(raw_output_contents=[bytes(self.answer_bytes - 1) + state[:1], _more(state)])
        answer.outputs.add(name="y", datatype="UINT8", shape=[self.answer_bytes])
        answer.outputs.add(name="sn", datatype="UINT8", shape=[len(state)])
        return answer.SerializeToString()

    async def step(self, sequence: str, token: str, *, start: bool = False, end: bool = False) -> int:
        """How many steps came before."""
        step = SessionStep(token, token.encode(), start, end)
        request = oip.ModelInferRequest(model_name="counting").SerializeToString()
        until_ = Elapsed(SystemClock().now() + CALL_S)
        key = SequenceKey(WORKLOAD, sequence)
        answer = await self.sessions.step(key, step, request, self.replica, until_, self.run)
        return oip.ModelInferResponse.FromString(answer).raw_output_contents[0][-1]

    def count(self) -> int:
        return dict(self.sessions.counts())[self.replica]


def _more(state: bytes) -> bytes:
    return bytes([state[0] + 1]) + state[1:]


@dataclass
class Pair:
    old: Front
    new: Front

    def hand(self, *, back: bool = False) -> None:
        giver, taker = (self.new, self.old) if back else (self.old, self.new)
        taker.configure(None, SessionSource("m-1", giver.name))
        giver.configure(Handover("m-1", taker.replica, taker.name, "10.0.0.2:1"))


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    fronts: dict[str, Front] = {}
    fronts |= {name: Front(name, replica, fronts) for name, replica in (("old", OLD), ("new", NEW))}
    made = Pair(fronts["old"], fronts["new"])
    yield made
    for each in fronts.values():
        each.sessions.close()


async def test_f06_a_session_outlasts_its_lease_unless_the_region_gave_the_node_up(pair: Pair) -> None:
    front, clock = pair.old, SystemClock()
    sessions = front.sessions

    async def lapse(claim: str) -> None:
        sessions._lease.until = Elapsed(0.0)  # as after a coordinator that was away
        sessions._lease.claim = claim

    await front.step("7", "t1", start=True)
    await lapse("h/0")
    waiting = asyncio.ensure_future(front.step("7", "t2"))
    with pytest.raises(ShoalError, match="LEASE_ENDED"):
        await front.step("8", "t1", start=True)
    assert not waiting.done(), "nothing runs without a lease"
    assert front.runs == 1
    sessions.lease(Elapsed(clock.now() + 300.0), "h/0")
    assert await waiting == 1
    await lapse("h/0")
    sessions.lease(Elapsed(clock.now() + 300.0), "h/1")
    with pytest.raises(ShoalError, match="SESSION_LOST"):
        await front.step("7", "t3")


@pytest.mark.parametrize("claim", ["h/0", "h/1"])
async def test_f06_a_step_whose_lease_ends_while_it_runs_waits_for_the_next(pair: Pair, claim: str) -> None:
    front, clock = pair.old, SystemClock()
    sessions = front.sessions

    def lapse() -> None:
        sessions._lease.until, sessions._lease.claim = Elapsed(0.0), "h/0"

    await front.step("7", "t1", start=True)
    front.meanwhile = lapse
    waiting = asyncio.ensure_future(front.step("7", "t2"))
    await until(lambda: front.runs == 2, WAIT_S, "the step has run")
    front.meanwhile = lambda: None
    assert not waiting.done()
    sessions.lease(Elapsed(clock.now() + 300.0), claim)
    if claim == "h/0":
        assert await waiting == 1
        assert await front.step("7", "t3") == 2
    else:
        with pytest.raises(ShoalError, match="SESSION_LOST"):  # the region gave the node up: another may have it
            await waiting


async def test_a_session_between_offer_and_commit_outlasts_the_moves_turn(pair: Pair) -> None:
    await pair.old.step("7", "t1", start=True)
    pair.old.cut = frozenset({"Commit"})
    pair.hand()
    await until(lambda: pair.old.sessions.event_counts[SessionEvent.GIVEN], WAIT_S, "the session to be let go of")
    assert pair.old.count() == 1  # its receiver does not know yet: the old replica must not go
    assert pair.new.count() == 1  # nor the new one
    pair.old.configure()
    pair.new.configure()  # the move turned: nobody is named
    pair.old.cut = frozenset()
    assert await pair.new.step("7", "t2") == 1
    assert (pair.old.count(), pair.new.count()) == (0, 1)
    pair.hand(back=True)
    await until(lambda: pair.new.count() == 0, WAIT_S, "it to be back")
    assert await pair.old.step("7", "t3") == 2


async def test_a_session_whose_commit_is_late_is_not_told_as_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its giver repeats the commit: whoever asks for it here again finds it."""
    monkeypatch.setattr(module, "HANDOVER_WAIT_S", Seconds(0.1))
    await pair.old.step("7", "t1", start=True)
    pair.old.cut = frozenset({"Commit"})
    pair.hand()
    await until(lambda: pair.old.sessions.event_counts[SessionEvent.GIVEN], WAIT_S, "the session to be let go of")
    with pytest.raises(ShoalError, match="MODEL_NOT_READY"):
        await pair.new.step("7", "t2")
    pair.old.cut = frozenset()
    await until(lambda: pair.new.sessions.event_counts[SessionEvent.TAKEN], WAIT_S, "its giver to be heard")
    assert await pair.new.step("7", "t2") == 1


async def test_nobody_else_commits_what_was_offered(pair: Pair) -> None:
    await pair.old.step("7", "t1", start=True)
    pair.old.cut = frozenset({"Commit"})
    pair.hand()
    await until(lambda: pair.old.sessions.event_counts[SessionEvent.GIVEN], WAIT_S, "the session to be let go of")
    other = Front("other", "a-other", pair.old.fronts)
    commit = sessions_pb2.SessionCommit(
        migration="m-1", to=NEW, workload=nouns.to_wire(WORKLOAD), sequence="7", run="t1", hands=1
    )
    there = Endpoint(NEW, "new", EndpointKind.AGENT, "", 1.0, EndpointState.READY)
    with pytest.raises(ShoalError) as caught:
        await other.hand_over(there, "Commit", commit.SerializeToString(), Seconds(1.0))
    assert caught.value.code is Code.ROLE_DENIED
    pair.old.cut = frozenset()
    await until(lambda: pair.new.sessions.event_counts[SessionEvent.TAKEN], WAIT_S, "its giver to be heard")


async def test_a_session_that_grows_or_has_no_room_is_refused_and_stands_as_it_did(pair: Pair) -> None:
    front = Front("small", OLD, {}, SessionLimits(total_bytes=300, tenant_bytes=200, session_bytes=150), shape=(64,))
    await front.step("1", "t1", start=True)
    await front.step("2", "t1", start=True)
    with pytest.raises(ShoalError, match="OVERLOADED"):
        await front.step("3", "t1", start=True)
    assert front.count() == 2
    front.answer_bytes = 100
    with pytest.raises(ShoalError, match="SESSION_INVALID"):
        await front.step("1", "t2")
    front.answer_bytes = 1
    assert await front.step("1", "t3") == 1
    await front.step("1", "t4", end=True)  # what ends gives its room back
    await front.step("3", "t1", start=True)
    huge = Front("huge", OLD, {}, SessionLimits(session_bytes=2**20), shape=(2**40,))
    with pytest.raises(ShoalError, match="SESSION_INVALID"):
        await huge.step("1", "t1", start=True)
    assert huge.runs == 0


async def test_a_session_that_is_offered_takes_no_more_room_than_one_of_this_front(pair: Pair) -> None:
    fronts = {"old": pair.old}
    fronts["new"] = Front("new", NEW, fronts, SessionLimits(tenant_bytes=100))
    pair.old.shape, pair.old.fronts = (64,), fronts
    for sequence in ("1", "2"):
        await pair.old.step(sequence, "t1", start=True)
    Pair(pair.old, fronts["new"]).hand()
    await until(lambda: pair.old.sessions.event_counts[SessionEvent.NOT_GIVEN], WAIT_S, "the second to be refused")
    assert (pair.old.count(), fronts["new"].count()) == (1, 1)


async def test_a_large_answer_is_not_kept_and_its_step_not_run_again(pair: Pair) -> None:
    pair.old.answer_bytes = 2 * 2**20
    await pair.old.step("7", "t1", start=True)
    with pytest.raises(ShoalError, match="SESSION_STEP"):
        await pair.old.step("7", "t1", start=True)
    assert await pair.old.step("7", "t2") == 1
    assert pair.old.runs == 2


async def test_sessions_that_ended_take_no_place_from_others() -> None:
    front = Front("small", OLD, {}, SessionLimits(max_sessions=4, per_tenant=3))
    for number in range(10):
        await front.step(str(number), "t1", start=True, end=True)
    for number in range(10, 13):
        await front.step(str(number), "t1", start=True)
    with pytest.raises(ShoalError, match="OVERLOADED"):
        await front.step("13", "t1", start=True)
    runs = front.runs
    for number in range(7, 10):
        await front.step(str(number), "t1", start=True, end=True)
    assert front.runs == runs, "the last ones are kept, and answered again"
    assert len(front.sessions._table._entries) == 6
    assert front.count() == 3


async def test_sessions_that_ended_take_no_bytes_from_others() -> None:
    front = Front("small", OLD, {}, SessionLimits(tenant_bytes=1000), answer_bytes=300)
    for number in range(3):
        await front.step(str(number), "t1", start=True, end=True)
    front.shape = (700,)
    front.answer_bytes = 100
    await front.step("new", "t1", start=True)
    assert front.sessions._table._bytes.total() <= 1000
    front.runs = 0
    await front.step("new", "t1", start=True)
    assert front.runs == 0, "its answer is kept; what ended gave way"


async def test_a_session_ends_where_there_is_no_room_for_its_answer() -> None:
    front = Front("small", OLD, {}, SessionLimits(tenant_bytes=1000), answer_bytes=300)
    for number in range(2):
        await front.step(str(number), "t1", start=True)
    front.answer_bytes = 2000
    assert await front.step("0", "t2") == 1, "it has room for its state"
    with pytest.raises(ShoalError, match="SESSION_STEP"):
        await front.step("0", "t2")
    assert await front.step("0", "t3", end=True) == 2
    assert front.count() == 1
    assert front.runs == 4


async def test_a_session_that_ended_is_not_lost_with_its_replica(pair: Pair) -> None:
    sessions = pair.old.sessions
    await pair.old.step("7", "t1", start=True, end=True)
    await pair.old.step("8", "t1", start=True)
    sessions.configure((), ())
    assert sessions.event_counts[SessionEvent.LOST] == 1
    pair.old.configure()
    with pytest.raises(ShoalError, match="SESSION_LOST"):
        await pair.old.step("7", "t2")


async def test_sessions_of_many_replicas_are_counted_at_once(pair: Pair) -> None:
    passes = 0

    class Entries(dict[SequenceKey, SessionEntry]):
        def values(self) -> Any:
            nonlocal passes
            passes += 1
            return super().values()

    for number in range(3):
        await pair.old.step(str(number), "t1", start=True, end=number == 2)
    sessions = pair.old.sessions
    sessions._table._entries = Entries(sessions._table._entries)
    sessions.configure([StatefulReplica(name, WORKLOAD, STATE) for name in (OLD, "b", "c")], ())
    passes = 0
    assert sessions.counts() == ((OLD, 2), ("b", 0), ("c", 0))
    assert passes == 1


async def test_first_steps_that_run_count_as_sessions(pair: Pair) -> None:
    front = Front("small", OLD, {}, SessionLimits(max_sessions=2))
    steps = (front.step(str(number), "t1", start=True) for number in range(4))
    told = await asyncio.gather(*steps, return_exceptions=True)
    assert sum(isinstance(each, ShoalError) for each in told) == 2


async def test_a_step_runs_again_at_the_same_worker_where_that_only_hung(pair: Pair) -> None:
    await pair.old.step("7", "t1", start=True)
    pair.old.failing = [Code.WORKER_CRASHED]
    assert await pair.old.step("7", "t2") == 1
    assert pair.old.sessions.event_counts[SessionEvent.REPLAYED] == 1


async def test_sessions_that_hang_hold_up_no_others(pair: Pair) -> None:
    release = asyncio.Event()
    waiting: list[bytes] = []

    class Hanging(Front):
        async def run(self, assignment: str, request: bytes) -> bytes:
            if self.runs >= 40:
                waiting.append(request)
                await release.wait()
            return await super().run(assignment, request)

    fronts = {"new": pair.new}
    old = fronts["old"] = Hanging("old", OLD, fronts)
    for number in range(40):
        await old.step(str(number), "t1", start=True)
    hanging = [asyncio.create_task(old.step(str(number), "t2")) for number in range(10)]
    await until(lambda: len(waiting) == 10, WAIT_S, "the steps to run")
    Pair(old, pair.new).hand()
    await until(lambda: pair.new.count() == 30, WAIT_S, "the idle ones to be there")
    release.set()
    assert await asyncio.gather(*hanging) == [1] * 10
    await until(lambda: (old.count(), pair.new.count()) == (0, 40), WAIT_S, "all to be there")


def count_waits(front: Front) -> Callable[[], int]:
    """How many times something at the front waits for a change from now on."""
    waits = 0
    table = front.sessions._table
    wait_for_change = table.wait_for_change

    async def count(end: Elapsed | None = None) -> bool:
        nonlocal waits
        waits += 1
        return await wait_for_change(end)

    table.wait_for_change = count  # type: ignore[method-assign]
    return lambda: waits


async def test_a_step_that_ends_wakes_nobody_who_waits_for_something_else(pair: Pair) -> None:
    other = WorkloadKey("shop", "slow")
    loads = StatefulReplica("b-1", other, STATE)
    keeper = StatefulReplica(OLD, WORKLOAD, STATE)
    workers = [LocalWorker(OLD, WORKLOAD, "/socket", "1")]
    sessions = pair.old.sessions
    sessions.configure((keeper, loads), workers)
    waits = count_waits(pair.old)
    until_ = Elapsed(SystemClock().now() + CALL_S)
    step, request = SessionStep("t", b"t", True, False), oip.ModelInferRequest(model_name="slow").SerializeToString()
    waiting = asyncio.create_task(sessions.step(SequenceKey(other, "1"), step, request, "b-1", until_, pair.old.run))
    await until(lambda: waits() == 1, WAIT_S, "it to wait for its worker")
    for number in range(5):
        await pair.old.step("7", f"t{number}", start=not number)
        await asyncio.wait([waiting], timeout=0.01)
    assert waits() == 1
    sessions.configure((keeper, loads), [*workers, LocalWorker("b-1", other, "/socket", "1")])
    await waiting


async def test_a_session_that_begins_during_a_move_is_handed_over(pair: Pair) -> None:
    may_run = asyncio.Event()

    class Slow(Front):
        async def run(self, assignment: str, request: bytes) -> bytes:
            await may_run.wait()
            return await super().run(assignment, request)

    fronts = {"new": pair.new}
    old = fronts["old"] = Slow("old", OLD, fronts)
    first = asyncio.create_task(old.step("7", "t1", start=True))
    await until(lambda: old.sessions._table._beginning, WAIT_S, "the first step to run")
    waits = count_waits(old)
    Pair(old, pair.new).hand()
    await until(lambda: waits() == 1, WAIT_S, "the move to find no session, and to wait")
    may_run.set()
    assert await first == 0
    await until(lambda: (old.count(), pair.new.count()) == (0, 1), WAIT_S, "it to be there")


async def test_a_session_does_not_go_to_a_replica_of_the_node_that_keeps_none(pair: Pair) -> None:
    await pair.old.step("7", "t1", start=True)
    pair.old.configure(Handover("m-1", "a-none", "old", "10.0.0.1:1"))
    assert await pair.old.step("7", "t2") == 1
    pair.old.configure()
    assert await pair.old.step("7", "t3") == 2
