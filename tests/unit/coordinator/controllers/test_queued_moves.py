"""The queue of moves over a real store: what waits, what begins, what ends, and what a restart and an older version
find."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.region import FakeAgent, RegionFixture, run_heartbeat, run_until_over, two_agents
from shoal.coordinator.controllers.workloads.move_queue import QUEUE
from shoal.coordinator.controllers.workloads.migrations import MIGRATIONS
from shoal.coordinator.core.migration.model import Migration, MigrationStage
from shoal.coordinator.core.migration.queue import MOST_OF_TENANT, WAIT_S, QueuedMove
from shoal.coordinator.core.placement.model import Aim
from shoal.types.codes import Code, ShoalError
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


async def look(world: RegionFixture, times: int = 3) -> None:
    """Ticks of the region's loop, far enough apart for a look each."""
    for _ in range(times):
        world.clock.advance(2.5)
        await world.region.queued_moves.tick()
        await asyncio.sleep(0)
        await world.region.queued_moves.tick()


async def queued(world: RegionFixture, aim: str, key: WorkloadKey = KEY, replica: str = "") -> QueuedMove:
    found = await world.region.queued_moves.migrate(key, Aim(aim), "ops", replica=replica)
    assert isinstance(found, QueuedMove)
    return found


async def test_a_move_that_nothing_refuses_begins_at_once(world: RegionFixture) -> None:
    _, target = await two_agents(world)
    begun = await world.region.queued_moves.migrate(KEY, Aim(target.name), "ops")
    assert isinstance(begun, Migration)
    assert not await world.store.scan(QUEUE)


async def test_a_move_waits_until_its_node_takes_work(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    with pytest.raises(ShoalError) as refused:
        await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert refused.value.code is Code.NODE_CORDONED
    waits = await queued(world, target.name)
    assert waits.reason.code is Code.NODE_CORDONED
    await look(world)
    assert world.region.workloads.queue.waiting == [waits]
    assert not world.region.workloads.migrations.all
    await world.region.fleet.cordon(target.name, False, "ops")
    await look(world)
    assert not world.region.workloads.queue.all
    assert not await world.store.scan(QUEUE), "it left the queue in the transaction that began it"
    begun = world.region.moves.get(waits.id)
    assert begun.reason.startswith("queued for")
    ended = await run_until_over(world, begun, source, target)
    assert ended.stage is MigrationStage.DONE
    assert ended.verdict is not None
    assert ended.verdict.passed
