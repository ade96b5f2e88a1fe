"""A region in which nothing happens decides nothing, and does so again as soon as anything may change a decision."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.meter import RecordedMeter
from harness.fakes.region import DOCUMENTS, FakeAgent, RegionFixture, run_heartbeat, two_agents
from shoal.coordinator import metrics
from shoal.types.assignment import Credential
from shoal.types.units import Bytes, Wall

RESTING = 40
"""Heartbeats of a region at rest."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[RegionFixture, RecordedMeter]]:
    meter = RecordedMeter()
    opened = await RegionFixture.open(tmp_path, meter=meter)
    yield opened, meter
    await opened.store.close()


def decisions(meter: RecordedMeter) -> float:
    return meter.counts[metrics.DECISIONS, ()]


async def let_it_rest(world: RegionFixture, meter: RecordedMeter) -> tuple[FakeAgent, FakeAgent]:
    agents = await two_agents(world)
    for _ in range(8):
        await run_heartbeat(world, *agents)
    before = decisions(meter)
    await run_heartbeat(world, *agents)
    assert decisions(meter) == before
    return agents


async def test_a_region_at_rest_decides_nothing(world: tuple[RegionFixture, RecordedMeter]) -> None:
    region, meter = world
    agents = await let_it_rest(region, meter)
    before, desired = decisions(meter), dict(region.region.workloads.desired)
    for _ in range(RESTING):
        for agent in agents:
            await agent.report()
        region.clock.advance(1.0)
        await region.step()
    assert decisions(meter) == before
    assert region.region.workloads.desired == desired


async def test_whatever_may_change_a_decision_ends_the_rest(world: tuple[RegionFixture, RecordedMeter]) -> None:
    region, meter = world
    runs, other = await let_it_rest(region, meter)
    controller = region.region

    async def report_less_memory() -> None:
        await other.report(free_bytes=2**33 - 2**26)

    async def report_little_less_memory() -> None:
        await other.report(free_bytes=2**33 - 2**20)

    async def fail() -> None:
        runs.observed = tuple(replace(each, restarts=each.restarts + 1) for each in runs.observed)
        await runs.report()

    async def cordon() -> None:
        await controller.fleet.cordon(other.name, True, "test")

    async def change_documents() -> None:
        name, text = DOCUMENTS[0]
        changed = text.replace("latency: 1.0", "latency: 0.9, energy: 0.1")
        applied = await controller.documents.apply([(name, changed)], {}, "", "test")
        assert applied.revision

    async def fall_silent() -> None:
        for _ in range(6):
            region.clock.advance(1.0)
            await runs.report()
            await controller.fleet.tick()

    async def add_credential() -> None:
        known = controller.workloads.credentials
        controller.workloads.credentials = (*known, Credential("default", "ab", Wall(region.clock.wall() + 60)))

    async def let_it_expire() -> None:
        region.clock.advance(61.0)
        for agent in (runs, other):
            await agent.report()

    cases: list[tuple[Callable[[], Awaitable[None]], bool]] = [
        (report_less_memory, True),
        (report_little_less_memory, False),
        (fail, True),
        (cordon, True),
        (change_documents, True),
        (add_credential, True),
        (let_it_expire, True),
        (fall_silent, True),
    ]
    for change, ends in cases:
        for _ in range(8):
            region.clock.advance(1.0)
            for agent in (runs, other):
                await agent.report()
                await agent.apply_desired()
            await region.step()
        before = decisions(meter)
        await region.step()
        assert decisions(meter) == before, f"no rest before {change.__name__}"
        await change()
        await region.step()
        assert (decisions(meter) > before) is ends, change.__name__


async def test_small_changes_add_up(world: tuple[RegionFixture, RecordedMeter]) -> None:
    """A change too small to count is compared with what was decided on, not with the report before."""
    region, meter = world
    _, other = await let_it_rest(region, meter)
    before = decisions(meter)
    for step in range(1, 200):
        await other.report(free_bytes=Bytes(2**33 - step * 2**20))
        await region.step()
    assert decisions(meter) > before
