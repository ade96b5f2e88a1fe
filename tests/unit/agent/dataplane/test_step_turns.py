"""A step of a session takes a turn between tenants while it runs, and none while it waits."""

import asyncio
from typing import Final, cast

import pytest

from harness.fakes.clock import ManualClock
from harness.wait import until
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.dataplane import dispatcher
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import CallContext, PeerClients, WorkerClients
from shoal.agent.ports import LocalWorker, StatefulReplica
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

SESSIONS: Final = WorkloadKey("acme", "counting")
FAR: Final = WorkloadKey("acme", "far")
"""Stateful too; its only replica is at another front."""
PLAIN: Final = WorkloadKey("acme", "plain")
SHOP: Final = WorkloadKey("shop", "plain")
SLOTS: Final = 2
TIMEOUT_S: Final = 60.0
LEASE_S: Final = 2 * TIMEOUT_S


class Node:
    """A front with two tenants, neither of which is alone: its clock stands still unless a test moves it."""

    def __init__(self) -> None:
        self.clock = ManualClock(wall=1.0)
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.running = 0
        """Steps and requests that workers and other fronts have."""
        workers, peers = cast("WorkerClients", self), cast("PeerClients", self)
        self.sessions = FrontSessions("west", "n1", self.clock, workers, peers, lambda: Wall(1.0))
        self.extend_lease()
        settings = FrontSettings("west", "n1", TIMEOUT_S, limits=AdmissionLimits(slots=SLOTS))
        callers = CallerAuth("west", "n1", lambda: Wall(1.0))
        self.plane = DataPlane(settings, self.clock, workers, peers, callers, self.sessions)
        here = {"a-1": SESSIONS, "p-1": PLAIN, "s-1": SHOP}
        routes = [
            Route(key, 1, (_endpoint(name, EndpointKind.LOCAL),), stateful=key is SESSIONS)
            for name, key in here.items()
        ]
        routes.append(Route(FAR, 1, (_endpoint("f-1", EndpointKind.AGENT),), stateful=True))
        listed = tuple(LocalWorker(name, key, "/socket", "0") for name, key in here.items())
        keeper = StatefulReplica("a-1", SESSIONS, {"s": "sn"})
        self.plane.configure(tuple(routes), (), listed, stateful_replicas=(keeper,))

    def extend_lease(self) -> None:
        self.sessions.lease(Elapsed(self.clock.now() + LEASE_S), "claim")

    @property
    def inside(self) -> int:
        return self.plane._dispatcher.turns._queue.inside

    @property
    def waiting(self) -> int:
        return self.plane._dispatcher.turns.waiting

    def configure(self, _listed: object) -> None:
        """Of workers and of peers."""

    def is_connecting(self, endpoint: Endpoint) -> bool:
        return False

    def rtt_s(self, endpoint: Endpoint) -> Seconds:
        return Seconds(0.0)

    async def metadata(self, assignment: str, context: CallContext) -> oip.ModelMetadataResponse:
        spec = oip.ModelMetadataResponse.TensorMetadata(name="s", datatype="UINT8", shape=[1])
        return oip.ModelMetadataResponse(inputs=[spec])

    async def infer(self, at: str | Endpoint, request: bytes, context: CallContext) -> bytes:
        self.running += 1
        try:
            await self.may_run.wait()
        finally:
            self.running -= 1
        answer = oip.ModelInferResponse(raw_output_contents=[b"\1", b"\1"])
        for name in ("y", "sn"):
            answer.outputs.add(name=name, datatype="UINT8", shape=[1])
        return answer.SerializeToString()

    async def ask(self, workload: WorkloadKey, session: int = 0, *, start: bool = False) -> None:
        request = oip.ModelInferRequest(model_name=workload.name, raw_input_contents=[b"\0"])
        request.inputs.add(name="x", datatype="UINT8", shape=[1])
        if session:
            request.parameters["sequence_id"].int64_param = session
            request.parameters["sequence_start"].bool_param = start
        call = InboundCall(Identity("west", Role.TENANT, workload.tenant, Wall(0.0), Wall(2.0), "1"))
        await self.plane.infer(call, request.SerializeToString())


def _endpoint(name: str, kind: EndpointKind) -> Endpoint:
    return Endpoint(name, "n1", kind, "", 1.0, EndpointState.READY)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_steps_that_wait_for_a_lease_keep_no_turn_from_requests() -> None:
    node = Node()
    for session in range(1, 4):
        await node.ask(SESSIONS, session, start=True)
    node.clock.advance(LEASE_S)
    steps = [asyncio.create_task(node.ask(SESSIONS, session)) for session in range(1, 4)]
    await until(lambda: node.plane.in_flight == len(steps), 10.0, "the steps to be inside")
    assert (node.inside, node.waiting, node.running) == (0, 0, 0)
    await node.ask(SHOP)
    await node.ask(PLAIN)
    node.extend_lease()
    await asyncio.gather(*steps)
    assert node.inside == 0


async def test_steps_that_run_take_turns() -> None:
    node = Node()
    await node.ask(SHOP)
    for session in range(1, 6):
        await node.ask(SESSIONS, session, start=True)
    node.may_run.clear()
    steps = [asyncio.create_task(node.ask(SESSIONS, session)) for session in range(1, 6)]
    await until(lambda: node.waiting == len(steps) - SLOTS, 10.0, "the others to wait")
    assert node.running == SLOTS
    shop = asyncio.create_task(node.ask(SHOP))
    await until(lambda: node.running == SLOTS + 1, 10.0, "the other tenant to have its share at once")
    node.may_run.set()
    await asyncio.gather(shop, *steps)
    assert (node.inside, node.waiting) == (0, 0)


async def test_a_step_that_another_front_keeps_waiting_leaves_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "FORWARD_TURN_S", 0.05)
    node = Node()
    node.may_run.clear()
    steps = [asyncio.create_task(node.ask(FAR, session, start=True)) for session in range(1, SLOTS + 1)]
    await until(lambda: node.running == SLOTS, 10.0, "the steps to be forwarded")
    await until(lambda: node.inside == 0, 10.0, "their turns to end")
    assert node.running == SLOTS
    node.may_run.set()
    await asyncio.gather(*steps)
    assert node.inside == 0, "a turn that has ended does not end again"


async def test_a_step_whose_turn_comes_after_its_deadline_does_not_run() -> None:
    node = Node()
    await node.ask(SHOP)
    await node.ask(SESSIONS, 1, start=True)
    node.may_run.clear()
    before = [asyncio.create_task(node.ask(PLAIN)) for _ in range(SLOTS)]
    await until(lambda: node.running == SLOTS, 10.0, "all turns to be taken")
    step = asyncio.create_task(node.ask(SESSIONS, 1))
    await until(lambda: node.waiting == 1, 10.0, "the step to wait")
    node.clock.advance(TIMEOUT_S)  # the loop's clock, by which its wait ends, stands
    await _end(before)
    with pytest.raises(ShoalError) as refused:
        await step
    assert refused.value.code is Code.DEADLINE_EXCEEDED
    assert (node.running, node.inside, node.waiting) == (0, 0, 0)
