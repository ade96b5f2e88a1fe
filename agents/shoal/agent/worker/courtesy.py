"""How a process that gets ready keeps out of the way of those that serve: it has the processor while nobody wants it.

Linux lets a process without rights go idle (SCHED_IDLE), but come back only where its limit for nice values allows the
value it has (RLIMIT_NICE; systemd's LimitNICE=+0). Where that is not so, nobody steps aside.
Source: sched(7), "SCHED_IDLE: Scheduling very low priority jobs".
"""

import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path


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


def step_aside(pid: int) -> None:
    """All threads of the process, and those that they start. No error where it is gone or that is not allowed."""
    if may_return():
        _set_all(pid, os.SCHED_IDLE)


def step_up(pid: int) -> None:
    """As every process; each thread with the nice value that it has."""
    if may_return():
        _set_all(pid, os.SCHED_OTHER)


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
