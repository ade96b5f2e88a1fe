"""Devices that compute in another precision than the model's: what their first answers are compared by, how a
difference is learnt, and what clears it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.builders.coordinator_core import DIGEST, CoreRegion, device, fleet_of, inputs, intent, node, require
from shoal.coordinator import codec
from shoal.coordinator.controllers.workloads.memory import MEMORY, SmallMemory, memory_writes
from shoal.coordinator.core.migration.estimate import MoveAnswer, estimate_move
from shoal.coordinator.core.placement.accuracy import comparison_of
from shoal.coordinator.core.placement.model import Aim, Inputs, ReplicaTarget, Triple
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads import failures
from shoal.coordinator.core.workloads.decide import inputs_of
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS, ReconcilerMemory
from shoal.types.assignment import Assignment, Comparison
from shoal.types.codes import Code
from shoal.types.migration import Against, Metric, MigrationRule, PackRef, Tolerance
from shoal.types.receipt import RuntimeSupport
from shoal.types.tolerance import default
from shoal.types.units import Bytes, Elapsed, Wall
from shoal.types.workload import Intent, ModelRef

NPU = device("npu0", kind="npu", computes_fp32_in="fp16")
PACK = PackRef("sha256:" + "5" * 64, Bytes(1000), 16, answers=False)
NEAR, WIDE = (Tolerance("", Metric.MAX_ABS, bound) for bound in (1e-3, 0.5))


def workload(tolerance: Tolerance | None = None, **more: Any) -> Intent:
    return intent(migration=MigrationRule(tolerances=() if tolerance is None else (tolerance,)), **more)


def target_of(at: Inputs) -> ReplicaTarget:
    (plan,) = place(at).workloads
    (target,) = plan.targets
    return target


def test_answers_are_compared_where_the_device_computes_in_another_precision() -> None:
    npu, cpu = (fleet_of(node("a", each)) for each in (NPU, device()))
    assert target_of(inputs(npu, workload())).comparison == Comparison(default("fp32", "fp16"), 8)
    assert target_of(inputs(npu, workload(WIDE))).comparison == Comparison((WIDE,), 8)
    assert target_of(inputs(cpu, workload(WIDE))).comparison is None


def test_what_the_policy_says_of_comparing_holds() -> None:
    rule = MigrationRule(samples=20, advisory=True)
    assert comparison_of(intent(migration=rule), NPU, "fp32") == Comparison(default("fp32", "fp16"), 20, advisory=True)
    assert comparison_of(intent(migration=MigrationRule(against=Against.NONE)), NPU, "fp32") is None
    for precision in ("fp16", "int8", "fp64"):
        assert comparison_of(workload(), NPU, precision) is None


def drift_over(one: Assignment) -> Code | None:
    """Its answers to generated inputs are 0.01 off."""
    judged = one.comparison
    too_near = judged is not None and not judged.advisory and judged.tolerances[0].bound < 0.01
    return Code.DRIFT_OVER if too_near and not one.samples else None


def refused_region(tolerance: Tolerance = NEAR) -> CoreRegion:
    """Two nodes with such a device, of which the first to load finds the answers too far off."""
    region = CoreRegion(node("a", NPU), node("b", NPU))
    for agent in region.agents.values():
        agent.refuses = drift_over
    region.intents = (workload(tolerance),)
    region.run(60)
    return region


def assignments(region: CoreRegion) -> list[Assignment]:
    return [one for content in region.desired.values() for one in content.assignments]


def start_count(region: CoreRegion) -> int:
    return sum(len(agent.started) for agent in region.agents.values())


def test_what_one_node_finds_counts_for_the_region_and_is_kept() -> None:
    region = refused_region()
    assert start_count(region) == 1, "the other node is not tried"
    (known,) = region.memory.unloadable
    assert known.refusal.code is Code.DRIFT_OVER
    puts, _ = memory_writes(ReconcilerMemory(), region.memory, {}, ())
    assert codec.load(SmallMemory, puts[MEMORY]).unloadable == region.memory.unloadable
    assert region.decision is not None
    (plan,) = region.decision.plan.workloads
    assert plan.refusal is not None
    assert plan.refusal.code is Code.DRIFT_OVER
    assert Code.DRIFT_OVER in {wait.code for wait in region.decision.waits}


def test_it_is_placed_where_the_device_computes_in_its_precision() -> None:
    region = CoreRegion(node("a", NPU), node("b"), flops={"a": 1e12, "b": 1e9})
    region.agents["a"].fail = Code.DRIFT_OVER
    region.intents = (workload(),)
    region.run(60)
    assert region.agents["a"].started
    (serving,) = assignments(region)
    assert (serving.device, serving.comparison) == ("cpu0", None)
    world = inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(region.now))
    estimate = estimate_move(world, region.intents[0].key, Aim("a")).estimates[0]
    assert estimate.answer is MoveAnswer.NO
    assert estimate.refusal is not None
    assert estimate.refusal.code is Code.DRIFT_OVER
    assert "tolerance" in estimate.nearest


def wider(before: Intent) -> Intent:
    return replace(before, revision=2, migration=replace(before.migration, tolerances=(WIDE,)))


def with_samples(before: Intent) -> Intent:
    return replace(before, revision=2, packs={DIGEST: PACK})


def advisory(before: Intent) -> Intent:
    return replace(before, revision=2, migration=replace(before.migration, advisory=True))


@pytest.mark.parametrize("change", [wider, with_samples, advisory])
def test_what_it_was_judged_by_clears_it_when_it_changes(change: Callable[[Intent], Intent]) -> None:
    region = refused_region()
    region.intents = (change(region.intents[0]),)
    region.run(30)
    (serving,) = assignments(region)
    assert start_count(region) == 2
    assert serving.comparison == comparison_of(region.intents[0], NPU, "fp32")


def test_a_tolerance_that_is_too_close_still_is_refused_and_the_earlier_one_remembered() -> None:
    region = refused_region()
    first = region.intents[0]
    region.intents = (
        replace(wider(first), migration=replace(first.migration, tolerances=(replace(NEAR, bound=2e-3),))),
    )
    region.run(30)
    assert start_count(region) == 2
    region.intents = (replace(first, revision=3),)
    region.run(30)
    assert start_count(region) == 2, "it was refused with that one"
    assert len(failures.load_refusals(region.memory.unloadable)) == 2


def too_far(one: Assignment) -> Code | None:
    """What is made of it is within the wider bound alone."""
    made = one.preparation
    return Code.PREPARE_FAILED if made is not None and made.tolerances == (NEAR,) else None


def test_a_prepared_model_that_was_too_far_is_made_again_by_a_wider_tolerance() -> None:
    """One that failed is still assigned when the policy changes."""
    made = ModelRef("model.onnx", DIGEST, "int8", prepared=True)
    only = require(precisions=("int8",))
    region = CoreRegion(node("a"))
    state = region.fleet.nodes["a"]
    receipts = {
        name: replace(each, runtime=RuntimeSupport(13, {}, prepares=("int8",))) for name, each in state.receipts.items()
    }
    region.fleet = replace(region.fleet, nodes={"a": replace(state, receipts=receipts)})
    region.agents["a"].refuses = too_far
    region.intents = (workload(NEAR, models=(made,), packs={DIGEST: PACK}, require=only),)
    region.run(30)
    assert start_count(region) == 1
    region.intents = (wider(region.intents[0]),)
    region.run(30)
    (serving,) = assignments(region)
    assert serving.preparation is not None
    assert serving.preparation.tolerances == (WIDE,)
    assert start_count(region) == 2


def test_a_move_that_was_too_far_off_is_made_at_once_by_a_wider_tolerance() -> None:
    """The first replica serves meanwhile; no cooldown of the move that failed holds the next one."""
    region = CoreRegion(node("a"), node("b"), flops={"a": 1e9, "b": 1e12})
    made = ModelRef("model.onnx", DIGEST, "int8", prepared=True)
    state = region.fleet.nodes["b"]
    receipts = {
        name: replace(each, runtime=RuntimeSupport(13, {}, prepares=("int8",))) for name, each in state.receipts.items()
    }
    region.fleet = replace(region.fleet, nodes={**region.fleet.nodes, "b": replace(state, receipts=receipts)})
    region.agents["b"].refuses = too_far
    first = workload(NEAR, packs={DIGEST: PACK}, require=require(where='node.name == "a"'))
    region.intents = (first,)
    region.run(20)
    there = replace(first, revision=2, models=(made,), require=require(where='node.name == "b"', precisions=("int8",)))
    region.intents = (there,)
    region.run(20)
    (serving,) = (one for one in assignments(region) if one.precision == "fp32")
    assert len(region.agents["b"].started) == 1
    region.intents = (replace(there, revision=3, migration=MigrationRule(tolerances=(WIDE,))),)
    region.run(30)
    (moved,) = assignments(region)
    assert moved.id != serving.id
    assert moved.preparation is not None
    assert len(region.agents["b"].started) == 2


def test_of_a_move_the_tolerance_is_that_of_the_arithmetic() -> None:
    """A model in fp32 moves from the processor: its answers there are those of fp16."""
    region = CoreRegion(node("a"), node("b", NPU))
    region.intents = (replace(workload(), require=require(where='node.name == "a"')),)
    region.run(20)
    (source,) = assignments(region)
    region.intents = (replace(workload(), revision=2, require=require(where='node.name == "b"')),)
    region.step()
    (target,) = (one for one in assignments(region) if one.id != source.id)
    assert target.verification is not None
    assert target.verification.tolerances == default("fp32", "fp16")


def test_loads_are_told_apart_by_what_they_are_judged_by() -> None:
    region = CoreRegion(node("a", NPU))
    region.intents = (workload(NEAR),)
    region.step()
    (one,) = assignments(region)
    plain = Triple.of_load(DIGEST, NPU, {}, None)
    assert Triple.of_assignment(one, NPU) != plain
    assert Triple.of_assignment(replace(one, comparison=Comparison((NEAR,), 8, advisory=True)), NPU) == plain
    assert Triple.of_assignment(replace(one, comparison=Comparison((NEAR,), 99)), NPU) == Triple.of_assignment(one, NPU)
    for other in (replace(one, comparison=Comparison((WIDE,), 8)), replace(one, samples=PACK.digest)):
        assert Triple.of_assignment(other, NPU) not in (Triple.of_assignment(one, NPU), plain)
