"""Placement: each reason, each choice, and the laws that hold for every region."""

import inspect
import math
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import (
    DIGEST,
    GIB,
    MIB,
    SMALL,
    START,
    device,
    fleet_of,
    inputs,
    intent,
    node,
    observation,
    profile,
    reading,
    receipt,
    relaxation,
    require,
    traffic,
    warm,
)
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.commitments import total_bytes
from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.migration.advance import trigger_view
from shoal.coordinator.core.migration.budget import HoldReason
from shoal.coordinator.core.migration.reasons_to_stay import reasons_to_stay
from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.explain import STAYS_WITHOUT_TRIGGER
from shoal.coordinator.core.placement.model import (
    Candidate,
    Inputs,
    PlacementPlan,
    Poisoning,
    RegionFacts,
    Slot,
    Triple,
    WorkloadPlan,
)
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.rank import pareto
from shoal.coordinator.core.workloads.decide import decide, inputs_of
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS, ReconcilerMemory, RegionState
from shoal.types.assignment import Phase
from shoal.types.codes import Code
from shoal.types.migration import MigrationRule
from shoal.types.receipt import Kernel, RuntimeSupport
from shoal.types.units import Bytes, Elapsed, GramsPerHour, Joules, Seconds, UsdPerHour, Wall
from shoal.types.workload import Intent, Limits, ModelRef, Quota, Spread, Standby

BOTH = (ModelRef("model.onnx", DIGEST, ""), ModelRef("small.onnx", SMALL, ""))


def only(plan: PlacementPlan) -> WorkloadPlan:
    (found,) = plan.workloads
    return found


def chosen_nodes(plan: WorkloadPlan) -> list[str]:
    return sorted(target.node for target in plan.targets)


def candidate(plan: WorkloadPlan, name: str) -> Candidate:
    return next(each for each in plan.candidates if each.node == name)


def with_node(fleet: Fleet, name: str, **changes: Any) -> Fleet:
    return fleet.with_node(replace(fleet.nodes[name], **changes))


def test_the_lowest_latency_wins_and_every_term_is_shown() -> None:
    fleet = fleet_of(node("a"), node("b"), flops={"a": 1e11, "b": 2e11})
    plan = only(place(inputs(fleet, intent())))
    assert chosen_nodes(plan) == ["b"]
    assert [each.node for each in plan.candidates] == ["b", "a"]
    best, other = plan.candidates
    assert best.chosen
    assert best.score == 1.0
    assert other.score == pytest.approx(other.terms[0].value / best.terms[0].value)
    assert [term.name for term in best.terms] == [term.name for term in score.TERMS]
    assert best.pareto
    assert not other.pareto
    assert [change.sign for change in plan.changes] == ["+"]


def test_weights_decide_between_fast_and_frugal() -> None:
    fast, frugal = node("fast"), node("frugal")
    fleet = fleet_of(fast, frugal, flops={"fast": 1e12, "frugal": 1e11})
    fleet, _ = updates.merge_receipts(
        fleet, "fast", (receipt(fast, fast.devices[0], flops=1e12, watts=900.0),), Elapsed(0.0), Wall(START)
    )
    assert chosen_nodes(only(place(inputs(fleet, intent(weights={"latency": 1}))))) == ["fast"]
    assert chosen_nodes(only(place(inputs(fleet, intent(weights={"energy": 1}))))) == ["frugal"]
    costs = {Slot("fast", "cpu0"): UsdPerHour(3.0), Slot("frugal", "cpu0"): UsdPerHour(0.1)}
    assert chosen_nodes(only(place(inputs(fleet, intent(weights={"cost": 1}), costs=costs)))) == ["frugal"]
    assert all(each.pareto for each in only(place(inputs(fleet, intent(), costs=costs))).candidates)


def test_what_runs_elsewhere_is_tried_at_home_each_by_itself_and_takes_no_room() -> None:
    """As though it alone came home: the device has room for two of the three."""
    fleet = fleet_of(node("a"))
    wide = {DIGEST: profile(DIGEST, size=500 * MIB)}
    here, away, third = intent("here"), intent("away"), intent("third")
    keys = {each.key for each in (away, third)}
    world = inputs(fleet, here, away, third, profiles=wide, elsewhere=frozenset(keys))
    both = place(world, explain=False, as_if_local=keys)
    for key in keys:
        alone = place(replace(world, elsewhere=world.elsewhere - {key}), explain=False)
        assert both.of(key) == alone.of(key)
        assert alone.of(key).refusal is None  # type: ignore[union-attr]
    assert both.of(here.key) == place(world, explain=False).of(here.key)
    together = place(replace(world, elsewhere=frozenset()), explain=False)
    assert [each.refusal is None for each in together.workloads] != [True, True, True], "not for all of them at once"


def test_a_variant_is_a_candidate_of_its_own() -> None:
    plan = only(place(inputs(fleet_of(node("a")), intent(models=BOTH))))
    assert len(plan.candidates) == 2
    assert plan.targets[0].model == SMALL
    assert plan.targets[0].precision == "int8"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"cordoned": True}, Code.NODE_CORDONED),
        ({"liveness": Liveness.SUSPECT}, Code.NODE_SUSPECT),
        ({"liveness": Liveness.LOST}, Code.NODE_LOST),
        ({"quarantined": True}, Code.NODE_QUARANTINED),
        ({"front_ready": False}, Code.NODE_NOT_READY),
        ({"has_full_status": False}, Code.NODE_NOT_READY),
        ({"receipts": {}}, Code.CAPABILITY_UNMEASURED),
    ],
)
def test_why_a_node_gets_nothing_new(change: dict[str, Any], code: Code) -> None:
    fleet = with_node(fleet_of(node("a")), "a", **change)
    plan = only(place(inputs(fleet, intent())))
    assert plan.targets == ()
    found = candidate(plan, "a")
    assert found.refusal is not None
    assert found.refusal.code is code
    assert found.refusal.remedy
    assert found.nearest
    assert plan.refusal is not None
    assert plan.refusal.code is code


@pytest.mark.parametrize(
    ("asked", "code", "nearest"),
    [
        ({"where": 'node.labels.site == "lab"'}, Code.SELECTOR_MISMATCH, "where: (node.labels.site"),
        ({"precisions": ("int8",)}, Code.PRECISION_DENIED, "precision: {allow: [int8, fp32]}"),
        ({"latency_p95_s": Seconds(0.01)}, Code.SLO_UNREACHABLE, "latency: {p95: "),
        ({"limits": Limits(cost=UsdPerHour(0.5))}, Code.COST_OVER, "limits: {cost: 1 USD/h}"),
        ({"limits": Limits(energy=Joules(0.01))}, Code.ENERGY_OVER, "limits: {energy: "),
        ({"limits": Limits(carbon=GramsPerHour(0.5))}, Code.CARBON_OVER, "limits: {carbon: "),
        ({"measured_only": True, "measured_within_s": Seconds(60)}, Code.CAPABILITY_STALE, "trust: {within: "),
    ],
)
def test_what_a_document_would_have_to_give(asked: dict[str, Any], code: Code, nearest: str) -> None:
    known: dict[str, Any] = {
        "costs": {Slot("a", "cpu0"): UsdPerHour(1.0)},
        "region": RegionFacts("eu-west", "eu", carbon_g_per_kwh=350.0),
        "wall": Wall(START + 600),
    }
    one = intent(**asked)
    plan = only(place(inputs(fleet_of(node("a", labels={"site": "shop"})), one, **known)))
    assert plan.refusal is not None
    assert plan.refusal.code is code
    assert plan.nearest.startswith(nearest)
    assert plan.proposal is not None
    applied = replace(one, require=plan.proposal.require, limits=plan.proposal.limits)
    after = only(place(inputs(fleet_of(node("a", labels={"site": "shop"})), applied, **known)))
    assert after.refusal is None
    assert chosen_nodes(after) == ["a"]


def test_how_far_it_is_overloaded_is_told_without_an_exponent() -> None:
    """Before: overloaded by 1.23e+06 requests/s."""
    asked = intent(latency_p95_s=Seconds(0.01), traffic=traffic(1_234_567.0))
    plan = only(place(inputs(fleet_of(node("a")), asked)))
    assert plan.refusal is not None
    assert plan.refusal.found.startswith("overloaded by 1234567 requests/s")


def test_a_residency_rule_is_never_offered_as_what_could_give() -> None:
    known: dict[str, Any] = {"region": RegionFacts("eu-west", "eu")}
    plan = only(place(inputs(fleet_of(node("a")), intent(residency=("us",)), **known)))
    assert plan.refusal is not None
    elsewhere = "run it in a region in us; residency is not relaxed"
    assert (plan.refusal.code, plan.refusal.remedy) == (Code.RESIDENCY, elsewhere)
    assert (plan.nearest, plan.proposal) == (elsewhere, None)
    assert all("residency:" not in each.nearest for each in plan.candidates)


def test_a_carbon_that_nobody_has_said_is_what_to_say() -> None:
    known: dict[str, Any] = {"region": RegionFacts("eu-west", "eu")}
    plan = only(place(inputs(fleet_of(node("a")), intent(where="region.carbon < 300.0"), **known)))
    (candidate,) = plan.candidates
    assert candidate.refusal is not None
    assert candidate.refusal.code is Code.SELECTOR_MISMATCH
    assert candidate.refusal.found == "region.carbon is unknown"
    assert "shoal region set carbon VALUE" in candidate.refusal.remedy


def test_the_constraint_that_excludes_most_speaks_for_a_workload() -> None:
    """Not the first of the nearest candidate: to be rid of the selector would place nothing."""
    asked = intent(require=require(where='node.labels["site"] == "hall"', latency_p95_s=Seconds(1e-9)))
    sites = {"near": "shop", "far": "hall", "farther": "hall"}
    flops = {"near": 1e14, "far": 1e9, "farther": 1e9}
    fleet = fleet_of(*(node(name, labels={"site": site}) for name, site in sites.items()), flops=flops)
    plan = only(place(inputs(fleet, asked, profiles={DIGEST: profile()})))
    assert plan.refusal is not None
    assert plan.refusal.code is Code.SLO_UNREACHABLE
    assert plan.refusal.found.endswith("; this excludes 3 of 3 candidates, other constraints: SELECTOR_MISMATCH x 1")
    assert str(plan.refusal).count("SLO_UNREACHABLE") == 1, "a code once, at the end"
    assert candidate(plan, "near").refusal is not None
    assert candidate(plan, "near").refusal.code is Code.SELECTOR_MISMATCH  # type: ignore[union-attr]


def test_of_constraints_that_exclude_as_many_the_farthest_from_being_met_speaks() -> None:
    """A price that is 5 % too high is not why, where energy is a thousand times too high."""
    fleet = fleet_of(node("a"), node("b"))
    costs = {Slot(name, "cpu0"): UsdPerHour(1.05) for name in ("a", "b")}
    asked = intent(limits=Limits(cost=UsdPerHour(1.0), energy=Joules(1e-9)))
    plan = only(place(inputs(fleet, asked, profiles={DIGEST: profile()}, costs=costs)))
    assert plan.refusal is not None
    assert plan.refusal.code is Code.ENERGY_OVER
    assert candidate(plan, "a").refusal.code is Code.COST_OVER  # type: ignore[union-attr]


def test_a_model_that_computes_nothing_asks_for_no_precision() -> None:
    fleet = fleet_of(node("a"), precisions=("fp32",))
    computes = profile(precision="bf16")
    moves = replace(computes, costs=tuple(cost for cost in computes.costs if cost.flops == 0))
    found = candidate(only(place(inputs(fleet, intent(), profiles={moves.digest: moves}))), "a")
    assert (found.chosen, found.refusal) == (True, None)
    refusal = candidate(only(place(inputs(fleet, intent(), profiles={computes.digest: computes}))), "a").refusal
    assert refusal is not None
    assert refusal.code is Code.PRECISION_DENIED


def test_operators_and_precisions_that_a_provider_was_not_seen_to_run() -> None:
    """An operator that no load has shown yet is unknown; a precision was tried at the probe."""
    small = node("a", device("npu0", kind="npu"))
    fleet = fleet_of(small, operators=("Conv", "Relu"))
    assert candidate(only(place(inputs(fleet, intent()))), "a").refusal is None
    fleet = fleet_of(small, precisions=("int8",))
    found = candidate(only(place(inputs(fleet, intent()))), "a").refusal
    assert found is not None
    assert found.code is Code.PRECISION_DENIED


@pytest.mark.parametrize(
    ("changes", "code", "found"),
    [
        ({"ir_version": 14}, Code.IR_UNSUPPORTED, "1.31 reads IR up to 13"),
        ({"domains": {"ai.onnx": 27}}, Code.OPSET_UNSUPPORTED, "1.31 has opset 26 of ai.onnx"),
        ({"definitions": {"Conv": 22, "Bit": 26}}, Code.OP_UNSUPPORTED, "1.31 has no kernel for Bit(26)"),
        ({"definitions": {"Conv": 6}}, Code.OP_UNSUPPORTED, "1.31 has no kernel for Conv(6)"),
        ({"definitions": {"Conv": 23}}, Code.OP_UNSUPPORTED, "1.31 has no kernel for Conv(23)"),
        ({"definitions": {"Conv": 11}, "domains": {"ai.onnx": 26, "other": 9}}, None, ""),
        ({"ir_version": 13, "definitions": {"Conv": 22}}, None, ""),
    ],
)
def test_what_a_runtime_says_that_it_does_not_load_is_not_placed_on_it(
    changes: dict[str, Any], code: Code | None, found: str
) -> None:
    runtime = RuntimeSupport(13, {"ai.onnx": 26}, (Kernel("Conv", (7, 10, 11, 21, 22, 0)),))
    fleet = fleet_of(node("a"), runtime=runtime)
    asked = replace(profile(), **changes)
    refusal = candidate(only(place(inputs(fleet, intent(), profiles={asked.digest: asked}))), "a").refusal
    assert (refusal.code if refusal else None, refusal.found if refusal else "") == (code, found)
    silent = fleet_of(node("a"), runtime=RuntimeSupport(13, {}, ()))
    asked = replace(profile(), definitions={"Bit": 26})
    assert only(place(inputs(silent, intent(), profiles={asked.digest: asked}))).refusal is None


def test_a_convolution_in_a_precision_that_only_products_were_seen_to_run_in() -> None:
    of, on = node("a"), node("a").devices[0]
    rates = receipt(of, on).rates
    doubles = replace(rates, matmul_flops={**rates.matmul_flops, "fp64": 1e10})
    fleet = fleet_of(of, precisions=("fp32", "int8", "fp64"), rates=doubles)
    convolves = profile(precision="fp64")
    refusal = candidate(only(place(inputs(fleet, intent(), profiles={convolves.digest: convolves}))), "a").refusal
    assert refusal is not None
    assert (refusal.code, refusal.asked) == (Code.OP_UNSUPPORTED, "Conv")
    multiplies = replace(convolves, costs=tuple(cost for cost in convolves.costs if cost.operator != "Conv"))
    found = candidate(only(place(inputs(fleet, intent(), profiles={multiplies.digest: multiplies}))), "a")
    assert (found.chosen, found.refusal) == (True, None)


def test_a_receipt_of_another_runtime_is_stale() -> None:
    fleet = fleet_of(node("a"))
    state = fleet.nodes["a"]
    old = {"cpu0": replace(state.receipts["cpu0"], runtime_version="1.30")}
    found = candidate(only(place(inputs(with_node(fleet, "a", receipts=old), intent()))), "a").refusal
    assert found is not None
    assert found.code is Code.CAPABILITY_STALE


def test_poison_is_avoided_everywhere() -> None:
    fleet = fleet_of(node("a"), node("b", device(runtime_version="1.32")))
    triple = Triple(DIGEST, "cpu-provider", "1.31")
    plan = only(place(inputs(fleet, intent(replicas=2), poisoned=frozenset({Poisoning(triple, "")}))))
    assert chosen_nodes(plan) == ["b"]
    found = candidate(plan, "a").refusal
    assert found is not None
    assert found.code is Code.POISONED


def test_a56_what_one_tenant_crashed_is_placed_for_another() -> None:
    fleet = fleet_of(node("a"))
    poisoned = frozenset({Poisoning(Triple(DIGEST, "cpu-provider", "1.31"), "shop")})
    found = candidate(only(place(inputs(fleet, intent(), poisoned=poisoned))), "a").refusal
    assert found is not None
    assert (found.code, "shop" in found.found) == (Code.POISONED, True)
    assert chosen_nodes(only(place(inputs(fleet, intent(tenant="bank"), poisoned=poisoned)))) == ["a"]


def test_live_free_memory_counts_not_only_the_books() -> None:
    full = node("full")
    fleet = fleet_of(full, node("empty"), flops={"full": 1e12, "empty": 1e10})
    busy = {"cpu0": reading(full.devices[0], free=100 * MIB)}
    plan = only(place(inputs(with_node(fleet, "full", readings=busy), intent())))
    assert chosen_nodes(plan) == ["empty"]
    found = candidate(plan, "full")
    assert found.refusal is not None
    assert found.refusal.code is Code.MEMORY_SHORT
    assert found.nearest.startswith("free ")


def test_spread_over_nodes_and_devices() -> None:
    two = node("two", device("cpu0"), device("gpu0", kind="gpu"))
    fleet = fleet_of(two)
    apart = only(place(inputs(fleet, intent(replicas=2, spread=Spread.NODE))))
    assert apart.placed == 1
    assert apart.refusal is not None
    assert apart.refusal.code is Code.REPLICAS_SHORT
    assert {each.refusal.code for each in apart.candidates if each.refusal} == {Code.SPREAD_CONFLICT}
    assert apart.nearest == "availability: {replicas: 1}"
    beside = only(place(inputs(fleet, intent(replicas=2, spread=Spread.DEVICE))))
    assert sorted(target.device for target in beside.targets) == ["cpu0", "gpu0"]
    one = only(place(inputs(fleet_of(node("one")), intent(replicas=2, spread=Spread.NONE))))
    assert one.placed == 2


def test_declared_traffic_fills_a_device_to_seventy_percent() -> None:
    fleet = fleet_of(node("a"), node("b"))
    seconds = candidate(only(place(inputs(fleet, intent()))), "a").prediction
    assert seconds is not None
    rate = 0.6 / seconds.latency_p50_s.mid
    first, second = intent("first", traffic=traffic(rate)), intent("second", traffic=traffic(rate))
    plan = place(inputs(fleet, first, second))
    assert sorted(target.node for each in plan.workloads for target in each.targets) == ["a", "b"]
    third = place(inputs(fleet, first, second, intent("third", traffic=traffic(rate), priority=1))).workloads[-1]
    assert third.refusal is not None
    assert third.refusal.code is Code.OUTRANKED
    alone = only(place(inputs(fleet, intent(traffic=traffic(2 * rate)))))
    assert alone.refusal is not None
    assert alone.refusal.code is Code.UTILISATION_SHORT
    assert alone.nearest == "availability: {replicas: 2}"


def test_the_way_from_the_origin_counts_against_the_bound() -> None:
    fleet = fleet_of(node("a"))
    far = intent(latency_p95_s=Seconds(0.1), traffic=traffic(1.0, "far"))
    assert only(place(inputs(fleet, far))).refusal is None
    assert only(place(inputs(fleet, far, rtt_s={"far": Seconds(0.2)}))).refusal is not None


@pytest.mark.parametrize(
    ("rate", "is_from_origin", "words"),
    [(0.0, False, ", up to"), (1.0, False, " with queueing, up to"), (1.0, True, " with queueing and network, up to")],
)
def test_a_reason_says_what_its_p95_counts(rate: float, is_from_origin: bool, words: str) -> None:
    """It differed from the plan's column P95, which is of one request alone, and nothing said why."""
    bounds = require(latency_p95_s=Seconds(1e-9), latency_from_origin=is_from_origin)
    asked = intent(require=bounds, traffic=traffic(rate, "far") if rate else ())
    found = candidate(only(place(inputs(fleet_of(node("a")), asked, rtt_s={"far": Seconds(0.2)}))), "a").refusal
    assert found is not None
    assert found.code is Code.SLO_UNREACHABLE
    assert re.fullmatch(rf"p95 [\d.]+[mun]?s{words} [\d.]+[mun]?s", found.found), found.found


def test_priority_is_served_first() -> None:
    fleet = fleet_of(node("a", device(memory=150 * MIB)))
    low, high = intent("low", priority=1), intent("high", priority=9)
    plan = place(inputs(fleet, low, high))
    assert [each.workload.name for each in plan.workloads] == ["high", "low"]
    assert [each.placed for each in plan.workloads] == [1, 0]
    assert plan.workloads[1].refusal is not None
    assert plan.workloads[1].refusal.code is Code.OUTRANKED
    assert only(place(inputs(fleet, low))).placed == 1


def test_as_many_priorities_as_workloads_are_decided_without_a_deep_stack() -> None:
    """What was free before any of them is asked for by the last alone."""
    many = [intent(f"w{at}", priority=1000 - at) for at in range(300)]
    (one,) = only(place(inputs(fleet_of(node("a")), many[0]))).targets
    fleet = fleet_of(node("a", device(memory=280 * one.memory_bytes)))
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack()) + 180)
        plan = place(inputs(fleet, *many))
    finally:
        sys.setrecursionlimit(limit)
    placed = sum(each.placed for each in plan.workloads)
    assert 200 < placed < 300
    assert {each.refusal.code for each in plan.workloads[placed:] if each.refusal} == {Code.OUTRANKED}


def test_quota() -> None:
    fleet = fleet_of(node("a"), node("b"))
    plan = only(place(inputs(fleet, intent(replicas=2), quotas={"shop": Quota("shop", replicas=1)})))
    assert plan.placed == 1
    assert {each.refusal.code for each in plan.candidates if each.refusal} == {Code.QUOTA}
    plan = only(place(inputs(fleet, intent(), quotas={"shop": Quota("shop", memory=Bytes(10 * MIB))})))
    assert plan.refusal is not None
    assert plan.refusal.code is Code.QUOTA
    assert only(place(inputs(fleet, intent(), quotas={"other": Quota("other", replicas=0)}))).refusal is None


def test_relax_gives_step_by_step_and_is_recorded() -> None:
    base = intent(latency_p95_s=Seconds(0.001))
    high = candidate(only(place(inputs(fleet_of(node("a")), base))), "a").prediction
    assert high is not None
    one = replace(
        base,
        relax=(
            relaxation(base, "latency: {p95: 2ms}", latency_p95_s=Seconds(0.002)),
            relaxation(base, "latency: {p95: 1s}", latency_p95_s=Seconds(1.0)),
            relaxation(base, "latency: {p95: 2s}", latency_p95_s=Seconds(2.0)),
        ),
    )
    plan = only(place(inputs(fleet_of(node("a")), one)))
    assert plan.refusal is None
    assert plan.relaxed == ("latency: {p95: 2ms}", "latency: {p95: 1s}")


def test_nothing_at_all() -> None:
    plan = only(place(inputs(Fleet(), intent())))
    assert plan.refusal is not None
    assert plan.refusal.code is Code.NO_CANDIDATE
    assert plan.candidates == ()
    unknown = only(place(inputs(fleet_of(node("a")), intent(models=(ModelRef("other.onnx", "sha256:0", ""),)))))
    assert unknown.refusal is not None
    assert unknown.refusal.code is Code.MODEL_UNKNOWN


def settle_fleet(fleet: Fleet, *intents: Intent, seconds: int = 0) -> tuple[RegionState, Inputs]:
    """The region after `decide` took up the intents and every node did as told; and what placement sees then."""
    world = RegionState(
        RegionFacts("eu-west", "eu"), fleet, intents,
        {DIGEST: profile(), SMALL: profile(SMALL, size=3 * MIB, precision="int8")}, {}, ReconcilerMemory(),
    )  # fmt: skip
    for step in range(4):
        now, wall = Elapsed(float(step)), Wall(START + step)
        decision = decide(world, NO_MIGRATIONS, now, wall)
        fleet = world.fleet
        for name, content in decision.desired.items():
            state = fleet.nodes[name]
            seen = {each.id: observation(each, Phase.READY, measured=warm()) for each in content.assignments}
            fleet = fleet.with_node(replace(state, observed=seen, heard_at=now))
        world = replace(world, fleet=fleet, desired=decision.desired, memory=decision.memory)
    return world, inputs_of(world, NO_MIGRATIONS, Elapsed(4.0), Wall(START + 4))


@pytest.mark.parametrize("automatic", [False, True], ids=["without when", "with when"])
def test_a_replica_that_stays_although_a_better_place_came_back_says_why(automatic: bool) -> None:
    asked = intent(policy="kept", migration=MigrationRule(automatic=automatic))
    fleet = with_node(fleet_of(node("fast"), node("slow"), flops={"fast": 4e11, "slow": 1e11}), "fast", cordoned=True)
    world, before = settle_fleet(fleet, asked)
    assert only(place(before)).changes[0].why == "stays", "nothing is better"
    world = replace(world, fleet=with_node(world.fleet, "fast", cordoned=False))
    now, wall = Elapsed(4.0), Wall(START + 4)
    (stays,) = only(place(inputs_of(world, NO_MIGRATIONS, now, wall))).changes
    held = reasons_to_stay(trigger_view(world, {}, now, wall, asked.key), (), asked.key)
    assert (stays.sign, stays.node) == ("=", "slow")
    if automatic:
        assert stays.why == "stays"
        assert [each.hold for each in held] == [HoldReason.SETTLING]
    else:
        assert stays.why == f"{STAYS_WITHOUT_TRIGGER}, though fast/cpu0 is better"
        (one,) = held
        assert (one.hold, one.why) == (HoldReason.NOT_AUTOMATIC, "stays: migration.when is not set")
        assert "in policy kept" in one.remedy
        assert "shoal migrate ocr --to fast/cpu0" in one.remedy
    silent = place(inputs_of(world, NO_MIGRATIONS, now, wall), explain=False)
    assert silent.hash == place(inputs_of(world, NO_MIGRATIONS, now, wall)).hash


def test_a_better_place_that_is_emulated_is_named_so() -> None:
    chip = device("npu0", emulated=True)
    fleet = fleet_of(node("fast", chip), node("slow"), flops={"fast": 4e11, "slow": 1e11})
    world, _ = settle_fleet(with_node(fleet, "fast", cordoned=True), intent())
    world = replace(world, fleet=with_node(world.fleet, "fast", cordoned=False))
    (stays,) = only(place(inputs_of(world, NO_MIGRATIONS, Elapsed(4.0), Wall(START + 4)))).changes
    assert (stays.sign, stays.node) == ("=", "slow")
    assert stays.why == f"{STAYS_WITHOUT_TRIGGER}, though fast/npu0 (emulated) is better"


def test_plan_after_apply_is_empty_whatever_was_measured() -> None:
    fleet = fleet_of(node("a"), node("b"), node("c"), flops={"a": 3e11, "b": 2e11, "c": 1e11})
    world, seen = settle_fleet(fleet, intent(replicas=2, models=BOTH), intent("other"))
    plan = place(seen)
    assert not plan.has_changes
    slow = {
        name: replace(
            state, observed={key: replace(each, measured=warm(p50=9.0)) for key, each in state.observed.items()}
        )
        for name, state in world.fleet.nodes.items()
    }
    assert not place(replace(seen, fleet=replace(world.fleet, nodes=slow))).has_changes


def test_changed_documents_move_a_replica_only_for_a_gain() -> None:
    fleet = fleet_of(node("a"), node("b"), flops={"a": 1.00e11, "b": 0.95e11})
    world, seen = settle_fleet(fleet, intent(where='node.name == "b"'))
    wider = inputs_of(replace(world, intents=(intent(revision=2),)), NO_MIGRATIONS, seen.now, seen.wall)
    wider = replace(wider, measured={}, fleet=without_measurements(wider.fleet))
    assert chosen_nodes(only(place(wider))) == ["b"]
    much = fleet_of(node("a"), node("b"), flops={"a": 9e11, "b": 1e11})
    world, seen = settle_fleet(much, intent(where='node.name == "b"'))
    wider = inputs_of(replace(world, intents=(intent(revision=2),)), NO_MIGRATIONS, seen.now, seen.wall)
    plan = only(place(replace(wider, measured={}, fleet=without_measurements(wider.fleet))))
    assert chosen_nodes(plan) == ["a"]
    assert sorted(change.sign for change in plan.changes) == ["+", "-"]


def without_measurements(fleet: Fleet) -> Fleet:
    nodes = {
        name: replace(state, observed={key: replace(each, measured=None) for key, each in state.observed.items()})
        for name, state in fleet.nodes.items()
    }
    return replace(fleet, nodes=nodes)


def test_a_cordoned_node_keeps_what_it_has() -> None:
    world, seen = settle_fleet(fleet_of(node("a"), node("b"), flops={"a": 2e11, "b": 1e11}), intent())
    plan = only(place(replace(seen, fleet=updates.with_cordon(world.fleet, "a", True))))
    assert chosen_nodes(plan) == ["a"]
    assert not place(replace(seen, fleet=updates.with_cordon(world.fleet, "a", True))).has_changes


def test_the_pareto_front_by_hand() -> None:
    nan = math.nan
    rows = [(1.0, 5.0, 3.0), (2.0, 1.0, 3.0), (2.0, 5.0, 3.0), (1.0, 5.0, 3.0), (1.0, 6.0, nan), (0.5, nan, nan)]
    assert pareto(rows) == [True, True, False, True, False, True]
    assert pareto([]) == []


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, math.nan])] * 3), max_size=12))
def test_law_the_front_is_what_nothing_dominates(rows: list[tuple[float, float, float]]) -> None:
    seen = [tuple(math.inf if math.isnan(value) else value for value in row) for row in rows]
    assert pareto(rows) == [
        not any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in seen) for row in seen
    ]


# -- laws --------------------------------------------------------------------------------------------------------------

names = st.sampled_from([f"n{index}" for index in range(6)])


@st.composite
def regions(draw: st.DrawFn) -> Inputs:
    count = draw(st.integers(0, 6))
    nodes = [
        node(
            f"n{index}",
            *(
                device(f"{kind}{at}", kind=kind, memory=draw(st.sampled_from([80, 200, 600, 4096])) * MIB)
                for at, kind in enumerate(
                    draw(st.lists(st.sampled_from(["cpu", "gpu", "npu"]), min_size=1, max_size=2))
                )
            ),
            labels={"site": draw(st.sampled_from(["shop", "lab"]))},
        )
        for index in range(count)
    ]
    fleet = fleet_of(*nodes, flops={each.name: draw(st.sampled_from([1e9, 1e10, 1e11, 1e12])) for each in nodes})
    for each in nodes:
        ill: dict[str, Any] = draw(st.sampled_from([{}] * 6 + [{"cordoned": True}, {"liveness": Liveness.SUSPECT}]))
        fleet = with_node(fleet, each.name, **ill)
    costs = {
        Slot(each.name, on.name): UsdPerHour(draw(st.sampled_from([0.1, 1.0, 5.0])))
        for each in nodes
        for on in each.devices
    }
    intents = tuple(
        intent(
            f"w{index}",
            tenant=draw(st.sampled_from(["shop", "lab"])),
            models=draw(st.sampled_from([BOTH[:1], BOTH])),
            weights=draw(
                st.sampled_from([{"latency": 1}, {"latency": 0.2, "cost": 0.5, "energy": 0.3}, {"energy": 1}])
            ),
            replicas=draw(st.integers(1, 3)),
            spread=draw(st.sampled_from(list(Spread))),
            standby=draw(st.sampled_from([Standby.NONE, Standby.WARM])),
            latency_p95_s=draw(st.sampled_from([None, Seconds(0.02), Seconds(0.2)])),
            where=draw(st.sampled_from(["", 'node.labels.site == "shop"', 'device.kind in ["npu", "gpu"]'])),
            precisions=draw(st.sampled_from([(), ("fp32",), ("int8",)])),
            residency=draw(st.sampled_from([(), ("eu",), ("us",)])),
            limits=Limits(
                cost=draw(st.sampled_from([None, UsdPerHour(0.5), UsdPerHour(3.0)])),
                energy=draw(st.sampled_from([None, Joules(0.5)])),
            ),
            traffic=draw(st.sampled_from([(), traffic(5.0), traffic(100.0)])),
            priority=draw(st.sampled_from([1, 100])),
        )
        for index in range(draw(st.integers(1, 4)))
    )
    quotas = draw(
        st.sampled_from([{}, {"shop": Quota("shop", replicas=2)}, {"lab": Quota("lab", memory=Bytes(GIB // 4))}])
    )
    return inputs(fleet, *intents, costs=costs, quotas=quotas, seed=draw(st.integers(0, 3)))


laws = settings(max_examples=40, deadline=None)


@laws
@given(regions(), st.randoms(use_true_random=False))
def test_law_the_same_inputs_give_the_same_plan_in_any_order(region: Inputs, shuffler: Any) -> None:
    plan = place(region)
    intents, nodes = list(region.intents), list(region.fleet.nodes.items())
    shuffler.shuffle(intents)
    shuffler.shuffle(nodes)
    again = place(replace(region, intents=tuple(intents), fleet=replace(region.fleet, nodes=dict(nodes))))
    assert repr(again) == repr(plan)
    lean = place(region, explain=False)
    assert lean.hash == plan.hash
    assert lean.targets == plan.targets


@laws
@given(regions())
def test_law_nothing_is_oversold(region: Inputs) -> None:
    plan = place(region)
    for name, state in region.fleet.nodes.items():
        for each in state.node.devices:
            taken = [
                target
                for found in plan.workloads
                for target in found.targets
                if (target.node, target.device) == (name, each.name)
            ]
            assert sum(target.memory_bytes for target in taken) <= min(
                total_bytes(each, state), state.readings[each.name].free_bytes
            )
    for tenant, quota in region.quotas.items():
        held = [target for found in plan.workloads for target in found.targets if target.workload.tenant == tenant]
        assert quota.replicas is None or len(held) <= quota.replicas
        assert quota.memory is None or sum(target.memory_bytes for target in held) <= quota.memory


@laws
@given(regions())
def test_law_a_proposal_places_what_it_was_made_for(region: Inputs) -> None:
    plan = place(region)
    for found in plan.workloads:
        assert (found.refusal is None) == (found.placed == found.wanted)
        if found.proposal is None:
            assert found.refusal is None or found.nearest
            continue
        applied = tuple(
            replace(each, require=found.proposal.require, limits=found.proposal.limits)
            if each.key == found.workload
            else each
            for each in region.intents
        )
        after = place(replace(region, intents=applied)).of(found.workload)
        assert after is not None
        assert after.refusal is None


@laws
@given(regions())
def test_law_plan_after_apply_is_empty(region: Inputs) -> None:
    world = RegionState(
        region.region,
        region.fleet,
        region.intents,
        region.profiles,
        {},
        ReconcilerMemory(),
        region.quotas,
        region.costs,
    )
    first = decide(world, NO_MIGRATIONS, region.now, region.wall)
    assert first.plan.hash == place(region).hash or region.seed
    after = replace(world, desired=first.desired, memory=first.memory)
    full = place(inputs_of(after, NO_MIGRATIONS, region.now, region.wall))
    assert not full.has_changes
    assert full.hash == first.plan.hash
    again = decide(after, NO_MIGRATIONS, region.now, region.wall)
    assert again.desired == first.desired
    assert again.memory == first.memory


@laws
@given(regions())
def test_law_every_candidate_is_chosen_fit_or_refused_with_a_way_out(region: Inputs) -> None:
    for plan in place(region).workloads:
        for each in plan.candidates:
            if each.refusal is None:
                assert each.score >= 1
                assert each.nearest == ""
            else:
                assert not each.chosen
                assert math.isnan(each.score)
                assert each.nearest
                assert each.refusal.remedy
        assert sum(each.chosen for each in plan.candidates) <= plan.placed
        front = [each for each in plan.candidates if each.refusal is None]
        assert not front or any(each.pareto for each in front)


def test_what_would_have_to_give_is_said_in_the_unit_that_was_asked() -> None:
    known: dict[str, Any] = {"costs": {Slot("a", "cpu0"): UsdPerHour(0.0541)}}
    plan = only(place(inputs(fleet_of(node("a")), intent(limits=Limits(cost=UsdPerHour(0.0001))), **known)))
    assert plan.nearest == "limits: {cost: 0.055 USD/h}"
