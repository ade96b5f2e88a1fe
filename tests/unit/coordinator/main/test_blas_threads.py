"""Matrix products of a coordinator run in the thread that asks for them."""

import os
import subprocess
import sys

STARTED = """
import os
from importlib.metadata import entry_points
(coordinator,) = entry_points(group="console_scripts", name="shoal-coordinator")
coordinator.load()
import numpy as np
square = np.ones((512, 512))
square @ square
print(len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""
"""What `shoal-coordinator` imports before it reads its options, and a product that OpenBLAS would divide."""


def threads_of_coordinator(**given: str) -> tuple[int, str]:
    """All its threads, and how many OpenBLAS was to take."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", STARTED]
    environment |= given
    said = subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True, text=True)
    threads, asked = said.stdout.split()
    return int(threads), asked


def test_a_coordinator_multiplies_in_one_thread() -> None:
    """`learn` runs on its event loop: with a thread for each core, it waits for cores that others have."""
    assert threads_of_coordinator() == (1, "1")


def test_whoever_starts_it_may_say_otherwise() -> None:
    processors = len(os.sched_getaffinity(0))
    assert threads_of_coordinator(OPENBLAS_NUM_THREADS="2") == (min(2, processors), "2")
