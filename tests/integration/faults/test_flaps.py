"""F19: a link that comes and goes under load, then stays away for long; nothing healthy is touched.

Two clients ask all the while: one at the gateway, one at the very machine that is cut off from all others. Scaled in
`make test`: beats a quarter as long, silence and flaps a fifth. Whole: `-m long`.
"""

from dataclasses import dataclass

import pytest

from harness.cluster.netns_stack import NetnsStack
from harness.cluster.stack import InferenceLoad, documents, policy, workload
from harness.faults.netns import TEST_MACHINE
from harness.report import record
from harness.wait import wait_until

pytestmark = pytest.mark.alone

NODE = "edge-npu"
FLAPS = 10


@dataclass(frozen=True)
class Scale:
    """Seconds. up: between two flaps. for_good: of the last cut, which outlasts `lost_after`."""

    flap: float
    up: float
    for_good: float
    partition: str


AS_SHIPPED = Scale(5.0, 5.0, 360.0, "{heartbeat: 1s, lost_after: 10s}")
SCALED = Scale(1.0, 0.5, 4.0, "{heartbeat: 250ms, lost_after: 2500ms}")


@pytest.mark.parametrize(
    "scale", [SCALED, pytest.param(AS_SHIPPED, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_f19_ten_flaps_and_a_long_cut(region: NetnsStack, scale: Scale) -> None:
    """`moving` may be replaced elsewhere when its node is gone; `pair` has its other replica."""
    beat = policy("beat", f"  partition: {scale.partition}\n  require: {{where: \"node.name == '{NODE}'\"}}\n")
    region.apply(documents(beat, workload("paced", "relu", "beat")))
    region.apply(
        documents(
            policy("free", "  require: {where: \"node.name in ['edge-npu', 'cloud-gpu']\"}\n"),
            workload("moving", "relu", "free"),
        )
    )
    try:
        region.wait_serving("paced")
        region.wait_serving("moving")
        workers, last = region.workers(), region.events()[-1].sequence
        with _load(region, "gateway", "pair") as far, _load(region, NODE, "paced") as near:
            dropped = 0
            for seconds in (*[scale.flap] * FLAPS, scale.for_good):
                cut = region.net.isolate(NODE, but=TEST_MACHINE)
                near.wait_for(1, after_s=seconds)
                dropped += region.net.packets_dropped(*cut)
                region.net.heal()
                far.wait_for(1, after_s=scale.up)
            assert dropped > 0
            changes = _codes(region, last, "NODE_LOST")
            wait_until(region.is_steady, 60.0, "the region to be whole")
            far.wait_for(20)
        verdicts = far.verdict(), near.verdict()
        for verdict in verdicts:
            assert (verdict.lost_count, verdict.violations) == (0, ()), f"{verdict}; {_event_lines(region, last)}"
        assert "NODE_LOST" in changes, "the long cut was long"
        silent = {event.node for event in region.events(last) if event.code in ("NODE_SUSPECT", "NODE_LOST")}
        assert silent == {NODE}, _event_lines(region, last)
        left = region.workers()
        kept = {name: process for name, process in workers.items() if name in left}
        assert kept == {name: left[name] for name in kept}, "no replica was restarted"
        assigned = [event.workload.name for event in region.events(last) if event.code == "ASSIGNED"]
        assert assigned in ([], ["moving"]), "replaced once at most"
        assert region.doctor() == []
        record(
            "F19", "P", 1, flaps=FLAPS, flap_s=scale.flap, long_cut_s=scale.for_good, replacements=len(assigned),
            restarts=0, lost=0, sent=sum(verdict.sent for verdict in verdicts), packets_dropped=dropped,
            slowest_far_s=round(verdicts[0].slowest_s, 2), slowest_near_s=round(verdicts[1].slowest_s, 2),
        )  # fmt: skip
    finally:
        region.net.heal()
        region.delete_workloads("paced", "moving")


def _load(region: NetnsStack, at: str, name: str) -> InferenceLoad:
    return InferenceLoad(region.port(at, "data"), region.client_files, name, clients=2, host=region.net.address(at))


def _event_lines(region: NetnsStack, since: int) -> list[str]:
    return [f"{event.at:.2f} {event.code} {event.node} {event.message}" for event in region.events(since)]


def _codes(region: NetnsStack, since: int, *wanted: str) -> list[str]:
    return [event.code for event in region.events(since) if event.code in wanted]
