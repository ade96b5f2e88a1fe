"""F31: slow disks. Every disk of a region stalls at each flush, or is a hundred times slower, while there is much to
write: no node is lost."""

import statistics
from contextlib import AbstractContextManager, nullcontext

import pytest

from harness.cluster.netns_stack import NetnsStack
from harness.cluster.stack import WAIT_TIMEOUT_S, InferenceLoad, documents, on_nodes, policy, workload
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock

pytestmark = pytest.mark.alone

WORSE_AT_MOST = 1.1
PHASE_S = 2.0
ATTEMPTS = 5
"""Other programs of the machine make a tail longer, never shorter, and keep a node from telling of itself: the best
attempt counts. What waits for a disk waits in every one."""


@pytest.mark.parametrize(
    ("what", "flush_s", "write_s", "at_most_s"),
    [
        ("flushes stall 5 s", 5.0, 0.0, 20.0),
        pytest.param("flushes stall 5 s", 5.0, 0.0, 120.0, marks=pytest.mark.long),
        ("100 times slower", 0.1, 0.002, 60.0),
    ],
)
def test_f31_slow_disk(region: NetnsStack, what: str, flush_s: float, write_s: float, at_most_s: float) -> None:
    """at_most_s: then the disks are good again: it takes about a dozen flushes for another replica to serve."""
    ratios: list[float] = []
    silent: list[list[str]] = []
    host = region.net.address("gateway")
    with InferenceLoad(region.port("gateway", "data"), region.client_files, "pair", host=host) as load:
        while len(ratios) < ATTEMPTS and (not ratios or min(ratios) > WORSE_AT_MOST or all(silent)):
            last = region.events()[-1].sequence
            calm = _p99_while_placing(region, load, f"calm-{len(ratios)}", nullcontext())
            disks = region.slow_disks(flush_s=flush_s, write_s=write_s)
            ratios.append(_p99_while_placing(region, load, f"slow-{len(ratios)}", disks, flush_s, at_most_s) / calm)
            silent.append(_silences(region, last))
    verdict = load.verdict()
    region.delete_workloads(*(f"{phase}-{number}" for phase in ("calm", "slow") for number in range(len(ratios))))
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert [] in silent, silent
    assert not [each for attempt in silent for each in attempt if each.startswith("NODE_LOST")], silent
    assert min(ratios) <= WORSE_AT_MOST
    record(
        "F31", "P", len(ratios), disk=what, p99_ratio=round(min(ratios), 2), nodes_lost=0, sent=verdict.sent,
        p99_ratios_median=round(statistics.median(ratios), 2), attempts_with_a_suspect=sum(map(bool, silent)),
    )  # fmt: skip


def _silences(region: NetnsStack, since: int) -> list[str]:
    codes = ("NODE_SUSPECT", "NODE_LOST")
    return [f"{event.code} {event.node} {event.message}" for event in region.events(since) if event.code in codes]


def _p99_while_placing(
    region: NetnsStack,
    load: InferenceLoad,
    name: str,
    disks: AbstractContextManager[None],
    flush_s: float = 0.0,
    at_most_s: float = WAIT_TIMEOUT_S,
) -> float:
    """Seconds, of `load`'s answers while there is something to write for the coordinator and for every agent, and
    another worker starts: what that costs on this machine is no fault of the disks. It serves when this returns."""
    clock = SystemClock()
    with disks:
        since = clock.now()
        region.apply(documents(policy("slow", on_nodes(["cloud-gpu"])), workload(name, "relu", "slow")))
        assert clock.now() - since >= flush_s, "the disk was slow"
        wait_until(
            lambda: region.serving(name) or clock.now() - since >= at_most_s, WAIT_TIMEOUT_S + at_most_s, "it to serve"
        )
        load.wait_for(1, after_s=max(0.0, since + PHASE_S - clock.now()))
        spent = sorted(load.latencies(since, clock.now()))
    region.wait_serving(name)
    return spent[int(0.99 * len(spent))]
