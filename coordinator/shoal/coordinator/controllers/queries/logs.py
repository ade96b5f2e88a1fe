"""Nodes' logs, requested over their links. Nothing is stored here, and each answer has a timeout."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from shoal.coordinator.controllers.queries.correlation import RequestCorrelator
from shoal.coordinator.ports import AgentLinks, Clock
from shoal.host.log_files import MAX_LINES, LogPage, escape_line
from shoal.types.codes import Code, refuse
from shoal.types.link import LogLines, LogsAsked
from shoal.types.units import Seconds

ANSWERS_S: Final = 5.0
POLL_S: Final = Seconds(1.0)
"""Interval between two polls for new lines."""
READERS: Final = 8
"""Concurrent readers, over all nodes' logs."""


async def read_pages(
    ask: Callable[[str], Awaitable[LogLines | LogPage]], clock: Clock, *, follow: bool
) -> AsyncIterator[tuple[str, ...]]:  # fmt: skip
    """A log's lines, then (follow) new ones for ever. ask: returns the page after a position in the log; empty
    position: the newest page.
    """
    after = ""
    while True:
        page = await ask(after)
        if page.lines:
            yield tuple(map(escape_line, page.lines))
        if not follow:
            return
        after = page.after
        if not page.more:
            await clock.sleep(POLL_S)


class NodeLogs:
    """Reads nodes' logs over their links, for at most READERS callers at a time."""

    def __init__(self, links: AgentLinks, clock: Clock) -> None:
        self._clock = clock
        self._requests = RequestCorrelator[LogLines](links)
        self._readers = 0

    async def read(self, node: str, lines: int, *, follow: bool) -> AsyncIterator[tuple[str, ...]]:
        """The last `lines` lines of a connected node's log, oldest first, then (follow) new ones for ever.

        Raises ShoalError(OVERLOADED | DEADLINE_EXCEEDED).
        """
        if self._readers >= READERS:
            raise refuse(Code.OVERLOADED, f"{READERS} readers of logs", "fewer", "try again when one has ended")
        self._readers += 1
        try:
            pages = read_pages(lambda after: self._ask(node, after, min(lines, MAX_LINES)), self._clock, follow=follow)
            async for page in pages:
                yield page
        finally:
            self._readers -= 1

    def on_answer(self, node: str, answer: LogLines) -> None:
        self._requests.on_answer(node, answer.request, answer)

    async def _ask(self, node: str, after: str, lines: int) -> LogLines:
        try:
            return await self._requests.ask(node, lambda number: LogsAsked(number, after, lines), ANSWERS_S)
        except TimeoutError as cause:
            raise refuse(
                Code.DEADLINE_EXCEEDED,
                f"{node} did not answer within {ANSWERS_S:g} s",
                "a node that is connected",
                "see `shoal get nodes`; on the device itself: journalctl -u shoal-agent",
            ) from cause
