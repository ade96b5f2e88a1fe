"""One run in the runtime: of one request, or of several as a batch."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnxruntime as ort

from shoal.agent.worker.engine import run_options
from shoal.host.watchdog import Watchdog

if TYPE_CHECKING:
    from shoal.agent.worker.infer_job import InferJob


class EngineRun:
    """A run of `jobs`. It ends early once none of them wants its answer any more."""

    def __init__(self, jobs: Sequence["InferJob"], size: int) -> None:
        """`size`: elements of all inputs."""
        self.jobs = jobs
        self.size = size
        self.options: ort.RunOptions = run_options()
        # Start of the run in the runtime. None before and after it. Written where it runs.
        self.since: float | None = None
        # Written by the thread that watches runs. Its watchdog is None until it sees the run.
        self.watchdog: Watchdog | None = None
        # The run exceeded its time limit and was told to terminate.
        self.is_stuck = False
        self._unwanted: threading.Event | None = None
        for job in jobs:
            job.run = self
        self.on_job_over()  # of one that ended before it knew of its run

    def on_job_over(self) -> None:
        """One of the jobs is over. Callable from any thread."""
        for job in self.jobs:
            if not job.is_over:
                return
        self.options.terminate = True
        if self._unwanted is not None:
            self._unwanted.set()

    def wait(self, seconds: float) -> None:
        """Returns after `seconds`, or when nobody wants the run's outcome."""
        if seconds > 0:
            self._unwanted = threading.Event()
            if not self.options.terminate:
                self._unwanted.wait(seconds)

    def close(self) -> None:
        """The jobs are no part of it any more: a payload must not wait for the collector."""
        for job in self.jobs:
            job.run = None
        self.jobs = ()
