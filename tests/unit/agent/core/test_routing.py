"""Routing: which replica, whose fault, what is turned away."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core import routing
from shoal.agent.core.routing import (
    AdmissionLimits,
    AttemptFault,
    AttemptHistory,
    FrontLoad,
    ReplicaHealth,
    RetryDecision,
)
from shoal.types.codes import Code, Refusal
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "reader")
NOW = Elapsed(100.0)


def endpoint(
    name: str,
    weight: float = 1.0,
    state: EndpointState = EndpointState.READY,
    kind: EndpointKind = EndpointKind.AGENT,
) -> Endpoint:
    return Endpoint(name, f"node-{name}", kind, "127.0.0.1:1", weight, state)


def route(*endpoints: Endpoint, code: str = "", reason: str = "") -> Route:
    return Route(KEY, 1, endpoints, code, reason)


def assignment_of(found: Endpoint | Refusal) -> str:
    assert isinstance(found, Endpoint), found
    return found.assignment


def test_what_was_forwarded_here_keeps_to_this_nodes_own_table() -> None:
    def here(name: str, weight: float = 1.0, state: EndpointState = EndpointState.READY) -> Endpoint:
        return endpoint(name, weight, state, EndpointKind.LOCAL)

    old, new, peers = here("old", 0.75), here("new", 0.25), endpoint("peers")
    assert routing.local_endpoints((old, new, peers), ("old", "new")) == (old, new)
    assert routing.local_endpoints((old, peers), ("old", "new")) == (old,), "ready, and not to take requests yet"
    assert routing.local_endpoints((old, here("new", 0.0)), ("old", "new")) == (old,)
    assert routing.local_endpoints((old, new), ("new",)) == (new,), "the other has no worker any more"
    standby = here("by", state=EndpointState.STANDBY)
    assert routing.local_endpoints((standby,), ("by",)) == (standby,)
    for listed in ((), (peers,), (here("new", 0.0),), (here("new", 1.0, EndpointState.DRAINING),)):
        (found,) = routing.local_endpoints(listed, ("new",))
        assert (found.assignment, found.weight, found.state) == ("new", 1.0, EndpointState.READY), (
            "the sender knows more"
        )


def test_a_request_does_not_wait_for_a_way_to_open_while_another_is_open() -> None:
    both = route(endpoint("near"), endpoint("far", weight=9.0))

    def choose_endpoint(health: dict[str, ReplicaHealth], opening: set[str]) -> Endpoint | Refusal:
        return routing.choose(both, health, set(), set(), "", NOW, 1, opening)

    assert assignment_of(choose_endpoint({}, {"far"})) == "near"
    assert assignment_of(choose_endpoint({"near": ReplicaHealth(outstanding=50)}, {"far"})) == "near"
    assert assignment_of(choose_endpoint({"near": ReplicaHealth(ejected_until=Elapsed(NOW + 1))}, {"far"})) == "far", (
        "better late than nowhere"
    )
    assert {assignment_of(choose_endpoint({}, {"far", "near"}))} <= {"far", "near"}


HEALTH = st.builds(
    ReplicaHealth,
    outstanding=st.integers(0, 5),
    failures=st.integers(0, 3),
    ejected_until=st.none() | st.floats(90, 110).map(Elapsed),
    service_s=st.none() | st.floats(0.001, 1).map(Seconds),
)


def takes(health: ReplicaHealth) -> bool:
    over = health.ejected_until is not None and health.ejected_until <= NOW and health.outstanding == 0
    return health.ejected_until is None or over


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Route, dict[str, ReplicaHealth], frozenset[str]]:
    names = [f"a{n}" for n in range(draw(st.integers(0, 5)))]
    endpoints = tuple(
        endpoint(
            name,
            draw(st.sampled_from([0.0, 0.1, 1.0, 3.0])),
            draw(st.sampled_from(EndpointState)),
            draw(st.sampled_from(EndpointKind)),
        )
        for name in names
    )
    health = {name: draw(HEALTH) for name in names if draw(st.booleans())}
    return route(*endpoints), health, frozenset(name for name in names if draw(st.booleans()))


@given(scenes(), st.integers(), st.sampled_from(["", "s1", "s2"]))
def test_every_replica_at_most_once_and_never_one_that_takes_nothing(
    scene: tuple[Route, dict[str, ReplicaHealth], frozenset[str]], seed: int, session: str
) -> None:
    where, health, here = scene
    states = {
        e.assignment: e.state
        for e in where.endpoints
        if e.weight > 0 and (e.kind is not EndpointKind.LOCAL or e.assignment in here)
    }
    at_work = {name for name, state in states.items() if state is EndpointState.READY}
    standby = {name for name, state in states.items() if state is EndpointState.STANDBY}
    relieved = not any(takes(health.get(name, ReplicaHealth())) for name in at_work)
    tried: list[str] = []
    while True:
        left = at_work - set(tried)
        takes_over = relieved or (left and not any(takes(health.get(name, ReplicaHealth())) for name in left))
        fit = at_work | (standby if takes_over else set())
        found = routing.choose(where, health, here, frozenset(tried), session, NOW, seed)
        assert found == routing.choose(where, health, here, frozenset(tried), session, NOW, seed)
        if isinstance(found, Refusal):
            assert found.code is (Code.REPLICA_UNREACHABLE if fit else Code.MODEL_NOT_READY)
            break
        assert found.assignment in fit, "a standby only for those that failed"
        assert found.assignment not in tried
        well = [n for n in fit - set(tried) if (h := health.get(n)) is None or h.ejected_until is None]
        state = health.get(found.assignment, ReplicaHealth())
        if well and state.ejected_until is not None:
            assert state.ejected_until <= NOW
            assert state.outstanding == 0
        tried.append(found.assignment)
    assert at_work <= set(tried)
    assert standby <= set(tried) or not relieved


def test_a_standby_takes_requests_only_while_all_others_are_ejected() -> None:
    where = route(endpoint("a"), endpoint("b"), endpoint("s", state=EndpointState.STANDBY))
    out = ReplicaHealth(failures=1, ejected_until=Elapsed(NOW + 1))

    def takers(**health: ReplicaHealth) -> set[str]:
        found = (routing.choose(where, health, set(), set(), "", NOW, n) for n in range(50))
        return {assignment_of(each) for each in found}

    assert takers() == {"a", "b"}
    assert takers(a=ReplicaHealth(outstanding=60), b=ReplicaHealth(outstanding=60)) == {"a", "b"}, (
        "a crowd is no failure"
    )
    assert takers(a=out) == {"b"}
    assert takers(a=out, b=out) == {"s"}
    assert takers(a=out, b=out._replace(ejected_until=NOW)) == {"b"}, "one that may be back is tried first"
    assert takers(a=out, b=out, s=out) == {"a", "b", "s"}, "nothing else is left"
    assert assignment_of(routing.choose(where, {"a": out, "b": out}, set(), {"a", "s"}, "", NOW, 1)) == "b"
    assert assignment_of(routing.choose(where, {"b": out}, set(), {"a"}, "", NOW, 1)) == "s", "b would fail again"
    assert assignment_of(routing.choose(where, {"b": out}, set(), {"a", "s"}, "", NOW, 1)) == "b"
    assert routing.has_ready_replica(where, {"a": out, "b": out}, set(), NOW)
    assert not routing.has_ready_replica(where, {"a": out, "b": out, "s": out}, set(), NOW)


def test_a_standby_is_all_there_is() -> None:
    where = route(endpoint("s", state=EndpointState.STANDBY))
    assert assignment_of(routing.choose(where, {}, set(), set(), "", NOW, 1)) == "s"
    assert routing.admit(where, {}, set(), EMPTY, Seconds(1.0), Bytes(1), TIGHT, NOW) is None
    here = route(endpoint("s", state=EndpointState.STANDBY, kind=EndpointKind.LOCAL))
    assert isinstance(routing.choose(here, {}, set(), set(), "", NOW, 1), Refusal)
    assert assignment_of(routing.choose(here, {}, {"s"}, set(), "", NOW, 1)) == "s"


def test_a_request_that_failed_on_the_last_active_replica_goes_to_the_standby() -> None:
    where = route(endpoint("a"), endpoint("s", state=EndpointState.STANDBY))
    health = {"a": routing.record_failure(routing.record_sent(ReplicaHealth()), "a", AttemptFault.REPLICA, NOW)}
    assert assignment_of(routing.choose(where, health, set(), {"a"}, "", NOW, 1)) == "s"
    busy = {"a": routing.record_failure(routing.record_sent(ReplicaHealth()), "a", AttemptFault.BUSY, NOW)}
    assert isinstance(routing.choose(where, busy, set(), {"a"}, "", NOW, 1), Refusal)


def test_light_load_is_shared_by_weights() -> None:
    where = route(endpoint("a", 3.0), endpoint("b", 1.0))
    count = Counter(assignment_of(routing.choose(where, {}, frozenset(), frozenset(), "", NOW, n)) for n in range(4000))
    assert count["a"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_busy_replica_gives_way_to_the_least_crowded_for_its_weight() -> None:
    where = route(endpoint("a"), endpoint("b"))
    health = {"a": ReplicaHealth(outstanding=3), "b": ReplicaHealth(outstanding=1)}
    assert {assignment_of(routing.choose(where, health, set(), set(), "", NOW, n)) for n in range(50)} == {"b"}
    canary = route(endpoint("a", 9.0), endpoint("b", 1.0))
    one = {"a": ReplicaHealth(outstanding=1)}
    count = Counter(assignment_of(routing.choose(canary, one, set(), set(), "", NOW, n)) for n in range(1000))
    assert count["b"] < 200, "a step of a migration stays near its weight"


def test_sessions_stay_together_and_move_only_when_they_must() -> None:
    where = route(*(endpoint(f"a{n}") for n in range(4)))
    sessions = [f"s{n}" for n in range(100)]
    homes = {s: assignment_of(routing.choose(where, {}, set(), set(), s, NOW, 1)) for s in sessions}
    again = {s: assignment_of(routing.choose(where, {}, set(), set(), s, NOW, 2)) for s in sessions}
    assert homes == again
    assert len(set(homes.values())) == 4
    fewer = route(*where.endpoints[1:])
    moved = {s: assignment_of(routing.choose(fewer, {}, set(), set(), s, NOW, 1)) for s in sessions}
    assert all(moved[s] == home for s, home in homes.items() if home != "a0")


def test_an_ejected_replica_is_probed_back_with_one_request() -> None:
    where = route(endpoint("a"), endpoint("b"))
    bad = routing.record_failure(routing.record_sent(ReplicaHealth()), "a", AttemptFault.REPLICA, NOW)
    assert bad.ejected_until is not None
    health = {"a": bad}
    assert {assignment_of(routing.choose(where, health, set(), set(), "", NOW, n)) for n in range(50)} == {"b"}
    later = Elapsed(bad.ejected_until)
    seen = {assignment_of(routing.choose(where, health, set(), set(), "", later, n)) for n in range(50)}
    assert seen == {"a", "b"}
    probing = {"a": routing.record_sent(bad)}
    assert {assignment_of(routing.choose(where, probing, set(), set(), "", later, n)) for n in range(50)} == {"b"}
    well = routing.record_answer(routing.record_sent(bad), Seconds(0.1), 0, later)
    assert (well.failures, well.ejected_until, well.outstanding) == (0, None, 0)


def test_the_only_replica_is_tried_even_when_ejected() -> None:
    bad = {"a": routing.record_failure(routing.record_sent(ReplicaHealth()), "a", AttemptFault.CRASH, NOW)}
    assert assignment_of(routing.choose(route(endpoint("a")), bad, set(), set(), "", NOW, 1)) == "a"
    assert not routing.has_ready_replica(route(endpoint("a")), bad, set(), NOW)


def test_back_off_grows_but_one_death_counts_once() -> None:
    health = ReplicaHealth(outstanding=3)
    for _ in range(3):
        health = routing.record_failure(health, "a", AttemptFault.CRASH, NOW)
    assert (health.failures, health.outstanding) == (1, 0)
    spans = []
    now = NOW
    for _ in range(12):
        health = routing.record_failure(routing.record_sent(health), "a", AttemptFault.REPLICA, now)
        assert health.ejected_until is not None
        spans.append(health.ejected_until - now)
        now = Elapsed(health.ejected_until)
    assert spans[-1] > 10 * spans[0]
    assert max(spans) <= routing.EJECT_CAP_S


def test_a_replica_that_hangs_is_ejected_after_some_deadlines() -> None:
    health = ReplicaHealth()
    for _ in range(routing.LATE_LIMIT):
        assert health.ejected_until is None
        health = routing.record_failure(routing.record_sent(health), "a", AttemptFault.LATE, NOW)
    assert health.ejected_until is not None


KNOWN = ReplicaHealth(outstanding=1, service_s=Seconds(0.5), rtt_s=Seconds(0.1))
FRONT_S = Seconds(60.0)


@pytest.mark.parametrize(
    ("health", "ahead", "waited_s", "fault"),
    [
        (KNOWN, 0, 0.001, AttemptFault.CALLER),
        (KNOWN, 0, 0.6, AttemptFault.CALLER),
        (KNOWN, 0, 2.39, AttemptFault.CALLER),
        (KNOWN, 0, 2.4, AttemptFault.LATE),
        (KNOWN, 3, 2.4, AttemptFault.CALLER),
        (KNOWN, 3, 8.4, AttemptFault.LATE),
        (ReplicaHealth(outstanding=1, service_s=Seconds(0.001)), 0, 0.1, AttemptFault.CALLER),
        (ReplicaHealth(outstanding=1, service_s=Seconds(0.001)), 0, routing.HANG_S, AttemptFault.LATE),
        (ReplicaHealth(outstanding=1, service_s=Seconds(50.0)), 0, FRONT_S, AttemptFault.LATE),
        (ReplicaHealth(outstanding=1), 0, 10.0, AttemptFault.CALLER),
        (ReplicaHealth(outstanding=1), 0, FRONT_S, AttemptFault.LATE),
        (KNOWN._replace(answered_at=Elapsed(NOW - 2.0)), 0, 2.5, AttemptFault.CALLER),
        (KNOWN._replace(answered_at=Elapsed(NOW - 3.0)), 0, 2.5, AttemptFault.LATE),
    ],
)
def test_a59_a_deadline_that_no_replica_could_meet_is_its_callers(
    health: ReplicaHealth, ahead: int, waited_s: float, fault: AttemptFault
) -> None:
    found = routing.fault_of_attempt(Code.DEADLINE_EXCEEDED, health, ahead, Seconds(waited_s), FRONT_S, NOW)
    assert found is fault


def test_a59_callers_deadlines_eject_no_replica() -> None:
    health = KNOWN._replace(late_count=routing.LATE_LIMIT - 1)
    for _ in range(100):
        health = routing.record_failure(routing.record_sent(health), "a", AttemptFault.CALLER, NOW)
    assert health == KNOWN._replace(late_count=routing.LATE_LIMIT - 1)


def test_a_failure_that_is_no_deadline_is_judged_by_its_code() -> None:
    assert routing.fault_of_attempt(Code.WORKER_CRASHED, KNOWN, 0, Seconds(0.0), FRONT_S, NOW) is AttemptFault.CRASH


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (Code.INVALID_ARGUMENT, AttemptFault.REQUEST),
        (Code.RUNTIME_FAILED, AttemptFault.REQUEST),
        (Code.REQUEST_CRASHED_WORKER, AttemptFault.REQUEST),
        (Code.OVERLOADED, AttemptFault.BUSY),
        (Code.DEADLINE_EXCEEDED, AttemptFault.LATE),
        (Code.MODEL_NOT_READY, AttemptFault.REPLICA),
        (Code.REPLICA_UNREACHABLE, AttemptFault.REPLICA),
        (Code.CERT_EXPIRED, AttemptFault.REPLICA),
        (Code.WORKER_CRASHED, AttemptFault.CRASH),
    ],
)
def test_whose_fault(code: Code, fault: AttemptFault) -> None:
    assert routing.fault_of(code) is fault


FIRST = AttemptHistory()
CRASHED = AttemptHistory(frozenset({"a"}), has_crashed=True)


@pytest.mark.parametrize(
    ("fault", "tries", "expected"),
    [
        (AttemptFault.REQUEST, FIRST, RetryDecision.RETURN_ERROR),
        (AttemptFault.LATE, FIRST, RetryDecision.RETURN_ERROR),
        (AttemptFault.CALLER, FIRST, RetryDecision.RETURN_ERROR),
        (AttemptFault.BUSY, FIRST, RetryDecision.RETRY),
        (AttemptFault.REPLICA, FIRST, RetryDecision.RETRY),
        (AttemptFault.REPLICA, CRASHED, RetryDecision.RETRY),
        (AttemptFault.CRASH, FIRST, RetryDecision.RETRY),
        (AttemptFault.CRASH, CRASHED, RetryDecision.BLOCK),
    ],
)
def test_what_becomes_of_a_failure(fault: AttemptFault, tries: AttemptHistory, expected: RetryDecision) -> None:
    assert routing.decide_retry(fault, tries) is expected


TIGHT = AdmissionLimits(per_replica=4, per_tenant=6, total_bytes=1000)
EMPTY = FrontLoad(0, 0, Bytes(0))


def admit(
    load: FrontLoad, left_s: float = 10.0, size: int = 10, **health: ReplicaHealth
) -> tuple[Code, float | None] | None:
    where = route(endpoint("a"), endpoint("b"))
    turned = routing.admit(where, health, set(), load, Seconds(left_s), Bytes(size), TIGHT, NOW)
    return None if turned is None else (turned.refusal.code, turned.retry_after_s)


def test_what_may_wait() -> None:
    assert admit(EMPTY) is None
    assert admit(FrontLoad(7, 0, Bytes(0))) is None
    for load in (FrontLoad(8, 0, Bytes(0)), FrontLoad(0, 6, Bytes(0)), FrontLoad(1, 1, Bytes(995))):
        turned = admit(load)
        assert turned is not None
        assert turned[0] is Code.OVERLOADED
        assert turned[1] is not None
        assert turned[1] > 0
    assert admit(EMPTY, size=5000) is None, "one request alone always fits: its size has a cap of its own"


def test_more_may_wait_for_another_region_whose_replicas_are_not_seen_here() -> None:
    way = replace(endpoint("a"), kind=EndpointKind.GATEWAY, region="east", agreement="ag-1")
    limits = replace(TIGHT, per_way=9, per_tenant=100)
    for load, expected in ((12, None), (13, Code.OVERLOADED)):
        turned = routing.admit(
            route(way, endpoint("b")), {}, set(), FrontLoad(load, 0, Bytes(0)), Seconds(1.0), Bytes(1), limits, NOW
        )
        assert (turned and turned.refusal.code) == expected


def test_a_burst_waits_as_far_as_its_deadline_and_its_bytes_allow() -> None:
    """As LoadGen's Offline scenario sends it: all at once, and an answer at any time is in time."""
    quick = ReplicaHealth(outstanding=1000, service_s=Seconds(0.001))

    def admission_code(left_s: float, waiting: int = 1000, held: int = 0) -> Code | None:
        load = FrontLoad(waiting, waiting, Bytes(held))
        found = routing.admit(
            route(endpoint("a")), {"a": quick}, set(), load, Seconds(left_s), Bytes(2**10), AdmissionLimits(), NOW
        )
        return found.refusal.code if found is not None else None

    assert admission_code(60.0) is None
    assert admission_code(0.5) is Code.OVERLOADED, "the answer would come after 1 s"
    assert admission_code(60.0, waiting=1024) is Code.OVERLOADED
    assert admission_code(60.0, held=AdmissionLimits().total_bytes) is Code.OVERLOADED


def test_what_waits_for_its_turn_at_the_front_counts_as_ahead() -> None:
    """Four at the replica and 36 that wait for a slot: together they take as long as 40 at the replica."""
    busy = ReplicaHealth(outstanding=4, service_s=Seconds(0.1))

    def is_refused(waiting: int) -> bool:
        load = FrontLoad(4 + waiting, 0, Bytes(0))
        found = routing.admit(
            route(endpoint("a")), {"a": busy}, set(), load, Seconds(2.0), Bytes(1), AdmissionLimits(), NOW
        )
        return found is not None

    assert not is_refused(0)
    assert is_refused(36)


def test_what_cannot_be_met_in_time_is_refused_at_once() -> None:
    slow = ReplicaHealth(outstanding=4, service_s=Seconds(0.5))
    assert admit(EMPTY, left_s=3.0, a=slow, b=slow) is None
    turned = admit(EMPTY, left_s=1.0, a=slow, b=slow)
    assert turned is not None
    assert turned[0] is Code.OVERLOADED
    assert turned[1] == pytest.approx(1.5)
    assert admit(EMPTY, left_s=1.0, a=slow) is None, "the other replica is free"
    idle = ReplicaHealth(service_s=Seconds(60.0))
    assert admit(EMPTY, left_s=1.0, a=idle, b=idle) is None, "an old estimate never locks a replica out"


def afar(road_s: float, rate: float, waiting: int) -> ReplicaHealth:
    """As a front knows a replica that has answered `rate` a second for long, with `waiting` in its queue each time."""
    health, ahead = ReplicaHealth(outstanding=1), int(road_s * rate) + waiting
    for n in range(400):
        latency, now = road_s + (waiting + 1) / rate, Elapsed(NOW + n / rate)
        health = routing.record_answer(health, Seconds(latency), ahead, now, Seconds(road_s))._replace(outstanding=1)
    return health._replace(outstanding=ahead)


def test_those_on_a_long_road_take_nobody_s_place_in_the_queue() -> None:
    limits = AdmissionLimits(per_replica=128, per_way=512, per_tenant=10_000)
    where = route(endpoint("a"))

    def is_refused(waiting: int, rtt_s: float) -> bool:
        health = afar(rtt_s, 350.0, waiting)
        load = FrontLoad(health.outstanding, 0, Bytes(0))
        return routing.admit(where, {"a": health}, set(), load, Seconds(2.0), Bytes(1), limits, NOW) is not None

    for road_s in (0.002, 0.03, 0.1, 0.3):
        assert not is_refused(120, road_s), road_s
        assert is_refused(130, road_s), road_s
    assert not is_refused(127, 0.0)
    assert is_refused(128, 0.0)


@pytest.mark.parametrize("in_one_burst", [1, 4, 16])
def test_room_in_transit_does_not_depend_on_when_in_a_burst_a_request_comes(in_one_burst: int) -> None:
    """Sixteen requests under way over 100 ms; their answers arrive evenly, or all at the same instant of each RTT."""
    limits = AdmissionLimits(per_replica=8, per_way=512, per_tenant=10_000)
    rtt_s, latency_s, at_once = Seconds(0.1), Seconds(0.101), 16
    health = ReplicaHealth(outstanding=at_once)
    for n in range(10 * at_once):
        now = Elapsed(NOW + (n // in_one_burst) * in_one_burst * latency_s / at_once)
        health = routing.record_answer(health, latency_s, 0, now, rtt_s)
        if n > 2 * at_once:
            load = FrontLoad(at_once + limits.per_replica - 1, 0, Bytes(0))
            assert (
                routing.admit(route(endpoint("a")), {"a": health}, set(), load, Seconds(30.0), Bytes(1), limits, now)
                is None
            )
            load = FrontLoad(at_once + limits.per_replica + 1, 0, Bytes(0))
            assert routing.admit(route(endpoint("a")), {"a": health}, set(), load, Seconds(30.0), Bytes(1), limits, now)
        health = health._replace(outstanding=at_once)


def test_a_pause_of_a_machine_takes_no_room_for_what_is_in_transit() -> None:
    """Sixteen are answered in each RTT; then, for five RTTs, only one: the connection still holds sixteen."""
    limits = AdmissionLimits(per_replica=8, per_way=512, per_tenant=10_000)
    rtt_s, health, now = Seconds(0.1), ReplicaHealth(outstanding=24), NOW

    def is_refused() -> bool:
        load = FrontLoad(23, 0, Bytes(0))
        return (
            routing.admit(route(endpoint("a")), {"a": health}, set(), load, Seconds(30), Bytes(1), limits, now)
            is not None
        )

    for answers, rounds, refused in ((16, 3, False), (1, 5, False), (1, 10, True)):
        for _ in range(rounds):
            now = Elapsed(now + 0.101)
            for _ in range(answers):
                health = routing.record_answer(health, Seconds(0.101), 0, now, rtt_s)._replace(outstanding=24)
        assert is_refused() is refused, (answers, rounds)


def test_a_burst_over_a_long_road_is_not_taken_for_a_long_queue() -> None:
    alone = routing.record_answer(ReplicaHealth(outstanding=1), Seconds(0.105), 0, NOW, Seconds(0.1))
    crowded = alone._replace(outstanding=40)
    turned = routing.admit(
        route(endpoint("a")),
        {"a": crowded},
        set(),
        FrontLoad(40, 0, Bytes(0)),
        Seconds(1.0),
        Bytes(1),
        AdmissionLimits(),
        NOW,
    )
    assert turned is None


def test_nobody_serves_it() -> None:
    waiting = route(code="MEMORY_SHORT", reason="12 MiB free, 40 MiB needed")
    turned = routing.admit(waiting, {}, set(), EMPTY, Seconds(1.0), Bytes(1), TIGHT, NOW)
    assert turned is not None
    assert turned.refusal.code is Code.MODEL_NOT_READY
    assert "MEMORY_SHORT" in turned.refusal.found
    assert turned.retry_after_s is not None


def test_service_time_is_learnt_from_answers() -> None:
    health = ReplicaHealth()
    for _ in range(30):
        health = routing.record_answer(routing.record_sent(health), Seconds(0.4), 3, NOW)
    assert health.service_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("code", "found"), [("MODEL_NOT_READY", "it loads"), ("NO_CANDIDATE", "NO_CANDIDATE: it loads"), ("", "it loads")]
)
def test_a_route_without_a_replica_says_its_code_once(code: str, found: str) -> None:
    refusal = routing._no_replica(route(code=code, reason="it loads"))
    assert (refusal.code, refusal.found) == (Code.MODEL_NOT_READY, found)
