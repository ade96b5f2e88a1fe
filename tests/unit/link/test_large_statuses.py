"""What an agent reports at its limits passes the coordinator's: a gateway's counts go in parts, lists as their table
allows."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.agent_values import assignment, at
from harness.builders.coordinator_core import fleet_of, merge_status, node
from shoal.agent.core import link_session
from shoal.agent.core.assignment import machine, report, states
from shoal.agent.core.link_session import NodeReport, ReportCursor, next_status
from shoal.coordinator.core.fleet.state import Fleet
from shoal.types.assignment import (
    MAX_INGRESS,
    MAX_INGRESS_PART,
    MAX_SUBSCRIPTIONS,
    Ingress,
    IngressRange,
    Status,
    Subscriptions,
    Version,
)
from shoal.types.profile import TensorSpec
from shoal.types.tenant import TenantUse
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import link_pb2
from shoal.wire.nouns import from_agent_from_wire, from_agent_to_wire
from shoal.wire.request_limits import SESSION_ITEMS, make_reader

GATEWAY = node("gw")
WALL = Wall(1_000.0)
REPLICAS, TENANTS = 300, 500
read = make_reader("/shoal.v1.AgentLink/Session", link_pb2.FromAgent.FromString)


def count(number: int, requests: int = 7) -> Ingress:
    return Ingress(WorkloadKey("acme", f"w-{number:05}"), "till", requests, 2, 1, 1, 1, 1)


def moment(ingress: Sequence[Ingress]) -> NodeReport:
    return NodeReport("gw", 1, Version("h-1", 1, 1), (), (), tuple(ingress), WALL, True)


def by_key(ingress: Sequence[Ingress]) -> list[Ingress]:
    return sorted(ingress, key=lambda each: each.key)


def report_to(fleet: Fleet, status: Status) -> Fleet:
    """The coordinator, of what it decodes."""
    heard = from_agent_from_wire(read(from_agent_to_wire(status).SerializeToString()))
    assert heard == status
    fleet, refusals = merge_status(fleet, "gw", 1, status, Elapsed(0.0), WALL)
    assert refusals == ()
    return fleet


def test_the_largest_status_of_a_node_is_heard_and_its_counts_in_turn() -> None:
    observed = tuple(
        report.observe(
            machine.begin(assignment(f"a-{each}"), at(0.0), states.AssignmentLimits())[0], epoch_wall=Seconds(0)
        )
        for each in range(REPLICAS)
    )
    everything = replace(
        moment([count(number) for number in range(MAX_INGRESS)]),
        observed=observed,
        tenants=tuple(TenantUse(f"t-{each}", 5, 4, 3, 2) for each in range(TENANTS)),
        subscriptions=Subscriptions(tuple(WorkloadKey("acme", f"w-{each}") for each in range(MAX_SUBSCRIPTIONS))),
    )
    fleet = fleet_of(GATEWAY)
    reporter = ReportCursor(fleet.nodes["gw"].sequence)
    for _ in range(MAX_INGRESS // MAX_INGRESS_PART):
        reporter, status = next_status(reporter, everything, full_every=1)
        assert len(status.ingress) == MAX_INGRESS_PART
        fleet = report_to(fleet, status)
    assert by_key(fleet.nodes["gw"].ingress) == by_key(everything.ingress)


def test_replicas_of_models_with_many_outputs_are_told_of_with_as_many_as_pass() -> None:
    plain = machine.begin(assignment("a-0"), at(0.0), states.AssignmentLimits())[0]
    outputs = tuple(TensorSpec(f"y-{number}", "FP32", (1, 4)) for number in range(1_000))
    observed = tuple(
        replace(report.observe(plain, epoch_wall=Seconds(0)), assignment=f"a-{each}", outputs=outputs)
        for each in range(9)
    )
    fleet = fleet_of(GATEWAY)
    reporter = ReportCursor(fleet.nodes["gw"].sequence)
    _, status = next_status(reporter, replace(moment(()), observed=observed), full_every=1)
    report_to(fleet, status)
    assert [len(each.outputs) for each in status.observed] == 4 * [1_000] + 5 * [0]


def test_counts_of_few_workloads_go_whole() -> None:
    few = moment([count(number) for number in range(MAX_INGRESS_PART)])
    _, status = next_status(ReportCursor(), few, full_every=10)
    assert (status.ingress, status.ingress_range) == (few.ingress, None)


def test_the_coordinator_keeps_no_more_counts_than_a_node_may_have() -> None:
    fleet = fleet_of(GATEWAY)
    for number in range(MAX_INGRESS // 1_000 + 3):
        told = tuple(count(number * 1_000 + each) for each in range(1_000))
        part = IngressRange(told[0].key, told[-1].key)
        status = replace(next_status(ReportCursor(10 + number), moment(told), full_every=99)[1], ingress_range=part)
        fleet = report_to(fleet, status)
    known = fleet.nodes["gw"].ingress
    assert len(known) == MAX_INGRESS
    assert known[-1].key == count(MAX_INGRESS // 1_000 * 1_000 + 2_999).key, "the newest"


def test_counts_outside_of_the_part_that_is_told_of_are_not_kept() -> None:
    """They would be there again with each status."""
    fleet = fleet_of(GATEWAY)
    told = moment([count(0), count(1), count(9)])
    part = IngressRange(told.ingress[0].key, told.ingress[1].key)  # after the one, up to the other
    for number in range(3):
        status = replace(next_status(ReportCursor(10 + number), told, full_every=99)[1], ingress_range=part)
        fleet = report_to(fleet, status)
    assert [each.key for each in fleet.nodes["gw"].ingress] == [count(1).key]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sets(st.integers(0, 30), min_size=1), min_size=1, max_size=12))
def test_whatever_came_and_went_is_known_once_each_had_its_turn(history: list[set[int]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link_session, "MAX_INGRESS_PART", 4)
        fleet = fleet_of(GATEWAY)
        reporter, rounds = ReportCursor(fleet.nodes["gw"].sequence), 2 * (30 // 4 + 2)
        now = moment(())
        for requests, numbers in enumerate((*history, *(rounds * [history[-1]]))):
            now = moment([count(number, requests) for number in sorted(numbers, reverse=True)])
            reporter, status = next_status(reporter, now, full_every=3)
            assert len(status.ingress) <= 4
            fleet = report_to(fleet, status)
            assert set(status.ingress) <= set(fleet.nodes["gw"].ingress)
        known = fleet.nodes["gw"].ingress
        assert sorted(each.key for each in known) == sorted(each.key for each in now.ingress)


def fill(message: Message) -> None:
    """Every field, lists apart."""
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            if field.type not in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING):
                getattr(message, field.name).append(1)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name))
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            setattr(message, field.name, "x" if field.type == FieldDescriptor.TYPE_STRING else b"x")
        else:
            setattr(message, field.name, 1)


@pytest.mark.parametrize("name", SESSION_ITEMS)
def test_a_list_as_long_as_it_may_be_passes(name: str) -> None:
    listed = Default().FindFieldByName(name)
    up = link_pb2.FromAgent()

    def find(message: Message) -> Message | None:
        """The message in which the list is."""
        if message.DESCRIPTOR is listed.containing_type:
            return message
        for field in message.DESCRIPTOR.fields:
            if field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated:
                inner = getattr(message, field.name)
                if (found := find(inner)) is not None:
                    inner.SetInParent()
                    return found
        return None

    holder = find(up)
    assert holder is not None
    items = getattr(holder, listed.name)
    for _ in range(SESSION_ITEMS[name]):
        if listed.type == FieldDescriptor.TYPE_MESSAGE:
            fill(items.add())
        else:
            items.append("x")
    assert len(getattr(find(read(up.SerializeToString())), listed.name)) == SESSION_ITEMS[name]
