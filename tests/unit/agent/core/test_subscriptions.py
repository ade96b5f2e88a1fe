"""Which routes a node subscribes to, and who may wait for one at its front."""

from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders import agent_values
from shoal.agent.core import subscriptions
from shoal.agent.core.awaited_routes import ASKED_S, NAMES_PER_TENANT, WAIT_S, AwaitedRoutes
from shoal.agent.core.partition import CutOff, Linked
from shoal.agent.core.subscriptions import UNKNOWN_S, UNUSED_S, follow, resume, to_report, used_between
from shoal.types.assignment import MAX_SUBSCRIPTIONS, DesiredSet, Forwarding, Ingress, Version
from shoal.types.codes import Code
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

OCR, ASR, NONE = (WorkloadKey("shop", name) for name in ("ocr", "asr", "none"))
BANKS, GUEST = WorkloadKey("bank", "ocr"), WorkloadKey("guests", "g-1")
REPLICA: Final = Endpoint("a-1", "n", EndpointKind.AGENT, "n:1", 1.0, EndpointState.READY)
START: Final = Elapsed(100.0)


def good_route(key: WorkloadKey) -> Route:
    return Route(key, 1, (REPLICA,))


def unknown_route(key: WorkloadKey) -> Route:
    return Route(key, 0, (), Code.MODEL_NOT_FOUND, "none")


def desired_set(*routes: Route, served: tuple[WorkloadKey, ...] = (), on_demand: bool = True) -> DesiredSet:
    held = tuple(agent_values.assignment(f"a-{key.name}", workload=key) for key in served)
    return DesiredSet(
        "n", Version("h", 1, 1), held, routes, (), (), Seconds(1.0),
        forwarding=Forwarding((), ("shop",)), routes_on_demand=on_demand,
    )  # fmt: skip


def after(seconds: float) -> Elapsed:
    return Elapsed(START + seconds)


def test_what_clients_ask_for_is_subscribed_to_until_nobody_asks() -> None:
    held = follow({}, {OCR, BANKS, GUEST}, desired_set(), Linked(), START)
    assert to_report(held).workloads == (OCR,)  # others may not enter here
    assert follow(held, set(), desired_set(good_route(OCR)), Linked(), after(UNUSED_S - 1)) is held
    used = follow(held, {OCR}, desired_set(good_route(OCR)), Linked(), after(UNUSED_S - 1))
    assert set(follow(used, set(), desired_set(good_route(OCR)), Linked(), after(UNUSED_S))) == {OCR}
    assert follow(used, set(), desired_set(good_route(OCR)), Linked(), after(2 * UNUSED_S - 1)) == {}


def test_an_island_gives_nothing_up_and_a_restart_resumes_it() -> None:
    held = follow({}, {OCR}, desired_set(), Linked(), START)
    late = after(9 * UNUSED_S)
    assert follow(held, set(), desired_set(good_route(OCR)), CutOff(START), late) is held
    resumed = resume(desired_set(good_route(OCR), good_route(ASR), served=(ASR,)), late)
    assert set(resumed) == {OCR}
    assert set(follow(resumed, set(), desired_set(good_route(OCR)), Linked(), Elapsed(late + UNUSED_S - 1))) == {OCR}
    assert resume(None, late) == {}


def test_what_is_made_up_on_an_island_pushes_nothing_out_and_is_not_reported() -> None:
    held = follow({}, {OCR}, desired_set(), Linked(), START)
    asked = {OCR, ASR, *(WorkloadKey("shop", f"w{at}") for at in range(MAX_SUBSCRIPTIONS))}
    told = desired_set(good_route(OCR), good_route(ASR), served=(ASR,))
    found = follow(held, asked, told, CutOff(START), after(1))
    assert set(found) == {OCR, ASR}
    assert found[OCR].used_at == after(1)
    linked = follow(held, asked - {OCR}, told, Linked(), after(2))
    assert len(linked) == MAX_SUBSCRIPTIONS
    assert {OCR, ASR} < set(linked), "what exists is kept, however long ago it was used"


def test_the_set_of_a_coordinator_that_lists_all_routes_is_resumed_as_far_as_may_be() -> None:
    whole = desired_set(*(good_route(WorkloadKey("shop", f"w{at}")) for at in range(MAX_SUBSCRIPTIONS + 1)))
    assert len(to_report(resume(whole, START)).workloads) == MAX_SUBSCRIPTIONS


def test_what_does_not_exist_is_given_up_soon_unless_it_comes() -> None:
    held = follow({}, {NONE}, desired_set(), Linked(), START)
    held = follow(held, set(), desired_set(unknown_route(NONE)), Linked(), after(1))
    assert set(held) == {NONE}
    assert follow(held, set(), desired_set(unknown_route(NONE)), Linked(), after(1 + UNKNOWN_S)) == {}
    again = follow(held, {NONE}, desired_set(unknown_route(NONE)), Linked(), after(9))
    assert set(follow(again, set(), desired_set(unknown_route(NONE)), Linked(), after(8 + UNKNOWN_S))) == {NONE}
    assert follow(again, set(), desired_set(unknown_route(NONE)), Linked(), after(9 + UNKNOWN_S)) == {}
    came = follow(held, set(), desired_set(good_route(NONE)), Linked(), after(2))
    assert set(follow(came, set(), desired_set(good_route(NONE)), Linked(), after(1 + UNKNOWN_S))) == {NONE}


def test_a_node_that_gets_all_routes_changes_nothing_and_as_many_as_fit_are_kept() -> None:
    assert follow({}, {OCR}, desired_set(on_demand=False), Linked(), START) == {}
    assert follow({}, {OCR}, None, Linked(), START) == {}
    first = WorkloadKey("shop", "a")
    many = {WorkloadKey("shop", f"w{at}") for at in range(MAX_SUBSCRIPTIONS)}
    held = follow(follow({}, {first}, desired_set(), Linked(), START), many, desired_set(), Linked(), after(1))
    assert set(held) == many


def test_who_uses_as_many_as_may_be_still_gets_one_more() -> None:
    many = [WorkloadKey("shop", f"w{at}") for at in range(MAX_SUBSCRIPTIONS)]
    told = desired_set(*map(good_route, many))
    held = follow({}, many, told, Linked(), START)
    assert len(held) == MAX_SUBSCRIPTIONS
    found = follow(held, {OCR}, told, Linked(), after(1))
    assert len(found) == MAX_SUBSCRIPTIONS
    assert OCR in found, "the region has not answered, and is asked"
    assert set(follow(found, {OCR}, desired_set(good_route(OCR), *map(good_route, many)), Linked(), after(2))) >= {OCR}


def test_what_was_used_while_all_routes_were_listed_is_kept_when_they_come_on_demand() -> None:
    whole = desired_set(good_route(OCR), good_route(ASR), on_demand=False)
    late = after(2 * UNUSED_S)
    used = follow(resume(whole, START), {OCR, NONE}, whole, Linked(), late)
    assert set(used) == {OCR, ASR}
    assert set(follow(used, set(), desired_set(good_route(OCR), good_route(ASR)), Linked(), late)) == {OCR}


def test_use_is_read_from_the_fronts_counters() -> None:
    def ingress(key: WorkloadKey, requests: int) -> Ingress:
        return Ingress(key, "n", requests, 0, 0, 0, 0)

    assert used_between((), (ingress(OCR, 1),)) == {OCR}
    assert used_between((ingress(OCR, 1), ingress(ASR, 2)), (ingress(OCR, 1), ingress(ASR, 3))) == {ASR}
    assert used_between((ingress(OCR, 5),), (ingress(OCR, 2),)) == {OCR}  # the front was started again


def test_a_front_asks_for_what_may_exist_and_waits_until_it_is_answered() -> None:
    awaited = AwaitedRoutes()
    assert not awaited.may_exist(OCR)  # it has all routes
    awaited.configure((good_route(ASR),), is_on_demand=True)
    assert awaited.may_exist(OCR)
    assert not awaited.may_exist(WorkloadKey("shop", "No Name"))
    assert awaited.ask(OCR, START) is None
    assert awaited.ask(NONE, START) is None
    assert awaited.open_questions(START) == (NONE, OCR)
    awaited.configure((good_route(ASR), good_route(OCR), unknown_route(NONE)), is_on_demand=True)
    assert awaited.open_questions(START) == ()
    assert awaited.is_answered(OCR)
    assert not awaited.may_exist(NONE)  # answered at once
    awaited.repeat(NONE, after(1))
    awaited.repeat(ASR, after(1))
    assert awaited.open_questions(after(2)) == (NONE,)  # the region goes on to be asked, and nobody waits
    assert awaited.is_answered(NONE)
    assert awaited.open_questions(after(1 + ASKED_S)) == ()
    awaited.repeat(NONE, after(1))
    awaited.configure((good_route(OCR),), is_on_demand=True)
    assert awaited.may_exist(NONE)
    assert awaited.open_questions(after(2)) == ()
    assert awaited.ask(NONE, START) is None
    awaited.configure((good_route(OCR),), is_on_demand=False)
    assert awaited.is_answered(NONE)  # these are all


def test_who_comes_while_the_region_does_not_answer_waits_no_longer_than_the_first() -> None:
    awaited = AwaitedRoutes()
    awaited.configure((), is_on_demand=True)
    for seconds in range(int(4 * ASKED_S)):
        assert awaited.ask(OCR, after(seconds)) is None
        assert awaited.due_at(OCR) == after(WAIT_S)
        assert awaited.open_questions(after(seconds)) == (OCR,)
    late = after(5 * ASKED_S)
    assert awaited.ask(OCR, late) is None
    assert awaited.due_at(OCR) == Elapsed(late + WAIT_S), "nobody asked for a while"


def test_who_makes_names_up_uses_its_own_share() -> None:
    awaited = AwaitedRoutes()
    awaited.configure((), is_on_demand=True)
    names = [WorkloadKey("thief", f"w{at}") for at in range(NAMES_PER_TENANT + 1)]
    assert all(awaited.ask(key, START) is None for key in names[:-1])
    refused = awaited.ask(names[-1], START)
    assert refused is not None
    assert refused.code is Code.OVERLOADED
    assert awaited.ask(names[0], START) is None  # asked for already
    assert awaited.ask(OCR, START) is None
    awaited.configure(tuple(map(unknown_route, names[:-1])), is_on_demand=True)
    assert awaited.ask(names[-1], START) is not None  # it is remembered that they do not exist
    awaited.configure((), is_on_demand=True)
    assert awaited.ask(names[-1], START) is None
    assert set(awaited.open_questions(after(ASKED_S))) == set()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("acuf"), st.integers(0, 90)), max_size=120))
def test_names_are_counted_as_they_are_held(steps: list[tuple[str, int]]) -> None:
    awaited, now = AwaitedRoutes(), START
    awaited.configure((), is_on_demand=True)
    listed: set[WorkloadKey] = set()
    for step, at in steps:
        key = WorkloadKey("shop", f"w{at}")
        if step == "a" and awaited.may_exist(key):
            awaited.ask(key, now)
        elif step == "u":
            listed ^= {key}
            awaited.configure(tuple(map(unknown_route, sorted(listed))), is_on_demand=True)
        elif step == "f":
            now = Elapsed(now + at / 10)
        held = {*awaited.open_questions(now), *listed}
        assert awaited.ask(WorkloadKey("shop", "probe"), now) is None or len(held) >= NAMES_PER_TENANT
        awaited.configure(
            (*map(unknown_route, sorted(listed)), good_route(WorkloadKey("shop", "probe"))), is_on_demand=True
        )


def test_reports_are_in_order() -> None:
    held = {ASR: subscriptions.Subscription(START), OCR: subscriptions.Subscription(START)}
    assert to_report(held).workloads == (ASR, OCR)
