"""Callers that hang up in the middle of a call: what was begun is finished, remembered and audited (I6)."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from harness.cluster.coordinator import REGION, CoordinatorServer, channel, operator
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.device import Node, Role
from shoal.types.link import Hello
from shoal.types.units import Bytes, Wall
from shoal.v1 import link_pb2, link_pb2_grpc
from shoal.v1 import operator_pb2 as api
from shoal.wire import nouns

ROUNDS = 60
AT_ONCE = 12


def test_each_change_has_its_audit_entry_though_its_caller_left(coordinator: CoordinatorServer) -> None:
    admin = coordinator.certificate(Role.OPERATOR, "hasty")
    stub = operator(coordinator.link, admin)

    def tokens() -> int:
        return len(stub.Get(api.GetRequest(kind="tokens"), timeout=10).tokens)

    def entries() -> int:
        (check,) = [one for one in stub.Doctor(api.DoctorRequest(), timeout=10).checks if "audit" in one.name]
        assert check.ok, check
        return int(check.name.split()[0])

    made, noted, answered = tokens(), entries(), 0
    request = api.CreateTokenRequest(role="agent", valid_s=600)
    for number in range(ROUNDS):
        calls: list[Any] = [stub.CreateToken.future(request, timeout=10) for _ in range(AT_ONCE)]
        answered += _left_early(calls)
        if number >= 5 and tokens() - made > answered:
            break
    else:
        pytest.fail("no caller left between a change and its answer: nothing was tried")
    wait_until(lambda: tokens() - made == entries() - noted, 10, "as many audit entries as tokens")
    assert tokens() - made > answered


def test_a_node_that_hangs_up_in_its_hello_is_welcome_later(coordinator: CoordinatorServer) -> None:
    agent = coordinator.certificate(Role.AGENT, "hasty")
    admin = operator(coordinator.link, coordinator.certificate(Role.OPERATOR, "watcher"))
    with channel(coordinator.link, agent) as opened:
        stub = link_pb2_grpc.AgentLinkStub(opened)
        for number in range(ROUNDS):
            call: Any = stub.Session(iter([_hello()]))
            for _ in range(number % 4):
                admin.WhoAmI(api.WhoAmIRequest(), timeout=10)
            call.cancel()
        wait_until(lambda: _is_welcome(stub), 15, "a hello is welcomed")


def _is_welcome(stub: link_pb2_grpc.AgentLinkStub) -> bool:
    held = threading.Event()

    def messages() -> Iterator[link_pb2.FromAgent]:
        yield _hello()
        held.wait(10)

    call: Any = stub.Session(messages())
    try:
        return bool(next(call).HasField("welcome"))
    finally:
        held.set()
        call.cancel()


def _left_early(calls: list[Any]) -> int:
    """Hangs up on all once the first is answered; how many were answered."""
    done = threading.Event()
    for call in calls:
        call.add_done_callback(lambda _: done.set())
    assert done.wait(10)
    for call in calls:
        call.cancel()
    return sum(_is_answered(call) for call in calls)


def _is_answered(call: Any) -> bool:
    try:
        call.result(timeout=10)
    except (grpc.FutureCancelledError, grpc.RpcError):
        return False
    return True


def _hello() -> link_pb2.FromAgent:
    node = Node(
        "hasty", REGION, Role.AGENT, {}, "0", "linux", "x86_64", Bytes(2**30), Bytes(2**30), (),
        "127.0.0.1:1", "127.0.0.1:4", "boot-1",
    )  # fmt: skip
    return nouns.from_agent_to_wire(Hello(node, "nonce-hasty", None, 1, Wall(CoordinatorClock().wall())))
