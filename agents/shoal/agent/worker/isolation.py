"""What a worker gives up before it reads strangers' bytes: the network, its claim to memory, its priority."""

import ctypes
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog

_log = structlog.get_logger(__name__)
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_NO_NEW_PRIVS: Final = 38
_OOM_SCORE_ADJ: Final = "800"
"""Of 1000: the machine's killer takes a worker before anything else of the agent."""
_LOAD_NICE: Final = 10

T = TypeVar("T")


def isolate() -> None:
    """For a process with one thread. Where the kernel forbids a step it is logged, and the rest still done."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) != 0:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        else:
            _log.warning("network_not_isolated", reason=os.strerror(ctypes.get_errno()))
    try:
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    except OSError as error:
        _log.warning("oom_score_not_set", reason=str(error))


def limit_memory(extra_bytes: int) -> None:
    """Lets this process map at most `extra_bytes` of writable memory beyond what it has now; 0 lifts the limit.

    RLIMIT_DATA counts private writable mappings, so a failed allocation is an error in the runtime and not a kill.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if extra_bytes == 0 else _status_bytes("VmData") + extra_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was resident since the last `forget_peak`."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def at_low_priority(work: Callable[[], T]) -> T:
    """Runs `work` in a thread of its own at a lower priority (Linux keeps nice values by thread); waits for it."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOAD_NICE)
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="load")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
