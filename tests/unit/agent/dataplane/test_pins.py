"""Where a session is asked for: one place after the other, as each fails."""

import pytest

from shoal.agent.core.sequences import Key, Step
from shoal.agent.dataplane.forward import AttemptFailed
from shoal.agent.dataplane.pins import UNREACHED_S, Pins, Search
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed
from shoal.types.workload import WorkloadKey

KEY = Key(WorkloadKey("acme", "vad"), "7")
NOW = Elapsed(100.0)
LATE = Elapsed(NOW + UNREACHED_S)


def endpoint(name: str) -> Endpoint:
    return Endpoint(name, f"node-{name}", EndpointKind.AGENT, "10.0.0.1:1", 1.0, EndpointState.READY)


A, B = endpoint("a"), endpoint("b")
NOBODY = Refusal(Code.REPLICA_UNREACHABLE, "all were tried", "one that answers")


def route(*endpoints: Endpoint) -> Route:
    return Route(KEY.workload, 1, endpoints, stateful=True)


BOTH = route(A, B)


def asking(pins: Pins, *, start: bool = False) -> Search:
    return Search(pins, KEY, Step("t", b"", start, False), NOW)


def next_of(search: Search, listed: Route = BOTH) -> Endpoint | Refusal:
    """As the front asks: a new session would begin at the first that was not tried."""
    first = next((each for each in listed.endpoints if each.assignment not in search.tried), NOBODY)
    return search.place(listed, None, first)


def failed(code: Code, *, sent: bool = True, asked: str = "an answer") -> AttemptFailed:
    return AttemptFailed(Refusal(code, "made up", asked), sent=sent)


def pinned(at: Endpoint) -> Pins:
    pins = Pins()
    pins.put(KEY, at)
    return pins


def test_a_new_session_begins_elsewhere_than_at_a_node_without_a_lease() -> None:
    pins = pinned(A)
    search = asking(pins, start=True)
    assert next_of(search) == A
    assert search.failed(failed(Code.LEASE_ENDED), A, BOTH, NOW) == 0.0
    assert next_of(search) == B
    search.answered(B)
    assert pins.get(KEY) == B


def test_a_node_without_a_lease_is_not_asked_for_the_session_for_ever() -> None:
    pins = pinned(A)
    search = asking(pins)
    assert next_of(search) == A
    with pytest.raises(ShoalError, match="LEASE_ENDED"):
        search.failed(failed(Code.LEASE_ENDED), A, BOTH, NOW)
    assert pins.get(KEY) is None


def test_a_new_session_does_not_begin_at_a_replica_that_the_route_has_given_up() -> None:
    assert next_of(asking(pinned(A), start=True), route(B)) == B
    assert next_of(asking(pinned(A)), route(B)) == A  # a later step: it may still be there


def test_a_first_step_that_may_have_run_is_sent_to_no_other_replica_while_that_one_is_listed() -> None:
    pins = Pins()
    search = asking(pins, start=True)
    assert next_of(search) == A
    assert search.failed(failed(Code.REPLICA_UNREACHABLE), A, BOTH, NOW) > 0
    assert next_of(search, route(B, A)) == A
    search.failed(failed(Code.REPLICA_UNREACHABLE), A, route(B), NOW)
    assert next_of(search, route(B)) == B


def test_a_first_step_that_ran_nowhere_goes_elsewhere() -> None:
    for error in (failed(Code.REPLICA_UNREACHABLE, sent=False), failed(Code.MODEL_NOT_READY)):
        search = asking(Pins(), start=True)
        assert next_of(search) == A
        assert search.failed(error, A, BOTH, NOW) == 0.0
        assert next_of(search) == B


def test_a_first_step_that_nobody_hears_of_is_given_up_in_time() -> None:
    pins = Pins()
    search = asking(pins, start=True)
    search.failed(failed(Code.REPLICA_UNREACHABLE), A, BOTH, NOW)
    with pytest.raises(ShoalError, match="REPLICA_UNREACHABLE"):
        search.failed(failed(Code.REPLICA_UNREACHABLE), A, BOTH, LATE)
    assert pins.get(KEY) is None


def test_a_step_out_of_order_where_nobody_knew_it_is_looks_for_the_right_one() -> None:
    search = asking(Pins())
    assert next_of(search) == A
    assert search.failed(failed(Code.SESSION_STEP), A, BOTH, NOW) == 0.0
    assert next_of(search) == B
    search.failed(failed(Code.SESSION_LOST), B, BOTH, NOW)
    assert isinstance(next_of(search), Refusal)
    assert search.failure is not None
    assert search.failure.code is Code.SESSION_STEP
    search = asking(pinned(A))
    assert next_of(search) == A
    with pytest.raises(ShoalError, match="SESSION_STEP"):
        search.failed(failed(Code.SESSION_STEP), A, BOTH, NOW)


def test_a_session_that_went_where_no_route_leads_yet_is_waited_for() -> None:
    pins = Pins()
    search = asking(pins)
    gone = failed(Code.SESSION_MOVED, asked="b")
    assert next_of(search, route(A)) == A
    for _ in range(20):
        assert search.failed(gone, A, route(A), NOW) > 0
        assert next_of(search, route(A)) == A
    assert search.failed(gone, A, BOTH, NOW) == 0.0
    assert next_of(search) == B
    search = asking(Pins())
    with pytest.raises(ShoalError, match="MODEL_NOT_READY"):
        search.failed(gone, A, route(A), LATE)
