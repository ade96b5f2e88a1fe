"""Watches the runs of one model from a thread of its own, so that it also watches a run on the event loop.

A watchdog counts the time in which this process ran. A run that exceeds its limit is told to terminate. If it does not,
the process exits, because nothing else stops an operator. The other requests in this process are not at fault: they are
retried elsewhere.
"""

import os
import threading
from collections.abc import Callable, Collection
from typing import Final

import structlog

from shoal.agent.worker.engine_run import EngineRun
from shoal.agent.worker.infer_job import InferJob
from shoal.agent.worker.process import EXIT_STUCK
from shoal.agent.worker.run_timeouts import RunTimeouts
from shoal.host.watchdog import Watchdog
from shoal.types.trace import parse_traceparent
from shoal.types.units import Seconds

_log = structlog.get_logger(__name__)

WATCH_EVERY_S: Final = Seconds(0.1)
_DOZE_AFTER: Final = 50
"""Looks that see nothing before the thread waits for a request: a look costs a wake-up, as the end of a wait does."""


class RunWatch:
    """Looks every WATCH_EVERY_S while there are jobs. `jobs`: those that wait or run. `clock`: the event loop's."""

    def __init__(
        self,
        assignment: str,
        timeouts: RunTimeouts,
        jobs: Callable[[], Collection[InferJob]],
        clock: Callable[[], float],
    ) -> None:
        self._assignment = assignment
        self._timeouts = timeouts
        self._jobs = jobs
        self._clock = clock
        self._wanted = threading.Event()
        self._is_dozing = True
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def on_job(self) -> None:
        """There is a job. Cheap while the thread looks anyway."""
        if self._is_dozing:
            self._is_dozing = False
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """The thread ends when the last job has."""
        self._is_closed = True
        self._wanted.set()

    def look(self, now: float) -> None:
        """`now`: on the event loop's clock."""
        for run in {job.run for job in self._jobs()}:
            since = run.since if run is not None else None
            if run is None or since is None:
                continue
            limit_s = self._timeouts.limit_s(run.size)
            watched = run.watchdog or Watchdog(Seconds(limit_s), WATCH_EVERY_S, since)
            watched = run.watchdog = watched.on_tick(now)
            if watched.silent_s >= limit_s and not run.is_stuck:
                self._terminate(run, watched.silent_s)
            elif watched.silent_s >= limit_s + self._timeouts.grace_s(run.size):
                _log.error("worker_stuck", assignment=self._assignment, duration_s=round(watched.silent_s, 3))
                os._exit(EXIT_STUCK)

    def _watch(self) -> None:
        empty = 0
        while True:
            jobs = self._jobs()
            empty = 0 if jobs else empty + 1
            if not jobs and self._is_closed:
                return
            if empty > _DOZE_AFTER:
                self._wanted.clear()
                self._is_dozing = True
                if not self._jobs() and not self._is_closed:
                    self._wanted.wait()
                empty = 0
            threading.Event().wait(WATCH_EVERY_S)
            self.look(self._clock())

    def _terminate(self, run: EngineRun, silent_s: float) -> None:
        parent = parse_traceparent(next((job.trace for job in run.jobs if job.trace), ""))
        _log.warning(
            "run_overdue",
            assignment=self._assignment,
            duration_s=round(silent_s, 3),
            trace_id=parent.trace if parent is not None else None,
        )
        run.is_stuck = True
        run.options.terminate = True
