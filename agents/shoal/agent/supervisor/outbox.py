"""What this node tells its region beside its status: events, and answers to queries."""

from collections import deque
from collections.abc import Awaitable, Callable

from shoal.agent.ports import AgentClock, LinkSession, Log
from shoal.agent.supervisor.replicas import Spawn
from shoal.types.codes import Code, ShoalError
from shoal.types.link import LogLines, NodeEvent, NodeEvents, SpansFound

MAX_QUEUED_EVENTS = 256
"""Events that wait for a link. When the queue is full, the oldest are dropped."""
MAX_QUERIES = 4
"""Log and trace queries in progress at once. A query beyond that gets no answer; the coordinator asks again."""


class Outbox:
    """Keeps events and answers until a session takes them. `on_answer` is called when an answer waits."""

    def __init__(self, clock: AgentClock, log: Log, spawn: Spawn, on_answer: Callable[[], None]) -> None:
        self._clock = clock
        self._log = log
        self._spawn = spawn
        self._on_answer = on_answer
        self._events: deque[NodeEvent] = deque(maxlen=MAX_QUEUED_EVENTS)
        self._answers: deque[LogLines | SpansFound] = deque(maxlen=MAX_QUERIES)
        self._query_count = 0

    def report_event(self, code: str, subject: str, message: str) -> None:
        """Log an event now, and queue it for the region. An event with the same code and subject is queued once."""
        self._log.warning("node_event_reported", code=code, subject=subject, error=message)
        if not any((event.code, event.subject) == (code, subject) for event in self._events):
            self._events.append(NodeEvent(code, subject, message, self._clock.wall()))

    def answer(self, read: Callable[[], Awaitable[LogLines | SpansFound]]) -> None:
        """Answer a query with what `read` returns. If that fails, there is no answer."""

        async def read_answer() -> None:
            try:
                self._answers.append(await read())
            except ShoalError as error:
                self._log.error("query_failed", code=error.code, error=str(error))
            finally:
                self._query_count -= 1
            self._on_answer()

        if self._query_count < MAX_QUERIES:
            self._query_count += 1
            self._spawn(read_answer(), "answer")

    async def send(self, session: LinkSession) -> None:
        """Send all that waits. Raises ShoalError; then the events are sent again in the next session."""
        if self._events:
            await self._send_events(session, tuple(self._events))
        while self._answers:
            await session.send(self._answers.popleft())

    async def _send_events(self, session: LinkSession, events: tuple[NodeEvent, ...]) -> None:
        """Remove events from the queue only after they are sent, so that the next session repeats those of a lost
        link."""
        try:
            await session.send(NodeEvents(events))
        except ShoalError as error:
            if error.code is not Code.TOO_LARGE:  # no session takes these, and to repeat them would end each one
                raise
            self._log.error("events_dropped", code=error.code, error=str(error))
        self._events = deque((each for each in self._events if each not in events), maxlen=MAX_QUEUED_EVENTS)
