"""A04: node A speaks as B, in payloads and signatures on a real coordinator's link, in topics and client ids at a real
broker.

What the coordinator itself drops of a broker's traffic is `test_a11_a04_..` of the MQTT link.
"""

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from harness.clients.mqtt import NOT_AUTHORIZED, MqttPeer
from harness.cluster.agents import api
from harness.cluster.coordinator import REGION, CoordinatorServer, channel
from harness.crypto.pki import Authority
from harness.report import record
from harness.servers.mosquitto import broker, tls
from shoal.coordinator.clock import CoordinatorClock
from shoal.types import topics
from shoal.types.assignment import Status
from shoal.types.codes import Code
from shoal.types.device import Device, DeviceKind, EnergySource, Node, Reading, Role
from shoal.types.link import FromAgent, Hello, Receipts, Refused, ToAgent, Welcome
from shoal.types.receipt import Rates, Receipt
from shoal.types.topics import DOWN, UP, Channel
from shoal.types.units import Bytes, Seconds, Wall, Watts
from shoal.v1 import link_pb2, link_pb2_grpc, operator_pb2
from shoal.wire import nouns
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.member_files import Enrolled
from shoal.wire.signing import sign

CLOCK = CoordinatorClock()
CPU = Device("cpu0", DeviceKind.CPU, "v", "m", "linux", "1", "ort 1", "CPUExecutionProvider", Bytes(2**30))


def node(name: str, role: Role = Role.AGENT, region: str = REGION) -> Node:
    return Node(
        name, region, role, {}, "0", "linux", "x86_64", Bytes(2**30), Bytes(2**30), (CPU,),
        "127.0.0.1:1", "127.0.0.1:4", f"boot-{name}",
    )  # fmt: skip


def hello(of: Node) -> Hello:
    return Hello(of, f"nonce-{of.name}", None, 1, Wall(CLOCK.wall()))


class Session:
    """One stream that says whatever it is told to."""

    def __init__(self, opened: grpc.Channel) -> None:
        self._said: queue.Queue[FromAgent | None] = queue.Queue()
        self._stream: Any = link_pb2_grpc.AgentLinkStub(opened).Session(self._messages(), timeout=30)

    def say(self, message: FromAgent) -> None:
        self._said.put(message)

    def end(self) -> None:
        self._said.put(None)

    def hears(self) -> ToAgent:
        return nouns.to_agent_from_wire(next(self._stream))

    def is_refused(self) -> Refused:
        """The next refusal; desired sets may come before it."""
        while not isinstance(heard := self.hears(), Refused):
            pass
        return heard

    def _messages(self) -> Iterator[link_pb2.FromAgent]:
        while (message := self._said.get()) is not None:
            yield nouns.from_agent_to_wire(message)


@contextmanager
def session(coordinator: CoordinatorServer, caller: Enrolled) -> Iterator[tuple[Session, Welcome]]:
    with channel(coordinator.link, caller) as opened:
        found = Session(opened)
        found.say(hello(node(caller.name)))
        welcome = found.hears()
        assert isinstance(welcome, Welcome)
        yield found, welcome
        found.end()


def status(name: str, epoch: int, sequence: int) -> Status:
    wall = CLOCK.wall()
    reading = Reading("cpu0", Bytes(2**29), 0.1, 50.0, Watts(10.0), 1.0, wall)
    return Status(name, epoch, sequence, True, None, (), (), (reading,), (), wall, True)


def receipt(name: str) -> Receipt:
    rates = Rates(
        {"fp32": 1e10}, {"fp32": 1e10}, 1e10, 1e10, Seconds(1e-5), Seconds(1e-6), 1e9, Watts(5.0), Watts(20.0),
        EnergySource.ESTIMATED,
    )  # fmt: skip
    return Receipt(
        name, "cpu0", "CPUExecutionProvider", "1", "ort 1", ("fp32",), (), rates, Bytes(2**29), 0.1, CLOCK.wall(),
        Seconds(1.0), False, "probe",
    )  # fmt: skip


def sign_receipt(of: Receipt, key: Enrolled, name: str) -> Receipts:
    """By `key`, as if by the node `name`."""
    private = load_pem_private_key(key.key_pem, password=None)
    assert isinstance(private, EllipticCurvePrivateKey)
    return Receipts((nouns.make_signed_receipt(of, sign(private, REGION, name, "receipt", nouns.encode(of))),))


def view(coordinator: CoordinatorServer, name: str) -> operator_pb2.NodeView:
    with api(coordinator) as operator:
        return operator.get("nodes", name).nodes[0]


def test_a04_a_hello_of_another_node_role_or_region(coordinator: CoordinatorServer) -> None:
    caller = coordinator.certificate(Role.AGENT, "node-a")
    lies = (node("node-b"), node("node-a", Role.GATEWAY), node("node-a", region="us"))
    for lie in lies:
        with channel(coordinator.link, caller) as opened:
            lying = Session(opened)
            lying.say(hello(lie))
            with pytest.raises(grpc.RpcError) as error:
                lying.hears()
            assert refusal_of(error.value).code is Code.NODE_MISMATCH
    record("A04", "P", len(lies), what="hello")


def test_a04_what_is_said_of_another_node_counts_for_nobody(coordinator: CoordinatorServer) -> None:
    """A node that lies goes on as itself; the one it spoke of is as it was."""
    liar, victim = (coordinator.certificate(Role.AGENT, name) for name in ("liar", "victim"))
    with session(coordinator, victim) as (honest, its), session(coordinator, liar) as (lying, mine):
        honest.say(status("victim", its.epoch, 1))
        honest.say(sign_receipt(receipt("victim"), victim, "victim"))
        lying.say(status("victim", its.epoch, 2))
        assert lying.is_refused().refusal.code is Code.NODE_MISMATCH
        before = view(coordinator, "victim")

        told: dict[str, tuple[FromAgent, Code]] = {
            "another's status under my epoch": (status("victim", mine.epoch, 3), Code.NODE_MISMATCH),
            "another's receipt, signed by me as me": (
                sign_receipt(receipt("victim"), liar, "liar"),
                Code.NODE_MISMATCH,
            ),
            "another's receipt, signed by me as it": (
                sign_receipt(receipt("victim"), liar, "victim"),
                Code.SIGNATURE_INVALID,
            ),
            "another's receipt and signature": (
                sign_receipt(receipt("victim"), victim, "victim"),
                Code.SIGNATURE_INVALID,
            ),
            "my receipt, signed by another": (sign_receipt(receipt("liar"), victim, "liar"), Code.SIGNATURE_INVALID),
        }
        for what, (lie, code) in told.items():
            lying.say(lie)
            refused = lying.is_refused()
            assert (refused.refusal.code, refused.fatal) == (code, False), what
        after = view(coordinator, "victim")
        assert (after.node, after.reason.code) == (before.node, before.reason.code)
        with api(coordinator) as operator:
            rows = {row.node: row for row in operator.get("devices").devices}
        assert not rows["liar"].HasField("receipt"), "nothing that it said of a receipt was kept"
        lying.say(sign_receipt(receipt("liar"), liar, "liar"))
        honest.say(status("victim", its.epoch, 2))
    record("A04", "P", len(told) + 1, what="status and receipt")


def test_a04_topics_and_client_ids_of_another_node(tmp_path: Path) -> None:
    """Rights go by the certificate's name, whatever the client calls itself; who takes another's client id throws it
    out for a moment, and hears and says nothing more for it."""
    authority = Authority(tmp_path / "ca", "home", time.time())  # noqa: TID251 - the broker's own clock
    with broker(tmp_path / "mqtt", authority, nodes=("edge-1", "edge-2")) as served:
        secrets = tls(authority.issue(Role.AGENT, "edge-2"))
        with (
            MqttPeer(served.port, tls(authority.issue(Role.COORDINATOR, "coordinator")), "coordinator") as above,
            MqttPeer(served.port, secrets, "edge-2-17") as victim,
        ):
            theirs = [topics.of_node("home", "edge-2", one) for one in DOWN]
            for topic in theirs:
                assert victim.subscribe(topic) != NOT_AUTHORIZED
            for one in UP:
                assert above.subscribe(topics.all_nodes("home", one)) != NOT_AUTHORIZED
            with MqttPeer(served.port, tls(authority.issue(Role.AGENT, "edge-1")), "edge-2-17") as thief:
                assert victim.ended.wait(5.0), "the broker throws out the first holder of an id"
                for topic in theirs:
                    assert above.publish(topic, b"secret") in (0, 16)
                    assert thief.subscribe(topic) == NOT_AUTHORIZED
                for one in Channel:
                    assert thief.publish(topics.of_node("home", "edge-2", one), b"lie") == NOT_AUTHORIZED
                with MqttPeer(served.port, secrets, "edge-2-18") as back:
                    assert back.publish(topics.of_node("home", "edge-2", Channel.STATUS), b"true") == 0
                assert above.wait_received(1) == [(topics.of_node("home", "edge-2", Channel.STATUS), b"true")]
                assert thief.received == []
    record("A04", "P", len(theirs) + len(Channel), what="topics and client id", delivered=0)
