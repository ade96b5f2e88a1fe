"""Which requests a front traces, on whose word, and what their spans say."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import structlog

from harness.fakes.clock import ManualClock
from shoal.agent.dataplane import tracing
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.tracing import Tracer
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, CallContext, PeerClients, WorkerClients
from shoal.agent.ports import LocalWorker
from shoal.inference import open_inference_pb2 as oip
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.link import SpansAsked
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.trace import Span, SpanKind, TraceParent, parse_traceparent
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "reading")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = f"00-{TRACE}-{PARENT}-01"
TENANT, OPERATOR = (Identity("west", role, "acme", Wall(0.0), Wall(2.0), "1") for role in (Role.TENANT, Role.OPERATOR))
GATEWAY = Identity("west", Role.GATEWAY, "gw", Wall(0.0), Wall(2.0), "2")


class Node:
    """A front, its worker, and another region's gateway. Of the worker's stages it says what `stages` says."""

    def __init__(self, ratio: float = 0.0) -> None:
        self.clock = ManualClock(wall=1.0)
        self.told: list[Span] = []
        self.errands: list[CallContext] = []
        self.fails = 0
        self.stages: Any = None
        self.tracer = Tracer("west", "n1", self.clock, ratio, self.told.extend)
        workers, peers = cast("WorkerClients", self), cast("PeerClients", self)
        settings = FrontSettings("west", "n1")
        callers = CallerAuth("west", "n1", lambda: Wall(1.0))
        sessions = FrontSessions("west", "n1", self.clock, workers, peers, lambda: Wall(1.0))
        self.plane = DataPlane(settings, self.clock, workers, peers, callers, sessions, tracer=self.tracer)
        self.route(Endpoint("a-1", "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY))

    def route(self, *endpoints: Endpoint, key: WorkloadKey = KEY, peers: tuple[PeerTrust, ...] = ()) -> None:
        local = [each for each in endpoints if each.kind is EndpointKind.LOCAL]
        workers = tuple(LocalWorker(each.assignment, key, "/socket", "") for each in local)
        self.plane.configure((Route(key, 1, endpoints),), (), workers, peers=peers)

    def configure(self, _listed: object) -> None:
        """Of workers and of peers."""

    def is_connecting(self, endpoint: Endpoint) -> bool:
        return False

    def rtt_s(self, endpoint: Endpoint) -> Seconds:
        return Seconds(0.0)

    async def infer(self, at: str | Endpoint, request: bytes, context: CallContext) -> bytes:
        self.errands.append(context)
        self.clock.advance(0.25)
        structlog.get_logger().info("inside")
        if self.fails:
            self.fails -= 1
            raise AttemptFailed(Refusal(Code.REPLICA_UNREACHABLE, "it went", "an answer"), was_sent=True)
        if context.attempt is not None and self.stages is not None:
            context.attempt.add_worker_stages({"stages": self.stages})
        return oip.ModelInferResponse().SerializeToString()

    async def ask(
        self, identity: Identity = TENANT, trace: str = "", *, id_: str = "r-1", name: str = "reading", **said: Any
    ) -> None:
        request = oip.ModelInferRequest(model_name=name, id=id_)
        await self.plane.infer(InboundCall(replace(identity), trace=trace, **said), request.SerializeToString())

    def spans(self, trace: str = TRACE) -> tuple[Span, ...]:
        found = self.tracer.find_spans(SpansAsked(7, trace))
        assert found.request == 7
        return found.spans


async def test_a45_a_tenant_switches_no_tracing_on() -> None:
    node = Node()
    await node.ask(TENANT, ASKED)
    await node.ask(TENANT)
    assert (node.told, node.spans(), node.tracer.traced_count) == ([], (), 0)
    assert [errand.attempt for errand in node.errands] == [None, None]
    with pytest.raises(ShoalError) as refused:
        await node.ask(GATEWAY, ASKED)
    assert refused.value.code is Code.ROLE_DENIED, "as a peer that asks for itself"
    assert not node.spans()


async def test_an_operator_asks_for_one_and_sees_where_its_time_went() -> None:
    node = Node()
    loop = asyncio.get_running_loop().time()
    node.stages = {
        "arrive": loop - 0.2,
        "queue": loop - 0.2,
        "decode": loop - 0.15,
        "run": loop - 0.05,
        "noise": loop,
        "batch": 4,
    }
    await node.ask(OPERATOR, ASKED, tenant="acme", id_="a\x00b\nc")
    *stages, attempt, request = node.spans()
    assert tuple(node.told) == node.spans()
    assert (request.name, request.kind, request.parent, request.code) == ("request", SpanKind.SERVER, PARENT, "")
    attributes = dict(request.attributes)
    assert attributes.pop("shoal.request").startswith("n1-"), "the front's own name: the client's is no printable ASCII"
    assert attributes == {"shoal.workload": "acme/reading", "shoal.origin": "n1", "shoal.attempts": "1"}
    assert (request.region, request.node, request.process, request.seconds) == ("west", "n1", "front", 0.25)
    assert (attempt.name, attempt.parent, attempt.attributes) == ("attempt", request.id, {"shoal.assignment": "a-1"})
    assert node.errands[0].attempt is not None
    assert node.errands[0].attempt.traceparent == str(TraceParent(TRACE, attempt.id, sampled=True))
    assert [(span.name, span.process, span.parent) for span in stages] == [
        (name, "worker", attempt.id) for name in ("arrive", "queue", "decode", "run")
    ]
    assert [span.seconds for span in stages] == pytest.approx([0.05, 0.0, 0.05, 0.1], abs=0.01)
    assert stages[0].began == attempt.began == 1.0
    assert [span.attributes for span in stages] == [{}, {}, {}, {"shoal.batch": "4"}]


@pytest.mark.parametrize(
    "stages",
    [
        {"arrive": 0.0},
        {"arrive": float("inf")},
        {"arrive": float("nan")},
        {"arrive": "soon"},
        {"arrive": 10**400, "batch": 10**400},
        {"a" * 100_000: 1.0},
        ["arrive", 1.0],
        7,
    ],
)
async def test_what_a_worker_cannot_have_done_is_left_out(stages: Any) -> None:
    node = Node()
    node.stages = stages
    await node.ask(OPERATOR, ASKED, tenant="acme")
    assert [span.name for span in node.spans()] == ["attempt", "request"]


async def test_a_share_is_traced_under_the_clients_own_trace() -> None:
    node = Node(ratio=1.0)
    await node.ask(TENANT, ASKED.removesuffix("01") + "00")
    assert [(span.name, span.trace) for span in node.spans()] == [("attempt", TRACE), ("request", TRACE)]
    await node.ask(TENANT, "no traceparent")
    own = node.told[-1]
    assert (own.parent, len(own.trace), own.trace == TRACE) == ("", 32, False)


async def test_another_fronts_word_counts_and_no_chance_beside_it() -> None:
    node = Node(ratio=1.0)
    forwarded: dict[str, Any] = {"hop": 1, "tenant": "acme", "origin": "edge-9"}
    await node.ask(GATEWAY, **forwarded)
    assert not node.told, "it was judged where it entered"
    await node.ask(GATEWAY, ASKED, **forwarded)
    assert node.spans()[-1].attributes["shoal.from.node"] == "gw"
    assert node.spans()[-1].attributes["shoal.origin"] == "edge-9"


async def test_a_request_of_another_region_tells_its_agreement_and_names_nobody() -> None:
    node = Node()
    key = WorkloadKey(GUEST_TENANT, "g-1")
    peer = PeerTrust("east", ("ca",), ("gw-east",), ("g-1",))
    node.route(Endpoint("a-1", "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY), key=key, peers=(peer,))
    stranger = Identity("east", Role.GATEWAY, "gw-east", Wall(0.0), Wall(2.0), "3")
    await node.ask(stranger, ASKED, hop=1, agreement="g-1", name="g-1")
    told = node.spans()[-1].attributes
    assert (told["shoal.from.region"], told["shoal.agreement"]) == ("east", "g-1")
    assert "shoal.from.node" not in told


async def test_each_attempt_is_shown_with_what_it_met() -> None:
    node = Node()
    gateway = Endpoint("g-1", "gw-east", EndpointKind.GATEWAY, "east:1", 1.0, EndpointState.READY, "east", "g-1")
    node.route(Endpoint("a-1", "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY), gateway)
    node.fails = 2
    with pytest.raises(ShoalError):
        await node.ask(OPERATOR, ASKED, tenant="acme")
    *attempts, request = node.spans()
    assert [span.code for span in attempts] == [Code.REPLICA_UNREACHABLE] * 2
    assert (request.code, request.attributes["shoal.attempts"]) == (Code.REPLICA_UNREACHABLE, "2")
    (abroad,) = [span.attributes for span in attempts if "shoal.to.region" in span.attributes]
    assert abroad == {"shoal.agreement": "g-1", "shoal.to.region": "east", "shoal.to.node": "gw-east"}


async def test_however_many_are_asked_for_there_is_a_bound() -> None:
    node = Node()
    node.clock.advance = lambda seconds: None  # type: ignore[method-assign]
    for _ in range(tracing.MAX_TRACES_PER_S + 3):
        await node.ask(OPERATOR, ASKED, tenant="acme")
    assert (node.tracer.traced_count, node.tracer.left_out_count) == (tracing.MAX_TRACES_PER_S, 3)
    assert len(node.spans()) == 2 * tracing.MAX_TRACES_PER_S
    other = TRACE[::-1]
    ManualClock.advance(node.clock, 1.0)
    await node.ask(OPERATOR, ASKED.replace(TRACE, other), tenant="acme")
    assert len(node.spans(other)) == 2


async def test_what_is_logged_meanwhile_carries_its_trace() -> None:
    node = Node()
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logged:
        await node.ask(OPERATOR, ASKED, tenant="acme")
        await node.ask(OPERATOR, tenant="acme")
    assert [line.get("trace_id") for line in logged if line["event"] == "inside"] == [TRACE, None]


async def test_a_share_is_a_share() -> None:
    node = Node(ratio=0.25)
    node.clock.advance = lambda seconds: None  # type: ignore[method-assign]
    for _ in range(800):
        await node.ask()
        ManualClock.advance(node.clock, 0.02)
    requests: Sequence[Span] = [span for span in node.told if span.name == "request"]
    assert 120 < len(requests) < 280
    assert len({span.trace for span in requests}) == len(requests)
    assert all(parse_traceparent(f"00-{span.trace}-{span.id}-01") for span in requests)
