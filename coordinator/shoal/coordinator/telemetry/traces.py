"""Spans of migrations and negotiations that are over, to an OpenTelemetry collector (ports.Traces)."""

from collections.abc import Mapping, Sequence

import structlog

from shoal.types.trace import Span
from shoal.wire.otlp import Exporter, collector_of

_log = structlog.get_logger("shoal.coordinator.traces")


class CollectorTraces:
    def __init__(self, endpoint: str) -> None:
        """endpoint: empty for none. Raises ShoalError(FIELD_INVALID)."""
        self._exporter = Exporter(collector_of(endpoint)) if endpoint else None

    @property
    def wanted(self) -> bool:
        return self._exporter is not None

    def told(self, spans: Sequence[Span]) -> None:
        if self._exporter is None or not spans:
            return
        root = spans[0]
        _log.info(f"{root.name} ended", trace_id=root.trace, code=root.code or None, **root.attributes)
        self._exporter.offer(spans)

    async def run(self) -> None:
        """Until cancelled."""
        if self._exporter is not None:
            await self._exporter.run()

    def counts(self) -> Mapping[tuple[tuple[str, str], ...], float]:
        """By what became of them."""
        if self._exporter is None:
            return {}
        return {
            (("outcome", "exported"),): float(self._exporter.exported),
            (("outcome", "dropped"),): float(self._exporter.dropped),
        }
