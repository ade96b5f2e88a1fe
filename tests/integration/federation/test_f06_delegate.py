"""F06: a region's coordinator is down under load while the region serves a workload for another one."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from harness.cluster.delegation import (
    LEASE_S,
    NEAR,
    agreements,
    delete_delegated,
    gateway_load,
    in_regions,
    is_renewed,
    wait_all_acquainted,
    wait_delegated,
)
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad
from harness.report import record
from harness.wait import wait_until

DOWN_S = 5.0


@contextmanager
def silent_nodes(stack: DevStack, *names: str) -> Iterator[None]:
    """They do not connect meanwhile, as while they wait between two attempts. What serves requests runs on."""
    stopped = [pid for name in names for pid, _ in stack.processes(name, "supervisor")]
    assert len(stopped) == len(names), f"each of {names} has a supervisor"
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def are_nodes_back(stack: DevStack, region: str) -> bool:
    """Whether the region's coordinator hears all of its nodes."""
    with stack.api(region) as api:
        return all(node.liveness == "ready" for node in api.get("nodes").nodes)


def is_renewed_since(stack: DevStack, load: InferenceLoad, since: float) -> bool:
    """Whether home's last renewal that was answered was sent later than that."""
    past_s = load.now() - since
    (own,) = agreements(stack, load.workload)
    return own.lease_s > LEASE_S - past_s


def test_f06_the_coordinator_of_a_serving_region_is_down_under_load(neighbourhood: DevStack) -> None:
    """Its nodes serve on, and nothing that it says before it hears them again takes them out of the other's routes."""
    stack = neighbourhood
    members = [each for each in stack.info.stack.members if each.region == NEAR]
    (coordinator,) = [each.name for each in members if each.role == "coordinator"]
    nodes = [each.name for each in members if each.role in ("agent", "gateway")]
    stack.apply(in_regions("away", NEAR))
    agreed = wait_delegated(stack, "away")
    before = stack.events()[-1].sequence
    with gateway_load(stack, "away") as load:
        began = load.now()
        stack.kill(coordinator)
        load.wait_for(20, after_s=DOWN_S)
        with silent_nodes(stack, *nodes):
            back = load.now()
            stack.control.break_member(coordinator, "resume")
            wait_until(lambda: is_renewed_since(stack, load, back), WAIT_TIMEOUT_S, "the agreement to be renewed")
        wait_until(lambda: are_nodes_back(stack, NEAR), WAIT_TIMEOUT_S, "its nodes to be back")
        wait_until(lambda: is_renewed(stack, "away"), WAIT_TIMEOUT_S, "the agreement to be renewed again")
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert [view.agreement for view in agreements(stack, "away")] == [agreed.agreement]
    assert [event.code for event in stack.events(before) if event.workload.name == "away"] == [], "nothing happened"
    record(
        "F06", "P", 1, what="a serving region's coordinator", outage_s=round(back - began, 1), sent=verdict.sent,
        lost=verdict.lost_count, slowest_s=round(verdict.slowest_s, 3),
    )  # fmt: skip
    delete_delegated(stack, "away")
    wait_all_acquainted(stack)
