"""Who goes first on a device: those that serve. The supervisor goes behind them, and a process that gets ready has the
processor while nobody wants it.

Linux lets a process without rights lower its priority, but raise it again, or a child's, only where its limit for nice
values allows the value (RLIMIT_NICE; systemd's LimitNICE=+0). Where that is not so, nobody steps aside, and of going
behind there is left that nobody is interrupted (SCHED_BATCH).
Source: sched(7), "SCHED_BATCH: Scheduling batch processes", "SCHED_IDLE: Scheduling very low priority jobs", "The nice
value".
"""

import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

BEHIND: Final = 10
"""Nice values between a supervisor and those that serve: a tenth of the processor where they want all of it (sched(7):
each is a factor of 1.25), and ten times what it takes while nothing changes (0.4 to 0.8 % of a core, measured)."""


@cache
def may_return() -> bool:
    """Whether what stepped aside can be brought back; tried out with a thread."""
    allowed = []

    def attempt() -> None:
        with suppress(OSError):
            _set(threading.get_native_id(), os.SCHED_IDLE)
            _set(threading.get_native_id(), os.SCHED_OTHER)
            allowed.append(True)

    thread = threading.Thread(target=attempt, name="courtesy")
    thread.start()
    thread.join()
    return bool(allowed)


def go_behind() -> None:
    """This process, once, before it has threads: its children and they inherit that. One that was started under
    another policy than the usual stays as it is."""
    policy, _ = _started_as()
    if policy != os.SCHED_OTHER:
        return
    _set(0, os.SCHED_BATCH)
    if may_return():
        os.nice(BEHIND)


def go_first(pid: int) -> None:
    """A child that has no threads yet: as this process was before it went behind. No error where it is gone."""
    policy, nice = _started_as()
    with suppress(OSError):
        _set(pid, policy)
        os.setpriority(os.PRIO_PROCESS, pid, nice)


def step_aside(pid: int) -> None:
    """All threads of the process, and those that they start. No error where it is gone or that is not allowed."""
    if may_return():
        _set_all(pid, os.SCHED_IDLE)


def step_up(pid: int) -> None:
    """As every process; each thread with the nice value that it has."""
    if may_return():
        _set_all(pid, os.SCHED_OTHER)


@cache
def _started_as() -> tuple[int, int]:
    """Policy and nice value of this process before it went behind."""
    pid = os.getpid()
    return os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)


def _set_all(pid: int, policy: int) -> None:
    """Twice: a thread may start another meanwhile."""
    for _ in range(2):
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    _set(int(thread.name), policy)


def _set(thread: int, policy: int) -> None:
    if os.sched_getscheduler(thread) != policy:
        os.sched_setscheduler(thread, policy, os.sched_param(0))
