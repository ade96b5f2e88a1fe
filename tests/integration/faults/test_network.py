"""Machines that are cut off from each other without a reset: F04, F18 and F22 on real processes in namespaces.

Every cut is in the path of packets, and its counter must have moved. Times are as shipped: a heartbeat a second.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.cluster.netns_stack import NetnsStack
from harness.cluster.stack import InferenceLoad, documents, policy, workload
from harness.faults.netns import NetnsNetwork
from harness.measure.contention import RunDelay
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.types.codes import Code
from shoal.types.workload import PartitionRule

pytestmark = pytest.mark.alone

SUSPECT_WITHIN_S = 3.0
LINK_WITHIN_S = 3.0
DATA_WITHIN_S = 1.0
REPLACED_WITHIN_S = 5.0
STANDBY_WITHIN_S = 1.0
DEAD_WAYS = {"cloud-gpu": "both", "edge-npu": "up", "plain-cpu": "down"}
TICK_S = 0.5
"""Between two looks of the coordinator (0.25 s), of the one who asks it (0.1 s), and to cut at all."""


@contextmanager
def gateway_load(region: NetnsStack, name: str, clients: int = 4) -> Iterator[InferenceLoad]:
    host = region.net.address("gateway")
    with InferenceLoad(region.port("gateway", "data"), region.client_files, name, clients, host=host) as load:
        yield load


def run_delay(region: NetnsStack, *roles: str) -> RunDelay:
    """Of what has these roles, and of the client."""
    return RunDelay(os.getpid(), *(pid for role in roles for pid, _ in region.processes(role=role)))


def test_f04_whole_node_gone_without_a_reset(region: NetnsStack) -> None:
    """Suspect in time, and replaced where another device fits; the old one is sold to nobody meanwhile."""
    clock = SystemClock()
    region.apply(documents(policy("any", "  optimize: {latency: 1.0}\n"), workload("single", "relu", "any")))
    (placed,) = region.wait_serving("single")
    last = region.events()[-1].sequence
    try:
        with gateway_load(region, "single") as load:
            delay = run_delay(region, "coordinator")
            cut = region.net.isolate(placed.node)
            at = clock.now()
            wait_until(lambda: region.liveness(placed.node) == "suspect", 20.0, "it to be suspect")
            suspect_s, delayed_s = clock.now() - at, delay.seconds()
            delay = run_delay(region, "coordinator", "supervisor", "worker", "front")
            (other,) = wait_until(
                lambda: [row for row in region.serving("single") if row.node != placed.node], 30.0, "a replacement"
            )
            replaced_s = clock.now() - at - suspect_s
            slowed_s = delay.slowdown_s()
            load.wait_for(40)
            assert region.net.packets_dropped(*cut) > 0
        verdict = load.verdict()
        assert verdict.violations == (), str(verdict)
        assert suspect_s - delayed_s <= SUSPECT_WITHIN_S + TICK_S, f"of which {delayed_s:.2f} s others hold the cores"
        assert replaced_s - slowed_s <= REPLACED_WITHIN_S, f"of which {slowed_s:.2f} s others hold the cores"
        assigned = [
            event for event in region.events(last) if event.code == "ASSIGNED" and event.workload.name == "single"
        ]
        assert [event.node for event in assigned] == [other.node], "one replacement"
        of_the_cut = (placed.node, Code.NODE_SUSPECT)  # `pair` may have been there as well
        assert [check for check in region.doctor() if not any(each in check for each in of_the_cut)] == []
        record(
            "F04", "P", 1, suspect_s=round(suspect_s, 2), in_service_after_suspect_s=round(replaced_s, 2),
            sent=verdict.sent, answered=verdict.answered, packets_dropped=region.net.packets_dropped(*cut),
        )  # fmt: skip
    finally:
        region.net.heal()
        region.delete_workloads("single")


@pytest.mark.long
def test_f04_whole_node_gone_without_a_reset_and_another_stands_by(region: NetnsStack) -> None:
    """Requests go to the standby before anybody is suspect; once it is, the standby is the active one."""
    kept = policy("kept", "  require: {availability: {standby: warm}}\n  optimize: {latency: 1.0}\n")
    region.apply(documents(kept, workload("single", "relu", "kept")))
    placed = next(row for row in region.wait_serving("single", 2) if not row.assignment.standby)
    try:
        with gateway_load(region, "single") as load:
            cut, at = region.net.isolate(placed.node), load.now()
            wait_until(lambda: region.liveness(placed.node) == "suspect", 20.0, "it to be suspect")
            suspect_s = load.now() - at
            wait_until(
                lambda: [
                    row for row in region.serving("single") if row.node != placed.node and not row.assignment.standby
                ],
                30.0,
                "the other to be the active one",
            )
            promoted_s = load.now() - at - suspect_s
            load.wait_for(40)
            assert region.net.packets_dropped(*cut) > 0
        verdict = load.verdict()
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
        assert suspect_s <= SUSPECT_WITHIN_S + TICK_S
        assert promoted_s <= STANDBY_WITHIN_S
        silent_s = load.longest_gap_s(at)
        assert silent_s <= DATA_WITHIN_S + TICK_S
        record(
            "F04", "P", 1, standby="warm", suspect_s=round(suspect_s, 2), active_after_suspect_s=round(promoted_s, 2),
            silent_s=round(silent_s, 2), sent=verdict.sent, lost=verdict.lost_count,
        )  # fmt: skip
    finally:
        region.net.heal()
        region.delete_workloads("single")


def test_f18_half_open_way_to_a_replica(region: NetnsStack) -> None:
    """A request that is inside when the way breaks moves on within a second; so does one that meets the broken way."""
    with gateway_load(region, "pair") as load:
        delay = RunDelay(os.getpid(), *(pid for pid, _ in region.processes("gateway", "front")))
        cut = region.net.isolate("edge-npu")
        load.wait_for(200)
        dropped = region.net.packets_dropped(*cut)
        delayed_s = delay.seconds()
    verdict = load.verdict()
    assert dropped > 0
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert verdict.slowest_s - delayed_s <= DATA_WITHIN_S + TICK_S, (
        f"{verdict}, of which {delayed_s:.2f} s others hold the cores"
    )
    record(
        "F18",
        "P",
        1,
        where="gateway to replica",
        sent=verdict.sent,
        lost=0,
        slowest_s=round(verdict.slowest_s, 2),
        packets_dropped=dropped,
    )


def test_f18_half_open_link(region: NetnsStack) -> None:
    """Both ends find out, whichever direction is dead. One direction each, three machines at once."""
    clock, net = SystemClock(), region.net
    before = {node: len(region.log_lines(node, "session_closed")) for node in DEAD_WAYS}
    cuts = {
        node: net.isolate(node) if way == "both" else _one_way(net, node, way == "up")
        for node, way in DEAD_WAYS.items()
    }
    at, delay = clock.now(), run_delay(region, "supervisor")
    found_s = dict[str, float]()

    def have_all_noticed() -> bool:
        for node, count in before.items():
            if node not in found_s and len(region.log_lines(node, "session_closed")) > count:
                found_s[node] = clock.now() - at - delay.seconds()
        return len(found_s) == len(DEAD_WAYS)

    wait_until(have_all_noticed, 20.0, "the agents to give their links up")
    for node in DEAD_WAYS:
        assert net.packets_dropped(*cuts[node]) > 0
        wait_until(lambda node=node: region.liveness(node) == "suspect", 20.0, "the coordinator to miss it")  # type: ignore[misc]
    net.heal()
    healed = clock.now()
    wait_until(region.is_steady, 30.0, "the links again")
    back_s = round(clock.now() - healed, 2)
    assert max(found_s.values()) <= LINK_WITHIN_S + TICK_S, found_s
    told = {DEAD_WAYS[node]: round(seconds, 2) for node, seconds in found_s.items()}
    record("F18", "P", 3, where="link", found_s=told, all_back_s=back_s)


@pytest.mark.parametrize("where", ["coordinator", "peers"])
def test_f22_asymmetric_cut(region: NetnsStack, where: str) -> None:
    """One direction only, each on a machine of its own; or two machines that do not see each other while both see the
    coordinator: at most one change of state a window, and at most one replacement."""
    net = region.net
    workers, last = region.workers(), region.events()[-1].sequence
    with gateway_load(region, "pair") as load:
        if where == "peers":
            cuts: tuple[str, ...] = net.cut("gateway", "edge-npu"), net.cut("edge-npu", "gateway")
        else:
            cuts = *_one_way(net, "edge-npu", True), *_one_way(net, "cloud-gpu", False)
        load.wait_for(40, after_s=PartitionRule().lost_after_s / (5 if where == "peers" else 2))
        dropped = [net.packets_dropped(cut) for cut in cuts]
        net.heal()
        load.wait_for(40)
    verdict = load.verdict()
    region.wait_steady()
    events = region.events(last)
    changes = Counter(event.node for event in events if event.code in ("NODE_SUSPECT", "NODE_LOST", "NODE_READY"))
    assigned = [event for event in events if event.code == "ASSIGNED"]
    assert min(dropped) > 0
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert set(changes) <= (set() if where == "peers" else {"edge-npu", "cloud-gpu"})
    assert set(changes.values()) <= {2}, "away once, back once"
    assert len(assigned) <= len(changes)
    assert region.workers() == workers, "nothing was restarted"
    record(
        "F22", "P", 1, cut=where, sent=verdict.sent, lost=0, changes=dict(changes), replacements=len(assigned),
        slowest_s=round(verdict.slowest_s, 2), packets_dropped=sum(dropped),
    )  # fmt: skip


def _one_way(net: NetnsNetwork, node: str, up: bool) -> tuple[str, ...]:
    return (net.cut(node, "coordinator") if up else net.cut("coordinator", node),)
