"""Forwards without a task: at the front that sends them, and at the one that they come to."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from harness.fakes.fronts import ANSWER, OnePeer, OpenPeer
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.forward_auth import ForwardAuth, extras_of
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import AttemptFailed, PeerClients, WorkerClients
from shoal.agent.frames import FrameServer, InferAnswer, InferCall
from shoal.agent.ports import LocalWorker
from shoal.http2.grpc_messages import MessageBytes
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential, Forwarding, Front
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY, OTHER = WorkloadKey("acme", "reader"), WorkloadKey("acme", "other")
TOKEN = Credential("acme", "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b", Wall(4e9))
"""Of the bearer token `secret`."""
HERE = Endpoint("a-1", "receiver", EndpointKind.LOCAL, "", 1.0, EndpointState.READY)
THERE = replace(HERE, kind=EndpointKind.AGENT, address="127.0.0.1:1")


def request(model: str = "reader") -> bytes:
    message = oip.ModelInferRequest(model_name=model, raw_input_contents=[b"1234"])
    message.inputs.add(name="x", datatype="UINT8", shape=[4])
    return message.SerializeToString()


def agent(name: str) -> Identity:
    return Identity("west", Role.AGENT, name, Wall(0.0), Wall(4e9), "1")


class Entry:
    """Its forwards to `receiver`, which it signs."""

    def __init__(self) -> None:
        self.private, receiver = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.receiver = receiver.private_bytes_raw()
        self.auth = ForwardAuth("west", "entry", self.private.private_bytes_raw(), SystemClock().wall)
        self.auth.configure(Forwarding((Front("receiver", receiver.public_key().public_bytes_raw().hex()),)))
        self.key = self.private.public_key().public_bytes_raw().hex()
        self.identity = agent("entry")

    def call(self, workload: str = "reader", identity: Identity | None = None, **claims: str) -> InboundCall:
        said = {"tenant": "acme", "origin": "entry", "request_id": "r-1", **claims}
        proof = self.auth.sign("receiver", "acme", workload, "entry", "r-1", extras_of("", ""))
        return InboundCall(identity=identity or self.identity, hop=1, forward=proof, **said)  # type: ignore[arg-type]


class Receiver:
    """A front with a worker, to which `entry` may forward requests for KEY."""

    def __init__(self, folder: Path, entry: Entry) -> None:
        clock = SystemClock()
        self.calls: list[InferCall] = []
        self.ended: list[tuple[MessageBytes | None, Exception | None]] = []
        self.memo: dict[str, object] = {}
        self.server = FrameServer(folder / "w", "nonce", {}, on_infer=self._on_infer)
        self.workers, peers = WorkerClients(), cast("PeerClients", OnePeer())
        sessions = FrontSessions("west", "receiver", clock, self.workers, peers, clock.wall)
        callers = CallerAuth(
            "west", "receiver", clock.wall, ForwardAuth("west", "receiver", entry.receiver, clock.wall)
        )
        self.plane = DataPlane(FrontSettings("west", "receiver"), clock, self.workers, peers, callers, sessions)
        worker = LocalWorker("a-1", KEY, str(folder / "w"), "nonce")
        listed = Forwarding((Front("entry", entry.key, (KEY,)),))
        self.plane.configure((Route(KEY, 1, (HERE,)),), (), (worker,), forwarding=listed)

    def begin(self, call: InboundCall, asked: bytes | None = None) -> bool:
        direct = self.plane.prepare_direct(call, None, self.memo, asked or request())
        return direct is not None and direct.begin(lambda answer, error: self.ended.append((answer, error)))

    def _on_infer(self, call: InferCall) -> None:
        self.calls.append(call)
        call.answer((ANSWER,))


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[Entry, Receiver]]:
    entry = Entry()
    receiver = Receiver(tmp_path, entry)
    await receiver.server.start()
    assert await receiver.plane.infer(entry.call(), request()) == ANSWER  # it opens the connection to the worker
    yield entry, receiver
    await receiver.workers.close()
    await receiver.server.close()


async def test_a_forward_is_answered_and_counts_where_it_entered(ends: tuple[Entry, Receiver]) -> None:
    entry, receiver = ends
    assert receiver.begin(entry.call())
    await until(lambda: receiver.ended, 5.0, "the answer")
    assert receiver.ended == [(ANSWER, None)]
    assert receiver.plane.stats().ingress == ()
    assert receiver.plane.in_flight == 0


async def test_a58_a_forward_is_taken_once_whichever_way_it_goes(ends: tuple[Entry, Receiver]) -> None:
    entry, receiver = ends
    call = entry.call()
    assert receiver.begin(call)
    assert not receiver.begin(call)
    assert receiver.plane.in_flight == 1
    with pytest.raises(ShoalError) as refused:
        await receiver.plane.infer(call, request())
    assert refused.value.code is Code.MESSAGE_REPLAYED
    await until(lambda: receiver.ended, 5.0, "the answer")
    assert len(receiver.calls) == 2


async def test_a58_what_is_not_signed_so_is_left_to_be_refused(ends: tuple[Entry, Receiver]) -> None:
    """Also after requests of the same front that were in order: what is remembered of them allows nothing."""
    entry, receiver = ends
    assert receiver.begin(entry.call())
    await until(lambda: receiver.ended, 5.0, "the answer")
    tried = (
        (entry.call("other"), request()),  # signed for another workload
        (entry.call(), request("other")),  # for which nothing may be forwarded
        (entry.call(origin="other"), request()),
        (entry.call(request_id="r-2"), request()),
        (replace(entry.call(), tenant="umbrella"), request()),
        (replace(entry.call(), forward=""), request()),
        (replace(entry.call(), identity=agent("stranger")), request()),
        (replace(entry.call(), step="x"), request()),
    )
    for call, asked in tried:
        receiver.memo = {} if call.identity != entry.identity or call.tenant != "acme" else receiver.memo
        assert not receiver.begin(call, asked), call
        assert receiver.plane.stats().denied == (), "it is counted where it is refused"
    assert len(receiver.calls) == 2


def forwarding_front(peer: OpenPeer | None) -> tuple[DataPlane, OnePeer]:
    clock, peers = SystemClock(), OnePeer(peer)
    workers, clients = WorkerClients(), cast("PeerClients", peers)
    sessions = FrontSessions("west", "entry", clock, workers, clients, clock.wall)
    callers = CallerAuth("west", "entry", clock.wall)
    plane = DataPlane(FrontSettings("west", "entry"), clock, workers, clients, callers, sessions)
    plane.configure((Route(KEY, 1, (THERE,)),), (TOKEN,), ())
    return plane, peers


CLIENT = InboundCall(bearer="secret", request_id="c-7")


async def test_a_request_goes_to_the_only_replica_elsewhere() -> None:
    peer, ended = OpenPeer(), list[tuple[MessageBytes | None, Exception | None]]()
    plane, peers = forwarding_front(peer)
    direct = plane.prepare_direct(CLIENT, 5.0, {}, request())
    assert direct is not None
    assert direct.begin(lambda answer, error: ended.append((answer, error)))
    ((pending, context),) = peer.sent
    assert ({*peers.payers}, context.payer) == ({"acme"}, "acme")
    assert (context.tenant, context.origin, context.request_id, context.workload) == ("acme", "entry", "c-7", "reader")
    assert 4.0 < context.remaining_s <= 5.0
    pending.set_result(InferAnswer(ANSWER, {}))
    assert ended == [(ANSWER, None)]
    ((origin, counted),) = ((each.origin, each.answered) for each in plane.stats().ingress)
    assert (origin, counted, plane.in_flight) == ("entry", 1, 0)


async def test_requests_of_a_workload_with_replicas_go_to_both() -> None:
    peer = OpenPeer()
    plane, _ = forwarding_front(peer)
    other = replace(THERE, assignment="a-2", node="third")
    plane.configure((Route(KEY, 1, (THERE, other)),), (TOKEN,), ())
    for _ in range(40):
        direct = plane.prepare_direct(CLIENT, 5.0, {}, request())
        assert direct is not None
        assert direct.begin(lambda *_: None)
        peer.sent[-1][0].set_result(InferAnswer(ANSWER, {}))
    assert {endpoint.assignment for endpoint in peer.asked} == {"a-1", "a-2"}
    assert plane.in_flight == 0


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_failed_forward_goes_on_as_any_other(at_once: bool) -> None:
    peer, ended = OpenPeer(), list[tuple[MessageBytes | None, Exception | None]]()
    plane, peers = forwarding_front(peer)
    lost = AttemptFailed(Refusal(Code.REPLICA_UNREACHABLE, "no connection", "one", "retry"), was_sent=False)
    peer.refusal = lost if at_once else None
    direct = plane.prepare_direct(CLIENT, 5.0, {}, request())
    assert direct is not None
    assert direct.begin(lambda answer, error: ended.append((answer, error)))
    if not at_once:
        peer.sent[0][0].set_exception(lost)
    await until(lambda: ended, 10.0, "the outcome")
    ((answer, error),) = ended
    assert (answer == ANSWER, peers.asked) in ((True, 1), (False, 0))
    assert peers.task_payers == peers.asked * ["acme"]
    assert (answer is None) is isinstance(error, ShoalError)
    assert plane.in_flight == 0


async def test_a_request_that_has_to_wait_is_of_the_same_payer() -> None:
    plane, peers = forwarding_front(None)
    assert await plane.infer(replace(CLIENT, remaining_s=Seconds(5.0)), request()) == ANSWER
    assert peers.task_payers == ["acme"]


async def test_whose_client_goes_is_withdrawn() -> None:
    peer = OpenPeer()
    plane, _ = forwarding_front(peer)
    direct = plane.prepare_direct(CLIENT, 5.0, {}, request())
    assert direct is not None
    assert direct.begin(lambda *_: pytest.fail("nobody is there"))
    direct.cancel()
    direct.cancel()
    assert (peer.withdrawn, plane.in_flight) == (1, 0)


async def test_without_an_open_connection_no_request_is_direct() -> None:
    plane, _ = forwarding_front(None)
    assert plane.prepare_direct(CLIENT, 5.0, {}, request()) is None
