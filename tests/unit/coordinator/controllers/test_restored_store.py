"""A store that is an old copy: what nodes were told since, signed, tells so, and what they run goes on (F16)."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.region import DOCUMENTS, FakeAgent, RegionFixture
from shoal.coordinator.controllers.workloads.step import RECONNECT_S
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.proofs import SignedProofs
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.link import Welcome
from shoal.types.units import Seconds, Wall

LATER = [("p.yaml", "apiVersion: shoal/v1\nkind: Policy\nmetadata: {name: later}\nspec: {optimize: {cost: 1.0}}\n")]


def proofs_of(folder: Path, role: Role = Role.COORDINATOR) -> SignedProofs:
    wall = Wall(1_800_000_000.0)
    authority = FileAuthority.open(folder, "eu", wall=wall, may_create=not folder.exists())
    return SignedProofs("eu", authority, authority.enrol_self(role, "me", lifetime_s=Seconds(3600.0), wall=wall))


class Scene:
    """Two agents; the workload was on edge-1 when the copy was made, and moved to edge-2 since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proofs = proofs_of(folder / "ca")

    async def open(self, folder: Path, before: RegionFixture | None = None) -> RegionFixture:
        return await RegionFixture.open(folder, before, proofs=self.proofs)

    async def run(self) -> None:
        self.world = await self.open(self.folder / "store")
        await self.world.push()
        self.one, self.two = FakeAgent(self.world, "edge-1"), FakeAgent(self.world, "edge-2")
        await self.one.connect()
        await self.world.region.documents.apply(DOCUMENTS, {}, "", "test")
        await self.step(self.one)
        await self.two.connect()
        await self.step(self.two)
        await self.world.store.close()
        shutil.copytree(self.folder / "store", self.folder / "copy")
        self.world = await self.open(self.folder / "store", self.world)
        for each in (self.one, self.two):
            each.world = self.world
        await self.two.connect()
        while self.world.region.fleet.fleet.nodes["edge-1"].liveness is not Liveness.LOST:
            self.world.clock.advance(0.5)
            await self.step(self.two)
        await self.step(self.two)

    async def roll_back(self) -> None:
        await self.world.store.close()
        self.world = await self.open(self.folder / "copy", self.world)
        for each in (self.one, self.two):
            each.world = self.world

    async def step(self, agent: FakeAgent) -> None:
        await agent.report()
        await self.world.step()
        if self.world.links.desired_sets(agent.name):
            await agent.apply_desired()
            await self.world.step()

    def desired_ids(self, node: str) -> list[str]:
        found = self.world.region.workloads.desired.get(node)
        return [each.id for each in found.assignments if not each.draining] if found else []


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    await made.run()
    yield made
    await made.world.store.close()


async def test_f16_a_node_that_was_told_more_begins_a_new_history_and_keeps_what_it_runs(scene: Scene) -> None:
    history, held = scene.world.region.fence.history, scene.two.version
    (running,) = scene.desired_ids("edge-2")
    assert held is not None
    await scene.roll_back()
    region = scene.world.region
    assert region.fence.history == history
    assert scene.desired_ids("edge-2") == [], "the copy knows nothing of it"
    assert isinstance(welcome := await scene.two.connect(), Welcome)
    assert welcome.history == region.fence.history != history
    await scene.world.step()
    assert not scene.world.links.messages, "edge-1 may have to show something too"
    scene.world.clock.advance(RECONNECT_S)
    await scene.step(scene.two)
    assert scene.desired_ids("edge-2") == [running]
    newest = scene.world.links.desired_sets("edge-2")[-1].version
    assert (newest.history, newest.generation > held.generation) == (welcome.history, True)
    assert history in region.fence.old_histories
    for _ in range(20):
        scene.world.clock.advance(0.5)
        await scene.step(scene.two)
    assert scene.desired_ids("edge-2") == [running]
    assert scene.desired_ids("edge-1") == []


async def test_f16_nodes_that_come_later_are_believed_in_the_same_history(scene: Scene) -> None:
    """And whoever had a session when it turned out says hello again."""
    await scene.roll_back()
    scene.one.version, scene.one.proof, scene.one.observed = None, b"", ()
    await scene.one.connect()
    await scene.two.connect()
    history = scene.world.region.fence.history
    assert [(node, refusal.code) for node, refusal in scene.world.links.ended_sessions] == [
        ("edge-1", Code.EPOCH_STALE)
    ]
    await scene.one.connect()
    await scene.step(scene.two)
    assert scene.world.region.fence.history == history
    assert len(scene.desired_ids("edge-2")) == 1, "nobody is waited for any more"


async def test_f16_what_is_known_or_was_not_signed_changes_nothing(scene: Scene, tmp_path: Path) -> None:
    history = scene.world.region.fence.history
    version, proof = scene.two.version, scene.two.proof
    assert version is not None
    scene.world.clock.advance(5.0)
    assert isinstance(await scene.two.connect(), Welcome)
    assert scene.world.region.fence.history == history, "it is what the store says"

    await scene.roll_back()
    ahead = replace(version, generation=version.generation + 100)
    told = DesiredSet("edge-2", ahead, (), (), (), (), Seconds(1.0))
    forged = {
        "another node's": scene.proofs.sign(replace(told, node="edge-1")),
        "of another version": proof,
        "junk": b"junk",
        "another CA's": proofs_of(tmp_path / "other").sign(told),
        "an agent's": proofs_of(scene.folder / "ca", Role.AGENT).sign(told),
        "none": b"",
    }
    for name, shown in forged.items():
        scene.world.clock.advance(5.0)
        scene.two.version, scene.two.proof = ahead, shown
        assert isinstance(await scene.two.connect(), Welcome), name
        assert scene.world.region.fence.history == history, name


async def test_f16_a_history_that_this_store_never_knew_has_ended_too(scene: Scene) -> None:
    """The copy is from before another history was begun: what nodes show of that is later as well, and begins one."""
    unknown = Version("history-unknown", 1, 1)
    for agent in (scene.one, scene.two):
        agent.version = unknown
        agent.proof = scene.proofs.sign(DesiredSet(agent.name, unknown, (), (), (), (), Seconds(1.0)))
    before = scene.world.region.fence.history
    scene.world.clock.advance(5.0)
    await scene.one.connect()
    opened = scene.world.region.fence.history
    assert opened != before
    await scene.two.connect()
    assert scene.world.region.fence.history == opened, "once for all"
    assert set(scene.world.region.fence.old_histories) == {before, "history-unknown"}


async def test_f16_a_node_that_was_deleted_and_is_back_goes_on_where_it_was(scene: Scene) -> None:
    region, held = scene.world.region, scene.two.version
    assert held is not None
    await region.fleet.on_close("edge-2", scene.two.epoch)
    await region.fleet.forget("edge-2", "test")
    await scene.world.step()
    assert "edge-2" not in region.workloads.desired
    scene.world.clock.advance(5.0)
    assert isinstance(await scene.two.connect(), Welcome)
    await scene.step(scene.two)
    newest = scene.world.links.desired_sets("edge-2")[-1].version
    assert (newest.history, newest.generation > held.generation) == (held.history, True)
    assert len(scene.desired_ids("edge-2")) == 1


async def test_f16_a_change_that_was_on_its_way_when_the_history_began_is_made(scene: Scene) -> None:
    """Its fence was the old history's; only another coordinator's turn refuses it."""
    region = scene.world.region
    fence = region.events._fence
    await region.fence.open_history("test")
    region.events._fence, newest = fence, region.events._fence
    stored = scene.world.store.commit

    async def turning(transaction: object) -> int:
        region.events._fence = newest
        return await stored(transaction)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scene.world.store, "commit", turning)
        await region.documents.apply(LATER, {}, "", "test")
    assert not region.leadership_loss.is_set()
