"""Containers that are killed, under load at the published ports; how long each takes from start to first answer."""

import pytest

from harness.cluster.compose import AWAY, GATEWAYS, NODES, STEADY, WAIT_TIMEOUT_S, Compose, docker
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(300)]

SEEN_WITHIN_S = 5.0
DOWN_S = 12.0
"""Longer than `partition.lost_after`."""
LIMIT_BYTES = 150 * 10**6
"""Of a coordinator, and of the federation."""


def test_f06_a_coordinator_killed_and_started(hurt: Compose) -> None:
    placed = {row.assignment.id for row in hurt.placements(STEADY, replicas=2)}
    started = hurt.start_times()
    everybody = {*NODES["edge"], *GATEWAYS["edge"]}
    with hurt.load(STEADY) as load:
        with hurt.outage("edge-coordinator"):
            at = load.now()
            load.wait_for(20, after_s=DOWN_S)
            silent_s = load.longest_gap_s(at)
        begun = load.now()
        wait_until(lambda: hurt.nodes(), WAIT_TIMEOUT_S, "it answers", every_s=0.1)
        answers_s = load.now() - begun
        wait_until(
            lambda: {name for name, view in hurt.nodes().items() if view.liveness == "ready"} >= everybody,
            WAIT_TIMEOUT_S,
            "every node is seen",
            every_s=0.1,
        )
        seen_s = load.now() - begun - answers_s
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert {row.assignment.id for row in hurt.placements(STEADY, replicas=2)} == placed
    del started["edge-coordinator"]
    assert {name: at for name, at in hurt.start_times().items() if name in started} == started
    assert seen_s <= SEEN_WITHIN_S
    record(
        "F06", "C", 1, killed="coordinator", sent=verdict.sent, lost=0, silent_s=round(silent_s, 2),
        start_to_answer_s=round(answers_s, 2), view_complete_s=round(seen_s, 2), restarted=0,
    )  # fmt: skip


def test_f04_an_agent_killed_and_started(hurt: Compose) -> None:
    victim = hurt.placements(STEADY, replicas=2)[0].node
    before = {victim: hurt.nodes()[victim]}
    with hurt.load(STEADY) as load:
        with hurt.outage(victim):
            at = load.now()
            wait_until(
                lambda: len(hurt.serving(STEADY) - {victim}) == 2, WAIT_TIMEOUT_S, "another one serves", every_s=0.1
            )
            replaced_s = load.now() - at
            load.wait_for(20)
            silent_s = load.longest_gap_s(at)
        begun = load.now()
        wait_until(lambda: hurt.are_back(before), WAIT_TIMEOUT_S, "it is back", every_s=0.1)
        back_s = load.now() - begun
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    record(
        "F04", "C", 1, killed="agent", sent=verdict.sent, lost=0, silent_s=round(silent_s, 2),
        replaced_s=round(replaced_s, 2), start_to_link_s=round(back_s, 2),
    )  # fmt: skip


def test_the_only_agent_of_a_region_answers_soon_after_it_is_started(hurt: Compose) -> None:
    """What it ran is on its disk: nobody has to tell it again. Who waits gets every answer."""
    with hurt.load(AWAY) as load:
        with hurt.outage("cloud-gpu"):
            at = load.now()
        begun = load.now()
        load.wait_for(1, after_s=0.1)
        first_s = load.now() - begun
        silent_s = load.longest_gap_s(at)
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    record(
        "issue 7, point 6", "C", 1, container="agent", start_to_answer_s=round(first_s, 2), silent_s=round(silent_s, 2),
        asked_again=len(load.failed_attempts),
    )  # fmt: skip


def test_f45_a_gateway_killed_with_another_beside_it(hurt: Compose) -> None:
    with hurt.load(STEADY) as load:
        with hurt.outage("edge-gateway"):
            at = load.now()
            load.wait_for(40)
            silent_s = load.longest_gap_s(at)
        begun = load.now()
        wait_until(lambda: hurt.ask(STEADY), WAIT_TIMEOUT_S, "its first answer")
        first_s = load.now() - begun
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert load.failed_attempts, "nobody noticed"
    record(
        "F45", "C", 1, killed="gateway", ingresses=2, sent=verdict.sent, lost=0, asked_again=len(load.failed_attempts),
        silent_s=round(silent_s, 2), start_to_answer_s=round(first_s, 2),
    )  # fmt: skip


@pytest.mark.parametrize("kept", [True, False], ids=["restarted", "empty"])
def test_f17_the_broker_killed_and_started(hurt: Compose, kept: bool) -> None:
    """empty: without the rights that it keeps; it starts from what the coordinator tells it."""
    before = hurt.nodes()
    placed = {row.assignment.id for row in hurt.placements(STEADY, replicas=2)}
    last = max(event.sequence for event in hurt.events())
    with hurt.load(STEADY) as load:
        with hurt.outage("edge-broker"):
            at = load.now()
            told = {Code.WAITING_FOR_LINK}
            wait_until(
                lambda: {view.reason.code for view in hurt.nodes().values()} == told,
                WAIT_TIMEOUT_S,
                "why nobody is heard",
            )
            if not kept:
                volume = f"{hurt.container('edge-broker')['Mounts'][0]['Name']}:/srv/broker"
                image = hurt.container("edge-broker")["Image"]
                docker("run", "--rm", "-v", volume, "--entrypoint", "rm", image, "/srv/broker/dynamic-security.json")
            load.wait_for(60)
            silent_s = load.longest_gap_s(at)
        begun = load.now()
        wait_until(
            lambda: hurt.are_back(before), WAIT_TIMEOUT_S, "every node back in a session of its own", every_s=0.1
        )
        back_s = load.now() - begun
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert {row.assignment.id for row in hurt.placements(STEADY, replicas=2)} == placed
    events = [event for event in hurt.events(last) if event.workload.name == STEADY]
    assert events == [], "nothing was decided anew"
    record(
        "F17", "C", 1, rights="kept" if kept else "gone", sent=verdict.sent, lost=0, silent_s=round(silent_s, 2),
        back_s=round(back_s, 2),
    )  # fmt: skip


def test_control_planes_take_little_memory(hurt: Compose) -> None:
    """With all that the tests before have put in. Oakestra publishes a gigabyte for each of its two."""
    found = hurt.memory_bytes("federation", "edge-coordinator", "cloud-coordinator", "datacenter-coordinator")
    record(
        "issue 7, point 6", "C", 1, up_s=round(hurt.up_s, 1),
        **{f"{name.replace('-', '_')}_mb": round(used / 1e6) for name, used in found.items()},
    )  # fmt: skip
    assert max(found.values()) <= LIMIT_BYTES, found
