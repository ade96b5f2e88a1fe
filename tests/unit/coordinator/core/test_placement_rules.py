"""Rules of a policy about where replicas go, beside bounds and weights: `spread` over a label, and `prefer`."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import CoreRegion, device, fleet_of, inputs, intent, node
from shoal.coordinator.core.migration.model import Cause
from shoal.coordinator.core.placement.allocations import MOST_EXACT, busy_share
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.model import PlacementPlan, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.types.codes import Code
from shoal.types.device import Node
from shoal.types.migration import MigrationRule
from shoal.types.units import PerSecond
from shoal.types.workload import Spread, Traffic

PREFER = ('device.kind == "npu"', 'device.kind == "gpu"')
AUTOMATIC = MigrationRule(automatic=True)


def site_of(**sites: str) -> tuple[Node, ...]:
    """Nodes by name, each with the label `site`; none where that is empty."""
    return tuple(node(name, labels={"site": site} if site else {}) for name, site in sites.items())


def kinds_of(**kinds: str) -> tuple[Node, ...]:
    return tuple(node(name, device(kind, kind=kind)) for name, kind in kinds.items())


def only(plan: PlacementPlan) -> WorkloadPlan:
    (found,) = plan.workloads
    return found


def nodes_of(plan: WorkloadPlan) -> set[str]:
    return {target.node for target in plan.targets}


def test_replicas_spread_over_the_values_of_a_label() -> None:
    fleet = fleet_of(*site_of(a="lyon", b="lyon", c="metz", d=""), flops={"a": 1e11, "b": 5e10, "c": 5e10, "d": 2e11})
    plan = only(place(inputs(fleet, intent(replicas=2, spread="site"))))
    assert nodes_of(plan) == {"a", "c"}
    reasons = {each.node: each.refusal.code for each in plan.candidates if each.refusal is not None}
    assert reasons == {"d": Code.LABEL_MISSING}
    three = only(place(inputs(fleet, intent(replicas=3, spread="site"))))
    assert three.placed == 2
    assert three.refusal is not None
    assert three.refusal.code is Code.REPLICAS_SHORT
    assert "SPREAD_CONFLICT: site " in three.refusal.found
    assert three.nearest == "availability: {replicas: 2}"
    b = next(each for each in three.candidates if each.node == "b")
    assert b.refusal is not None
    assert (b.refusal.found, b.refusal.asked) == ("site lyon has a replica already", "spread: {over: site}")


def test_a_label_that_no_node_has_is_named_with_those_that_there_are() -> None:
    plan = only(place(inputs(fleet_of(*site_of(a="lyon", b="metz")), intent(replicas=2, spread="sitee"))))
    assert plan.placed == 0
    assert plan.is_final
    assert plan.refusal is not None
    assert plan.refusal.code is Code.LABEL_MISSING
    assert "no node has a label sitee, only entry, site" in plan.refusal.found
    assert plan.nearest == "availability: {spread: node}"
    assert plan.proposal is not None
    assert plan.proposal.require.spread == Spread.NODE


def test_a_node_that_loses_its_label_keeps_its_replica_and_one_that_changes_site_does_not() -> None:
    region = CoreRegion(*site_of(a="lyon", b="metz", c="nice"), flops={"c": 5e10})
    region.intents = (intent(replicas=2, spread="site"),)
    region.run(10)
    assert {name for name, _ in region.replicas().values()} == {"a", "b"}
    before = region.replicas()
    region.relabel("a", {})
    region.run(10)
    assert region.replicas() == before
    region.relabel("a", {"site": "metz"})
    region.run(20)
    assert {name for name, _ in region.replicas().values()} in ({"a", "c"}, {"b", "c"})


def test_the_first_alternative_that_has_room_wins_whatever_the_objective_says() -> None:
    nodes = kinds_of(n="npu", g="gpu", c="cpu")
    fleet = fleet_of(*nodes, flops={"n": 1e10, "g": 1e11, "c": 1e13})
    asked = intent(prefer=PREFER)
    plan = only(place(inputs(fleet, asked)))
    assert nodes_of(plan) == {"n"}
    assert [change.why for change in plan.changes] == [
        'the best that fits, prefer 1 of 2: device.kind == "npu"',
    ]
    assert [(each.node, each.preference) for each in plan.candidates] == [("n", 1), ("g", 2), ("c", 3)]
    for lost, chosen in (("n", "g"), ("g", "c")):
        fleet = fleet.with_node(replace(fleet.nodes[lost], cordoned=True))
        plan = only(place(inputs(fleet, asked)))
        assert nodes_of(plan) == {chosen}
    assert plan.changes[0].why == "the best that fits; nothing that `prefer` names does"
    without = only(place(inputs(fleet_of(*nodes, flops={"n": 1e10, "c": 1e13}), intent())))
    assert nodes_of(without) == {"c"}
    assert {each.preference for each in without.candidates} == {0}


def test_a_replica_follows_a_changed_preference_and_never_one_that_is_as_good() -> None:
    region = CoreRegion(*kinds_of(n="npu", g="gpu", c="cpu"), flops={"c": 1e13})
    region.intents = (intent(),)
    region.run(10)
    assert {name for name, _ in region.replicas().values()} == {"c"}
    region.intents = (replace(intent(prefer=PREFER), revision=2),)
    region.run(20)
    assert {name for name, _ in region.replicas().values()} == {"n"}
    region.intents = (replace(intent(prefer=PREFER[1:]), revision=3),)
    region.run(20)
    assert {name for name, _ in region.replicas().values()} == {"g"}


@pytest.mark.parametrize("rule", [MigrationRule(), AUTOMATIC], ids=["by hand", "automatic"])
def test_a_workload_returns_to_what_it_prefers_where_its_policy_lets_it_move(rule: MigrationRule) -> None:
    region = CoreRegion(*kinds_of(n="npu", c="cpu"), flops={"n": 1e10, "c": 1e13})
    region.intents = (intent(prefer=PREFER, migration=rule),)
    region.run(10)
    region.agents["n"].heard = False
    region.run(30)
    assert {name for name, _ in region.replicas().values()} == {"c"}
    region.reconnect("n")
    region.run(240, tick=1)
    expected = "n" if rule.automatic else "c"
    assert {name for name, _ in region.replicas().values()} == {expected}
    moves = list(region.migrations.values())
    assert [each.cause for each in moves] == ([Cause.OBJECTIVE] if rule.automatic else [])
    assert all(each.reason.startswith("`prefer` puts n/npu first: ") for each in moves)


KINDS = st.lists(st.sampled_from(("npu", "gpu", "cpu")), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(KINDS, st.integers(1, 4), st.lists(st.floats(1e9, 1e13), min_size=6, max_size=6))
def test_together_workloads_take_as_many_preferred_places_as_there_are(
    kinds: list[str], workloads: int, flops: list[float]
) -> None:
    """Several share the best device; replicas of one that must be apart take the best nodes."""
    names = [f"n{at}" for at in range(len(kinds))]
    nodes = [node(name, device(kind, kind=kind)) for name, kind in zip(names, kinds, strict=True)]
    fleet = fleet_of(*nodes, flops=dict(zip(names, flops, strict=False)))
    intents = [intent(f"w{at}", prefer=PREFER, replicas=1) for at in range(workloads)]
    plan = place(inputs(fleet, *intents))
    order = {"npu": 0, "gpu": 1, "cpu": 2}
    best = min(order[kind] for kind in kinds)
    chosen = [order[kinds[names.index(target.node)]] for each in plan.workloads for target in each.targets]
    assert chosen == [best] * workloads  # all fit on one device
    spread = only(place(inputs(fleet, intent(prefer=PREFER, replicas=workloads, spread=Spread.NODE))))
    taken = sorted(order[kinds[names.index(target.node)]] for target in spread.targets)
    assert taken == sorted(order[kind] for kind in kinds)[:workloads]


def test_traffic_beyond_every_device_leaves_its_neighbours_share_as_it_is() -> None:
    """Sums of shares are kept from step to step: what comes and goes again must leave what was there."""
    scope = Scope(inputs(fleet_of(node("a", device())), intent()))
    ((state, on),) = scope.devices
    option = scope.option(intent(), intent().models[0], state, on)
    small, absurd = (
        busy_share(scope, intent(traffic=(Traffic("x", PerSecond(rate), PerSecond(rate)),)), option, 1)
        for rate in (3.0, 1e30)
    )
    assert 0 < small < 1 < absurd == MOST_EXACT
    assert small + absurd - absurd == small
