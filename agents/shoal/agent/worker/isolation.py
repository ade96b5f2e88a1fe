"""Isolation of a worker before it reads untrusted bytes: network, files, memory and OOM score."""

import os
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import structlog

from shoal.agent.worker.messages import SLOTS
from shoal.host import sandbox
from shoal.host.sandbox import Access

_log = structlog.get_logger(__name__)
_OOM_SCORE_ADJ: Final = "800"
"""The maximum is 1000. The OOM killer chooses a worker before any other process of the agent."""
_LOAD_NICE: Final = 10

_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_OWN_THREADS: Final = Path("/proc/self/task")
"""Each thread's name is a file below it. CUDA writes those of its threads, and opens no device where it may not (error
304; driver 580.159.04). Of each thread there are other files too, which no rule can leave out: by `oom_score_adj` a
worker takes back that the OOM killer chooses it first, by `mem` it writes to its own memory."""

T = TypeVar("T")


def isolate(run: Path, models: Path, devices: Sequence[Path] = ()) -> None:
    """Isolate this process, as `confine` does.

    - run: folder of its socket and of `slots/`; the process can read nothing there.
    - models: folder whose files it can open by name (their digests), but not list.
    - devices: device files that it can read and write. Where there are any, it can also name its threads.
    """
    own = {run: Access.MAKE_SOCKET, run / SLOTS: Access.KEEP, models: Access.OPEN}
    own |= dict.fromkeys(devices, Access.READ | Access.WRITE)
    for path in (_CLEAR_REFS, _OWN_THREADS) if devices else (_CLEAR_REFS,):
        _hold(path)
        own[path] = Access.WRITE | Access.TRUNCATE
    confine(own, _OOM_SCORE_ADJ)


def confine(own: Mapping[Path, Access], oom_score_adj: str) -> None:
    """Leave this process, which must have one thread, the files that it runs by and its `own`. A step that the kernel
    forbids is logged, and the others are done. oom_score_adj: the more, up to 1000, the sooner the OOM killer takes
    it."""
    try:
        Path("/proc/self/oom_score_adj").write_text(oom_score_adj)
    except OSError as error:
        _log.warning("oom_score_write_failed", error=str(error))
    for refused in sandbox.enter({**sandbox.runtime(), **own}):
        _log.warning("isolation_failed", error=refused)


def _hold(path: Path) -> None:
    """Keep an entry of /proc as it is while this process, or a fork of it, lives: for that its descriptor stays open.

    A rule of Landlock is on an inode. The kernel drops entries that nobody holds when memory is short, and /proc makes
    the next one of that name with another inode, which has no rule.
    """
    with suppress(FileNotFoundError, PermissionError):  # then there is no rule either
        os.open(path, os.O_PATH | os.O_CLOEXEC)


def limit_memory(idle_bytes: int, extra_bytes: int) -> None:
    """Limit writable memory to `extra_bytes` beyond `idle_bytes`; 0 extra lifts the limit.

    RLIMIT_DATA counts private writable mappings, so a failed allocation is an error in the runtime and does not kill
    the process.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if extra_bytes == 0 else idle_bytes + extra_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def headroom_bytes() -> int | None:
    """Bytes that `limit_memory` lets this process still map. None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - data_bytes())


def data_bytes() -> int:
    """Writable memory, as `limit_memory` counts it."""
    return _status_bytes("VmData")


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Peak resident memory since the last `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    _CLEAR_REFS.write_text("5")


def run_at_low_priority(work: Callable[[], T]) -> T:
    """Run `work` in its own thread at a lower priority (Linux keeps nice values per thread), and wait for it."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            # An agent that was started at an even lower priority may not raise it.
            own = 0  # this thread: a confined process sets the priority of no other
            os.setpriority(os.PRIO_PROCESS, own, max(_LOAD_NICE, os.getpriority(os.PRIO_PROCESS, own)))
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
