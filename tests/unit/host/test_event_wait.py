"""A wait ends with its event or with its time, whichever comes first, and leaves no task behind."""

import asyncio

from harness.fakes.clock import ManualClock
from shoal.host.event_wait import wait_or_timeout
from shoal.types.units import Seconds


class StoppedClock(ManualClock):
    """A clock on which no time passes."""

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.Event().wait()


async def test_an_event_that_is_set_ends_the_wait_without_any_time() -> None:
    event = asyncio.Event()
    event.set()
    assert await wait_or_timeout(event, 0.0)
    assert await wait_or_timeout(event, None)
    assert await wait_or_timeout(event, 1.0, StoppedClock())


async def test_an_event_that_is_set_meanwhile_ends_the_wait() -> None:
    for seconds, clock in ((None, None), (None, StoppedClock()), (3600.0, None), (3600.0, StoppedClock())):
        event = asyncio.Event()
        asyncio.get_running_loop().call_soon(event.set)
        assert await wait_or_timeout(event, seconds, clock)


async def test_the_time_ends_the_wait() -> None:
    assert not await wait_or_timeout(asyncio.Event(), 0.0)
    clock = ManualClock(now=100.0)
    assert not await wait_or_timeout(asyncio.Event(), 3600.0, clock)
    assert clock.now() == 3700.0, "the clock of the caller counts"


async def test_a_wait_leaves_no_task_behind() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await wait_or_timeout(event, 3600.0, StoppedClock())
    waiting = asyncio.ensure_future(wait_or_timeout(asyncio.Event(), 3600.0, StoppedClock()))
    await asyncio.wait((waiting,), timeout=0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert all(each.cancelling() for each in asyncio.all_tasks() if each is not asyncio.current_task())
