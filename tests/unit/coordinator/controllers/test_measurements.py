"""Measurements from one region to another, through stores and restarts, and what of a region's own is not believed."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.meter import RecordedMeter
from harness.fakes.region import DIGEST, DOCUMENTS, FakeAgent, RegionFixture, run_heartbeat
from shoal.coordinator import metrics
from shoal.coordinator.controllers.workloads.memory import OF_REGIONS
from shoal.coordinator.core.placement.model import Candidate
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.prediction.exchange import MOST_REGIONS, ReadMeasurements, read_measurements
from shoal.coordinator.core.prediction.model import Basis, Prediction
from shoal.types.assignment import Measured
from shoal.types.codes import Code, ShoalError
from shoal.types.device import EnergySource
from shoal.types.units import Bytes, Joules, Seconds

OPERATOR = "shoal://us/operator/ann"


async def open_region(folder: Path, name: str, meter: RecordedMeter | None = None) -> tuple[RegionFixture, FakeAgent]:
    """A region with one agent and one workload, that measured nothing."""
    world = await RegionFixture.open(folder / name, name=name, meter=meter)
    await world.push()
    agent = FakeAgent(world, f"{name}-box")
    await agent.connect()
    applied = await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    assert not applied.plan_result.problems
    await world.step()
    return world, agent


async def warm_up(world: RegionFixture, agent: FakeAgent, p50_s: float) -> None:
    await agent.apply_desired()
    measured = Measured(
        Seconds(0.5), Bytes(2**26), Seconds(p50_s), Seconds(p50_s * 1.1), Joules(1.0), EnergySource.ESTIMATED, 30
    )
    agent.observed = tuple(replace(each, measured=measured) for each in agent.observed)
    await agent.report()
    world.clock.advance(0.5)
    await world.step()


def prediction(world: RegionFixture) -> Prediction:
    """Of the one workload on the one device."""
    (candidate,) = candidates(world)
    assert candidate.prediction is not None
    return candidate.prediction


def candidates(world: RegionFixture) -> list[Candidate]:
    return [*place(world.region.workloads.inputs(), explain=True).workloads[0].candidates]


@pytest.fixture
async def document(tmp_path: Path) -> bytes:
    """What region `eu` measured: 40 ms."""
    world, agent = await open_region(tmp_path, "eu")
    await warm_up(world, agent, 0.04)
    document = world.region.measurements.document()()
    await world.store.close()
    return document


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened, _ = await open_region(tmp_path, "us")
    yield opened
    await opened.store.close()


async def import_events(world: RegionFixture) -> list[tuple[str, str, str, str]]:
    events = await world.region.events.events_after(0, 1000)
    return [(each.code, each.subject, each.message, each.actor) for each in events if "MEASUREMENTS" in each.code]


async def test_another_regions_measurement_predicts_here_until_this_one_measures(
    document: bytes, tmp_path: Path
) -> None:
    world, agent = await open_region(tmp_path, "us")
    assert b"box" not in document
    assert b"reader" not in document
    assert prediction(world).basis is Basis.GUESS
    await world.region.measurements.put(read_measurements(document), OPERATOR)
    known = prediction(world)
    assert known.basis is Basis.SAME_CLASS
    assert known.latency_p50_s.low < 0.04 < known.latency_p50_s.high
    await world.step()
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "us", world, name="us")
    found = FakeAgent(again, agent.name)
    await found.connect()
    assert repr(prediction(again)) == repr(known), "it is in the store"
    (kept,) = again.region.measurements.imports
    assert (kept.region, kept.actor, len(kept.rows)) == ("eu", OPERATOR, 1)
    assert await import_events(again) == [
        ("MEASUREMENTS_IMPORTED", "region eu", "1 of 1 models on 1 device classes", OPERATOR)
    ]
    await again.step()
    await run_heartbeat(again, found)
    await warm_up(again, found, 0.1)
    (own,) = again.region.workloads.memory.residuals.values()
    assert not own.imported_from
    second = FakeAgent(again, "us-box-2")
    await second.connect()
    (there,) = [each.prediction for each in candidates(again) if each.node == second.name]
    assert there is not None
    assert there.basis is Basis.SAME_CLASS
    assert there.latency_p50_s.low < 0.1 < there.latency_p50_s.high, "its own counts"
    await again.store.close()


async def test_a_later_import_replaces_an_earlier_one_and_all_of_it_can_be_forgotten(
    world: RegionFixture, document: bytes
) -> None:
    found = read_measurements(document)
    slower = replace(found.rows[0], log_ratio_of_sum=found.rows[0].log_ratio_of_sum + 1)
    await world.region.measurements.put(found, OPERATOR)
    fast = prediction(world)
    await world.region.measurements.put(found._replace(rows=(slower,)), OPERATOR)
    assert prediction(world).latency_p50_s.mid > 2 * fast.latency_p50_s.mid
    assert len(world.region.measurements.imports) == 1
    await world.region.measurements.remove("eu", OPERATOR)
    assert prediction(world).basis is Basis.GUESS
    assert not await world.store.scan(OF_REGIONS)
    with pytest.raises(ShoalError) as refused:
        await world.region.measurements.remove("eu", OPERATOR)
    assert refused.value.code is Code.NOT_FOUND
    assert [each[0] for each in await import_events(world)] == [
        "MEASUREMENTS_IMPORTED", "MEASUREMENTS_IMPORTED", "MEASUREMENTS_REMOVED",
    ]  # fmt: skip


async def test_regions_are_bounded(world: RegionFixture, document: bytes) -> None:
    found = read_measurements(document)
    for number in range(MOST_REGIONS):
        await world.region.measurements.put(found._replace(region=f"region-{number}"), OPERATOR)
    for refused in (found, ReadMeasurements("asia", found.exported_at, ())):
        with pytest.raises(ShoalError) as error:
            await world.region.measurements.put(refused, OPERATOR)
        assert error.value.code is Code.FIELD_TOO_MANY
    await world.region.measurements.put(found._replace(region="region-3"), OPERATOR)
    assert len(world.region.measurements.imports) == MOST_REGIONS


async def test_steps_decide_as_one_from_scratch_would_that_knows_what_was_imported(
    world: RegionFixture, document: bytes
) -> None:
    differences = list[tuple[str, ...]]()
    world.region.workloads.auditor = differences.append
    await world.step()
    await world.region.measurements.put(read_measurements(document), OPERATOR)
    await world.step()
    await world.region.measurements.remove("eu", OPERATOR)
    await world.step()
    assert differences == [()] * 3


async def test_a_warm_up_that_cannot_be_is_counted_once(tmp_path: Path) -> None:
    meter = RecordedMeter()
    world, agent = await open_region(tmp_path, "us", meter)
    await warm_up(world, agent, 1000.0)
    for _ in range(3):
        await agent.report()
        world.clock.advance(0.5)
        await world.step()
    assert not world.region.workloads.memory.residuals
    assert meter.with_code(metrics.MESSAGES_REFUSED, Code.TELEMETRY_ABSURD) == 1
    await warm_up(world, agent, 0.04)
    (residual,) = world.region.workloads.memory.residuals.values()
    assert residual.model == DIGEST
    assert meter.with_code(metrics.MESSAGES_REFUSED, Code.TELEMETRY_ABSURD) == 1
    await world.store.close()
