"""A scrape of the metrics page, which is answered in a thread of its own, beside the loop."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.fakes.region import RegionFixture, two_agents
from shoal.coordinator import metrics
from shoal.coordinator.main.region import _readings


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


async def test_a_scrape_writes_nothing_that_the_loop_goes_on_from(world: RegionFixture) -> None:
    """What it merged meanwhile would take back a cordon that was acknowledged."""
    agents = await two_agents(world)
    for agent in agents:
        await agent.report()
    fleet = world.region.fleet
    kept, heard = fleet._fleet, dict(fleet._fresh_states)
    assert heard, "two heartbeats, which nobody has read yet"
    found = _readings(world.region, (), None, cast(Any, SimpleNamespace(counts=dict)))
    assert found[metrics.NODES] == {("ready",): float(len(agents))}
    assert fleet._fleet is kept
    assert fleet._fresh_states == heard
    assert fleet.fleet_seen_elsewhere().nodes == fleet.fleet.nodes
