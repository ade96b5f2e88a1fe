"""Networks of containers that are cut, narrow or slow, under load at the published ports."""

import statistics

import pytest

from harness.cluster.compose import AWAY, GATEWAYS, NODES, STEADY, WAIT_TIMEOUT_S, Compose
from harness.cluster.delegation import LEASE_S, RENEWED_WITHIN_S, agreements, is_renewed, knows_all_regions
from harness.cluster.stack import documents, on_nodes, policy, workload
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code, ShoalError

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(300)]

LONGER_THAN_LOST_S = 12.0
"""`partition.lost_after` is 10 s."""
DELAY_S = 0.15


def test_f04_an_agent_without_a_network_is_replaced_and_taken_back(hurt: Compose) -> None:
    victim = hurt.placements(STEADY, replicas=2)[0].node
    with hurt.load(STEADY) as load:
        with hurt.network_cut("edge", victim):
            at = load.now()
            wait_until(lambda: hurt.nodes()[victim].liveness != "ready", WAIT_TIMEOUT_S, "it is suspected")
            suspected_s = load.now() - at
            wait_until(lambda: len(hurt.serving(STEADY)) == 2, WAIT_TIMEOUT_S, "another one serves", every_s=0.1)
            assert victim not in hurt.serving(STEADY)
            replaced_s = load.now() - at
            load.wait_for(20)
            silent_s = load.longest_gap_s(at)
        back = load.now()
        wait_until(lambda: hurt.nodes()[victim].liveness == "ready", WAIT_TIMEOUT_S, "it is back", every_s=0.1)
        back_s = load.now() - back
        hurt.placements(STEADY, replicas=2)
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    record(
        "F04", "C", 1, sent=verdict.sent, lost=0, suspected_s=round(suspected_s, 2), replaced_s=round(replaced_s, 2),
        silent_s=round(silent_s, 2), back_s=round(back_s, 2),
    )  # fmt: skip


def test_f06_edge_s_agents_without_their_coordinator_serve_on_and_nothing_is_restarted(hurt: Compose) -> None:
    """Agents, gateways and the broker on one side, the coordinator on the other, for longer than a node is missed."""
    before = hurt.nodes()
    placed = [row.assignment.id for row in hurt.placements(STEADY, replicas=2)]
    started = hurt.start_times()
    with hurt.load(STEADY) as load:
        with hurt.network_cut("edge", "edge-coordinator"):
            at = load.now()
            told = {Code.WAITING_FOR_LINK}
            wait_until(
                lambda: {view.reason.code for view in hurt.nodes().values()} == told,
                WAIT_TIMEOUT_S,
                "why nobody is heard",
            )
            load.wait_for(20, after_s=LONGER_THAN_LOST_S)
            cut_s, silent_s = load.now() - at, load.longest_gap_s(at)
        back = load.now()
        wait_until(
            lambda: hurt.are_back(before), WAIT_TIMEOUT_S, "every node back in a session of its own", every_s=0.1
        )
        back_s = load.now() - back
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert [row.assignment.id for row in hurt.placements(STEADY, replicas=2)] == placed, "nothing was decided anew"
    assert hurt.start_times() == started
    record(
        "F06", "C", 1, fault="edge partition", cut_s=round(cut_s, 1), sent=verdict.sent, lost=0,
        silent_s=round(silent_s, 2), back_s=round(back_s, 2), restarted=0,
    )  # fmt: skip


def test_f42_a_region_cut_off_from_all_others_places_and_serves_and_trades_again(hurt: Compose) -> None:
    with hurt.load(STEADY) as load:
        with hurt.network_cut("federation", "edge-coordinator", *GATEWAYS["edge"]):
            at = load.now()
            wait_until(lambda: not knows_all_regions(hurt, "edge"), WAIT_TIMEOUT_S, "edge to miss the federation")
            with pytest.raises(ShoalError) as refused:
                hurt.ask(AWAY)
            hurt.apply(documents(policy("alone", on_nodes(NODES["edge"])), workload("alone", "relu", "alone")))
            hurt.placements("alone", replicas=1)
            wait_until(lambda: hurt.ask("alone"), WAIT_TIMEOUT_S, "an answer of what was placed meanwhile")
            load.wait_for(20)
            cut_s = load.now() - at
        back = load.now()
        wait_until(lambda: hurt.ask(AWAY), WAIT_TIMEOUT_S, "the other region to answer again")
        back_s = load.now() - back
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    wait_until(lambda: knows_all_regions(hurt, "edge"), WAIT_TIMEOUT_S, "edge to hear the federation")
    hurt.delete_workloads("alone")
    record(
        "F42", "C", 1, fault="a region cut off", cut_s=round(cut_s, 1), sent=verdict.sent, lost=0,
        told=str(refused.value.code), back_s=round(back_s, 2),
    )  # fmt: skip


@pytest.mark.parametrize("fault", ["cut", "kill"])
def test_f42_without_the_federation_what_another_region_runs_is_renewed(hurt: Compose, fault: str) -> None:
    (agreed,) = agreements(hurt, AWAY)
    with hurt.load(AWAY) as load:
        with hurt.network_cut("federation", "federation") if fault == "cut" else hurt.outage("federation"):
            at = load.now()
            wait_until(lambda: not knows_all_regions(hurt, "edge"), WAIT_TIMEOUT_S, "edge to miss the federation")
            # By then it were older, if nobody had renewed it.
            load.wait_for(20, after_s=max(0.0, RENEWED_WITHIN_S + 2.0 - (load.now() - at)))
            wait_until(lambda: is_renewed(hurt, AWAY), WAIT_TIMEOUT_S, f"the agreement to have {LEASE_S:g} s again")
            away_s = load.now() - at
        back = load.now()
        wait_until(lambda: knows_all_regions(hurt, "edge"), WAIT_TIMEOUT_S, "edge to hear the federation", every_s=0.1)
        back_s = load.now() - back
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert [one.agreement for one in agreements(hurt, AWAY)] == [agreed.agreement]
    record(
        "F42", "C", 1, fault=fault, outage_s=round(away_s, 1), sent=verdict.sent, lost=0, back_s=round(back_s, 2)
    )  # fmt: skip


def test_a_narrow_way_between_regions_slows_what_goes_over_it_and_nothing_else(hurt: Compose) -> None:
    """By a token bucket: requests wait for each other, none is lost."""
    with hurt.load(STEADY, other_ports=()) as near, hurt.load(AWAY, other_ports=()) as far:
        far.wait_for(40)
        at = far.now()
        plain = statistics.median(far.latencies(0.0, at))
        with hurt.bandwidth_limit("edge-gateway", "federation", "24kbit"):
            far.wait_for(30, after_s=3.0)
            near.wait_for(30)
            until = far.now()
        slow, beside = (statistics.median(one.latencies(at, until)) for one in (far, near))
        far.wait_for(20)
    for load in (near, far):
        verdict = load.verdict()
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert slow > 2 * plain, "the way was no narrower"
    record(
        "issue 7, point 2", "C", 1, fault="a way of 24 kbit/s", sent=far.verdict().sent, lost=0,
        median_before_s=round(plain, 3), median_s=round(slow, 3), median_beside_s=round(beside, 3),
    )  # fmt: skip


def test_a_long_way_between_regions_takes_its_time_and_nothing_else_does(hurt: Compose) -> None:
    """By a process that holds every packet."""
    with hurt.load(STEADY, other_ports=()) as near, hurt.load(AWAY, other_ports=()) as far:
        with hurt.latency("edge-gateway", "cloud-gateway", "federation", DELAY_S):
            at = far.now() + 1.0
            far.wait_for(40, after_s=1.0)
            near.wait_for(20)
            until = far.now()
        slow, beside = (one.latencies(at, until) for one in (far, near))
        far.wait_for(20)
    for load in (near, far):
        verdict = load.verdict()
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert min(slow) >= DELAY_S
    assert min(beside) < DELAY_S
    record(
        "issue 7, point 2", "C", 1, fault=f"{DELAY_S:g} s more", sent=far.verdict().sent, lost=0,
        median_s=round(statistics.median(slow), 3), median_beside_s=round(statistics.median(beside), 3),
    )  # fmt: skip
