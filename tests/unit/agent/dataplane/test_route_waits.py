"""A client's first request for a workload that its front has no routes of waits for the region's answer."""

import asyncio
from typing import Final, cast

import pytest

from harness.fakes.fronts import NoPeers
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.awaited_routes import NAMES_PER_TENANT
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import CallRefused, InboundCall
from shoal.agent.dataplane.upstream import CallContext, PeerClients, WorkerClients
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Forwarding
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY, NONE = WorkloadKey("acme", "reader"), WorkloadKey("acme", "none")
THERE: Final = Endpoint("a-1", "n2", EndpointKind.AGENT, "n2:1", 1.0, EndpointState.READY)
REACHED: Final = Route(KEY, 1, (THERE,))


class EntryFront(NoPeers):
    """A front where clients of `acme` enter, and which answers from the node that a route leads to."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.asks = 0
        self.remaining_s: list[float] = []
        clients = cast("WorkerClients", self), cast("PeerClients", self)
        sessions = FrontSessions("west", "n1", clock, *clients, lambda: Wall(1.0))
        callers = CallerAuth("west", "n1", lambda: Wall(1.0))
        settings = FrontSettings("west", "n1")
        self.plane = DataPlane(settings, clock, *clients, callers, sessions, on_ask=self._on_ask)
        self.set_routes()

    def set_routes(self, *routes: Route, on_demand: bool = True) -> None:
        allowed = Forwarding((), ("acme",))
        self.plane.configure(routes, (), (), forwarding=allowed, routes_on_demand=on_demand)

    def _on_ask(self) -> None:
        self.asks += 1

    async def infer(self, endpoint: Endpoint, request: bytes, context: CallContext) -> bytes:
        self.remaining_s.append(context.remaining_s)
        return oip.ModelInferResponse(id="r-1").SerializeToString()

    async def metadata(self, endpoint: Endpoint, name: str, context: CallContext) -> oip.ModelMetadataResponse:
        self.remaining_s.append(context.remaining_s)
        return oip.ModelMetadataResponse(name=name)

    def call(self, tenant: str = "acme", remaining_s: float | None = None) -> InboundCall:
        who = Identity("west", Role.TENANT, tenant, Wall(0.0), Wall(2.0), "1")
        return InboundCall(who, remaining_s=None if remaining_s is None else Seconds(remaining_s))

    async def ask(
        self, name: str = "reader", tenant: str = "acme", remaining_s: float | None = None, timeout_us: int = 0
    ) -> bytes:
        request = oip.ModelInferRequest(model_name=name, id="r-1")
        if timeout_us:
            request.parameters["timeout"].int64_param = timeout_us
        return await self.plane.infer(self.call(tenant, remaining_s), request.SerializeToString())

    async def code_of(self, name: str = "reader", tenant: str = "acme", remaining_s: float | None = None) -> Code:
        with pytest.raises(ShoalError) as caught:
            await self.ask(name, tenant, remaining_s)
        return caught.value.code

    async def begin(self, name: str = "reader", remaining_s: float | None = None) -> asyncio.Task[bytes]:
        before, waiting = self.asks, asyncio.create_task(self.ask(name, remaining_s=remaining_s))
        await until(lambda: self.asks > before, 10.0, "it to ask")
        return waiting


async def test_a_front_reports_no_workload_that_it_has_no_route_of_any_more() -> None:
    front = EntryFront()
    front.set_routes(REACHED)
    await front.ask()
    assert [(each.workload, each.answered) for each in front.plane.stats().ingress] == [(KEY, 1)]
    front.set_routes(REACHED)
    assert [(each.workload, each.answered) for each in front.plane.stats().ingress] == [(KEY, 1)]
    front.set_routes()
    assert front.plane.stats().ingress == ()


async def test_a_first_request_waits_for_the_route_and_keeps_its_deadline() -> None:
    front = EntryFront()
    waiting = await front.begin(remaining_s=30.0)
    ready = asyncio.create_task(front.plane.model_ready(front.call(), "reader", ""))
    counted = asyncio.create_task(front.plane.statistics(front.call(), "reader", ""))
    _, waits = await asyncio.wait((ready, counted), timeout=0.0)
    assert waits == {ready, counted}
    assert front.plane.stats().asked == (KEY,)
    front.set_routes(REACHED)
    assert oip.ModelInferResponse.FromString(await waiting).id == "r-1"
    assert await ready
    assert [each.name for each in (await counted).model_stats] == ["reader"]
    assert front.remaining_s[0] < 30.0
    assert front.plane.stats().asked == ()
    await front.ask()
    assert front.asks == 1, "the second found the first waiting, the third a route"


async def test_what_the_region_does_not_know_is_refused_and_not_asked_for_again() -> None:
    front = EntryFront()
    waiting = await front.begin("none")
    front.set_routes(Route(NONE, 0, (), Code.MODEL_NOT_FOUND, "no such workload"))
    with pytest.raises(ShoalError) as caught:
        await waiting
    assert caught.value.code is Code.MODEL_NOT_FOUND
    assert await front.code_of("none") is Code.MODEL_NOT_FOUND
    assert front.asks == 1
    assert front.plane.index(front.call(), ready_only=False).models == []


async def test_what_has_no_time_left_is_refused_and_not_sent() -> None:
    front = EntryFront()
    front.set_routes(REACHED)
    assert await front.code_of(remaining_s=0.0) is Code.DEADLINE_EXCEEDED
    assert front.remaining_s == []
    (counted,) = front.plane.stats().ingress
    assert counted.refused == 1


async def test_nobody_is_asked_for_metadata_that_comes_too_late() -> None:
    front = EntryFront()
    front.set_routes(REACHED)
    assert (await front.plane.model_metadata(front.call(remaining_s=5.0), "reader", "")).name == "reader"
    with pytest.raises(ShoalError) as caught:
        await front.plane.model_metadata(front.call(remaining_s=0.0), "reader", "")
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    assert front.remaining_s == [5.0]
    assert front.plane.meter.codes == {Code.DEADLINE_EXCEEDED: 1}


async def test_who_waits_in_vain_is_told_to_retry() -> None:
    front = EntryFront()
    assert await front.code_of(remaining_s=0.05) is Code.MODEL_NOT_READY


async def test_only_what_may_exist_here_is_asked_for() -> None:
    front = EntryFront()
    assert await front.code_of(tenant="other") is Code.TENANT_DENIED
    assert await front.code_of("No Such Name") is Code.MODEL_NOT_FOUND
    front.set_routes(on_demand=False)
    assert await front.code_of() is Code.MODEL_NOT_FOUND
    assert front.asks == 0


async def test_a_caller_who_makes_names_up_is_refused_beyond_its_share() -> None:
    front = EntryFront()
    waiting = [await front.begin(f"w{at}") for at in range(NAMES_PER_TENANT)]
    assert await front.code_of("w-more") is Code.OVERLOADED
    assert len(front.plane.stats().asked or ()) == NAMES_PER_TENANT
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_timeout_that_a_request_names_ends_its_wait_for_a_route_too() -> None:
    front = EntryFront()
    async with asyncio.timeout(4.0):  # a wait without it takes five seconds
        with pytest.raises(CallRefused) as caught:
            await front.ask(timeout_us=50_000)
    assert caught.value.code is Code.MODEL_NOT_READY
    assert caught.value.retry_after_s, "so that clients come again"
