"""Routing: which replica, whose fault, what is turned away."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core import routing
from shoal.agent.core.routing import Condemned, Fault, Health, Limits, Load, Next, Suspects, Tries
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


def picked(found: Endpoint | Refusal) -> str:
    assert isinstance(found, Endpoint), found
    return found.assignment


def test_what_was_forwarded_here_keeps_to_this_nodes_own_table() -> None:
    def here(name: str, weight: float = 1.0, state: EndpointState = EndpointState.READY) -> Endpoint:
        return endpoint(name, weight, state, EndpointKind.LOCAL)

    old, new, peers = here("old", 0.75), here("new", 0.25), endpoint("peers")
    assert routing.arrived((old, new, peers), ("old", "new")) == (old, new)
    assert routing.arrived((old, peers), ("old", "new")) == (old,), "ready, and not to take requests yet"
    assert routing.arrived((old, here("new", 0.0)), ("old", "new")) == (old,)
    assert routing.arrived((old, new), ("new",)) == (new,), "the other has no worker any more"
    standby = here("by", state=EndpointState.STANDBY)
    assert routing.arrived((standby,), ("by",)) == (standby,)
    for listed in ((), (peers,), (here("new", 0.0),), (here("new", 1.0, EndpointState.DRAINING),)):
        (found,) = routing.arrived(listed, ("new",))
        assert (found.assignment, found.weight, found.state) == ("new", 1.0, EndpointState.READY), (
            "the sender knows more"
        )


def test_a_request_does_not_wait_for_a_way_to_open_while_another_is_open() -> None:
    both = route(endpoint("near"), endpoint("far", weight=9.0))

    def chosen(health: dict[str, Health], opening: set[str]) -> Endpoint | Refusal:
        return routing.choose(both, health, set(), set(), "", NOW, 1, opening)

    assert picked(chosen({}, {"far"})) == "near"
    assert picked(chosen({"near": Health(outstanding=50)}, {"far"})) == "near"
    assert picked(chosen({"near": Health(ejected_until=Elapsed(NOW + 1))}, {"far"})) == "far", (
        "better late than nowhere"
    )
    assert {picked(chosen({}, {"far", "near"}))} <= {"far", "near"}


HEALTH = st.builds(
    Health,
    outstanding=st.integers(0, 5),
    failures=st.integers(0, 3),
    ejected_until=st.none() | st.floats(90, 110).map(Elapsed),
    service_s=st.none() | st.floats(0.001, 1).map(Seconds),
)


def takes(health: Health) -> bool:
    over = health.ejected_until is not None and health.ejected_until <= NOW and health.outstanding == 0
    return health.ejected_until is None or over


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Route, dict[str, Health], frozenset[str]]:
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
    scene: tuple[Route, dict[str, Health], frozenset[str]], seed: int, session: str
) -> None:
    where, health, here = scene
    states = {
        e.assignment: e.state
        for e in where.endpoints
        if e.weight > 0 and (e.kind is not EndpointKind.LOCAL or e.assignment in here)
    }
    at_work = {name for name, state in states.items() if state is EndpointState.READY}
    relieved = not any(takes(health.get(name, Health())) for name in at_work)
    fit = at_work | {name for name, state in states.items() if state is EndpointState.STANDBY and relieved}
    tried: list[str] = []
    while True:
        found = routing.choose(where, health, here, frozenset(tried), session, NOW, seed)
        assert found == routing.choose(where, health, here, frozenset(tried), session, NOW, seed)
        if isinstance(found, Refusal):
            assert found.code is (Code.REPLICA_UNREACHABLE if fit else Code.MODEL_NOT_READY)
            break
        assert found.assignment in fit
        assert found.assignment not in tried
        well = [n for n in fit - set(tried) if (h := health.get(n)) is None or h.ejected_until is None]
        state = health.get(found.assignment, Health())
        if well and state.ejected_until is not None:
            assert state.ejected_until <= NOW
            assert state.outstanding == 0
        tried.append(found.assignment)
    assert set(tried) == fit


def test_a_standby_takes_requests_only_while_all_others_are_ejected() -> None:
    where = route(endpoint("a"), endpoint("b"), endpoint("s", state=EndpointState.STANDBY))
    out = Health(failures=1, ejected_until=Elapsed(NOW + 1))

    def takers(**health: Health) -> set[str]:
        found = (routing.choose(where, health, set(), set(), "", NOW, n) for n in range(50))
        return {picked(each) for each in found}

    assert takers() == {"a", "b"}
    assert takers(a=Health(outstanding=60), b=Health(outstanding=60)) == {"a", "b"}, "a crowd is no failure"
    assert takers(a=out) == {"b"}
    assert takers(a=out, b=out) == {"s"}
    assert takers(a=out, b=replace(out, ejected_until=NOW)) == {"b"}, "one that may be back is tried first"
    assert takers(a=out, b=out, s=out) == {"a", "b", "s"}, "nothing else is left"
    assert picked(routing.choose(where, {"a": out, "b": out}, set(), {"a", "s"}, "", NOW, 1)) == "b"
    assert routing.ready(where, {"a": out, "b": out}, set(), NOW)
    assert not routing.ready(where, {"a": out, "b": out, "s": out}, set(), NOW)


def test_a_standby_is_all_there_is() -> None:
    where = route(endpoint("s", state=EndpointState.STANDBY))
    assert picked(routing.choose(where, {}, set(), set(), "", NOW, 1)) == "s"
    assert routing.admit(where, {}, set(), EMPTY, Seconds(1.0), Bytes(1), TIGHT, NOW) is None
    here = route(endpoint("s", state=EndpointState.STANDBY, kind=EndpointKind.LOCAL))
    assert isinstance(routing.choose(here, {}, set(), set(), "", NOW, 1), Refusal)
    assert picked(routing.choose(here, {}, {"s"}, set(), "", NOW, 1)) == "s"


def test_a_request_that_failed_on_the_last_active_replica_goes_to_the_standby() -> None:
    where = route(endpoint("a"), endpoint("s", state=EndpointState.STANDBY))
    health = {"a": routing.failed(routing.sent(Health()), "a", Fault.REPLICA, NOW)}
    assert picked(routing.choose(where, health, set(), {"a"}, "", NOW, 1)) == "s"
    busy = {"a": routing.failed(routing.sent(Health()), "a", Fault.BUSY, NOW)}
    assert isinstance(routing.choose(where, busy, set(), {"a"}, "", NOW, 1), Refusal)


def test_light_load_is_shared_by_weights() -> None:
    where = route(endpoint("a", 3.0), endpoint("b", 1.0))
    count = Counter(picked(routing.choose(where, {}, frozenset(), frozenset(), "", NOW, n)) for n in range(4000))
    assert count["a"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_busy_replica_gives_way_to_the_least_crowded_for_its_weight() -> None:
    where = route(endpoint("a"), endpoint("b"))
    health = {"a": Health(outstanding=3), "b": Health(outstanding=1)}
    assert {picked(routing.choose(where, health, set(), set(), "", NOW, n)) for n in range(50)} == {"b"}
    canary = route(endpoint("a", 9.0), endpoint("b", 1.0))
    one = {"a": Health(outstanding=1)}
    count = Counter(picked(routing.choose(canary, one, set(), set(), "", NOW, n)) for n in range(1000))
    assert count["b"] < 200, "a step of a migration stays near its weight"


def test_sessions_stay_together_and_move_only_when_they_must() -> None:
    where = route(*(endpoint(f"a{n}") for n in range(4)))
    sessions = [f"s{n}" for n in range(100)]
    homes = {s: picked(routing.choose(where, {}, set(), set(), s, NOW, 1)) for s in sessions}
    again = {s: picked(routing.choose(where, {}, set(), set(), s, NOW, 2)) for s in sessions}
    assert homes == again
    assert len(set(homes.values())) == 4
    fewer = route(*where.endpoints[1:])
    moved = {s: picked(routing.choose(fewer, {}, set(), set(), s, NOW, 1)) for s in sessions}
    assert all(moved[s] == home for s, home in homes.items() if home != "a0")


def test_an_ejected_replica_is_probed_back_with_one_request() -> None:
    where = route(endpoint("a"), endpoint("b"))
    bad = routing.failed(routing.sent(Health()), "a", Fault.REPLICA, NOW)
    assert bad.ejected_until is not None
    health = {"a": bad}
    assert {picked(routing.choose(where, health, set(), set(), "", NOW, n)) for n in range(50)} == {"b"}
    later = Elapsed(bad.ejected_until)
    seen = {picked(routing.choose(where, health, set(), set(), "", later, n)) for n in range(50)}
    assert seen == {"a", "b"}
    probing = {"a": routing.sent(bad)}
    assert {picked(routing.choose(where, probing, set(), set(), "", later, n)) for n in range(50)} == {"b"}
    well = routing.answered(routing.sent(bad), Seconds(0.1), 0, later)
    assert (well.failures, well.ejected_until, well.outstanding) == (0, None, 0)


def test_the_only_replica_is_tried_even_when_ejected() -> None:
    bad = {"a": routing.failed(routing.sent(Health()), "a", Fault.CRASH, NOW)}
    assert picked(routing.choose(route(endpoint("a")), bad, set(), set(), "", NOW, 1)) == "a"
    assert not routing.ready(route(endpoint("a")), bad, set(), NOW)


def test_back_off_grows_but_one_death_counts_once() -> None:
    health = Health(outstanding=3)
    for _ in range(3):
        health = routing.failed(health, "a", Fault.CRASH, NOW)
    assert (health.failures, health.outstanding) == (1, 0)
    spans = []
    now = NOW
    for _ in range(12):
        health = routing.failed(routing.sent(health), "a", Fault.REPLICA, now)
        assert health.ejected_until is not None
        spans.append(health.ejected_until - now)
        now = Elapsed(health.ejected_until)
    assert spans[-1] > 10 * spans[0]
    assert max(spans) <= routing.EJECT_CAP_S


def test_a_replica_that_hangs_is_ejected_after_some_deadlines() -> None:
    health = Health()
    for _ in range(routing.LATE_LIMIT):
        assert health.ejected_until is None
        health = routing.failed(routing.sent(health), "a", Fault.LATE, NOW)
    assert health.ejected_until is not None


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (Code.INVALID_ARGUMENT, Fault.REQUEST),
        (Code.RUNTIME_FAILED, Fault.REQUEST),
        (Code.REQUEST_CRASHED_WORKER, Fault.REQUEST),
        (Code.OVERLOADED, Fault.BUSY),
        (Code.DEADLINE_EXCEEDED, Fault.LATE),
        (Code.MODEL_NOT_READY, Fault.REPLICA),
        (Code.REPLICA_UNREACHABLE, Fault.REPLICA),
        (Code.CERT_EXPIRED, Fault.REPLICA),
        (Code.WORKER_CRASHED, Fault.CRASH),
    ],
)
def test_whose_fault(code: Code, fault: Fault) -> None:
    assert routing.fault_of(code) is fault


FIRST = Tries()
CRASHED = Tries(frozenset({"a"}), frozenset())


@pytest.mark.parametrize(
    ("fault", "tries", "idempotent", "sent", "expected"),
    [
        (Fault.REQUEST, FIRST, True, True, Next.DELIVER),
        (Fault.LATE, FIRST, True, True, Next.DELIVER),
        (Fault.BUSY, FIRST, True, True, Next.RETRY),
        (Fault.REPLICA, FIRST, True, True, Next.RETRY),
        (Fault.REPLICA, CRASHED, True, True, Next.RETRY),
        (Fault.CRASH, FIRST, True, True, Next.RETRY),
        (Fault.CRASH, CRASHED, True, True, Next.CONDEMN),
        (Fault.CRASH, FIRST, False, True, Next.DELIVER),
        (Fault.REPLICA, FIRST, False, True, Next.DELIVER),
        (Fault.REPLICA, FIRST, False, False, Next.RETRY),
        (Fault.BUSY, FIRST, False, True, Next.RETRY),
    ],
)
def test_what_becomes_of_a_failure(fault: Fault, tries: Tries, idempotent: bool, sent: bool, expected: Next) -> None:
    assert routing.judge(fault, tries, idempotent=idempotent, sent=sent) is expected


@pytest.mark.parametrize(
    ("first", "second", "blamed"),
    [
        (None, frozenset(), False),
        (frozenset(), frozenset(), True),
        (frozenset({b"x"}), frozenset({b"y"}), True),
        (frozenset({b"x"}), frozenset(), True),
        (frozenset({b"x", b"y"}), frozenset({b"x", b"y"}), False),
    ],
)
def test_a_request_is_blamed_only_if_nothing_else_explains_both_crashes(
    first: frozenset[bytes] | None, second: frozenset[bytes], blamed: bool
) -> None:
    assert routing.blamed(Tries(frozenset(), first), second) is blamed


TIGHT = Limits(per_replica=4, per_tenant=6, total_bytes=1000)
EMPTY = Load(0, 0, Bytes(0))


def admit(load: Load, left_s: float = 10.0, size: int = 10, **health: Health) -> tuple[Code, float | None] | None:
    where = route(endpoint("a"), endpoint("b"))
    turned = routing.admit(where, health, set(), load, Seconds(left_s), Bytes(size), TIGHT, NOW)
    return None if turned is None else (turned.refusal.code, turned.retry_after_s)


def test_what_may_wait() -> None:
    assert admit(EMPTY) is None
    assert admit(Load(7, 0, Bytes(0))) is None
    for load in (Load(8, 0, Bytes(0)), Load(0, 6, Bytes(0)), Load(1, 1, Bytes(995))):
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
            route(way, endpoint("b")), {}, set(), Load(load, 0, Bytes(0)), Seconds(1.0), Bytes(1), limits, NOW
        )
        assert (turned and turned.refusal.code) == expected


def test_what_cannot_be_met_in_time_is_refused_at_once() -> None:
    slow = Health(outstanding=4, service_s=Seconds(0.5))
    assert admit(EMPTY, left_s=3.0, a=slow, b=slow) is None
    turned = admit(EMPTY, left_s=1.0, a=slow, b=slow)
    assert turned is not None
    assert turned[0] is Code.OVERLOADED
    assert turned[1] == pytest.approx(1.5)
    assert admit(EMPTY, left_s=1.0, a=slow) is None, "the other replica is free"
    idle = Health(service_s=Seconds(60.0))
    assert admit(EMPTY, left_s=1.0, a=idle, b=idle) is None, "an old estimate never locks a replica out"


def afar(road_s: float, rate: float, waiting: int) -> Health:
    """As a front knows a replica that has answered `rate` a second for long, with `waiting` in its queue each time."""
    health, ahead = Health(outstanding=1), int(road_s * rate) + waiting
    for n in range(400):
        latency, now = road_s + (waiting + 1) / rate, Elapsed(NOW + n / rate)
        health = replace(routing.answered(health, Seconds(latency), ahead, now, Seconds(road_s)), outstanding=1)
    return replace(health, outstanding=ahead)


def test_those_on_a_long_road_take_nobody_s_place_in_the_queue() -> None:
    limits = Limits(per_replica=128, per_way=512, per_tenant=10_000)
    where = route(endpoint("a"))

    def turned(waiting: int, road_s: float) -> bool:
        health = afar(road_s, 350.0, waiting)
        load = Load(health.outstanding, 0, Bytes(0))
        return routing.admit(where, {"a": health}, set(), load, Seconds(2.0), Bytes(1), limits, NOW) is not None

    for road_s in (0.002, 0.03, 0.1, 0.3):
        assert not turned(120, road_s), road_s
        assert turned(130, road_s), road_s
    assert not turned(127, 0.0)
    assert turned(128, 0.0)


def test_a_burst_over_a_long_road_is_not_taken_for_a_long_queue() -> None:
    alone = routing.answered(Health(outstanding=1), Seconds(0.105), 0, NOW, Seconds(0.1))
    crowded = replace(alone, outstanding=40)
    turned = routing.admit(
        route(endpoint("a")), {"a": crowded}, set(), Load(40, 0, Bytes(0)), Seconds(1.0), Bytes(1), Limits(), NOW
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
    health = Health()
    for _ in range(30):
        health = routing.answered(routing.sent(health), Seconds(0.4), 3, NOW)
    assert health.service_s == pytest.approx(0.1)


def test_condemned_requests_are_forgotten_in_time_and_in_number() -> None:
    condemned = Condemned(keep_s=10.0, size=3)
    for n in range(5):
        condemned.add(bytes([n]), NOW)
    assert len(condemned) == 3
    assert condemned.left_s(b"\x00", NOW) is None
    assert condemned.left_s(b"\x04", Elapsed(NOW + 4)) == pytest.approx(6.0)
    assert condemned.left_s(b"\x04", Elapsed(NOW + 10)) is None
    assert len(condemned) == 2


def test_a_suspect_stays_one_until_it_is_answered_or_its_time_is_over() -> None:
    suspects = Suspects(keep_s=10.0, size=3)
    assert suspects.crashed_with(b"p", NOW) is None
    suspects.add(b"p", frozenset({b"x", b"y"}), NOW)
    suspects.add(b"x", frozenset({b"p", b"y"}), NOW)
    suspects.answered(b"x")
    assert suspects.crashed_with(b"x", NOW) is None
    assert suspects.crashed_with(b"p", NOW) == frozenset({b"y"}), "x has been answered: it explains no crash"
    assert suspects.crashed_with(b"p", Elapsed(NOW + 10)) is None
    for n in range(5):
        suspects.add(bytes([n]), frozenset(), NOW)
    assert len(suspects) == 3
