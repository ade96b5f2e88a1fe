"""CPU time and memory of servers' processes, by role."""

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

Roles = Mapping[str, Iterable[int]]
"""Process ids by role."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of all processes of one server, in bytes."""

    # Resident memory; what processes share counts in each.
    rss: int
    # Proportional memory: what processes share counts once.
    pss: int


def tree(root: int, roles: Mapping[str, str] | None = None) -> dict[str, list[int]]:
    """The process and all below it, by their names. roles: what a name is called instead."""
    found = defaultdict[str, list[int]](list)
    with suppress(psutil.Error):
        process = psutil.Process(root)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                name = re.split(r"[.:]oip|\.", each.name())[0]  # Ray's name what they do at the moment
                found[(roles or {}).get(name, name)].append(each.pid)
    return dict(found)


CpuTimes = Mapping[tuple[str, int, int], int]
"""Nanoseconds on a CPU since the start, by role, process and thread."""


def cpu_times(roles: Roles) -> CpuTimes:
    """By the scheduler's own count: the clock's ticks of 10 ms are too coarse for a short round."""
    found = dict[tuple[str, int, int], int]()
    for role, pids in roles.items():
        for pid in pids:
            with suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    with suppress(OSError):
                        found[role, pid, int(thread.name)] = int((thread / "schedstat").read_text().split()[0])
    return found


def cpu_between(before: CpuTimes, after: CpuTimes) -> dict[str, float]:
    """CPU seconds by role, of the processes that ran before. What threads took that ended meanwhile is not seen."""
    known = {pid for _, pid, _ in before}
    found = dict[str, float]()
    for (role, pid, thread), used in after.items():
        if pid in known:
            found[role] = found.get(role, 0.0) + (used - before.get((role, pid, thread), 0)) / 1e9
    return found


def memory(roles: Roles) -> Memory:
    rss = pss = 0
    for pids in roles.values():
        for pid in pids:
            with suppress(psutil.Error):
                found = psutil.Process(pid).memory_full_info()
                rss, pss = rss + found.rss, pss + found.pss
    return Memory(rss, pss)


def cpu_shares(of: Mapping[str, Roles], seconds: float) -> dict[str, float]:
    """Share of one core that each takes in so many seconds."""
    before = {name: cpu_times(roles) for name, roles in of.items()}
    time.sleep(seconds)
    return {name: sum(cpu_between(before[name], cpu_times(roles)).values()) / seconds for name, roles in of.items()}


def on_core(cores: Iterable[int] | None, command: list[str]) -> list[str]:
    """The command, on these cores and no others; None: on any."""
    return command if cores is None else ["taskset", "-c", ",".join(map(str, cores)), *command]


@contextmanager
def own_cores(cores: Iterable[int] | None) -> Iterator[None]:
    """This process, and what it starts meanwhile, runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if cores is None else cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def wait_until(condition: Callable[[], bool], limit_s: float, every_s: float = 0.05) -> float | None:
    """Seconds until it held; None if it did not within `limit_s`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            return None
        time.sleep(every_s)
    return time.monotonic() - began
