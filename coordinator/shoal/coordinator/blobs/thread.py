"""Blocking file work in threads."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shoal.coordinator.uncancelled import run_to_completion

P = ParamSpec("P")
T = TypeVar("T")


async def run_thread_to_completion(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but returns or raises only when `work` has ended, even if the caller is cancelled: a
    thread cannot be stopped, and must not continue with a descriptor that its owner has closed."""
    return await run_to_completion(asyncio.to_thread(work, *args, **kwargs))
