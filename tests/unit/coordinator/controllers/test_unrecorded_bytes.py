"""Bytes that no record names: what a coordinator leaves that ends during a push."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.fakes.region import DIGEST, RegionFixture
from shoal.coordinator.controllers.documents.unrecorded_bytes import DELETE_AFTER_S, LOOK_EVERY_S

STRAY = "sha256:" + "c" * 64


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


async def look_for(world: RegionFixture, seconds: float) -> None:
    """As often as a leader does."""
    ends = world.clock.now() + seconds
    while world.clock.now() < ends:
        await world.region.models.unrecorded.look()
        world.clock.advance(LOOK_EVERY_S)
    await world.region.models.unrecorded.look()


async def test_bytes_without_a_record_go_after_a_day_and_recorded_ones_stay(world: RegionFixture) -> None:
    await world.push()
    world.models.kept.add(STRAY)
    await look_for(world, DELETE_AFTER_S - LOOK_EVERY_S)
    assert world.models.kept == {DIGEST, STRAY}, "a store may be replaced by a newer copy"
    await look_for(world, LOOK_EVERY_S)
    assert world.models.kept == {DIGEST}


async def test_what_the_store_records_stays_whatever_this_coordinator_remembers(world: RegionFixture) -> None:
    await world.push()
    world.region.workloads.catalog = world.region.workloads.catalog.with_changes(models={})
    await look_for(world, DELETE_AFTER_S)
    assert world.models.kept == {DIGEST}
