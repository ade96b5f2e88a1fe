"""The tutorial, unchanged, on containers; `tests/integration/test_pages.py` has the same on processes."""

from pathlib import Path

import pytest

from harness.clients import tutorial
from harness.cluster.compose import Compose
from harness.report import record
from shoal.client import Contexts

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(600)]


def test_the_tutorial_on_containers(hurt: Compose, tmp_path: Path) -> None:
    with tutorial.terminal(tmp_path, hurt.environment) as terminal:
        terminal.type(". .venv/bin/activate")
        try:
            walk = tutorial.run_walkthrough(terminal, Contexts(hurt.home))
            (agreed,) = (one for one in hurt.agreements() if one.workload.name == "archive")
        finally:
            hurt.delete_workloads("reader", "archive", "sturdy-reader")
    assert agreed.counterpart == "datacenter"
    assert (walk.lost_count, walk.wrong_count) == (0, 0), walk
    record(
        "issue 7, point 1", "C", 1, ten_minutes_s=round(walk.duration_s), delegated_to=agreed.counterpart,
        moves=2, sent=walk.sent_count, lost=walk.lost_count, wrong=walk.wrong_count,
    )  # fmt: skip
