"""Can it move there, and at what price: the answers, and that they agree with placement."""

import math

import pytest

from harness.builders.coordinator_core import (
    DIGEST,
    GIB,
    SMALL,
    START,
    CoreRegion,
    device,
    fleet_of,
    inputs,
    intent,
    node,
    profile,
    require,
    traffic,
    warm,
)
from shoal.coordinator.core.migration.estimate import MoveAnswer, MoveEstimates, MoveNeed, estimate_move
from shoal.coordinator.core.placement.model import Aim, Slot
from shoal.coordinator.core.workloads.decide import inputs_of
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS
from shoal.types.codes import Code, ShoalError
from shoal.types.device import DeviceLink
from shoal.types.migration import Against, Metric, MigrationRule, Tolerance
from shoal.types.tolerance import default
from shoal.types.units import Elapsed, Seconds, UsdPerHour, Wall
from shoal.types.workload import Intent, ModelRef, Spread

NPU = device("npu0", kind="npu", memory=2 * GIB)


def running(asked: Intent, *, to: str, device: str = "", costs: dict[Slot, UsdPerHour] | None = None) -> MoveEstimates:
    """The workload runs on `first`; `second` is a CPU of half its speed, `edge` an NPU."""
    region = CoreRegion(
        node("first"), node("second"), node("edge", NPU), flops={"first": 2e11, "second": 1e11, "edge": 1e11}
    )
    region.intents = (asked,)
    region.costs = costs or {}
    region.run(20)
    return estimate_move(
        inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now)),
        asked.key,
        Aim(to, device),
    )


def test_to_the_same_kind_of_device_nothing_changes_but_the_figures() -> None:
    found = running(intent(), to="second", costs={Slot("second", "cpu0"): UsdPerHour(0.36)})
    (one,) = found.estimates
    assert (found.source, found.answer, one.answer, one.needs) == (
        Slot("first", "cpu0"),
        MoveAnswer.YES,
        MoveAnswer.YES,
        (),
    )
    assert one.fetch_bytes == profile().size_bytes
    assert one.now is not None
    assert one.then is not None
    assert one.now.latency_p95_s.mid == warm().latency_p95_s, "as it was measured there"
    assert 0 < one.then.latency_p95_s.low < one.then.latency_p95_s.mid < one.then.latency_p95_s.high
    compared_s = 8 * (one.now.latency_p95_s.mid + one.then.latency_p95_s.mid)
    assert one.cost_of_both == pytest.approx(
        0.36 * (one.load_s.mid + compared_s + 2 * 2.0 + one.now.latency_p95_s.mid) / 3600
    )


def test_the_price_and_the_drift_are_those_of_the_policy() -> None:
    boxes = Tolerance("boxes", Metric.MAX_ABS, 0.5)
    rule = MigrationRule(
        against=Against.NONE, tolerances=(boxes,), steps=(0.1, 0.5, 1.0), hold_s=Seconds(60.0), drain_s=Seconds(5.0)
    )
    (one,) = running(intent(migration=rule), to="second", costs={Slot("second", "cpu0"): UsdPerHour(0.36)}).estimates
    assert one.now is not None
    assert one.cost_of_both == pytest.approx(0.36 * (one.load_s.mid + 3 * 60.0 + one.now.latency_p95_s.mid) / 3600)
    assert one.drift == (boxes, *default("fp32", "fp32"))


def test_another_provider_prepares_the_model_anew() -> None:
    (one,) = running(intent(), to="edge", device="npu0").estimates
    assert one.answer is MoveAnswer.YES_WITH
    assert [need for need, _ in one.needs] == [MoveNeed.REBUILD]
    assert math.isnan(one.cost_of_both)


def test_the_link_takes_a_part_of_the_load() -> None:
    link = DeviceLink("PCIe 3.0 x4", 3.9e9, "sysfs")
    gpu = device("gpu0", kind="gpu", links=(DeviceLink("NVLink x4", 56e9, "NVML", "gpu1"), link))
    asked = inputs(fleet_of(node("only", device(), gpu)), intent(), profiles={DIGEST: profile()})
    on_gpu, on_cpu = (estimate_move(asked, intent().key, Aim("only", name)).estimates[0] for name in ("gpu0", "cpu0"))
    assert on_gpu.link == link
    assert on_gpu.transfer_s == pytest.approx(profile().weight_bytes / 3.9e9)
    assert on_gpu.transfer_s <= on_gpu.load_s.low
    assert on_cpu.link is None
    assert math.isnan(on_cpu.transfer_s)


def test_a_variant_is_another_precision() -> None:
    both = (ModelRef("model.onnx", DIGEST, ""), ModelRef("small.onnx", SMALL, ""))
    found = running(intent(models=both), to="second")
    assert [one.answer for one in found.estimates] in (
        [MoveAnswer.YES, MoveAnswer.YES_WITH],
        [MoveAnswer.YES_WITH, MoveAnswer.YES],
    )
    changed = next(one for one in found.estimates if one.needs)
    assert [need for need, _ in changed.needs] == [MoveNeed.PRECISION]
    assert changed.drift == default("int8", "fp32")


def test_what_the_policy_forbids_says_so_and_what_would_do() -> None:
    found = running(intent(require=require(where='device.kind == "cpu"')), to="edge")
    (one,) = found.estimates
    assert (found.answer, one.refusal is not None and one.refusal.code) == (MoveAnswer.NO, Code.SELECTOR_MISMATCH)
    assert "edge" in one.nearest


def test_it_is_there_already() -> None:
    (one,) = running(intent(), to="first").estimates
    assert one.answer is MoveAnswer.NO
    assert one.refusal is not None
    assert one.refusal.code is Code.CONFLICT
    assert one.fetch_bytes == 0


def test_what_runs_nowhere_yet_may_be_asked_for() -> None:
    fleet = fleet_of(node("only"))
    found = estimate_move(
        inputs(fleet, intent(traffic=traffic(1.0)), profiles={DIGEST: profile()}), intent().key, Aim("only")
    )
    (one,) = found.estimates
    assert (found.source, one.answer, one.now, one.drift) == (None, MoveAnswer.YES, None, ())


@pytest.mark.parametrize(
    ("to", "device", "code"),
    [("nowhere", "", Code.NODE_UNKNOWN), ("first", "gpu7", Code.NOT_FOUND)],
)
def test_what_there_is_not(to: str, device: str, code: Code) -> None:
    with pytest.raises(ShoalError) as caught:
        running(intent(), to=to, device=device)
    assert caught.value.code is code


def test_a_node_that_has_another_replica_is_no_place_for_a_move() -> None:
    """Where all replicas are placed their plan names no such constraint: the move itself is tried."""
    asked = intent(require=require(replicas=2, spread=Spread.NODE))
    region = CoreRegion(
        node("first"),
        node("second", device("cpu0"), device("cpu1")),
        node("third"),
        flops={"first": 3e11, "second": 2e11, "third": 1e9},
    )
    region.intents = (asked,)
    region.run(20)
    held = {name: content.assignments[0].id for name, content in region.desired.items() if content.assignments}
    assert len(held) == 2
    assert "second" in held
    taken, other = "second", next(name for name in held if name != "second")
    world, key = inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now)), asked.key
    spare = next(each for each in ("cpu0", "cpu1") if each != region.desired[taken].assignments[0].device)
    found = estimate_move(world, key, Aim(taken, spare), held[other])
    assert found.answer is MoveAnswer.NO
    assert found.refusal is not None
    assert found.refusal.code is Code.SPREAD_CONFLICT
    (free,) = {"first", "second", "third"} - held.keys()
    assert estimate_move(world, key, Aim(free), held[other]).refusal is None
