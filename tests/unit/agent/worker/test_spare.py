"""The spare worker may open the files of every device that is known when it is taken."""

import asyncio
from typing import cast

from harness.fakes.clock import ManualClock
from harness.wait import until
from shoal.agent.worker.background_tasks import BackgroundTasks
from shoal.agent.worker.process import WorkerProcess
from shoal.agent.worker.spare import SpareWorker
from shoal.types.units import Seconds


class Process:
    """A worker that starts at once."""

    def __init__(self, files: frozenset[str]) -> None:
        self.files = files
        self.client = object()
        self.exit_event = asyncio.Event()

    def lower_priority(self) -> None: ...
    def restore_priority(self) -> None: ...

    async def end(self) -> None:
        self.exit_event.set()


async def test_one_that_was_started_before_a_device_was_found_is_not_handed_out() -> None:
    known = {"/dev/one"}
    started: list[Process] = []

    def spawn() -> WorkerProcess:
        started.append(Process(frozenset(known)))
        return cast(WorkerProcess, started[-1])

    async def connect(process: WorkerProcess) -> None: ...

    def fits(process: WorkerProcess) -> bool:
        return cast(Process, process).files >= known

    spare = SpareWorker(spawn, connect, fits, ManualClock(), BackgroundTasks())
    spare.ensure()
    assert await spare.take() is cast(object, started[0])
    spare.ensure()
    known.add("/dev/two")
    assert await spare.take() is cast(object, started[2])
    await until(started[1].exit_event.is_set, 10.0, "the outdated one to end")
    assert not started[2].exit_event.is_set()


class StoppedClock(ManualClock):
    """Time passes when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = asyncio.Event()

    async def sleep(self, seconds: Seconds) -> None:
        await self.passes.wait()


async def test_none_is_kept_where_memory_is_short_and_a_load_still_gets_one() -> None:
    started: list[Process] = []
    room, clock = [False], StoppedClock()

    def spawn() -> WorkerProcess:
        started.append(Process(frozenset()))
        return cast(WorkerProcess, started[-1])

    async def connect(process: WorkerProcess) -> None: ...

    spare = SpareWorker(spawn, connect, lambda _: True, clock, BackgroundTasks(), has_room=lambda: room[0])
    for _ in range(3):
        spare.replenish()
    assert not started
    assert not spare.is_ready
    assert await spare.take() is cast(object, started[0])
    room[0] = True
    clock.passes.set()
    await until(lambda: spare.is_ready, 10.0, "a spare once there is room")
    assert len(started) == 2
