"""Several providers on one piece of hardware, and devices that take no open shapes."""

from dataclasses import replace

import pytest

from harness.builders.coordinator_core import DIGEST, GIB, MIB, device, fleet_of, inputs, intent, node, profile
from shoal.coordinator.core.negotiation.advertise import capacity_classes
from shoal.coordinator.core.placement.model import Reservation, Slot
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.prediction.demand import at_shapes, demand_of, open_axis, work_of
from shoal.types.codes import Code
from shoal.types.device import Node
from shoal.types.profile import ModelProfile, TensorSpec
from shoal.types.units import Bytes

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
