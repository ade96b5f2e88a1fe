"""Since when nodes, tokens and agreements are known: over restarts, and with records of other versions."""

from collections.abc import AsyncIterator
from dataclasses import MISSING, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from harness.builders.coordinator_core import node
from harness.builders.negotiation import award, offer, solicitation
from harness.fakes.region import FakeAgent, RegionFixture
from shoal.coordinator import codec
from shoal.coordinator.api.views import node_view, token_view
from shoal.coordinator.controllers.fleet.records import NODES, NodeRecord
from shoal.coordinator.controllers.identity.enrolment import TOKENS, Enrolment, Token
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.core.negotiation.hold import GrantedBid
from shoal.coordinator.core.negotiation.model import Awarding, OriginAgreement, Withdrawing
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import Transaction
from shoal.types.agreement import ServiceState
from shoal.types.codes import Code
from shoal.types.link import Welcome
from shoal.types.units import UNKNOWN_TIME, Elapsed, Seconds, Wall
from shoal.wire.enrol import new_key, request_pem

AT = Wall(1_700_000_000.25)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


def without(kind: type[Any], name: str) -> type[Any]:
    """The stored class as a version declares it that has no such field."""
    hints = get_type_hints(kind)
    kept = [each for each in fields(kind) if each.name != name]
    declared = [(each.name, hints[each.name], *(() if each.default is MISSING else (each.default,))) for each in kept]
    return make_dataclass(kind.__name__, declared, frozen=True, slots=True)


def joined_at(world: RegionFixture, node: str = "edge-1") -> float:
    """As operators see it."""
    return node_view(world.region.fleet.fleet.nodes[node], None, None).joined_at


def origin_agreement(**changes: Any) -> OriginAgreement:
    now, lease_s = Elapsed(0.0), Seconds(30.0)
    return OriginAgreement(
        *("g-1", offer(), (), lease_s, Elapsed(now + lease_s), Elapsed(now + lease_s), 3, "n", now, now, now),
        *(ServiceState.READY, now),
        **changes,
    )


async def end_session(world: RegionFixture, agent: FakeAgent) -> None:
    await world.region.fleet.on_close(agent.name, agent.epoch)


async def test_a_node_keeps_the_time_at_which_it_first_joined(tmp_path: Path) -> None:
    world = await RegionFixture.open(tmp_path / "first")
    agent = FakeAgent(world, "edge-1")
    first = world.clock.wall()
    assert isinstance(await agent.connect(), Welcome)
    assert joined_at(world) == first
    world.clock.advance(3600.0)
    await end_session(world, agent)
    assert isinstance(await agent.connect(), Welcome)
    assert joined_at(world) == first
    fleet = world.region.fleet
    await fleet.cordon("edge-1", True, "ann")
    await fleet.label("edge-1", {"site": "shop"}, (), "ann")
    await fleet.revoke("edge-1", "lost", "ann")
    await world.store.close()

    later = await RegionFixture.open(tmp_path / "first", earlier=world)
    assert joined_at(later) == first, "read back before it says hello"
    later.clock.advance(60.0)
    again = FakeAgent(later, "edge-1", boot="boot-2")
    assert isinstance(await again.connect(), Welcome)
    assert joined_at(later) == first, "it was revoked and has joined again"
    await end_session(later, again)
    await later.region.fleet.forget("edge-1", "ann")
    later.clock.advance(60.0)
    assert isinstance(await again.connect(), Welcome)
    assert joined_at(later) == later.clock.wall(), "an operator has deleted it: it is new"
    await later.store.close()


async def test_nobody_makes_up_when_a_node_of_before_joined(tmp_path: Path) -> None:
    """Not at its next session either: its record is older than that."""
    world = await RegionFixture.open(tmp_path / "first")
    agent = FakeAgent(world, "edge-1")
    record = NodeRecord(agent.node, 3, False, world.clock.wall(), declared={})
    older = codec.dump(codec.load(without(NodeRecord, "joined_at"), codec.dump(record)))
    assert b"joined_at" not in older
    await world.store.commit(Transaction({NODES + "edge-1": older}))
    await world.store.close()
    later = await RegionFixture.open(tmp_path / "first", earlier=world)
    assert joined_at(later) == UNKNOWN_TIME
    assert isinstance(await FakeAgent(later, "edge-1").connect(), Welcome)
    assert joined_at(later) == UNKNOWN_TIME
    await later.store.close()


async def test_a_token_keeps_the_time_at_which_it_was_made(world: RegionFixture, tmp_path: Path) -> None:
    clock, store = world.clock, world.store
    authority = FileAuthority.open(tmp_path / "ca", "eu", wall=clock.wall(), may_create=True)
    events = EventLog(store, clock, kept=1000, audit_kept=1000)
    await events.start()
    enrolment = Enrolment(ControllerContext("eu", store, events, clock, world.ids, NoMeter()), authority)
    made = clock.wall()
    joins = await enrolment.create("agent", "edge-1", 3600.0, "ann")
    clock.advance(60.0)
    bears = await enrolment.create("bearer", "shop", 3600.0, "ann")
    await enrolment.redeem(joins.text, request_pem(new_key(), "edge-1"), "edge-1", peer="")
    views = {token.id: token_view(token) for token in await enrolment.tokens()}
    assert views[joins.id].created_at == made
    assert views[joins.id].used_at == views[bears.id].created_at == clock.wall()

    (record,) = [each for each in await store.scan(TOKENS) if codec.load(Token, each.value).id == bears.id]
    older = codec.dump(codec.load(without(Token, "created_at"), record.value))
    await store.commit(Transaction({record.key: older}))
    (found,) = [token for token in await enrolment.tokens() if token.id == bears.id]
    assert token_view(found) == token_view(replace(codec.load(Token, record.value), created_at=UNKNOWN_TIME))


STORED = (
    (NodeRecord(node("edge-1"), 3, True, AT, declared={"site": "shop"}, joined_at=AT), "joined_at"),
    (Token("ab", "abcd", "agent", "edge-1", "ann", AT, AT, "edge-1", created_at=AT), "created_at"),
    (Awarding(offer(), award(), "asked", Elapsed(9.0), Elapsed(2.0), AT), "awarded_at"),
    (Withdrawing(offer(), "g-1", Elapsed(9.0), Elapsed(2.0), Code.HOLD_EXPIRED, AT), "awarded_at"),
    (origin_agreement(awarded_at=AT), "awarded_at"),
    (GrantedBid(solicitation(), offer(), award(), (), (), 3, "n", Elapsed(35.0), granted_at=AT), "granted_at"),
)
"""Records that say since when, and in which field."""


@pytest.mark.parametrize(("stored", "name"), STORED, ids=[type(each).__name__ for each, _ in STORED])
def test_versions_with_and_without_the_time_read_each_others_records(stored: Any, name: str) -> None:
    older = without(type(stored), name)
    read = codec.load(older, codec.dump(stored))
    assert all(getattr(read, each.name) == getattr(stored, each.name) for each in fields(older))
    assert codec.load(type(stored), codec.dump(read)) == replace(stored, **{name: UNKNOWN_TIME})


def test_nobody_makes_up_whether_a_bid_of_an_older_version_served() -> None:
    stored = GrantedBid(solicitation(), offer(), award(), (), (), 3, "n", Elapsed(35.0), has_served=True)
    older = codec.load(without(GrantedBid, "has_served"), codec.dump(stored))
    assert codec.load(GrantedBid, codec.dump(older)) == replace(stored, has_served=None)
    assert codec.load(GrantedBid, codec.dump(stored)) == stored
