"""The client of a region that has several coordinators, of which one leads."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.pki import Authority
from harness.seats import Seat, seats
from shoal.cli.options import connected
from shoal.client import Context, Contexts, Region, region
from shoal.coordinator.api.authorise import RULES
from shoal.coordinator.clock import SystemClock
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.v1 import operator_pb2


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Seat]]:
    """The second one leads."""
    with seats(Authority(tmp_path / "pki", "eu", SystemClock().wall()), tmp_path / "ann") as found:
        yield found


def elect(coordinators: list[Seat], leader: Seat) -> None:
    for each in coordinators:
        each.leader = leader.address


@pytest.fixture
def context(tmp_path: Path, three: list[Seat]) -> Context:
    """Knows one that follows."""
    return Context("eu", "eu", three[0].address, str(tmp_path / "ann"))


def test_who_asks_a_follower_is_answered_by_the_leader_and_goes_there_from_then_on(
    context: Context, three: list[Seat]
) -> None:
    with Region(context) as api:
        assert api.get("regions").regions[0].leader == three[1].address
        assert api.create_token("agent", "a").id == three[1].address
        assert api.address == three[1].address
        assert not api.who_am_i().follows
        assert {each: bool(reply and reply.follows) for each, reply in api.coordinators().items()} == {
            three[0].address: True, three[1].address: False, three[2].address: True,
        }  # fmt: skip


def test_one_that_is_gone_is_passed_over_and_the_next_leader_is_found(context: Context, three: list[Seat]) -> None:
    first, second, third = three
    first.server.stop(None).wait()
    with Region(replace(context, address=",".join(first.all))) as api:
        assert api.address == second.address
        second.server.stop(None).wait()
        elect(three, third)
        assert api.create_token("agent", "a").id == third.address, "it was never sent to the one that is gone"
        assert third.made == ["a"]


def test_of_two_that_believe_to_lead_the_one_that_was_elected_last_does(context: Context, three: list[Seat]) -> None:
    three[2].leader, three[2].term = three[2].address, 2
    with Region(replace(context, address=",".join(three[0].all))) as api:
        assert api.address == three[2].address


def test_a_write_without_an_answer_is_not_made_again_a_read_is(context: Context, three: list[Seat]) -> None:
    leader = three[1]
    leader.lost = 1
    with Region(replace(context, address=",".join(leader.all))) as api:
        with pytest.raises(ShoalError) as unknown:
            api.create_token("agent", "a")
        assert unknown.value.code is Code.COORDINATOR_UNREACHABLE
        assert api.create_token("agent", "b").id == leader.address
    assert leader.made == ["a", "b"]


def test_events_go_on_where_they_were_when_their_coordinator_is_lost(context: Context, three: list[Seat]) -> None:
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


def test_what_may_be_asked_again_is_what_viewers_may_ask() -> None:
    viewers = {method.rpartition("/")[2] for method, roles in RULES.items() if Role.VIEWER in roles}
    assert viewers - {"Events"} == region.READS, "events go on by their number"


class Away(Region):
    """A region whose only coordinator is not there for the first few asks."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def get(self, kind: str, name: str = "", tenant: str = "") -> operator_pb2.GetReply:
        if self.asks:
            self.asks -= 1
            raise refuse(Code.COORDINATOR_UNREACHABLE, "nobody there", "the region's coordinator")
        return operator_pb2.GetReply()


def test_who_looks_until_something_has_come_about_outlasts_the_absence_of_the_only_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Away(2)
    assert api.look("workloads") == operator_pb2.GetReply()
    assert api.asks == 0
    monkeypatch.setattr(region, "ABSENT_S", -1.0)
    with pytest.raises(ShoalError) as too_long:
        Away(2).look("workloads")
    assert too_long.value.code is Code.COORDINATOR_UNREACHABLE


def test_nobody_leads_for_a_while(context: Context, three: list[Seat], monkeypatch: pytest.MonkeyPatch) -> None:
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
    context: Context, three: list[Seat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    Contexts().save(context)
    with connected("eu", "") as api:
        api.get("regions")
    assert Contexts().get("eu").address == f"{three[1].address},{three[0].address}"
    with connected("eu", "") as api:
        assert api.address == three[1].address
