"""Waiting on a condition with a deadline; the only place of the tests where time passes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

SLOWER, SLOWEST_S = 0.05, 0.1
"""Poll intervals grow with the wait: this share of the time waited so far, up to this many seconds. Each poll costs
processor time that the awaited process or another test could use."""


def wait_until(condition: Callable[[], T], deadline_s: float, what: str, *, every_s: float = 0.02) -> T:
    """The first truthy value of `condition`. An exception counts as false; the failure shows the last one."""
    start = time.monotonic()  # noqa: TID251 - the tests' own clock
    last: object = None
    while True:
        try:
            value = condition()
            if value:
                return value
            last = value
        except Exception as seen:
            last = seen
        waited_s = time.monotonic() - start  # noqa: TID251
        if waited_s > deadline_s:
            raise AssertionError(f"not within {deadline_s}s: {what}; last seen: {last!r}")
        time.sleep(_pause_s(every_s, waited_s))  # noqa: TID251


@overload
async def until(condition: Callable[[], Awaitable[T]], deadline_s: float, what: str, *, every_s: float = ...) -> T: ...


@overload
async def until(condition: Callable[[], T], deadline_s: float, what: str, *, every_s: float = ...) -> T: ...


async def until(condition: Callable[[], Any], deadline_s: float, what: str, *, every_s: float = 0.02) -> Any:
    """As `wait_until`, on the running loop; `condition` may be a coroutine function."""
    loop = asyncio.get_running_loop()
    start = loop.time()
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
        waited_s = loop.time() - start
        if waited_s > deadline_s:
            raise AssertionError(f"not within {deadline_s}s: {what}; last seen: {last!r}")
        await asyncio.sleep(_pause_s(every_s, waited_s))  # noqa: TID251


def _pause_s(every_s: float, waited_s: float) -> float:
    return max(every_s, min(SLOWER * waited_s, SLOWEST_S))
