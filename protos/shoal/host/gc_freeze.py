"""Keeps Python's cyclic garbage collection short in processes that serve requests.

A full collection visits every object while the rest of the process stands still. Most objects are modules, classes and
tables that live as long as the process: 56000 of a front's 58000, whose collection took 19 to 31 ms of a core, six
times in two minutes at 380 requests/s (measured). No request progressed meanwhile.
"""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shoal.host import memory

YOUNG_S: Final = 10.0
"""Seconds between two searches of what was allocated since the last one."""
PAUSED_S: Final = 0.02
"""Seconds between two looks whether all pauses are over."""
COUNT_EVERY: Final = 60
"""After so many searches, the objects are counted that are excluded from them: that visits each, at 20 ns."""
MOST_GROWTH: Final = 1.5
"""Everything is searched once so many times as many objects are excluded as at the first count, or after the last full
search."""
MOST_RESIDENT_GROWTH: Final = 1.25
"""The same for memory: few objects may hold much, and no count of objects says so."""
MOST_SEARCHED: Final = 20_000
"""To visit one takes a microsecond where the cache has none of them."""
WHOLE_EVERY: Final = 360
"""Everything is searched after so many searches in any case: once an hour."""


def freeze() -> None:
    """Excludes all current objects from later collections. Call it once, after the process is set up and before it
    serves. Cycles among these objects that become unreachable later are not freed."""
    gc.collect()
    gc.freeze()
    # Python collects fully once a quarter more objects have lived long than the last full collection left. This one
    # leaves few; else a quarter of the frozen ones would have to come first, with all that they hold.
    gc.collect()


def search_after(count: int) -> None:
    """Searches the youngest objects for cycles once `count` more were made than freed; Python does after 700. What is
    under way in a process that serves a thousand requests at once is no garbage, but each search visits it."""
    gc.set_threshold(count, *gc.get_threshold()[1:])


@contextmanager
def pause() -> Iterator[None]:
    """Searches for no cycles meanwhile: for work that allocates much, leaves no cycles, and that somebody waits for. If
    it leaves MOST_SEARCHED objects, they are excluded from later searches; so are cycles that others left before.
    Several threads may pause at a time: searches go on after the last of them."""
    _PAUSES.begin()
    try:
        yield
    finally:
        _PAUSES.end()


class _Pauses:
    """Those that are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._was_enabled = False
        self._before = 0
        """Objects that were made since the last search, when the first of them began."""

    def begin(self) -> None:
        with self._lock:
            self._number += 1
            if self._number == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()
                self._before = gc.get_count()[0]

    def end(self) -> None:
        with self._lock:
            self._number -= 1
            if not self._number and self._was_enabled:
                if gc.get_count()[0] - self._before >= MOST_SEARCHED:
                    gc.freeze()
                gc.enable()

    @property
    def is_under_way(self) -> bool:
        return self._number > 0


_PAUSES: Final = _Pauses()


async def collect_regularly(
    every_s: float = YOUNG_S, count_every: int = COUNT_EVERY, whole_every: int = WHOLE_EVERY
) -> None:
    """Until cancelled, frees garbage cycles that are young, in a process whose threshold is high for its bursts, and
    excludes what is older from later searches.

    Between these it would keep as much garbage as a burst allocates. grpcio leaves a cycle for each call that it serves
    (`_find_method_handler` of grpc.aio). What a large region holds is as old as its documents and nodes: to visit it
    once takes longer than its heartbeats may wait, and finds nothing, because values that refer to each other in one
    direction are freed without a search. Cycles that became garbage later are found once they are many or hold much,
    and after an hour at the latest: the process has set up what it holds when it counts for the first time.
    """
    searched, whole_at, excluded, resident, wait_s = 0, 0, 0, 0, every_s
    while True:
        await asyncio.sleep(wait_s)
        if _PAUSES.is_under_way:  # it would visit all that is being made: millions of objects of a large apply
            wait_s = min(PAUSED_S, every_s)
            continue
        wait_s = every_s
        gc.collect(1)
        gc.freeze()
        searched += 1
        if searched % count_every:
            continue
        count, bytes_now = gc.get_freeze_count(), memory.resident_bytes()
        if not excluded:
            excluded, resident, whole_at = count, bytes_now, searched
        elif (
            count > MOST_GROWTH * excluded
            or bytes_now > MOST_RESIDENT_GROWTH * resident
            or searched - whole_at >= whole_every
        ):
            excluded, resident, whole_at = search_all(), memory.resident_bytes(), searched


def search_all() -> int:
    """Frees all cycles, those of excluded objects too, and excludes what is left: returns how many objects."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
