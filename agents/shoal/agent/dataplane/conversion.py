"""Runs the conversion of JSON bodies on the event loop, in short turns, one body of a caller at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from shoal.agent.dataplane.tensors import Steps, run_steps

INLINE_BYTES: Final = 16 * 2**10
"""Bodies of at most one step are converted at once."""
TURN_S: Final = 0.0005
"""A turn ends with the step that reaches this time. So much later is whatever else the loop has to do, at each of its
rounds while something is converted: some five rounds for a request."""
_T = TypeVar("_T")


class Conversions:
    """Conversions of one transport.

    All share one turn at each round of the loop. Threads would not finish sooner, because a conversion holds the
    interpreter's lock. A loop that waits for this lock gets it after 5 ms (`sys.getswitchinterval`), again in each of
    its rounds: with turns it waits for TURN_S.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._locks: dict[str, asyncio.Lock] = {}
        self._inside: Counter[str] = Counter()

    async def run(self, caller: str, size: int, steps: Steps[_T]) -> _T:
        """Return the result of `steps`, and raise what they raise. `size` is the number of bytes to convert."""
        if size <= INLINE_BYTES:
            return run_steps(steps)
        loop = asyncio.get_running_loop()
        async with self._body(caller):
            while True:
                await self._turn.acquire()
                loop.call_soon(self._turn.release)  # in the loop's next round
                until = loop.time() + TURN_S
                try:
                    next(steps)
                    while loop.time() < until:
                        next(steps)
                except StopIteration as over:
                    result: _T = over.value
                    return result

    @asynccontextmanager
    async def _body(self, caller: str) -> AsyncIterator[None]:
        """Turns of different callers alternate, so that a caller with many bodies gets no more than one with a single
        body."""
        self._inside[caller] += 1
        try:
            async with self._locks.setdefault(caller, asyncio.Lock()):
                yield
        finally:
            self._inside[caller] -= 1
            if not self._inside[caller]:
                del self._inside[caller], self._locks[caller]
