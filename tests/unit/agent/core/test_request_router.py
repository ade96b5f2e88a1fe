"""The routing state of a front, and the attempts of a request along it."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core import routing
from shoal.agent.core.crashes import Crash
from shoal.agent.core.request_attempts import NO_REPLICA_RETRY_S, RequestAttempts
from shoal.agent.core.request_router import BegunAttempt, RequestRouter
from shoal.agent.core.route_tables import RequestEntry
from shoal.agent.core.routing import AdmissionLimits, AdmissionRefusal, AttemptFault, RetryDecision
from shoal.types.codes import Code, Refusal
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "reader")
NOW = Elapsed(100.0)
EXPIRES_AT = Elapsed(NOW + 10.0)
TEN_BYTES = Bytes(10)
FRONT_TIMEOUT_S = Seconds(60.0)
TIGHT = AdmissionLimits(per_replica=2, per_way=2, per_tenant=100, total_bytes=1000)


@dataclass(frozen=True)
class Worker:
    assignment: str
    nonce: str = "1"
    workload: WorkloadKey = KEY


@dataclass(eq=False)
class Request:
    """Implements RoutedRequest."""

    digest: bytes = b"one"
    session: str = ""
    expires_at: Elapsed = EXPIRES_AT
    arrived_at: Elapsed = NOW
    key: WorkloadKey = KEY
    payer: str = "acme"
    size: Bytes = TEN_BYTES
    crash: Crash | None = None
    has_crashed_elsewhere: bool = False


def endpoint(name: str, kind: EndpointKind = EndpointKind.LOCAL, weight: float = 1.0) -> Endpoint:
    return Endpoint(name, "n", kind, "" if kind is EndpointKind.LOCAL else "n:1", weight, EndpointState.READY)


def route(*endpoints: Endpoint) -> Route:
    return Route(KEY, 1, endpoints)


BOTH = route(endpoint("a"), endpoint("b"))


def router_of(where: Route = BOTH, *, limits: AdmissionLimits = TIGHT) -> RequestRouter:
    router = RequestRouter(limits, FRONT_TIMEOUT_S)
    router.configure((where,), [Worker(each.assignment) for each in where.endpoints])
    return router


def is_open(endpoint: Endpoint) -> bool:
    """No connection is opening."""
    return False


def fail(router: RequestRouter, name: str, code: Code, request: Request, now: Elapsed = NOW) -> AttemptFault:
    return router.on_failure(router.begin_attempt(endpoint(name), request, now), code, now)


def choices(router: RequestRouter, now: Elapsed = NOW) -> set[str]:
    """What new requests are sent to."""
    found = [router.choose(BOTH, frozenset(), "", now, seed) for seed in range(50)]
    return {each.assignment for each in found if isinstance(each, Endpoint)}


def next_of(attempts: RequestAttempts, now: Elapsed = NOW) -> Endpoint:
    found = attempts.next_endpoint(now, is_open)
    assert isinstance(found, Endpoint), found
    return found


def test_a_replica_that_failed_is_left_alone_until_it_answers() -> None:
    router = router_of()
    assert choices(router) == {"a", "b"}
    assert fail(router, "a", Code.REPLICA_UNREACHABLE, Request()) is AttemptFault.REPLICA
    assert choices(router) == {"b"}
    assert router.ejected_count(NOW) == 1
    later = Elapsed(NOW + routing.EJECT_CAP_S)
    assert router.ejected_count(later) == 0
    begun = router.begin_attempt(endpoint("a"), Request(), later)
    assert choices(router, later) == {"b"}, "one at a time"
    router.on_answer(begun, Elapsed(later + 0.1), Seconds(0.0))
    assert choices(router, later) == {"a", "b"}


def test_a_restarted_worker_starts_with_fresh_health_and_what_is_under_way_is_counted_on() -> None:
    router = router_of()
    begun = router.begin_attempt(endpoint("a"), Request(), NOW)
    fail(router, "a", Code.WORKER_CRASHED, Request(b"two"))
    router.configure((BOTH,), (Worker("a"), Worker("b")))
    assert router.ejected_count(NOW) == 1, "the same process"
    router.configure((BOTH,), (Worker("a", "2"), Worker("b")))
    assert router.ejected_count(NOW) == 0
    assert router.outstanding() == (("a", 1), ("b", 0))
    router.on_withdrawal(begun)
    assert router.outstanding() == (("a", 0), ("b", 0))


def test_a_replica_that_is_listed_no_more_is_forgotten_once_nothing_is_under_way() -> None:
    router = router_of()
    begun = router.begin_attempt(endpoint("a"), Request(), NOW)
    fail(router, "a", Code.WORKER_CRASHED, Request(b"two"))
    only = route(endpoint("b"))
    router.configure((only,), (Worker("b"),))
    assert router.ejected_count(NOW) == 1
    router.on_withdrawal(begun)
    router.configure((only,), (Worker("b"),))
    assert router.ejected_count(NOW) == 0


def test_a_draining_worker_gets_nothing_new() -> None:
    router = router_of()
    router.configure((BOTH,), (Worker("b"),))
    assert choices(router) == {"b"}
    router.configure((BOTH,), ())
    assert isinstance(router.choose(BOTH, frozenset(), "", NOW, 1), Refusal)
    assert not router.has_ready_replica(BOTH, NOW)
    assert router.tables.find(KEY, RequestEntry.FORWARD) is None


def test_room_is_held_while_a_request_is_inside() -> None:
    router = router_of(route(endpoint("a")))
    where = route(endpoint("a"))
    inside = Request(), Request()
    for each in inside:
        router.enter(each)
    assert router.in_flight == 2
    refused = router.admit(Request(), where)
    assert refused is not None
    assert refused.refusal.code is Code.OVERLOADED
    other = Request(key=WorkloadKey("acme", "writer"))
    assert router.admit(other, where) is None, "room is counted by workload"
    for each in inside:
        router.leave(each)
    assert router.in_flight == 0
    assert router.admit(Request(), where) is None


def test_bytes_and_shares_of_a_payer_are_counted_too() -> None:
    where = route(endpoint("a"))
    small = AdmissionLimits(per_replica=100, per_tenant=2, total_bytes=35)
    router = router_of(where, limits=small)
    other = Request(payer="other", key=WorkloadKey("other", "reader"))
    for _ in range(2):
        router.enter(Request())
    assert router.admit(Request(), where) is not None
    assert router.admit(other, where) is None
    router.enter(other)
    assert router.admit(Request(payer="third"), where) is not None, "30 bytes inside, and 10 more"


def test_a_step_of_a_session_goes_wherever_that_may_be_kept() -> None:
    leaving = route(endpoint("a", weight=0.0))
    router = router_of(leaving)
    assert router.admit(Request(), leaving) is not None
    assert router.admit(Request(), leaving, keeping=frozenset()) is None
    router.configure((leaving,), ())
    assert router.admit(Request(), leaving, keeping=frozenset()) is not None
    assert router.admit(Request(), leaving, keeping=frozenset({"a"})) is None, "its worker will be back"
    assert router.admit(Request(), None) is None, "it was admitted where it entered"


def test_a_connection_that_is_opening_is_avoided_while_another_is_open() -> None:
    far = route(endpoint("a", EndpointKind.AGENT), endpoint("b", EndpointKind.AGENT))
    router = router_of(far)

    def pick(seed: int, opening: set[str], session: str = "") -> str:
        found = router.choose_connected(
            far, frozenset(), session, NOW, seed, lambda endpoint: endpoint.assignment in opening
        )
        assert isinstance(found, Endpoint)
        return found.assignment

    assert {pick(seed, {"a"}) for seed in range(50)} == {"b"}
    assert {pick(seed, {"a", "b"}) for seed in range(50)} == {"a", "b"}, "one of them must be waited for"
    assert {pick(1, set(), f"s{number}") for number in range(50)} == {"a", "b"}
    assert all(pick(1, {"a"}, f"s{n}") == pick(1, set(), f"s{n}") for n in range(50)), "a session meets its replica"


def test_a_request_is_tried_once_on_each_replica() -> None:
    router, request = router_of(), Request()
    attempts = RequestAttempts(router, BOTH, request, 1)
    tried = list[str]()
    for _ in range(2):
        picked = next_of(attempts)
        fail(router, picked.assignment, Code.REPLICA_UNREACHABLE, request)
        decision = attempts.on_failure(picked, Code.REPLICA_UNREACHABLE, NOW)
        assert decision is RetryDecision.RETRY
        tried.append(picked.assignment)
    assert sorted(tried) == ["a", "b"]
    over = attempts.next_endpoint(NOW, is_open)
    assert isinstance(over, AdmissionRefusal)
    assert (over.refusal.code, over.retry_after_s) == (Code.REPLICA_UNREACHABLE, NO_REPLICA_RETRY_S)


def test_a_request_is_tried_no_more_after_its_deadline() -> None:
    attempts = RequestAttempts(router_of(), BOTH, Request(), 1)
    over = attempts.next_endpoint(Elapsed(NOW + 10.0), is_open)
    assert isinstance(over, AdmissionRefusal)
    assert (over.refusal.code, over.retry_after_s) == (Code.DEADLINE_EXCEEDED, None)


@pytest.mark.parametrize(
    ("code", "decision"),
    [
        (Code.INVALID_ARGUMENT, RetryDecision.RETURN_ERROR),
        (Code.OVERLOADED, RetryDecision.RETRY),
        (Code.REPLICA_UNREACHABLE, RetryDecision.RETRY),
        (Code.MODEL_NOT_READY, RetryDecision.RETRY),
    ],
)
@pytest.mark.parametrize("session", ["", "s"])
def test_what_follows_from_a_failure(code: Code, session: str, decision: RetryDecision) -> None:
    """A sequence that a workload without state is told of is where its requests go first, and no reason to lose one."""
    router, request = router_of(), Request(session=session)
    attempts = RequestAttempts(router, BOTH, request, 1)
    picked = next_of(attempts)
    fail(router, picked.assignment, code, request)
    assert attempts.on_failure(picked, code, NOW) is decision


def crash_everywhere(router: RequestRouter, request: Request) -> RetryDecision:
    """The last decision, once the request has ended a worker or two."""
    attempts = RequestAttempts(router, BOTH, request, 1)
    while True:
        picked = next_of(attempts)
        fail(router, picked.assignment, Code.WORKER_CRASHED, request)
        router.suspect_after(Code.WORKER_CRASHED, request, NOW)
        decision = attempts.on_failure(picked, Code.WORKER_CRASHED, NOW)
        if decision is not RetryDecision.RETRY:
            return decision


def test_a_second_crash_is_left_to_the_front_that_saw_the_first() -> None:
    router, request = router_of(), Request(has_crashed_elsewhere=True)
    assert crash_everywhere(router, request) is RetryDecision.RETURN_ERROR
    assert router.admit(Request(), BOTH) is None, "nothing is blocked for one crash here"
    busy = RequestAttempts(router, BOTH, request, 1)
    fail(router, "a", Code.OVERLOADED, request)
    assert busy.on_failure(endpoint("a"), Code.OVERLOADED, NOW) is RetryDecision.RETRY


@pytest.mark.parametrize(("region", "blocked"), [("", True), ("us-east", False)])
def test_what_another_front_blames_is_refused_here_too_but_another_region_blocks_nothing(
    region: str, *, blocked: bool
) -> None:
    router, request = router_of(), Request()
    begun = router.begin_attempt(replace(endpoint("b", EndpointKind.AGENT), region=region), request, NOW)
    router.on_failure(begun, Code.REQUEST_CRASHED_WORKER, NOW)
    assert (router.admit(Request(), BOTH) is not None) is blocked
    assert router.admit(Request(digest=b"two"), BOTH) is None


def test_a_request_that_ends_two_workers_is_refused_for_a_while() -> None:
    router = router_of()
    assert crash_everywhere(router, Request()) is RetryDecision.BLOCK
    again = router.admit(Request(), BOTH)
    assert again is not None
    assert again.refusal.code is Code.REQUEST_CRASHED_WORKER
    assert again.retry_after_s is not None
    assert router.admit(Request(), None) is not None, "nor where it is forwarded to"
    assert router.admit(Request(b"two"), BOTH) is None
    much_later = Elapsed(NOW + 3600.0)
    assert router.admit(Request(arrived_at=much_later, expires_at=Elapsed(much_later + 1.0)), BOTH) is None


def test_a_suspect_is_cleared_by_an_answer() -> None:
    router, request = router_of(), Request()
    assert not router.is_suspect(request, NOW)
    fail(router, "a", Code.WORKER_CRASHED, request)
    router.suspect_after(Code.WORKER_CRASHED, request, NOW)
    assert router.is_suspect(request, NOW)
    assert router.is_suspect(Request(), NOW), "whoever sends the same again"
    assert router.has_suspects
    router.clear_suspicion(request)
    assert not router.is_suspect(request, NOW)
    assert not router.has_suspects


def test_a_failure_that_is_no_crash_makes_no_suspect() -> None:
    router, request = router_of(), Request()
    fail(router, "a", Code.REPLICA_UNREACHABLE, request)
    router.suspect_after(Code.REPLICA_UNREACHABLE, request, NOW)
    assert not router.has_suspects


def test_a_deadline_that_a_client_chose_too_short_is_not_the_replicas_fault() -> None:
    router = router_of()
    begun = router.begin_attempt(endpoint("a"), Request(), NOW)
    assert router.on_failure(begun, Code.DEADLINE_EXCEEDED, Elapsed(NOW + 0.1)) is AttemptFault.CALLER
    begun = router.begin_attempt(endpoint("a"), Request(), NOW)
    late = Elapsed(NOW + FRONT_TIMEOUT_S)
    assert router.on_failure(begun, Code.DEADLINE_EXCEEDED, late) is AttemptFault.LATE


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("begin", "answer", "crash", "late", "refuse", "withdraw", "enter", "leave", "wait")),
        st.integers(0, 3),
    ),
    max_size=30,
)


@given(EVENTS, st.integers(0, 1200), st.floats(-1.0, 20.0), st.integers(0, 3))
def test_what_is_sent_at_once_would_be_admitted_and_sent_to_the_same_replica(
    events: list[tuple[str, int]], size: int, left_s: float, which: int
) -> None:
    """Of whatever is known of the replica, and of the requests before."""
    only = route(endpoint("a"))
    router = router_of(only, limits=replace(TIGHT, per_replica=4, per_tenant=5))
    assert router.sole_replica(only) == endpoint("a")
    requests = [Request(digest=bytes([number]), size=Bytes(300)) for number in range(4)]
    now, begun, inside = NOW, list[BegunAttempt](), list[Request]()
    for event, number in events:
        match event:
            case "begin":
                begun.append(router.begin_attempt(endpoint("a"), requests[number], now))
            case "answer" if begun:
                router.on_answer(begun.pop(), now, Seconds(0.0))
            case "withdraw" if begun:
                router.on_withdrawal(begun.pop())
            case "crash" | "late" | "refuse" if begun:
                code = {"crash": Code.WORKER_CRASHED, "late": Code.DEADLINE_EXCEEDED, "refuse": Code.INVALID_ARGUMENT}
                attempt = begun.pop()
                router.on_failure(attempt, code[event], now)
                router.suspect_after(code[event], attempt.request, now)
            case "enter":
                inside.append(requests[number])
                router.enter(requests[number])
            case "leave" if inside:
                router.leave(inside.pop())
            case "wait":
                now = Elapsed(now + number)
    asked = replace(requests[which], size=Bytes(size), arrived_at=now, expires_at=Elapsed(now + left_s))
    if router.takes_at_once(asked, endpoint("a"), Seconds(asked.expires_at - now)):
        assert router.admit(asked, only) is None
        assert not router.is_suspect(asked, now)
        assert router.choose(only, frozenset(), "", now, 0) == endpoint("a")
    in_turn = router.choose_in_turn(asked, only, endpoint("a"), now, 0)
    if in_turn is not None:
        assert asked.expires_at > now
        assert not router.is_suspect(asked, now)
        assert router.choose(only, frozenset(), "", now, 0) == in_turn


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(("begin", "crash", "refuse"))), max_size=20))
def test_a_choice_at_once_is_the_one_that_is_made_otherwise(events: list[tuple[str, str]]) -> None:
    router = router_of(limits=replace(TIGHT, per_replica=3))
    inside = 0
    for name, event in events:
        begun = router.begin_attempt(endpoint(name), Request(), NOW)
        if event == "begin":
            router.enter(Request())
            inside += 1
        else:
            code = Code.WORKER_CRASHED if event == "crash" else Code.INVALID_ARGUMENT
            router.on_failure(begun, code, NOW)
            router.suspect_after(code, begun.request, NOW)
    for seed in range(4):
        asked = Request(digest=b"new")
        found = router.choose_at_once(asked, BOTH, seed)
        in_turn = router.choose_in_turn(asked, BOTH, None, NOW, seed)
        is_known = any(event == "crash" for _, event in events)
        if found is None:
            assert is_known or router.admit(asked, BOTH) is not None
        else:
            assert not is_known
            assert found == router.choose(BOTH, frozenset(), "", NOW, seed)
        assert in_turn == (None if is_known else router.choose(BOTH, frozenset(), "", NOW, seed))


def test_what_is_common() -> None:
    assert router_of().is_common(BOTH)
    assert not router_of().is_common(replace(BOTH, stateful=True))


def test_a_suspect_that_nobody_asks_for_again_is_forgotten_in_time() -> None:
    only = route(endpoint("a"))
    router, suspect = router_of(only), Request(digest=b"poison")
    fail(router, "a", Code.WORKER_CRASHED, suspect)
    router.suspect_after(Code.WORKER_CRASHED, suspect, NOW)
    router.on_answer(router.begin_attempt(endpoint("a"), Request(), NOW), NOW, Seconds(0.0))
    ten_s = Seconds(10.0)
    assert not router.takes_at_once(Request(), endpoint("a"), ten_s)
    later = Elapsed(NOW + 3600.0)
    assert router.takes_at_once(Request(arrived_at=later), endpoint("a"), ten_s)


def test_a_route_with_a_choice_has_no_sole_replica() -> None:
    assert router_of().sole_replica(BOTH) is None
    for only in (
        route(endpoint("a", EndpointKind.GATEWAY)),
        route(endpoint("a", weight=0.0)),
        route(replace(endpoint("a"), state=EndpointState.DRAINING)),
    ):
        assert router_of(only).sole_replica(only) is None
    standby = route(endpoint("a"), replace(endpoint("b"), state=EndpointState.STANDBY))
    assert router_of(standby).sole_replica(standby) == endpoint("a")
    elsewhere = route(endpoint("a", EndpointKind.AGENT))
    assert router_of(elsewhere).sole_replica(elsewhere) == endpoint("a", EndpointKind.AGENT)
