"""F20: a machine that is cut off for long, with clients of its own, and replaced meanwhile; then it is back.

An hour is scaled to seconds, with beats and `lost_after` a quarter as long.
"""

from harness.cluster.netns_stack import NetnsStack
from harness.cluster.stack import InferenceLoad, documents, policy, workload
from harness.faults.netns import TEST_MACHINE
from harness.report import record
from harness.wait import wait_until

AWAY_S = 4.0
"""After it was given up for lost and replaced."""
SPEC = """  partition: {heartbeat: 250ms, lost_after: 2500ms}
  require: {where: "node.name in ['edge-npu', 'cloud-gpu']"}
"""


def test_f20_cut_off_for_long_and_back(region: NetnsStack) -> None:
    """The island serves on; when it is back one replica stays and the other drains, under its clients' requests."""
    region.apply(documents(policy("away", SPEC), workload("held", "relu", "away")))
    try:
        (home,) = region.wait_serving("held")
        last = region.events()[-1].sequence
        port, host = region.port(home.node, "data"), region.net.address(home.node)
        with InferenceLoad(port, region.client_files, "held", clients=2, host=host) as island:
            cut = region.net.isolate(home.node, but=TEST_MACHINE)
            wait_until(lambda: region.liveness(home.node) == "lost", 30.0, "it to be given up")
            (other,) = wait_until(lambda: region.serving("held"), 30.0, "a replacement")
            island.wait_for(20, after_s=AWAY_S)
            dropped = region.net.packets_dropped(*cut)
            region.net.heal()
            wait_until(lambda: region.liveness(home.node) == "ready", 30.0, "it to be back")
            (left,) = region.wait_serving("held")
            both = {home.assignment.id, other.assignment.id}
            wait_until(lambda: region.workers().keys() & both == {left.assignment.id}, 30.0, "one of the two to stay")
            island.wait_for(20)
        verdict = island.verdict()
        events = [event for event in region.events(last) if event.workload.name == "held"]
        assert dropped > 0
        assert other.node != home.node
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
        assert [event.node for event in events if event.code == "ASSIGNED"] == [other.node], "replaced once"
        assert region.doctor() == []
        record(
            "F20", "P", 1, away_s=AWAY_S, sent=verdict.sent, lost=0, slowest_s=round(verdict.slowest_s, 2),
            stayed="the island's" if left.assignment.id == home.assignment.id else "the replacement",
            packets_dropped=dropped,
        )  # fmt: skip
    finally:
        region.net.heal()
        region.delete_workloads("held")
