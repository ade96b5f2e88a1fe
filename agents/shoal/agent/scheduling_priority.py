"""CPU priorities on a device: processes that serve come first.

The supervisor runs at lower priority than they do. A process that is still starting runs only on idle CPU time.

On Linux an unprivileged process may lower its priority. It may raise it again, its own or a child's, only where its
limit allows the nice value (RLIMIT_NICE; systemd's LimitNICE=+0). Without that limit no process is set to idle
priority, and the supervisor only gets SCHED_BATCH, which never preempts another process.

Source: sched(7), "SCHED_BATCH: Scheduling batch processes", "SCHED_IDLE: Scheduling very low priority jobs", "The nice
value".
"""

import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

SUPERVISOR_NICE: Final = 10
"""Nice values between the supervisor and the processes that serve. Under full load the supervisor gets a tenth of the
CPU (sched(7): each value is a factor of 1.25). That is ten times its use in steady state (0.4 to 0.8 % of a core,
measured)."""


@cache
def may_restore_priority() -> bool:
    """Whether a lowered priority can be raised again. Tried out with a thread."""
    allowed = []

    def attempt() -> None:
        with suppress(OSError):
            _set_policy(threading.get_native_id(), os.SCHED_IDLE)
            _set_policy(threading.get_native_id(), os.SCHED_OTHER)
            allowed.append(True)

    thread = threading.Thread(target=attempt, name="scheduling-priority")
    thread.start()
    thread.join()
    return bool(allowed)


def lower_own_priority() -> None:
    """Lower the priority of this process. Call once, before it has threads, because threads and children inherit it.

    A process that was started under another policy than SCHED_OTHER keeps it.
    """
    policy, _ = _initial_priority()
    if policy != os.SCHED_OTHER:
        return
    _set_policy(0, os.SCHED_BATCH)
    if may_restore_priority():
        os.nice(SUPERVISOR_NICE)


def restore_child_priority(pid: int) -> None:
    """Give a child that has no threads yet the priority that this process had before it lowered its own.

    A child that is gone is not an error.
    """
    policy, nice = _initial_priority()
    with suppress(OSError):
        _set_policy(pid, policy)
        os.setpriority(os.PRIO_PROCESS, pid, nice)


def set_idle_priority(pid: int) -> None:
    """All threads of the process, and those that they start. Not an error if it is gone or this is not permitted."""
    if may_restore_priority():
        _set_all_threads(pid, os.SCHED_IDLE)


def set_normal_priority(pid: int) -> None:
    """SCHED_OTHER for all threads; each keeps its nice value."""
    if may_restore_priority():
        _set_all_threads(pid, os.SCHED_OTHER)


@cache
def _initial_priority() -> tuple[int, int]:
    """Policy and nice value of this process before it lowered its priority."""
    pid = os.getpid()
    return os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)


def _set_all_threads(pid: int, policy: int) -> None:
    """Runs twice, because a thread may start another one during the first pass."""
    for _ in range(2):
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    _set_policy(int(thread.name), policy)


def _set_policy(thread: int, policy: int) -> None:
    if os.sched_getscheduler(thread) != policy:
        os.sched_setscheduler(thread, policy, os.sched_param(0))
