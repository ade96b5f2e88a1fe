"""Threads that run jobs, and their way back to the event loop."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from shoal.types.units import Seconds

Job = Callable[[], Callable[[], object]]
"""Called in a runner's thread; what it returns is called on the event loop. Raises nothing."""

_HOPS: Final = 200
"""A hop takes some tens of microseconds: this many are a few milliseconds, and their mean is good to some percent."""


class RunnerThreads:
    """Runs jobs in the order in which they came, `count` at a time.

    The threads do not keep the process alive. A job has no future: one costs more than a run of a small model.
    """

    def __init__(self, count: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: deque[Callable[[], object]] = deque()
        self._is_wake_due = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True) for number in range(count)
        ]
        # Started when first needed: a model that runs on the loop may need none.
        self._is_started = False

    def submit(self, job: Job) -> None:
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """The threads end after what was submitted."""
        if self._is_started:
            for _ in self._threads:
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._done.append(job())
            del job  # it must not keep a payload alive until the next one comes
            # The loop clears the flag before it looks: whatever was added before is found, or wakes it again.
            if not self._is_wake_due:
                self._is_wake_due = True
                try:
                    self._loop.call_soon_threadsafe(self._run_callbacks)
                except RuntimeError:
                    return  # the loop is closed

    def _run_callbacks(self) -> None:
        self._is_wake_due = False
        while self._done:
            self._done.popleft()()


async def measure_hop() -> Seconds:
    """Processor time of one way to a runner's thread and back, in both threads together."""
    runners = RunnerThreads(1, "hop")
    done = asyncio.Event()
    began = ended = 0.0

    def first() -> Callable[[], object]:
        nonlocal began
        began = time.thread_time()
        return done.set

    def last() -> Callable[[], object]:
        nonlocal ended
        ended = time.thread_time()
        return done.set

    async def hop(job: Job) -> None:
        done.clear()
        runners.submit(job)
        await done.wait()

    await hop(first)
    start = time.thread_time()
    for _ in range(_HOPS):
        await hop(lambda: done.set)
    own_s = time.thread_time() - start
    await hop(last)
    runners.close()
    return Seconds((own_s + ended - began) / _HOPS)
