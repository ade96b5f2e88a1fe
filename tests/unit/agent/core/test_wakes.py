"""What a request does whose replicas are scaled to zero."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.request_router import RequestRouter
from shoal.agent.core.route_tables import RequestEntry, RunningWorker
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.core.wakes import NO_WAKE, UnloadedReplica, WakePlan, plan_wake
from shoal.agent.ports import LocalWorker
from shoal.types.codes import Code, Refusal
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "reader")
NOW, SOON, LATE = Elapsed(100.0), Elapsed(100.5), Elapsed(130.0)
ASLEEP = UnloadedReplica("a", KEY, Seconds(2.0), Seconds(1.0))
FAILED = replace(ASLEEP, failure=Refusal(Code.MEMORY_SHORT, "1 MiB free"))
WAITS = WakePlan(("a",), waits=True)
LOCAL = Route(KEY, 1, (Endpoint("a", "n", EndpointKind.LOCAL, "", 1.0, EndpointState.READY),))
WORKER: RunningWorker = LocalWorker("a", KEY, "/run/a.sock", "1")
OTHER = Endpoint("b", "m", EndpointKind.AGENT, "m:1", 1.0, EndpointState.READY)


def router_of(route: Route, *unloaded: UnloadedReplica) -> RequestRouter:
    router = RequestRouter(AdmissionLimits(), Seconds(60.0))
    router.configure((route,), (), unloaded)
    return router


def test_the_first_request_wakes_it_and_waits() -> None:
    assert plan_wake((ASLEEP,), {}, LATE, NOW, has_other=False) == WAITS
    assert plan_wake((ASLEEP,), {"a": NOW}, LATE, NOW, has_other=False) == WakePlan(waits=True)


def test_where_another_replica_answers_it_is_woken_for_those_to_come() -> None:
    assert plan_wake((ASLEEP,), {}, LATE, NOW, has_other=True) == WakePlan(("a",))


def test_a_deadline_before_the_shortest_load_is_refused_with_the_usual_one() -> None:
    plan = plan_wake((ASLEEP,), {}, SOON, NOW, has_other=False)
    assert plan.wake == ("a",), "so that the next one is answered"
    assert plan.refused is not None
    assert plan.refused.refusal.code is Code.SCALED_TO_ZERO
    assert plan.refused.retry_after_s == 2.0
    begun = plan_wake((ASLEEP,), {"a": Elapsed(NOW - 0.6)}, SOON, NOW, has_other=False)
    assert begun.waits, "0.6 of the second have passed"


def test_no_deadline_is_too_short_where_no_load_was_timed_or_its_begin_is_unknown() -> None:
    assert plan_wake((replace(ASLEEP, least_wake_s=Seconds(0.0)),), {}, SOON, NOW, has_other=False).waits
    assert plan_wake((replace(ASLEEP, is_waking=True),), {}, SOON, NOW, has_other=False) == WakePlan(waits=True)


def test_one_that_failed_to_load_is_waited_for_no_more() -> None:
    plan = plan_wake((FAILED,), {}, LATE, NOW, has_other=False)
    assert plan.refused is not None
    assert plan.refused.refusal == FAILED.failure
    assert plan_wake((FAILED,), {}, LATE, NOW, has_other=True) == NO_WAKE
    assert plan_wake((FAILED, replace(ASLEEP, assignment="b")), {}, LATE, NOW, has_other=False).waits


@given(
    st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 60.0), st.booleans(), st.booleans()), max_size=5),
    st.floats(0.0, 60.0),
    st.booleans(),
)
def test_a_request_waits_is_refused_or_goes_on(
    drawn: list[tuple[float, float, bool, bool]], left_s: float, has_other: bool
) -> None:
    """Never two of these; it waits only for what loads; and what is refused could not have been answered in time."""
    replicas = [
        UnloadedReplica(
            str(number),
            KEY,
            Seconds(least + more),
            Seconds(least),
            waking,
            Refusal(Code.LOAD_FAILED) if failed else None,
        )
        for number, (least, more, waking, failed) in enumerate(drawn)
    ]
    asked = {each.assignment: NOW for each in replicas if each.is_waking}
    expires_at = Elapsed(NOW + left_s)
    plan = plan_wake(replicas, asked, expires_at, NOW, has_other=has_other)
    asleep = [each for each in replicas if each.failure is None]
    assert set(plan.wake) == {each.assignment for each in asleep if not each.is_waking}
    assert not (plan.waits and plan.refused is not None)
    if plan.waits:
        assert asleep
        assert not has_other
    if plan.refused is not None and plan.refused.refusal.code is Code.SCALED_TO_ZERO:
        assert all(each.least_wake_s > expires_at - NOW for each in asleep)
        assert plan.refused.retry_after_s is not None
        assert plan.refused.retry_after_s >= min(each.least_wake_s for each in asleep)
    if has_other:
        assert plan.refused is None


def test_the_router_takes_requests_for_it_and_sends_it_none() -> None:
    router = router_of(LOCAL, ASLEEP)
    assert router.has_ready_replica(LOCAL, NOW)
    assert router.tables.find(KEY, RequestEntry.FORWARD) is not None
    assert not router.is_common(LOCAL)
    assert router.sole_replica(LOCAL) is None
    assert isinstance(router.choose(LOCAL, frozenset(), "", NOW, 1), Refusal)
    assert (router.wake_s(LOCAL, NOW), router.outstanding()) == (2.0, (("a", 0),))
    assert router.plan_wake(LOCAL, LATE, NOW) == WAITS
    assert router.plan_wake(LOCAL, LATE, NOW) == WakePlan(waits=True), "it is asked for once"
    router.configure((LOCAL,), (), (replace(ASLEEP, is_waking=True),))
    assert router.plan_wake(LOCAL, SOON, Elapsed(NOW + 0.1)).refused is not None, "since when it loads is known"
    router.configure((LOCAL,), (WORKER,))
    assert router.plan_wake(LOCAL, LATE, NOW) == NO_WAKE
    assert router.is_common(LOCAL)
    assert router.unloaded_names == frozenset()


def test_who_asked_in_vain_asks_again() -> None:
    router = router_of(LOCAL, ASLEEP)
    router.plan_wake(LOCAL, LATE, NOW)
    router.configure((LOCAL,), (), (ASLEEP,))
    assert router.plan_wake(LOCAL, LATE, NOW) == WAITS


def test_another_node_answers_meanwhile() -> None:
    both = replace(LOCAL, endpoints=(*LOCAL.endpoints, OTHER))
    router = router_of(both, ASLEEP)
    assert router.plan_wake(both, LATE, NOW) == WakePlan(("a",))
    assert router.choose(both, frozenset(), "", NOW, 1) == OTHER
    assert router.wake_s(both, NOW) is None
    assert not router.is_common(both), "or nothing would wake it"


def test_one_that_failed_is_no_replica() -> None:
    router = router_of(LOCAL, FAILED)
    assert not router.has_ready_replica(LOCAL, NOW)
    assert router.unloaded_names == frozenset()
    assert router.plan_wake(LOCAL, LATE, NOW).refused is not None
