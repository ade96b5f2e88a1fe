"""Wait for an event or for a time, whichever comes first."""

import asyncio
from typing import Protocol

from shoal.types.units import Seconds


class Sleeper(Protocol):
    """What a wait needs of a clock port."""

    async def sleep(self, seconds: Seconds) -> None: ...


async def wait_or_timeout(event: asyncio.Event, seconds: float | None, clock: Sleeper | None = None) -> bool:
    """Whether `event` is set within `seconds`. None: no limit. `clock` measures the time instead of the event loop."""
    if clock is not None and seconds is not None:
        return await _wait_by_clock(event, seconds, clock)
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _wait_by_clock(event: asyncio.Event, seconds: float, clock: Sleeper) -> bool:
    sleeping = asyncio.ensure_future(clock.sleep(Seconds(seconds)))
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({sleeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done()
    finally:
        sleeping.cancel()
        waiting.cancel()
