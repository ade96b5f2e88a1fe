"""A62: labels and prices that a device declares of itself move nothing; those of its token and of operators do."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fakes.region import FakeAgent, RegionFixture
from shoal.coordinator import codec
from shoal.coordinator.controllers.fleet.records import GRANTS, NODES, NodeRecord
from shoal.coordinator.controllers.identity.enrolment import Enrolment
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.region.region import NoMeter, RegionalCoordinator
from shoal.coordinator.core.fleet.labels import MAX_LABELS, LabelGrant, check_labels, effective_labels
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import Transaction
from shoal.policies.resolve import node_price
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.link import Welcome
from shoal.wire.enrol import new_key, request_pem

RESTRICTED = """apiVersion: shoal/v1
kind: Policy
metadata: {name: fast}
spec: {optimize: {latency: 1.0}, require: {where: 'has(node.labels.trusted) && node.labels.trusted == "yes"'}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {name: reader}
spec: {model: {source: ocr}, policy: fast}
"""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


def declaring(world: RegionFixture, name: str, labels: Mapping[str, str]) -> FakeAgent:
    """An agent that declares labels of its own."""
    return FakeAgent(world, name, labels=labels)


def labels_of(region: RegionalCoordinator, node: str) -> Mapping[str, str]:
    return region.fleet.fleet.nodes[node].node.labels


async def test_a62_a_restricted_workload_goes_to_no_node_that_only_says_so_itself(world: RegionFixture) -> None:
    await world.push()
    liar = declaring(world, "liar", {"trusted": "yes", "price": "0.001 USD/h", "self.trusted": "yes"})
    assert isinstance(await liar.connect(), Welcome)
    assert not (await world.region.documents.apply([("w.yaml", RESTRICTED)], {}, "", "test")).plan_result.problems
    await world.step()
    found = labels_of(world.region, "liar")
    assert dict(found) == {"self.trusted": "yes", "self.price": "0.001 USD/h", "self.self.trusted": "yes"}
    assert node_price(found, None) is None
    desired = world.region.workloads.desired["liar"]
    assert not desired.assignments, "it got the workload"
    assert not desired.pins, "it got the model"

    await world.region.fleet.label("liar", {"trusted": "yes"}, (), "shoal://eu/operator/ann")
    await world.step()
    assert world.region.workloads.desired["liar"].assignments
    (event,) = [each for each in await world.region.events.events_after(0, 100) if each.code == "NODE_LABELLED"]
    assert (event.subject, event.message, event.actor) == ("liar", "trusted=yes", "shoal://eu/operator/ann")

    await world.region.fleet.label("liar", {}, {"trusted"}, "ann")
    assert labels_of(world.region, "liar")["self.trusted"] == "yes"
    with pytest.raises(ShoalError, match=Code.FIELD_INVALID):
        await world.region.fleet.label("liar", {"self.x": "y"}, (), "ann")


async def test_a62_labels_come_with_the_token(world: RegionFixture, tmp_path: Path) -> None:
    clock, store = world.clock, world.store
    authority = FileAuthority.open(tmp_path / "ca", "eu", wall=clock.wall(), may_create=True)
    events = EventLog(store, clock, kept=1000, audit_kept=1000)
    await events.start()
    enrolment = Enrolment(ControllerContext("eu", store, events, clock, world.ids, NoMeter()), authority)
    grant = LabelGrant({"site": "shop"}, ("rack-*",))
    token = await enrolment.create("agent", "edge-1", 3600.0, "ann", grant)
    await enrolment.redeem(token.text, request_pem(new_key(), "edge-1"), "edge-1", peer="")
    node = declaring(world, "edge-1", {"site": "lab", "rack-1": "a", "trusted": "yes"})
    assert isinstance(await node.connect(), Welcome)
    expected = {"site": "shop", "self.site": "lab", "rack-1": "a", "self.trusted": "yes"}
    assert dict(labels_of(world.region, "edge-1")) == expected
    for role, wrong in (("tenant", grant), ("agent", LabelGrant({"self.x": "y"})), ("agent", LabelGrant({}, ("a b",)))):
        with pytest.raises(ShoalError, match=Code.FIELD_INVALID):
            await enrolment.create(role, "x", 3600.0, "ann", wrong)


async def test_a62_many_or_long_labels_open_no_session(world: RegionFixture) -> None:
    for labels in ({f"k{number}": "" for number in range(MAX_LABELS + 1)}, {"k": "v" * 300}):
        refusal = await declaring(world, "loud", labels).connect()
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.MESSAGE_INVALID
    assert "loud" not in world.region.fleet.fleet.nodes


async def test_a62_a_node_of_before_keeps_the_labels_that_it_had(tmp_path: Path) -> None:
    """Stored by a version whose tokens gave no labels: what it declared then counts, and nothing that it adds."""
    world = await RegionFixture.open(tmp_path / "first")
    node = declaring(world, "old", {"site": "shop"}).node
    stored = NodeRecord(node, 3, False, world.clock.wall())
    await world.store.commit(Transaction({NODES + "old": codec.dump(stored)}))
    await world.store.close()
    later = await RegionFixture.open(tmp_path / "first", earlier=world)
    assert dict(labels_of(later.region, "old")) == {"site": "shop", "entry": "*"}
    agent = declaring(later, "old", {"site": "shop", "trusted": "yes"})
    assert isinstance(await agent.connect(), Welcome)
    assert dict(labels_of(later.region, "old")) == {"site": "shop", "entry": "*", "self.trusted": "yes"}
    assert await later.store.read(GRANTS + "old") is not None
    await later.store.close()


async def test_a_node_with_a_price_from_before_prices_were_checked_can_be_labelled(world: RegionFixture) -> None:
    bad = LabelGrant({"price": "cheap"})
    await world.store.commit(Transaction({GRANTS + "edge-1": codec.dump(bad)}))
    assert isinstance(await declaring(world, "edge-1", {}).connect(), Welcome)
    label = world.region.fleet.label
    await label("edge-1", {"site": "shop"}, (), "ann")
    assert dict(labels_of(world.region, "edge-1")) == {"price": "cheap", "site": "shop"}
    with pytest.raises(ShoalError, match=Code.QUANTITY_INVALID):
        await label("edge-1", {"price": "dear"}, (), "ann")
    with pytest.raises(ShoalError, match=f"{MAX_LABELS + 1} labels"):
        await label("edge-1", {f"name-{number}": "x" for number in range(MAX_LABELS - 1)}, (), "ann")
    await label("edge-1", {"price": "0.40 USD/h"}, (), "ann")
    assert labels_of(world.region, "edge-1")["price"] == "0.40 USD/h"


NAMES = st.sampled_from(["site", "trusted", "price", "self.site", "rack-1"])
LABELS = st.dictionaries(NAMES, st.sampled_from(["1 USD/h", "2 USD/h"]))


@given(LABELS, LABELS, st.lists(st.sampled_from(["site", "rack-*", "*"]), max_size=2))
def test_a62_no_declared_label_changes_a_granted_one(
    declared: Mapping[str, str], granted: Mapping[str, str], allowed: list[str]
) -> None:
    grant = LabelGrant({name: value for name, value in granted.items() if not name.startswith("self.")}, tuple(allowed))
    assert check_labels(grant.labels, grant.allowed) is None
    found = effective_labels(declared, grant)
    assert {name: found[name] for name in grant.labels} == dict(grant.labels)
    if not allowed:
        assert {name for name in found if not name.startswith("self.")} == set(grant.labels)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("price", "cheap", Code.QUANTITY_INVALID), ("price", "0.4", Code.UNIT_MISSING), ("rtt", "20", Code.UNIT_MISSING)],
)
def test_a62_a_granted_quantity_has_its_unit(name: str, value: str, code: Code) -> None:
    refusal = check_labels({"site": "shop", name: value})
    assert refusal is not None
    assert refusal.code is code
    assert refusal.found.startswith(f"label {name}: ")
    assert check_labels({"price": "0.40 USD/h", "rtt": "20ms"}) is None
