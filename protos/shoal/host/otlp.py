"""Exports spans to an OpenTelemetry collector: OTLP over gRPC, in batches, in the background.

Nothing waits for the export. Spans that a collector does not accept in time are dropped and counted. The protocol's
messages are imported only when an endpoint is set: https://opentelemetry.io/docs/specs/otlp/
"""

import asyncio
import os
import re
import ssl
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import unquote, urlsplit

import structlog

from shoal.host.grpc_client import CallError, GrpcChannel
from shoal.http2.grpc_messages import GrpcStatus
from shoal.http2.keepalive import Keepalive
from shoal.types.address import HostPort
from shoal.types.backoff import delay
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.trace import Span, SpanKind

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
DEFAULT_RATIO: Final = 0.01
"""Share of requests that are traced where a collector is set and no ratio is given."""
PORT: Final = 4317
QUEUE_LIMIT: Final = 4096
"""Spans that wait for a collector; beyond it the oldest are dropped."""
BATCH: Final = 512
GATHER_S: Final = 1.0
EXPORT_S: Final = 10.0
LAST_S: Final = 2.0
"""Limit for the last export when the process ends."""
PAUSE_S: Final = 1.0
"""Pause before a batch that the collector did not accept is sent again; it doubles each time."""
_PAUSE_MOST_S: Final = 30.0
ANSWER_BYTES: Final = 2**20
"""Largest answer of a collector, which says in a few bytes what it did not take."""
_KEEPALIVE: Final = Keepalive(
    connect_timeout_s=EXPORT_S, ping_interval_s=EXPORT_S, user_timeout_s=2 * EXPORT_S, ping_timeout_s=EXPORT_S,
    without_calls=False,
)  # fmt: skip
_RETRYABLE: Final = frozenset(
    {
        GrpcStatus.UNAVAILABLE,
        GrpcStatus.DEADLINE_EXCEEDED,
        GrpcStatus.CANCELLED,
        GrpcStatus.ABORTED,
        GrpcStatus.OUT_OF_RANGE,
        GrpcStatus.DATA_LOSS,
        GrpcStatus.RESOURCE_EXHAUSTED,
    }
)

_log = structlog.get_logger(__name__)

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class OtlpCollector:
    """Where spans are sent."""

    # host:port.
    target: str
    # False: plain HTTP/2.
    tls: bool
    # CAs (PEM) that its certificate may be from; None: the system's.
    roots: bytes | None = None
    # Sent with every call; secret.
    headers: Headers = field(default=(), repr=False)


def endpoint_of(environment: Mapping[str, str] = os.environ) -> str:
    """The endpoint in the standard environment variables; empty where there is none."""
    return environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""


def ratio_of(asked: float | None, endpoint: str) -> float:
    """Share of requests to trace. asked: the configured one; None where there is none."""
    if asked is not None:
        return asked
    return DEFAULT_RATIO if endpoint else 0.0


def collector_of(endpoint: str, environment: Mapping[str, str] = os.environ) -> OtlpCollector:
    """endpoint: http://HOST[:PORT] or https://HOST[:PORT]. Headers and CAs come from the standard variables
    OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE. Raises ShoalError(FIELD_INVALID)."""
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
    headers = _headers(environment.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    return OtlpCollector(str(HostPort(found.hostname, port)), found.scheme == "https", _roots(environment), headers)


class Exporter:
    """Queues and exports spans. Call `offer` from the event loop that runs `run`. collector: None: spans are discarded
    and not counted."""

    def __init__(self, collector: OtlpCollector | None) -> None:
        self._collector = collector
        self._waiting: deque[Span] = deque()
        self._offered = asyncio.Event()
        self.exported = 0
        self.dropped = 0

    @classmethod
    def from_endpoint(cls, endpoint: str) -> Self:
        """endpoint: one that `collector_of` accepted when the process was started; empty for none. An error that
        appeared since (such as a missing CA file) is logged and disables the export, so that the process keeps
        serving."""
        try:
            return cls(collector_of(endpoint) if endpoint else None)
        except ShoalError as error:
            _log.error("spans_export_failed", code=error.code, error=str(error))
            return cls(None)

    @property
    def is_enabled(self) -> bool:
        """Whether a collector is set."""
        return self._collector is not None

    def offer(self, spans: Sequence[Span]) -> None:
        if not self.is_enabled:
            return
        self._waiting.extend(spans)
        while len(self._waiting) > QUEUE_LIMIT:
            self._waiting.popleft()
            self.dropped += 1
        self._offered.set()

    async def run(self) -> None:
        """Exports until cancelled, then sends what is left within LAST_S. Returns at once without a collector."""
        if self._collector is None:
            return
        headers = self._collector.headers
        async with _channel(self._collector) as channel:
            try:
                while True:
                    await self._offered.wait()
                    await asyncio.sleep(GATHER_S)
                    await self._drain(channel, headers)
            finally:
                if self._waiting:
                    await self._flush(channel, headers)

    async def _drain(self, channel: GrpcChannel, headers: Headers) -> None:
        failures = 0
        while self._waiting:
            if await self._send(channel, headers, EXPORT_S):
                failures = 0
                continue
            await asyncio.sleep(delay("collector", failures, base_s=PAUSE_S, cap_s=_PAUSE_MOST_S, jitter=0.0))
            failures += 1
        self._offered.clear()

    async def _flush(self, channel: GrpcChannel, headers: Headers) -> None:
        try:
            async with asyncio.timeout(LAST_S):
                while self._waiting and await self._send(channel, headers, LAST_S):
                    pass
        except TimeoutError:
            pass
        self.dropped += len(self._waiting)

    async def _send(self, channel: GrpcChannel, headers: Headers, within_s: float) -> bool:
        """Sends one batch. False where the collector may accept it later."""
        batch = list(islice(self._waiting, BATCH))
        try:
            await channel.unary(EXPORT, request_of(batch).SerializeToString(), within_s, headers)
        except CallError as error:
            _log.warning("spans_export_failed", code=error.status.name, error=error.details[:200])
            if error.status in _RETRYABLE:
                return False
            self.dropped += self._remove(batch)
        except Exception:  # an unforeseen error must not end the export of all later spans
            _log.exception("spans_export_failed")
            self.dropped += self._remove(batch)
        else:
            self.exported += self._remove(batch)
        return True

    def _remove(self, batch: Sequence[Span]) -> int:
        """Removes the batch's spans from the queue and returns their number. Some may have been dropped meanwhile as
        the oldest."""
        told, taken = set(map(id, batch)), 0
        while self._waiting and id(self._waiting[0]) in told:
            self._waiting.popleft()
            taken += 1
        return taken


def _channel(collector: OtlpCollector) -> GrpcChannel:
    host = HostPort.parse(collector.target).host
    context = partial(_context, collector) if collector.tls else None
    return GrpcChannel(collector.target, host, context, _KEEPALIVE, ANSWER_BYTES)


def _context(collector: OtlpCollector) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=collector.roots.decode() if collector.roots else None)
    context.set_alpn_protocols(["h2"])
    return context


def request_of(spans: Iterable[Span]) -> "ExportTraceServiceRequest":
    """Spans as an OTLP request, grouped by process."""
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
    message.end_time_unix_nano = _nanoseconds(span.end_time)
    _put(message.attributes, span.attributes)
    if span.code:
        message.status.code = _ERROR
        message.status.message = span.code


def _put(attributes: Any, values: Mapping[str, str]) -> None:
    for key, value in values.items():
        attributes.add(key=key).value.string_value = value


def _nanoseconds(wall: float) -> int:
    return max(0, round(wall * 1e6)) * 1000  # a double of today's seconds resolves a quarter of a microsecond


def _headers(text: str) -> Headers:
    """Parses `key=value,key2=value2`, as in the OpenTelemetry specification. Refuses what gRPC would not send. Raises
    ShoalError(FIELD_INVALID)."""
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
