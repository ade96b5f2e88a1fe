"""Traces of this region: of migrations and negotiations from stored state, of requests from the fronts that served
them. Nothing is stored here.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.federation.delegate import DelegateController
from shoal.coordinator.controllers.federation.ledger import Ledger
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.queries.correlation import RequestCorrelator
from shoal.coordinator.core.fleet.checks import is_plausible_time
from shoal.coordinator.core.migration import spans as migrations
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.core.negotiation import spans as negotiations
from shoal.coordinator.core.negotiation.spans import Negotiation, NegotiationLine
from shoal.coordinator.ports import AgentLinks, SpanExporter
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.link import SPANS_PROTOCOL, SpansAsked, SpansFound
from shoal.types.trace import TRACE_ID, Span

ANSWERS_S: Final = 2.0
EVENTS_READ: Final = 2_000
"""Newest events of the log that are searched for negotiations."""
ENTRIES_READ: Final = 2_000
PENDING_MOST: Final = 256
"""Traces queued for export; beyond this the oldest are dropped."""
SPANS_MOST: Final = 2_000
"""Spans in one answer; a client may use one trace id for all its requests."""
SEEKERS: Final = 8
"""Concurrent searches over all nodes."""
_CODES: Final = frozenset(Code)


@dataclass(frozen=True, slots=True)
class TraceResult:
    """The spans of one trace."""

    # Trace id.
    trace: str
    spans: tuple[Span, ...]
    # Nodes that did not answer in time, or whose protocol has no traces.
    silent_nodes: tuple[str, ...] = ()


class TracesController:
    """Finds traces on request, and exports those of migrations and negotiations when they end."""

    def __init__(
        self,
        context: ControllerContext,
        links: AgentLinks,
        ledger: Ledger,
        exporter: SpanExporter,
        *,
        migrations: Callable[[], Mapping[str, Migration]],
        nodes: Callable[[], Mapping[str, int]],
        delegate: Callable[[], DelegateController | None],
    ) -> None:
        """migrations: by id. nodes: connected nodes with the protocol version of their sessions. delegate: the
        controller of bids for other regions; None where the region does not trade.
        """
        self._region = context.name
        self._clock = context.clock
        self._events = context.events
        self._ledger = ledger
        self._exporter = exporter
        self._migrations = migrations
        self._nodes = nodes
        self._delegate = delegate
        self._requests = RequestCorrelator[SpansFound](links)
        self._seekers = 0
        self._pending: deque[str] = deque(maxlen=PENDING_MOST)

    def on_answer(self, node: str, answer: SpansFound) -> None:
        self._requests.on_answer(node, answer.request, answer)

    def on_end(self, name: str) -> None:
        """Queues a migration or a negotiation (its solicitation or agreement) for the next `export`."""
        if self._exporter.is_enabled:
            self._pending.append(name)

    async def export(self) -> None:
        """Sends the traces that ended since the last call to the exporter. Traces that a crash left unsent can still be
        found by `find`. Raises ShoalError(STORE_UNAVAILABLE).
        """
        while self._pending:
            name = self._pending.popleft()
            try:
                self._exporter.export(self._of_migration(name) or await self._of_negotiation(name))
            except ShoalError:
                if len(self._pending) < PENDING_MOST:
                    self._pending.appendleft(name)
                raise

    async def find(self, name: str) -> TraceResult:
        """name: of a trace, a migration, a negotiation or its agreement. Raises ShoalError(NOT_FOUND | OVERLOADED)."""
        if spans := self._of_migration(name) or await self._of_negotiation(name):
            return TraceResult(spans[0].trace, spans)
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
        """This region's spans of it, as the origin or as a bidder."""
        lines = _parse_lines(await self._events.events_after(0, EVENTS_READ))
        for each in negotiations.negotiations(lines):
            if name in _names(self._region, each):
                return negotiations.origin_spans(each, self._region)
        return await self._of_hold(name)

    async def _of_hold(self, name: str) -> tuple[Span, ...]:
        bids = self._delegate()
        spans: list[Span] = []
        for bid in bids.bids if bids is not None else ():
            offer, agreement = bid.offer, hold.agreement_name(bid.state)
            trace = negotiations.trace_id(offer.origin, offer.solicitation)
            if name in (trace, offer.solicitation, offer.id) or (agreement and name == agreement):
                entries = await self._ledger.newest(ENTRIES_READ)
                spans += negotiations.delegate_spans(
                    offer, agreement, bid.since, entries, self._region, self._clock.wall()
                )
        return tuple(spans)

    async def _of_request(self, trace: str) -> TraceResult:
        nodes = self._nodes()

        async def ask(node: str) -> SpansFound | None:
            if nodes[node] < SPANS_PROTOCOL:
                return None
            try:
                return await self._requests.ask(node, lambda number: SpansAsked(number, trace), ANSWERS_S)
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
        return TraceResult(trace, tuple(found[:SPANS_MOST]), silent)


def _has_times(span: Span) -> bool:
    return is_plausible_time(span.began) and span.seconds >= 0 and is_plausible_time(span.end_time)


def _names(region: str, each: Negotiation) -> tuple[str, ...]:
    names = (each.solicitation, each.agreement, negotiations.trace_id(region, each.solicitation))
    return tuple(filter(None, names))


def _parse_lines(events: Sequence[LogEvent]) -> tuple[NegotiationLine, ...]:
    return tuple(line for event in events if (line := _parse_line(event)) is not None)


def _parse_line(event: LogEvent) -> NegotiationLine | None:
    """Parses an event of the origin controller: counterpart, code and terms, as far as present."""
    what = event.code.lower()
    if what not in negotiations.NEGOTIATION_EVENTS or event.workload is None:
        return None
    parts = event.message.split("  ")
    region = parts.pop(0) if what not in (negotiations.SOLICITED, "no_bid") else ""
    code = parts.pop(0) if parts and parts[0] in _CODES else ""
    return NegotiationLine(what, event.subject, event.workload, event.at, region, code, "  ".join(parts))
