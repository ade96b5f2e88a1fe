"""Exports declared metrics through prometheus_client: each from the first scrape on, and nothing else."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from shoal.types.metric import (
    CounterMetric,
    DeclaredMetric,
    Distribution,
    GaugeMetric,
    HistogramMetric,
    LabelValues,
    MetricReadings,
)


class MetricsCollector(Collector):
    """All metrics of one page. `read` is called at each scrape, in the thread of the page's server."""

    MAX_READS: Final = 5

    def __init__(self, declared: Sequence[DeclaredMetric], read: Callable[[], MetricReadings]) -> None:
        self._declared = tuple(declared)
        self._read = read

    def collect(self) -> Iterator[MetricFamily]:
        readings = self._read_whole()
        if undeclared := readings.keys() - set(self._declared):
            raise ValueError(f"not declared: {', '.join(sorted(metric.name for metric in undeclared))}")
        for metric in self._declared:
            yield _family(metric, readings.get(metric, {}))

    def _read_whole(self) -> MetricReadings:
        """Reads again if a collection changes during the iteration, because the program goes on meanwhile."""
        for _ in range(self.MAX_READS):
            with suppress(RuntimeError):
                return self._read()
        return self._read()


def page_of(declared: Sequence[DeclaredMetric], read: Callable[[], MetricReadings]) -> CollectorRegistry:
    """The registry of a page that exports these metrics."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(declared, read))
    return registry


def _family(metric: DeclaredMetric, readings: Mapping[LabelValues, float | Distribution]) -> MetricFamily:
    labels = [label.name for label in metric.labels]
    for series in readings:
        metric.check(series)
    match metric:
        case CounterMetric(name=name, help=text):
            family: MetricFamily = CounterMetricFamily(name, text, labels=labels)
            initial: float | Distribution = 0.0
        case GaugeMetric(name=name, help=text):
            family, initial = GaugeMetricFamily(name, text, labels=labels), metric.initial
        case HistogramMetric(name=name, help=text, buckets=bounds):
            family = HistogramMetricFamily(name, text, labels=labels)
            initial = Distribution((0.0,) * (len(bounds) + 1), 0.0)
        case _:
            raise TypeError(f"{metric.name} is of no kind")
    for series, value in {**dict.fromkeys(metric.known_series, initial), **readings}.items():
        _add(family, metric, series, value)
    return family


def _add(family: MetricFamily, metric: DeclaredMetric, series: LabelValues, value: float | Distribution) -> None:
    match family, metric, value:
        case HistogramMetricFamily(), HistogramMetric(buckets=bounds), Distribution(counts, total):
            cumulative = map(float, itertools.accumulate(counts))
            buckets = list(zip((*map(str, bounds), "+Inf"), cumulative, strict=True))
            family.add_metric(list(series), buckets, total)
        case CounterMetricFamily() | GaugeMetricFamily(), _, float() | int():
            family.add_metric(list(series), value)
        case _:
            raise TypeError(f"{metric.name} is no {type(value).__name__}")
