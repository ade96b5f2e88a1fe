"""What a caller that leaves must not cut in two.

A handler is cancelled when its caller hangs up. A controller that is cancelled between a commit and what it remembers
of it would go on with a memory that the store contradicts, so the edges (`api`, `link`) call controllers through here.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.coordinator.ports import LinkEvents
from shoal.types.assignment import Status
from shoal.types.codes import Refusal
from shoal.types.link import FromAgent, Lease, Refused

T = TypeVar("T")


async def deliver(events: LinkEvents, node: str, epoch: int, message: FromAgent) -> Refused | Lease | None:
    """A message of a session, and what the node is told of it. A heartbeat, of which there are thousands a second,
    costs no task of its own."""
    if isinstance(message, Status):
        answer = events.heard(node, epoch, message)
    else:
        answer = await finish(events.received(node, epoch, message))
    return Refused(answer, fatal=False) if isinstance(answer, Refusal) else answer


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Returns or raises only when `work` has ended: a cancellation waits for that, and then goes on."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()  # its caller has left: it is nobody's any more
        raise
