"""Timeouts that count only the time in which this process ran: asyncio around `shoal.host.watchdog`."""

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any, Final, TypeVar

from shoal.host.watchdog import Watchdog
from shoal.types.units import Seconds

T = TypeVar("T")

TICK_S: Final = Seconds(0.1)
"""How often a wait polls. Also the most silence that one suspension of this process (SIGSTOP, starvation) can add."""


def start_watchdog(limit_s: float) -> Watchdog:
    """A watchdog that starts now, on the event loop's clock."""
    return Watchdog(Seconds(limit_s), TICK_S, asyncio.get_running_loop().time())


async def wait_any(futures: Collection["asyncio.Future[Any]"], limit_s: float) -> bool:
    """Whether one of `futures` finishes before this process has run for `limit_s`. Cancels none of them."""
    watching = start_watchdog(limit_s)
    while not watching.is_expired:
        # `wait` also returns when the timer fires in the loop iteration that reads an answer. Only the next iteration
        # delivers that answer, so a gap counts as one tick and never as the end.
        done, _ = await asyncio.wait(futures, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return True
        watching = watching.on_tick(asyncio.get_running_loop().time())
    return False


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """The result of `work`. Raises TimeoutError after this process has run for `limit_s`, and cancels `work` then."""
    task = asyncio.ensure_future(work)
    try:
        if not await wait_any((task,), limit_s):
            raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    try:
        return task.result()
    finally:
        del task, work  # else a failed task and its error, which knows this frame, refer to each other
