"""What is to be sent after the current event of an event loop.

Who answers an event often writes to another connection than the one that it came on, several times. Those writes leave
together once the event is handled: at once, if the loop has nothing else to do and nothing else is under way on those
connections, for another turn of the loop takes as long as a small answer; else in the next turn, so that what comes
meanwhile leaves with them.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

Flush = Callable[[], None]


class FlushQueue:
    """Of one event loop. A connection's flush is added once until it ran."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[Flush] = []
        self._may_wait = False
        """Whether one of those that are due is to leave with what comes soon."""
        self._is_scheduled = False
        self._is_handling = False
        # Callbacks that are due now. It is asyncio's own; another loop may lack it.
        self._ready: deque[Any] | None = getattr(loop, "_ready", None)

    def add(self, flush: Flush, *, may_wait: bool) -> None:
        """Call `flush` soon. `may_wait`: more is likely to be written to its connection."""
        self._due.append(flush)
        self._may_wait |= may_wait
        if not self._is_handling and not self._is_scheduled:
            self._schedule()

    def begin_event(self) -> bool:
        """An event of a connection is being handled. Whoever gets True calls `end_event` after it."""
        is_outermost, self._is_handling = not self._is_handling, True
        return is_outermost

    def end_event(self) -> None:
        self._is_handling = False
        if not self._due or self._is_scheduled:
            return
        if self._may_wait or self._ready is None or self._ready:
            self._schedule()
        else:
            self._run()

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = self._may_wait = False
        due, self._due = self._due, []
        for flush in due:
            try:
                flush()
            except Exception as error:  # another connection's writes must not wait for this one's
                context = {"message": "a connection's writes failed", "exception": error}
                self._loop.call_exception_handler(context)


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, FlushQueue] = WeakKeyDictionary()


def flush_queue() -> FlushQueue:
    """Of the running loop."""
    loop = asyncio.get_running_loop()
    found = _queues.get(loop)
    if found is None:
        found = _queues[loop] = FlushQueue(loop)
    return found
