"""Several providers on one piece of hardware, and devices that take no open shapes."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.coordinator_core import (
    DIGEST,
    GIB,
    MIB,
    device,
    fleet_of,
    inputs,
    intent,
    node,
    profile,
    reading,
)
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.negotiation.advertise import capacity_classes
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.model import Reservation, Slot
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.prediction.demand import at_shapes, demand_of, open_axis, work_of
from shoal.coordinator.core.prediction.model import Interval
from shoal.types.codes import Code
from shoal.types.device import Device, Node
from shoal.types.profile import ModelProfile, TensorSpec
from shoal.types.units import Bytes, Watts

BOTH = node("a", device(memory=GIB), device("cpu0-other", memory=GIB, provider="other", hardware="cpu0"))
OPEN = replace(profile(), inputs=(TensorSpec("x", "FP32", (-1, 3, -1, -1)),))
FIXED = {"x": (1, 3, 112, 112)}


NPU = node("a", device(memory=GIB), device("npu0", memory=GIB, kind="npu", memory_in="cpu0"))


@pytest.mark.parametrize("both", [BOTH, NPU], ids=["two providers", "an NPU without memory of its own"])
def test_devices_in_one_memory_share_it(both: Node) -> None:
    """Each alone would take three of these; both together take three."""
    many = [intent(f"w{number}") for number in range(12)]
    large = {DIGEST: profile(size=100 * MIB)}
    alone = place(inputs(fleet_of(node("a", device(memory=GIB))), *many, profiles=large))
    shared = place(inputs(fleet_of(both), *many, profiles=large))
    placed = [len([plan for plan in result.workloads if plan.targets]) for result in (alone, shared)]
    assert 0 < placed[0] < len(many)
    assert placed[0] == placed[1]


def test_a_region_offers_the_memory_of_one_processor_once() -> None:
    assert [each.devices for each in capacity_classes(inputs(fleet_of(BOTH)))] == [1]


def test_what_an_npu_holds_of_the_memory_the_processor_does_not_offer() -> None:
    held = (Reservation("b-1", Slot("a", "npu0"), Bytes(GIB // 2), 0.0),)
    whole, left = (
        {each.device_class: each.free_bytes for each in capacity_classes(inputs(fleet_of(NPU), reserved=reserved))}
        for reserved in ((), held)
    )
    assert whole.keys() == left.keys()
    assert {whole[name] - left[name] for name in whole} == {GIB // 2}


def test_time_is_shared_by_what_runs_on_one_hardware_alone() -> None:
    def busy(both: Node) -> tuple[float, float]:
        state = fleet_of(both).nodes["a"]
        other = both.devices[1]
        return len(state.same_memory(other)), len(state.same_hardware(other))

    assert busy(BOTH) == (2, 2)
    assert busy(NPU) == (2, 1)


CPU, GPU = device(), device("gpu0", kind="gpu")
IN_CPU = replace(GPU, power_in="cpu0")
IDLE_W = 20.0
"""What the receipt of each of them says."""


def watts_of(fleet: Fleet, read: Mapping[str, float], *, on: str) -> float:
    """Of the node with one more replica on that device, whose inferences draw nothing beyond idling. read: what each
    device reports."""
    state = fleet.nodes["a"]
    readings = {each.name: reading(each, power_w=Watts(read.get(each.name, math.nan))) for each in state.node.devices}
    state = replace(state, readings=readings)
    scope = Scope(inputs(fleet.with_node(state), intent(), profiles={DIGEST: profile()}))
    device_asked = state.device(on)
    assert device_asked is not None
    option = scope.option(intent(), intent().models[0], state, device_asked)
    assert option.prediction is not None
    resting = replace(option.prediction, joules=Interval(0.0, 0.0, 0.0))
    return scope.node_watts(replace(option, prediction=resting), intent(), 1)


def fleet_with(*devices: Device, idle: float = IDLE_W) -> Fleet:
    return fleet_of(node("a", *devices), watts=4 * idle)


APART, SHARED, TURNED = fleet_with(CPU, GPU), fleet_with(CPU, IN_CPU), fleet_with(IN_CPU, CPU)


@given(st.floats(0.0, 500.0), st.floats(0.0, 500.0), st.sampled_from(("cpu0", "gpu0")))
def test_what_one_meter_counts_is_counted_once(first: float, second: float, on: str) -> None:
    """A processor's package contains its graphics; both instances of a divided GPU report the whole of it."""
    read = {"cpu0": first, "gpu0": second}
    assert watts_of(APART, read, on=on) == pytest.approx(first + second)
    assert watts_of(SHARED, read, on=on) == pytest.approx(max(first, second))
    assert watts_of(TURNED, read, on=on) == pytest.approx(max(first, second)), "in any order"


@pytest.mark.parametrize("on", ["cpu0", "gpu0"])
def test_a_device_that_another_ones_meter_counts_needs_none(on: str) -> None:
    assert watts_of(SHARED, {"cpu0": 5.0}, on=on) == 5.0
    assert watts_of(SHARED, {"gpu0": 5.0}, on=on) == 5.0, "on an APU that of the graphics counts both"
    assert watts_of(SHARED, {}, on=on) == IDLE_W, "idle once"
    assert watts_of(APART, {"cpu0": 5.0}, on=on) == 5.0 + IDLE_W
    unknown = fleet_with(CPU, GPU, idle=math.nan)
    assert math.isnan(watts_of(unknown, {"cpu0": 5.0}, on=on))


def test_a_device_without_open_shapes_takes_what_the_workload_fixes() -> None:
    npu = fleet_of(node("a", device("npu0", kind="npu", fixed_shapes=True)))
    (plan,) = place(inputs(npu, intent(), profiles={DIGEST: OPEN})).workloads
    assert not plan.targets
    refusal = plan.candidates[0].refusal
    assert refusal is not None
    assert refusal.code is Code.SHAPES_OPEN
    assert "x [-1, 3, -1, -1]" in refusal.found
    (plan,) = place(inputs(npu, intent(shapes={"x": (1, 3, -1, 112)}), profiles={DIGEST: OPEN})).workloads
    assert not plan.targets, "one axis is still open"
    (plan,) = place(inputs(npu, intent(shapes=FIXED), profiles={DIGEST: OPEN})).workloads
    (target,) = plan.targets
    assert target.shapes == FIXED


def test_costs_at_the_shapes_that_are_served() -> None:
    """A quarter of the elements is a quarter of the FLOPs; the weights are moved all the same."""
    small = at_shapes(OPEN, FIXED)
    assert small.reference_shapes == FIXED
    assert small.flops == OPEN.flops / 4
    assert OPEN.bytes_moved / 4 < small.bytes_moved < OPEN.bytes_moved
    assert sum(row.weight_bytes for row in demand_of(small).rows) <= OPEN.weight_bytes
    assert work_of(small).shapes == FIXED
    assert at_shapes(OPEN, {}) is OPEN


def test_a_shape_of_another_rank_or_name_changes_nothing() -> None:
    for odd in ({"x": (1, 3)}, {"y": (1, 3, 8, 8)}, {"x": (-1, 3, -1, -1)}):
        assert at_shapes(OPEN, odd).reference_shapes == OPEN.reference_shapes
        assert open_axis(OPEN, odd)
    assert open_axis(_without_axes(OPEN), {}) == ""


def _without_axes(open_: ModelProfile) -> ModelProfile:
    return replace(open_, inputs=(TensorSpec("x", "FP32", (1, 3, 224, 224)),))


def test_what_a_provider_takes_is_told_where_models_share_a_worker() -> None:
    gpu = device("gpu0", kind="gpu")
    fleet = fleet_of(node("a", gpu), provider_bytes=Bytes(800 * MIB))
    for is_shared, told in ((False, 0), (True, 800 * MIB)):
        (plan,) = place(inputs(fleet, replace(intent("w"), shared_worker=is_shared))).workloads
        (target,) = plan.targets
        assert target.memory_bytes > 800 * MIB
        assert target.provider_bytes == told
