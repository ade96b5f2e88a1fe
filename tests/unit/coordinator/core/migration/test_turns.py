"""Turns of replicas that are compared with every other place: everybody has one, and tenants take turns."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.migration.triggers.turns import TurnsTaken, Waiting, take_turns


def waiting(tenant: str, count: int) -> list[Waiting]:
    return [Waiting(tenant, f"a-{tenant}-{number:04}") for number in range(count)]


def scans(everybody: Sequence[Waiting], most: int, count: int, before: TurnsTaken) -> list[frozenset[str]]:
    found = list[frozenset[str]]()
    for _ in range(count):
        names, before = take_turns(before, everybody, most)
        found.append(names)
    return found


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 7))
def test_everybody_has_a_turn_within_as_many_as_there_are_tenants_for_each_of_its_own(
    sizes: list[int], most: int, earlier: int
) -> None:
    """Before, turns went by the clock: with some periods between scans whole groups never had one."""
    everybody = [each for number, size in enumerate(sizes) for each in waiting(f"t{number}", size)]
    before: TurnsTaken = {}
    for _ in range(earlier):  # the turns begin anywhere
        _, before = take_turns(before, everybody, most)
    for number, size in enumerate(sizes):
        longest = -(-len(sizes) * size // most) + 1
        seen = frozenset[str]().union(*scans(everybody, most, longest, before))
        assert seen >= {each.assignment for each in waiting(f"t{number}", size)}


@given(st.integers(0, 30), st.integers(1, 9))
def test_as_many_have_a_turn_as_can_be_compared(count: int, most: int) -> None:
    for names in scans(waiting("one", count), most, 5, {}):
        assert len(names) == min(count, most)


def test_one_replica_does_not_wait_for_all_of_another_tenant() -> None:
    """Before, its first turn came after 495 s in a region of 4,000 devices."""
    (late,) = waiting("small", 1)
    found = scans([*waiting("large", 99), late], 1, 10, {})
    assert [late.assignment in names for names in found] == [False, True] * 5
    assert len({name for names in found for name in names}) == 6, "and of the large one it is another one each time"


def test_a_tenant_that_waits_only_at_times_takes_no_more_than_its_turn() -> None:
    large, (late,) = waiting("large", 3), waiting("small", 1)
    before: TurnsTaken = {}
    order = list[str]()
    for number in range(8):
        names, before = take_turns(before, [*large, late] if number % 2 else large, 1)
        order += names
    assert order.count(late.assignment) == 4, "as if it waited all the time"
    assert {each.assignment for each in large} <= {*order}


def test_replicas_that_come_and_go_keep_nobody_from_a_turn() -> None:
    before: TurnsTaken = {}
    stays, seen = waiting("one", 4), set[str]()
    for number in range(10):
        fresh = [Waiting("one", f"a-one-{number:04}-{each}") for each in range(2)]
        names, before = take_turns(before, [*stays, *fresh], 2)
        seen |= names
    assert {each.assignment for each in stays} <= seen
