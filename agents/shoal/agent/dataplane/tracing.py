"""Which requests are traced, and what their spans contain. An untraced request costs no memory and no allocation.

The front where a request enters the region decides, at random (`ratio`) or because an operator asks in a `traceparent`.
The fronts after it follow. A tenant's `traceparent` decides nothing. It only sets the trace id of a request that is
traced anyway, so that the tenant's own spans join the trace. The number of traces per second is bounded.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from shoal.agent import metrics
from shoal.agent.dataplane.auth import Caller
from shoal.agent.frames import Header
from shoal.agent.ports import AgentClock
from shoal.host.log_files import escape_line
from shoal.host.otlp import Exporter
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.link import SpansAsked, SpansFound
from shoal.types.metric import MetricReadings
from shoal.types.route import Endpoint, EndpointKind
from shoal.types.trace import Span, SpanKind, TraceParent, parse_traceparent
from shoal.types.units import Elapsed, Seconds, Wall

MAX_KEPT_SPANS: Final = 4096
"""Spans kept here for queries; the oldest are dropped first."""
MAX_FOUND_SPANS: Final = 256
"""Most spans of one trace that a query returns."""
MAX_TRACES_PER_S: Final = 100
_RATIO_SCALE: Final = 2**32
FRONT: Final = "front"
WORKER: Final = "worker"
RUN: Final = "run"
STAGES: Final = ("arrive", "queue", "decode", "wait", RUN, "encode")
"""Stages of a request in a worker, in their order. arrive: in transit to the worker; wait: for its turn on the
device."""

SpanSink = Callable[[Sequence[Span]], None]


def _discard(_spans: Sequence[Span]) -> None: ...


class Tracer:
    """Tracing of one front. `ratio` is the share of requests entering here; `sink` gets the spans of each ended
    request."""

    def __init__(
        self, region: str, node: str, clock: AgentClock, ratio: float = 0.0, sink: SpanSink = _discard
    ) -> None:
        self.region = region
        self.node = node
        self.clock = clock
        self._sample_below = round(ratio * _RATIO_SCALE)
        self._sink = sink
        self._spans: deque[Span] = deque(maxlen=MAX_KEPT_SPANS)
        self._second = (0, 0)
        self.traced_count = 0
        self.left_out_count = 0
        """Requests that were to be traced and exceeded MAX_TRACES_PER_S."""

    def may_trace(self, caller: Caller, traceparent: str) -> bool:
        """Whether a request may be traced. `traceparent` is empty without one."""
        return bool(self._sample_below or (traceparent and (caller.hop or caller.role is Role.OPERATOR)))

    def begin(self, caller: Caller, traceparent: str) -> "Trace | None":
        """Begin the trace of a request, or return None where it is not traced. `traceparent` is empty without one."""
        if not self.may_trace(caller, traceparent):
            return None  # a `traceparent` without effect is not parsed
        parent = parse_traceparent(traceparent) if traceparent else None
        if not self._should_trace(caller, parent) or not self._has_room():
            return None
        return Trace(self, parent)

    def record_spans(self, spans: Sequence[Span]) -> None:
        self._spans.extend(spans)
        self._sink(spans)

    def find_spans(self, asked: SpansAsked) -> SpansFound:
        return SpansFound(
            asked.request, tuple(islice((s for s in self._spans if s.trace == asked.trace), MAX_FOUND_SPANS))
        )

    def _should_trace(self, caller: Caller, parent: TraceParent | None) -> bool:
        asked = parent is not None and parent.sampled
        if caller.hop:
            return asked  # the entering front has decided
        if asked and caller.role is Role.OPERATOR:
            return True
        return secrets.randbits(32) < self._sample_below

    def _has_room(self) -> bool:
        second = int(self.clock.now())
        count = self._second[1] + 1 if self._second[0] == second else 1
        self._second = (second, count)
        if count > MAX_TRACES_PER_S:
            self.left_out_count += 1
            return False
        self.traced_count += 1
        return True


class Trace:
    """One traced request inside this front. Times are of the elapsed clock, from the request's arrival."""

    def __init__(self, tracer: Tracer, parent: TraceParent | None) -> None:
        self.id = parent.trace if parent is not None else secrets.token_hex(16)
        self._tracer = tracer
        self._parent = parent.span if parent is not None else ""
        self._root = secrets.token_hex(8)
        self._began = tracer.clock.now()
        self._wall = tracer.clock.wall()
        self._spans: list[Span] = []

    @property
    def root(self) -> str:
        return self._root

    def now(self) -> Elapsed:
        return self._tracer.clock.now()

    def attempt(self, endpoint: Endpoint) -> "AttemptSpan":
        return AttemptSpan(self, endpoint)

    def end(self, caller: Caller, workload: str, request: str, attempts: int, code: Code | None) -> None:
        """`request` is its id, as its caller sent it. `code` is of the refusal that it ended with; None when it was
        answered."""
        attributes = {
            "shoal.workload": workload,
            "shoal.request": escape_line(request),
            "shoal.origin": caller.origin,
            "shoal.attempts": str(attempts),
        }
        if caller.region:
            attributes |= {"shoal.agreement": caller.agreement, "shoal.from.region": caller.region}
        elif caller.hop:
            attributes["shoal.from.node"] = caller.name
        self.add("request", SpanKind.SERVER, self._root, self._parent, self._began, attributes, code)
        self._tracer.record_spans(self._spans)

    def add(
        self,
        name: str,
        kind: SpanKind,
        span: str,
        parent: str,
        began_at: Elapsed,
        attributes: dict[str, str],
        code: Code | None = None,
        *,
        process: str = FRONT,
        ended_at: Elapsed | None = None,
    ) -> None:
        """Add a span. `ended_at` None means now."""
        tracer = self._tracer
        seconds = Seconds((self.now() if ended_at is None else ended_at) - began_at)
        at = Wall(self._wall + (began_at - self._began))
        where = (tracer.region, tracer.node, process)
        self._spans.append(Span(self.id, span, parent, name, kind, *where, at, seconds, attributes, code or ""))


class AttemptSpan:
    """The span of one attempt on one replica."""

    def __init__(self, trace: Trace, endpoint: Endpoint) -> None:
        self._trace = trace
        self._endpoint = endpoint
        self._span = secrets.token_hex(8)
        self._began = trace.now()

    @property
    def traceparent(self) -> str:
        return str(TraceParent(self._trace.id, self._span, sampled=True))

    def add_worker_stages(self, header: Header) -> None:
        """Add spans for the worker's stages, from the end of each on the machine's monotonic clock.

        A worker runs untrusted models, so impossible times are left out.
        """
        now = self._trace.now()
        offset = now - asyncio.get_running_loop().time()
        began = self._began
        for name, ended in _stages(header):
            until = Elapsed(ended + offset)
            if not began <= until <= now:
                return
            own, batch = secrets.token_hex(8), header["stages"].get("batch")
            about = {"shoal.batch": str(batch)} if name == RUN and isinstance(batch, int) and 0 < batch < 2**31 else {}
            self._trace.add(name, SpanKind.INTERNAL, own, self._span, began, about, process=WORKER, ended_at=until)
            began = until

    def end(self, code: Code | None) -> None:
        where = self._endpoint
        attributes = {"shoal.assignment": where.assignment}
        if where.region:
            attributes = {"shoal.agreement": where.agreement, "shoal.to.region": where.region}
        if where.kind is not EndpointKind.LOCAL:
            attributes["shoal.to.node"] = where.node
        self._trace.add("attempt", SpanKind.CLIENT, self._span, self._trace.root, self._began, attributes, code)


def _stages(header: Header) -> Iterator[tuple[str, float]]:
    said: Any = header.get("stages")
    if not isinstance(said, dict):
        return
    for name in STAGES:
        ended = said.get(name)
        if isinstance(ended, float):
            yield name, ended


def readings(tracer: Tracer, exporter: Exporter) -> MetricReadings:
    """What the front's page says of traces and their spans."""
    return {
        metrics.FRONT_TRACES: {("traced",): tracer.traced_count, ("left_out",): tracer.left_out_count},
        metrics.FRONT_SPANS: {("exported",): exporter.exported, ("dropped",): exporter.dropped},
    }
