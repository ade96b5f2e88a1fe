"""Which requests are traced, and what their spans say. Of all others nothing is kept, and nothing allocated.

Who decides: the front where a request enters the region, by chance (`ratio`), or an operator, who asks for it in a
`traceparent`; the fronts on its way then follow. A tenant decides nothing: its `traceparent` gives a request that is
traced anyway its trace's id, so that its own spans and these are found together. However many are asked for, there is a
bound to a second.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.agent.dataplane.auth import Caller
from shoal.agent.frames import Header
from shoal.agent.ports import Clock
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.link import SpansAsked, SpansFound
from shoal.types.route import Endpoint, EndpointKind
from shoal.types.trace import Span, SpanKind, TraceParent, read_traceparent
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.wire.logfiles import readable
from shoal.wire.otlp import Exporter

KEPT: Final = 4096
"""Spans that are kept here for whoever asks; the oldest go first."""
ANSWERED: Final = 256
"""Spans of one trace that are told."""
TRACED_A_SECOND: Final = 100
_CHANCES: Final = 2**32
FRONT: Final = "front"
WORKER: Final = "worker"
RUN: Final = "run"
STAGES: Final = ("arrive", "queue", "decode", "wait", RUN, "encode")
"""Of a request in a worker, in their order. arrive: on its way there; wait: for its turn on the device."""

Told = Callable[[Sequence[Span]], None]


def _nobody(_spans: Sequence[Span]) -> None: ...


class Tracer:
    """Of one front. ratio: of the requests that enter here; told: each traced request's spans, once it has ended."""

    def __init__(self, region: str, node: str, clock: Clock, ratio: float = 0.0, told: Told = _nobody) -> None:
        self.region = region
        self.node = node
        self.clock = clock
        self._below = round(ratio * _CHANCES)
        self._told = told
        self._kept: deque[Span] = deque(maxlen=KEPT)
        self._second = (0, 0)
        self.traced = 0
        self.left_out = 0
        """Requests that were to be traced and came beyond `TRACED_A_SECOND`."""

    def begin(self, caller: Caller, said: str) -> "Trace | None":
        """said: the request's `traceparent`, "" without one. None where it is not traced."""
        if not self._below and not (said and (caller.hop or caller.role is Role.OPERATOR)):
            return None  # nothing is read that nobody may ask by
        parent = read_traceparent(said) if said else None
        if not self._chosen(caller, parent) or not self._has_room():
            return None
        return Trace(self, parent)

    def ended(self, spans: Sequence[Span]) -> None:
        self._kept.extend(spans)
        self._told(spans)

    def found(self, asked: SpansAsked) -> SpansFound:
        return SpansFound(asked.request, tuple(islice((s for s in self._kept if s.trace == asked.trace), ANSWERED)))

    def _chosen(self, caller: Caller, parent: TraceParent | None) -> bool:
        asked = parent is not None and parent.sampled
        if caller.hop:
            return asked  # where it entered has judged
        if asked and caller.role is Role.OPERATOR:
            return True
        return secrets.randbits(32) < self._below

    def _has_room(self) -> bool:
        second = int(self.clock.now())
        count = self._second[1] + 1 if self._second[0] == second else 1
        self._second = (second, count)
        if count > TRACED_A_SECOND:
            self.left_out += 1
            return False
        self.traced += 1
        return True


class Trace:
    """One traced request inside this front. Times go by the elapsed clock from the moment it came."""

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

    def attempt(self, endpoint: Endpoint) -> "Attempt":
        return Attempt(self, endpoint)

    def end(self, caller: Caller, workload: str, request: str, attempts: int, code: Code | None) -> None:
        """request: its id, as its caller says. code: of the refusal it ended with."""
        attributes = {
            "shoal.workload": workload,
            "shoal.request": readable(request),
            "shoal.origin": caller.origin,
            "shoal.attempts": str(attempts),
        }
        if caller.region:
            attributes |= {"shoal.agreement": caller.agreement, "shoal.from.region": caller.region}
        elif caller.hop:
            attributes["shoal.from.node"] = caller.name
        self.add("request", SpanKind.SERVER, self._root, self._parent, self._began, attributes, code)
        self._tracer.ended(self._spans)

    def add(
        self,
        name: str,
        kind: SpanKind,
        span: str,
        parent: str,
        began: Elapsed,
        attributes: dict[str, str],
        code: Code | None = None,
        *,
        process: str = FRONT,
        ended: Elapsed | None = None,
    ) -> None:
        """ended: None for now."""
        tracer = self._tracer
        seconds = Seconds((self.now() if ended is None else ended) - began)
        at = Wall(self._wall + (began - self._began))
        where = (tracer.region, tracer.node, process)
        self._spans.append(Span(self.id, span, parent, name, kind, *where, at, seconds, attributes, code or ""))


class Attempt:
    """One replica, once, of a traced request."""

    def __init__(self, trace: Trace, endpoint: Endpoint) -> None:
        self._trace = trace
        self._endpoint = endpoint
        self._span = secrets.token_hex(8)
        self._began = trace.now()

    @property
    def traceparent(self) -> str:
        return str(TraceParent(self._trace.id, self._span, sampled=True))

    def told(self, header: Header) -> None:
        """What a worker says of its stages: the moment each ended, by the monotonic clock of all loops of a machine. A
        worker runs strangers' models: what it cannot have done is left out."""
        now = self._trace.now()
        offset = now - asyncio.get_running_loop().time()
        began = self._began
        for name, ended in _stages(header):
            until = Elapsed(ended + offset)
            if not began <= until <= now:
                return
            own, batch = secrets.token_hex(8), header["stages"].get("batch")
            about = {"shoal.batch": str(batch)} if name == RUN and isinstance(batch, int) and 0 < batch < 2**31 else {}
            self._trace.add(name, SpanKind.INTERNAL, own, self._span, began, about, process=WORKER, ended=until)
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


class TraceCollector(Collector):
    """`shoal_front_traces` and what became of their spans, made when scraped."""

    def __init__(self, tracer: Tracer, exporter: Exporter) -> None:
        self._tracer = tracer
        self._exporter = exporter

    def collect(self) -> Iterator[Metric]:
        traces = CounterMetricFamily("shoal_front_traces", "requests that were to be traced", labels=("outcome",))
        traces.add_metric(("traced",), self._tracer.traced)
        traces.add_metric(("left_out",), self._tracer.left_out)
        yield traces
        spans = CounterMetricFamily("shoal_front_spans", "spans for the collector", labels=("outcome",))
        spans.add_metric(("exported",), self._exporter.exported)
        spans.add_metric(("dropped",), self._exporter.dropped)
        yield spans
