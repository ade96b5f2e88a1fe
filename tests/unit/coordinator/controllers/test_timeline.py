"""What the timeline measures, what it stores, and what a restart finds."""

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from harness.builders.coordinator_core import counts_of, intent, require
from harness.fakes.region import FakeAgent, RegionFixture, two_agents
from shoal.coordinator.controllers.queries.timeline import NOTHING, STEPS, Reading, ReplicaCounts, Sums, workload_values
from shoal.coordinator.core.timeline import COARSE, FIGURES, FINE, REGION, Figure, Values
from shoal.types.assignment import Ingress, Served
from shoal.types.codes import Code
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")
OTHER = WorkloadKey("default", "writer")


def figures(told: Values) -> dict[Figure, float]:
    return dict(zip(FIGURES, told, strict=True))


def counts(requests: int, errors: int = 0, joules: float = math.nan) -> Served:
    return Served("edge", requests, errors, Seconds(0.1), Seconds(0.2), Joules(joules), EnergySource.MEASURED)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "region")
    opened.clock.advance(-opened.clock.date % COARSE.step_s)
    yield opened
    await opened.store.close()


async def serve(agent: FakeAgent, requests: int, joules: float, latencies: list[float]) -> None:
    """The agent's replica has done so much since it became ready."""
    agent.observed = tuple(
        replace(each, served=(counts(requests, 0, joules),), latencies=counts_of(latencies)) for each in agent.observed
    )
    await agent.report()


async def test_a_workload_is_measured_by_what_it_did_since_the_last_look(world: RegionFixture) -> None:
    runs, _ = await two_agents(world)
    kept = world.region.timeline
    await serve(runs, 1000, 100.0, [0.5] * 1000)
    await kept.measure()
    first = figures(kept.timeline.newest(str(KEY), 1)[0])
    assert math.isnan(first[Figure.REQUESTS]), "what came before the first look has no time"
    world.clock.advance(10.0)
    await serve(runs, 1100, 150.0, [0.5] * 1000 + [0.02] * 100)
    await kept.measure()
    found = figures(kept.timeline.newest(str(KEY), 1)[0])
    assert found[Figure.LATENCY] == pytest.approx(0.02, rel=0.05), "of the new answers alone"
    assert found[Figure.ENERGY] == pytest.approx(0.5)
    assert found[Figure.READY] == 1.0
    region = figures(kept.timeline.newest(REGION, 1)[0])
    assert region[Figure.ENERGY] == pytest.approx(20.0), "two devices of 10 W"
    assert region[Figure.READY] == 1.0


async def test_steps_of_five_minutes_are_stored_and_found_after_a_restart(world: RegionFixture, tmp_path: Path) -> None:
    await two_agents(world)
    per = round(COARSE.step_s / FINE.step_s)
    for _ in range(per + 1):
        await world.region.timeline.measure()
        world.clock.advance(FINE.step_s)
    stored = await world.store.scan(STEPS)
    assert len(stored) == 1
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "region", world)
    series = again.region.timeline.timeline.series(REGION, again.clock.wall(), COARSE)
    ready = next(each for each in series if each.figure is Figure.READY)
    assert [each for each in ready.values if not math.isnan(each)] == [1.0]
    hour = again.region.timeline.timeline.series(REGION, again.clock.wall(), FINE)
    shown = next(each for each in hour if each.figure is Figure.READY)
    assert [each for each in shown.values if not math.isnan(each)] == [1.0] * per
    again.clock.advance(2 * 86400.0)
    await again.store.close()
    third = await RegionFixture.open(tmp_path / "region", again)
    old = third.region.timeline.timeline.series(REGION, third.clock.wall(), COARSE)
    assert all(math.isnan(each) for one in old for each in one.values), "a step of two days ago is not today's"
    world.store = third.store  # the fixture closes it


async def test_what_cannot_be_stored_or_read_ends_nothing(world: RegionFixture, tmp_path: Path) -> None:
    await world.region.context.events.commit({STEPS + "007": b"no step"})
    with capture_logs() as logs:
        await world.region.timeline.start()
    assert [(each["event"], each["key"], each["code"]) for each in logs] == [
        ("timeline_step_unreadable", STEPS + "007", Code.STATE_CORRUPT)
    ]
    await world.region.timeline.measure()
    assert len(world.region.timeline.timeline.newest(REGION, 1)) == 1


def test_counters_that_started_again_count_from_zero() -> None:
    before = ReplicaCounts(100, 5, 100, 50.0, counts_of([0.1] * 95))
    assert ReplicaCounts(130, 6, 130, 60.0, counts_of([0.1] * 124)).since(before) == ReplicaCounts(
        30, 1, 30, 10.0, counts_of([0.1] * 29)
    )
    again = ReplicaCounts(10, 0, 10, 4.0, counts_of([0.1] * 10))
    assert again.since(before) == again
    assert again.since(None) == again
    assert NOTHING.since(NOTHING) == NOTHING


async def test_a_front_that_started_again_loses_no_requests_and_counts_none_twice(world: RegionFixture) -> None:
    await two_agents(world)
    state = world.region.fleet.fleet.nodes["edge-1"]

    def at(requests: int, lost: int = 0) -> Reading:
        reading = Reading()
        reading.add(replace(state, ingress=(Ingress(KEY, "edge", requests, requests - lost, 0, 0, lost),)), before)
        return reading

    before: Reading | None = None
    before = at(100)
    assert before.sums[KEY].requests == 0
    after = at(140, 2)
    assert (after.sums[KEY].requests, after.sums[KEY].lost) == (40, 2)
    before = after
    assert at(7).sums[KEY].requests == 7


async def test_counts_that_a_gateway_tells_of_later_are_no_new_requests(world: RegionFixture) -> None:
    """It tells of many workloads in parts, and their counts began with its front."""
    await two_agents(world)
    state = world.region.fleet.fleet.nodes["edge-1"]
    first, other = Ingress(KEY, "edge", 100, 100, 0, 0, 0), Ingress(OTHER, "edge", 5000, 5000, 0, 0, 0)
    before, after, later = Reading(), Reading(), Reading()
    before.add(replace(state, ingress=(first,)), None)
    after.add(replace(state, ingress=(first, other)), before)
    assert after.sums[OTHER].requests == 0
    later.add(replace(state, ingress=(first, replace(other, requests=5007))), after)
    assert later.sums[OTHER].requests == 7


@pytest.mark.parametrize(
    ("latencies", "errors", "share"),
    [([0.01] * 3 + [0.5], 0, 0.75), ([0.01] * 3, 1, 0.75), ([0.5], 0, 0.0), ([], 0, None)],
)
def test_the_share_within_the_bound_counts_errors_as_outside(latencies: list[float], errors: int, share: float) -> None:
    asked = intent(require=require(latency_p95_s=Seconds(0.1)))
    sums = Sums(served=len(latencies) + errors, errors=errors, latencies=counts_of(latencies))
    found = figures(workload_values(sums, asked, 10.0, 0.5, 100.0))
    assert found[Figure.WITHIN_BOUND] == share if share is not None else math.isnan(found[Figure.WITHIN_BOUND])
    unbound = figures(workload_values(sums, intent(), 10.0, 0.5, 100.0))
    assert math.isnan(unbound[Figure.WITHIN_BOUND])


def test_carbon_is_of_the_energy_that_requests_took() -> None:
    found = figures(workload_values(Sums(metered=100, joules=3600.0), intent(), 10.0, math.nan, 250.0))
    assert found[Figure.ENERGY] == 36.0
    assert found[Figure.CARBON] == pytest.approx(90.0), "360 W for an hour are 0.36 kWh"
    assert math.isnan(found[Figure.COST])
