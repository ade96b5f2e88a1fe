"""Stored receipts: of the devices that a node has, and of no others, however often it renames them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.fakes.region import FakeAgent, RegionFixture
from shoal.coordinator.controllers.fleet import records
from shoal.coordinator.controllers.fleet.records import RECEIPTS
from shoal.types.codes import Refusal
from shoal.types.device import Node
from shoal.types.link import Receipts, Welcome
from shoal.types.receipt import Receipt, SignedReceipt


@dataclass
class RenamingAgent(FakeAgent):
    """An agent with several devices, under names that it chooses."""

    # Their names.
    names: tuple[str, ...] = ("gpu0", "gpu1", "gpu2")
    # What it says of each of them.
    template: Receipt | None = None

    @property
    def node(self) -> Node:
        node = super().node
        return replace(node, devices=tuple(replace(node.devices[0], name=name) for name in self.names))

    async def send_receipt(self) -> Refusal | None:
        assert self.template is not None
        receipts = tuple(replace(self.template, node=self.name, device=name) for name in self.names)
        signed = tuple(SignedReceipt(each, b"content", b"signature") for each in receipts)
        return await self.world.region.fleet.on_message(self.name, self.epoch, Receipts(signed))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    found = await RegionFixture.open(tmp_path)
    yield found
    await found.store.close()


@pytest.fixture
async def agent(world: RegionFixture) -> RenamingAgent:
    assert isinstance(await FakeAgent(world, "other").connect(), Welcome)
    return RenamingAgent(world, "edge-1", template=world.region.fleet.fleet.nodes["other"].receipts["cpu0"])


async def connect(agent: RenamingAgent, *names: str) -> None:
    """Begins a session with devices of these names, measures them, and leaves."""
    agent.names = names
    assert isinstance(await agent.connect(), Welcome)
    await agent.world.region.fleet.on_close(agent.name, agent.epoch)


async def stored_devices(world: RegionFixture, node: str = "edge-1") -> list[str]:
    return [each.key.rsplit("/", 1)[1] for each in await world.store.scan(f"{RECEIPTS}{node}/")]


async def test_a_node_that_renames_its_devices_keeps_no_receipt_of_the_old_ones(agent: RenamingAgent) -> None:
    for number in range(5):
        await connect(agent, f"gpu-{number}", "gpu")
    assert await stored_devices(agent.world) == ["gpu", "gpu-4"]
    assert await stored_devices(agent.world, "other") == ["cpu0"]


async def test_a_coordinator_that_starts_again_still_deletes_them(agent: RenamingAgent, tmp_path: Path) -> None:
    await connect(agent, "old", "gpu")
    await agent.world.store.close()
    agent.world = await RegionFixture.open(tmp_path, agent.world)
    try:
        await connect(agent, "new", "gpu")
        assert await stored_devices(agent.world) == ["gpu", "new"]
    finally:
        await agent.world.store.close()


async def test_a_node_takes_all_its_receipts_with_it(agent: RenamingAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of devices that it no longer had too, and where they are more than one transaction deletes."""
    await connect(agent, *(f"old-{number}" for number in range(7)))
    monkeypatch.setattr(records, "RECEIPTS_DELETED", 2)
    await connect(agent, "gpu")
    assert len(await stored_devices(agent.world)) == 1 + 7 - 2, "no more with one hello"
    await agent.world.region.fleet.forget("edge-1", "ann")
    assert await stored_devices(agent.world) == []
    await connect(agent, "gpu")
    assert await stored_devices(agent.world) == ["gpu"]
