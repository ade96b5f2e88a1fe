"""How long the connections of an event loop may hold it at once.

A loop handles all that is ready before it looks again. Of a thousand connections that say something at once, handling
all takes some hundred milliseconds, and whatever needs several turns of the loop waits for that several times: among
them the answer by which a supervisor knows that its front lives. So connections get TURN_S together; what has arrived
on others waits for the next turn, first come, first served, and everything else has the loop in between.

What waits is bounded too: of it connections read less, the more of them wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from time import monotonic  # noqa: TID251 - it is the clock of an event loop
from typing import Final
from weakref import WeakKeyDictionary

TURN_S: Final = 0.01
"""Far below what anything waits for, and some dozens of small requests or handshakes (0.1 to 1 ms each)."""
PAUSE_S: Final = 0.001
"""Where nothing was handled for this long, something else had the loop, or it had nothing to do."""
WAITING_BYTES: Final = 2**21
"""So much may one connection read when one waits, each a share when many do: of 4,096 that come one after the other all
together 18 MiB, the sum of 2 MiB / n."""

Event = Callable[[], None]


class ConnectionTurns:
    """Of one event loop. clock: seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._waiting: deque[Event] = deque()
        self._began_at = 0.0
        """When connections got the loop."""
        self._ended_at = 0.0
        """When the last of their events was handled."""

    @property
    def room(self) -> int:
        """Most bytes that a connection should read now."""
        return WAITING_BYTES // len(self._waiting) if self._waiting else WAITING_BYTES

    def begin_event(self) -> bool:
        """Whether what arrived on a connection may be handled now. Whoever gets True calls `end_event` after it.
        Whoever gets False calls `wait`."""
        now = self._clock()
        if now - self._ended_at >= PAUSE_S:
            self._began_at = now
        return not self._waiting and now - self._began_at < TURN_S

    def end_event(self) -> None:
        self._ended_at = self._clock()

    def wait(self, event: Event) -> None:
        """Have `event` called in a later turn of the loop."""
        if not self._waiting:
            self._call_soon()
        self._waiting.append(event)

    def _call_soon(self) -> None:
        # Of no caller's context: what runs then is of many.
        self._loop.call_soon(self._run, context=Context())

    def _run(self) -> None:
        self._began_at = self._clock()
        is_over = False
        try:
            while self._waiting and not is_over:
                try:
                    self._waiting[0]()
                except Exception as error:  # of one connection: others must not wait for it
                    context = {"message": "what arrived on a connection was not handled", "exception": error}
                    self._loop.call_exception_handler(context)
                finally:
                    self._waiting.popleft()
                self._ended_at = self._clock()
                is_over = self._ended_at - self._began_at >= TURN_S
        finally:  # also after what ends a program, as long as its loop runs
            if self._waiting:
                self._call_soon()


_turns: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, ConnectionTurns]] = WeakKeyDictionary()


def connection_turns() -> ConnectionTurns:
    """Of the running loop."""
    loop = asyncio.get_running_loop()
    found = _turns.get(loop)
    if found is None:
        found = _turns[loop] = ConnectionTurns(loop)
    return found
