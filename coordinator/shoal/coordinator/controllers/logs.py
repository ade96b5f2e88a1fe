"""What nodes logged, asked for over their links: nothing is kept here, and each answer is waited for a bounded time."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from shoal.coordinator.controllers.asking import Questions
from shoal.coordinator.ports import AgentLinks, Clock
from shoal.types.codes import Code, refuse
from shoal.types.link import LogLines, LogsAsked
from shoal.types.units import Seconds
from shoal.wire.logfiles import LINES_MOST, Page, readable

ANSWERS_S: Final = 5.0
LOOK_S: Final = Seconds(1.0)
"""Between two looks for new lines."""
READERS: Final = 8
"""Of all nodes' logs at once."""


async def paged(
    ask: Callable[[str], Awaitable[LogLines | Page]], clock: Clock, *, follow: bool
) -> AsyncIterator[tuple[str, ...]]:  # fmt: skip
    """A log's lines, then (follow) new ones for ever. ask: for what comes after a place in it; empty: the newest."""
    after = ""
    while True:
        page = await ask(after)
        if page.lines:
            yield tuple(map(readable, page.lines))
        if not follow:
            return
        after = page.after
        if not page.more:
            await clock.sleep(LOOK_S)


class NodeLogs:
    def __init__(self, links: AgentLinks, clock: Clock) -> None:
        self._clock = clock
        self._questions = Questions[LogLines](links)
        self._readers = 0

    async def read(self, node: str, lines: int, *, follow: bool) -> AsyncIterator[tuple[str, ...]]:
        """The last `lines` of a connected node, oldest first, then (follow) new ones for ever.

        Raises ShoalError(OVERLOADED | DEADLINE_EXCEEDED)."""
        if self._readers >= READERS:
            raise refuse(Code.OVERLOADED, f"{READERS} readers of logs", "fewer", "try again when one has ended")
        self._readers += 1
        try:
            pages = paged(lambda after: self._ask(node, after, min(lines, LINES_MOST)), self._clock, follow=follow)
            async for page in pages:
                yield page
        finally:
            self._readers -= 1

    def answered(self, node: str, answer: LogLines) -> None:
        self._questions.answered(node, answer.request, answer)

    async def _ask(self, node: str, after: str, lines: int) -> LogLines:
        try:
            return await self._questions.ask(node, lambda number: LogsAsked(number, after, lines), ANSWERS_S)
        except TimeoutError as cause:
            raise refuse(
                Code.DEADLINE_EXCEEDED,
                f"{node} did not answer within {ANSWERS_S:g} s",
                "a node that is connected",
                "see `shoal get nodes`; on the device itself: journalctl -u shoal-agent",
            ) from cause
