"""The spare worker: a started, confined process without a model, so that no load waits for that."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from shoal.agent.ports import AgentClock
from shoal.agent.worker.background_tasks import BackgroundTasks
from shoal.agent.worker.process import WorkerProcess
from shoal.types.codes import Code, refuse
from shoal.types.units import Seconds

_log = structlog.get_logger(__name__)

RETRY_S: Final = Seconds(2.0)
"""Delay before another spare starts, after one that could not be started or ended by itself."""
LOW_PRIORITY_S: Final = Seconds(15.0)
"""Maximum time at low priority for a process that is not urgent. Without a limit it would never start on a busy
machine."""


class SpareWorker:
    """Starts the spare worker, and hands it to whoever needs a worker.

    `spawn` starts a process; it raises OSError. `connect` connects a process that was started; it raises ShoalError.
    `fits` says whether a process may open the files of all devices that are known now. `has_room` says whether the
    machine has memory for a process that only saves time.
    """

    def __init__(
        self,
        spawn: Callable[[], WorkerProcess],
        connect: Callable[[WorkerProcess], Awaitable[object]],
        fits: Callable[[WorkerProcess], bool],
        clock: AgentClock,
        tasks: BackgroundTasks,
        *,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self._spawn = spawn
        self._connect = connect
        self._fits = fits
        self._clock = clock
        self._tasks = tasks
        self._process: WorkerProcess | None = None
        self._ready: asyncio.Task[None] | None = None
        self._is_closed = False
        self._has_room = has_room
        self._is_waiting_for_room = False

    @property
    def process(self) -> WorkerProcess | None:
        """The spare worker; it may still start. None if there is none now."""
        return self._process

    @property
    def is_ready(self) -> bool:
        """Whether there is one that a load could take at once."""
        return self._process is not None and self._process.client is not None

    def replenish(self) -> None:
        """Start a spare if there is none and the machine has room for it; without room, look again later. When memory
        runs out the kernel may kill what serves, and not the spare that was too much."""
        if self._process is not None or self._is_closed or self._is_waiting_for_room:
            return
        if self._has_room():
            self.ensure()
            return
        self._is_waiting_for_room = True
        self._tasks.spawn(self._look_for_room_later())

    def ensure(self) -> None:
        """Start a spare if there is none, for a load that waits for it. If that fails, it is tried again later."""
        if self._process is None and not self._is_closed:
            try:
                self._process = self._spawn()
            except OSError as error:
                _log.error("spare_worker_start_failed", error=str(error))
                self.replenish_after(RETRY_S)
                return
            lower_priority_briefly(self._process, self._clock, self._tasks)
            self._ready = self._tasks.spawn(self._await_ready(self._process))

    def replenish_after(self, delay_s: Seconds) -> None:
        self._tasks.spawn(self._replenish_later(delay_s))

    async def take(self, *, urgent: bool = True) -> WorkerProcess:
        """A connected worker that holds nothing; the caller must end it. `urgent`: give it normal priority now, at the
        cost of other processes.

        Raises ShoalError.
        """
        if self._process is not None and not self._fits(self._process):
            outdated, self._process = self._process, None
            self._tasks.spawn(outdated.end())
        self.ensure()
        process = self._process
        if process is None:
            raise refuse(Code.LOAD_FAILED, "no worker process could be started", "one", "see the agent's log")
        if process.client is None:
            assert self._ready is not None
            if urgent:
                process.restore_priority()
            await asyncio.shield(self._ready)
        if self._process is not process:
            # another start took it first
            return await self.take(urgent=urgent)
        self._process = None
        return process

    def offer(self, process: WorkerProcess) -> bool:
        """Make a connected worker that holds nothing the spare. False if it is not needed; the caller must end it."""
        if self._process is not None or self._is_closed or process.exit_event.is_set():
            return False
        self._process = process
        return True

    def restore_priority(self) -> None:
        """An urgent start must not wait for a spare that runs at idle priority."""
        if self._process is not None:
            self._process.restore_priority()

    def on_exit(self, process: WorkerProcess) -> None:
        """A process is gone. If it was the spare, another one starts soon."""
        if process is self._process:
            self._process = None
            _log.warning("spare_worker_exited", worker=process.name, error=str(process.explain_exit(oom=False)[1]))
            self.replenish_after(RETRY_S)

    def close(self) -> None:
        """Start no other one from now on."""
        self._is_closed = True

    def pop(self) -> WorkerProcess | None:
        """Give up the spare; the caller must end or detach it."""
        process, self._process = self._process, None
        return process

    async def _await_ready(self, process: WorkerProcess) -> None:
        try:
            await self._connect(process)
            process.restore_priority()
        except BaseException:
            if self._process is process:
                self._process = None
            await process.end()
            raise

    async def _replenish_later(self, delay_s: Seconds) -> None:
        await self._clock.sleep(delay_s)
        self.replenish()

    async def _look_for_room_later(self) -> None:
        await self._clock.sleep(RETRY_S)
        self._is_waiting_for_room = False
        self.replenish()


def lower_priority_briefly(process: WorkerProcess, clock: AgentClock, tasks: BackgroundTasks) -> None:
    """While the worker imports the runtime, or loads a replica that is not urgent: both take a core for a second."""

    async def restore_later() -> None:
        await clock.sleep(LOW_PRIORITY_S)
        process.restore_priority()

    process.lower_priority()
    tasks.spawn(restore_later())
