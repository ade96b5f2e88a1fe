"""A change that one of several processes makes at a time, however long it takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.coordinator.ports import Election
from shoal.types.codes import Code, refuse


@asynccontextmanager
async def while_elected(election: Election) -> AsyncIterator[None]:
    """After a campaign: keeps the election, whose lease ends unless it is renewed; cancels the body once it is lost.

    A thread that the body waits for is not cancelled: what it writes must itself refuse the second of two changes.
    Raises ShoalError(CONFLICT) after a loss.
    """
    lost = asyncio.ensure_future(election.wait_lost())
    limit, is_inside = asyncio.timeout(None), True

    def cancel_body(_: asyncio.Future[None]) -> None:
        if is_inside:
            limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with limit:
            lost.add_done_callback(cancel_body)
            try:
                yield
            finally:
                is_inside = False
    except TimeoutError as cause:
        if not limit.expired():
            raise
        found = "an election that was lost meanwhile: this process was paused, or another one took its place"
        raise refuse(Code.CONFLICT, found, "one change at a time", "try again") from cause
    finally:
        lost.cancel()
