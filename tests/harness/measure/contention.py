"""How much other programs slow this machine now, for figures that are stated for an idle machine."""

import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shoal.agent.clock import SystemClock

USUAL_IMPORT_S = 0.8
"""What `import_duration_s` says on two cores with nothing else to do, at most."""

Thread = tuple[int, int]
"""(process, thread)."""


class RunDelay:
    """Seconds in which threads of some processes could run and got no processor, beside a figure that is stated for
    free processors: what other programs took from just that figure. What the processes wait for in any other way, and
    what they compute, is theirs and counts for nothing here.

    Threads that waited at the same time count each, so it is the most that the figure can have lost. On an idle machine
    that is next to nothing, and the figure is judged as it is.
    """

    def __init__(self, *pids: int) -> None:
        """From now on."""
        self._pids = {*pids}
        self._before = _run_delays_s(self._pids)
        self._last = dict(self._before)

    def add(self, *pids: int) -> None:
        """Processes that were started since: from their start on."""
        self._pids |= {*pids}

    def seconds(self) -> float:
        """So far; of a thread that has ended, up to the last call before that."""
        self._last |= _run_delays_s(self._pids)
        return sum(waited - self._before.get(thread, 0.0) for thread, waited in self._last.items())

    def slowdown_s(self) -> float:
        """By how much a figure of seconds may be longer than on a machine with nothing else to do."""
        return self.seconds() + startup_slowdown_s()


def import_duration_s() -> float:
    """Seconds that a Python process takes now to import what a supervisor imports."""
    clock = SystemClock()
    started = clock.now()
    subprocess.run([sys.executable, "-c", "import shoal.agent.main.run"], check=True, timeout=60)
    return clock.now() - started


def startup_slowdown_s() -> float:
    """Seconds by which a supervisor's start takes longer than on an idle machine."""
    return max(0.0, import_duration_s() - USUAL_IMPORT_S)


def _run_delays_s(pids: Iterable[int]) -> dict[Thread, float]:
    """Source: the kernel's Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat"."""
    found: dict[Thread, float] = {}
    for pid in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError, IndexError):
                    found[pid, int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found
