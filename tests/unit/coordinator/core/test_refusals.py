"""Refusals name the true cause, and a change that places; and bad input is refused, not guessed at."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from harness.builders.coordinator_core import (
    DIGEST,
    MIB,
    START,
    device,
    fleet_of,
    inputs,
    intent,
    node,
    profile,
    traffic,
)
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.placement.model import Inputs, RegionFacts, Slot, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.types.codes import Code
from shoal.types.units import Bytes, GramsPerHour, Joules, Seconds, UsdPerHour, Wall
from shoal.types.workload import Intent, Limits, Quota, WorkloadKey

P50_S: Final = 0.0114
"""Of the model on a device of these tests, about."""
SHOP: Final = 'node.labels["site"] == "shop"'


def shop(count: int, *, elsewhere: int = 0, **more: Any) -> Fleet:
    """Nodes of the shop, and of the hall."""
    sites = ["shop"] * count + ["hall"] * elsewhere
    return fleet_of(*(node(f"{site}-{at}", device(**more), labels={"site": site}) for at, site in enumerate(sites)))


def add_node(region: Inputs) -> Inputs:
    more = fleet_of(node("new", device(), labels={"site": "shop"}))
    return replace(region, fleet=replace(region.fleet, nodes={**region.fleet.nodes, **more.nodes}))


def with_cordon(fleet: Fleet, name: str, value: bool) -> Fleet:
    return fleet.with_node(replace(fleet.nodes[name], cordoned=value))


@dataclass(frozen=True)
class Case:
    """A region in which the first workload does not fit."""

    # The region.
    region: Inputs
    # The true cause.
    code: Code
    # Part of what the refusal says was found.
    found: str
    # Beginning of the change that would place it.
    nearest: str
    # What one does by hand; None: the proposal is applied to the document.
    by_hand: Callable[[Inputs], Inputs] | None = None


def without_others(region: Inputs) -> Inputs:
    return replace(region, intents=region.intents[:1])


def without_quotas(region: Inputs) -> Inputs:
    return replace(region, quotas={})


CASES: Final[dict[str, Case]] = {
    "the shop's devices are busy, not the selector wrong": Case(
        inputs(shop(2, elsewhere=8), intent(where=SHOP, traffic=traffic(0.9 / P50_S))),
        Code.UTILISATION_SHORT, "0% of shop-", "availability: {replicas: 2}",
    ),
    "the shop's devices are small, not the selector wrong": Case(
        inputs(
            replace(shop(0, elsewhere=8), nodes={**shop(0, elsewhere=8).nodes, **shop(2, memory=40 * MIB).nodes}),
            intent(where=SHOP),
        ),
        Code.MEMORY_SHORT, "free on shop-", "where: (", None,
    ),
    "no device of that site": Case(
        inputs(shop(0, elsewhere=3), intent(where=SHOP)),
        Code.SELECTOR_MISMATCH, "node.labels.site = 'hall'", "where: (",
    ),
    "too slow, and the cordoned node would not help": Case(
        inputs(with_cordon(shop(3), "shop-0", True), intent(latency_p95_s=Seconds(0.001))),
        Code.SLO_UNREACHABLE, "p95 ", "latency: {p95: ",
    ),
    "the bound that is missed by far, not the price": Case(
        inputs(
            shop(2), intent(limits=Limits(cost=UsdPerHour(1.0), energy=Joules(1e-3))),
            costs={Slot(f"shop-{at}", "cpu0"): UsdPerHour(1.01) for at in range(2)},
        ),
        Code.ENERGY_OVER, "this excludes 2 of 2", "limits: {cost: ",
    ),
    "the law of another country": Case(
        inputs(shop(2), intent(residency=("us",), where=SHOP, latency_p95_s=Seconds(1e-6))),
        Code.RESIDENCY, "eu-west lies in eu", "latency: {p95: ",
        lambda region: replace(
            region, region=RegionFacts("us-1", "us"),
            intents=tuple(replace(each, require=replace(each.require, latency_p95_s=None)) for each in region.intents),
        ),
    ),
    "a precision that nobody has": Case(
        inputs(shop(2), intent(precisions=("int8",))),
        Code.PRECISION_DENIED, "fp32", "precision: {allow: [int8, fp32]}",
    ),
    "a quota": Case(
        inputs(shop(3), intent(), quotas={"shop": Quota("shop", memory=Bytes(MIB))}),
        Code.QUOTA, "shop would have", "quota: {memory: ", without_quotas,
    ),
    "more replicas than nodes": Case(
        inputs(shop(2, elsewhere=5), intent(where=SHOP, replicas=3)),
        Code.REPLICAS_SHORT, "2 of 3 placed; SPREAD_CONFLICT: ", "availability: {",
    ),
    "others of higher rank came first": Case(
        inputs(shop(1, memory=150 * MIB), intent(priority=1), intent("first", priority=9)),
        Code.OUTRANKED, "MEMORY_SHORT on shop-0/cpu0 after workloads of higher rank", "raise its priority above 1",
        lambda region: replace(region, intents=(replace(region.intents[0], priority=10), *region.intents[1:])),
    ),
    "the only node of the site is cordoned": Case(
        inputs(with_cordon(shop(1, elsewhere=4), "shop-0", True), intent(where=SHOP)),
        Code.NODE_CORDONED, "shop-0 is cordoned", "where: (",
        None,
    ),
    "two bounds at once": Case(
        inputs(
            shop(2), intent(latency_p95_s=Seconds(0.02), limits=Limits(carbon=GramsPerHour(0.1))),
            region=RegionFacts("eu-west", "eu", carbon_g_per_kwh=400.0),
        ),
        Code.CARBON_OVER, "this excludes 2 of 2", "latency: {p95: ",
    ),
}  # fmt: skip


def plan_of(region: Inputs) -> WorkloadPlan:
    found = place(region).of(region.intents[0].key)
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_true_cause_and_a_change_that_places(case: Case) -> None:
    plan = plan_of(case.region)
    assert plan.refusal is not None
    assert (plan.refusal.code, case.found in plan.refusal.found) == (case.code, True), plan.refusal
    assert plan.nearest.startswith(case.nearest), plan.nearest
    assert plan.refusal.remedy
    if case.by_hand is not None:
        after = plan_of(case.by_hand(case.region))
    else:
        assert plan.proposal is not None
        first, *others = case.region.intents
        changed = replace(first, require=plan.proposal.require, limits=plan.proposal.limits)
        after = plan_of(replace(case.region, intents=(changed, *others)))
    assert after.refusal is None


def test_a_law_is_said_not_to_be_relaxed() -> None:
    plan = plan_of(CASES["the law of another country"].region)
    assert plan.proposal is None
    assert plan.nearest.endswith("run it in a region in us; residency is not relaxed")


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_region_without_devices() -> None:
    plan = plan_of(inputs(Fleet(), intent(), intent("other")))
    assert plan.refusal is not None
    assert plan.refusal.code is Code.NO_CANDIDATE
    assert plan_of(add_node(inputs(Fleet(), intent()))).refusal is None


def test_figures_that_nobody_knows_decide_nothing_and_break_nothing() -> None:
    fleet = fleet_of(node("known"), node("unknown"))
    state = fleet.nodes["unknown"]
    unknown: Any = math.nan
    blank = replace(
        state.receipts["cpu0"], rates=replace(state.receipts["cpu0"].rates, active_w=unknown, load_bytes=math.nan)
    )
    fleet = fleet.with_node(replace(state, receipts={"cpu0": blank}))
    costs = {Slot("known", "cpu0"): UsdPerHour(math.nan)}
    every = {"latency": 0.25, "cost": 0.25, "energy": 0.25, "carbon": 0.25}
    plan = plan_of(inputs(fleet, intent(weights=every), costs=costs, region=RegionFacts("eu-west")))
    assert [target.node for target in plan.targets] == ["known"]
    assert all(math.isfinite(each.score) or each.score == math.inf for each in plan.candidates)


@pytest.mark.parametrize(
    "contradiction",
    [
        {"where": f"{SHOP} && !({SHOP})"},
        {"latency_p95_s": Seconds(0.0)},
        {"measured_only": True, "measured_within_s": Seconds(0.0)},
    ],
    ids=["a selector that nothing meets", "no time at all", "measured in the future"],
)
def test_a_policy_that_nothing_can_meet(contradiction: dict[str, Any]) -> None:
    plan = plan_of(inputs(shop(3), intent(**contradiction), wall=Wall(START + 60)))
    assert plan.refusal is not None
    assert plan.placed == 0
    assert plan.nearest


def test_far_more_workloads_than_one_device_has_room_for() -> None:
    """As many as have room are placed, and each of the others hears why."""
    asked: list[Intent] = [replace(intent(), key=WorkloadKey("shop", f"w{at:04}")) for at in range(1_000)]
    plan = place(inputs(shop(1), *asked, profiles={DIGEST: profile()}), explain=False)
    placed = sum(each.placed for each in plan.workloads)
    assert 50 < placed < 200
    assert {each.refusal.code for each in plan.workloads if each.refusal is not None} == {Code.OUTRANKED}
    assert placed + sum(each.refusal is not None for each in plan.workloads) == 1_000
