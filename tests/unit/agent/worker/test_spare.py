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


class SteppedClock(ManualClock):
    """Those who sleep go on together, when it is let go once."""

    def __init__(self) -> None:
        super().__init__()
        self.sleepers: list[asyncio.Future[None]] = []

    async def sleep(self, seconds: Seconds) -> None:
        self.sleepers.append(asyncio.get_running_loop().create_future())
        await self.sleepers[-1]

    async def step(self) -> None:
        sleepers, self.sleepers = self.sleepers, []
        for each in sleepers:
            each.set_result(None)
        await until(lambda: bool(self.sleepers), 10.0, "somebody to sleep again")


async def test_one_look_for_room_waits_however_often_a_spare_was_wanted() -> None:
    clock = SteppedClock()

    async def connect(process: WorkerProcess) -> None: ...

    def spawn() -> WorkerProcess:
        raise AssertionError("there is no room")

    spare = SpareWorker(spawn, connect, lambda _: True, clock, BackgroundTasks(), has_room=lambda: False)
    spare.replenish()
    for _ in range(5):
        spare.replenish_after(Seconds(15.0))
    await until(lambda: len(clock.sleepers) == 6, 10.0, "all to sleep")
    for _ in range(3):
        await clock.step()
        assert len(clock.sleepers) == 1, "what looks for room, and no more"
