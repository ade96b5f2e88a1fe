"""A desired set with many routes is stored as any other, whatever of it was written out before."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders import agent_values
from shoal.coordinator import codec
from shoal.coordinator.controllers.workloads.desired_sets import FEW, DesiredSetEncoder
from shoal.types.assignment import DesiredSet, Forwarding, Front, Version
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey


def route(number: int, generation: int) -> Route:
    endpoint = Endpoint(f"a-{number}", "n1", EndpointKind.AGENT, "n1:9000", 1.0, EndpointState.READY)
    return Route(WorkloadKey("shop", f"w-{number:03}"), generation, (endpoint,) * (number % 3))


def desired_set(numbers: set[int], generations: dict[int, Route], forwarding: Forwarding) -> DesiredSet:
    routes = tuple(generations[number] for number in sorted(numbers))
    return DesiredSet(
        "gw", Version("h", 1, len(numbers)), (agent_values.assignment("a-1"),), routes, (), (), Seconds(1.0),
        forwarding=forwarding, routes_on_demand=len(numbers) % 2 == 1,
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 2 * FEW), max_size=40), st.booleans()), min_size=1, max_size=5))
def test_what_is_kept_of_an_earlier_set_changes_no_byte(changes: list[tuple[set[int], bool]]) -> None:
    encoder, numbers, before = DesiredSetEncoder(), set(range(2 * FEW)), None
    known, forwarding = {number: route(number, 1) for number in range(2 * FEW + 1)}, Forwarding()
    for at, (others, is_regrouped) in enumerate(changes):
        numbers = numbers ^ others
        known |= {number: replace(known[number], generation=known[number].generation + 1) for number in others}
        forwarding = Forwarding((Front("n1", f"key-{len(numbers)}"),)) if is_regrouped else forwarding
        one = replace(desired_set(numbers, known, forwarding), version=Version("h", 1, at))
        changed = {WorkloadKey("shop", f"w-{number:03}") for number in others}
        assert encoder.dump(one, before, changed) == codec.dump(one)
        before = one.version


def test_what_was_written_of_a_set_that_was_not_stored_is_written_anew() -> None:
    encoder, known = DesiredSetEncoder(), {number: route(number, 1) for number in range(2 * FEW)}
    one = replace(desired_set(set(known), known, Forwarding()), version=Version("h", 1, 1))
    encoder.dump(one)
    other = replace(one, routes=one.routes[1:], version=Version("h", 1, 2))
    encoder.dump(other, one.version, {one.routes[0].workload})
    again = replace(other, routes=one.routes[:-1])
    assert encoder.dump(again, one.version, {one.routes[-1].workload}) == codec.dump(again)


def test_a_set_with_few_routes_is_written_as_a_whole() -> None:
    encoder, known = DesiredSetEncoder(), {number: route(number, 1) for number in range(2 * FEW)}
    for count in (2 * FEW, 3, 2 * FEW):
        one = desired_set(set(range(count)), known, Forwarding())
        assert encoder.dump(one) == codec.dump(one)
