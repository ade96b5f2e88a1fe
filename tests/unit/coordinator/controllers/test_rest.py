"""A region in which nothing happens decides about nothing; what may change a decision has it decided again."""

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
        await runs.report(free_bytes=2**33 - 2**26)

    async def report_little_less_memory() -> None:
        await runs.report(free_bytes=2**33 - 2**20)

    async def report_less_memory_elsewhere() -> None:
        await other.report(free_bytes=2**33 - 2**26)

    async def fail() -> None:
        runs.observed = tuple(replace(each, restarts=each.restarts + 1) for each in runs.observed)
        await runs.report()

    async def cordon() -> None:
        await controller.fleet.cordon(runs.name, True, "test")

    async def change_documents() -> None:
        name, text = DOCUMENTS[0]
        changed = text.replace("latency: 1.0", "latency: 0.9, energy: 0.1")
        applied = await controller.documents.apply([(name, changed)], {}, "", "test")
        assert applied.revision

    async def fall_silent() -> None:
        for _ in range(6):
            region.clock.advance(1.0)
            await other.report()
            await controller.fleet.tick()

    cases: list[tuple[Callable[[], Awaitable[None]], bool]] = [
        (report_less_memory, True),
        (report_little_less_memory, False),
        (report_less_memory_elsewhere, False),
        (fail, True),
        (cordon, True),
        (change_documents, True),
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
    runs, _ = await let_it_rest(region, meter)
    before = decisions(meter)
    for step in range(1, 200):
        await runs.report(free_bytes=Bytes(2**33 - step * 2**20))
        await region.step()
    assert decisions(meter) > before


async def test_what_all_sets_share_is_sent_to_a_region_at_rest(world: tuple[RegionFixture, RecordedMeter]) -> None:
    region, meter = world
    agents = await let_it_rest(region, meter)
    before, workloads = decisions(meter), region.region.workloads
    expires = Wall(region.clock.wall() + 60)
    workloads.credentials = (*workloads.credentials, Credential("default", "ab", expires))
    await region.step()
    sent = {agent.name: region.links.desired_sets(agent.name)[-1].credentials for agent in agents}
    assert any(sent.values())
    for _ in range(61):
        region.clock.advance(1.0)
        for agent in agents:
            await agent.report()
        await region.step()
    assert not any(region.links.desired_sets(agent.name)[-1].credentials for agent in agents)
    assert decisions(meter) == before
