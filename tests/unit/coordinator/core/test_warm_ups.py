"""What a region's warm-ups teach it about places where a model never ran."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from immutables import Map

from harness.builders.coordinator_core import DIGEST, CoreRegion, device, intent, node, profile, warm
from shoal.coordinator.controllers.workloads.memory import OF_NODES, memory_writes
from shoal.coordinator.core.placement.model import Trial
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.prediction.model import Basis, Prediction
from shoal.coordinator.core.prediction.residuals import Residual
from shoal.coordinator.core.workloads.decide import inputs_of
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS, ReconcilerMemory, RegionState
from shoal.coordinator.core.workloads.warm_ups import (
    MOST_OF_A_KIND,
    MOST_WARM_UPS,
    ResidualsByKind,
    WarmUps,
    remember_warm_ups,
)
from shoal.types.assignment import Served
from shoal.types.device import EnergySource
from shoal.types.migration import Against, MigrationRule
from shoal.types.profile import PROFILE_VERSION, KernelCost
from shoal.types.units import Bytes, Elapsed, Joules, Seconds, Wall
from shoal.types.workload import Intent, WorkloadKey


def predictions(region: CoreRegion) -> dict[str, Prediction]:
    """By node: of its device, for the first workload."""
    found = place(inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(region.now)))
    return {
        each.node: each.prediction for each in found.workloads[0].candidates if each.prediction is not None
    }  # fmt: skip


def region_of(*, p50_s: float = 0.05) -> CoreRegion:
    """Two nodes of one class and one of another; the workload runs on `a`."""
    other = replace(device(), vendor="another")
    region = CoreRegion(node("a"), node("b"), node("c", other), flops={"a": 3e11, "b": 1e11, "c": 1e11})
    region.agents["a"].p50_s = p50_s
    region.intents = (intent(),)
    return region


def test_a_warm_up_corrects_other_places() -> None:
    region = region_of()
    region.step()
    before = predictions(region)
    assert {each.basis for each in before.values()} == {Basis.GUESS}
    region.run(5)
    after = predictions(region)
    assert [after[name].basis for name in "abc"] == [Basis.HERE, Basis.SAME_CLASS, Basis.TRANSFERRED]
    slower = {name: after[name].latency_p50_s.mid / before[name].latency_p50_s.mid for name in "abc"}
    assert slower["b"] == pytest.approx(slower["a"], rel=0.1)
    assert slower["b"] > slower["c"] > 1


def test_the_tail_of_service_reaches_places_where_the_model_never_ran() -> None:
    region = region_of()
    region.run(5)
    before = predictions(region)
    served = Served("eu", 400, 0, Seconds(0.05), Seconds(0.15), Joules(1.0), EnergySource.ESTIMATED)
    region.agents["a"].served = (served,)
    region.run(5)
    (residual,) = region.memory.residuals.values()
    assert residual.tail_runs == 400
    after = predictions(region)
    for name in "bc":
        ratios = [each[name].latency_p95_s.mid / each[name].latency_p50_s.mid for each in (before, after)]
        assert ratios[0] < ratios[1] <= 3
    puts, _ = memory_writes(ReconcilerMemory(), region.memory, {}, ["a"])
    assert b'"tail_runs":400' in puts[OF_NODES + "a"]


def test_a_second_warm_up_is_kept_with_what_it_differs_by() -> None:
    region = region_of(p50_s=0.05)
    region.run(5)
    (residual,) = region.memory.residuals.values()
    assert math.isnan(residual.log_repeat)
    region.agents["a"].p50_s = 0.06
    region.run(5)
    (residual,) = region.memory.residuals.values()
    assert residual.log_repeat == pytest.approx(math.log(1.2))
    region.run(5)
    assert list(region.memory.residuals.values()) == [residual], "the same report again is no third warm-up"
    puts, _ = memory_writes(ReconcilerMemory(), region.memory, {}, ["a"])
    assert b'"log_repeat":0.18' in puts[OF_NODES + "a"]
    (trial,) = region.memory.residuals
    older = replace(residual, profile_version=0)
    region.memory = replace(region.memory, residuals=region.memory.residuals.set(trial, older))
    found = remember_afresh(region.world(), "ab", {each.key: each for each in region.intents})
    assert found.residuals == Map({trial: residual}), "what is computed anew of the same warm-up keeps it"


def test_the_tail_of_an_emulated_device_reaches_nowhere() -> None:
    emulated = replace(device(), emulated=True, profile="board")
    region = CoreRegion(node("a", emulated), node("b", emulated), flops={"a": 3e11, "b": 1e11})
    region.intents = (intent(),)
    served = Served("eu", 400, 0, Seconds(0.05), Seconds(0.15), Joules(1.0), EnergySource.PROFILE)
    region.agents["a"].p50_s, region.agents["a"].served = 0.05, (served,)
    region.run(5)
    (residual,) = region.memory.residuals.values()
    assert math.isnan(residual.log_tail)
    trial = next(iter(region.memory.residuals))
    learnt = replace(residual, log_tail=0.0, tail_runs=20)
    region.memory = replace(region.memory, residuals=region.memory.residuals.set(trial, learnt))
    found = remember_afresh(region.world(), "ab", {})
    assert math.isnan(found.residuals[trial].log_tail), "what an older version learnt is forgotten"
    assert found.trials == {trial}, "and stored"


def test_nothing_moves_to_an_equal_place_because_it_never_ran_there() -> None:
    """The warm-up's p95 is another multiple of its p50 than a prediction assumes."""
    region = CoreRegion(node("a"), node("b"), flops={"a": 1e11, "b": 1e11})
    for agent in region.agents.values():
        agent.p50_s, agent.p95_over_p50 = 0.05, 2.0
    rule = MigrationRule(automatic=True, gain=0.02, against=Against.NONE)
    region.intents = (intent(migration=rule, weights={"latency": 1.0}),)
    region.run(60)
    assert region.migrations == {}


def test_what_was_learnt_outlives_the_store_and_the_node() -> None:
    region = region_of()
    region.run(5)
    (residual,) = region.memory.residuals.values()
    assert residual.log_ratio_of_sum > 0
    fleet = replace(region.fleet, nodes={name: region.fleet.nodes[name] for name in "bc"})
    known = remember_afresh(replace(region.world(), fleet=fleet), "abc", {})
    assert known == WarmUps(region.memory.measured, region.memory.residuals, frozenset())


def test_warm_ups_of_one_step_teach_what_they_teach_in_one_step_each() -> None:
    names = [f"n{number:02}" for number in range(3 * MOST_OF_A_KIND)]
    region = CoreRegion(*map(node, names), flops=dict.fromkeys(names, 1e11))
    for number, name in enumerate(names):
        region.agents[name].p50_s = 0.02 * (1 + number % 5)
    region.intents = tuple(intent(name, where=f'node.name == "{name}"') for name in names)
    region.run(5)
    intents, before = {each.key: each for each in region.intents}, ReconcilerMemory()
    world = replace(region.world(), memory=before)
    at_once = remember_afresh(world, names, intents)
    changed, kept = set[Trial](), ResidualsByKind(before.residuals)
    for name in names:
        found = remember_warm_ups(replace(world, memory=before), [name], intents, kept)
        assert found == remember_afresh(replace(world, memory=before), [name], intents), "whatever is kept"
        before = replace(before, measured=found.measured, residuals=found.residuals)
        changed |= found.trials
    assert len(at_once.measured) == len(names)
    assert MOST_OF_A_KIND <= len(at_once.residuals) < len(names)
    assert at_once == WarmUps(before.measured, before.residuals, frozenset(changed))


def test_a_warm_up_of_no_time_at_all_teaches_nothing() -> None:
    region = region_of(p50_s=0.0)
    region.run(5)
    assert region.memory.measured
    assert not region.memory.residuals
    assert predictions(region)["b"].basis is Basis.GUESS


def test_a_corrupt_residual_is_left_out() -> None:
    region = region_of()
    region.run(5)
    (residual,) = region.memory.residuals.values()
    wrong = [replace(residual, log_ratio_of_sum=math.nan), replace(residual, mix=(1.0,))]
    stored = {Trial(DIGEST, "a", f"cpu{number}"): each for number, each in enumerate(wrong)}
    region.memory = replace(region.memory, residuals=Map(stored))
    found = predictions(region)
    assert found["b"].basis is Basis.GUESS


def test_copies_between_layouts_count_by_the_node() -> None:
    """Of two nodes that differ in their architecture alone, one makes none; the region learns by what each makes."""
    processor = replace(device(), provider="CPUExecutionProvider")
    arm = replace(node("b", processor), arch="aarch64")
    region = CoreRegion(node("a", processor), arm, flops={"a": 1e11, "b": 1e11})
    kernels = (KernelCost("conv", 2.0, 1e9, 1e7, 1e6),)
    copied = replace(profile(), kernels=kernels, layout_copies=3, layout_bytes=Bytes(400_000_000))
    region.profiles = {DIGEST: copied}
    region.intents = (intent(replicas=2),)
    region.step()
    before = predictions(region)
    assert before["a"].latency_p50_s.mid == pytest.approx(before["b"].latency_p50_s.mid + 3e-6 + 4e8 / 1e10)
    for agent in region.agents.values():
        agent.p50_s = before["b"].latency_p50_s.mid
    region.run(5)
    ratios = {trial.node: each.log_ratio_of_sum for trial, each in region.memory.residuals.items()}
    assert ratios["b"] == pytest.approx(0)
    assert ratios["a"] < -0.5


def remember_afresh(world: RegionState, nodes: Iterable[str], intents: Mapping[WorkloadKey, Intent]) -> WarmUps:
    """With nothing kept of earlier steps."""
    return remember_warm_ups(world, nodes, intents, ResidualsByKind(world.memory.residuals))


def older(residual: Residual) -> Residual:
    """As a version left it whose roofline takes the larger of arithmetic and movement."""
    return replace(residual, log_ratio=0.3, log_ratio_of_sum=math.nan)


def test_a_ratio_of_an_older_version_is_computed_again_while_the_replica_runs() -> None:
    region = region_of()
    region.run(5)
    before = region.memory.residuals
    region.memory = replace(region.memory, residuals=Map({trial: older(each) for trial, each in before.items()}))
    found = remember_afresh(region.world(), "abc", {each.key: each for each in region.intents})
    assert found.trials == frozenset(before)
    assert [repr(each) for each in found.residuals.values()] == [repr(each) for each in before.values()]


def test_a_ratio_is_computed_again_where_a_model_has_a_newer_profile() -> None:
    region = region_of()
    region.run(5)
    newer = replace(region.profiles[DIGEST], version=PROFILE_VERSION + 1, size_bytes=Bytes(2 * 2**20))
    region.profiles = {**region.profiles, DIGEST: newer}
    intents = {each.key: each for each in region.intents}
    found = remember_afresh(region.world(), "abc", intents)
    ((trial, learnt),) = found.residuals.items()
    assert found.trials == {trial}
    assert learnt.load_sizes is not None
    assert learnt.load_sizes.other_bytes == 2 * 2**20
    known = replace(region.world(), memory=replace(region.memory, residuals=found.residuals))
    assert remember_afresh(known, "abc", intents).trials == frozenset()


def test_what_an_older_version_knew_of_a_load_stays_where_no_receipt_promises_anything() -> None:
    region = region_of()
    region.run(5)
    kept = Map({trial: older(each) for trial, each in region.memory.residuals.items()})
    region.memory = replace(region.memory, residuals=kept)
    silent = {name: replace(state, receipts={}) for name, state in region.fleet.nodes.items()}
    world = replace(region.world(), fleet=replace(region.fleet, nodes=silent))
    assert remember_afresh(world, "abc", {}) == WarmUps(region.memory.measured, kept, frozenset())


def test_ratios_of_an_older_version_keep_no_newer_ones_out() -> None:
    region = region_of()
    region.run(5)
    (learnt,) = region.memory.residuals.values()
    gone = [Trial(DIGEST, f"gone{at}", "cpu0") for at in range(MOST_OF_A_KIND)]
    region.memory = ReconcilerMemory(residuals=Map(dict.fromkeys(gone, older(learnt))))
    found = remember_afresh(region.world(), "abc", {each.key: each for each in region.intents})
    assert len(found.residuals) == MOST_OF_A_KIND
    assert [trial.node for trial, each in found.residuals.items() if each.is_of_sum] == ["a"]
    assert found.nodes == {"a", "gone0"}


def test_warm_ups_of_nodes_that_are_gone_go_first() -> None:
    region = region_of()
    kept = Trial(DIGEST, "a", "cpu0")
    gone = [Trial(DIGEST, f"{number:05}", "cpu0") for number in range(MOST_WARM_UPS)]
    memory = ReconcilerMemory(measured=Map(dict.fromkeys((*gone, kept), warm())))
    found = remember_afresh(replace(region.world(), memory=memory), (), {})
    assert len(found.measured) == MOST_WARM_UPS - MOST_WARM_UPS // 8
    assert kept in found.measured
    assert gone[-1].node in found.nodes
    assert gone[0] in found.measured


def test_what_the_region_learns_from_is_kept() -> None:
    """Also of nodes that are gone: there are few of a kind, and each other one of it would be learnt from again."""
    region = region_of()
    region.run(5)
    (learnt,) = region.memory.residuals.values()
    here = Trial(DIGEST, "a", "cpu0")
    gone = [Trial(DIGEST, f"z{number:05}", "cpu0") for number in range(MOST_WARM_UPS + 1)]
    measured, residuals = Map(dict.fromkeys((*gone, here), warm())), Map({here: learnt, gone[-1]: learnt})
    memory = ReconcilerMemory(measured=measured, residuals=residuals)
    found = remember_afresh(replace(region.world(), memory=memory), (), {})
    assert len(found.measured) == MOST_WARM_UPS - MOST_WARM_UPS // 8
    assert {*found.residuals} == {here, gone[-1]}
    assert {*found.measured} >= {here, gone[-1], gone[0]}
    assert gone[-2] not in found.measured


def test_the_region_learns_from_a_few_measurements_of_a_kind_and_from_what_differs() -> None:
    region = CoreRegion(*(node(f"n{at:02}") for at in range(MOST_OF_A_KIND + 4)))
    region.intents = (intent(replicas=len(region.agents)),)
    for at, agent in enumerate(region.agents.values()):
        agent.p50_s = 0.05 if at < MOST_OF_A_KIND + 2 else 0.08
    region.run(8)
    assert len(region.memory.measured) == len(region.agents)
    learnt = {trial.node: math.exp(each.log_ratio_of_sum) for trial, each in region.memory.residuals.items()}
    assert len(learnt) == MOST_OF_A_KIND
    far = [name for name, agent in region.agents.items() if agent.p50_s > 0.05]
    assert {*far} <= learnt.keys()
    puts, _ = memory_writes(ReconcilerMemory(), region.memory, {}, region.agents)
    without = [name for name in region.agents if b'"residual":null' in puts[OF_NODES + name]]
    assert {*without} == region.agents.keys() - learnt.keys()
