"""Requests at a front whose replica is scaled to zero: they wait, are refused, or go on."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from harness.fakes.fronts import NoPeers
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import CallRefused, InboundCall
from shoal.agent.dataplane.upstream import PeerClients, WorkerClients
from shoal.agent.frames import FrameServer, InferCall
from shoal.agent.ports import LocalWorker
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "reader")
ROUTE = Route(KEY, 1, (Endpoint("a-1", "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY),))
TOKEN = Credential("acme", hashlib.sha256(b"secret").hexdigest(), Wall(4e9))
ANSWER = oip.ModelInferResponse(model_name="reader").SerializeToString()
ASLEEP = UnloadedReplica("a-1", KEY, Seconds(2.0), Seconds(1.0))
FAILURE = Refusal(Code.MEMORY_SHORT, "1 MiB free", "2 GiB", "free memory")


class Front:
    """A front with one replica, which the test loads and unloads."""

    def __init__(self, folder: Path) -> None:
        clock = SystemClock()
        self.woken: list[str] = []
        self.held: list[InferCall] | None = None
        """Requests at the worker; None: it answers at once."""
        self.server = FrameServer(folder / "w", "nonce", {}, on_infer=self._on_infer)
        self.worker = LocalWorker("a-1", KEY, str(folder / "w"), "nonce")
        self.workers, peers = WorkerClients(), cast("PeerClients", NoPeers())
        sessions = FrontSessions("west", "n1", clock, self.workers, peers, clock.wall)
        callers = CallerAuth("west", "n1", clock.wall)
        self.plane = DataPlane(
            *(FrontSettings("west", "n1"), clock, self.workers, peers, callers, sessions),
            request_wake=self.woken.append,
        )

    def load(self) -> None:
        self.plane.configure((ROUTE,), (TOKEN,), (self.worker,))

    def unload(self, replica: UnloadedReplica = ASLEEP) -> None:
        self.plane.configure((ROUTE,), (TOKEN,), (), unloaded=(replica,))

    async def ask(self, timeout_s: float = 20.0) -> bytes:
        message = oip.ModelInferRequest(model_name="reader", raw_input_contents=[b"1234"])
        message.inputs.add(name="x", datatype="UINT8", shape=[4])
        return await self.plane.infer(
            InboundCall(bearer="secret", remaining_s=Seconds(timeout_s)), message.SerializeToString()
        )

    def _on_infer(self, call: InferCall) -> None:
        if self.held is None:
            call.answer((ANSWER,))
        else:
            self.held.append(call)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    found = Front(tmp_path)
    await found.server.start()
    found.unload()
    yield found
    await found.workers.close()
    await found.server.close()


async def waiting(front: Front, count: int, *, before: int = 0) -> list["asyncio.Task[bytes]"]:
    tasks = [asyncio.create_task(front.ask()) for _ in range(count)]
    await until(lambda: front.plane.in_flight == before + count, 5.0, "they wait")
    return tasks


async def test_all_that_come_wait_for_one_wake_and_are_answered(front: Front) -> None:
    tasks = await waiting(front, 20)
    assert front.woken == ["a-1"]
    assert front.plane.stats().unloaded == ("a-1",)
    front.unload(replace(ASLEEP, is_waking=True))
    tasks += await waiting(front, 1, before=20)
    front.load()
    assert await asyncio.gather(*tasks) == [ANSWER] * 21
    assert front.woken == ["a-1"], "asked for once"
    assert front.plane.stats().unloaded == ()


async def test_who_waited_for_its_route_waits_for_the_replica_there_too(front: Front) -> None:
    front.plane.configure((), (TOKEN,), (), unloaded=(ASLEEP,), routes_on_demand=True)
    task = asyncio.create_task(front.ask())
    await until(lambda: front.plane.stats().asked == (KEY,), 5.0, "it waits for its route")
    assert front.woken == []
    front.unload()
    await until(lambda: front.woken == ["a-1"], 5.0, "it waits for the replica")
    assert front.plane.in_flight == 1
    front.load()
    assert await task == ANSWER


async def test_a_load_that_fails_is_what_they_hear(front: Front) -> None:
    tasks = await waiting(front, 3)
    front.unload(replace(ASLEEP, failure=FAILURE))
    for task in tasks:
        with pytest.raises(CallRefused) as refused:
            await task
        assert refused.value.refusal == FAILURE
        assert refused.value.retry_after_s is not None
    assert front.plane.in_flight == 0


async def test_a_deadline_that_no_load_meets_is_refused_at_once(front: Front) -> None:
    with pytest.raises(CallRefused) as refused:
        await front.ask(0.5)
    assert refused.value.code is Code.SCALED_TO_ZERO
    assert refused.value.retry_after_s == pytest.approx(2.0, abs=0.1)
    assert front.woken == ["a-1"]


async def test_who_waits_until_its_deadline_hears_that(front: Front) -> None:
    front.unload(replace(ASLEEP, least_wake_s=Seconds(0.0)))
    with pytest.raises(ShoalError) as late:
        await front.ask(0.05)
    assert late.value.code is Code.DEADLINE_EXCEEDED
    assert front.plane.in_flight == 0


async def test_who_leaves_is_counted_no_more(front: Front) -> None:
    (task,) = await waiting(front, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert front.plane.in_flight == 0


async def test_an_assignment_that_is_gone_is_waited_for_no_more(front: Front) -> None:
    (task,) = await waiting(front, 1)
    front.plane.configure((), (TOKEN,), ())
    with pytest.raises(CallRefused) as refused:
        await task
    assert refused.value.code is Code.MODEL_NOT_READY


async def test_what_waits_for_its_turn_meanwhile_is_woken_for_too(front: Front) -> None:
    """The replica was loaded when the request came, and is not when its turn comes."""
    front.load()
    slots = FrontSettings("west", "n1").limits.slots
    front.held = []
    first = [asyncio.create_task(front.ask()) for _ in range(slots)]
    await until(lambda: len(front.held or ()) == slots, 10.0, "the worker has as many as may run")
    last = asyncio.create_task(front.ask())
    await until(lambda: front.plane.in_flight == slots + 1, 5.0, "one more waits")
    front.unload()
    for call in front.held:
        call.answer((ANSWER,))
    front.held = None
    assert await asyncio.gather(*first) == [ANSWER] * slots
    await until(lambda: front.woken == ["a-1"], 5.0, "it is woken for")
    assert not last.done()
    front.load()
    assert await last == ANSWER
