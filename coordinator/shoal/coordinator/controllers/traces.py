"""Traces of this region: of migrations and negotiations from what is stored of them, of requests from the fronts that
had them. Nothing is kept here."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.asking import Questions
from shoal.coordinator.controllers.bids import BidsController
from shoal.coordinator.controllers.events import Event, EventLog
from shoal.coordinator.controllers.ledger import Ledger
from shoal.coordinator.core.fleet.checks import is_a_time
from shoal.coordinator.core.migration import spans as migrations
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation import spans as negotiations
from shoal.coordinator.core.negotiation.spans import Line, Negotiation
from shoal.coordinator.ports import AgentLinks, Clock, Traces
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.link import SPANS_PROTOCOL, SpansAsked, SpansFound
from shoal.types.trace import TRACE_ID, Span

ANSWERS_S: Final = 2.0
EVENTS: Final = 2_000
"""The newest of the log, among which negotiations are looked for."""
LEDGER: Final = 2_000
OVER: Final = 256
"""Stories that wait to be told; the oldest go first."""
SPANS_MOST: Final = 2_000
"""Of one answer; a client may give one trace's id to all that it asks."""
SEEKERS: Final = 8
"""Who may ask all nodes at once."""
_CODES: Final = frozenset(Code)


@dataclass(frozen=True, slots=True)
class Found:
    """silent: nodes that did not answer in time."""

    trace: str
    spans: tuple[Span, ...]
    silent: tuple[str, ...] = ()


class TracesController:
    def __init__(
        self,
        region: str,
        links: AgentLinks,
        clock: Clock,
        events: EventLog,
        ledger: Ledger,
        traces: Traces,
        *,
        migrations: Callable[[], Mapping[str, Migration]],
        nodes: Callable[[], Mapping[str, int]],
        bids: Callable[[], BidsController | None],
    ) -> None:
        """migrations: by their id. nodes: those that are connected, and the protocol of their sessions. bids: what this
        region runs for others."""
        self._region = region
        self._clock = clock
        self._events = events
        self._ledger = ledger
        self._traces = traces
        self._migrations = migrations
        self._nodes = nodes
        self._bids = bids
        self._questions = Questions[SpansFound](links)
        self._seekers = 0
        self._over: deque[str] = deque(maxlen=OVER)

    def answered(self, node: str, answer: SpansFound) -> None:
        self._questions.answered(node, answer.request, answer)

    def ended(self, name: str) -> None:
        """A migration, or a negotiation (its solicitation or agreement): told with the next `tell`."""
        if self._traces.wanted:
            self._over.append(name)

    async def tell(self) -> None:
        """What ended since, to whoever collects traces. What a coordinator did not live to tell stays to be asked for.
        Raises ShoalError(STORE_UNAVAILABLE)."""
        while self._over:
            name = self._over.popleft()
            try:
                self._traces.told(self._of_migration(name) or await self._of_negotiation(name))
            except ShoalError:
                if len(self._over) < OVER:
                    self._over.appendleft(name)
                raise

    async def find(self, name: str) -> Found:
        """name: of a trace, a migration, a negotiation or its agreement. Raises ShoalError(NOT_FOUND | OVERLOADED)."""
        if spans := self._of_migration(name) or await self._of_negotiation(name):
            return Found(spans[0].trace, spans)
        if not TRACE_ID.fullmatch(name):
            raise refuse(
                Code.NOT_FOUND,
                f"no trace, migration or negotiation {name!r:.80} in {self._region}",
                "an id of one",
                "see `shoal get migrations`, `shoal federation bids`, `shoal infer --trace`",
            )
        if self._seekers >= SEEKERS:
            raise refuse(Code.OVERLOADED, f"{SEEKERS} who look for traces", "fewer", "try again when one has ended")
        self._seekers += 1
        try:
            return await self._of_request(name)
        finally:
            self._seekers -= 1

    def _of_migration(self, name: str) -> tuple[Span, ...]:
        wall, known = self._clock.wall(), self._migrations()
        if name in known:
            return migrations.spans_of(known[name], self._region, wall)
        if TRACE_ID.fullmatch(name):
            for each in known.values():
                if migrations.trace_id(self._region, each.id) == name:
                    return migrations.spans_of(each, self._region, wall)
        return ()

    async def _of_negotiation(self, name: str) -> tuple[Span, ...]:
        """This region's part of it, as the origin or as one that bid."""
        lines = _lines(await self._events.past(0, EVENTS))
        for each in negotiations.negotiations(lines):
            if name in _names(self._region, each):
                return negotiations.origin_spans(each, self._region)
        return await self._of_hold(name)

    async def _of_hold(self, name: str) -> tuple[Span, ...]:
        bids = self._bids()
        spans: list[Span] = []
        for deal in bids.deals if bids is not None else ():
            offer, agreement = deal.offer, hold.name_of(deal.state)
            trace = negotiations.trace_id(offer.origin, offer.solicitation)
            if name in (trace, offer.solicitation, offer.id) or (agreement and name == agreement):
                entries = await self._ledger.newest(LEDGER)
                spans += negotiations.delegate_spans(
                    offer, agreement, deal.since, entries, self._region, self._clock.wall()
                )
        return tuple(spans)

    async def _of_request(self, trace: str) -> Found:
        nodes = self._nodes()

        async def ask(node: str) -> SpansFound | None:
            if nodes[node] < SPANS_PROTOCOL:
                return None
            try:
                return await self._questions.ask(node, lambda number: SpansAsked(number, trace), ANSWERS_S)
            except TimeoutError:
                return None

        answers = await asyncio.gather(*map(ask, nodes))
        silent = tuple(node for node, answer in zip(nodes, answers, strict=True) if answer is None)
        found = [
            each
            for node, answer in zip(nodes, answers, strict=True)
            for each in (answer.spans if answer is not None else ())
            if each.trace == trace and (each.region, each.node) == (self._region, node) and _has_times(each)
        ]
        return Found(trace, tuple(found[:SPANS_MOST]), silent)


def _has_times(span: Span) -> bool:
    return is_a_time(span.began) and span.seconds >= 0 and is_a_time(span.ended)


def _names(region: str, each: Negotiation) -> tuple[str, ...]:
    names = (each.solicitation, each.agreement, negotiations.trace_id(region, each.solicitation))
    return tuple(filter(None, names))


def _lines(events: Sequence[Event]) -> tuple[Line, ...]:
    return tuple(line for event in events if (line := _line(event)) is not None)


def _line(event: Event) -> Line | None:
    """As the trades wrote it: counterpart, code and terms, what there is of them."""
    what = event.code.lower()
    if what not in negotiations.TOLD or event.workload is None:
        return None
    parts = event.message.split("  ")
    region = parts.pop(0) if what not in (negotiations.SOLICITED, "no_bid") else ""
    code = parts.pop(0) if parts and parts[0] in _CODES else ""
    return Line(what, event.subject, event.workload, event.at, region, code, "  ".join(parts))
