"""`check` finds what is planted, and nothing in a region that is well."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.builders.coordinator_core import START, CoreRegion, intent, node
from shoal.coordinator.core.fleet.state import Liveness, MassSilence
from shoal.coordinator.core.placement.model import Reservation, Slot
from shoal.coordinator.core.workloads.invariants import Promise, RegionSnapshot, UnderwayMove, check
from shoal.coordinator.core.workloads.model import DesiredContent
from shoal.types.assignment import Assignment, Phase, Version
from shoal.types.units import Bytes, Elapsed, Seconds, Wall


@pytest.fixture(scope="module")
def well() -> RegionSnapshot:
    region = CoreRegion(node("a"), node("b"), node("c"))
    region.intents = (intent(replicas=2),)
    decision = region.run(10)
    now, wall = Elapsed(region.now), Wall(START + region.now)
    placeable = frozenset({region.intents[0].key})
    return RegionSnapshot(
        region.fleet, region.intents, region.desired, region.memory, decision.waits, now, wall, placeable
    )


def test_a_region_that_is_well(well: RegionSnapshot) -> None:
    assert check(well) == ()


def test_a_region_that_is_well_may_owe_something(well: RegionSnapshot) -> None:
    until = Elapsed(well.now + 5.0)
    assert check(with_promises(well, Promise("b-1", "", until), Promise("b-2", "g-2", until), memory=1)) == ()


def first(snapshot: RegionSnapshot) -> tuple[str, Assignment]:
    return next((name, content.assignments[0]) for name, content in snapshot.desired.items() if content.assignments)


def with_content(snapshot: RegionSnapshot, name: str, content: DesiredContent) -> RegionSnapshot:
    return replace(snapshot, desired={**snapshot.desired, name: content})


def with_assignment(snapshot: RegionSnapshot, change: Callable[[Assignment], Assignment]) -> RegionSnapshot:
    name, assignment = first(snapshot)
    content = snapshot.desired[name]
    return with_content(snapshot, name, replace(content, assignments=(change(assignment), *content.assignments[1:])))


def dark(snapshot: RegionSnapshot) -> RegionSnapshot:
    memory = replace(snapshot.memory, without_ready={str(snapshot.intents[0].key): Elapsed(0.0)})
    return replace(snapshot, memory=memory, now=Elapsed(5000.0))


def oversold(snapshot: RegionSnapshot) -> RegionSnapshot:
    return with_assignment(snapshot, lambda one: replace(one, memory_bytes=Bytes(2**40)))


def with_promises(snapshot: RegionSnapshot, *promises: Promise, memory: int = 0) -> RegionSnapshot:
    """With room for bid `b-1` on the first device, besides."""
    reserved = (Reservation("b-1", Slot("a", "cpu0"), Bytes(memory), 0.0),) if memory else ()
    return replace(snapshot, reserved=reserved, promises=promises)


def reservation_beyond_device(snapshot: RegionSnapshot) -> RegionSnapshot:
    return with_promises(snapshot, Promise("b-1", "", Elapsed(1e9)), memory=2**40)


def reservation_without_hold(snapshot: RegionSnapshot) -> RegionSnapshot:
    return with_promises(snapshot, memory=1)


def reservation_after_expiry(snapshot: RegionSnapshot) -> RegionSnapshot:
    return with_promises(snapshot, Promise("b-1", "", Elapsed(snapshot.now - 61.0)), memory=1)


def one_bid_granted_twice(snapshot: RegionSnapshot) -> RegionSnapshot:
    until = Elapsed(1e9)
    return with_promises(snapshot, Promise("b-1", "g-1", until), Promise("b-1", "g-2", until))


def one_agreement_of_two_bids(snapshot: RegionSnapshot) -> RegionSnapshot:
    until = Elapsed(1e9)
    return with_promises(snapshot, Promise("b-1", "g-1", until), Promise("b-2", "g-1", until))


def twice(snapshot: RegionSnapshot) -> RegionSnapshot:
    name, assignment = first(snapshot)
    other = next(each for each in snapshot.desired if each != name and not snapshot.desired[each].assignments)
    return with_content(snapshot, other, replace(snapshot.desired[other], assignments=(assignment,)))


def route_to_suspect(snapshot: RegionSnapshot) -> RegionSnapshot:
    name, _ = first(snapshot)
    return replace(
        snapshot, fleet=snapshot.fleet.with_node(replace(snapshot.fleet.nodes[name], liveness=Liveness.SUSPECT))
    )


def route_to_silent(snapshot: RegionSnapshot, apart_s: float, liveness: Liveness = Liveness.SUSPECT) -> RegionSnapshot:
    """Both nodes of the only workload are silent, the second since `apart_s` later."""
    holders = [name for name, content in snapshot.desired.items() if content.assignments]
    assert len(holders) == 2
    states = [
        replace(snapshot.fleet.nodes[name], liveness=liveness, heard_at=Elapsed(snapshot.now - 20.0 + index * apart_s))
        for index, name in enumerate(holders)
    ]
    return replace(snapshot, fleet=snapshot.fleet.with_node(states[0]).with_node(states[1]))


def route_to_unready(snapshot: RegionSnapshot) -> RegionSnapshot:
    name, assignment = first(snapshot)
    state = snapshot.fleet.nodes[name]
    loading = {**state.observed, assignment.id: replace(state.observed[assignment.id], phase=Phase.LOADING)}
    return replace(snapshot, fleet=snapshot.fleet.with_node(replace(state, observed=loading)))


def route_to_unobserved(snapshot: RegionSnapshot) -> RegionSnapshot:
    name, assignment = first(snapshot)
    state = snapshot.fleet.nodes[name]
    known = {key: each for key, each in state.observed.items() if key != assignment.id}
    return replace(snapshot, fleet=snapshot.fleet.with_node(replace(state, observed=known)))


def lost_write(snapshot: RegionSnapshot) -> RegionSnapshot:
    name, _ = first(snapshot)
    fleet = snapshot.fleet.with_node(replace(snapshot.fleet.nodes[name], version=Version("h", 1, 9)))
    return replace(snapshot, fleet=fleet, versions={name: Version("h", 1, 8)})


def unrequested_model(snapshot: RegionSnapshot) -> RegionSnapshot:
    return with_assignment(snapshot, lambda one: replace(one, model="sha256:other"))


def blind(snapshot: RegionSnapshot) -> RegionSnapshot:
    contents = {
        name: replace(content, assignments=tuple(replace(one, draining=True) for one in content.assignments))
        for name, content in snapshot.desired.items()
    }
    return replace(snapshot, desired=contents)


def behind(snapshot: RegionSnapshot) -> RegionSnapshot:
    name, _ = first(snapshot)
    late = Elapsed(snapshot.now + 1000)
    return replace(snapshot, versions={name: Version("h", 1, 8)}, written_at={name: snapshot.now}, now=late)


def test_models_that_share_a_worker_are_not_oversold_while_their_provider_fits_once(well: RegionSnapshot) -> None:
    name, first_one = first(well)
    total = well.fleet.nodes[name].node.devices[0].memory_bytes

    def violations(provider: float) -> set[str]:
        """Of three that each take 40 % of the device, this share of it for their provider."""
        one = replace(first_one, shared_worker=True, memory_bytes=Bytes(int(0.4 * total)))
        one = replace(one, provider_bytes=Bytes(int(provider * total)))
        loads = tuple(replace(one, id=f"s-{n}") for n in range(3))
        found = check(with_content(well, name, replace(well.desired[name], assignments=loads)))
        return {each.message for each in found if each.invariant == "I2"}

    assert violations(0.11) == set(), "0.29 three times, and the provider"
    (message,) = violations(0.0)
    assert "bytes committed" in message
    assert violations(0.09)


@pytest.mark.parametrize(
    ("plant", "invariant"),
    [
        (dark, "I1"),
        (oversold, "I2"),
        (reservation_beyond_device, "I2"),
        (twice, "I3"),
        (reservation_without_hold, "I3"),
        (reservation_after_expiry, "I3"),
        (one_bid_granted_twice, "I3"),
        (one_agreement_of_two_bids, "I3"),
        (route_to_suspect, "I4"),
        (route_to_unready, "I4"),
        (route_to_unobserved, "I5"),
        (lost_write, "I6"),
        (unrequested_model, "I8"),
        (blind, "I10"),
        (behind, "I12"),
    ],
)
def test_what_is_planted_is_found(
    well: RegionSnapshot, plant: Callable[[RegionSnapshot], RegionSnapshot], invariant: str
) -> None:
    assert invariant in {violation.invariant for violation in check(plant(well))}


def test_routes_to_silent_nodes_are_for_those_that_fell_silent_together_and_have_an_end(well: RegionSnapshot) -> None:
    (at,) = (name for name, content in well.desired.items() if not content.assignments)

    def violations(snapshot: RegionSnapshot) -> list[str]:
        return [each.message for each in check(snapshot) if each.invariant == "I4" and each.subject.endswith(at)]

    together_s = well.fleet.timing.suspect_after_s
    assert violations(route_to_silent(well, 0.0)) == violations(route_to_silent(well, together_s)) == []
    assert len(violations(route_to_silent(well, together_s + 0.1))) == 2
    assert len(violations(route_to_silent(well, 0.0, Liveness.LOST))) == 2
    mass = MassSilence(well.now, tuple(well.desired), is_confirmed=True)
    silent = route_to_silent(well, together_s + 0.1, Liveness.LOST)
    assert violations(replace(silent, fleet=replace(silent.fleet, mass_silence=mass))) == []
    excused = replace(silent.fleet, grace_until=Elapsed(well.now + 1.0))
    assert len(violations(replace(silent, fleet=excused))) == 2, "nothing says that they fell silent together"
    lost = route_to_silent(well, 0.0, Liveness.LOST)
    excused = replace(lost.fleet, grace_until=Elapsed(well.now + 1.0))
    assert violations(replace(lost, fleet=excused)) == []


def test_a_wait_without_an_end_and_one_past_it(well: RegionSnapshot) -> None:
    region = CoreRegion(node("a"))
    region.agents["a"].load_s = 1000
    region.intents = (intent(),)
    decision = region.run(3)
    (wait,) = decision.waits
    snapshot = RegionSnapshot(
        region.fleet, region.intents, region.desired, region.memory, (wait,), Elapsed(3.0), Wall(START + 3)
    )
    assert check(snapshot) == ()
    endless = replace(snapshot, waits=(replace(wait, retry_at=None, gives_up_at=None),))
    assert [each.invariant for each in check(endless)] == ["I5"]
    late = replace(snapshot, wall=Wall(START + 1000), grace_s=Seconds(60.0))
    assert [each.invariant for each in check(late)] == ["I5"]


def test_a_move_past_its_deadline_and_two_of_one_replica(well: RegionSnapshot) -> None:
    move = UnderwayMove("m-1", "shifting", ("a-1", "a-2"), well.now)
    assert check(replace(well, moves=(move,))) == ()
    late = replace(well, moves=(replace(move, until=Elapsed(well.now - well.grace_s - 1)),))
    assert [(each.invariant, each.subject) for each in check(late)] == [("I5", "m-1")]
    crossed = replace(well, moves=(move, UnderwayMove("m-2", "draining", ("a-2", "a-3"), well.now)))
    assert [(each.invariant, each.subject) for each in check(crossed)] == [("I3", "a-2")]
