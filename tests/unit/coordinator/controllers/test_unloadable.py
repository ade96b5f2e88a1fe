"""What one node shows of a model that its runtime does not load: heard by the region, kept, told once, and cleared."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.region import DIGEST, DOCUMENTS, FakeAgent, RegionFixture
from shoal.types.assignment import Phase
from shoal.types.codes import Code, Refusal
from shoal.types.units import Wall

WORDS = "no kernel for Add(6) as it is used  one in ort 1"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path)
    await opened.push()
    yield opened
    await opened.store.close()


async def fail(agent: FakeAgent, since: Wall) -> None:
    """As a node does: final at once."""
    await agent.apply_desired()
    agent.observed = tuple(
        replace(each, phase=Phase.FAILED, code=Code.OP_UNSUPPORTED, reason=WORDS, since=since, gives_up_at=since)
        for each in agent.observed
    )
    await agent.report()


def lacking(world: RegionFixture) -> Refusal | None:
    plan = world.region.workloads.last_plan
    assert plan is not None
    return plan.workloads[0].refusal


async def test_it_counts_for_every_node_over_a_restart_until_it_is_cleared(
    world: RegionFixture, tmp_path: Path
) -> None:
    await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    agents = [FakeAgent(world, "edge-1"), FakeAgent(world, "edge-2")]
    for agent in agents:
        await agent.connect()
    await world.step()
    (tried,) = [agent for agent in agents if world.region.workloads.desired[agent.name].assignments]
    await fail(tried, world.clock.wall())
    for _ in range(3):
        world.clock.advance(1.0)
        await tried.report()
        await world.step()
    (other,) = [agent for agent in agents if agent is not tried]
    assert not world.region.workloads.desired[other.name].assignments, "it has the same runtime"
    refusal = lacking(world)
    assert refusal is not None
    assert refusal.code is Code.OP_UNSUPPORTED
    assert str(refusal).count("OP_UNSUPPORTED") <= 2, "its own, and the count of candidates"
    assert [
        each.assignment for each in world.region.workloads.waits if each.code is Code.OP_UNSUPPORTED and each.assignment
    ]
    told = [event for event in await world.region.events.events_after(0, 1000) if event.code == Code.OP_UNSUPPORTED]
    assert [event.message for event in told] == [WORDS], "once, without its code"
    await world.store.close()
    again = await RegionFixture.open(tmp_path, world)
    planned = await again.region.workloads.clear("ocr", "ops")
    assert planned == (f"{DIGEST} on CPUExecutionProvider ort 1",)
    assert await again.region.workloads.clear("ocr", "ops") == (), "nothing is held against it any more"
    await again.store.close()
