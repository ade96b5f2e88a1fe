"""F31: every disk of a region stalls at each flush, or is a hundred times slower, while there is much to write."""

import statistics

import pytest

from harness.apart import ApartStack
from harness.report import record
from harness.stack import Load, documents, on_nodes, policy, workload
from shoal.agent.clock import SystemClock

WORSE_AT_MOST = 1.1
PHASE_S = 2.0
ATTEMPTS = 3
"""Other programs of the machine make a tail longer, never shorter: the best attempt counts."""


@pytest.mark.parametrize(
    ("what", "flush_s", "write_s"), [("flushes stall 5 s", 5.0, 0.0), ("100 times slower", 0.1, 0.002)]
)
def test_f31_slow_disk(region: ApartStack, what: str, flush_s: float, write_s: float) -> None:
    last = region.events()[-1].sequence
    ratios: list[float] = []
    host = region.net.address("gateway")
    with Load(region.port("gateway", "grpc"), region.client_files, "pair", host=host) as load:
        while len(ratios) < ATTEMPTS and (not ratios or min(ratios) > WORSE_AT_MOST):
            usual = _p99(load)
            with region.slow_disks(flush_s=flush_s, write_s=write_s):
                # Something to write for the coordinator and for every agent.
                region.apply(
                    documents(policy("slow", on_nodes(["cloud-gpu"])), workload(f"slow-{len(ratios)}", "relu", "slow"))
                )
                ratios.append(_p99(load) / usual)
            region.serves(f"slow-{len(ratios) - 1}")
    verdict = load.verdict()
    region.forget(*(f"slow-{number}" for number in range(len(ratios))))
    assert (verdict.lost, verdict.violations) == (0, ()), str(verdict)
    assert [event.code for event in region.events(last) if event.code in ("NODE_SUSPECT", "NODE_LOST")] == []
    assert min(ratios) <= WORSE_AT_MOST
    record(
        "F31",
        "P",
        len(ratios),
        disk=what,
        p99_ratio=round(min(ratios), 2),
        p99_ratios_median=round(statistics.median(ratios), 2),
        nodes_lost=0,
        sent=verdict.sent,
    )


def _p99(load: Load) -> float:
    """Seconds, of what was sent and answered within the next `PHASE_S`."""
    since = SystemClock().now()
    load.wait_for(1, after_s=PHASE_S)
    spent = sorted(load.latencies(since))
    return spent[int(0.99 * len(spent))]
