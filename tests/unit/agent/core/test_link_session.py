"""Which welcome, which desired set, which report."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.agent_values import assignment, at, desired_set
from harness.builders.coordinator_core import device
from shoal.agent.core.assignment import machine, report, states
from shoal.agent.core.link_session import (
    AcceptSet,
    NodeReport,
    ReportCursor,
    SetUnchanged,
    check_hello,
    check_welcome,
    clock_skew,
    evaluate,
    next_status,
    reconnect_after,
)
from shoal.types.assignment import DesiredSet, Observed, Status, Subscriptions, Version
from shoal.types.codes import Code, Refusal
from shoal.types.device import Node, Role
from shoal.types.link import OLDEST_PROTOCOL, PROTOCOL, Hello, Welcome, negotiate_protocol
from shoal.types.route import Route
from shoal.types.units import Bytes, Seconds, Wall
from shoal.types.workload import WorkloadKey

NODE = Node("edge-1", "eu", Role.AGENT, {}, "0", "linux", "x86_64", Bytes(1), Bytes(1), (), "", "", "boot")
HELLO = Hello(NODE, "nonce-1", Version("h-1", 3, 10), OLDEST_PROTOCOL, Wall(1000.0), newest=PROTOCOL)
WELCOME = Welcome(7, "nonce-1", "h-1", 3, Seconds(1.0), Wall(1000.0))


def verdict(held: DesiredSet | None, offered: DesiredSet, history: str = "h-1") -> object:
    found = evaluate(held, offered, node="edge-1", history=history)
    return found.code if isinstance(found, Refusal) else found


def test_a_session_tells_of_no_device_that_its_hello_did_not() -> None:
    known, found = device("cpu0"), device("gpu0")
    hello = replace(HELLO, node=replace(NODE, devices=(known,)))
    assert check_hello(hello, hello.node) is None
    assert check_hello(hello, NODE) is None, "what is gone is told of as silent"
    outdated = check_hello(hello, replace(NODE, devices=(known, found)))
    assert outdated is not None
    assert (outdated.code, outdated.found) == (Code.MESSAGE_INVALID, "a hello without gpu0")


def test_a_welcome_answers_this_hello_by_no_replaced_leader() -> None:
    assert check_welcome(HELLO, WELCOME) is None
    stale = check_welcome(HELLO, replace(WELCOME, nonce="nonce-0"))
    assert stale is not None
    assert stale.code is Code.MESSAGE_INVALID
    old = check_welcome(HELLO, replace(WELCOME, term=2))
    assert old is not None
    assert old.code is Code.TERM_STALE
    assert check_welcome(HELLO, replace(WELCOME, term=1, history="h-2")) is None, "terms compare within one history"
    assert check_welcome(replace(HELLO, holds=None), replace(WELCOME, term=1)) is None


@pytest.mark.parametrize(
    ("agent", "coordinator", "both"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 0), (1, 3), 1),
        ((1, 2), (1, 3), 2),
        ((1, 3), (1, 2), 2),
        ((2, 3), (1, 2), 2),
        ((3, 4), (1, 2), None),
        ((1, 1), (2, 3), None),
    ],
    ids=lambda value: str(value),
)
def test_f41_two_versions_speak_the_newest_that_both_know(
    agent: tuple[int, int], coordinator: tuple[int, int], both: int | None
) -> None:
    """agent, coordinator: the oldest and the newest that each knows; newest 0: of an agent that does not tell."""
    hello = replace(HELLO, protocol=agent[0], newest=agent[1])
    assert negotiate_protocol(hello, oldest=coordinator[0], newest=coordinator[1]) == both
    if both is not None:
        assert check_welcome(hello, replace(WELCOME, protocol=both)) is None


def test_f41_an_agent_speaks_no_version_that_it_did_not_offer() -> None:
    assert check_welcome(HELLO, WELCOME) is None, "an earlier coordinator does not tell"
    newer = check_welcome(HELLO, replace(WELCOME, protocol=PROTOCOL + 1))
    assert newer is not None
    assert newer.code is Code.NOT_SUPPORTED_YET
    assert check_welcome(replace(HELLO, protocol=2, newest=3), WELCOME) is not None


def test_f41_what_an_earlier_version_did_not_keep_of_a_set_is_taken_when_it_comes_again() -> None:
    """An earlier agent persists a set without the fields that it does not know; the next one is offered it again."""
    whole = desired_set(10, replace(assignment("a-1"), session={"h": "hn"}), assignment("a-2"), pins=("b", "a"))
    kept = desired_set(10, assignment("a-1"), assignment("a-2"), pins=("b", "a"))
    found = evaluate(kept, whole, node="edge-1", history="h-1")
    assert isinstance(found, AcceptSet)
    assert found.desired_set.assignments == whole.assignments
    assert evaluate(found.desired_set, whole, node="edge-1", history="h-1") == SetUnchanged()
    assert evaluate(whole, replace(whole, proof=b"another"), node="edge-1", history="h-1") == SetUnchanged()
    first = evaluate(
        desired_set(50, assignment("a-3")), replace(whole, version=Version("h-2", 1, 1)), node="edge-1", history="h-2"
    )
    assert isinstance(first, AcceptSet)
    again = evaluate(first.desired_set, replace(whole, version=Version("h-2", 1, 1)), node="edge-1", history="h-2")
    assert again == SetUnchanged(), "the first set of a history stops nothing, however often it comes"


def test_skew_is_told_beyond_the_allowance() -> None:
    assert clock_skew(WELCOME, Wall(1010.0)) is None
    assert clock_skew(WELCOME, Wall(1100.0)) == -100.0


def test_within_a_history_nothing_goes_back() -> None:
    held = desired_set(10, term=3)
    assert verdict(None, held) == AcceptSet(held)
    assert verdict(held, held) == SetUnchanged()
    assert verdict(held, desired_set(11, term=3)) == AcceptSet(desired_set(11, term=3))
    assert verdict(held, desired_set(9, term=3)) == Code.GENERATION_STALE
    assert verdict(held, desired_set(11, term=2)) == Code.TERM_STALE
    assert verdict(held, desired_set(9, term=4)) == Code.GENERATION_STALE
    assert verdict(held, desired_set(10, term=4)) == AcceptSet(desired_set(10, term=4)), (
        "a new leader repeats what stands"
    )
    assert verdict(held, desired_set(11, node="edge-2")) == Code.NODE_MISMATCH


def test_a_new_history_is_accepted_and_its_first_set_stops_nothing() -> None:
    mine, shared = assignment("a-mine"), assignment("a-shared")
    key, other = WorkloadKey("default", "mine"), WorkloadKey("default", "other")
    held = desired_set(50, mine, shared, routes=(Route(key, 1, ()), Route(other, 1, ())), pins=("sha256:1",))
    offered = desired_set(2, shared, history="h-2", routes=(Route(other, 9, ()),), pins=("sha256:2",))
    assert verdict(held, offered, history="h-1") == Code.GENERATION_STALE, "not this session's history"
    found = evaluate(held, offered, node="edge-1", history="h-2")
    assert isinstance(found, AcceptSet)
    assert found.desired_set.version == offered.version
    assert {each.id for each in found.desired_set.assignments} == {"a-mine", "a-shared"}
    assert set(found.desired_set.routes) == {Route(other, 9, ()), Route(key, 1, ())}
    assert found.desired_set.pins == ("sha256:1", "sha256:2")
    later = desired_set(3, shared, history="h-2")
    assert verdict(found.desired_set, later, history="h-2") == AcceptSet(later), "its next set speaks for itself"


versions = st.builds(Version, st.sampled_from(["h-1", "h-2"]), st.integers(1, 3), st.integers(1, 5))


@given(st.lists(versions, max_size=30))
def test_whatever_is_replayed_versions_only_grow(offers: list[Version]) -> None:
    held: DesiredSet | None = None
    for version in offers:
        offered = replace(desired_set(0), version=version)
        match evaluate(held, offered, node="edge-1", history="h-1"):
            case AcceptSet(accepted):
                if held is not None:
                    before, after = held.version, accepted.version
                    assert (after.term, after.generation) > (before.term, before.generation)
                    assert after.generation >= before.generation
                held = accepted
                assert evaluate(held, offered, node="edge-1", history="h-1") == SetUnchanged()
            case SetUnchanged() | Refusal():
                pass
    assert held is None or held.version.history == "h-1"


def observe_new(name: str, now: float = 0.0) -> Observed:
    return report.observe(machine.begin(assignment(name), at(now), states.AssignmentLimits())[0], epoch_wall=Seconds(0))


def moment(*observed: Observed) -> NodeReport:
    return NodeReport("edge-1", 7, Version("h-1", 1, 1), observed, (), (), Wall(5.0), True)


def test_full_at_first_then_what_changed_and_full_again() -> None:
    reporter = ReportCursor()
    sent: list[Status] = []
    for now in (
        moment(observe_new("a-1"), observe_new("a-2")),
        moment(observe_new("a-1"), observe_new("a-2")),
        moment(observe_new("a-1", now=4.0), observe_new("a-2")),
        moment(observe_new("a-2")),
        moment(observe_new("a-2")),
    ):
        reporter, status = next_status(reporter, now, full_every=4)
        sent.append(status)
    assert [status.sequence for status in sent] == [1, 2, 3, 4, 5]
    assert [status.full for status in sent] == [True, False, False, False, True]
    assert [[each.assignment for each in status.observed] for status in sent] == [
        ["a-1", "a-2"],
        [],
        ["a-1"],
        [],
        ["a-2"],
    ]
    assert [status.gone for status in sent] == [(), (), (), ("a-1",), ()]


def test_subscriptions_are_said_in_full_reports_and_when_they_change() -> None:
    none, some = Subscriptions(()), Subscriptions((WorkloadKey("shop", "ocr"),))
    reporter, said = ReportCursor(), list[Subscriptions | None]()
    for now in (none, none, some, some, some, none):
        reporter, status = next_status(reporter, replace(moment(), subscriptions=now), full_every=5)
        said.append(status.subscriptions)
    assert said == [none, None, some, None, None, none]


names = st.sampled_from(["a-1", "a-2", "a-3"])
moments = st.lists(st.dictionaries(names, st.sampled_from([1.0, 2.0])), min_size=1, max_size=20)


@given(moments, st.integers(1, 5))
def test_deltas_add_up_to_the_whole(story: list[dict[str, float]], full_every: int) -> None:
    reporter, known = ReportCursor(), dict[str, Observed]()
    for observed in story:
        now = moment(*(observe_new(name, when) for name, when in observed.items()))
        reporter, status = next_status(reporter, now, full_every=full_every)
        known = {} if status.full else known
        known |= {each.assignment: each for each in status.observed}
        known = {name: each for name, each in known.items() if name not in status.gone}
        assert known == {each.assignment: each for each in now.observed}


def test_a_region_that_restarts_is_not_called_by_all_at_once() -> None:
    waits = sorted(reconnect_after(f"edge-{number}", 5) for number in range(1000))
    assert waits[0] < 2.1
    assert 3.9 < waits[-1] <= 4.0
    busiest = max(sum(low <= wait < low + 0.1 for wait in waits) for low in (2.0 + 0.1 * step for step in range(20)))
    assert busiest < 90, "1000 calls over 2 s are 50 in 0.1 s"
