"""What the programs declare as metrics, and what a page that was scraped says."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from shoal.agent import metrics as agent
from shoal.coordinator import metrics as coordinator
from shoal.types.metric import CounterMetric, DeclaredMetric, GaugeMetric, HistogramMetric

REGION: Final = (*coordinator.REGION, *coordinator.PROCESS)
FEDERATION: Final = (*coordinator.FEDERATION, *coordinator.PROCESS)
SUPERVISOR: Final = (*agent.SUPERVISOR, *agent.PROCESS)
FRONT: Final = agent.FRONT
PAGES: Final[Mapping[str, Sequence[DeclaredMetric]]] = {
    "region": REGION,
    "federation": FEDERATION,
    "supervisor": SUPERVISOR,
    "front": FRONT,
}
DECLARED: Final = tuple(dict.fromkeys(metric for page in PAGES.values() for metric in page))
MENTIONED: Final = re.compile(r"\bshoal_(?:coordinator|agent|front|federation)_[a-z0-9_]+")
_OWN_OF_HISTOGRAMS: Final = ("_bucket", "_sum", "_count")


def series_names(metric: DeclaredMetric) -> Iterator[str]:
    """Names that a query may ask for."""
    match metric:
        case HistogramMetric(name=name):
            yield from (f"{name}{end}" for end in _OWN_OF_HISTOGRAMS)
        case _:
            yield metric.name


def undeclared_series(names: Iterable[str]) -> list[str]:
    """Those of the names in queries that no series has."""
    return sorted({*names} - {name for metric in DECLARED for name in series_names(metric)})


def undeclared_names(names: Iterable[str]) -> list[str]:
    """Those of the names in prose that no metric has. Prose may name a histogram as a whole, or several metrics by a
    prefix that ends with `_`."""
    declared = {metric.name for metric in DECLARED}
    left = [name for name in undeclared_series(names) if name not in declared]
    return [name for name in left if not (name.endswith("_") and any(each.startswith(name) for each in declared))]


def check_page(text: str, declared: Sequence[DeclaredMetric]) -> None:
    """A scraped page exports what is declared and nothing else, with these types and help texts, and every series that
    is known in advance."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    names = {metric: metric.name.removesuffix("_total") for metric in declared}
    assert families.keys() == set(names.values())
    for metric, name in names.items():
        family = families[name]
        assert family.type == _type(metric), name
        if "_process_" not in name:
            assert family.documentation == metric.help
        shown = {
            tuple(sample.labels[label.name] for label in metric.labels)
            for sample in family.samples
            if sample.name in series_names(metric)
        }
        assert {tuple(map(str, series)) for series in metric.known_series} <= shown, name
        for series in shown:
            metric.check(series)


def values(text: str, name: str) -> list[float]:
    """Of all series with this name on a scraped page."""
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]


def _type(metric: DeclaredMetric) -> str:
    match metric:
        case CounterMetric():
            return "counter"
        case HistogramMetric():
            return "histogram"
        case GaugeMetric():
            return "gauge"
    raise TypeError(metric.name)
