"""Ends this process when its event loop makes no progress, so that its parent starts another one.

systemd, Docker, Kubernetes and `shoal dev up` all restart a coordinator that ended; Docker and Kubernetes do not notice
one that hangs. A thread checks that the loop runs. The kernel checks that this thread runs, by the processor time of
the whole process: C code that keeps Python's lock, such as a regular expression, stops every thread. Time in which the
process was stopped, or had no processor, does not count.
"""

import asyncio
import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from shoal.coordinator.controllers.runner import Compute
from shoal.host.watchdog import Watchdog
from shoal.types.codes import Code, Refusal
from shoal.types.units import Seconds

LIMIT_S: Final = Seconds(10.0)
"""Seconds of silence of the loop after which the process ends. One request costs the loop at most 0.5 s (A55). Its
longest known step, reading 1,000 documents again at an apply, takes 0.8 s and grows with their number."""
TICK_S: Final = Seconds(0.5)
STEP_LIMIT_S: Final = Seconds(600.0)
"""Seconds that a step may decide, beside the loop, after which the process ends. One about everything takes about a
millisecond of a core for each workload (`shoal bench placement --scale`): 30 s for 15,000 nodes with two each."""
LOG_WITHIN_S: Final = 2.0
"""Seconds for the last log line, because the loop may hang while it holds a lock that logging needs."""
END_SIGNAL: Final = signal.SIGPROF
"""Ends the process with the signal's number as its status: 27. The kernel sends it when `ITIMER_PROF` runs out."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


async def run_with_watchdog(run: Coroutine[Any, Any, None]) -> None:
    """Awaits `run`. A loop that is silent for `LIMIT_S` ends the process and writes its stacks to stderr."""
    _prepare_end()
    held_s = LIMIT_S + (os.cpu_count() or 1)  # C code in other threads may use all processors for two ticks
    signal.setitimer(signal.ITIMER_PROF, held_s)  # the loop may hang before the thread has run at all
    over = threading.Event()
    arguments = (asyncio.get_running_loop(), threading.get_native_id(), held_s, over)
    threading.Thread(target=_watch, args=arguments, name="loop-watchdog", daemon=True).start()
    try:
        await run
    finally:
        over.set()


def _watch(loop: asyncio.AbstractEventLoop, thread: int, held_s: float, over: threading.Event) -> None:
    """Runs until `over`, or until the loop is closed. thread: the loop's, by its number in the kernel. held_s:
    processor time of the process after which the kernel ends it, unless this thread ran."""
    silent, starved_s = Watchdog(LIMIT_S, TICK_S, loop.time()), _cpu_wait_s(thread)
    answered = threading.Event()
    answered.set()
    while not over.wait(TICK_S):
        signal.setitimer(signal.ITIMER_PROF, held_s)
        before_s, starved_s = starved_s, _cpu_wait_s(thread)
        if answered.is_set():
            silent = silent.on_sign(loop.time())
            answered.clear()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                break  # closed: the process is about to end
        else:
            silent = silent.on_tick(loop.time(), starved_s - before_s)
            if silent.is_expired:
                _end(f"an event loop that is silent for {silent.silent_s:.1f}s", "one that runs")
    signal.setitimer(signal.ITIMER_PROF, 0.0)


def _cpu_wait_s(thread: int) -> float:
    """Seconds that the thread has waited for a processor in total; 0 if the kernel does not say."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _prepare_end() -> None:
    """Makes `END_SIGNAL` write all threads' stacks to stderr and end the process without Python's lock. It calls
    `_exit`, because a signal's default action does not end the first process of a container."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(END_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(END_SIGNAL, all_threads=True, chain=True)


class StepLimit:
    """Where steps decide beside the loop: one that does not end within `STEP_LIMIT_S` ends the process. The loop runs
    meanwhile, and the coordinator would lead without ever deciding again."""

    def __init__(
        self, compute: Compute, end: Callable[[str, str], None] | None = None, tick_s: Seconds = TICK_S
    ) -> None:
        """end: what ends the process, given what was found and what was wanted."""
        self._compute = compute
        self._end = end or _end
        self._tick_s = tick_s

    async def __call__(self, work: Callable[[], T], /) -> T:
        watching = asyncio.ensure_future(self._watch())
        try:
            return await self._compute(work)
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        for _ in range(round(STEP_LIMIT_S / TICK_S)):
            await asyncio.sleep(self._tick_s)  # time in which the process was stopped counts as one of these
        self._end(f"a step of the region that decides for {STEP_LIMIT_S:.0f}s", "one that ends")


def _end(found: str, wanted: str) -> None:
    faulthandler.dump_traceback_later(LOG_WITHIN_S, exit=True)
    remedy = "whoever started this process starts it again; report this with the stacks that follow in its log"
    _log.error(
        "event_loop_stuck",
        code=Code.COORDINATOR_STUCK,
        error=str(Refusal(Code.COORDINATOR_STUCK, found, wanted, remedy)),
    )
    signal.raise_signal(END_SIGNAL)
