"""F26 and F27: wall clocks that are wrong, and that jump, on every machine of a region under load."""

import pytest
from integration.faults.clocks import PAIR, SKEW_S

from harness.cluster.netns_stack import NetnsStack
from harness.cluster.stack import InferenceLoad
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code

pytestmark = pytest.mark.alone

HOUR, YEAR = 3600, 31_536_000
JUMPS = (HOUR, -HOUR, YEAR, -YEAR)
HELD_S = 1.5
"""Longer than a beat, at each of which a coordinator looks at its clock."""
SEEN_S = 20.0


def test_f27_ten_minutes_of_skew_are_told_and_decide_nothing(region: NetnsStack) -> None:
    """Every other test of this folder runs on the same machines, and demands the right decisions of them."""
    told = [(event.node, event.message) for event in region.events() if event.code == Code.CLOCK_SKEW]
    ways = {(node, way) for node, message in told for way in ("behind", "ahead") if way in message}
    assert ways == set(zip(PAIR, ("behind", "ahead"), strict=True))
    with InferenceLoad(
        region.port("gateway", "data"), region.client_files, "pair", host=region.net.address("gateway")
    ) as load:
        load.wait_for(40)
    assert (load.verdict().lost_count, load.verdict().violations) == (0, ())
    assert region.doctor() == []
    record("F27", "P", 1, skew_s=SKEW_S, nodes_told=len(ways), sent=load.verdict().sent, lost=0)


@pytest.mark.parametrize("where", [PAIR[1], "gateway", "coordinator"])
def test_f26_a_wall_clock_that_jumps_ends_nothing(region: NetnsStack, where: str) -> None:
    """Forwards and back, by an hour and by a year, on one component after the other.

    A node tells it and goes on. A coordinator a year away takes every certificate for ended, or for not valid yet, and
    hands out such: the region is made of islands until its clock is right."""
    tells = "gateway" if where == "coordinator" else where
    of = ("session_closed", "coordinator_connection_failed") if where == "coordinator" else ("node_event_reported",)
    strikes = YEAR if where == "coordinator" else JUMPS[0]  # a node tells it once, until its clock is right again
    before = len(_clock_error_codes(region, tells, *of))
    clock, right = region.clocks[where], region.clocks[where].ahead_s
    workers, last = region.workers(), region.events()[-1].sequence
    with InferenceLoad(
        region.port("gateway", "data"), region.client_files, "pair", host=region.net.address("gateway")
    ) as load:
        for seconds in JUMPS:
            clock.jump(right + seconds)
            load.wait_for(10, after_s=HELD_S)
            if seconds == strikes:
                wait_until(lambda: len(_clock_error_codes(region, tells, *of)) > before, SEEN_S, "it is seen")
        clock.jump(right)
        region.wait_steady()
        load.wait_for(10)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert region.workers() == workers
    gone = [event.code for event in region.events(last) if event.code in ("NODE_LOST", "ASSIGNED", "REMOVED")]
    assert gone == []
    record("F26", "P", 1, where=where, jumps=len(JUMPS), sent=verdict.sent, lost=0, restarts=0)


def _clock_error_codes(region: NetnsStack, name: str, *events: str) -> list[str]:
    codes = (Code.CLOCK_SKEW, Code.CERT_EXPIRED, Code.CERT_NOT_YET_VALID)
    return [line["code"] for event in events for line in region.log_lines(name, event) if line["code"] in codes]
