"""The client of a region that has several coordinators, of which one leads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.pki import Authority
from harness.ports import free_ports
from shoal.cli.options import connected
from shoal.client import Context, Contexts, Region, region
from shoal.coordinator.clock import SystemClock
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.v1 import operator_pb2, operator_pb2_grpc
from shoal.wire.status import grpc_status, trailers

ELSEWHERE = Refusal(Code.NOT_LEADER, "this coordinator follows", "the leader", "call it there")


@dataclass
class Coordinator(operator_pb2_grpc.OperatorServicer):
    """leader: as it says; its own address where it leads. lost: answers nothing to so many writes that it makes."""

    address: str
    server: Any
    all: list[str]
    leader: str = ""
    lost: int = 0
    term: int = 1
    made: list[str] = field(default_factory=list)

    def WhoAmI(self, request: operator_pb2.WhoAmIRequest, context: Any) -> operator_pb2.WhoAmIReply:
        leads = self.leader == self.address
        leader = "" if leads else self.leader
        return operator_pb2.WhoAmIReply(leader=leader, follows=not leads, coordinators=self.all, term=self.term)

    def Get(self, request: operator_pb2.GetRequest, context: Any) -> operator_pb2.GetReply:
        self._check(context)
        return operator_pb2.GetReply(regions=[operator_pb2.RegionView(name="eu", leader=self.address)])

    def CreateToken(self, request: operator_pb2.CreateTokenRequest, context: Any) -> operator_pb2.CreateTokenReply:
        self._check(context)
        self.made.append(request.name)
        if self.lost:
            self.lost -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return operator_pb2.CreateTokenReply(id=self.address)

    def Events(self, request: operator_pb2.EventsRequest, context: Any) -> Iterator[operator_pb2.Event]:
        for sequence in range(request.after + 1, request.after + 3):
            yield operator_pb2.Event(sequence=sequence, subject=self.address)
        if self.lost:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def _check(self, context: Any) -> None:
        if self.leader != self.address:
            context.set_trailing_metadata(trailers(ELSEWHERE))
            context.abort(grpc_status(ELSEWHERE.code), str(ELSEWHERE))


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Coordinator]]:
    """The second one leads."""
    authority = Authority(tmp_path / "pki", "eu", SystemClock().wall())
    certificate, key, ca = authority.issue(Role.COORDINATOR, "coordinator").read()
    operator = authority.issue(Role.OPERATOR, "ann")
    (tmp_path / "ann").mkdir()
    for name, content in zip(("cert.pem", "key.pem", "ca.pem"), operator.read(), strict=True):
        (tmp_path / "ann" / name).write_bytes(content)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    found = []
    for address in addresses:
        server = grpc.server(ThreadPoolExecutor(4))
        one = Coordinator(address, server, addresses, leader=addresses[1])  # type: ignore[abstract]  # no more is called
        operator_pb2_grpc.add_OperatorServicer_to_server(one, server)
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        server.add_secure_port(address, credentials)
        server.start()
        found.append(one)
    yield found
    for one in found:
        one.server.stop(None).wait()


def elect(coordinators: list[Coordinator], leader: Coordinator) -> None:
    for each in coordinators:
        each.leader = leader.address


@pytest.fixture
def context(tmp_path: Path, three: list[Coordinator]) -> Context:
    """Knows one that follows."""
    return Context("eu", "eu", three[0].address, str(tmp_path / "ann"))


def test_who_asks_a_follower_is_answered_by_the_leader_and_goes_there_from_then_on(
    context: Context, three: list[Coordinator]
) -> None:
    with Region(context) as api:
        assert api.get("regions").regions[0].leader == three[1].address
        assert api.create_token("agent", "a").id == three[1].address
        assert api.address == three[1].address
        assert not api.who_am_i().follows
        assert {each: bool(reply and reply.follows) for each, reply in api.coordinators().items()} == {
            three[0].address: True, three[1].address: False, three[2].address: True,
        }  # fmt: skip


def test_one_that_is_gone_is_passed_over_and_the_next_leader_is_found(
    context: Context, three: list[Coordinator]
) -> None:
    first, second, third = three
    first.server.stop(None).wait()
    with Region(replace(context, address=",".join(first.all))) as api:
        assert api.address == second.address
        second.server.stop(None).wait()
        elect(three, third)
        assert api.create_token("agent", "a").id == third.address, "it was never sent to the one that is gone"
        assert third.made == ["a"]


def test_of_two_that_believe_to_lead_the_one_that_was_elected_last_does(
    context: Context, three: list[Coordinator]
) -> None:
    three[2].leader, three[2].term = three[2].address, 2
    with Region(replace(context, address=",".join(three[0].all))) as api:
        assert api.address == three[2].address


def test_a_write_without_an_answer_is_not_made_again_a_read_is(context: Context, three: list[Coordinator]) -> None:
    leader = three[1]
    leader.lost = 1
    with Region(replace(context, address=",".join(leader.all))) as api:
        with pytest.raises(ShoalError) as unknown:
            api.create_token("agent", "a")
        assert unknown.value.code is Code.COORDINATOR_UNREACHABLE
        assert api.create_token("agent", "b").id == leader.address
    assert leader.made == ["a", "b"]


def test_events_go_on_where_they_were_when_their_coordinator_is_lost(
    context: Context, three: list[Coordinator]
) -> None:
    leader = three[1]
    leader.lost = 1
    with Region(replace(context, address=",".join(leader.all))) as api:
        events = api.events(follow=True)
        seen = [next(events), next(events)]
        elect(three, three[2])
        seen += [next(events), next(events)]
    assert [(event.sequence, event.subject) for event in seen] == [
        (1, leader.address), (2, leader.address), (3, three[2].address), (4, three[2].address),
    ]  # fmt: skip


def test_nobody_leads_for_a_while(context: Context, three: list[Coordinator], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEADERLESS_S", 0.5)
    for each in three:
        each.leader = ""
    with Region(context) as api:
        with pytest.raises(ShoalError) as nobody:
            api.get("regions")
        assert nobody.value.code is Code.NOT_LEADER
        elect(three, three[0])
        assert api.get("regions").regions[0].leader == three[0].address


def test_the_command_lines_context_remembers_who_led(
    context: Context, three: list[Coordinator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    Contexts().save(context)
    with connected("eu", "") as api:
        api.get("regions")
    assert Contexts().get("eu").address == f"{three[1].address},{three[0].address}"
    with connected("eu", "") as api:
        assert api.address == three[1].address
