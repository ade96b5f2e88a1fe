"""Laws of the objective and of joint decisions, for any region."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from immutables import Map

from harness.builders.coordinator_core import (
    DIGEST,
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
    traffic,
    warm,
)
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.migration.advance import trigger_view
from shoal.coordinator.core.migration.triggers import scan
from shoal.coordinator.core.placement import joint, score
from shoal.coordinator.core.placement import place as joint_decision
from shoal.coordinator.core.placement.columns import DeviceColumns
from shoal.coordinator.core.placement.contention import UTILISATION_MOST
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.local_search import UNPLACED, AssignmentProblem, improve
from shoal.coordinator.core.placement.model import Inputs, PlacementPlan, RegionFacts, Slot, Trial, terms_of
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.rank import WORST, gain, objective, predicted_values
from shoal.coordinator.core.workloads.decide import decide
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS, ReconcilerMemory, RegionState
from shoal.coordinator.core.workloads.reconcile import reconcile
from shoal.types.assignment import Phase
from shoal.types.codes import Code
from shoal.types.device import Device, Node, Rest
from shoal.types.migration import MigrationRule
from shoal.types.units import Bytes, Elapsed, Seconds, UsdPerHour, Wall, Watts
from shoal.types.workload import ModelRef, Spread, WorkloadKey

laws = settings(max_examples=40, deadline=None)
REST = Rest(Watts(1.0), Watts(0.5), Seconds(2.0), "of this test")
WEIGHTS: Any = st.sampled_from(
    [{"latency": 1.0}, {"energy": 1.0}, {"latency": 0.5, "energy": 0.5}, {"cost": 0.6, "carbon": 0.2, "latency": 0.2}]
)


def machine(name: str, *, sleeps: bool = False, rtt_ms: int = 0, memory: int = 4096) -> Node:
    only: Device = device(memory=memory * MIB, rest=REST if sleeps else None)
    return node(name, only, labels={"rtt": f"{rtt_ms}ms"} if rtt_ms else {})


@st.composite
def regions(draw: st.DrawFn, *, workloads: int = 1, sleep: bool = True, same_priority: bool = False) -> Inputs:
    """Devices of all speeds, powers, prices and distances; workloads that fit some of them."""
    nodes = [
        machine(f"n{index}", sleeps=sleep and draw(st.booleans()), rtt_ms=draw(st.sampled_from([0, 1, 20])))
        for index in range(draw(st.integers(1, 6)))
    ]
    fleet = fleet_of()
    for each in nodes:
        speed, watts = draw(st.sampled_from([1e10, 3e10, 1e11, 1e12])), draw(st.sampled_from([2.0, 15.0, 90.0]))
        fleet = with_machine(fleet, each, speed, watts)
    costs = {Slot(each.name, "cpu0"): UsdPerHour(draw(st.sampled_from([0.0, 0.05, 0.4, 3.0]))) for each in nodes}
    return inputs(
        fleet,
        *(
            intent(
                f"w{index}",
                weights=draw(WEIGHTS),
                replicas=draw(st.integers(1, 2)),
                spread=draw(st.sampled_from(list(Spread))),
                traffic=draw(st.sampled_from([(), traffic(1.0), traffic(6.0)])),
                priority=7 if same_priority else index,
                migration=MigrationRule(automatic=True, gain=1e-6),
            )
            for index in range(draw(st.integers(1, workloads)))
        ),
        costs=costs,
        region=RegionFacts("eu-west", "eu", carbon_g_per_kwh=300.0, sleep_after_s=Seconds(5.0) if sleep else None),
    )


def with_machine(fleet: Fleet, each: Node, flops: float, watts: float) -> Fleet:
    return replace(fleet, nodes={**fleet.nodes, **fleet_of(each, flops={each.name: flops}, watts=watts).nodes})


def targets(region: Inputs) -> list[tuple[str, str, str, str]]:
    return [
        (str(each.workload), each.node, each.device, each.model)
        for plan in place(region, explain=False).workloads
        for each in plan.targets
    ]


def total(region: Inputs, key: WorkloadKey) -> float:
    """Sum of the objectives of a workload's replicas; inf where it lacks some."""
    scope = Scope(region)
    asked = next(each for each in region.intents if each.key == key)
    plan = place(region, explain=False).of(key)
    assert plan is not None
    if plan.placed < plan.wanted:
        return math.inf
    options = [
        scope.option(asked, asked.models[0], state, on)
        for target in plan.targets
        for state, on in scope.devices
        if (state.name, on.name) == (target.node, target.device)
    ]
    return sum(
        objective(predicted_values(scope, each, asked, asked.require.replicas), asked.weights) for each in options
    )


# -- devices as arrays -------------------------------------------------------------------------------------------------


def cordon(region: Inputs, name: str, draw: st.DataObject) -> Inputs:
    state = region.fleet.nodes[name]
    return replace(region, fleet=region.fleet.with_node(replace(state, cordoned=not state.cordoned)))


def fill(region: Inputs, name: str, draw: st.DataObject) -> Inputs:
    state, free = region.fleet.nodes[name], draw.draw(st.sampled_from([0, 64, 4096])) * MIB
    readings = {on: replace(each, free_bytes=Bytes(free)) for on, each in state.readings.items()}
    return replace(region, fleet=region.fleet.with_node(replace(state, readings=readings)))


def measure_model(region: Inputs, name: str, draw: st.DataObject) -> Inputs:
    trial, p50 = Trial(DIGEST, name, "cpu0"), draw.draw(st.sampled_from([0.001, 0.02]))
    return replace(region, measured=Map(region.measured).set(trial, warm(p50)))


def measure_device(region: Inputs, name: str, draw: st.DataObject) -> Inputs:
    speed = draw.draw(st.sampled_from([1e10, 1e11]))
    return replace(region, fleet=with_machine(region.fleet, region.fleet.nodes[name].node, speed, 15.0))


def label(region: Inputs, name: str, draw: st.DataObject) -> Inputs:
    state = region.fleet.nodes[name]
    labels = {**state.node.labels, "rank": draw.draw(st.sampled_from(["0", "1"]))}
    return replace(region, fleet=region.fleet.with_node(replace(state, node=replace(state.node, labels=labels))))


def leave(region: Inputs, name: str, draw: st.DataObject) -> Inputs:
    nodes = {known: state for known, state in region.fleet.nodes.items() if known != name}
    return replace(region, fleet=replace(region.fleet, nodes=nodes)) if len(nodes) else region


def join(region: Inputs, name: str, draw: st.DataObject) -> Inputs:
    return replace(region, fleet=with_machine(region.fleet, machine(f"{name}x", sleeps=True), 1e11, 2.0))


CHANGES = (cordon, fill, measure_model, measure_device, label, leave, join)


@laws
@given(regions(workloads=4), st.data())
def test_columns_choose_what_a_look_at_every_device_chooses(region: Inputs, data: st.DataObject) -> None:
    columns = DeviceColumns()
    asked = data.draw(st.sampled_from(["", 'node.labels.rank == "1"', 'device.kind == "cpu" && node.name != "n0"']))
    where = [replace(each, require=replace(each.require, where=asked)) for each in region.intents[::2]]
    region = replace(region, measured=Map(), intents=(*where, *region.intents[1::2]))
    for _ in range(3):
        before, change = region, data.draw(st.sampled_from(CHANGES))
        name = data.draw(st.sampled_from(sorted(region.fleet.nodes)))
        region = change(region, name, data)
        for each in {*before.fleet.nodes, *region.fleet.nodes}:
            if before.fleet.nodes.get(each) is not region.fleet.nodes.get(each):
                columns.mark(each)
        columns.update(region, before.measured, {name} if region.measured is not before.measured else set())
        chosen = place(region, explain=False, columns=columns)
        assert repr(chosen) == repr(place(region, explain=False))


# -- the objective -----------------------------------------------------------------------------------------------------

values = st.tuples(*[st.floats(1e-3, 1e3)] * len(score.TERMS))
unknown = st.tuples(*[st.sampled_from([math.nan, math.inf, 0.5, 2.0])] * len(score.TERMS))


@settings(deadline=None)
@given(values, values, values, WEIGHTS)
def test_law_gains_agree_with_the_objective(a: Any, b: Any, c: Any, weights: Any) -> None:
    """So what places and what moves never disagree, and no circle of places is each better than the next."""
    assert (gain(a, b, weights) > 1e-9) == (objective(b, weights) - objective(a, weights) > 1e-9)
    there, back = 1 - gain(a, b, weights), 1 - gain(b, a, weights)
    assert there * back == pytest.approx(1.0) or max(there, back) >= WORST
    if max(there, back) < 1e3:
        through = (1 - gain(a, c, weights)) * (1 - gain(c, b, weights))
        assert through == pytest.approx(there, rel=1e-6) or not 1e-5 < 1 - gain(a, c, weights) < 1e5


@settings(deadline=None)
@given(values, values, st.floats(1.0, 1e2), WEIGHTS)
def test_law_a_scale_decides_nothing(a: Any, b: Any, scale: float, weights: Any) -> None:
    scaled = [tuple(value * scale for value in row) for row in (a, b)]
    assert objective(scaled[0], weights) - objective(scaled[1], weights) == pytest.approx(
        objective(a, weights) - objective(b, weights), abs=1e-6
    )


@settings(deadline=None)
@given(values, unknown, st.integers(0, len(score.TERMS) - 1))
def test_law_what_is_unknown_is_worse_than_anything_known(known: Any, other: Any, at: int) -> None:
    weights = {term.name: 1.0 for term in score.TERMS} | {score.TERMS[at].name: 0.01}
    lacks = (*other[:at], math.nan, *other[at + 1 :])
    assert objective(known, weights) < objective(lacks, weights)
    assert gain(lacks, known, weights) < 0


def test_the_example_of_two_devices_and_a_third_that_nobody_chooses() -> None:
    """10 ms and 5 J, or 20 ms and 1 J: what others are there does not matter."""
    fast, frugal = ("fast", 2e11, 500.0), ("frugal", 1e11, 50.0)
    asked = intent(weights={"latency": 0.5, "energy": 0.5})
    for others in ([], [("slow", 1e9, 1.0)], [("hungry", 1e11, 9e4)], [("slow", 1e9, 1.0), ("hungry", 1e11, 9e4)]):
        fleet = fleet_of()
        for name, flops, watts in (fast, frugal, *others):
            fleet = with_machine(fleet, machine(name), flops, watts)
        assert [each[1] for each in targets(inputs(fleet, asked))] == ["frugal"]


# -- places ------------------------------------------------------------------------------------------------------------


@laws
@given(regions(workloads=3), st.sampled_from([1e9, 3e10, 3e12]), st.sampled_from([1.0, 90.0, 900.0]))
def test_law_a_device_that_is_not_chosen_changes_nothing(region: Inputs, flops: float, watts: float) -> None:
    more = replace(region, fleet=with_machine(region.fleet, machine("n9"), flops, watts), costs=region.costs)
    after = targets(more)
    assume(all(each[1] != "n9" for each in after))
    assert after == targets(region)


@laws
@given(regions(), st.sampled_from([2.0, 50.0]), st.booleans())
def test_law_a_better_device_never_worsens_the_objective(region: Inputs, factor: float, is_new: bool) -> None:
    key = region.intents[0].key
    before = total(region, key)
    name = "n9" if is_new else "n0"
    slot = Slot(name, "cpu0")
    state = region.fleet.nodes["n0"]
    flops = state.receipts["cpu0"].rates.matmul_flops["fp32"] * factor
    watts = state.receipts["cpu0"].rates.active_w
    better = with_machine(region.fleet, replace(state.node, name=name), flops, watts)
    costs = {**region.costs, slot: UsdPerHour(region.costs[Slot("n0", "cpu0")] / factor)}
    assert total(replace(region, fleet=better, costs=costs), key) <= before + 1e-9


def test_a_faster_device_emits_no_more_for_the_same_requests() -> None:
    """Without declared traffic, emissions were of a device at full load, which answers more requests an hour."""
    asked = intent(weights={"carbon": 1.0})
    where = RegionFacts("eu-west", "eu", carbon_g_per_kwh=300.0, sleep_after_s=Seconds(5.0))

    def emissions(flops: float, watts: float) -> float:
        only = with_machine(fleet_of(), machine("n0", sleeps=True), flops, watts)
        (plan,) = place(inputs(only, asked, region=where)).workloads
        return next(each.value for each in plan.candidates[0].terms if each.name == "carbon")

    assert emissions(2e10, 4.0) <= emissions(1e10, 4.0)


@laws
@given(st.integers(1, 400 * MIB), st.integers(0, 1))
def test_law_what_fits_exactly_is_placed(size: int, lacks: int) -> None:
    """To the byte of memory."""
    region = inputs(fleet_of(machine("a")), intent(), profiles={DIGEST: profile(size=size)})
    (target,) = place(region).targets[region.intents[0].key]
    on = device(memory=target.memory_bytes - lacks)
    state = fleet_of(node("a", on)).nodes["a"]
    silent: Any = math.nan  # a device that reports no free memory
    blind = replace(state.readings["cpu0"], free_bytes=silent)
    fleet = region.fleet.with_node(replace(state, readings={"cpu0": blind}))
    (plan,) = place(replace(region, fleet=fleet)).workloads
    assert plan.placed == 1 - lacks
    assert (plan.refusal.code if plan.refusal is not None else None) == (Code.MEMORY_SHORT if lacks else None)


@laws
@given(st.floats(0.01, 0.69), st.sampled_from([-1e-9, 0.0, 1e-9]))
def test_law_traffic_fits_to_the_last_of_a_device(first: float, over: float) -> None:
    region = inputs(fleet_of(machine("a")), intent())
    scope = Scope(region)
    known = scope.option(region.intents[0], region.intents[0].models[0], *scope.devices[0]).prediction
    assert known is not None
    busy = (first, UTILISATION_MOST - first + over)
    asked = [intent(f"w{at}", traffic=traffic(each / known.latency_p50_s.mid)) for at, each in enumerate(busy)]
    plan = place(replace(region, intents=tuple(asked)), explain=False)
    placed = [target.busy for found in plan.workloads for target in found.targets]
    assert len(placed) == (2 if math.fsum(placed[:1]) + busy[1] <= UTILISATION_MOST else 1) or over == 0.0
    assert math.fsum(placed) <= UTILISATION_MOST + 1e-12


@laws
@given(regions(workloads=4, sleep=False, same_priority=True))
def test_law_joint_decisions_oversell_nothing(region: Inputs) -> None:
    plan = place(region, explain=False)
    busy = dict[tuple[str, str], float]()
    for found in plan.workloads:
        nodes = [target.node for target in found.targets]
        spread = next(each.require.spread for each in region.intents if each.key == found.workload)
        assert len(set(nodes)) == len(nodes) or spread is Spread.NONE
        for target in found.targets:
            busy[target.node, target.device] = busy.get((target.node, target.device), 0.0) + target.busy
    assert all(share <= 0.7 + 1e-9 for share in busy.values())
    assert place(region).hash == plan.hash


@laws
@given(regions(workloads=3), st.randoms(use_true_random=False))
def test_law_the_order_of_reports_is_irrelevant(region: Inputs, shuffler: Any) -> None:
    nodes = list(region.fleet.nodes.values())
    shuffler.shuffle(nodes)
    fleet = Fleet()
    for state in nodes:
        fleet = updates.connect(fleet, state.node, 1, Elapsed(0.0), Wall(START))
    shuffler.shuffle(nodes)
    for state in nodes:
        fleet, _ = updates.merge_receipts(fleet, state.name, tuple(state.receipts.values()), Elapsed(0.0), Wall(START))
    states = {name: replace(region.fleet.nodes[name], receipts=fleet.nodes[name].receipts) for name in fleet.nodes}
    assert targets(replace(region, fleet=replace(region.fleet, nodes=states))) == targets(region)


@laws
@given(regions(workloads=2, sleep=False))
def test_law_what_was_placed_is_not_moved_away_by_the_same_policy(region: Inputs) -> None:
    still_there(region)


@laws
@given(regions())
def test_law_what_was_placed_is_not_moved_away_where_devices_sleep(region: Inputs) -> None:
    asked = region.intents[0]
    still_there(replace(region, intents=(replace(asked, require=replace(asked.require, replicas=1)),)))


def still_there(region: Inputs) -> None:
    """Once every replica that was placed is ready, no trigger proposes another place for the objective. Replicas are
    on different devices, so that none was kept from its place by the other."""
    world = RegionState(
        region.region, region.fleet, region.intents, region.profiles, {}, ReconcilerMemory(), costs=region.costs
    )
    first = decide(world, NO_MIGRATIONS, region.now, region.wall)
    assert len(region.intents) == 1 or first.plan.workloads
    fleet = world.fleet
    for name, content in first.desired.items():
        seen = {each.id: observation(each, Phase.READY) for each in content.assignments}
        fleet = fleet.with_node(replace(fleet.nodes[name], observed=seen))
    world = replace(world, fleet=fleet, desired=first.desired, memory=first.memory)
    view = trigger_view(world, {}, region.now, region.wall)
    proposals = [one for _, one in scan(view).proposals if one.expected is not None and one.expected.gain > 1e-6]
    assert proposals == []


# -- local search ------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> AssignmentProblem:
    """Up to 4 rows, 3 nodes with a device each, and 2 models; small numbers, so that sums are exact."""
    rows, nodes, models = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    columns = nodes * models

    def table(low: int, high: int) -> Any:
        return np.array(draw(st.lists(st.integers(low, high), min_size=rows * columns, max_size=rows * columns)))

    cost = table(0, 20).astype(float).reshape(rows, columns)
    cost[cost > 17] = np.inf
    node_of = np.repeat(np.arange(nodes), models)
    left = np.array(draw(st.lists(st.integers(0, 9), min_size=nodes, max_size=nodes)), dtype=float)
    return AssignmentProblem(
        cost, table(1, 4).astype(float).reshape(rows, columns), table(0, 3).astype(float).reshape(rows, columns),
        node_of, left, node_of, left[::-1].copy(), node_of, np.tile(node_of, (rows, 1)),
        np.array(draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))),
    )  # fmt: skip


def is_feasible(problem: AssignmentProblem, chosen: Any) -> bool:
    rows = np.flatnonzero(chosen != UNPLACED)
    at = chosen[rows]
    memory, busy = problem.memory_left.copy(), problem.time_left.copy()
    np.subtract.at(memory, problem.memory_pool[at], problem.memory[rows, at])
    np.subtract.at(busy, problem.time_pool[at], problem.busy[rows, at])
    used = {pool for row, pool in zip(rows, problem.time_pool[at], strict=True) if problem.busy[row, chosen[row]] > 0}
    groups = sorted((int(problem.group[row]), int(problem.node[chosen[row]])) for row in rows)
    return bool(
        np.isfinite(problem.cost[rows, at]).all()
        and (memory >= 0).all()
        and all(busy[pool] >= 0 for pool in used)
        and all(one != other for one, other in pairwise(groups))
    )


@settings(max_examples=80, deadline=None)
@given(problems())
def test_law_local_search_stays_feasible_and_places_as_well_as_any_single_change(problem: AssignmentProblem) -> None:
    rows, columns = problem.cost.shape
    start = np.full(rows, UNPLACED)
    found = improve(problem, start)
    assert is_feasible(problem, found)
    assert (start == UNPLACED).all()
    assert problem.total(found) <= problem.total(start)
    for row, column in product(range(rows), range(columns)):
        other = found.copy()
        other[row] = column
        if is_feasible(problem, other) and problem.node[column] != problem.node[found[row]]:
            assert problem.total(other) >= problem.total(found) - 1e-6


def test_a_workload_makes_room_for_another_of_its_priority() -> None:
    """The first fits both nodes and would take the only one that the second fits."""
    fleet = with_machine(
        with_machine(fleet_of(), machine("fast", memory=90), 2e11, 20.0), machine("slow", memory=90), 1e11, 20.0
    )
    either, picky = intent("a"), intent("b", where='node.name == "fast"')
    assert [each[:2] for each in targets(inputs(fleet, either, picky))] == [("shop/a", "slow"), ("shop/b", "fast")]
    ranked = inputs(fleet, replace(either, priority=200), picky)
    assert [each[:2] for each in targets(ranked)] == [("shop/a", "fast")], "one of higher priority makes none"


def test_what_was_tried_together_and_not_taken_is_not_left_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried puts `a` on the node of `b`, which then has no place; `c` fits beside `b` alone."""
    fleet = with_machine(
        with_machine(fleet_of(), machine("fast", memory=110), 2e11, 20.0), machine("slow", memory=110), 1e11, 20.0
    )
    small: Any = {"models": (ModelRef("small.onnx", SMALL, ""),), "where": 'node.name == "slow"'}
    region = inputs(fleet, intent("a"), intent("b", **small), intent("c", priority=1, **small))
    region = replace(region, measured=Map())
    tried = list[object]()

    def better_places(*_: object) -> dict[WorkloadKey, tuple[tuple[str, str, str], ...]]:
        tried.append(_)
        return {WorkloadKey("shop", "a"): (("slow", "cpu0", intent().models[0].variant),)}

    monkeypatch.setattr(joint_decision, "better_places", better_places)
    columns = DeviceColumns()
    columns.update(region, region.measured, set())
    plan = place(region, explain=False, columns=columns)
    assert len(tried) == 1
    assert [(each.workload.name, target.node) for each in plan.workloads for target in each.targets] == [
        ("a", "fast"),
        ("b", "slow"),
        ("c", "slow"),
    ]


def place_with_columns(region: Inputs) -> list[tuple[str, str, str]]:
    """The name of each workload that was placed, its node and device."""
    columns = DeviceColumns()
    columns.update(region, region.measured, set())
    return places_of(place(region, explain=False, columns=columns))


def places_of(plan: PlacementPlan) -> list[tuple[str, str, str]]:
    return [(each.workload.name, target.node, target.device) for each in plan.workloads for target in each.targets]


def with_replicas(region: Inputs, running: Mapping[str, int], *, confirmed: bool = True) -> Inputs:
    """With so many replicas of these workloads, placed before the others; all of them ready.

    confirmed: under the terms of now.
    """
    first = [
        replace(each, require=replace(each.require, replicas=running[each.key.name]))
        for each in region.intents
        if running.get(each.key.name)
    ]
    plan = place(replace(region, intents=tuple(first)), explain=False)
    fleet = region.fleet
    made = reconcile(plan, {}, fleet, region.profiles, {}, ReconcilerMemory(), {}, region.now, region.wall)
    for name, held in made.desired.items():
        observed = {each.id: observation(each, Phase.READY) for each in held}
        fleet = fleet.with_node(replace(fleet.nodes[name], observed=observed))
    asked = {each.key: terms_of(each) for each in region.intents}
    terms = {each.id: asked[each.workload] for held in made.desired.values() for each in held}
    return replace(region, fleet=fleet, desired=made.desired, terms=terms if confirmed else {})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_law_where_each_has_its_best_place_no_other_choice_is_better(data: st.DataObject) -> None:
    """Little memory and time, workloads of which some run already and some may run on few nodes."""
    names = [f"n{at}" for at in range(data.draw(st.integers(1, 4)))]
    fleet = fleet_of()
    for name in names:
        speed, memory = data.draw(st.sampled_from([1e11, 2e11])), data.draw(st.sampled_from([60, 90, 130, 4096]))
        of_two = [device(on, memory=memory * MIB) for on in ("cpu0", "cpu1")[: data.draw(st.integers(1, 2))]]
        fleet = with_machine(fleet, node(name, *of_two), speed, 20.0)
    models = st.sampled_from([ModelRef("ocr.onnx", DIGEST, ""), ModelRef("small.onnx", SMALL, "")])
    asked = [
        intent(
            f"w{at}", models=(data.draw(models),), replicas=data.draw(st.integers(1, 3)),
            spread=data.draw(st.sampled_from([Spread.NODE, Spread.NONE])),
            where=data.draw(st.sampled_from(["", 'node.name != "n0"'])),
            weights=data.draw(st.sampled_from([{"latency": 1.0}, {"energy": 1.0}])),
            traffic=data.draw(st.sampled_from([(), traffic(5.0)])),
        )
        for at in range(data.draw(st.integers(2, 3)))
    ]  # fmt: skip
    have_best = joint._have_best

    def check(rows: Any, after: Any) -> bool:
        found = have_best(rows, after)
        if found:
            together = joint.joint_problem(rows[0].solver.scope, rows, after)
            assert together is not None
            assert np.array_equal(improve(together.problem, together.start), together.start)
        return found

    running = {each.key.name: data.draw(st.integers(0, 2)) for each in asked}
    region = with_replicas(inputs(fleet, *asked), running, confirmed=data.draw(st.booleans()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joint, "_have_best", check)
        found = place_with_columns(region)
    assert found == places_of(place(region, explain=False))


def test_new_replicas_may_run_beside_their_own_and_are_not_moved_from_there_for_nothing() -> None:
    """Of a workload whose spread allows it: the best place stays the best, with columns and without."""
    fleet = with_machine(fleet_of(), machine("fast"), 2e11, 20.0)
    fleet = with_machine(fleet, machine("slow"), 1e11, 20.0)
    region = with_replicas(inputs(fleet, intent("a", replicas=3, spread=Spread.NONE)), {"a": 1})
    assert place_with_columns(region) == [("a", "fast", "cpu0")] * 3
    assert places_of(place(region, explain=False)) == [("a", "fast", "cpu0")] * 3


def test_workloads_are_tried_together_only_where_one_takes_the_best_place_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, joint_problem = list[int](), joint.joint_problem

    def count(scope: Scope, rows: Any, after: Any) -> Any:
        tried.append(len(rows))
        return joint_problem(scope, rows, after)

    monkeypatch.setattr(joint, "joint_problem", count)

    def region_of(memory: int, where: str = "") -> Inputs:
        fleet = with_machine(fleet_of(), machine("fast", memory=memory), 2e11, 20.0)
        fleet = with_machine(fleet, machine("slow", memory=memory), 1e11, 20.0)
        return inputs(fleet, intent("a"), intent("b", where=where))

    assert place_with_columns(region_of(4096)) == [("a", "fast", "cpu0"), ("b", "fast", "cpu0")]
    assert tried == [], "each has what it would have alone"
    assert place_with_columns(region_of(90, 'node.name == "fast"')) == [("a", "slow", "cpu0"), ("b", "fast", "cpu0")]
    assert tried == [2]
