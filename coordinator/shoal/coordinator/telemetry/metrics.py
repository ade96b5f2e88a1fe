"""Prometheus metrics of the coordinator, served with mTLS on a port of their own."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
    make_wsgi_app,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shoal.host import metrics_page
from shoal.types.units import Seconds

PREFIX = "shoal_coordinator"
STORE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bucket bounds of the store's histogram, in seconds."""
MAX_READS: Final = 5
Gauges = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]
"""name -> labels -> value"""


class PrometheusMeter:
    """ports.Meter. A counter is created at its first count, with that count's label names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace=PREFIX, registry=self.registry)
        self._counters: dict[str, Counter] = {}
        self._store = Histogram(
            "shoal_coordinator_store_seconds",
            "of operations of the store",
            ["operation"],
            registry=self.registry,
            buckets=STORE_S,
        )

    def count(self, name: str, **labels: str) -> None:
        self.add(name, 1.0, **labels)

    def add(self, name: str, amount: float, **labels: str) -> None:
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = Counter(
                f"{PREFIX}_{name}", name.replace("_", " "), sorted(labels), registry=self.registry
            )
        (counter.labels(**labels) if labels else counter).inc(amount)

    def observe_store(self, operation: str, seconds: Seconds) -> None:
        self._store.labels(operation=operation).observe(seconds)

    def register_gauges(self, gauges: Callable[[], Gauges]) -> None:
        """gauges: called at each scrape."""
        self.registry.register(_Reader(gauges))

    def text(self) -> str:
        """The metrics page as a scrape would return it now."""
        return generate_latest(self.registry).decode()

    def serve(self, host: str, port: int, guard: metrics_page.MetricsAccess) -> int:
        """The bound port. Raises OSError."""
        return metrics_page.serve(make_wsgi_app(self.registry), host, port, guard)


class _Reader(Collector):
    """Collects the gauges at each scrape."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, values in self._read().items():
            labels = sorted({label for each in values for label, _ in each})
            family = GaugeMetricFamily(f"{PREFIX}_{name}", name.replace("_", " "), labels=labels)
            for each, value in values.items():
                family.add_metric([dict(each)[label] for label in labels], value)
            yield family

    def _read(self) -> Gauges:
        """Runs in the metrics server's thread while the event loop goes on; reads again if a collection changes during
        the iteration."""
        for _ in range(MAX_READS):
            with suppress(RuntimeError):
                return self._gauges()
        return self._gauges()
