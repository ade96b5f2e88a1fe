"""A replica that was gone and comes back takes over again only where that gains what a move has to."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from harness.builders.coordinator_core import CoreRegion, device, fleet_of, inputs, intent, node
from shoal.coordinator import codec
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads.model import Mark
from shoal.types.device import Node
from shoal.types.migration import MigrationRule
from shoal.types.route import EndpointState
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
        assert plan.changes[1].why.startswith("another took its place")
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


@pytest.mark.parametrize("name", two_of_each("b", "c"))
def test_of_two_standbys_the_one_that_is_there_stays(name: str) -> None:
    region = region_of(workload_intent(name, standby=Standby.WARM), nodes=[node(each) for each in "abc"])
    (spare,) = (each for each, _ in region.replicas(name).values() if each != "a")
    other = "c" if spare == "b" else "b"
    region.agents[spare].heard = False
    while other not in {each for each, _ in region.replicas(name).values()}:
        region.step()
    region.run(region.agents[other].load_s + 0.5)
    assert [mark.is_left_out for _, mark in sorted(region.memory.marks.items())].count(True) == 1
    region.agents[spare].heard = True
    region.run(12)
    assert {each for each, _ in region.replicas(name).values()} == {"a", other}
    assert serving(region, name) == ["a"]


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
