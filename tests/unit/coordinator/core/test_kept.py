"""A step decides about what changed, and comes to what a decision about everything comes to: after every event."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from harness.builders.coordinator_core import (
    DIGEST,
    MIB,
    SMALL,
    START,
    CoreRegion,
    device,
    fleet_of,
    intent,
    node,
    profile,
)  # fmt: skip
from harness.builders.coordinator_core import inputs as inputs_for
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.migration.advance import migration_effects
from shoal.coordinator.core.migration.model import AbortedState
from shoal.coordinator.core.placement import columns as columns_module
from shoal.coordinator.core.placement import explain
from shoal.coordinator.core.placement.allocations import NO_ALLOCATIONS
from shoal.coordinator.core.placement.columns import DeviceColumns, Excluded, ModelFigures, Nowhere, Preparation
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.model import Poisoning, Trial, Triple
from shoal.coordinator.core.placement.replicas import WorkloadReplicas
from shoal.coordinator.core.placement.solve import Level, Solver
from shoal.coordinator.core.prediction.shared_variances import LEAST_GROUPS
from shoal.coordinator.core.workloads import kept
from shoal.coordinator.core.workloads.decide import decide, inputs_of, next_placement
from shoal.coordinator.core.workloads.kept import KeptDecisions
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS, Decision
from shoal.coordinator.core.workloads.warm_ups import MOST_OF_A_KIND
from shoal.policies.resolve import RTT_LABEL
from shoal.types.assignment import Subscriptions
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device, Node, Role
from shoal.types.migration import MigrationRule
from shoal.types.profile import KERNEL_KINDS, KernelCost
from shoal.types.units import Bytes, Elapsed, Seconds, Wall, Watts
from shoal.types.workload import Intent, ModelRef, Preempt, Quota, Spread, Standby, WorkloadKey

T = TypeVar("T")

NODES: Final = 5


class Choices:
    """By chance, from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.randrange(len(options))]

    def randrange(self, least: int, most: int | None = None) -> int:
        """From `least` to below `most`; with one argument from 0 to below it."""
        return int(self._rng.integers(least, most) if most is not None else self._rng.integers(least))

    def random(self) -> float:
        return float(self._rng.random())


def region_of(count: int) -> CoreRegion:
    """Agents where requests enter and where none do, three that subscribe to routes, two with two devices; and a
    gateway."""
    members = [
        node(
            f"n{at}",
            *((device(), device("gpu0", kind="gpu")) if at % 2 else (device(),)),
            labels={"entry": ("*", "shop", "")[at % 3], "rank": str(at), "site": str(at // 2)},
            subscribes=at in (0, 1, 2),
        )
        for at in range(count)
    ]
    return CoreRegion(*members, node("gw", role=Role.GATEWAY), flops={f"n{at}": 1e11 * (at + 1) for at in range(count)})


def add(region: CoreRegion, chance: Choices) -> None:
    """A new workload, or other documents of one that there is. A name is not given again once it is free: the
    replicas of a workload that was deleted drain, and there is no other yet."""
    tenant, name = chance.choice(("shop", "zoo", "bank")), f"w{chance.randrange(10**9)}"
    if region.intents and chance.random() < 0.4:
        tenant, name = chance.choice(region.intents).key
    asked = intent(
        name,
        tenant=tenant,
        replicas=chance.choice((1, 1, 2)),
        spread=chance.choice((Spread.NODE, "site")),
        priority=chance.randrange(3),
        standby=chance.choice((Standby.NONE, Standby.NONE, Standby.WARM)),
        where=chance.choice(("", 'node.labels.rank != "0"', 'node.labels.rank == "none"')),
        models=(ModelRef("ocr.onnx", DIGEST, "") if chance.random() < 0.7 else ModelRef("small.onnx", SMALL, ""),),
    )
    asked = replace(asked, prefer=chance.choice(((), (), ('device.kind == "gpu"',))))
    if chance.random() < 0.25:
        per = chance.choice(("node", "site"))
        apart = replace(asked.require, spread=per, replicas=1, standby=Standby.NONE)
        asked = replace(asked, per=per, require=apart)
    asked = replace(asked, preempt=chance.choice((*[Preempt.NEVER] * 8, Preempt.LOWER, Preempt.ALWAYS)))
    region.intents = (*(each for each in region.intents if each.key != asked.key), asked)


def remove(region: CoreRegion, chance: Choices) -> None:
    if region.intents:
        gone = chance.choice(region.intents)
        region.intents = tuple(each for each in region.intents if each is not gone)


def silence(region: CoreRegion, chance: Choices) -> None:
    agent = region.agents[chance.choice(sorted(region.agents))]
    agent.heard = not agent.heard


def fail(region: CoreRegion, chance: Choices) -> None:
    agent = region.agents[chance.choice(sorted(region.agents))]
    agent.fail = chance.choice((None, Code.LOAD_FAILED))


def crash(region: CoreRegion, chance: Choices) -> None:
    agent = region.agents[chance.choice(sorted(region.agents))]
    if region.intents:
        key = chance.choice(region.intents).key
        (agent.crashing.discard if key in agent.crashing else agent.crashing.add)(key)


def stop_front(region: CoreRegion, chance: Choices) -> None:
    agent = region.agents[chance.choice(sorted(region.agents))]
    agent.front_ready = not agent.front_ready


def change_quota(region: CoreRegion, chance: Choices) -> None:
    region.quotas = {"zoo": Quota("zoo", replicas=chance.randrange(1, 4))} if chance.random() < 0.5 else {}


def cordon(region: CoreRegion, chance: Choices) -> None:
    name = chance.choice(sorted(region.fleet.nodes))
    state = region.fleet.nodes[name]
    region.fleet = region.fleet.with_node(replace(state, cordoned=not state.cordoned))


def relabel(region: CoreRegion, chance: Choices) -> None:
    name = chance.choice(sorted(region.agents))
    labels = {**region.fleet.nodes[name].node.labels, "site": str(chance.randrange(3))}
    region.relabel(name, labels if chance.random() < 0.8 else {key: labels[key] for key in labels if key != "site"})


def fill_memory(region: CoreRegion, chance: Choices) -> None:
    name, left = f"n{chance.randrange(NODES)}", chance.choice((1.0, 0.3, 0.001))
    region.sensors[name] = lambda each: replace(each, free_bytes=type(each.free_bytes)(int(each.free_bytes * left)))


def draw_power(region: CoreRegion, chance: Choices) -> None:
    name, watts = f"n{chance.randrange(NODES)}", 5 + 25 * chance.random()
    region.sensors[name] = lambda each: replace(each, power_w=Watts(watts))


def move(region: CoreRegion, chance: Choices) -> None:
    held = [one for each in region.desired.values() for one in each.assignments if not one.draining]
    busy = {each.workload for each in region.migrations.values() if not each.is_over}
    free = [one for one in held if one.workload not in busy]
    if free:
        region.migrate("", chance.choice(free).workload.name, steps=MigrationRule().steps)


def block(region: CoreRegion, chance: Choices) -> None:
    """A move ends where it aimed: that place takes no replica of its workload for a while."""
    names = {one.workload.name for each in region.desired.values() for one in each.assignments if not one.draining}
    if names:
        name = chance.choice(sorted(names))
        end_move(region, name, f"n{chance.randrange(NODES)}", "cpu0")


def end_move(region: CoreRegion, name: str, node: str, at: str) -> None:
    """A move of the workload's first replica to this device has just failed."""
    migration = region.migrate(f"{node}/{at}", name)
    begun = region.migrations[migration]
    target = replace(begun.source, assignment=f"a-{migration}", node=node, device=at)
    ended = AbortedState(Refusal(Code.GUARD_TRIPPED), Elapsed(region.now))
    region.migrations[migration] = replace(begun, target=target, state=ended)


def slow_down(region: CoreRegion, chance: Choices) -> None:
    """The region learns otherwise from the next warm-ups there."""
    region.agents[chance.choice(sorted(region.agents))].p50_s = chance.choice((0.005, 0.02, 0.08))


def push_or_remove(region: CoreRegion, chance: Choices) -> None:
    """A model that nothing uses is removed, or a model is pushed again."""
    digest = chance.choice((DIGEST, SMALL))
    held = {one.model for each in region.desired.values() for one in each.assignments}
    used = held | {model.digest for each in region.intents for model in each.models}
    others = {key: each for key, each in region.profiles.items() if key != digest}
    pushed = profile() if digest == DIGEST else profile(SMALL, size=3 * MIB, precision="int8")
    region.profiles = others if digest not in used and chance.random() < 0.7 else {**others, digest: pushed}


def subscribe(region: CoreRegion, chance: Choices) -> None:
    agent = region.agents[f"n{chance.randrange(3)}"]
    known = {each.key for each in region.intents} | {WorkloadKey("zoo", "none")}
    agent.subscriptions = Subscriptions(tuple(sorted(key for key in known if chance.random() < 0.5)))


EVENTS: tuple[Callable[[CoreRegion, Choices], None], ...] = (
    *(add, add, add, remove, silence, fail, crash, stop_front, change_quota, cordon, fill_memory, draw_power, move),
    *(relabel, block, block, slow_down, push_or_remove, subscribe, subscribe),
)


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32))
def test_what_changed_is_decided_as_everything_would_be(seed: int) -> None:
    """`CoreRegion.step` compares both at every step, events included: no audit ever refutes what is kept."""
    follow(seed, Choices(seed), region_of(NODES))


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 12))
def test_the_same_with_columns_that_are_prepared_in_part_between_steps(seed: int, turns: int, devices: int) -> None:
    """devices: that a turn looks at."""
    region = region_of(NODES)
    region.prepared_turns = turns
    with pytest.MonkeyPatch.context() as bounds:
        bounds.setattr(kept, "MOST_PREPARED", devices)
        bounds.setattr(kept, "MOST_REFRESHED", 1 + devices // 4)
        follow(seed, Choices(seed), region)


def test_a_step_about_what_changed_forgets_the_replicas_of_a_removed_node() -> None:
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(),)
    region.run(10)
    ((held_by, old),) = [(at, one.id) for at, each in region.desired.items() for one in each.assignments]
    del region.agents[held_by]
    region.fleet = updates.remove_node(region.fleet, held_by)
    region.step()
    assert old not in region.memory.marks


def follow(seed: int, chance: Choices, region: CoreRegion) -> None:
    """Events by chance, and the steps after each."""
    region.kept = KeptDecisions(audited_per_step=seed % (NODES + 2))  # that is, of all nodes at the most
    for _ in range(4):
        add(region, chance)
    region.run(6)
    for _ in range(12):
        chance.choice(EVENTS)(region, chance)
        region.run(chance.choice((0.5, 1.0, 4.0)))
        check_searches(region.kept.columns)


def check_searches(columns: DeviceColumns) -> None:
    """What searches keep of all devices is what one would find that begins now."""
    for request in [*columns._searches]:
        table = columns._tables.get(request)
        known = {each.variant for each in request.models} <= columns._models.keys()
        where = request.require.where
        if table is None or not known or (where and where not in columns._selectors):
            continue
        if any(each.version != each.model.version for each in table.figures):
            continue  # the next search judges them first
        selector = columns._selectors[where] if where else None
        anew = columns.copy()
        of_models = anew._tables[request].figures if request in anew._tables else table.figures
        expected = anew._scores(request, of_models, anew._selectors[where] if where else None)
        np.testing.assert_array_equal(columns._scores(request, table.figures, selector), expected)


def test_a_region_at_rest_decides_about_nothing_and_one_event_about_its_own() -> None:
    region = region_of(NODES)
    region.intents = tuple(intent(f"w{at}", tenant="shop") for at in range(8))
    region.run(20)
    region.decided_about.clear()
    region.run(5)
    assert set(region.decided_about) == {0}
    region.intents = (*region.intents, intent("late", tenant="zoo"))
    region.step()
    assert region.decided_about[-1] == 1
    region.run(20)
    region.decided_about.clear()
    held = {name: {one.workload for one in content.assignments} for name, content in region.desired.items()}
    name = max(held, key=lambda each: len(held[each]))
    region.agents[name].front_ready = False
    region.step()
    assert region.decided_about[-1] == len(held[name])


def test_a_new_neighbour_leaves_what_serves_there_alone() -> None:
    """Until the new one serves it is decided about in each step, and nothing else is: its neighbours' reports and what
    is free beside them are as they were. `CoreRegion.step` compares it with a decision about everything."""
    region = CoreRegion(node("a"), flops={"a": 1e11})
    region.intents = tuple(intent(f"w{at}", tenant="shop") for at in range(3))
    region.run(20)
    region.decided_about.clear()
    region.intents = (*region.intents, intent("late", tenant="zoo"))
    region.sensors["a"] = lambda each: replace(each, free_bytes=type(each.free_bytes)(each.free_bytes // 2))
    region.run(20)
    assert max(region.decided_about) == 1
    assert region.decided_about[-1] == 0
    region.agents["a"].crashing.add(region.intents[0].key)
    region.decided_about.clear()
    region.run(1)
    assert region.decided_about[-1] == 1, "the one whose own report is another"


def test_an_audit_refutes_what_is_kept_where_a_change_was_missed() -> None:
    region = region_of(NODES)
    region.kept = KeptDecisions(audited_per_step=1)
    region.intents = tuple(intent(f"w{at}", tenant="shop") for at in range(4))
    region.run(20)

    def decide_again() -> Decision:
        decision = decide(missed, NO_MIGRATIONS, now, wall, region.kept)
        region.kept.adopt(missed, NO_MIGRATIONS, decision, now)
        return decision

    now, wall, world = Elapsed(region.now), Wall(START + region.now), region.world()
    missed = replace(world, changed_nodes=frozenset())
    audited = [decide_again() for _ in region.intents]
    assert {(each.audited, each.refuted, len(each.plan.workloads)) for each in audited} == {(1, (), 1)}
    assert len({each.plan.workloads[0].workload for each in audited}) == len(region.intents), "in turn"
    held = {one.workload: node for node, content in region.desired.items() for one in content.assignments}
    asked = audited[0].plan.workloads[0].workload
    lost = replace(world.fleet.nodes[held[asked]], liveness=Liveness.LOST)
    missed = replace(missed, fleet=world.fleet.with_node(lost))
    found = decide_again()
    assert str(asked) in found.refuted
    assert {*found.refuted} <= {str(asked), lost.name}
    assert [each.subject for each in found.events if each.code == "DECISION_REFUTED"] == [*found.refuted]
    assert decide_again().is_whole


def test_a_step_that_has_something_to_decide_audits_one_workload_at_most() -> None:
    region = region_of(NODES)
    region.kept = KeptDecisions(audited_per_step=4)
    region.intents = tuple(intent(f"w{at}", tenant="shop") for at in range(8))
    region.run(20)
    region.intents = (*region.intents, intent("nowhere", tenant="zoo", where='node.labels.rank == "none"'))
    now, wall, world = Elapsed(region.now), Wall(START + region.now), replace(region.world(), changed_nodes=frozenset())

    def decide_again() -> int:
        decision = decide(world, NO_MIGRATIONS, now, wall, region.kept)
        region.kept.adopt(world, NO_MIGRATIONS, decision, now)
        assert not decision.is_whole
        return decision.audited

    audited = [decide_again() for _ in range(4 * kept.BUSY_STEPS)]
    assert set(audited) == {0, 1}
    assert sum(audited) == 4, "as many in all as a step audits that decides about nothing else"


def test_gateways_share_their_routes() -> None:
    """Each costs as much as the region has workloads."""
    region = CoreRegion(node("a"), node("b"), node("gw1", role=Role.GATEWAY), node("gw2", role=Role.GATEWAY))
    region.intents = (intent(), intent("other"))
    region.run(20)
    now, wall = Elapsed(region.now), Wall(START + region.now)
    region.intents = (*region.intents, intent("late"))
    decision = decide(region.world(), NO_MIGRATIONS, now, wall, region.kept)
    assert not decision.is_whole
    first, second = (decision.desired[name].routes for name in ("gw1", "gw2"))
    assert {route.workload for route in first} == {each.key for each in region.intents}
    assert first is second


def test_a_node_keeps_the_routes_that_nothing_changed() -> None:
    """As the same objects, so that nobody compares them or turns them into text again."""
    region = CoreRegion(node("a", subscribes=True), node("gw", role=Role.GATEWAY))
    region.intents = (intent(), intent("other"))
    region.run(20)
    before = {route.workload: route for route in region.desired["a"].routes}
    assert len(before) == 2
    now, wall = Elapsed(region.now), Wall(START + region.now)
    region.intents = (*region.intents, intent("late"))
    decision = decide(region.world(), NO_MIGRATIONS, now, wall, region.kept)
    after = {route.workload: route for route in decision.desired["a"].routes}
    assert len(after) == 3
    assert all(after[key] is route for key, route in before.items())


def test_a_decision_about_what_stays_makes_no_other_assignments() -> None:
    region = region_of(NODES)
    region.intents = tuple(intent(f"w{at}", tenant="shop") for at in range(4))
    region.run(20)
    decision = decide(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now))
    before = {one.id: one for content in region.desired.values() for one in content.assignments}
    after = [one for content in decision.desired.values() for one in content.assignments]
    assert len(after) == 4
    assert all(before[one.id] is one for one in after)
    assert decision.memory.marks is region.memory.marks


def test_an_audit_refutes_what_columns_say_and_every_device_is_looked_at() -> None:
    region = region_of(NODES)
    region.kept = KeptDecisions(audited_per_step=NODES + 1)
    region.intents = (intent("w", tenant="shop"),)
    region.run(20)
    region.intents = (*region.intents, intent("v", tenant="shop"))
    world, now, wall = region.world(), Elapsed(region.now), Wall(START + region.now)
    plan = decide(world, NO_MIGRATIONS, now, wall).plan.of(WorkloadKey("shop", "v"))
    assert plan is not None
    (best,) = plan.targets
    closed = replace(world.fleet.nodes[best.node], cordoned=True)
    missed = replace(world, fleet=world.fleet.with_node(closed), changed_nodes=frozenset())
    decision = decide(missed, NO_MIGRATIONS, now, wall, region.kept)
    assert decision.refuted == (best.node,)
    whole = decide(missed, NO_MIGRATIONS, now, wall)
    assert decision.plan.of(WorkloadKey("shop", "v")) == whole.plan.of(WorkloadKey("shop", "v"))
    region.kept.adopt(missed, NO_MIGRATIONS, decision, now)
    again = decide(missed, NO_MIGRATIONS, now, wall, region.kept)
    assert again.is_whole
    assert again.refuted == ()


def test_an_audit_refutes_what_a_search_kept_of_a_device() -> None:
    """Such as where the change of a device was not taken over: there would be no place."""
    region = region_of(NODES)
    asked = intent("w", tenant="shop")
    inputs = inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now))
    scope, columns = Scope(inputs), DeviceColumns(audited_per_search=NODES + 1)
    columns.update(inputs, inputs.measured, ())

    def search() -> list[str]:
        columns.audit(scope, NO_ALLOCATIONS, asked.require.where)
        places = columns.places(scope, asked, asked.require, asked.limits, NO_ALLOCATIONS, ())
        return [state.name for _, state, _, _ in places]

    assert search()
    assert not columns.refuted
    for each in columns._searches.values():
        each.scores = np.full_like(each.scores, np.inf)
    assert not search()
    assert columns.refuted >= {f"n{at}" for at in range(NODES)}


def test_what_a_step_learnt_that_was_not_stored_is_forgotten() -> None:
    region = CoreRegion(node("a"))
    region.intents = (intent(),)
    region.run(5)
    known = KeptDecisions()
    ((trial, _),) = region.memory.residuals.items()
    known.residuals_of(region.memory).put(trial, None)
    again = known.residuals_of(region.memory)
    assert again.residuals is region.memory.residuals
    assert known.residuals_of(region.memory) is again


def test_a_large_apply_is_taken_up_by_several_steps_those_of_highest_rank_first() -> None:
    region = region_of(NODES)
    region.run(5)
    region.intents = tuple(intent(f"w{at}", tenant="shop", priority=at % 3) for at in range(8))
    now, wall, taken = Elapsed(region.now), Wall(START + region.now), list[str]()
    while not taken or region.kept.has_late:
        world = region.world()
        found = decide(world, NO_MIGRATIONS, now, wall, region.kept, most_new=3)
        news = [each.workload.name for each in found.plan.workloads if each.workload.name not in taken]
        assert len(news) <= 3
        taken += news
        region.kept.adopt(world, NO_MIGRATIONS, found, now)
        region.desired, region.memory = {**region.desired, **found.desired}, found.memory
    assert taken == [f"w{at}" for priority in (2, 1, 0) for at in range(8) if at % 3 == priority]
    assert {one.workload.name for each in region.desired.values() for one in each.assignments} == {*taken}
    region.run(20)  # and `CoreRegion.step` compares it with a decision about everything


def test_steps_of_a_large_apply_take_up_as_many_as_they_decide_about_anyway() -> None:
    """So that workloads which take long to load are not decided about again in hundreds of steps."""
    region = region_of(NODES)
    region.run(5)
    region.intents = tuple(intent(f"w{at:03}", tenant="shop") for at in range(200))
    now, wall, steps = Elapsed(region.now), Wall(START + region.now), 0
    while not steps or region.kept.has_late:
        world = region.world()
        found = decide(world, NO_MIGRATIONS, now, wall, region.kept, most_new=3)
        region.kept.adopt(world, NO_MIGRATIONS, found, now)
        region.desired, region.memory, steps = {**region.desired, **found.desired}, found.memory, steps + 1
    assert steps <= 9, "each twice as many as the one before"


def test_what_waits_for_a_later_step_may_go_or_become_another() -> None:
    region = region_of(NODES)
    region.run(5)
    known = intent("known", tenant="shop")
    region.intents = (known,)
    region.run(5)
    waiting = {at: intent(f"w{at}", tenant="shop") for at in range(8)}
    now, wall, taken = Elapsed(region.now), Wall(START + region.now), list[list[str]]()

    def step(*intents: Intent) -> None:
        region.intents = intents
        world = region.world()
        found = decide(world, NO_MIGRATIONS, now, wall, region.kept, most_new=2)
        region.kept.adopt(world, NO_MIGRATIONS, found, now)
        before = {one.workload for held in region.desired.values() for one in held.assignments}
        taken.append([each.workload.name for each in found.plan.workloads if each.workload not in before])
        region.desired, region.memory = {**region.desired, **found.desired}, found.memory

    step(known, *waiting.values())
    del waiting[7]
    waiting[6] = intent("w6", tenant="shop", priority=105)
    waiting[9] = intent("w9", tenant="shop", priority=103)
    other = intent("known", tenant="shop", revision=2)
    step(other, *waiting.values())
    while region.kept.has_late:
        step(other, *waiting.values())
    assert taken == [["w0", "w1"], ["w6", "w9"], ["w2", "w3", "w4", "w5"]]
    assert region.kept.intents == {each.key: each for each in (other, *waiting.values())}
    region.run(20)  # and `CoreRegion.step` compares it with a decision about everything


def test_a_plan_has_what_steps_left_to_later_ones() -> None:
    region = region_of(NODES)
    region.run(5)
    region.intents = tuple(intent(f"w{at}", tenant="shop") for at in range(8))
    now, wall, world = Elapsed(region.now), Wall(START + region.now), region.world()
    found = decide(world, NO_MIGRATIONS, now, wall, region.kept, most_new=3)
    region.kept.adopt(world, NO_MIGRATIONS, found, now)
    region.desired, region.memory = {**region.desired, **found.desired}, found.memory
    assert region.kept.has_late
    asked = next_placement(region.world(), NO_MIGRATIONS, now, wall, region.kept)
    assert {each.key for each in asked.inputs.intents} == {each.key for each in region.intents}


def test_a_plan_of_what_changed_changes_nothing_that_is_kept() -> None:
    region = region_of(NODES)
    region.intents = tuple(intent(f"w{at}", tenant="shop") for at in range(8))
    region.run(20)
    settled = region.intents
    region.intents = (*settled[:-1], intent("late", tenant="zoo"))
    now, wall = Elapsed(region.now), Wall(START + region.now)
    asked = next_placement(region.world(), NO_MIGRATIONS, now, wall, region.kept)
    late, gone = WorkloadKey("zoo", "late"), settled[-1].key
    assert {each.key for each in asked.inputs.intents} == {late}
    assert {one.workload for held in asked.inputs.desired.values() for one in held} == {gone}
    plan = asked.plan([late])
    assert [each.workload for each in plan.workloads if each.candidates] == [late]
    region.intents = settled
    region.decided_about.clear()
    region.run(5)
    assert set(region.decided_about) == {0}


def test_what_no_device_can_take_is_looked_at_again_once_a_device_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CoreRegion.step` compares what it says with what a look at every device says."""
    region, looked = region_of(NODES), list[str]()
    refusal = explain.refusal

    def count(solver: Solver, level: Level, remedy: str) -> Refusal:
        looked.append(str(solver.intent.key))
        return refusal(solver, level, remedy)

    region.intents = tuple(intent(f"w{at}", tenant="shop", where='node.labels.site == "9"') for at in range(3))
    region.run(10)
    monkeypatch.setattr(explain, "refusal", count)
    world, now, wall = region.world(), Elapsed(region.now), Wall(START + region.now)
    for _ in range(2):
        found = decide(world, NO_MIGRATIONS, now, wall, region.kept)
        region.kept.adopt(world, NO_MIGRATIONS, found, now)
        assert {str(each.workload) for each in found.waits} == {str(each.key) for each in region.intents}
    assert not looked, "nothing changed, and all three ask for the same"
    state = region.fleet.nodes["n1"]
    less = {name: replace(each, free_bytes=Bytes(each.free_bytes // 2)) for name, each in state.readings.items()}
    region.fleet = region.fleet.with_node(replace(state, readings=less))
    again = region.world()
    assert again.fleet.nodes["n1"] is not world.fleet.nodes["n1"]
    assert len(decide(again, NO_MIGRATIONS, now, wall, region.kept).waits) == len(region.intents)
    assert not looked, "what is free on a device excludes none that no device can take"
    region.kept.forget()
    region.relabel("n1", {**region.fleet.nodes["n1"].node.labels, "site": "9"})
    region.run(10)
    assert {one.workload.name for one in region.desired["n1"].assignments} == {"w0", "w1", "w2"}


def test_an_audit_refutes_that_no_device_can_take_what_some_can() -> None:
    """As if something that it depends on had been missed: each such request has its turn."""
    region = region_of(NODES)
    region.kept = KeptDecisions(audited_per_step=1)
    nowhere = [intent(f"w{at}", tenant="shop", where=f'node.labels.site == "9{at}"') for at in range(3)]
    region.intents = tuple(nowhere)
    region.run(10)
    now, wall, columns = Elapsed(region.now), Wall(START + region.now), region.kept.columns
    some = intent("some", tenant="shop", where='node.labels.rank == "1"')
    region.intents = (*nowhere, some)
    world = region.world()
    scope = Scope(inputs_of(world, NO_MIGRATIONS, now, wall))
    asked = columns._request_of(scope, some, some.require, some.limits)
    columns._nowhere[asked] = next(iter(columns._nowhere.values()))
    columns.figures(scope, some, some.require, some.limits)  # they were asked for when it was found
    steps = list[Decision]()
    while not (steps and steps[-1].refuted):
        assert len(steps) <= len(region.intents) + 1, "in turn"
        steps.append(decide(world, NO_MIGRATIONS, now, wall, region.kept))
        region.kept.adopt(world, NO_MIGRATIONS, steps[-1], now)
    assert steps[-1].refuted == ("n1",)
    whole = decide(world, NO_MIGRATIONS, now, wall)
    assert steps[-1].plan.of(some.key) == whole.plan.of(some.key)
    again = decide(world, NO_MIGRATIONS, now, wall, region.kept)
    assert again.is_whole
    assert again.refuted == ()


def test_a_search_looks_at_devices_again_that_are_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[int]()
    scores_of = DeviceColumns._scores_of

    def count(columns: DeviceColumns, figures: Any, selector: Any, rows: Any) -> Any:
        looked_at.append(len(rows))
        return scores_of(columns, figures, selector, rows)

    monkeypatch.setattr(DeviceColumns, "_scores_of", count)
    region, columns = region_of(NODES), DeviceColumns()
    some = intent("w", tenant="shop")
    inputs = inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now))
    columns.update(inputs, inputs.measured, ())

    def search() -> list[str]:
        found = columns.places(Scope(inputs), some, some.require, some.limits, NO_ALLOCATIONS, ())
        return [f"{state.name}/{at.name}" for _, state, at, _ in found]

    first = search()
    assert first == search()
    columns.touch(["n1", "n2"])
    assert first == search()
    assert looked_at == [64, 3], "of two nodes three devices; rows are made for 64 at once"


def test_a_search_predicts_once_for_all_devices_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place that it finds is what a look at that device alone would have found."""
    region, columns = CoreRegion(*(node(f"n{at}") for at in range(NODES))), DeviceColumns()
    inputs = inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now))
    columns.update(inputs, inputs.measured, ())
    scope, asked, looked_at, option = Scope(inputs), intent("second", tenant="shop"), list[str](), Scope.option

    def count(self: Scope, intent: Intent, model: ModelRef, state: NodeState, at: Device, **given: Any) -> Any:
        looked_at.append(state.name)
        return option(self, intent, model, state, at, **given)

    def search(asked: Intent) -> Level:
        solver = Solver(scope, asked, WorkloadReplicas((), ()), 0, NO_ALLOCATIONS, columns=columns)
        return solver.solve(asked.require, asked.limits)

    monkeypatch.setattr(Scope, "option", count)
    search(intent("first", tenant="shop"))
    assert len(looked_at) == 1
    (found,) = search(asked).picks
    assert len(looked_at) == 1
    alone = option(scope, asked, asked.models[0], found.option.state, found.option.device)
    assert repr(found.option) == repr(alone)  # an unknown figure (NaN) is not equal to itself


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_audit_asks_columns_that_are_kept_about_all_devices_and_looks_at_some(is_kept: bool) -> None:
    """Columns that are not kept any more are not built for it. In a step it audits one request."""
    region, columns = region_of(NODES), DeviceColumns(audited_per_search=1)
    some, none = (intent(f"w{at}", tenant="shop", where=f'node.labels.rank == "{at}"') for at in (1, 99))
    region.intents = (some, none)
    inputs = inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now))
    scope, steps = Scope(inputs), 0
    columns.update(inputs, inputs.measured, ())
    if is_kept:
        columns.figures(scope, some, some.require, some.limits)
    while not columns.refuted:
        steps += 1
        assert steps <= 3 * (NODES + 1), "each node, every third step: both have their turn, then it begins anew"
        columns.update(inputs, inputs.measured, ())
        for each in (none, some):
            columns.audit_nowhere(scope, each, each.require, each.limits)
        assert len(columns._selectors) == is_kept
    assert columns.refuted == {"n1"}
    assert (steps == 2) is is_kept


def test_a_whole_step_searches_again_for_what_no_device_can_take() -> None:
    region = region_of(NODES)
    region.intents = (intent("w", tenant="shop", where='node.labels.site == "9"'),)
    region.run(10)
    assert region.kept.columns._nowhere
    region.kept.forget()
    world, now, wall = region.world(), Elapsed(region.now), Wall(START + region.now)
    region.kept.open_whole(world)
    assert not region.kept.columns._nowhere
    assert decide(world, NO_MIGRATIONS, now, wall, region.kept).is_whole


def test_what_no_device_can_take_is_kept_where_there_is_no_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that find no room are looked at in each step, and each tenant has its share of it."""
    monkeypatch.setattr(columns_module, "MOST_TABLES", 8)
    region, looked = region_of(NODES), list[str]()
    remember = Solver.remember_nowhere

    def count(solver: Solver, level: Level, found: Nowhere) -> None:
        looked.append(solver.intent.key.tenant)
        remember(solver, level, found)

    region.intents = (
        *(intent(f"w{at}", tenant="shop", where=f'node.labels.site == "9{at}"') for at in range(10)),
        *(intent(f"v{at}", tenant="zoo", where=f'node.labels.site == "8{at}"') for at in range(2)),
    )
    region.run(10)
    monkeypatch.setattr(Solver, "remember_nowhere", count)
    world, now, wall = region.world(), Elapsed(region.now), Wall(START + region.now)
    for _ in range(2):
        looked.clear()
        found = decide(world, NO_MIGRATIONS, now, wall, region.kept)
        region.kept.adopt(world, NO_MIGRATIONS, found, now)
        assert len(found.waits) == len(region.intents)
        assert looked == ["shop"] * 4
    region.relabel("n1", {**region.fleet.nodes["n1"].node.labels, "site": "99"})
    region.run(10)
    looked.clear()
    world = region.world()
    assert len(decide(world, NO_MIGRATIONS, now, wall, region.kept).waits) == len(region.intents) - 1
    assert len(region.kept.columns._nowhere) == 8
    assert looked == ["shop"] * 3, "what held before the change makes room"


def test_what_fails_is_anew_for_those_alone_that_ask_for_it() -> None:
    """What fails to load counts for all that ask for the model, what poisons for one requester for that one. Figures of
    what cannot be asked again make room."""
    region, built = region_of(NODES), list[str]()
    small = (ModelRef("small.onnx", SMALL, ""),)
    asked = (intent("a", tenant="bank", models=small), intent("b", tenant="shop"), intent("c", tenant="zoo"))
    region.intents = asked
    world, columns = region.world(), DeviceColumns()
    inputs = inputs_of(world, NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now))
    fill = DeviceColumns._fill_kinds

    def count(self: DeviceColumns, figures: Any, scope: Scope, one: Intent, *given: Any) -> int:
        built.append(one.key.name)
        return fill(self, figures, scope, one, *given)

    def find_built() -> list[str]:
        """By searches for what is asked, which find what new columns say too."""
        built.clear()
        columns.update(inputs, inputs.measured, ())
        fresh, scope = DeviceColumns(), Scope(inputs)
        fresh.update(inputs, inputs.measured, ())
        with pytest.MonkeyPatch.context() as counted:
            counted.setattr(DeviceColumns, "_fill_kinds", count)
            found = [columns.figures(scope, each, each.require, each.limits) for each in asked]
        wanted = [fresh.figures(scope, each, each.require, each.limits) for each in asked]
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, range(len(columns._slots)))
        return [*built]

    assert find_built() == ["a", "b"], "the third asks for what the second did"
    at = device()
    refused = Refusal(Code.LOAD_FAILED, "n0/cpu0: no")
    for turn in range(4):
        triple = Triple(SMALL, at.provider, f"0.{turn}")
        inputs = replace(inputs, unloadable={**inputs.unloadable, triple: refused})
        assert find_built() == ["a"]
        assert len(columns._tables) == 2
    poisoning = Poisoning(Triple(DIGEST, at.provider, at.runtime_version), "shop")
    inputs = replace(inputs, poisoned=frozenset({poisoning}))
    assert find_built() == ["b"], "and what the third asked for holds"
    inputs = replace(inputs, poisoned=frozenset({poisoning._replace(requester="")}))
    assert find_built() == ["b"], "for both"
    assert len(columns._tables) == 2


def test_a_warm_up_makes_no_device_be_looked_at_again_for_what_none_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model was measured on one more device. What excludes the others is known by kind. `CoreRegion.step` compares
    both with a decision about everything."""
    members = [node(f"n{at:02}", labels={"rank": str(at)}) for at in range(MOST_OF_A_KIND + 2)]
    region, looked, found = CoreRegion(*members, flops={each.name: 1e11 for each in members}), list[str](), list[str]()
    refusal, remember = explain.refusal, Solver.remember_nowhere

    def count(solver: Solver, level: Level, remedy: str) -> Refusal:
        if solver._columns is region.kept.columns:  # neither a plan nor a decision about everything
            looked.append(str(solver.intent.key))
        return refusal(solver, level, remedy)

    def note(solver: Solver, level: Level, nowhere: Nowhere) -> None:
        found.append(str(solver.intent.key))
        remember(solver, level, nowhere)

    nowhere = (intent("nowhere", where='node.labels.rank == "none"'), intent("slow", latency_p95_s=Seconds(1e-6)))
    each_has_it = [intent(f"w{at}", where=f'node.labels.rank == "{at}"') for at in range(MOST_OF_A_KIND)]
    region.intents = (*nowhere, *each_has_it)
    region.run(30)
    monkeypatch.setattr(explain, "refusal", count)
    monkeypatch.setattr(Solver, "remember_nowhere", note)
    known = region.memory
    region.intents = (*region.intents, intent("late", where=f'node.labels.rank == "{MOST_OF_A_KIND}"'))
    region.run(10)
    assert len(region.memory.measured) == len(known.measured) + 1
    assert region.memory.residuals is known.residuals
    assert set(found) == {"shop/nowhere", "shop/slow"}
    assert looked == []


SELECTORS: Final = (
    *("", 'node.labels.rank == "none"', 'node.name == "gone"', "node.labels.absent == 'x'"),
    *('node.labels.rank != "1"', 'device.kind == "npu"', 'device.name == "gpu0" && node.name != "n1"'),
)


@pytest.mark.parametrize("seed", range(12))
def test_what_excludes_devices_by_kind_says_what_a_look_at_each_says(seed: int) -> None:
    """The refusal, its counts and whether it lasts; of nodes whose names go on after another's, silent and cordoned
    ones, kinds that cannot run the model, and selectors that read names."""
    chance, precisions = Choices(seed), ("fp16", "int8")
    members = [
        node(
            f"n{at}",
            device(runtime_version=chance.choice(("1", "2"))),
            *((device("gpu0", kind="gpu"),) if at % 3 else ()),
            labels={"rank": str(chance.randrange(3))},
        )
        for at in (*range(8), 10, 11, 110)
    ]
    region = CoreRegion(*members, flops={each.name: 1e11 * chance.randrange(1, 3) for each in members})
    region.intents = (intent("some"),)
    region.run(10)
    for name in ("n1", "n5"):
        region.fleet = region.fleet.with_node(replace(region.fleet.nodes[name], cordoned=True))
    region.fleet = region.fleet.with_node(replace(region.fleet.nodes["n10"], liveness=Liveness.SUSPECT))
    inputs = inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now))
    scope, columns, everywhere = Scope(inputs), DeviceColumns(), 0
    columns.update(inputs, inputs.measured, ())
    for where in SELECTORS:
        for late, precision in ((None, ""), (1e-9, ""), (None, chance.choice(precisions)), (1e-9, precisions[0])):
            models = (ModelRef("ocr.onnx", DIGEST, precision), ModelRef("small.onnx", SMALL, precision))
            bound = Seconds(late) if late is not None else None
            asked = intent("w", where=where, models=models[: chance.randrange(1, 3)], latency_p95_s=bound)
            found = columns.list_excluded(scope, asked, asked.require, asked.limits)
            each = [faults for _, faults in columns.candidates(scope, asked, asked.require, asked.limits)]
            assert (found is None) == (not all(each))
            if found is None:
                continue
            everywhere += 1
            level = Level(asked.require, asked.limits, 1, (), (), NO_ALLOCATIONS)
            one_by_one = [Excluded(faults, 1) for faults in each]
            assert explain.nowhere(found, level, "") == explain.nowhere(one_by_one, level, "")
    assert everywhere > len(SELECTORS), "most have no place"


@pytest.mark.parametrize(
    ("places", "precision", "is_measured"),
    [
        ((("a", "gpu1"), ("b", "gpu0")), "", False),
        ((("a", "gpu1"), ("b", "gpu10"), ("c", "gpu2")), "", False),
        ((("a", "gpu1"), ("a-1", "gpu0"), ("a0", "gpu10")), "fp16", True),
        ((("n10", "gpu0"), ("n1", "gpu0"), ("n1-0", "gpu0"), ("n2", "gpu0")), "fp16", True),
        ((("n10", "gpu0"), ("n1", "gpu0"), ("n1-0", "gpu0"), ("n2", "gpu0")), "", False),
    ],
)
def test_a_refusal_found_by_kind_names_the_device_that_a_look_at_each_names(
    places: Sequence[tuple[str, str]], precision: str, is_measured: bool
) -> None:
    """Texts name the device alone, its node alone, or both; and a name may go on after another's."""
    members = [node(name, device(on, kind="gpu")) for name, on in places]
    found = compare_by_kind(members, precision, is_measured=is_measured)
    assert len(found) <= 3, "whatever the number of devices"


def test_a_refusal_found_by_kind_names_the_node_that_a_look_at_each_names() -> None:
    """Of a text with a blank after the node's name; where a `/` follows it, n1-0 comes first."""
    places = (("n1", "gpu1"), ("n1-0", "gpu0"), ("n10", "gpu0"))
    members = [node(name, device(on, kind="gpu"), labels={RTT_LABEL: "far"}) for name, on in places]
    found = compare_by_kind(members, "", is_measured=True, latency_p95_s=Seconds(1.0))
    texts = {str(fault.refusal) for each in found for fault in each.faults}
    assert any("of n1 is no duration" in text for text in texts), texts


def test_of_many_devices_three_are_looked_at_for_the_text_that_comes_first() -> None:
    """All of their names go on after the first's."""
    names = ("edge", *(f"edge-{at}" for at in range(40)))
    found = compare_by_kind([node(name, device("gpu0", kind="gpu")) for name in names], "fp16", is_measured=True)
    assert len(found) <= 3
    assert sum(each.number for each in found) == len(names)


def compare_by_kind(
    members: Sequence[Node], precision: str, *, is_measured: bool, **require: Any
) -> Sequence[Excluded]:
    """Asks for what excludes all of them, by kind and one by one. is_measured: false: none has a receipt."""
    fleet = fleet_of(*members)
    for state in fleet.nodes.values() if not is_measured else ():
        fleet = fleet.with_node(replace(state, receipts={}))
    asked = intent("w", models=(ModelRef("ocr.onnx", DIGEST, precision),), **require)
    inputs = inputs_for(fleet, asked)
    scope, columns = Scope(inputs), DeviceColumns()
    columns.update(inputs, inputs.measured, ())
    found = columns.list_excluded(scope, asked, asked.require, asked.limits)
    each = [
        Excluded(scope.faults(scope.option(asked, asked.models[0], *at), asked, asked.require, asked.limits), 1)
        for at in scope.devices
    ]
    assert found is not None
    level = Level(asked.require, asked.limits, 1, (), (), NO_ALLOCATIONS)
    assert explain.nowhere(found, level, "") == explain.nowhere(each, level, "")
    return found


def test_a_selector_keeps_refusals_of_few_devices_that_are_not_so_any_more() -> None:
    """A label that it reads changes all the time."""
    names = [f"n{at:02}" for at in range(20)]
    fleet = fleet_of(*(node(name, labels={"load": "0"}) for name in names))
    asked = intent("w", where='node.labels.load == "none"')
    columns, kept_refusals = DeviceColumns(), list[int]()
    for step in range(200):
        inputs, name = inputs_for(fleet, asked), names[step % len(names)]
        columns.update(inputs, inputs.measured, ())
        assert columns.list_excluded(Scope(inputs), asked, asked.require, asked.limits) is not None
        kept_refusals.append(len(columns._selectors[asked.require.where].refusals))
        state = fleet.nodes[name]
        labels = {**state.node.labels, "load": f"busy-{step}"}
        fleet = fleet.with_node(replace(state, node=replace(state.node, labels=labels)))
        columns.mark(name)
    assert max(kept_refusals) == 2 * len(names) + 1, "and it is not built anew in each step"


def test_what_no_device_can_take_is_told_apart_by_models_that_are_here() -> None:
    """Workloads that differ by a model without a profile ask for the same of devices."""
    region = region_of(NODES)
    known, gone = ModelRef("ocr.onnx", DIGEST, ""), ModelRef("gone.onnx", "sha256:" + "e" * 64, "")
    for at, models in enumerate(((known,), (known, gone))):
        one = intent(f"w{at}", tenant="shop", where='node.labels.site == "9"', models=models)
        region.intents = (*region.intents, one)
        region.run(3)
    assert not any(held.assignments for held in region.desired.values())
    region.relabel("n1", {**region.fleet.nodes["n1"].node.labels, "site": "9"})
    region.run(10)
    assert {one.workload.name for one in region.desired["n1"].assignments} == {"w0", "w1"}


def test_what_columns_learn_beside_a_block_holds_for_those_that_are_not_blocked() -> None:
    """Figures are of a request, whoever asks; a place may be blocked for one workload of those that ask the same."""
    region = region_of(NODES)
    region.intents = (intent("w", tenant="shop"),)
    region.run(10)
    held = next(name for name, content in region.desired.items() if content.assignments)
    free = next(f"n{at}" for at in range(NODES) if f"n{at}" != held)
    end_move(region, "w", free, "cpu0")
    assert {(key.name, trial.node) for key, trial in find_blocks(region)} == {("w", free)}
    other = intent("other", tenant="zoo", models=(ModelRef("small.onnx", SMALL, ""),))
    region.intents = (*region.intents, other)
    before = region.memory.residuals
    region.run(10)
    assert region.memory.residuals is not before, "the region learnt something"
    for each in {*region.fleet.nodes} - {free}:
        region.fleet = region.fleet.with_node(replace(region.fleet.nodes[each], cordoned=True))
    region.intents = (*region.intents, intent("like", tenant="bank"))
    region.run(10)
    assert {one.workload.name for one in region.desired[free].assignments} >= {"like"}


def find_blocks(region: CoreRegion) -> Mapping[tuple[WorkloadKey, Trial], Refusal]:
    return migration_effects(region.world(), region.migrations, Elapsed(region.now)).blocked


def test_columns_learn_nothing_about_a_model_that_was_removed() -> None:
    region = region_of(NODES)
    region.intents = (intent("w", tenant="shop"),)
    region.run(10)
    region.intents = ()
    region.run(10)
    assert not any(content.assignments for content in region.desired.values())
    region.profiles = {SMALL: region.profiles[SMALL]}
    region.intents = (intent("v", tenant="shop", models=(ModelRef("small.onnx", SMALL, ""),)),)
    before = region.memory.residuals
    region.run(10)
    assert region.memory.residuals is not before, "the region learnt something"
    assert {one.workload.name for each in region.desired.values() for one in each.assignments} == {"v"}


def test_one_turn_prepares_a_part_and_a_search_the_rest() -> None:
    """Each turn looks at a few devices; the region may change between two."""
    region = region_of(24)
    region.intents = (intent("w", tenant="shop", where='node.labels.rank in ["6", "7", "8"]'),)
    region.run(20)
    world, columns = region.world(), DeviceColumns(audited_per_search=30)
    scope = Scope(inputs_of(world, NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now)))
    columns.update(scope.inputs, scope.inputs.measured, ())
    asked, residuals = region.intents[0], scope.inputs.residuals
    whole = columns.copy().figures(scope, asked, asked.require, asked.limits)
    turns = 0
    while columns.prepare(asked, residuals, 10) is Preparation.PART:
        turns += 1
        columns.audit(scope, NO_ALLOCATIONS, asked.require.where)
        assert not columns.refuted, "what nobody looked at is not wrong"
        search = columns.copy()
        search.mark("n7")
        fleet = Fleet({name: each for name, each in scope.inputs.fleet.nodes.items() if name != "n7"})
        search.update(replace(scope.inputs, fleet=fleet), scope.inputs.measured, ())
        found = search.figures(Scope(replace(scope.inputs, fleet=fleet)), asked, asked.require, asked.limits)
        left = [at for at, slot in enumerate(columns._slots) if slot is not None and slot.node != "n7"]
        assert_same(found, [each.of_rows(np.array(left)) for each in whole], left)
    assert turns > len(columns) // 10, "ten devices a turn"
    assert not columns._asked, "nobody asked yet"
    rows = [*range(len(columns._slots))]
    assert_same(columns.figures(scope, asked, asked.require, asked.limits), whole, rows)


def test_a_node_that_connects_again_costs_no_look_by_selectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session describes its node anew. Where that is another, a selector looks at it once it is asked for."""
    region, looked = region_of(8), list[str]()
    region.intents = tuple(
        intent(f"w{at}", tenant="shop", where=f'node.labels.rank != "{at}" && node.os != ""') for at in range(3)
    )
    world, columns = region.world(), DeviceColumns(audited_per_search=9)
    inputs = inputs_of(world, NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now))
    columns.update(inputs, inputs.measured, ())
    for each in region.intents:
        while columns.prepare(each, inputs.residuals, 100) is Preparation.PART:
            pass
    refusal = columns_module._selector_refusal

    def count(scope: Scope, where: str, state: NodeState, device: Device, *given: Any) -> Refusal | None:
        looked.append(where)
        return refusal(scope, where, state, device, *given)

    def connect(name: str, **another: Any) -> None:
        nonlocal inputs
        state = inputs.fleet.nodes[name]
        again = replace(state, node=replace(state.node, **another), epoch=state.epoch + 1)
        inputs = replace(inputs, fleet=inputs.fleet.with_node(again))
        columns.mark(name)
        columns.update(inputs, inputs.measured, ())

    monkeypatch.setattr(columns_module, "_selector_refusal", count)
    connect("n1")
    assert not looked, "it says what it said before"
    connect("n2", labels={**inputs.fleet.nodes["n2"].node.labels, "rank": "0"})
    assert not looked, "nobody asks yet"
    asked, scope = region.intents[0], Scope(inputs)
    (found,) = columns.figures(scope, asked, asked.require, asked.limits)
    assert looked == [asked.require.where]
    monkeypatch.undo()
    columns.audit(scope, NO_ALLOCATIONS, asked.require.where)
    assert not columns.refuted
    fresh = DeviceColumns()
    fresh.update(inputs, inputs.measured, ())
    (wanted,) = fresh.figures(scope, asked, asked.require, asked.limits)
    slots = sorted(columns._rows)
    assert found.feasible[columns.rows_of(slots)].tolist() == wanted.feasible[fresh.rows_of(slots)].tolist()


def assert_same(found: Sequence[ModelFigures], wanted: Sequence[ModelFigures], rows: Sequence[int]) -> None:
    """rows: those of `found` that are the rows of `wanted`."""
    for one, other in zip(found, wanted, strict=True):
        left = one.of_rows(np.array(rows))
        assert left.model == other.model
        for name in ModelFigures._fields[1:]:
            assert np.array_equal(getattr(left, name)[other.feasible], getattr(other, name)[other.feasible])
        assert np.array_equal(left.feasible, other.feasible)


def test_what_a_search_needs_is_there_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    region, built = region_of(NODES), list[str]()
    region.intents = tuple(intent(f"w{at}", tenant="shop", where='node.labels.rank != "0"') for at in range(3))
    region.run(20)
    now, wall = Elapsed(region.now), Wall(START + region.now)
    region.kept.forget()
    world = region.world()
    decision = decide(world, NO_MIGRATIONS, now, wall, region.kept)
    region.kept.adopt(world, NO_MIGRATIONS, decision, now)
    assert decision.is_whole
    region.memory = decision.memory
    for _ in range(len(region.intents) + 1):
        region.kept.prepare(decision.memory)
    fill = DeviceColumns._fill_kinds

    def count(self: DeviceColumns, *given: Any) -> int:
        built.append("figures")
        return fill(self, *given)

    monkeypatch.setattr(DeviceColumns, "_fill_kinds", count)
    assert not region.kept.columns._touched
    region.intents = (*region.intents, intent("late", tenant="zoo", where='node.labels.rank != "0"'))
    world = replace(region.world(), profiles=world.profiles)
    found = decide(world, NO_MIGRATIONS, now, wall, region.kept)
    assert len(found.plan.workloads) == 1
    assert not built
    whole = decide(world, NO_MIGRATIONS, now, wall)
    assert found.plan.of(WorkloadKey("zoo", "late")) == whole.plan.of(WorkloadKey("zoo", "late"))


def test_no_tenant_takes_all_room_of_what_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What found no room is prepared once there is some."""
    monkeypatch.setattr(columns_module, "MOST_COLUMNS", 4)
    region = region_of(NODES)
    many = [intent(f"w{at}", tenant="shop", where=f'node.labels.rank != "x{at}"') for at in range(6)]
    region.intents = (*many, intent("v", tenant="zoo", where='node.labels.rank != "y"'))
    prepared = prepare_all(region)
    assert 'node.labels.rank != "y"' in prepared
    assert len(prepared) == 4
    del region.kept.columns._selectors['node.labels.rank != "y"']
    for _ in range(100):
        region.kept.prepare(region.memory)
    again = {*region.kept.columns._selectors}
    assert len(again) == 4
    assert again - prepared, "those that waited"


def prepare_all(region: CoreRegion) -> set[str]:
    """After a whole step of a region at rest. Returns selectors of which columns are prepared."""
    region.run(20)
    region.kept = KeptDecisions()
    world, now, wall = region.world(), Elapsed(region.now), Wall(START + region.now)
    decision = decide(world, NO_MIGRATIONS, now, wall, region.kept)
    region.kept.adopt(world, NO_MIGRATIONS, decision, now)
    assert not region.kept.columns._selectors
    for _ in range(100):
        region.kept.prepare(decision.memory)
    return {*region.kept.columns._selectors}


def test_what_is_never_ready_keeps_no_other_from_being_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the region learns all the time, what devices without a measurement do is judged again and again."""
    region = region_of(NODES)
    region.intents = tuple(intent(f"w{at}", tenant="shop", where=f'node.labels.rank != "x{at}"') for at in range(3))
    world, now, wall = region.world(), Elapsed(region.now), Wall(START + region.now)
    decision = decide(world, NO_MIGRATIONS, now, wall, region.kept)
    region.kept.adopt(world, NO_MIGRATIONS, decision, now)
    columns = region.kept.columns
    columns._selectors.clear()

    def learn_and_prepare() -> None:
        learnt = Map(dict(decision.memory.residuals.items()))
        assert learnt is not decision.memory.residuals
        region.kept.prepare(replace(decision.memory, residuals=learnt))

    for _ in range(20):
        learn_and_prepare()
    assert {*columns._selectors} == {each.require.where for each in region.intents}
    assert region.kept._unprepared, "there is always more"
    monkeypatch.setattr(kept, "MOST_TURNS", 30)
    for _ in range(3 * 30):
        learn_and_prepare()
    assert not region.kept._unprepared, "and an end of it"


def test_equal_devices_of_two_architectures_are_judged_apart() -> None:
    """Copies between layouts count on one of them alone (`block_channels`), which makes it too slow."""
    cpu = device(provider="CPUExecutionProvider")
    region = CoreRegion(node("a", cpu), replace(node("b", cpu), arch="aarch64"))
    kernels = (KernelCost("conv", 20, 8e8, 2e7, 1e6),)
    region.profiles[DIGEST] = replace(
        region.profiles[DIGEST], kernels=kernels, layout_copies=40, layout_bytes=Bytes(400 * MIB)
    )
    region.run(5)
    region.intents = (intent("w", latency_p95_s=Seconds(0.05)),)
    region.run(10)
    assert region.decision is not None
    assert [each.node for each in region.decision.plan.workloads[0].targets] == ["b"]


def test_places_where_a_model_was_measured_are_judged_anew_once_measurements_were_repeated() -> None:
    """Nothing changes about `n0`, neither what was measured there, nor the node. What others were measured twice says
    that a bound may not hold there."""
    names = [f"n{at}" for at in range(LEAST_GROUPS + 1)]
    region = CoreRegion(*map(node, names), flops=dict.fromkeys(names, 1e11))
    digests = [f"sha256:{at + 7:064x}" for at in range(len(names))]
    region.profiles = {
        digest: replace(profile(digest), kernels=(KernelCost(kind, 2.0, 1e9, 1e7, 1e6),))
        for digest, kind in zip(digests, KERNEL_KINDS, strict=False)
    }

    def ask(name: str, at: int, bound: float | None = None) -> Intent:
        models = (ModelRef("model.onnx", digests[at], ""),)
        limit = None if bound is None else Seconds(bound)
        return intent(name, models=models, where=f'node.name == "{names[at]}"', latency_p95_s=limit)

    region.intents = tuple(ask(name, at) for at, name in enumerate(names))
    region.run(10)
    region.intents = (*region.intents, ask("early", 0, 0.03))
    region.run(10)
    assert {one.workload.name for one in region.desired["n0"].assignments} == {"n0", "early"}
    for name in names[1:]:
        region.agents[name].p50_s *= 1.6
    region.run(10)
    scope = Scope(inputs_of(region.world(), NO_MIGRATIONS, Elapsed(region.now), Wall(START + region.now)))
    assert [each.p50 for each in scope.residuals.repeats.values()] == [pytest.approx(1.6)]
    region.intents = (*region.intents, ask("late", 0, 0.03))
    region.run(10)
    assert "late" not in {one.workload.name for one in region.desired["n0"].assignments}
