"""What nodes logged, asked for over their links: nothing is kept here, and each answer is waited for a bounded time."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Final

from shoal.coordinator.ports import AgentLinks, Clock
from shoal.types.codes import Code, refuse
from shoal.types.link import LogLines, LogsAsked
from shoal.types.units import Seconds
from shoal.wire.logfiles import LINES_MOST, readable

ANSWERS_S: Final = 5.0
LOOK_S: Final = Seconds(1.0)
"""Between two looks for new lines."""
READERS: Final = 8
"""Of all nodes' logs at once."""


class NodeLogs:
    def __init__(self, links: AgentLinks, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._numbers = count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[LogLines]] = {}
        self._readers = 0

    async def read(self, node: str, lines: int, *, follow: bool) -> AsyncIterator[tuple[str, ...]]:
        """The last `lines` of a connected node, oldest first, then (follow) new ones for ever.

        Raises ShoalError(OVERLOADED | DEADLINE_EXCEEDED)."""
        if self._readers >= READERS:
            raise refuse(Code.OVERLOADED, f"{READERS} readers of logs", "fewer", "try again when one has ended")
        self._readers += 1
        try:
            after, more = "", False
            while True:
                answer = await self._ask(node, after, min(lines, LINES_MOST))
                if answer.lines:
                    yield tuple(map(readable, answer.lines))
                if not follow:
                    return
                after, more = answer.after, answer.more
                if not more:
                    await self._clock.sleep(LOOK_S)
        finally:
            self._readers -= 1

    def answered(self, node: str, answer: LogLines) -> None:
        """One that nobody waits for is dropped: a node tells nobody anything unasked."""
        waiting = self._waiting.get((node, answer.request))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _ask(self, node: str, after: str, lines: int) -> LogLines:
        request = next(self._numbers)
        waiting = self._waiting[node, request] = asyncio.get_running_loop().create_future()
        try:
            await self._links.send(node, LogsAsked(request, after, lines))
            return await asyncio.wait_for(waiting, ANSWERS_S)
        except TimeoutError as cause:
            raise refuse(
                Code.DEADLINE_EXCEEDED,
                f"{node} did not answer within {ANSWERS_S:g} s",
                "a node that is connected",
                "see `shoal get nodes`; on the device itself: journalctl -u shoal-agent",
            ) from cause
        finally:
            del self._waiting[node, request]
