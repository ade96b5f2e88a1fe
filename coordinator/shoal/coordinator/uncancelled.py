"""Runs a controller's coroutine to its end when the caller hangs up.

A gRPC handler is cancelled when its caller hangs up. A controller cancelled between a commit and the update of its
memory would go on with a memory that contradicts the store. So the edges (`api`, `link`) call controllers through this
module.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.coordinator.ports import LinkEvents
from shoal.types.assignment import Status
from shoal.types.codes import Refusal
from shoal.types.link import FromAgent, Lease, Refused

T = TypeVar("T")


async def dispatch_message(events: LinkEvents, node: str, epoch: int, message: FromAgent) -> Refused | Lease | None:
    """Passes a session's message to the controller and returns the reply for the node. A heartbeat gets no task of its
    own, because there are thousands a second.
    """
    if isinstance(message, Status):
        answer = events.on_status(node, epoch, message)
    else:
        answer = await run_to_completion(events.on_message(node, epoch, message))
    return Refused(answer, fatal=False) if isinstance(answer, Refusal) else answer


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Returns or raises only when `work` has ended. A cancellation is held back until then, and then raised."""
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
            running.exception()  # the caller is gone: mark the exception as retrieved
        raise
