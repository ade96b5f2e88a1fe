"""F42: the federation is lost. It has two replicas here: one is killed under load, and trades go on through the
other."""

from pathlib import Path

import pytest

from harness.cluster.delegation import (
    HOME,
    NEAR,
    agreements,
    gateway_load,
    in_regions,
    knows_all_regions,
    wait_delegated,
)
from harness.cluster.stack import WAIT_TIMEOUT_S, region
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock


@pytest.mark.long
@pytest.mark.timeout(300)
def test_f42_trades_go_on_through_the_other_replica(tmp_path: Path) -> None:
    clock = SystemClock()
    with region(tmp_path, 1, regions=2, federation=2, store="etcd") as stack:
        stack.apply(in_regions("away", NEAR))
        agreed = wait_delegated(stack, "away")
        traded_s = []
        with gateway_load(stack, "away") as load:
            for number in (1, 2):  # each is the only one once, whichever home spoke with
                stack.kill(f"federation-{number}")
                began = clock.now()
                stack.apply(in_regions(f"after-{number}", NEAR))
                assert wait_delegated(stack, f"after-{number}").counterpart == NEAR
                traded_s.append(clock.now() - began)
                wait_until(lambda: knows_all_regions(stack, HOME), WAIT_TIMEOUT_S, "home to hear the other replica")
                stack.control.break_member(f"federation-{number}", "resume")
                load.wait_for(20)
        verdict = load.verdict()
        assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
        assert [view.agreement for view in agreements(stack, "away")] == [agreed.agreement]
        record(
            "F42", "P", len(traded_s), replicas=2, store="etcd", sent=verdict.sent, lost=verdict.lost_count,
            slowest_s=round(verdict.slowest_s, 3), traded_s=[round(each, 2) for each in traded_s],
        )  # fmt: skip
