"""Direct requests that wait for their turn between tenants, without a task."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from harness.fakes.fronts import ANSWER, OnePeer, OpenPeer
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, PeerClients, WorkerClients
from shoal.agent.frames import InferAnswer, PendingCall
from shoal.http2.grpc_messages import MessageBytes
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

TENANTS = ("a", "b")
ROUTES = {
    tenant: Route(
        WorkloadKey(tenant, "reader"),
        1,
        (Endpoint(f"of-{tenant}", "n2", EndpointKind.AGENT, "127.0.0.1:1", 1.0, EndpointState.READY),),
    )
    for tenant in TENANTS
}
CREDENTIALS = (
    Credential("a", "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb", Wall(4e9)),
    Credential("b", "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d", Wall(4e9)),
)
"""Of the bearer tokens `a` and `b`."""


def request() -> bytes:
    message = oip.ModelInferRequest(model_name="reader", raw_input_contents=[b"1234"])
    message.inputs.add(name="x", datatype="UINT8", shape=[4])
    return message.SerializeToString()


class Front:
    """A front with one slot, whose only peer is the test's. Both tenants ask, so that neither is alone."""

    def __init__(self, slots: int = 1) -> None:
        clock = SystemClock()
        self.peer = OpenPeer()
        self.peers = OnePeer(self.peer)
        workers, clients = WorkerClients(), cast("PeerClients", self.peers)
        sessions = FrontSessions("west", "n1", clock, workers, clients, clock.wall)
        settings = FrontSettings("west", "n1", limits=AdmissionLimits(slots=slots))
        self.plane = DataPlane(settings, clock, workers, clients, CallerAuth("west", "n1", clock.wall), sessions)
        self.turns = self.plane._dispatcher.turns
        self.memos: dict[str, dict[str, object]] = {tenant: {} for tenant in TENANTS}
        self.ended: list[tuple[str, MessageBytes | None, Exception | None]] = []
        self.configure()

    def configure(self, *routes: Route) -> None:
        self.plane.configure(routes or tuple(ROUTES.values()), CREDENTIALS, ())

    def begin(self, tenant: str, remaining_s: float | None = None) -> Callable[[], None]:
        """How to cancel it."""
        call = InboundCall(bearer=tenant)
        direct = self.plane.prepare_direct(call, remaining_s, self.memos[tenant], request())
        assert direct is not None
        assert direct.begin(lambda answer, error: self.ended.append((tenant, answer, error)))
        return direct.cancel

    def answer(self, number: int) -> None:
        self.peer.sent[number][0].set_result(InferAnswer(ANSWER, {}))

    @property
    def tenants_sent(self) -> list[str]:
        return [context.tenant for _, context in self.peer.sent]

    def is_empty(self) -> bool:
        return self.plane.in_flight == self.turns.waiting == self.turns._queue.inside == 0


async def crowded_front() -> Front:
    """One request of each tenant is inside, and the next ones wait."""
    front = Front()
    front.begin("b")
    front.begin("a")
    assert front.tenants_sent == ["b", "a"]
    return front


async def test_it_is_sent_at_its_turn_and_counts_as_any_other() -> None:
    front = await crowded_front()
    tasks = len(asyncio.all_tasks())
    front.begin("a", 5.0)
    assert (front.turns.waiting, front.plane.in_flight) == (1, 3)
    assert front.tenants_sent == ["b", "a"]
    front.answer(0)
    assert front.turns.waiting == 1, "its tenant has more than its share of the slot"
    front.answer(1)
    assert front.tenants_sent == ["b", "a", "a"]
    assert 4.0 < front.peer.sent[2][1].remaining_s <= 5.0
    front.answer(2)
    assert [(tenant, answer) for tenant, answer, _ in front.ended] == [("b", ANSWER), ("a", ANSWER), ("a", ANSWER)]
    assert len(asyncio.all_tasks()) == tasks
    assert front.is_empty()
    assert sum(each.answered for each in front.plane.stats().ingress) == 3


async def test_whose_caller_goes_is_never_sent() -> None:
    front = await crowded_front()
    cancel = front.begin("a")
    cancel()
    cancel()
    assert (front.turns.waiting, front.plane.in_flight) == (0, 2)
    front.answer(0)
    front.answer(1)
    assert len(front.peer.sent) == 2
    assert front.is_empty()
    assert sum(each.refused for each in front.plane.stats().ingress) == 1


async def test_whose_turn_does_not_come_in_time_is_refused() -> None:
    front = await crowded_front()
    front.begin("a", 0.02)
    front.begin("a", 5.0)
    await until(lambda: front.ended, 5.0, "the refusal")
    ((_, answer, error),) = front.ended
    assert answer is None
    assert isinstance(error, ShoalError)
    assert error.code is Code.DEADLINE_EXCEEDED
    assert (front.turns.waiting, front.plane.in_flight) == (1, 3)


async def test_who_waited_while_the_configuration_changed_looks_for_a_replica_again() -> None:
    """Along the route that it found when it came in, as a request in a task does."""
    front = await crowded_front()
    front.begin("a")
    front.configure(ROUTES["b"])
    front.answer(0)
    front.answer(1)
    await until(lambda: len(front.ended) == 3, 5.0, "all answers")
    assert (len(front.peer.sent), front.peers.asked) == (2, 1)
    assert front.is_empty()


async def test_who_waited_while_the_connection_was_lost_asks_for_another() -> None:
    front = await crowded_front()
    front.begin("a")
    front.peers.peer = None
    front.answer(0)
    front.answer(1)
    await until(lambda: len(front.ended) == 3, 5.0, "all answers")
    assert (len(front.peer.sent), front.peers.asked) == (2, 1)
    assert front.is_empty()


async def test_whose_caller_goes_before_its_task_begins_is_counted_out() -> None:
    front = await crowded_front()
    cancel = front.begin("a")
    front.peers.peer = None
    front.answer(0)
    front.answer(1)
    cancel()
    await until(front.is_empty, 5.0, "it is inside no more")
    assert len(front.ended) == 2


async def test_of_two_replicas_it_goes_to_the_one_that_is_free_at_its_turn() -> None:
    front = Front(slots=3)
    (first,) = ROUTES["a"].endpoints
    front.configure(ROUTES["b"], replace(ROUTES["a"], endpoints=(first, replace(first, assignment="other"))))
    for tenant in ("b", "a", "a"):
        front.begin(tenant)
    for number in range(8):  # where it would have gone when it came is drawn
        front.begin("a")
        assert front.turns.waiting == 1
        front.answer(number + 2)
        assert front.peer.asked[number + 3] == front.peer.asked[number + 2]


EVENTS = st.sampled_from(("begin", "cancel", "answer", "refuse", "run"))
STEPS = st.lists(st.tuples(EVENTS, st.integers(0, 50), st.booleans()), max_size=40)


@given(STEPS, st.integers(1, 3))
def test_whatever_happens_each_ends_once_and_nothing_stays_inside(
    steps: list[tuple[str, int, bool]], slots: int
) -> None:
    async def run() -> None:
        front = Front(slots)
        begun: list[Callable[[], None]] = []
        cancelled = set[int]()
        for step, number, flag in steps:
            if step == "begin":
                begun.append(front.begin("a" if flag else "b"))
            elif step == "cancel" and begun:
                cancelled.add(number % len(begun))
                begun[number % len(begun)]()
            elif step in ("answer", "refuse") and front.peer.sent:
                # Whose turn comes by that may find no connection.
                front.peers.peer = front.peer if flag else None
                end(front.peer.sent[number % len(front.peer.sent)][0], is_answer=step == "answer")
                front.peers.peer = front.peer
            else:
                await loop_turn()
        while not front.is_empty():
            for pending, _ in tuple(front.peer.sent):
                end(pending)
            await loop_turn()
        assert len(begun) - len(cancelled) <= len(front.ended) <= len(begun)
        assert sum(each.requests for each in front.plane.stats().ingress) == len(begun)

    asyncio.run(run())


async def loop_turn() -> None:
    """What the loop has to do now is done."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(done.set_result, None)
    await done


def end(pending: PendingCall, *, is_answer: bool = True) -> None:
    if pending.done():
        return
    if is_answer:
        pending.set_result(InferAnswer(ANSWER, {}))
    else:
        pending.set_exception(AttemptFailed(Refusal(Code.INVALID_ARGUMENT, "a shape", "another"), was_sent=True))
