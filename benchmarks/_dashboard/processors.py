"""Who uses the machine's processors: which threads run where, and what the rest of the machine takes."""

import os
import time
from pathlib import Path
from typing import Final

import psutil

TICKS: Final = os.sysconf("SC_CLK_TCK")
BUSY: Final = (0, 1, 2, 5, 6, 7)
"""Columns of `cpu` in /proc/stat that are work: user, nice, system, irq, softirq, steal (proc_stat(5))."""


class Sides:
    """Two processors, one for the region and one for the browser; None where there is only one."""

    def __init__(self) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        has_two = len(allowed) > 1
        self.region = allowed[0] if has_two else None
        self.browser = allowed[1] if has_two else None

    def __str__(self) -> str:
        if self.region is None:
            return "region and browser share one processor"
        return f"region on processor {self.region}, browser on {self.browser}"


def pin(processor: int | None) -> None:
    """The calling thread, and whatever it starts from now on, runs there alone."""
    if processor is not None:
        os.sched_setaffinity(0, {processor})


def tree_seconds() -> float:
    """Processor seconds of all that this process started and that still runs, and of what these have ended."""
    return sum(_seconds_of(each) for each in psutil.Process().children(recursive=True))


def _seconds_of(process: psutil.Process) -> float:
    try:
        taken = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(taken.user + taken.system + taken.children_user + taken.children_system)


class OthersMeter:
    """From its making on: the share of all processors that other programs took."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def share(self) -> float:
        took = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        others = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others) / took if took else 0.0


def _own_seconds() -> float:
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system + tree_seconds()


def _busy_seconds() -> float:
    columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(int(columns[at]) for at in BUSY) / TICKS
