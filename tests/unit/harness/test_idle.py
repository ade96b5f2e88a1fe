"""`tests/idle.sh`: how a program runs under it, and how that ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.timeout(60)
IDLE: Final = Path(__file__).parents[2] / "idle.sh"
TOLD: Final = """
import os, pathlib
group = pathlib.Path("/proc/self/autogroup")
print(os.getsid(0), os.sched_getscheduler(0), group.read_text().split()[-1] if group.exists() else 19, flush=True)
"""


def test_a_program_is_idle_in_a_session_of_its_own_which_is_the_lightest() -> None:
    told = subprocess.run([IDLE, sys.executable, "-c", TOLD], capture_output=True, text=True, check=True).stdout.split()
    session, scheduler, weight = map(int, told)
    assert session != os.getsid(0)
    assert scheduler == os.SCHED_IDLE
    assert weight == 19


def test_its_status_is_the_program_s() -> None:
    assert subprocess.run([IDLE, "sh", "-c", "exit 3"], check=False).returncode == 3


def test_its_end_is_the_end_of_all_that_the_program_started() -> None:
    command = "trap 'echo ended; exit' TERM; sh -c 'echo begun; exec sleep 600' & wait"
    with subprocess.Popen([IDLE, "sh", "-c", command], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        running.send_signal(signal.SIGTERM)
        # Until nobody holds its other end.
        assert running.stdout.read() == "ended\n"
    assert running.returncode == 128 + signal.SIGTERM
