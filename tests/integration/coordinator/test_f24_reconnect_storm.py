"""F24: a coordinator is killed, and all of its agents reconnect at once; none is declared lost.
`benchmarks/links.py` does it for any number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.report import record

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "links.py"
ALL_SEEN_S = 15.0
pytestmark = pytest.mark.alone


def reconnect_storm(link: str, agents: int) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--link", link, "--agents", str(agents), "--seconds", "3", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(done.stdout)
    assert found["agents"] == agents
    assert found["herd_s"] <= ALL_SEEN_S
    assert found["silent"] == 0, "nobody was called suspect or lost for the coordinator's own absence"
    record("F24", "P", 1, link=link, agents=agents, all_back_s=round(found["herd_s"], 2), called_silent=0)


@pytest.mark.parametrize("link", ["grpc", pytest.param("mqtt", marks=pytest.mark.long)])
def test_f24_all_agents_are_back_soon_and_none_is_called_lost(link: str) -> None:
    reconnect_storm(link, 200)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("link", ["grpc", "mqtt"])
def test_f24_two_thousand_agents(link: str) -> None:
    reconnect_storm(link, 2000)
