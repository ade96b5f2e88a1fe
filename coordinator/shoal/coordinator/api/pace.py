"""Lets long work of the operator API and the dashboard give the loop its turns."""

import asyncio
import time
from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

SLICE_S: Final = 0.004
"""The loop is given back after this much time."""


class Pace:
    """Gives the loop its turns during long work, and measures that work in processor time: what else runs on the
    machine makes a slice longer by the clock, but no more work."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._began, self._used = self._now(), time.thread_time()
        self.worked_s = 0.0
        """Processor seconds of all slices."""
        self.longest_s = 0.0
        """Processor seconds of the longest."""

    async def breathe(self) -> None:
        """Gives the loop a turn if this slice has taken its time."""
        if self._now() - self._began >= SLICE_S:
            await self.rest()

    async def rest(self) -> None:
        took = time.thread_time() - self._used
        self.worked_s += took
        self.longest_s = max(self.longest_s, took)
        await asyncio.sleep(0)
        self._began, self._used = self._now(), time.thread_time()


class Listed(Protocol[T_contra]):
    """A list of messages in a reply."""

    def append(self, value: T_contra, /) -> None: ...


async def extend_in_slices(listed: Listed[T], found: Iterable[T]) -> None:
    """Appends everything found, which is made meanwhile, without holding the loop for long."""
    pace = Pace()
    for each in found:
        listed.append(each)
        await pace.breathe()
