"""Exports spans of finished migrations and negotiations to an OpenTelemetry collector (ports.Traces)."""

from collections.abc import Mapping, Sequence

import structlog

from shoal.coordinator import metrics
from shoal.host.otlp import Exporter
from shoal.types.metric import LabelValues
from shoal.types.trace import Span

_log = structlog.get_logger("shoal.coordinator.traces")


class CollectorSpanExporter:
    """ports.Traces: hands spans to the OTLP exporter, and logs the root of each trace."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: empty: no collector."""
        self._exporter = Exporter.from_endpoint(endpoint)

    @property
    def is_enabled(self) -> bool:
        return self._exporter.is_enabled

    def export(self, spans: Sequence[Span]) -> None:
        if not (self.is_enabled and spans):
            return
        root = spans[0]
        _log.info("trace_ended", name=root.name, trace_id=root.trace, code=root.code or None, **root.attributes)
        self._exporter.offer(spans)

    async def run(self) -> None:
        """Exports until cancelled; returns at once without a collector."""
        await self._exporter.run()

    def counts(self) -> Mapping[LabelValues, float]:
        """Spans by outcome."""
        return {
            metrics.SPANS.series(outcome="exported"): float(self._exporter.exported),
            metrics.SPANS.series(outcome="dropped"): float(self._exporter.dropped),
        }
