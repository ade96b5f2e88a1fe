"""Asks the workers for their counters, and ends one that does not answer."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from shoal.agent.ports import WorkerStats
from shoal.agent.timeouts import TICK_S, start_watchdog
from shoal.agent.worker.background_tasks import BackgroundTasks
from shoal.agent.worker.pool_options import PoolOptions
from shoal.agent.worker.process import WorkerProcess, oom_kills
from shoal.agent.worker.replica_table import ReplicaTable
from shoal.agent.worker.status_check import read_report
from shoal.types.codes import Code, Refusal, ShoalError

STATUS_S: Final = 2.0
"""Seconds within which a worker answers at once. One that does not, and uses no CPU meanwhile, is stopped or
deadlocked."""


class StatusPolls:
    """Polls the workers of ready replicas, one request to each at a time.

    `end` ends a process in the background, with its `kill_reason` set.
    """

    def __init__(
        self,
        replicas: ReplicaTable,
        end: Callable[[WorkerProcess], None],
        tasks: BackgroundTasks,
        options: PoolOptions,
    ) -> None:
        self._replicas = replicas
        self._end = end
        self._tasks = tasks
        self._options = options
        # OOM kills on the whole machine, at the last two polls of ready workers.
        self._oom_kills = self._oom_kills_before = oom_kills()

    async def stats(self) -> tuple[WorkerStats, ...]:
        """Counters of every ready worker. For one that does not answer in time, its last counters."""
        ready = dict.fromkeys(replica.process for replica in self._replicas.replicas() if replica.ready)
        self._oom_kills_before, self._oom_kills = self._oom_kills, oom_kills()
        for process in ready:
            if process.status_poll is None or process.status_poll.done():
                process.status_poll = self._tasks.spawn(self._poll_status(process))
        asking = [process.status_poll for process in ready if process.status_poll is not None]
        if asking:
            await asyncio.wait(asking, timeout=STATUS_S)
        return tuple(replica.stats for replica in self._replicas.replicas() if replica.stats is not None)

    def has_recent_oom_kill(self) -> bool:
        """Whether the kernel killed any process of this machine for memory since the last poll but one."""
        return oom_kills() > self._oom_kills_before

    async def _poll_status(self, process: WorkerProcess) -> None:
        """Poll until the worker answers, is gone, or has been silent for too long and is killed."""
        assert process.client is not None
        asked = asyncio.ensure_future(process.client.call("status"))
        silent, still = start_watchdog(self._options.stuck_after_s), start_watchdog(STATUS_S)
        used_s = process.cpu_s()
        try:
            while not (await asyncio.wait((asked,), timeout=TICK_S))[0]:
                now, used_before_s, used_s = asyncio.get_running_loop().time(), used_s, process.cpu_s()
                silent = silent.on_tick(now)
                still = still.on_tick(now) if process.is_sleeping() and used_s == used_before_s else still.on_sign(now)
                if silent.is_expired or still.is_expired:
                    self._kill_stuck(process, silent.silent_s, still.is_expired)
                    return
            answer = await asked
        except ShoalError:
            return  # its exit event says more
        finally:
            asked.cancel()
            del asked  # its error knows this frame: only the cyclic collector would free them
        try:
            report = read_report(answer.payload)
        except ShoalError as error:
            self.end_invalid(process, error)
            return
        for status in report.held:
            replica = self._replicas.find(status.assignment, process)
            if replica is not None and replica.ready is not None:
                # a faulty worker cannot report more than it may hold
                inside = min(status.in_flight, self._options.queue)
                replica.stats = WorkerStats(status.assignment, inside, status.served, status.batches, status.latencies)

    def end_invalid(self, process: WorkerProcess, error: ShoalError) -> None:
        """A worker that tells what none does was taken over by its model, or is broken."""
        if not process.exit_event.is_set():
            process.kill_reason = replace(error.refusal, remedy="the assignment is loaded again")
            self._end(process)

    def _kill_stuck(self, process: WorkerProcess, silent_s: float, is_still: bool) -> None:
        if not process.exit_event.is_set():
            found = f"silent for {silent_s:.0f}s{', and used no processor' if is_still else ''}"
            process.kill_reason = Refusal(Code.WORKER_STUCK, found, "its status", "the assignment is loaded again")
            self._end(process)
