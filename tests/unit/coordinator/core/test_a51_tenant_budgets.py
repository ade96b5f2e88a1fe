"""A51: a tenant whose workloads would cost more than its budget, by many names, awards and restarts. The budget bounds
what is placed, and ends nothing that runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import (
    DIGEST,
    START,
    CoreRegion,
    device,
    fleet_of,
    inputs,
    intent,
    node,
    observation,
    profile,
    warm,
)
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.placement.model import Inputs, PlacementPlan, RegionFacts, Slot, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.tenant_cost import TenantCost
from shoal.coordinator.core.workloads.budgets import EXCEEDED_EVENT, MET_EVENT
from shoal.coordinator.core.workloads.decide import decide, inputs_of
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS, ReconcilerMemory, RegionState
from shoal.types.assignment import Phase
from shoal.types.codes import Code
from shoal.types.units import Elapsed, UsdPerHour, Wall
from shoal.types.workload import Quota, Spread, Standby, WorkloadKey

NAMES = ("a", "b", "c")


def budget(limit: float) -> dict[str, Quota]:
    return {"shop": Quota("shop", cost=UsdPerHour(limit))}


def costs(**prices: float) -> dict[Slot, UsdPerHour]:
    return {Slot(name, "cpu0"): UsdPerHour(price) for name, price in prices.items()}


def plan_of(plan: PlacementPlan, name: str) -> WorkloadPlan:
    found = plan.of(WorkloadKey("shop", name))
    assert found is not None
    return found


def cost_of(plan: PlacementPlan) -> TenantCost:
    (only,) = plan.budgets
    return only.cost


def test_a_replica_beyond_the_budget_is_refused_with_figures() -> None:
    fleet = fleet_of(node("a"), node("b"))
    plan = place(inputs(fleet, intent(replicas=2), costs=costs(a=2.0, b=3.5), quotas=budget(5.0)))
    (found,) = plan.workloads
    assert [target.node for target in found.targets] == ["a"] or cost_of(plan) == TenantCost(3.5)
    (left_out,) = (each for each in found.candidates if not each.chosen)
    assert left_out.refusal is not None
    assert str(left_out.refusal) == (
        "found: shop would cost 5.5 USD/h; wanted: at most 5 USD/h; "
        "try: quota: {cost: 5.5 USD/h} of tenant shop (QUOTA)"
    )
    assert found.refusal is not None
    assert "QUOTA: shop would cost 5.5 USD/h" in found.refusal.found
    enough = place(inputs(fleet, intent(replicas=2), costs=costs(a=2.0, b=3.5), quotas=budget(5.5)))
    assert enough.workloads[0].refusal is None
    assert cost_of(enough) == TenantCost(5.5)


def test_another_tenants_budget_bounds_nothing() -> None:
    fleet = fleet_of(node("a"))
    plan = place(inputs(fleet, intent(tenant="lab"), costs=costs(a=9.0), quotas=budget(1.0)))
    assert plan.workloads[0].placed == 1
    assert cost_of(plan) == TenantCost()


def test_an_unknown_price_is_never_a_low_one() -> None:
    fleet = fleet_of(node("a"), node("b"))
    plan = place(inputs(fleet, intent(replicas=2), costs=costs(a=1.0), quotas=budget(5.0)))
    assert [target.node for target in plan.workloads[0].targets] == ["a"]
    unpriced = next(each for each in plan.workloads[0].candidates if each.node == "b")
    assert unpriced.refusal is not None
    assert unpriced.refusal.code is Code.QUOTA
    assert unpriced.refusal.found == "b/cpu0 has no known price"


def test_equal_to_the_budget_is_within_it_whatever_floats_make_of_the_sum() -> None:
    fleet = fleet_of(*(node(f"n{number}") for number in range(10)))
    prices = {Slot(f"n{number}", "cpu0"): UsdPerHour(0.1) for number in range(10)}
    assert sum(prices.values()) != 1.0
    plan = place(inputs(fleet, intent(replicas=10), costs=prices, quotas=budget(1.0)))
    assert plan.workloads[0].placed == 10


def test_a_standby_counts() -> None:
    fleet = fleet_of(node("a"), node("b"))
    plan = place(inputs(fleet, intent(standby=Standby.WARM), costs=costs(a=1.0, b=1.0), quotas=budget(1.0)))
    (found,) = plan.workloads
    assert found.placed == 1
    assert found.no_standby is not None
    assert Code.QUOTA in found.no_standby.found


def priced_region(**prices: float) -> CoreRegion:
    region = CoreRegion(*(node(name) for name in prices))
    region.costs = costs(**prices)
    return region


def events_of(region: CoreRegion) -> list[str]:
    return [each.code for each in region.events if each.code in (EXCEEDED_EVENT, MET_EVENT)]


def test_a_price_that_rises_ends_nothing_and_lets_nothing_new_come() -> None:
    region = priced_region(a=1.0, b=1.0, c=1.0)
    region.quotas = budget(3.0)
    region.intents = (intent("text", replicas=2),)
    region.run(10)
    before = region.replicas("text")
    region.costs = costs(a=1.6, b=1.6, c=1.6)
    region.intents = (*region.intents, intent("faces"))
    decision = region.run(10)
    assert region.replicas("text") == before
    refused = plan_of(decision.plan, "faces").refusal
    assert refused is not None
    assert refused.code is Code.QUOTA
    assert "would cost 4.8 USD/h" in refused.found
    assert events_of(region) == [EXCEEDED_EVENT], "once, however many steps"
    (event,) = (each for each in region.events if each.code == EXCEEDED_EVENT)
    assert event.message == "it costs 3.2 USD/h, its budget is 3 USD/h: what runs stays, nothing new is placed"
    region.costs = costs(a=1.0, b=1.0, c=1.0)
    region.run(10)
    assert region.replicas("text") == before
    assert len(region.replicas("faces")) == 1
    assert events_of(region) == [EXCEEDED_EVENT, MET_EVENT]


def test_a_budget_that_is_lowered_and_a_price_that_is_lost_end_nothing_either() -> None:
    region = priced_region(a=1.0, b=1.0)
    region.quotas = budget(2.0)
    region.intents = (intent("text", replicas=2),)
    region.run(10)
    before = region.replicas("text")
    region.quotas = budget(1.0)
    region.run(5)
    region.costs = {}
    decision = region.run(5)
    assert region.replicas("text") == before
    assert cost_of(decision.plan) == TenantCost(0.0, 2)
    assert events_of(region) == [EXCEEDED_EVENT]


def test_a_short_silence_costs_nobody_its_place_in_the_budget() -> None:
    region = priced_region(a=1.0, b=1.0, c=1.0)
    region.quotas = budget(2.0)
    region.intents = (intent("text", where='node.name == "a"'),)
    region.run(10)
    region.intents = (*region.intents, intent("faces", where='node.name != "a"', replicas=2))
    region.run(10)
    before = region.replicas("text"), region.replicas("faces")
    region.agents["a"].heard = False
    region.run(8)
    region.agents["a"].heard = True
    region.run(10)
    assert (region.replicas("text"), region.replicas("faces")) == before


def test_a_restart_forgets_nothing() -> None:
    region = priced_region(a=1.0, b=1.0, c=1.0)
    region.quotas = budget(2.0)
    region.intents = (intent("text", replicas=2),)
    region.run(10)
    region.restart()
    region.intents = (*region.intents, intent("faces"))
    region.step()
    for name in NAMES:
        region.reconnect(name)
    decision = region.run(15)
    assert len(region.replicas("text")) == 2
    assert not region.replicas("faces")
    assert cost_of(decision.plan) == TenantCost(2.0)


def with_awards(inputs: Inputs, **prices: float | None) -> Inputs:
    by_key = {
        WorkloadKey("shop", name): UsdPerHour(price) if price is not None else None for name, price in prices.items()
    }
    return replace(inputs, awarded=by_key)


def test_what_another_region_is_to_run_counts_by_its_offer_from_the_award_on() -> None:
    fleet = fleet_of(node("a"))
    asked = inputs(
        fleet,
        intent("text"),
        intent("faces", where='node.name == "none"'),
        costs=costs(a=2.0),
        quotas=budget(5.0),
    )
    assert place(with_awards(asked, faces=3.0)).of(WorkloadKey("shop", "text")).placed == 1  # type: ignore[union-attr]
    plan = place(with_awards(asked, faces=3.5))
    refused = plan_of(plan, "text").refusal
    assert refused is not None
    assert refused.code is Code.QUOTA
    assert refused.found.startswith("shop would cost 5.5 USD/h")
    assert cost_of(plan) == TenantCost(3.5)
    unknown = place(with_awards(asked, faces=None))
    assert cost_of(unknown) == TenantCost(0.0, 1)
    assert plan_of(unknown, "text").placed == 0
    assert plan.budget_left(WorkloadKey("shop", "text")) == 1.5
    assert plan.budget_left(WorkloadKey("shop", "faces")) == 5.0, "its own service makes room for its next one"
    assert plan.budget_left(WorkloadKey("lab", "text")) is None


def test_a_workload_in_two_regions_counts_once_by_the_dearer_one() -> None:
    fleet = fleet_of(node("a"))
    asked = inputs(fleet, intent("text"), costs=costs(a=2.0), quotas=budget(5.0))
    for price, counted in ((1.0, 2.0), (4.0, 4.0)):
        plan = place(with_awards(asked, text=price))
        assert plan_of(plan, "text").placed == 1
        assert cost_of(plan) == TenantCost(counted) == plan_of(plan, "text").cost
    dear = place(with_awards(asked, text=5.5))
    assert plan_of(dear, "text").placed == 0, "nothing new comes while the budget is exceeded"
    away = replace(with_awards(asked, text=4.0), elsewhere=frozenset({WorkloadKey("shop", "text")}))
    assert cost_of(place(away)) == TenantCost(4.0)


def test_no_offer_makes_a_sum_that_is_no_number() -> None:
    asked = with_awards(inputs(fleet_of(node("a")), intent("text"), quotas=budget(5.0)), text=math.inf)
    assert cost_of(place(asked)) == TenantCost(0.0, 1)


PRICES = st.sampled_from([0.1, 0.3, 1.0, 1.7, 5.0])
NODES = ("n0", "n1", "n2", "n3")


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Any, ...]:
    return tuple(
        intent(
            name,
            tenant=draw(st.sampled_from(["shop", "shop", "lab"])),
            replicas=draw(st.integers(1, 3)),
            spread=draw(st.sampled_from(list(Spread))),
            standby=draw(st.sampled_from([Standby.NONE, Standby.WARM])),
            priority=draw(st.sampled_from([1, 100])),
            where=draw(st.sampled_from(["", 'node.name != "n0"'])),
        )
        for name in draw(st.sets(st.sampled_from(["w0", "w1", "w2", "w3"]), min_size=1))
    )


@settings(max_examples=40, deadline=None)
@given(
    workloads(),
    st.lists(PRICES | st.none(), min_size=4, max_size=4),
    st.sampled_from([0.5, 1.0, 3.0, 6.5]),
    st.dictionaries(st.sampled_from(["w0", "w1", "w2", "w3"]), PRICES, max_size=2),
)
def test_law_what_is_placed_at_once_never_exceeds_the_budget(
    intents: tuple[Any, ...], prices: Sequence[float | None], limit: float, elsewhere: dict[str, float]
) -> None:
    """Many names at once: they share the one budget, and so does what other regions were awarded."""
    assume(sum(elsewhere.values()) <= limit)
    known = {name: price for name, price in zip(NODES, prices, strict=True) if price is not None}
    fleet = fleet_of(*(node(name, device("cpu0"), device("gpu0", kind="gpu")) for name in NODES))
    both = {Slot(name, on): UsdPerHour(price) for name, price in known.items() for on in ("cpu0", "gpu0")}
    plan = place(with_awards(inputs(fleet, *intents, costs=both, quotas=budget(limit)), **elsewhere))
    (found,) = plan.budgets
    mine = [each for each in plan.workloads if each.workload.tenant == "shop"]
    new = [target for each in mine for target in each.targets]
    assert not new or not found.is_exceeded
    assert all(Slot(target.node, target.device) in both for target in new)
    total = sum(price for name, price in elsewhere.items() if name not in {each.workload.name for each in mine})
    for each in mine:
        here = math.fsum(both[Slot(target.node, target.device)] for target in each.targets)
        total += max(here, elsewhere.get(each.workload.name, 0.0))
    assert math.isclose(total, found.cost.usd_per_h, abs_tol=1e-9)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["apply", "silence", "return", "price", "award", "wait"]), st.integers(0, 3), PRICES),
    max_size=10,
)


@settings(max_examples=40, deadline=None)
@given(CHANGES, st.data())
def test_law_nothing_new_is_placed_while_the_budget_is_exceeded(
    changes: list[tuple[str, int, float]], data: st.DataObject
) -> None:
    """Whatever documents, prices, nodes and awards do: a step that places something keeps within the budget, whichever
    process takes it, since it reads nothing but what is stored."""
    world = RegionState(
        RegionFacts("eu-west", "eu"),
        fleet_of(*(node(name) for name in NODES)),
        (),
        {DIGEST: profile()},
        {},
        ReconcilerMemory(),
        budget(3.0),
        {Slot(name, "cpu0"): UsdPerHour(price) for name, price in zip(NODES, (1.0, 0.3, 1.7, 1.0), strict=True)},
    )
    now = 0.0
    for revision, (what, number, price) in enumerate(changes, 1):
        name = NODES[number]
        match what:
            case "apply":
                applied = tuple(replace(each, revision=revision) for each in data.draw(workloads()))
                world = replace(world, intents=applied)
            case "silence" | "return":
                liveness = Liveness.LOST if what == "silence" else Liveness.READY
                state = replace(world.fleet.nodes[name], liveness=liveness)
                world = replace(world, fleet=world.fleet.with_node(state))
            case "price":
                world = replace(world, costs={**world.costs, Slot(name, "cpu0"): UsdPerHour(price)})
            case "award":
                key = WorkloadKey("shop", f"w{number}")
                left = place(inputs_of(world, NO_MIGRATIONS, Elapsed(now), Wall(START + now))).budget_left(key)
                assert left is not None
                if price <= left:
                    world = replace(world, awarded={**world.awarded, key: UsdPerHour(price)})
        for _ in range(3):
            now += 1.0
            decision = decide(world, NO_MIGRATIONS, Elapsed(now), Wall(START + now))
            (found,) = decision.plan.budgets
            mine = [each for each in decision.plan.workloads if each.workload.tenant == "shop"]
            new = [target for each in mine for target in each.targets if not target.existing_assignment]
            assert not (new and found.is_exceeded)
            fleet = world.fleet
            for at, content in decision.desired.items():
                seen = {each.id: observation(each, Phase.READY, measured=warm()) for each in content.assignments}
                if fleet.nodes[at].liveness is Liveness.READY:
                    fleet = fleet.with_node(replace(fleet.nodes[at], observed=seen, heard_at=Elapsed(now)))
            world = replace(world, fleet=fleet, desired=decision.desired, memory=decision.memory)
