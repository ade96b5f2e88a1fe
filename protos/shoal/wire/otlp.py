"""Spans to an OpenTelemetry collector: OTLP over gRPC, in batches, beside whatever the process does.

Nothing waits for it. What a collector does not take in time is dropped, and counted. The protocol's messages are loaded
when there is an endpoint, and not before: https://opentelemetry.io/docs/specs/otlp/
"""

import asyncio
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import unquote, urlsplit

import grpc
import grpc.aio
import structlog

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.trace import Span, SpanKind

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
DEFAULT_RATIO: Final = 0.01
"""Of requests, where there is a collector and nothing else was said."""
PORT: Final = 4317
KEPT: Final = 4096
"""Spans that wait for a collector; the oldest go first."""
BATCH: Final = 512
GATHER_S: Final = 1.0
EXPORT_S: Final = 10.0
LAST_S: Final = 2.0
"""For what is left when the process ends."""
PAUSE_S: Final = 1.0
"""Before what a collector did not take is sent again; twice as long each time."""
_PAUSE_MOST_S: Final = 30.0
_AGAIN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)

_log = structlog.get_logger(__name__)

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Collector:
    """target: host:port. roots: the CAs (PEM) that its certificate may come from, None for the system's. headers:
    secret."""

    target: str
    tls: bool
    roots: bytes | None = None
    headers: Headers = field(default=(), repr=False)


def endpoint_of(environment: Mapping[str, str] = os.environ) -> str:
    """What the standard variables name; empty where they name none."""
    return environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""


def ratio_of(asked: float | None, endpoint: str) -> float:
    """asked: None where nothing was said."""
    if asked is not None:
        return asked
    return DEFAULT_RATIO if endpoint else 0.0


def collector_of(endpoint: str, environment: Mapping[str, str] = os.environ) -> Collector:
    """endpoint: http://HOST[:PORT] or https://HOST[:PORT]. Headers and CAs as the standard variables
    OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE say. Raises ShoalError(FIELD_INVALID)."""
    try:
        found = urlsplit(endpoint)
        port = found.port or PORT
    except ValueError:
        found, port = urlsplit(""), 0
    if (
        found.username is not None
        or found.scheme not in ("http", "https")
        or not found.hostname
        or found.path not in ("", "/")
        or found.query
    ):
        raise refuse(
            Code.FIELD_INVALID, f"--otlp {endpoint!r:.120}", "http://HOST:PORT or https://HOST:PORT",
            f"an OTLP receiver over gRPC, usually at port {PORT}",
        )  # fmt: skip
    host = f"[{found.hostname}]" if ":" in found.hostname else found.hostname
    headers = _headers(environment.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    return Collector(f"{host}:{port}", found.scheme == "https", _roots(environment), headers)


class Exporter:
    """`offer` spans from the event loop that runs `run`. collector: None for nobody; what is offered is then let go,
    and not counted."""

    def __init__(self, collector: Collector | None) -> None:
        self._collector = collector
        self._waiting: deque[Span] = deque()
        self._offered = asyncio.Event()
        self.exported = 0
        self.dropped = 0

    @classmethod
    def to(cls, endpoint: str) -> Self:
        """endpoint: one that `collector_of` took when the process was started; empty for nobody. What is wrong with it
        by now (the file of its CAs is gone) is logged, and nobody collects: who serves, or leads, goes on."""
        try:
            return cls(collector_of(endpoint) if endpoint else None)
        except ShoalError as error:
            _log.error("spans_not_exported", refusal=str(error))
            return cls(None)

    @property
    def wanted(self) -> bool:
        """Whether anybody collects."""
        return self._collector is not None

    def offer(self, spans: Sequence[Span]) -> None:
        if not self.wanted:
            return
        self._waiting.extend(spans)
        while len(self._waiting) > KEPT:
            self._waiting.popleft()
            self.dropped += 1
        self._offered.set()

    async def run(self) -> None:
        """Until cancelled; then once more what is left, for a moment. Returns at once where nobody collects."""
        if self._collector is None:
            return
        headers = self._collector.headers
        async with _channel(self._collector) as channel:
            try:
                while True:
                    await self._offered.wait()
                    await asyncio.sleep(GATHER_S)
                    await self._empty(channel, headers)
            finally:
                if self._waiting:
                    await self._last(channel, headers)

    async def _empty(self, channel: grpc.aio.Channel, headers: Headers) -> None:
        pause_s = PAUSE_S
        while self._waiting:
            if await self._send(channel, headers, EXPORT_S):
                pause_s = PAUSE_S
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)
        self._offered.clear()

    async def _last(self, channel: grpc.aio.Channel, headers: Headers) -> None:
        try:
            async with asyncio.timeout(LAST_S):
                while self._waiting and await self._send(channel, headers, LAST_S):
                    pass
        except TimeoutError:
            pass
        self.dropped += len(self._waiting)

    async def _send(self, channel: grpc.aio.Channel, headers: Headers, within_s: float) -> bool:
        """One batch. False where the collector may take it later."""
        batch = list(islice(self._waiting, BATCH))
        call = channel.unary_unary(EXPORT, None, None)
        try:
            await call(request_of(batch).SerializeToString(), timeout=within_s, metadata=headers)
        except grpc.aio.AioRpcError as error:
            _log.warning("spans_not_exported", code=error.code().name, detail=(error.details() or "")[:200])
            if error.code() in _AGAIN:
                return False
            self.dropped += self._take(batch)
        except Exception:  # one that nobody foresaw shall not end the telling of all others
            _log.exception("spans_not_exported")
            self.dropped += self._take(batch)
        else:
            self.exported += self._take(batch)
        return True

    def _take(self, batch: Sequence[Span]) -> int:
        """What still waits of it, and does no more: the oldest may have been dropped meanwhile."""
        told, taken = set(map(id, batch)), 0
        while self._waiting and id(self._waiting[0]) in told:
            self._waiting.popleft()
            taken += 1
        return taken


def _channel(collector: Collector) -> grpc.aio.Channel:
    if not collector.tls:
        return grpc.aio.insecure_channel(collector.target)
    return grpc.aio.secure_channel(collector.target, grpc.ssl_channel_credentials(collector.roots))


def request_of(spans: Iterable[Span]) -> "ExportTraceServiceRequest":
    """As OTLP has them, those of one process together."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    scopes: dict[tuple[str, str, str], Any] = {}
    for span in spans:
        where = (span.region, span.node, span.process)
        if where not in scopes:
            group = request.resource_spans.add()
            resource = {
                "service.name": f"shoal-{span.process}",
                "service.namespace": span.region,
                "service.instance.id": span.node or span.region,
            }
            _put(group.resource.attributes, resource)
            scopes[where] = group.scope_spans.add()
            scopes[where].scope.name = "shoal"
        _fill(scopes[where].spans.add(), span)
    return request


def _fill(message: Any, span: Span) -> None:
    message.trace_id = bytes.fromhex(span.trace)
    message.span_id = bytes.fromhex(span.id)
    message.parent_span_id = bytes.fromhex(span.parent)
    message.name = span.name
    message.kind = _KINDS[span.kind]
    message.start_time_unix_nano = _nanoseconds(span.began)
    message.end_time_unix_nano = _nanoseconds(span.ended)
    _put(message.attributes, span.attributes)
    if span.code:
        message.status.code = _ERROR
        message.status.message = span.code


def _put(attributes: Any, values: Mapping[str, str]) -> None:
    for key, value in values.items():
        attributes.add(key=key).value.string_value = value


def _nanoseconds(wall: float) -> int:
    return max(0, round(wall * 1e6)) * 1000  # a double of today's seconds knows no more than a quarter of a microsecond


def _headers(text: str) -> Headers:
    """`key=value,key2=value2`, as the OpenTelemetry specification has it; what gRPC would not send is refused."""
    found = []
    for number, each in enumerate(filter(str.strip, text.split(",")), 1):
        key, _, value = (part.strip() for part in each.partition("="))
        key, value = key.lower(), unquote(value)
        if not _KEY.fullmatch(key) or key.endswith("-bin") or not (value.isascii() and value.isprintable()):
            raise refuse(
                Code.FIELD_INVALID, f"OTEL_EXPORTER_OTLP_HEADERS: number {number}", "KEY=VALUE of printable ASCII",
                "write it so, percent-encoded; it is not shown here, for it may be secret",
            )  # fmt: skip
        found.append((key, value))
    return tuple(found)


def _roots(environment: Mapping[str, str]) -> bytes | None:
    if not (path := environment.get("OTEL_EXPORTER_OTLP_CERTIFICATE")):
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise refuse(
            Code.FIELD_INVALID, f"OTEL_EXPORTER_OTLP_CERTIFICATE {path!r:.200}: {error.strerror}",
            "a file of CAs (PEM) that can be read", "correct its name, or leave it out for the system's",
        ) from error  # fmt: skip


_KEY: Final = re.compile("[0-9a-z_.-]+")
_KINDS: Final = {SpanKind.INTERNAL: 1, SpanKind.SERVER: 2, SpanKind.CLIENT: 3}
_ERROR: Final = 2
