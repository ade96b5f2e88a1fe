"""Runs the conversion of JSON bodies beside the event loop, in slices, one body of a caller at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from shoal.agent.dataplane.tensors import Steps, run_steps

INLINE_BYTES: Final = 16 * 2**10
"""Bodies of at most one step are converted on the loop: a thread would take longer to answer."""
STEPS_A_SLICE: Final = 8
"""Steps after which the loop gets a turn: some 10 ms, which costs the loop 0.1 ms. A thread that converts without a
pause would take the interpreter's lock from the loop for 5 ms at each of its turns."""
_T = TypeVar("_T")


class Conversions:
    """Conversions of one transport.

    All share one thread: a conversion holds the interpreter's lock, so more threads would not finish sooner.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "json")
        self._locks: dict[str, asyncio.Lock] = {}
        self._inside: Counter[str] = Counter()

    async def run(self, caller: str, size: int, steps: Steps[_T]) -> _T:
        """Return the result of `steps`, and raise what they raise. `size` is the number of bytes to convert."""
        if size <= INLINE_BYTES:
            return run_steps(steps)
        loop = asyncio.get_running_loop()
        async with self._turn(caller):
            while not (done := await loop.run_in_executor(self._thread, _run_slice, steps)):
                pass
            return done[0]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _turn(self, caller: str) -> AsyncIterator[None]:
        """Slices of different callers alternate, so that a caller with many bodies gets no more than one with a single
        body."""
        self._inside[caller] += 1
        try:
            async with self._locks.setdefault(caller, asyncio.Lock()):
                yield
        finally:
            self._inside[caller] -= 1
            if not self._inside[caller]:
                del self._inside[caller], self._locks[caller]


def _run_slice(steps: Steps[_T]) -> tuple[_T] | None:
    try:
        for _ in range(STEPS_A_SLICE):
            next(steps)
    except StopIteration as over:
        return (over.value,)
    return None
