"""Threads that run jobs, and their way back to the event loop."""

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

from shoal.agent.worker.batching import BatchPlan
from shoal.agent.worker.job_queue import JobQueue, QueuedJob
from shoal.types.units import Seconds

J = TypeVar("J", bound=QueuedJob)
Callback = Callable[[], object]

_HOPS: Final = 200
"""A hop takes some tens of microseconds: this many are a few milliseconds, and their mean is good to some percent."""


class RunnerThreads(Generic[J]):
    """Runs jobs, `count` runs at a time, as `JobQueue` orders them.

    `run` is called in a thread with the jobs of one run: one, or a batch. What it returns is called on the event loop.
    It raises nothing. The threads do not keep the process alive. A job has no future: one costs more than a run of a
    small model.
    """

    def __init__(self, count: int, name: str, run: Callable[[Sequence[J]], Callback]) -> None:
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        # The lock of all that follows, up to the threads.
        self._lock = threading.Lock()
        self._queue: JobQueue[J] = JobQueue()
        self._is_closed = False
        # Runs in progress.
        self._running = 0
        # Threads that wait, without those that were woken and do not know yet. Each takes one wake-up.
        self._idle = 0
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        # When the first of them looks by itself, because a batch is due then.
        self._next_look = math.inf

        self._done: deque[Callback] = deque()
        self._is_loop_woken = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True) for number in range(count)
        ]
        # Started when first needed: a model that runs on the loop may need none.
        self._is_started = False

    def submit(self, job: J) -> None:
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        with self._lock:
            self._queue.put(job, is_idle=not self._running)
            if self._idle and (self._queue.plan is None or self._is_look_due()):
                self._wake()

    def discard(self, job: J) -> bool:
        """Whether the job waited. It leaves, and costs no run."""
        with self._lock:
            return self._queue.discard(job)

    def set_plan(self, plan: BatchPlan | None) -> None:
        """How jobs run in batches from now on; None: each runs alone."""
        with self._lock:
            self._queue.set_plan(plan)
            for _ in range(self._idle):
                self._wake()

    def close(self) -> None:
        """The threads end after what was submitted."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._idle):
                self._wake()

    def _is_look_due(self) -> bool:
        now = self._clock()
        due_at = self._queue.due_at(now)
        return due_at <= now or due_at < self._next_look

    def _wake(self) -> None:
        self._idle -= 1
        self._wake_ups.put(None)

    def _work(self) -> None:
        ended = 0
        while jobs := self._take(ended):
            self._done.append(self._run(jobs))
            del jobs  # they must not keep a payload alive until the next ones come
            ended = 1
            # The loop clears the flag before it looks: whatever was added before is found, or wakes it again.
            if not self._is_loop_woken:
                self._is_loop_woken = True
                try:
                    self._loop.call_soon_threadsafe(self._run_callbacks)
                except RuntimeError:
                    return  # the loop is closed

    def _take(self, ended: int) -> list[J]:
        """Waits for the next run. Empty: the threads are to end. `ended`: runs of this thread that have ended since."""
        while True:
            with self._lock:
                self._running -= ended
                ended = 0
                now = self._clock()
                jobs = self._queue.take(now)
                if jobs:
                    self._running += 1
                    if self._idle and self._queue.plan is not None and self._is_look_due():
                        self._wake()  # so that what is left begins in time
                    return jobs
                due_at = self._queue.due_at(now)
                if self._is_closed and due_at == math.inf:
                    return []
                self._idle += 1
                if due_at < self._next_look:
                    self._next_look = due_at
            self._wait(None if due_at == math.inf else max(0.0, due_at - now))

    def _wait(self, seconds: float | None) -> None:
        try:
            self._wake_ups.get(timeout=seconds)
        except queue.Empty:
            self._on_timeout()
        else:
            self._next_look = math.inf

    def _on_timeout(self) -> None:
        with self._lock:
            self._next_look = math.inf
            try:
                self._wake_ups.get_nowait()  # it came just now, and counted this thread as woken
            except queue.Empty:
                self._idle -= 1

    def _run_callbacks(self) -> None:
        self._is_loop_woken = False
        while self._done:
            self._done.popleft()()


class _Hop:
    """A job that needs no model."""

    def __init__(self, run: Callable[[], Callback]) -> None:
        self.run = run
        self.arrived_at = self.start_by = 0.0
        self.deadline = self.due = math.inf
        self.group: Hashable | None = None
        self.rows = 1
        self.place: list[Any] | None = None


async def measure_hop() -> Seconds:
    """Processor time of one way to a runner's thread and back, in both threads together."""
    runners: RunnerThreads[_Hop] = RunnerThreads(1, "hop", lambda hops: hops[0].run())
    done = asyncio.Event()
    began = ended = 0.0

    def first() -> Callback:
        nonlocal began
        began = time.thread_time()
        return done.set

    def last() -> Callback:
        nonlocal ended
        ended = time.thread_time()
        return done.set

    async def hop(run: Callable[[], Callback]) -> None:
        done.clear()
        runners.submit(_Hop(run))
        await done.wait()

    await hop(first)
    start = time.thread_time()
    for _ in range(_HOPS):
        await hop(lambda: done.set)
    own_s = time.thread_time() - start
    await hop(last)
    runners.close()
    return Seconds((own_s + ended - began) / _HOPS)
