"""The client of a region that has several coordinators, of which one leads."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from harness.crypto.pki import Authority
from harness.servers.api_stub import ApiStub, api_stubs
from shoal.cli.main import shoal
from shoal.cli.options import connect
from shoal.client import Context, Contexts, RegionClient, connection, region
from shoal.coordinator.api.authorise import RULES
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.v1 import operator_pb2


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[ApiStub]]:
    """The second one leads."""
    with api_stubs(Authority(tmp_path / "pki", "eu", CoordinatorClock().wall()), tmp_path / "ann") as found:
        yield found


def elect(coordinators: list[ApiStub], leader: ApiStub) -> None:
    for each in coordinators:
        each.leader = leader.address


@pytest.fixture
def contexts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the contexts."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def context(tmp_path: Path, three: list[ApiStub]) -> Context:
    """Knows one that follows."""
    return Context("eu", "eu", three[0].address, str(tmp_path / "ann"))


def test_who_asks_a_follower_is_answered_by_the_leader_and_goes_there_from_then_on(
    context: Context, three: list[ApiStub]
) -> None:
    with RegionClient(context) as api:
        assert api.get("regions").regions[0].leader == three[1].address
        assert api.create_token("agent", "a").id == three[1].address
        assert api.address == three[1].address
        assert not api.who_am_i().follows
        assert {each: bool(reply and reply.follows) for each, reply in api.coordinators().items()} == {
            three[0].address: True, three[1].address: False, three[2].address: True,
        }  # fmt: skip


def test_one_that_is_gone_is_passed_over_and_the_next_leader_is_found(context: Context, three: list[ApiStub]) -> None:
    first, second, third = three
    first.server.stop(None).wait()
    with RegionClient(replace(context, address=",".join(first.coordinators))) as api:
        assert api.address == second.address
        second.server.stop(None).wait()
        elect(three, third)
        assert api.create_token("agent", "a").id == third.address, "it was never sent to the one that is gone"
        assert third.created_tokens == ["a"]


def test_of_two_that_believe_to_lead_the_one_that_was_elected_last_does(context: Context, three: list[ApiStub]) -> None:
    three[2].leader, three[2].term = three[2].address, 2
    with RegionClient(replace(context, address=",".join(three[0].coordinators))) as api:
        assert api.address == three[2].address


def test_a_write_without_an_answer_is_not_made_again_a_read_is(context: Context, three: list[ApiStub]) -> None:
    leader = three[1]
    leader.lost_writes = 1
    with RegionClient(replace(context, address=",".join(leader.coordinators))) as api:
        with pytest.raises(ShoalError) as unknown:
            api.create_token("agent", "a")
        assert unknown.value.code is Code.COORDINATOR_UNREACHABLE
        assert api.create_token("agent", "b").id == leader.address
    assert leader.created_tokens == ["a", "b"]


@pytest.mark.parametrize("is_write", [False, True], ids=["a read", "a write"])
def test_who_gets_no_answer_in_time_is_told_of_whom_and_how_long_it_was(
    context: Context, three: list[ApiStub], is_write: bool
) -> None:
    """Not gRPC's own `Deadline Exceeded`; after a write, that it may have been carried out."""
    leader = three[1]
    with RegionClient(replace(context, address=leader.address), within_s=0.2) as api:
        leader.may_answer.clear()
        request = operator_pb2.CreateTokenRequest(name="a") if is_write else operator_pb2.GetRequest(kind="regions")
        with pytest.raises(ShoalError) as late:
            api._call("CreateToken" if is_write else "Get", request)
    said = re.fullmatch(
        rf"found: {leader.address} has not answered within ([\d.]+)(m?)s; wanted: an answer of the region's "
        r"coordinator; try: (.*) \(DEADLINE_EXCEEDED\)", str(late.value),
    )  # fmt: skip
    assert said is not None, str(late.value)
    waited_s = float(said[1]) / (1000 if said[2] else 1)
    assert 0.1 <= waited_s < 30
    assert ("may have been carried out" in said[3]) is is_write


def test_events_go_on_where_they_were_when_their_coordinator_is_lost(context: Context, three: list[ApiStub]) -> None:
    leader = three[1]
    leader.lost_writes = 1
    with RegionClient(replace(context, address=",".join(leader.coordinators))) as api:
        events = api.events(follow=True)
        seen = [next(events), next(events)]
        elect(three, three[2])
        seen += [next(events), next(events)]
    assert [(event.sequence, event.subject) for event in seen] == [
        (1, leader.address), (2, leader.address), (3, three[2].address), (4, three[2].address),
    ]  # fmt: skip


def test_events_of_an_only_coordinator_go_on_when_it_is_there_again(
    context: Context, three: list[ApiStub], capsys: pytest.CaptureFixture[str], contexts_folder: Path
) -> None:
    """Before, `shoal events --watch` ended there."""
    leader = three[1]
    leader.coordinators = [leader.address]
    leader.lost_writes = 1
    Contexts().save(replace(context, address=leader.address))
    with connect("eu", "") as api:
        events = api.events(follow=True)
        seen = [next(events), next(events)]
        assert capsys.readouterr().err == ""
        seen.append(next(events))
    assert [event.sequence for event in seen] == [1, 2, 3]
    lost, found = capsys.readouterr().err.splitlines()
    assert lost.startswith(leader.address)
    assert "(COORDINATOR_UNREACHABLE); the region is asked again" in lost
    assert found == "the region answers again"


def test_events_that_nobody_tells_any_longer_end_with_the_reason(
    context: Context, three: list[ApiStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "RESTART_TIMEOUT_S", 0.0)
    with RegionClient(replace(context, address=three[1].address)) as api:
        three[1].lost_writes = 1
        events = api.events(follow=True)
        next(events)
        three[1].server.stop(None).wait()
        with pytest.raises(ShoalError) as lost:
            list(events)
    assert lost.value.code is Code.COORDINATOR_UNREACHABLE


@dataclass
class ScriptedStream:
    """Of events; it fails after the last one."""

    # Numbers of its events.
    numbers: tuple[int, ...] = ()
    # Whether it lasts, though no event comes for a while.
    lasts: bool = False

    def is_active(self) -> bool:
        return self.lasts

    def __iter__(self) -> Iterator[operator_pb2.Event]:
        yield from (operator_pb2.Event(sequence=number) for number in self.numbers)
        raise grpc.RpcError


class Unsteady(RegionClient):
    """A region whose coordinator always says who leads, and gives these streams of events, one after the other."""

    def __init__(self, *streams: ScriptedStream) -> None:
        self.streams = list(streams)
        self.told: list[Refusal | None] = []
        self.on_outage = self.told.append
        operator = SimpleNamespace(Events=lambda request, timeout: self.streams.pop(0))
        self._connection: Any = SimpleNamespace(operator=operator, error_of=self._error_of)

    def who_am_i(self) -> operator_pb2.WhoAmIReply:
        return operator_pb2.WhoAmIReply()

    def _error_of(self, cause: grpc.RpcError, waited_s: float) -> ShoalError:
        return refuse(Code.COORDINATOR_UNREACHABLE, "the stream broke", "one that lasts")


@pytest.mark.parametrize("lasts", [True, False], ids=["one that lasts", "one with an event"])
def test_a_stream_that_ends_at_once_is_no_answer(monkeypatch: pytest.MonkeyPatch, lasts: bool) -> None:
    """Before, each told of another outage and of its end, four times a second."""
    monkeypatch.setattr(region, "RETRY_PAUSE_S", 0.0)
    good = ScriptedStream((2,), lasts)
    api = Unsteady(ScriptedStream((1,)), ScriptedStream(), ScriptedStream(), good, ScriptedStream((3,)))
    events = api.events(follow=True)
    assert [next(events).sequence, *api.told] == [1]
    assert next(events).sequence == 2
    assert [why and why.code for why in api.told] == [Code.COORDINATOR_UNREACHABLE, None]
    assert next(events).sequence == 3
    assert [why and why.code for why in api.told] == [Code.COORDINATOR_UNREACHABLE, None] * 2, "another one"


def test_a_stream_that_lasts_is_an_answer_before_its_next_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "RETRY_PAUSE_S", 0.0)
    api = Unsteady(ScriptedStream((1,)), ScriptedStream((), lasts=True), ScriptedStream((2,)))
    events = api.events(follow=True)
    next(events)
    next(events)
    assert [why is None for why in api.told] == [False, True, False, True]


def test_events_end_where_every_stream_does_though_somebody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, they went on for good."""
    monkeypatch.setattr(region, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(region, "RESTART_TIMEOUT_S", -1.0)
    api = Unsteady(ScriptedStream((1,)), ScriptedStream((2,)), ScriptedStream(), ScriptedStream((3,)))
    events, found = api.events(follow=True), list[int]()
    with pytest.raises(ShoalError, match="the stream broke"):
        found.extend(event.sequence for event in events)
    assert found == [1, 2], "an event begins the time anew"
    assert [why is None for why in api.told] == [False, True, False]


def test_what_may_be_asked_again_is_what_viewers_may_ask() -> None:
    viewers = {method.rpartition("/")[2] for method, roles in RULES.items() if Role.VIEWER in roles}
    assert viewers - {"Events"} == region.READ_ONLY_METHODS, "events go on by their number"


class Away(RegionClient):
    """A region of which no coordinator that leads is there for the first few asks."""

    def __init__(self, asks: int, code: Code = Code.COORDINATOR_UNREACHABLE) -> None:
        self.asks = asks
        self.code = code

    def get(self, kind: str, name: str = "", tenant: str = "") -> operator_pb2.GetReply:
        if self.asks:
            self.asks -= 1
            raise refuse(self.code, "nobody there", "the region's coordinator")
        return operator_pb2.GetReply()


@pytest.mark.parametrize("code", [Code.COORDINATOR_UNREACHABLE, Code.NOT_LEADER])
def test_who_looks_until_something_has_come_about_outlasts_the_absence_of_the_only_coordinator(
    monkeypatch: pytest.MonkeyPatch, code: Code
) -> None:
    """So that of a leader, however long the others take to elect one."""
    api = Away(2, code)
    assert api.poll("workloads") == operator_pb2.GetReply()
    assert api.asks == 0
    monkeypatch.setattr(region, "RESTART_TIMEOUT_S", -1.0)
    with pytest.raises(ShoalError) as too_long:
        Away(2, code).poll("workloads")
    assert too_long.value.code is code


def test_nobody_leads_for_a_while(context: Context, three: list[ApiStub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ELECTION_TIMEOUT_S", 0.5)
    for each in three:
        each.leader = ""
    with RegionClient(context) as api:
        with pytest.raises(ShoalError) as nobody:
            api.get("regions")
        assert nobody.value.code is Code.NOT_LEADER
        elect(three, three[0])
        assert api.get("regions").regions[0].leader == three[0].address


def test_the_command_lines_context_remembers_who_led(
    context: Context, three: list[ApiStub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    Contexts().save(context)
    with connect("eu", "") as api:
        api.get("regions")
    assert Contexts().get("eu").address == f"{three[1].address},{three[0].address}"
    with connect("eu", "") as api:
        assert api.address == three[1].address


def test_an_operators_folder_becomes_a_context_where_a_coordinator_takes_it(
    three: list[ApiStub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))

    def add(folder: str, address: str) -> str:
        words = ["context", "add", str(tmp_path / folder), "--coordinator", address]
        return CliRunner().invoke(shoal, words, catch_exceptions=False).output

    for folder, address, code in (
        ("nowhere", three[1].address, Code.SOURCE_UNREACHABLE),
        ("ann", "127.0.0.1:1", Code.COORDINATOR_UNREACHABLE),
    ):
        with pytest.raises(ShoalError) as refused:
            add(folder, address)
        assert refused.value.code is code
    assert Contexts().all() == ()
    assert "using eu: region eu as operator ann" in add("ann", three[1].address)
    assert Contexts().get() == Context("eu", "eu", three[1].address, str(tmp_path / "ann"))
