"""Blocking file work beside the event loop."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shoal.coordinator.controllers.finish import finish

P = ParamSpec("P")
T = TypeVar("T")


async def to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, but returns or raises only when `work` has ended, also for a caller that is cancelled:
    a thread cannot be stopped, and must not go on with a descriptor that its owner has closed."""
    return await finish(asyncio.to_thread(work, *args, **kwargs))
