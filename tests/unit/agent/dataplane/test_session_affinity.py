"""Where a session is asked for: one place after the other, as each fails."""

import pytest

from shoal.agent.core.sequences import SequenceKey, SessionStep
from shoal.agent.dataplane.session_affinity import UNREACHABLE_RETRY_S, SessionAffinity, SessionSearch
from shoal.agent.dataplane.upstream import AttemptFailed
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed
from shoal.types.workload import WorkloadKey

KEY = SequenceKey(WorkloadKey("acme", "vad"), "7")
NOW = Elapsed(100.0)
LATE = Elapsed(NOW + UNREACHABLE_RETRY_S)


def endpoint(name: str) -> Endpoint:
    return Endpoint(name, f"node-{name}", EndpointKind.AGENT, "10.0.0.1:1", 1.0, EndpointState.READY)


A, B = endpoint("a"), endpoint("b")
NOBODY = Refusal(Code.REPLICA_UNREACHABLE, "all were tried", "one that answers")


def route(*endpoints: Endpoint) -> Route:
    return Route(KEY.workload, 1, endpoints, stateful=True)


BOTH = route(A, B)


def make_search(pins: SessionAffinity, *, start: bool = False) -> SessionSearch:
    return SessionSearch(pins, KEY, SessionStep("t", b"", start, False), NOW)


def next_of(search: SessionSearch, listed: Route = BOTH) -> Endpoint | Refusal:
    """As the front asks: a new session would begin at the first that was not tried."""
    first = next((each for each in listed.endpoints if each.assignment not in search.tried), NOBODY)
    return search.next_endpoint(listed, None, first)


def make_failure(code: Code, *, sent: bool = True, asked: str = "an answer") -> AttemptFailed:
    return AttemptFailed(Refusal(code, "made up", asked), was_sent=sent)


def affinity_to(at: Endpoint) -> SessionAffinity:
    pins = SessionAffinity()
    pins.put(KEY, at)
    return pins


def test_a_new_session_begins_elsewhere_than_at_a_node_without_a_lease() -> None:
    pins = affinity_to(A)
    search = make_search(pins, start=True)
    assert next_of(search) == A
    assert search.on_failure(make_failure(Code.LEASE_ENDED), A, BOTH, NOW) == 0.0
    assert next_of(search) == B
    search.on_answer(B)
    assert pins.get(KEY) == B


def test_a_node_without_a_lease_is_not_asked_for_the_session_for_ever() -> None:
    pins = affinity_to(A)
    search = make_search(pins)
    assert next_of(search) == A
    with pytest.raises(ShoalError, match="LEASE_ENDED"):
        search.on_failure(make_failure(Code.LEASE_ENDED), A, BOTH, NOW)
    assert pins.get(KEY) is None


def test_a_new_session_does_not_begin_at_a_replica_that_the_route_has_given_up() -> None:
    assert next_of(make_search(affinity_to(A), start=True), route(B)) == B
    assert next_of(make_search(affinity_to(A)), route(B)) == A  # a later step: it may still be there


def test_a_first_step_that_may_have_run_is_sent_to_no_other_replica_while_that_one_is_listed() -> None:
    pins = SessionAffinity()
    search = make_search(pins, start=True)
    assert next_of(search) == A
    assert search.on_failure(make_failure(Code.REPLICA_UNREACHABLE), A, BOTH, NOW) > 0
    assert next_of(search, route(B, A)) == A
    search.on_failure(make_failure(Code.REPLICA_UNREACHABLE), A, route(B), NOW)
    assert next_of(search, route(B)) == B


def test_a_first_step_that_ran_nowhere_goes_elsewhere() -> None:
    for error in (make_failure(Code.REPLICA_UNREACHABLE, sent=False), make_failure(Code.MODEL_NOT_READY)):
        search = make_search(SessionAffinity(), start=True)
        assert next_of(search) == A
        assert search.on_failure(error, A, BOTH, NOW) == 0.0
        assert next_of(search) == B


def test_a_first_step_that_nobody_hears_of_is_given_up_in_time() -> None:
    pins = SessionAffinity()
    search = make_search(pins, start=True)
    search.on_failure(make_failure(Code.REPLICA_UNREACHABLE), A, BOTH, NOW)
    with pytest.raises(ShoalError, match="REPLICA_UNREACHABLE"):
        search.on_failure(make_failure(Code.REPLICA_UNREACHABLE), A, BOTH, LATE)
    assert pins.get(KEY) is None


def test_a_step_out_of_order_where_nobody_knew_it_is_looks_for_the_right_one() -> None:
    search = make_search(SessionAffinity())
    assert next_of(search) == A
    assert search.on_failure(make_failure(Code.SESSION_STEP), A, BOTH, NOW) == 0.0
    assert next_of(search) == B
    search.on_failure(make_failure(Code.SESSION_LOST), B, BOTH, NOW)
    assert isinstance(next_of(search), Refusal)
    assert search.failure is not None
    assert search.failure.code is Code.SESSION_STEP
    search = make_search(affinity_to(A))
    assert next_of(search) == A
    with pytest.raises(ShoalError, match="SESSION_STEP"):
        search.on_failure(make_failure(Code.SESSION_STEP), A, BOTH, NOW)


def test_a_session_that_went_where_no_route_leads_yet_is_waited_for() -> None:
    pins = SessionAffinity()
    search = make_search(pins)
    gone = make_failure(Code.SESSION_MOVED, asked="b")
    assert next_of(search, route(A)) == A
    for _ in range(20):
        assert search.on_failure(gone, A, route(A), NOW) > 0
        assert next_of(search, route(A)) == A
    assert search.on_failure(gone, A, BOTH, NOW) == 0.0
    assert next_of(search) == B
    search = make_search(SessionAffinity())
    with pytest.raises(ShoalError, match="MODEL_NOT_READY"):
        search.on_failure(gone, A, route(A), LATE)


def ask_everywhere(search: SessionSearch, told: dict[str, AttemptFailed], listed: Route) -> list[str]:
    """The replicas that are asked until none is left, each of which answers the same each time."""
    asked: list[str] = []
    while isinstance(at := next_of(search, listed), Endpoint):
        asked.append(at.assignment)
        assert len(asked) < 40
        search.on_failure(told[at.assignment], at, listed, NOW)
    assert search.failure is None
    assert at.code is Code.SESSION_LOST
    return asked


@pytest.mark.parametrize("pins", [SessionAffinity(), affinity_to(B)], ids=["unknown", "known"])
def test_a_session_that_was_lost_after_its_move_is_lost(pins: SessionAffinity) -> None:
    told = {"a": make_failure(Code.SESSION_MOVED, asked="b"), "b": make_failure(Code.SESSION_LOST)}
    assert len(ask_everywhere(make_search(pins), told, BOTH)) <= 4


def test_a_session_that_moved_on_from_a_front_that_forgot_it_is_found() -> None:
    search, listed = make_search(affinity_to(B)), route(A, B, endpoint("c"))
    told = {
        "a": make_failure(Code.SESSION_MOVED, asked="b"),
        "b": make_failure(Code.SESSION_LOST),
        "c": make_failure(Code.SESSION_LOST),
    }
    assert ask_everywhere(search, told, listed)[-1] == "c"


def test_replicas_that_name_each_other_have_no_session() -> None:
    told = {"a": make_failure(Code.SESSION_MOVED, asked="b"), "b": make_failure(Code.SESSION_MOVED, asked="a")}
    assert ask_everywhere(make_search(SessionAffinity()), told, BOTH)


def test_a_session_that_arrives_after_it_was_asked_for_is_found() -> None:
    search = make_search(affinity_to(B))
    assert next_of(search) == B
    search.on_failure(make_failure(Code.SESSION_LOST), B, BOTH, NOW)
    assert next_of(search) == A
    search.on_failure(make_failure(Code.SESSION_MOVED, asked="b"), A, BOTH, NOW)
    assert next_of(search) == B
