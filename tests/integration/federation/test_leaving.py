"""A region that leaves its federation under load: what others run for it is home first. Longer than the default run."""

import re
from pathlib import Path

import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, InferenceLoad, documents, policy, region, workload
from harness.wait import wait_until

pytestmark = [pytest.mark.long, pytest.mark.alone]

CHEAPEST = "  optimize: {cost: 1.0}\n  federation: {delegate: when-better}\n"


def test_leaving_ends_agreements_in_good_order_and_loses_nothing(tmp_path: Path) -> None:
    with region(tmp_path, 1, regions=2, federation=1) as stack:
        stack.apply(documents(policy("cheap", CHEAPEST), workload("moves", "relu", "cheap")))

        def runs_away() -> bool:
            with stack.api() as api:
                return any(row.service == "ready" for row in api.get("agreements").agreements)

        wait_until(runs_away, WAIT_TIMEOUT_S, "the cheaper region to run it", every_s=0.2)
        with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "moves") as load:
            load.wait_for(100)
            wait_until(lambda: not stack.placements("moves"), WAIT_TIMEOUT_S, "home to be rid of it", every_s=0.2)
            explained = stack.shoal("explain", "moves").stdout
            assert "DELEGATED to home-2 under agreement" in explained
            assert " of 0 placed" not in explained
            assert re.search(r"home-2 runs it, under agreement g-\w+, since 20", explained), explained
            assert "nothing to show" not in explained
            asked = stack.shoal("federation", "bids", "moves").stdout
            for word in ("solicited", "bid", "awarded", "granted", "USD/h", "p95"):
                assert word in asked, asked
            said = stack.shoal("federation", "leave").stdout
            assert "1 agreement to end" in said
            assert said.rstrip().endswith("left")
            load.wait_for(100)
        verdict = load.verdict()
        assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
        codes = [event.code for event in stack.events() if event.workload.name == "moves"]
        assert "BREACHED" not in codes
        assert codes.index("NOTICED") < codes.index("ENDED")
        with stack.api("home-2") as api:
            assert not [row for row in api.get("agreements").agreements if row.lease_s > 0]
