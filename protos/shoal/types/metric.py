"""Declarations of metrics. A program declares each metric once; `shoal.host.metrics` exports what is declared."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.types.codes import Code

LabelValues = tuple[str, ...]
"""One value for each label of a metric, in the order of its declaration."""


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """One label of a metric, and the values that it may have."""

    name: str
    # Values that are known in advance.
    values: tuple[str, ...] = ()
    # What bounds the values beyond `values`, and when they appear. Empty: there are no others.
    others: str = ""

    def allows(self, value: str) -> bool:
        return bool(self.others) or value in self.values


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredMetric:
    """A declaration is its own identity: a copy of it is another metric."""

    # Full name, as it is exported.
    name: str
    # One line: what is measured.
    help: str
    # Labels of every series.
    labels: tuple[MetricLabel, ...] = ()
    # Base unit of the value, as the name ends with it. Empty: a plain number.
    unit: str = ""
    # The series that exist from the start. None: all combinations of the labels' known values.
    known: tuple[LabelValues, ...] | None = field(default=None, kw_only=True)

    @property
    def known_series(self) -> tuple[LabelValues, ...]:
        """Labels of the series that exist from the start. Empty where a label has no value that is known in advance."""
        return (
            self.known if self.known is not None else tuple(itertools.product(*(each.values for each in self.labels)))
        )

    def series(self, **labels: str) -> LabelValues:
        """The labels of one series. Raises ValueError if the declaration does not allow them."""
        if labels.keys() != {label.name for label in self.labels}:
            raise ValueError(f"{self.name} has not the labels {sorted(labels)}")
        values = tuple(labels[label.name] for label in self.labels)
        self.check(values)
        return values

    def check(self, values: LabelValues) -> None:
        """Raises ValueError if the declaration does not allow a series with these labels."""
        for label, value in zip(self.labels, values, strict=True):
            if not label.allows(value):
                raise ValueError(f"{self.name}: {label.name} is none of {', '.join(label.values)}: {value:.80}")


@dataclass(frozen=True, slots=True, eq=False)
class CounterMetric(DeclaredMetric):
    """Only grows; starts at 0."""


@dataclass(frozen=True, slots=True, eq=False)
class GaugeMetric(DeclaredMetric):
    """Goes up and down."""

    # Value of a known series that was not measured. NaN where 0 would be a statement.
    initial: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class HistogramMetric(DeclaredMetric):
    """Counts observations by size."""

    # Upper bounds of the buckets, without the last one, which is open.
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of one series of a histogram."""

    # Observations by bucket of the declaration, not cumulative; the last entry counts those beyond all bounds.
    counts: Sequence[float]
    # Sum of all observations.
    total: float


MetricReadings = Mapping[DeclaredMetric, Mapping[LabelValues, float | Distribution]]
"""Values by metric and series. A known series without a value is exported as not measured yet."""

TRUE_OR_FALSE: Final = ("true", "false")


def code_label(*known: Code) -> MetricLabel:
    """Label `code` of a metric that counts whatever code comes up."""
    return MetricLabel("code", known, "another code, with its first count" if known else "a code, with its first count")


def process_metrics(program: str) -> tuple[DeclaredMetric, ...]:
    """Of the process itself, as prometheus_client exports them with the namespace `program`."""
    return (
        CounterMetric(f"{program}_process_cpu_seconds_total", "Processor time of the process.", unit="seconds"),
        GaugeMetric(f"{program}_process_resident_memory_bytes", "Resident memory of the process.", unit="bytes"),
        GaugeMetric(f"{program}_process_virtual_memory_bytes", "Virtual memory of the process.", unit="bytes"),
        GaugeMetric(
            f"{program}_process_start_time_seconds", "Start of the process, in seconds of Unix time.", unit="seconds"
        ),
        GaugeMetric(f"{program}_process_open_fds", "Open file descriptors."),
        GaugeMetric(f"{program}_process_max_fds", "Limit of open file descriptors."),
    )


UNKNOWN: Final = math.nan
"""Initial value of a gauge that says nothing before it is measured."""
