"""Waiting on a condition with a deadline; the only place of the tests where time passes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")


def wait_until(condition: Callable[[], T], deadline_s: float, what: str, *, every_s: float = 0.02) -> T:
    """The first truthy value of `condition`. An exception counts as not yet; the last one seen is in the failure."""
    end = time.monotonic() + deadline_s  # noqa: TID251 - the tests' own clock
    last: object = None
    while True:
        try:
            value = condition()
            if value:
                return value
            last = value
        except Exception as seen:
            last = seen
        if time.monotonic() > end:  # noqa: TID251
            raise AssertionError(f"not within {deadline_s}s: {what}; last seen: {last!r}")
        time.sleep(every_s)  # noqa: TID251


@overload
async def until(condition: Callable[[], Awaitable[T]], deadline_s: float, what: str, *, every_s: float = ...) -> T: ...


@overload
async def until(condition: Callable[[], T], deadline_s: float, what: str, *, every_s: float = ...) -> T: ...


async def until(condition: Callable[[], Any], deadline_s: float, what: str, *, every_s: float = 0.02) -> Any:
    """As `wait_until`, on the running loop; `condition` may be a coroutine function."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    last: object = None
    while True:
        try:
            value = condition()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return value
            last = value
        except Exception as seen:
            last = seen
        if loop.time() > end:
            raise AssertionError(f"not within {deadline_s}s: {what}; last seen: {last!r}")
        await asyncio.sleep(every_s)  # noqa: TID251
