"""A replica that stands by: where it is, when it takes over, and what becomes of it then."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import (
    MIB,
    SMALL,
    CoreRegion,
    device,
    fleet_of,
    inputs,
    intent,
    node,
    traffic,
)
from shoal.coordinator.core.migration.model import MigrationStage
from shoal.coordinator.core.placement.model import Inputs, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.types.agreement import GatewayRef
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointState
from shoal.types.units import Seconds
from shoal.types.workload import Intent, ModelRef, Quota, Spread, Standby, WorkloadKey

KEY = WorkloadKey("shop", "ocr")
AWAY = DelegatedWorkload("ag-1", "us-east", (GatewayRef("gw", "far:7001"),), is_ready=True, is_wanted=True)


def standby_intent(name: str = "ocr", **changes: Any) -> Intent:
    return intent(name, standby=Standby.WARM, **changes)


def three() -> CoreRegion:
    """`a` is the fastest, `c` the slowest."""
    return CoreRegion(node("a"), node("b"), node("c"), flops={"a": 4e11, "b": 2e11, "c": 1e11})


def only(region: Inputs) -> WorkloadPlan:
    (found,) = place(region).workloads
    return found


def who(plan: WorkloadPlan) -> tuple[list[str], list[str]]:
    """Nodes of the replicas for requests, and of the standby."""
    at_work = [target.node for target in plan.targets if not target.standby]
    return at_work, [target.node for target in plan.targets if target.standby]


def endpoints(region: CoreRegion, at: str, state: EndpointState) -> list[Endpoint]:
    return [each for each in region.desired[at].routes[0].endpoints if each.state is state]


def serving_nodes(region: CoreRegion, at: str) -> list[str]:
    return [each.node for each in endpoints(region, at, EndpointState.READY)]


def spare_of(region: CoreRegion, at: str) -> list[str]:
    return [each.node for each in endpoints(region, at, EndpointState.STANDBY)]


# -- where -------------------------------------------------------------------------------------------------------------


def test_it_is_on_another_node_and_counted_apart() -> None:
    fleet = fleet_of(
        node("a", device("gpu0", kind="gpu"), device("gpu1", kind="gpu")), node("b"), flops={"a": 4e11, "b": 1e11}
    )
    plan = only(inputs(fleet, standby_intent()))
    assert who(plan) == (["a"], ["b"])
    assert (plan.wanted, plan.placed, plan.refusal, plan.no_standby) == (1, 1, None, None)
    assert [(each.node, each.chosen, each.standby) for each in plan.candidates if each.chosen or each.standby] == [
        ("a", True, False),
        ("b", False, True),
    ]
    assert [(change.sign, change.node, change.why) for change in plan.changes] == [
        ("+", "a", "the best that fits"),
        ("+", "b", "stands by"),
    ]


def test_without_another_node_it_is_missing_and_the_replica_is_not() -> None:
    plan = only(inputs(fleet_of(node("a", device("cpu0"), device("gpu0", kind="gpu"))), standby_intent()))
    assert (plan.placed, plan.refusal) == (1, None)
    assert plan.no_standby is not None
    assert plan.no_standby.code is Code.STANDBY_SHORT
    assert Code.SPREAD_CONFLICT in plan.no_standby.found


def test_its_memory_and_its_traffic_are_committed() -> None:
    fleet = fleet_of(node("a"), node("b", device("cpu0", memory=100 * MIB)), flops={"a": 4e11, "b": 1e11})
    first, second = place(inputs(fleet, standby_intent(priority=2), standby_intent("other"))).workloads
    assert who(first) == (["a"], ["b"])
    assert who(second) == (["a"], [])
    assert second.no_standby is not None
    assert Code.OUTRANKED in second.no_standby.found or Code.MEMORY_SHORT in second.no_standby.found
    busy = only(
        inputs(fleet_of(node("a"), node("b"), flops={"a": 1e12, "b": 2e9}), standby_intent(traffic=traffic(100.0)))
    )
    assert busy.no_standby is not None, "it could not carry what it stands by for"
    assert Code.UTILISATION_SHORT in busy.no_standby.found


def test_quotas_count_it() -> None:
    fleet = fleet_of(node("a"), node("b"))
    plan = only(inputs(fleet, standby_intent(), quotas={"shop": Quota("shop", replicas=1)}))
    assert plan.placed == 1
    assert plan.no_standby is not None
    assert Code.QUOTA in plan.no_standby.found


def test_what_is_only_slower_than_asked_stands_by_where_nothing_else_can() -> None:
    slow = fleet_of(node("a"), node("b"), flops={"a": 4e11, "b": 1e9})
    asked = standby_intent(latency_p95_s=Seconds(0.1))
    plan = only(inputs(slow, asked))
    assert who(plan) == (["a"], ["b"])
    assert plan.changes[-1].why == "stands by, slower than asked"
    able = fleet_of(node("a"), node("b"), node("c"), flops={"a": 4e11, "b": 1e9, "c": 1e11})
    assert who(only(inputs(able, asked))) == (["a"], ["c"])
    elsewhere = only(inputs(slow, standby_intent(where='node.name == "a"')))
    assert elsewhere.no_standby is not None, "what may not run it may not stand by"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1e9, 1e11, 2e11]), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from(list(Spread)),
    st.sampled_from([None, Seconds(0.1)]),
)
def test_law_it_is_never_with_what_it_stands_by_for(
    speeds: list[float], replicas: int, spread: Spread, latency: Seconds | None
) -> None:
    nodes = [node(f"n{at}", device("cpu0"), device("gpu0", kind="gpu")) for at in range(len(speeds))]
    fleet = fleet_of(*nodes, flops={f"n{at}": speed for at, speed in enumerate(speeds)})
    plan = only(inputs(fleet, standby_intent(replicas=replicas, spread=spread, latency_p95_s=latency)))
    at_work, standby = who(plan)
    assert len(at_work) == plan.placed
    assert not set(at_work) & set(standby)
    if plan.refusal is None:
        assert (plan.no_standby is None) == (len(standby) == 1)
        assert bool(standby) == bool({each.name for each in nodes} - set(at_work)), "any device is able here"
    else:
        assert not standby, "first come those that are for requests"


# -- when --------------------------------------------------------------------------------------------------------------


def test_it_is_loaded_listed_and_takes_over_when_its_active_one_is_silent() -> None:
    region = three()
    region.intents = (standby_intent(),)
    region.run(10)
    assert (serving_nodes(region, "c"), spare_of(region, "c")) == (["a"], ["b"])
    (standby,) = endpoints(region, "b", EndpointState.STANDBY)
    region.agents["a"].up = False
    seen = list[tuple[list[str], list[str]]]()
    for _ in range(16):
        region.step()
        seen.append((serving_nodes(region, "c"), spare_of(region, "c")))
    assert all(at_work or standby for at_work, standby in seen), "some front always has where to send"
    assert seen[-1] == (["b"], ["c"])
    assert endpoints(region, "b", EndpointState.READY)[0].assignment == standby.assignment, "the very same replica"
    assert region.agents["b"].started == [standby.assignment]
    assert [event.node for event in region.events if event.code == "TOOK_OVER"] == ["b"]


def test_one_that_is_staged_loads_only_when_its_active_one_is_silent() -> None:
    region = three()
    region.intents = (intent("ocr", standby=Standby.STAGED),)
    region.run(10)
    assert (serving_nodes(region, "c"), spare_of(region, "c")) == (["a"], [])
    (spare,) = region.desired["b"].assignments
    assert (spare.standby, spare.staged, region.agents["b"].started) == (True, True, [])
    assert not [wait for wait in region.decision.waits if wait.assignment == spare.id] if region.decision else False
    region.agents["a"].up = False
    region.run(16)
    assert serving_nodes(region, "c") == ["b"]
    assert region.agents["b"].started == [spare.id], "the very same replica, loaded once"
    (other,) = region.desired["c"].assignments
    assert (other.staged, region.agents["c"].started) == (True, [])


@pytest.mark.parametrize("is_cordoned", [False, True])
def test_the_one_that_comes_back_lets_go_of_what_it_loaded_where_staged_is_asked_for(is_cordoned: bool) -> None:
    """is_cordoned: no other took over its part as the standby."""
    region = three()
    region.intents = (intent("ocr", standby=Standby.STAGED),)
    region.run(10)
    region.fleet = region.fleet.with_node(replace(region.fleet.nodes["c"], cordoned=is_cordoned))
    region.agents["a"].heard = False
    region.run(8)
    assert serving_nodes(region, "c") == ["b"]
    region.agents["a"].heard = True
    for _ in range(30):
        region.step()
        assert serving_nodes(region, "c")
    assert serving_nodes(region, "c") == ["b"]
    staged = [(where, each.staged) for where in "ac" for each in region.desired[where].assignments]
    assert staged == [("a" if is_cordoned else "c", True)]


def test_it_is_unloaded_when_staged_is_enough_and_loaded_when_not() -> None:
    region = three()
    region.intents = (standby_intent(),)
    region.run(10)
    (spare,) = region.desired["b"].assignments
    region.intents = (intent("ocr", standby=Standby.STAGED),)
    region.run(10)
    assert region.desired["b"].assignments[0].staged
    assert (serving_nodes(region, "c"), spare_of(region, "c")) == (["a"], [])
    region.intents = (standby_intent(),)
    region.run(10)
    assert (serving_nodes(region, "c"), spare_of(region, "c")) == (["a"], ["b"])
    assert region.desired["b"].assignments[0].id == spare.id


def test_a_replica_on_a_cordoned_node_does_not_become_the_standby_for_one_step() -> None:
    """`CoreRegion.step` decides again and compares: a node that takes nothing new keeps no standby."""
    region = three()
    region.intents = (intent(replicas=2, spread=Spread.NODE),)
    region.agents["a"].p50_s *= 1.5  # where one has to go, it goes
    region.run(10)
    assert serving_nodes(region, "c") == ["a", "b"]
    region.fleet = region.fleet.with_node(replace(region.fleet.nodes["a"], cordoned=True))
    region.intents = (standby_intent(),)
    region.run(10)
    assert (serving_nodes(region, "c"), spare_of(region, "c")) == (["b"], ["c"])


def test_the_one_that_comes_back_stands_by() -> None:
    region = three()
    region.intents = (standby_intent(),)
    region.run(10)
    before = {name: node for name, (node, _) in region.replicas().items()}
    region.agents["a"].heard = False
    region.run(5)
    assert serving_nodes(region, "c") == ["b"]
    region.agents["a"].heard = True
    for _ in range(30):
        region.step()
        assert serving_nodes(region, "c") or spare_of(region, "c")
    assert (serving_nodes(region, "b"), spare_of(region, "b")) == (["b"], ["a"]), "what is well stays"
    assert {name: node for name, (node, _) in region.replicas().items()} == before, "nothing was loaded anew"
    roles = [(event.node, event.code) for event in region.events if event.code in ("TOOK_OVER", "STANDS_BY")]
    assert roles == [("b", "TOOK_OVER"), ("a", "STANDS_BY")]


def test_one_that_is_slower_serves_until_there_is_another_and_is_never_made_the_active_one() -> None:
    region = CoreRegion(node("a"), node("b"), flops={"a": 4e11, "b": 1e9})
    region.intents = (standby_intent(latency_p95_s=Seconds(0.016)),)
    region.run(10)
    region.agents["a"].up = False
    region.run(20)
    assert (serving_nodes(region, "b"), spare_of(region, "b")) == ([], ["b"])
    assert region.decision is not None
    assert region.decision.plan.workloads[0].refusal is not None
    region.reconnect("a", boot="boot-2")
    region.run(10)
    assert (serving_nodes(region, "b"), spare_of(region, "b")) == (["a"], ["b"])


def test_the_target_of_a_move_serves_before_it_stands_by() -> None:
    """The move that a document begins must end, also where the next plan would have its target stand by, staged."""
    region = CoreRegion(node("a", device("cpu0"), device("gpu0", kind="gpu")), node("b"), flops={"a": 4e11, "b": 1e11})
    region.intents = (intent("ocr", replicas=2, where='device.kind == "cpu"'),)
    region.run(10)
    assert serving_nodes(region, "b") == ["a", "b"]
    region.intents = (intent("ocr", standby=Standby.STAGED),)
    region.run(80)
    (move,) = region.migrations.values()
    assert move.stage is MigrationStage.DONE
    assert len(serving_nodes(region, "b")) == 1
    assert [each.staged for name in "ab" for each in region.desired[name].assignments].count(True) == 1


def test_a_lost_standby_is_replaced_and_nothing_else_moves() -> None:
    region = three()
    region.intents = (standby_intent(),)
    region.run(10)
    region.agents["b"].up = False
    region.run(20)
    assert (serving_nodes(region, "c"), spare_of(region, "c")) == (["a"], ["c"])
    assert not [event for event in region.events if event.code in ("TOOK_OVER", "STANDS_BY")]


def test_a_new_model_comes_up_beside_the_old_ones() -> None:
    region = CoreRegion(*(node(name) for name in "abcd"))
    region.intents = (standby_intent(),)
    region.run(10)
    region.intents = (standby_intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    for _ in range(60):
        region.step()
        assert serving_nodes(region, "a")
        assert spare_of(region, "a")
    assert len(region.replicas()) == 2
    assert {each.model for content in region.desired.values() for each in content.assignments} == {SMALL}


def test_a_replica_that_is_to_stand_by_does_not_keep_the_place_of_a_better_one() -> None:
    """The policy prefers another place now: what serves stands by once a replica serves there."""
    region = CoreRegion(node("a"), node("b"), node("g", device("gpu0", kind="gpu")))
    region.intents = (intent(replicas=2, where='device.kind == "cpu"'),)
    region.run(10)
    assert serving_nodes(region, "a") == ["a", "b"]
    region.intents = (replace(standby_intent(), prefer=('device.kind == "gpu"',)),)
    for _ in range(60):
        region.step()
        assert serving_nodes(region, "a")
        assert region.decision is not None
        (plan,) = region.decision.plan.workloads
        at_work, spare = who(plan)
        assert (at_work, len(spare)) == (["g"], 1)
    assert serving_nodes(region, "a") == ["g"]
    assert len(spare_of(region, "a")) == 1


def test_it_goes_when_it_is_not_asked_for_any_more() -> None:
    region = three()
    region.intents = (standby_intent(),)
    region.run(10)
    region.intents = (intent(),)
    region.run(10)
    assert (serving_nodes(region, "c"), spare_of(region, "c")) == (["a"], [])
    assert len(region.replicas()) == 1


def test_a_lower_quota_takes_it_first() -> None:
    region = three()
    region.intents = (standby_intent(),)
    region.run(10)
    region.quotas = {"shop": Quota("shop", replicas=1)}
    region.run(10)
    assert (serving_nodes(region, "c"), spare_of(region, "c")) == (["a"], [])


# -- for another region ------------------------------------------------------------------------------------------------


def abroad() -> CoreRegion:
    """Home is too slow for what is asked."""
    region = CoreRegion(node("gw", role=Role.GATEWAY), node("a"), flops={"gw": 1e9, "a": 1e10})
    region.intents = (standby_intent(latency_p95_s=Seconds(0.02)),)
    region.delegated = {KEY: AWAY}
    region.run(10)
    return region


def test_home_stands_by_for_the_region_that_runs_it() -> None:
    region = abroad()
    assert serving_nodes(region, "gw") == ["gw"]
    assert spare_of(region, "gw") == ["a"]
    assert spare_of(region, "a") == ["a"]
    assert region.decision is not None
    (plan,) = region.decision.plan.workloads
    assert (plan.elsewhere, plan.wanted, plan.placed, who(plan)) == (True, 0, 0, ([], ["a"]))


def test_when_that_region_is_lost_home_goes_on_with_what_stands_by() -> None:
    region = abroad()
    region.delegated = {}
    for _ in range(20):
        region.step()
        assert spare_of(region, "gw") == ["a"]
    region.intents = (standby_intent(),)
    region.run(10)
    assert serving_nodes(region, "gw") == ["a"], "it does all that is asked now"


def test_what_served_at_home_stands_by_there_when_another_region_has_it() -> None:
    region = CoreRegion(node("gw", role=Role.GATEWAY), node("a"), node("b"), flops={"gw": 1e9, "a": 4e11, "b": 2e11})
    region.intents = (standby_intent(),)
    region.run(10)
    assert (serving_nodes(region, "b"), spare_of(region, "b")) == (["a"], ["b"])
    region.delegated = {KEY: AWAY}
    for _ in range(20):
        region.step()
        assert serving_nodes(region, "gw")
    assert serving_nodes(region, "b") == ["gw"]
    assert len(spare_of(region, "b")) == 1
    assert len(region.replicas()) == 1
    region.delegated = {KEY: replace(AWAY, is_wanted=False)}
    for _ in range(30):
        region.step()
        assert serving_nodes(region, "gw")
    assert serving_nodes(region, "b") in (["a"], ["b"])
    assert len(region.replicas()) == 1 + len(spare_of(region, "b"))


def test_its_room_is_not_sold() -> None:
    region = CoreRegion(node("gw", role=Role.GATEWAY), node("a", device("cpu0", memory=100 * MIB)), flops={"a": 1e10})
    region.intents = (standby_intent(where='node.name == "a"'),)
    region.delegated = {KEY: AWAY}
    region.run(10)
    assert spare_of(region, "a") == ["a"]
    region.intents = (*region.intents, intent("other", where='node.name == "a"'))
    region.run(5)
    assert region.decision is not None
    other = region.decision.plan.of(WorkloadKey("shop", "other"))
    assert other is not None
    assert other.refusal is not None
    assert Code.MEMORY_SHORT in str(other.refusal)
