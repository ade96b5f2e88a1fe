"""How a worker keeps its place on the machine."""

import subprocess
import sys

import pytest

from shoal.agent.worker.isolation import run_at_low_priority

NICE = """
import os, threading
from shoal.agent.worker.isolation import run_at_low_priority
os.nice(max(0, {above} - os.nice(0)))
print(run_at_low_priority(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) - os.nice(0))
"""


@pytest.mark.parametrize("agents", [12, 19])
def test_a_load_runs_though_its_agent_was_started_at_a_lower_priority(agents: int) -> None:
    """Only root may raise a priority."""
    done = subprocess.run(
        [sys.executable, "-c", NICE.format(above=agents)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_what_a_load_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_at_low_priority(lambda: 1 // 0)
