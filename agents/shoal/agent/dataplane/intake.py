"""How much of the front one caller may hold: calls, bytes, and places for messages on their way in.

A transport cannot tell a message's size before it has it, so what bounds memory is how many are being read at once.
Who reads or sends slowly keeps a place only for as long as nobody waits for it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from shoal.agent.dataplane.transport import MAX_MESSAGE, Refused
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.units import Seconds

PLACES: Final = 32
PLACES_PER_CALLER: Final = 8
CALLS_PER_CALLER: Final = 512
STREAMS_PER_CALLER: Final = 8
BYTES_PER_CALLER: Final = 4 * MAX_MESSAGE
"""Of answers that it has not taken yet; always room for one."""
GRACE_S: Final = 10.0
"""For one message, when another waits for its place."""
PATIENCE_S: Final = GRACE_S + 2.0
"""For a place: whoever was inside when one came to wait has been sent away by then."""
MOST_S: Final = 60.0
"""For one message in any case."""


class _Places:
    """So many at once. Where all are taken, all have no more than GRACE_S from when they came in.

    A place that comes free goes to the caller that has fewest: who asks for many does not stand before others.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._taken: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._inside: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def taken(self, caller: str) -> AsyncIterator[bool]:
        """Whether there was a crowd. Raises Refused(OVERLOADED) when no place comes free in PATIENCE_S."""
        crowd = not self._free
        if crowd:
            await self._wait(caller)
        else:
            self._free -= 1
            self._taken[caller] += 1
        try:
            yield crowd
        finally:
            self._give_back(caller)

    @contextmanager
    def limited(self, limit: asyncio.Timeout) -> Iterator[None]:
        self._inside[limit] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._inside[limit]

    async def _wait(self, caller: str) -> None:
        """Returns with the place taken."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for limit, since in self._inside.items():
            if not limit.expired():
                limit.reschedule(max(now, since + GRACE_S))
        turn = loop.create_future()
        self._waiting.append((caller, turn))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if not turn.cancelled():  # it was given the place just then
                self._give_back(caller)
            else:
                self._waiting.remove((caller, turn))
            if isinstance(error, TimeoutError):
                raise _too_much("messages that do not arrive, in every place", "a free place") from error
            raise

    def _give_back(self, caller: str) -> None:
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]
        waiting = [(other, turn) for other, turn in self._waiting if not turn.done()]
        if not waiting:
            self._free += 1
            return
        other, turn = min(waiting, key=lambda one: self._taken[one[0]])
        self._waiting.remove((other, turn))
        self._taken[other] += 1
        turn.set_result(None)


@dataclass(slots=True)
class _Held:
    """What one caller holds now."""

    calls: int = 0
    streams: int = 0
    unread: int = 0
    places: _Places = field(default_factory=lambda: _Places(PLACES_PER_CALLER))


class Intake:
    """Of one transport. caller: whoever shall not take what others need; a name that was verified."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._places = _Places(PLACES)

    @contextmanager
    def call(self, caller: str, *, stream: bool = False) -> Iterator[None]:
        """One call from its head to its answer's last byte. Raises Refused(OVERLOADED)."""
        held = self._held.setdefault(caller, _Held())
        if held.calls >= CALLS_PER_CALLER:
            raise _too_much(f"{held.calls} calls of this caller", f"at most {CALLS_PER_CALLER} at once")
        if stream and held.streams >= STREAMS_PER_CALLER:
            raise _too_much(f"{held.streams} streams of this caller", f"at most {STREAMS_PER_CALLER} at once")
        held.calls += 1
        held.streams += stream
        try:
            yield
        finally:
            held.calls -= 1
            held.streams -= stream
            if held.calls == 0:
                del self._held[caller]

    @asynccontextmanager
    async def place(self, caller: str, most_s: float = MOST_S) -> AsyncIterator[None]:
        """Inside `call`: while one message is read. Raises ShoalError(TOO_SLOW) when that takes too long."""
        own, shared = self._held[caller].places, self._places
        try:
            async with own.taken(caller) as mine, shared.taken(caller) as ours:
                async with asyncio.timeout(GRACE_S if mine or ours else most_s) as limit:
                    with own.limited(limit), shared.limited(limit):
                        yield
        except TimeoutError as error:
            raise refuse(Code.TOO_SLOW, "a message that does not arrive", "bytes in time", "send it faster") from error

    @contextmanager
    def unread(self, caller: str, size: int) -> Iterator[None]:
        """Inside `call`: while an answer of `size` bytes is sent. Raises Refused(OVERLOADED)."""
        held = self._held[caller]
        if held.unread and held.unread + size > BYTES_PER_CALLER:
            found = f"{held.unread} bytes of answers that this caller does not take"
            raise _too_much(found, f"at most {BYTES_PER_CALLER}")
        held.unread += size
        try:
            yield
        finally:
            held.unread -= size


def _too_much(found: str, asked: str) -> Refused:
    return Refused(Refusal(Code.OVERLOADED, found, asked, "retry later, with fewer calls at once"), Seconds(1.0))
