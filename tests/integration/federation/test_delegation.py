"""Work that another region runs, as its owner sees it: at the gateway, in plans and in the log of home."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, policy, workload
from harness.measure.contention import RunDelay
from harness.models.synthetic import slow
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import InferenceClient
from shoal.types.codes import Code, ShoalError
from shoal.v1 import operator_pb2

pytestmark = pytest.mark.alone

NEAR, FAR = "home-2", "home-3"
X = np.array([[-1, 2, -3, 4]], np.float32)
Y = np.maximum(X, 0)
CHEAPEST = "  optimize: {cost: 1.0}\n"
WITHIN_S = 1.0
"""From apply until another region has granted it."""
ATTEMPTS = ("second", "third", "fourth")
"""Workloads, one after the other until one was in time: other programs of the machine make it longer, never shorter."""


@pytest.fixture(scope="module")
def regions(neighbourhood: DevStack) -> Iterator[DevStack]:
    """Each test has workloads of its own, which all end together."""
    yield neighbourhood
    with neighbourhood.api() as api:
        names = [view.workload.name for view in api.get("workloads").workloads]
    neighbourhood.delete_workloads(*names)
    wait_until(lambda: not guests(neighbourhood), WAIT_TIMEOUT_S, "no guest to be left", every_s=0.2)


def guests(regions: DevStack) -> list[str]:
    found = list[str]()
    for name in (NEAR, FAR):
        with regions.api(name) as api:
            found += [view.assignment.id for view in api.get("placements").placements]
    return found


def abroad(where: Sequence[str], more: str = "") -> str:
    """A policy's spec: for these regions, home not being one of them."""
    return f"  require: {{residency: [{', '.join(where)}]{more}}}\n  federation: {{delegate: when-infeasible}}\n"


def cheapest(delegation: str) -> str:
    return CHEAPEST + f"  federation: {{{delegation}}}\n"


def last_event(regions: DevStack) -> int:
    return max((event.sequence for event in regions.events()), default=0)


def workload_events(regions: DevStack, name: str, after: int = 0) -> list[operator_pb2.Event]:
    return [event for event in regions.events(after) if event.workload.name == name]


def answers(client: InferenceClient, name: str, x: np.ndarray, y: np.ndarray) -> bool:
    """Whether it answers at home's gateway; then, right."""
    try:
        (found,) = client.infer(name, {"x": x}).outputs.values()
    except ShoalError:
        return False
    assert np.array_equal(np.asarray(found), y), f"{name}: {found}"
    return True


def agreement(regions: DevStack, name: str) -> operator_pb2.AgreementView | None:
    """The one that is in force."""
    with regions.api() as api:
        rows = [row for row in api.get("agreements").agreements if row.workload.name == name and row.lease_s > 0]
    return rows[0] if len(rows) == 1 else None


def runs_at(regions: DevStack, name: str, where: str) -> bool:
    """Whether that region serves it, and home has nothing of it any more."""
    found = agreement(regions, name)
    serves = found is not None and found.counterpart == where and found.service == "ready"
    return serves and not regions.placements(name)


def plan_by_workload(regions: DevStack, text: str) -> dict[str, operator_pb2.WorkloadPlan]:
    with regions.api() as api:
        reply = api.plan([operator_pb2.Document(name="test.yaml", text=text)])
    assert not reply.problems, reply.problems
    return {plan.workload.name: plan for plan in reply.workloads}


def test_what_home_may_not_run_is_delegated_within_a_second_and_answers_at_its_gateway(regions: DevStack) -> None:
    clock = SystemClock()
    regions.apply(documents(policy("near", abroad([NEAR])), workload("first", "relu", "near")))
    wait_until(lambda: runs_at(regions, "first", NEAR), WAIT_TIMEOUT_S, "the model to be in the other region's cache")
    late: list[str] = []
    for name in ATTEMPTS:
        before, delay = last_event(regions), RunDelay(*(pid for pid, _ in regions.processes(role="coordinator")))
        with InferenceClient(regions.info.client) as client:
            began, wall = clock.now(), clock.wall()
            regions.apply(workload(name, "relu", "near"))
            answering = partial(answers, client, name, X, Y)
            wait_until(answering, WAIT_TIMEOUT_S, "an answer through home's gateway", every_s=0.02)
            answered_s = clock.now() - began
        others_s = delay.slowdown_s()
        log = workload_events(regions, name, before)
        granted_s = next(event.at for event in log if event.code == "GRANTED") - wall
        assert [event.code for event in log if event.code in ("SOLICITED", "AWARDED", "GRANTED")] == [
            "SOLICITED",
            "AWARDED",
            "GRANTED",
        ]
        assert not regions.placements(name), "home may not run it"
        view = regions.workload(name)
        assert (view.state, view.reason.code) == ("ready", Code.DELEGATED), view
        told = f"{name}: granted after {granted_s:.2f} s, answered after {answered_s:.2f} s, others {others_s:.2f} s"
        print(told)
        if granted_s < WITHIN_S + others_s and answered_s < WITHIN_S + 1.0 + 2 * others_s:
            break
        late.append(told)
    assert len(late) < len(ATTEMPTS), late


def test_a_cheaper_region_gets_only_what_may_move_and_gains_its_margin_and_gives_it_back(regions: DevStack) -> None:
    """Home asks three times what `home-3` asks: it gains 67 %."""
    stays, dear, moves = "stays", "dear", "moves"
    applied = documents(
        policy("kept", cheapest("delegate: never")), *(workload(name, "relu", "kept") for name in (stays, dear, moves))
    )
    regions.apply(applied)
    for name in (stays, dear, moves):
        regions.wait_serving(name)
    before = last_event(regions)
    changed = documents(
        policy("picky", cheapest("delegate: when-better, margin: 90%")),
        policy("ready", cheapest("delegate: when-better, margin: 30%")),
        workload(dear, "relu", "picky"),
        workload(moves, "relu", "ready"),
    )
    plans = plan_by_workload(regions, changed)
    best = {name: plans[name].bids[0] for name in (dear, moves)}
    assert {name: bid.region for name, bid in best.items()} == {dear: FAR, moves: FAR}
    assert all(0.6 < bid.gain < 0.7 for bid in best.values()), best
    assert (best[moves].chosen, plans[moves].undelegated.code) == (True, ""), plans[moves]
    assert (best[dear].chosen, plans[dear].undelegated.code) == (False, Code.NO_BID), plans[dear]
    never = plan_by_workload(regions, workload(stays, "relu", "kept"))[stays]
    assert (never.delegate, list(never.bids), never.delegated_to) == ("", [], ""), never

    with InferenceLoad(regions.port("gateway", "data"), regions.client_files, moves, clients=2) as load:
        regions.apply(changed)
        wait_until(lambda: runs_at(regions, moves, FAR), WAIT_TIMEOUT_S, f"{moves} to run in {FAR}")
        load.wait_for(40)
        wait_until(
            lambda: any(event.code == "NO_BID" for event in workload_events(regions, dear, before)),
            WAIT_TIMEOUT_S,
            "no bid",
        )
        regions.apply(workload(moves, "relu", "kept"))
        regions.wait_serving(moves)
        wait_until(lambda: agreement(regions, moves) is None, WAIT_TIMEOUT_S, "the agreement to end")
        load.wait_for(40)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    codes = {name: {event.code for event in workload_events(regions, name, before)} for name in (stays, dear, moves)}
    assert {"SOLICITED", "GRANTED", "NOTICED", "ENDED"} <= codes[moves], codes[moves]
    assert codes[dear] & {"SOLICITED", "AWARDED"} == {"SOLICITED"}, codes[dear]
    assert not codes[stays] & {"SOLICITED", "AWARDED"}, codes[stays]
    assert [len(regions.placements(name)) for name in (stays, dear, moves)] == [1, 1, 1]


def test_what_nobody_can_do_ends_at_the_best_bid_within_relax_in_two_rounds(regions: DevStack) -> None:
    regions.push(slow().SerializeToString(), "slow")
    free = documents(policy("slow", abroad([NEAR, FAR]) + CHEAPEST), workload("late", "slow", "slow"))
    promised = {bid.region: bid.latency_p95_s for bid in plan_by_workload(regions, free)["late"].bids}
    assert set(promised) == {NEAR, FAR}, promised
    assert min(promised.values()) > 0.03, promised
    assert max(promised.values()) < 10, promised
    spec = (
        abroad([NEAR, FAR], ", latency: {p95: 30ms}")
        + CHEAPEST
        + "  relax: [{latency: {p95: 31ms}}, {latency: {p95: 10s}}]\n"
    )
    before = last_event(regions)
    regions.apply(documents(policy("slow", spec), workload("late", "slow", "slow")))
    wait_until(lambda: runs_at(regions, "late", FAR), WAIT_TIMEOUT_S, f"the cheapest, {FAR}, to run it")
    x = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    with InferenceClient(regions.info.client) as client:
        wait_until(lambda: answers(client, "late", x, x), WAIT_TIMEOUT_S, "an answer through home's gateway")
    log = [(event.code, event.message) for event in workload_events(regions, "late", before)]
    rounds = [message for code, message in log if code == "SOLICITED"]
    assert len(rounds) == 2, log
    assert rounds[1] == "round 2, relaxed: latency: {p95: 10s}", log
    first, second = ({code for code, message in log if f"round {number}: " in message} for number in (1, 2))
    assert (first, second) == ({"COUNTERED"}, {"BID"}), log
    assert [code for code, _ in log].index("AWARDED") > max(
        index for index, (code, _) in enumerate(log) if code == "SOLICITED"
    )
