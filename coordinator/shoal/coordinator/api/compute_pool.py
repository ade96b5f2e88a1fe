"""Runs computations that grow with a request off the event loop, and limits them per caller.

A thread cannot be stopped, and Python runs one at a time. So a caller has one computation at a time and all callers
together have `THREADS`; the loop gets its turn every few milliseconds (`sys.getswitchinterval`).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from shoal.types.codes import Code, refuse

T = TypeVar("T")

THREADS: Final = 2
MAX_REQUESTS_PER_CALLER: Final = 8
"""Most requests of one caller, including the one that runs."""


@dataclass(slots=True)
class _Caller:
    """The requests of one caller."""

    # Held by the request that runs.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # The request that runs and those that wait.
    request_count: int = 0


class ComputePool:
    """Runs functions for the operator API, or what the region's steps decide."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="beside")
        self._callers: dict[str, _Caller] = {}

    async def run(self, caller: str, work: Callable[[], T], *, limited: bool = True) -> T:
        """The result of `work`. Raises ShoalError(OVERLOADED) if the caller has too many requests.

        limited: False for the answer to a request that has changed something already. It waits for its turn, but is not
        refused, as if nothing had been done: a caller has few of these, because what comes before was limited.

        The caller must not be cancelled before this returns (see `uncancelled.py`), because the lock must be held until
        the thread is done.
        """
        found = self._callers.setdefault(caller, _Caller())
        if limited and found.request_count >= MAX_REQUESTS_PER_CALLER:
            raise refuse(
                Code.OVERLOADED,
                f"{found.request_count} requests of {caller:.120} that take computing",
                f"at most {MAX_REQUESTS_PER_CALLER} at a time",
                "wait for their answers",
            )
        found.request_count += 1
        try:
            async with found.lock:
                return await asyncio.get_running_loop().run_in_executor(self._pool, _without_stop, work)
        finally:
            found.request_count -= 1
            if not found.request_count:
                del self._callers[caller]

    def stop(self) -> None:
        """Does not wait; results of running computations are discarded."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _without_stop(work: Callable[[], T]) -> T:
    """A future takes no StopIteration: who waits for it would never be told."""
    try:
        return work()
    except StopIteration as cause:
        raise RuntimeError("a computation raised StopIteration") from cause
