"""A replica that was gone and comes back takes over again only where that gains what a move has to."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from harness.builders.coordinator_core import (
    DIGEST,
    START,
    CoreAgent,
    CoreRegion,
    device,
    fleet_of,
    inputs,
    intent,
    merge_status,
    node,
    observation,
    profile,
    status,
)
from shoal.coordinator import codec
from shoal.coordinator.core.placement.explain import TOOK_ITS_PLACE
from shoal.coordinator.core.placement.model import terms_of
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.solve import Solver
from shoal.coordinator.core.workloads.model import Mark, ReconcilerMemory
from shoal.coordinator.core.workloads.reconcile import reconcile
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.device import Node
from shoal.types.migration import MigrationRule
from shoal.types.route import EndpointState
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import Intent, Standby

EYE = "z"
"""A node that no workload may use, whose routes tell who serves."""
PLACES = 'node.name != "z"'
GAIN = MigrationRule().gain
BOTH_SERVE_S = 3.0
"""One that comes back in the very step in which its replacement is ready serves beside it until every front knows."""


def favourite_of(name: str, one: str = "a", other: str = "b") -> str:
    """Which of two equal nodes the workload of that name gets: a matter of names alone."""
    (plan,) = place(inputs(fleet_of(node(one), node(other)), intent(name))).workloads
    return plan.targets[0].node


def two_of_each(one: str = "a", other: str = "b") -> list[str]:
    """Names of workloads of which half would get either node."""
    found: dict[str, list[str]] = {one: [], other: []}
    for number in range(64):
        found[favourite_of(f"w{number}", one, other)].append(f"w{number}")
    return [name for names in found.values() for name in names[:2]]


NAMES = two_of_each()
STANDBY_NAMES = two_of_each("b", "c")


class FetchingAgent(CoreAgent):
    """One whose fetches never end."""

    def _observe(self, each: Assignment, now: float) -> Observed:
        return observation(each, Phase.FETCHING)


def region_with_standby(name: str, standby: Standby) -> tuple[CoreRegion, str, str]:
    """A region in which "a" serves, with the node that stands by and the one that may."""
    region = region_of(workload_intent(name, standby=standby), nodes=[node(each) for each in "abc"])
    (spare,) = (each for each, _ in region.replicas(name).values() if each != "a")
    return region, spare, "c" if spare == "b" else "b"


def lose_standby(region: CoreRegion, name: str, spare: str, other: str) -> None:
    region.agents[spare].heard = False
    while other not in {each for each, _ in region.replicas(name).values()}:
        region.step()


def serving(region: CoreRegion, name: str) -> list[str]:
    return sorted(
        each.node
        for route in region.desired[EYE].routes
        if route.workload.name == name
        for each in route.endpoints
        if each.state is EndpointState.READY and each.weight > 0
    )


def steps(region: CoreRegion, name: str, seconds: float) -> Iterator[list[str]]:
    """Who serves after each of the steps."""
    for _ in range(round(2 * seconds)):
        region.step()
        yield serving(region, name)


def moves_of(seen: Iterable[Sequence[str]]) -> list[str]:
    """Who had all requests, one after the other."""
    alone = [who[0] for who in seen if len(who) == 1]
    return [one for at, one in enumerate(alone) if at == 0 or alone[at - 1] != one]


def region_of(*asked: Intent, nodes: Sequence[Node] = (), best: str = "a") -> CoreRegion:
    """A region in which the workloads serve. best: where each is placed first, because it promises most; what is
    measured of all is the same."""
    flops = {each: 4e11 if each == best else 1e11 for each in "abcdz"}
    region = CoreRegion(*(nodes or (node("a"), node("b"))), node(EYE), flops=flops)
    region.intents = asked
    region.run(6)
    assert [serving(region, each.key.name) for each in asked] == [[best]] * len(asked)
    return region


def workload_intent(name: str, *, gain: float = GAIN, where: str = PLACES, **changes: Any) -> Intent:
    return intent(name, where=where, migration=MigrationRule(gain=gain), **changes)


def with_what_is_stored(region: CoreRegion) -> None:
    """What a coordinator that starts reads of the marks."""
    marks = {name: codec.load(Mark, codec.dump(mark)) for name, mark in region.memory.marks.items()}
    region.memory = replace(region.memory, marks=Map(marks))


def test_these_names_cover_both_orders_of_equal_places() -> None:
    assert sorted(map(favourite_of, NAMES)) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("gain", [0.0, GAIN])
@pytest.mark.parametrize("name", NAMES)
def test_who_stood_by_goes_on_and_the_one_that_comes_back_stands_by(name: str, gain: float) -> None:
    region = region_of(workload_intent(name, gain=gain, standby=Standby.WARM))
    region.agents["a"].heard = False
    seen = [*steps(region, name, 5)]
    region.agents["a"].heard = True
    seen += [*steps(region, name, 12)]
    roles = [(event.node, event.code) for event in region.events if event.code in ("TOOK_OVER", "STANDS_BY")]
    assert roles == [("b", "TOOK_OVER"), ("a", "STANDS_BY")], "one move of traffic"
    assert moves_of(seen) == ["a", "b"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("silent_s", "after"), [(4.5, "a"), (6.0, "b"), (6.5, "b"), (7.0, "b"), (7.5, "b"), (12.0, "b")]
)
def test_whoever_serves_when_the_old_one_comes_back_goes_on(name: str, silent_s: float, after: str) -> None:
    """For two seconds after its first request, not every front may know of the new one: both serve then."""
    region = region_of(workload_intent(name))
    region.agents["a"].heard = False
    seen = [*steps(region, name, silent_s)]
    assert seen[-1] == ([] if after == "a" else ["b"])
    region.agents["a"].heard = True
    seen += [*steps(region, name, 0.5)]
    if silent_s == 6.0:  # every front knows of the new one by 8 s
        plan = region.decision.plan.workloads[0] if region.decision is not None else None
        assert plan is not None
        assert [(one.sign, one.node) for one in plan.changes] == [("=", "b"), ("-", "a")]
        assert plan.changes[1].why == TOOK_ITS_PLACE
    seen += [*steps(region, name, 12)]
    assert moves_of(seen) == ["a", *([] if after == "a" else ["b"])]
    assert [each for each, _ in region.replicas(name).values()] == [after]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gone_s", [3.0, 4.0])
def test_a_device_that_comes_back_takes_nothing_from_what_replaced_it(name: str, gone_s: float) -> None:
    cpu, gpu = device("cpu0"), device("gpu0", kind="gpu")
    whole = node("a", cpu, gpu)
    region = region_of(workload_intent(name, where='device.kind == "gpu"'), nodes=(whole, node("b", cpu, gpu)))
    region.agents["a"].node = node("a", cpu)
    region.reconnect("a")
    seen = [*steps(region, name, gone_s)]
    assert "b" in seen[-1]
    region.agents["a"].node = whole
    region.reconnect("a")
    seen += [*steps(region, name, 12)]
    assert moves_of(seen) in (["b"], ["a", "b"])
    assert [each for each, _ in region.replicas(name).values()] == ["b"]


@pytest.mark.parametrize(("slower", "after"), [(1.05, "b"), (1.5, "a")])
@pytest.mark.parametrize("name", NAMES)
def test_it_takes_over_again_where_that_gains_what_a_move_has_to(name: str, slower: float, after: str) -> None:
    region = region_of(workload_intent(name, standby=Standby.WARM))
    region.agents["b"].p50_s *= slower
    region.run(1)
    region.agents["a"].heard = False
    region.run(5)
    assert serving(region, name) == ["b"]
    region.agents["a"].heard = True
    region.run(12)
    assert serving(region, name) == [after]


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_over_again_where_its_policy_prefers_it(name: str) -> None:
    region = region_of(workload_intent(name, standby=Standby.WARM, prefer=('node.name == "a"',)))
    region.agents["a"].heard = False
    region.run(5)
    assert serving(region, name) == ["b"]
    region.agents["a"].heard = True
    region.run(12)
    assert serving(region, name) == ["a"]


@pytest.mark.parametrize("reports", [{"cordoned": True}, {"quarantined": True}])
@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_take_over_again_where_nothing_new_may_be_placed(name: str, reports: dict[str, Any]) -> None:
    region = region_of(workload_intent(name, prefer=('node.name == "a"',)))
    region.agents["a"].heard = False
    region.run(6)
    assert serving(region, name) == ["b"]
    region.fleet = region.fleet.with_node(replace(region.fleet.nodes["a"], **reports))
    region.agents["a"].heard = True
    assert moves_of(steps(region, name, 12)) == ["b"]
    assert [each for each, _ in region.replicas(name).values()] == ["b"]


@pytest.mark.parametrize("standby", [Standby.WARM, Standby.STAGED])
@pytest.mark.parametrize("name", STANDBY_NAMES)
def test_of_two_standbys_the_one_that_is_there_stays(name: str, standby: Standby) -> None:
    region, spare, other = region_with_standby(name, standby)
    lose_standby(region, name, spare, other)
    region.run(region.agents[other].load_s + 0.5)
    assert [mark.is_left_out for _, mark in sorted(region.memory.marks.items())].count(True) == 1
    region.agents[spare].heard = True
    region.run(12)
    assert {each for each, _ in region.replicas(name).values()} == {"a", other}
    assert serving(region, name) == ["a"]


@pytest.mark.parametrize("name", STANDBY_NAMES)
def test_a_staged_standby_that_has_its_bytes_does_not_give_way_to_one_that_fetches(name: str) -> None:
    region, spare, other = region_with_standby(name, Standby.STAGED)
    region.agents[other] = FetchingAgent(region.agents[other].node, sequence=region.agents[other].sequence)
    lose_standby(region, name, spare, other)
    region.agents[spare].heard = True
    region.run(3)
    assert {each for each, _ in region.replicas(name).values()} == {"a", spare}
    region.agents["a"].heard = False
    assert moves_of(steps(region, name, 6)) == ["a", spare]


@pytest.mark.parametrize("was_gone", [False, True])
@pytest.mark.parametrize("fetching", ["b", "c"])
@pytest.mark.parametrize("name", STANDBY_NAMES)
def test_of_two_staged_standbys_the_one_that_has_its_bytes_is_first(name: str, fetching: str, was_gone: bool) -> None:
    region, spare, other = region_with_standby(name, Standby.STAGED)
    (held,) = region.desired[spare].assignments
    held_at = {spare: held, other: replace(held, id="a-other")}
    fleet, (has_bytes,) = region.fleet, {"b", "c"} - {fetching}
    for where, each in held_at.items():
        found = observation(each, Phase.FETCHING if where == fetching else Phase.STAGED)
        fleet = fleet.with_node(replace(fleet.nodes[where], observed={each.id: found}))
    desired = {where: content.assignments for where, content in region.desired.items()}
    desired |= {where: (each,) for where, each in held_at.items()}
    asked, left_out = region.intents[0], frozenset([held_at[has_bytes].id] if was_gone else ())
    terms = dict.fromkeys((each.id for held in desired.values() for each in held), terms_of(asked))
    known = inputs(fleet, asked, now=region.now, desired=desired, terms=terms, left_out=left_out)
    (plan,) = place(known).workloads
    assert [(target.node, target.standby) for target in plan.targets] == [("a", False), (has_bytes, True)]
    (plan,) = place(replace(known, desired=desired | {"a": ()})).workloads
    assert [(target.node, target.standby) for target in plan.targets] == [(has_bytes, False), (fetching, True)]


@pytest.mark.parametrize("changes", [{"per": "node"}, {"replicas": 2}])
@pytest.mark.parametrize("name", NAMES)
def test_one_in_whose_place_nobody_is_is_not_marked(name: str, changes: dict[str, Any]) -> None:
    region = CoreRegion(node("a"), node("b"), node(EYE))
    region.intents = (workload_intent(name, **changes),)
    region.run(6)
    assert serving(region, name) == ["a", "b"]
    region.agents["a"].heard = False
    for _ in steps(region, name, 20):
        assert not any(mark.is_left_out for mark in region.memory.marks.values())
    assert serving(region, name) == ["b"]


@pytest.mark.parametrize("fast", [False, True])
def test_what_many_that_come_back_gain_is_looked_at_once(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """fast: where those that come back take over again."""
    count, gone = 40, 20
    nodes = [node(f"n{at:02}", labels={"fast": "yes" if fast and at < gone else "no"}) for at in range(count)]
    fleet = fleet_of(*nodes)
    asked = intent("w", replicas=count, prefer=('node.labels.fast == "yes"',))
    plan = place(inputs(fleet, asked))
    first = reconcile(plan, {}, fleet, {DIGEST: profile()}, {}, ReconcilerMemory(), {}, Elapsed(0.0), Wall(START))
    held = {each.name: first.desired[each.name][0] for each in nodes}
    for each in nodes:
        beat = status(each, 2, at=1.0, observed=(observation(held[each.name], Phase.READY),))
        fleet, _ = merge_status(fleet, each.name, 1, beat, Elapsed(1.0), Wall(START + 1.0))
    left_out = frozenset(held[each.name].id for each in nodes[:gone])
    looked: list[object] = []
    gain = Solver.gain

    def count_and_gain(self: Solver, *of: Any) -> float:
        looked.append(of)
        return gain(self, *of)

    monkeypatch.setattr(Solver, "gain", count_and_gain)
    fewer = replace(asked, require=replace(asked.require, replicas=count - gone))
    terms = dict.fromkeys((each.id for each in held.values()), terms_of(fewer))
    found = place(inputs(fleet, fewer, now=1.0, desired=first.desired, terms=terms, left_out=left_out), explain=False)
    kept = {target.node for target in found.workloads[0].targets}
    assert kept == {each.name for each in (nodes[:gone] if fast else nodes[gone:])}
    assert 0 < len(looked) <= count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_coordinator_that_restarts_decides_the_same(name: str, first: str) -> None:
    """It knows what is stored, and nothing of what runs; whichever of the two nodes reports first."""
    region = region_of(workload_intent(name, standby=Standby.WARM))
    region.agents["a"].heard = False
    region.run(4)
    assert serving(region, name) == ["b"]
    with_what_is_stored(region)
    late = "b" if first == "a" else "a"
    region.agents[late].heard = False
    region.restart()
    for each in "ab":
        region.fleet = region.fleet.with_node(replace(region.fleet.nodes[each], observed={}))
    region.reconnect(first)
    region.run(1.5)
    region.reconnect(late)
    region.run(12)
    assert serving(region, name) == ["b"]
    assert [event.node for event in region.events if event.code == "TOOK_OVER"] == ["b"]


@pytest.mark.parametrize("name", STANDBY_NAMES)
@pytest.mark.parametrize("is_old_first", [False, True])
def test_a_coordinator_that_restarts_keeps_the_standby_that_is_there(name: str, is_old_first: bool) -> None:
    region, spare, other = region_with_standby(name, Standby.WARM)
    lose_standby(region, name, spare, other)
    region.run(region.agents[other].load_s + 0.5)  # it is ready, and the old one is not removed yet
    with_what_is_stored(region)
    first, late = (spare, other) if is_old_first else (other, spare)
    region.agents[late].heard, region.agents[first].heard = False, True
    region.restart()
    for each in "abc":
        region.fleet = region.fleet.with_node(replace(region.fleet.nodes[each], observed={}))
    region.reconnect("a")
    region.reconnect(first)
    region.run(1.5)
    region.reconnect(late)
    region.run(12)
    assert {each for each, _ in region.replicas(name).values()} == {"a", other}


def test_marks_of_older_and_of_later_coordinators_are_read() -> None:
    older = codec.load(Mark, b'{"stage": "serving", "since": 1.0, "terms": "t"}')
    assert not older.is_left_out
    stored = codec.dump(replace(older, is_left_out=True))
    assert codec.load(Mark, stored).is_left_out
    assert codec.load(Mark, stored[:-1] + b',"of_a_later_version":1}') == codec.load(Mark, stored)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(Standby),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 16)), min_size=1, max_size=5),
)
def test_law_traffic_leaves_one_that_serves_only_while_it_is_gone(
    name: str, standby: Standby, story: list[tuple[str, int]]
) -> None:
    """story: nodes that fall silent, or are heard again, and the half seconds until the next one."""
    region = region_of(workload_intent(name, standby=standby), nodes=[node(each) for each in "abc"])
    last, gone_at = "a", dict[str, float]()
    for who, halves in (*story, ("", 30)):
        if who:
            region.agents[who].heard = not region.agents[who].heard
        for _ in range(halves):
            region.step()
            gone_at |= {each: region.now for each, agent in region.agents.items() if not agent.heard}
            now = serving(region, name)
            if len(now) == 1 and last not in now:
                assert region.now - gone_at.get(last, 0.0) <= BOTH_SERVE_S, (last, now)
                last = now[0]
