"""Prometheus metrics of the coordinator, served with mTLS on a port of their own."""

import bisect
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest, make_wsgi_app

from shoal.coordinator.metrics import PROGRAM, STORE_SECONDS
from shoal.host import metrics_page
from shoal.host.metrics import page_of
from shoal.types.metric import CounterMetric, DeclaredMetric, Distribution, LabelValues, MetricReadings
from shoal.types.units import Seconds


class PrometheusMeter:
    """ports.Meter of the metrics that one process declares."""

    def __init__(self, declared: Sequence[DeclaredMetric]) -> None:
        self._counts = {
            metric: dict.fromkeys(metric.known_series, 0.0) for metric in declared if isinstance(metric, CounterMetric)
        }
        self._store_counts = {series: [0.0] * (len(STORE_SECONDS.buckets) + 1) for series in STORE_SECONDS.known_series}
        self._store_seconds = dict.fromkeys(STORE_SECONDS.known_series, 0.0)
        self._read: Callable[[], MetricReadings] = dict
        self._registry: CollectorRegistry = page_of(declared, self._readings)
        ProcessCollector(namespace=PROGRAM, registry=self._registry)

    def count(self, metric: CounterMetric, **labels: str) -> None:
        self.add(metric, 1.0, **labels)

    def add(self, metric: CounterMetric, amount: float, **labels: str) -> None:
        counts, series = self._counts[metric], metric.series(**labels)
        counts[series] = counts.get(series, 0.0) + amount

    def observe_store(self, operation: str, seconds: Seconds) -> None:
        series = STORE_SECONDS.series(operation=operation)
        self._store_counts[series][bisect.bisect_left(STORE_SECONDS.buckets, seconds)] += 1
        self._store_seconds[series] += seconds

    def read_at_scrape(self, read: Callable[[], MetricReadings]) -> None:
        """read: called at each scrape, for everything that is not counted here."""
        self._read = read

    def text(self) -> str:
        """The metrics page as a scrape would return it now."""
        return generate_latest(self._registry).decode()

    def serve(self, host: str, port: int, guard: metrics_page.MetricsAccess) -> int:
        """The bound port. Raises OSError."""
        return metrics_page.serve(make_wsgi_app(self._registry), host, port, guard)

    def _readings(self) -> MetricReadings:
        """Runs in the thread of the metrics page while the event loop counts on. A copy of a dict or a list is made in
        one step of the interpreter."""
        counts: dict[DeclaredMetric, Mapping[LabelValues, float]] = {
            metric: dict(counts) for metric, counts in self._counts.items()
        }
        store = {
            series: Distribution(tuple(counts), self._store_seconds[series])
            for series, counts in self._store_counts.items()
        }
        return {**counts, STORE_SECONDS: store, **self._read()}
