"""What a worker gives up before it reads strangers' bytes: the network, files, its claim to memory, its priority."""

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog

from shoal.agent.worker.messages import SLOTS
from shoal.wire import sandbox
from shoal.wire.sandbox import Access

_log = structlog.get_logger(__name__)
_OOM_SCORE_ADJ: Final = "800"
"""Of 1000: the machine's killer takes a worker before anything else of the agent."""
_LOAD_NICE: Final = 10

_PEAK: Final = Path("/proc/self/clear_refs")

T = TypeVar("T")


def isolate(run: Path, models: Path) -> None:
    """For a process with one thread. Where the kernel forbids a step it is logged, and the rest still done.

    run: where its socket will be and `slots/` is, and nothing that it could read. models: whose files it can open if it
    knows their names, which are digests, and cannot list.
    """
    try:
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    except OSError as error:
        _log.warning("oom_score_not_set", reason=str(error))
    own = {run: Access.MAKE_SOCKET, run / SLOTS: Access.KEEP, models: Access.OPEN}
    own[_PEAK] = Access.WRITE | Access.TRUNCATE
    for refused in sandbox.enter(sandbox.runtime() | own):
        _log.warning("not_isolated", reason=refused)


def limit_memory(idle_bytes: int, extra_bytes: int) -> None:
    """Lets this process map at most `extra_bytes` of writable memory beyond `idle_bytes`; 0 extra lifts the limit.

    RLIMIT_DATA counts private writable mappings, so a failed allocation is an error in the runtime and not a kill.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if extra_bytes == 0 else idle_bytes + extra_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def mapped_bytes() -> int:
    """Writable memory that `limit_memory` counts."""
    return _status_bytes("VmData")


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was resident since the last `forget_peak`."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    _PEAK.write_text("5")


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
