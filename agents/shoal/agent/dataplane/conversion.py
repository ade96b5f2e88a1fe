"""Runs the conversion of JSON bodies in short turns, one body of a caller at a time: on the event loop, the largest
beside it."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from shoal.agent.dataplane.tensors import Steps, run_steps

INLINE_BYTES: Final = 16 * 2**10
"""Bodies of at most one step are converted at once."""
LOOP_BYTES: Final = 2**20
"""Bodies up to this size are converted on the loop: at 40 ns a byte, the most that was measured (lists of four numbers
of one digit), that is a twelfth of the half second that one request may take of the loop (A55)."""
TURN_S: Final = 0.0005
"""A turn ends with the step that reaches this time. So much later is whatever else the loop has to do, at each of its
rounds while something is converted: some five rounds for a request. A turn in a thread costs the loop a fifth of it."""
_T = TypeVar("_T")


class Conversions:
    """Conversions of one transport.

    All share one turn at each round of the loop. Threads finish no sooner, because a conversion holds the interpreter's
    lock. One without turns would be worse: a loop that waits for this lock gets it after 5 ms
    (`sys.getswitchinterval`), again in each of its rounds.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "json")
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
                try:
                    if size <= LOOP_BYTES:
                        done = _take_turn(steps)
                    else:
                        done = await loop.run_in_executor(self._thread, _take_turn, steps)
                finally:
                    loop.call_soon(self._turn.release)  # in the loop's next round
                if done is not None:
                    return done[0]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

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


def _take_turn(steps: Steps[_T]) -> tuple[_T] | None:
    """The result in a tuple, once there is one."""
    until = time.perf_counter() + TURN_S
    try:
        next(steps)
        while time.perf_counter() < until:
            next(steps)
    except StopIteration as over:
        return (over.value,)
    return None
