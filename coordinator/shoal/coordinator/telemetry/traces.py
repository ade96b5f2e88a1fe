"""Spans of migrations and negotiations that are over, to an OpenTelemetry collector (ports.Traces)."""

from collections.abc import Mapping, Sequence

import structlog

from shoal.types.trace import Span
from shoal.wire.otlp import Exporter

_log = structlog.get_logger("shoal.coordinator.traces")


class CollectorTraces:
    def __init__(self, endpoint: str) -> None:
        """endpoint: empty for none."""
        self._exporter = Exporter.to(endpoint)

    @property
    def wanted(self) -> bool:
        return self._exporter.wanted

    def told(self, spans: Sequence[Span]) -> None:
        if not (self.wanted and spans):
            return
        root = spans[0]
        _log.info(f"{root.name} ended", trace_id=root.trace, code=root.code or None, **root.attributes)
        self._exporter.offer(spans)

    async def run(self) -> None:
        """Until cancelled; returns at once where nobody collects."""
        await self._exporter.run()

    def counts(self) -> Mapping[tuple[tuple[str, str], ...], float]:
        """By what became of them; none where nobody collects."""
        if not self.wanted:
            return {}
        return {
            (("outcome", "exported"),): float(self._exporter.exported),
            (("outcome", "dropped"),): float(self._exporter.dropped),
        }
