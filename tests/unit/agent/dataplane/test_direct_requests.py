"""Requests that are answered without a task: they end, count and fail over as all others do."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fakes.fronts import NoPeers
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.direct_requests import DirectMemo
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import PeerClients, WorkerClients
from shoal.agent.frames import FrameServer, InferCall
from shoal.agent.ports import FrontStats, LocalWorker
from shoal.http2.grpc_messages import MessageBytes
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.tenant import TenantLimit
from shoal.types.units import PerSecond, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "reader")
ENDPOINT = Endpoint("a-1", "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY)
ROUTE = Route(KEY, 1, (ENDPOINT,))
TOKEN = Credential("acme", hashlib.sha256(b"secret").hexdigest(), Wall(4e9))
CALL = InboundCall(bearer="secret")
ANSWER = oip.ModelInferResponse(model_name="reader").SerializeToString()


def request(model: str = "reader", raw: bytes = b"1234", **parameters: int) -> bytes:
    message = oip.ModelInferRequest(model_name=model, raw_input_contents=[raw])
    message.inputs.add(name="x", datatype="UINT8", shape=[len(raw)])
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return message.SerializeToString()


class Front:
    """A front and a worker, whose answers the test decides."""

    def __init__(self, folder: Path) -> None:
        clock = SystemClock()
        self.dates_at: Callable[[], Wall] = clock.wall
        """The time at which tokens must be valid."""
        self.calls: list[InferCall] = []
        self.answers: Callable[[InferCall], None] | None = None
        self.cancelled = 0
        self.memo: dict[str, object] = {}
        self.ended: list[tuple[MessageBytes | None, Exception | None]] = []
        self.server = FrameServer(folder / "w", "nonce", {}, on_infer=self._on_infer)
        self.worker = LocalWorker("a-1", KEY, str(folder / "w"), "nonce")
        self.workers, peers = WorkerClients(), cast("PeerClients", NoPeers())
        sessions = FrontSessions("west", "n1", clock, self.workers, peers, clock.wall)
        callers = CallerAuth("west", "n1", lambda: self.dates_at())
        self.plane = DataPlane(FrontSettings("west", "n1"), clock, self.workers, peers, callers, sessions)
        self.configure()

    def configure(
        self,
        where: Route = ROUTE,
        credentials: tuple[Credential, ...] = (TOKEN,),
        tenants: tuple[TenantLimit, ...] = (),
    ) -> None:
        self.plane.configure((where,), credentials, (self.worker,), tenants=tenants)

    def begin(self, asked: bytes | None = None, remaining_s: float | None = None) -> Callable[[], None] | None:
        """Begin a direct request: how to cancel it; None where it is none."""
        direct = self.plane.prepare_direct(CALL, remaining_s, self.memo, request() if asked is None else asked)
        if direct is None or not direct.begin(lambda answer, error: self.ended.append((answer, error))):
            return None
        return direct.cancel

    async def ask(self) -> bytes:
        """By the way of all other requests."""
        return await self.plane.infer(CALL, request())

    def _on_infer(self, call: InferCall) -> None:
        self.calls.append(call)
        call.on_cancel = self._on_cancel
        if self.answers is not None:
            self.answers(call)

    def _on_cancel(self) -> None:
        self.cancelled += 1


def answer(call: InferCall) -> None:
    call.answer((ANSWER,))


def refuse_input(call: InferCall) -> None:
    call.refuse(Refusal(Code.INVALID_ARGUMENT, "a shape", "another one"))


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    found = Front(tmp_path)
    await found.server.start()
    found.answers = answer
    await found.ask()  # the first request opens the connection to the worker
    yield found
    await found.workers.close()
    await found.server.close()


async def until_ended(front: Front, count: int = 1) -> None:
    await until(lambda: len(front.ended) >= count, 5.0, f"{count} requests to end")


async def test_an_answer_comes_without_a_task_and_is_counted_as_any_other(front: Front) -> None:
    before, tasks = front.plane.stats(), len(asyncio.all_tasks())
    assert front.begin() is not None
    assert len(asyncio.all_tasks()) == tasks
    assert front.plane.in_flight == 1
    await until_ended(front)
    assert front.ended == [(ANSWER, None)]
    assert front.plane.in_flight == 0
    directly = front.plane.stats()
    await front.ask()
    by_task = front.plane.stats()
    assert answers_in(directly) - answers_in(before) == answers_in(by_task) - answers_in(directly) == 1
    assert directly.in_flight == by_task.in_flight == (("a-1", 0),)


def answers_in(stats: FrontStats) -> int:
    (ingress,) = stats.ingress
    assert ingress.requests == ingress.answered + ingress.refused + ingress.lost
    return ingress.answered


async def test_a_refusal_of_the_worker_is_passed_on_and_counted(front: Front) -> None:
    front.answers = refuse_input
    assert front.begin() is not None
    await until_ended(front)
    (_, error) = front.ended[0]
    assert isinstance(error, ShoalError)
    assert error.code is Code.INVALID_ARGUMENT
    (ingress,) = front.plane.stats().ingress
    assert (ingress.refused, ingress.client_faults) == (1, 1)
    assert front.plane.in_flight == 0


async def test_a_request_whose_worker_ends_is_tried_elsewhere(front: Front, tmp_path: Path) -> None:
    """Along the route that it found when it came in."""
    front.answers = None
    assert front.begin() is not None
    await until(lambda: len(front.calls) == 2, 5.0, "the request at the worker")
    second = replace(ENDPOINT, assignment="a-2")
    (tmp_path / "other").mkdir()
    other = Front(tmp_path / "other")
    other.answers = answer
    await other.server.start()
    front.plane.configure(
        (replace(ROUTE, endpoints=(ENDPOINT, second)),),
        (TOKEN,),
        (front.worker, replace(other.worker, assignment="a-2")),
    )
    await front.server.close()
    await until_ended(front)
    (_, error) = front.ended[0]
    assert isinstance(error, ShoalError), "its route had one replica"
    assert error.code is Code.WORKER_CRASHED
    assert front.begin() is None, "there is a choice now"
    assert await front.ask() == ANSWER
    await other.server.close()


async def test_whose_caller_is_gone_is_withdrawn(front: Front) -> None:
    front.answers = None
    cancel = front.begin()
    assert cancel is not None
    await until(lambda: len(front.calls) == 2, 5.0, "the request at the worker")
    cancel()
    cancel()
    await until(lambda: front.cancelled == 1, 5.0, "the worker to hear of it")
    assert front.plane.in_flight == 0
    (ingress,) = front.plane.stats().ingress
    assert (ingress.requests, ingress.answered, ingress.refused) == (2, 1, 1)
    front.calls[-1].answer((ANSWER,))
    front.answers = answer
    assert front.begin() is not None
    await until_ended(front)
    assert front.ended == [(ANSWER, None)], "nobody hears of the first"


async def test_an_answer_that_waits_to_be_read_does_not_hold_its_request(front: Front) -> None:
    direct = front.plane.prepare_direct(CALL, None, front.memo, request())
    assert direct is not None
    assert direct.begin(lambda answer, error: front.ended.append((answer, error)))
    assert direct._flight.request == request()
    await until_ended(front)
    assert direct._flight.request == b""


async def test_whose_caller_goes_as_its_worker_refuses_is_counted_out_too(front: Front) -> None:
    """In one turn of the loop, in either order."""
    for refused_first in (True, False):
        front.answers = None
        before = len(front.calls)
        direct = front.plane.prepare_direct(CALL, None, front.memo, request())
        assert direct is not None
        assert direct.begin(lambda answer, error: front.ended.append((answer, error)))
        await until(lambda: len(front.calls) > before, 5.0, "the request at the worker")  # noqa: B023
        if refused_first:
            direct.set_exception(ShoalError(Refusal(Code.INVALID_ARGUMENT, "a shape", "another one")))
        direct.cancel()
        if not refused_first and not direct.done():
            direct.set_exception(ShoalError(Refusal(Code.INVALID_ARGUMENT, "a shape", "another one")))
        await until(lambda: front.plane.in_flight == 0, 5.0, "it is inside no more")
        assert front.plane.stats().in_flight == (("a-1", 0),)
        assert front.plane._dispatcher.turns._queue.inside == 0
    assert front.ended == []


async def test_a_deadline_ends_it_here_and_at_the_worker(front: Front) -> None:
    front.answers = None
    assert front.begin(remaining_s=0.05) is not None
    await until_ended(front)
    (_, error) = front.ended[0]
    assert isinstance(error, ShoalError)
    assert error.code is Code.DEADLINE_EXCEEDED
    await until(lambda: front.cancelled == 1, 5.0, "the worker to hear of it")
    assert front.begin(remaining_s=0.0) is None


async def test_what_is_not_so_simple_is_left_to_the_other_way(front: Front) -> None:
    assert front.begin(request("unknown")) is None
    assert front.begin(request(timeout=5)) is None
    assert front.begin(request(sequence_id=5)) is None
    assert front.begin(b"\xff") is None
    assert front.plane.prepare_direct(InboundCall(bearer="other"), None, {}, request()) is None
    assert front.begin() is not None


async def test_a_change_of_the_configuration_counts_at_once(front: Front) -> None:
    assert front.begin() is not None
    front.configure(credentials=())
    assert front.begin() is None
    front.configure()
    assert front.begin() is not None
    front.configure(where=replace(ROUTE, endpoints=()))
    assert front.begin() is None
    await until_ended(front, 2)


async def test_a_token_that_expired_counts_no_more(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    now = front.plane._clock.now()
    assert front.begin() is not None
    front.configure(credentials=(replace(TOKEN, expires_at=Wall(1.0)),))
    assert front.begin() is None
    front.configure()
    assert front.begin() is not None
    front.dates_at = lambda: Wall(TOKEN.expires_at + 1.0)
    monkeypatch.setattr(front.plane._clock, "now", lambda: now + 10.0)
    assert front.begin() is None, "the caller is looked at again"


async def test_who_is_still_valid_keeps_what_is_remembered(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """However seldom it calls."""
    assert front.begin() is not None
    (known,) = (each for each in front.memo.values() if isinstance(each, DirectMemo))
    target = known.targets[KEY.name]
    later = front.plane._clock.now() + 10.0
    monkeypatch.setattr(front.plane._clock, "now", lambda: later)
    assert front.begin() is not None
    assert known.targets[KEY.name] is target
    await until_ended(front, 2)


async def test_connections_of_one_caller_share_the_look_at_its_credentials(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each request of a thousand connections would have its own."""
    memos: tuple[dict[str, object], ...] = ({}, {}, {})
    for front.memo in memos:
        assert front.begin() is not None
    looks = 0

    def dates_at() -> Wall:
        nonlocal looks
        looks += 1
        return Wall(1.0)

    front.dates_at = dates_at
    later = front.plane._clock.now() + 10.0
    monkeypatch.setattr(front.plane._clock, "now", lambda: later)
    for front.memo in memos:
        assert front.begin() is not None
    assert looks == 1
    front.dates_at = lambda: Wall(TOKEN.expires_at + 1.0)
    later += 10.0
    for front.memo in memos:
        assert front.begin() is None, "it expired for all of them"
    await until_ended(front, 6)


async def test_a_tenants_limits_count(front: Front) -> None:
    front.answers = None
    front.configure(tenants=(TenantLimit("acme", concurrency=2),))
    assert front.begin() is not None
    assert front.begin() is not None
    assert front.begin() is None
    with pytest.raises(ShoalError) as refused:
        await front.ask()
    assert refused.value.code is Code.TENANT_CONCURRENCY
    (use,) = front.plane.stats().tenants
    assert (use.inside, use.admitted, use.over_concurrency) == (2, 2, 1)
    await until(lambda: len(front.calls) == 3, 5.0, "both at the worker")
    for call in front.calls[1:]:
        answer(call)
    await until_ended(front, 2)
    front.configure(tenants=(TenantLimit("acme", rate=PerSecond(0.001)),))
    assert front.begin() is None


async def test_calls_of_a_tenant_count_as_its_own_while_it_is_over_its_rate(front: Front) -> None:
    assert (front.plane.payer_of(CALL), front.plane.tenant_of(CALL)) == ("acme", "acme")
    front.configure(tenants=(TenantLimit("acme", rate=PerSecond(0.001)),))
    assert (front.plane.payer_of(CALL), front.plane.tenant_of(CALL)) == (None, "acme")
    with pytest.raises(ShoalError) as refused:
        front.plane.tenant_of(InboundCall(bearer="of nobody"))
    assert refused.value.code is Code.TOKEN_INVALID


TENSORS = st.lists(st.binary(max_size=6), max_size=3)


@given(TENSORS, st.data())
def test_requests_with_the_same_constant_part_and_length_say_the_same(
    tensors: list[bytes], data: st.DataObject
) -> None:
    """Whatever stands in the contents of the last tensor."""
    message = oip.ModelInferRequest(model_name="reader", id="7", raw_input_contents=tensors)
    for each in tensors:
        message.inputs.add(name="x", datatype="UINT8", shape=[len(each)])
    asked = message.SerializeToString()
    constant = reading.constant_part(asked)
    assert (constant is None) == (not tensors)
    if constant is not None:
        rest = data.draw(st.binary(min_size=len(asked) - len(constant), max_size=len(asked) - len(constant)))
        other = oip.ModelInferRequest.FromString(constant + rest)
        assert other.raw_input_contents[-1] == rest
        other.raw_input_contents[-1] = tensors[-1]
        assert other == message
