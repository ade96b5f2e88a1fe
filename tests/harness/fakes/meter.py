"""ports.Meter that a test can read."""

from shoal.types.codes import Code
from shoal.types.metric import CounterMetric, LabelValues


class RecordedMeter:
    """Takes only what may be counted, as the real one."""

    def __init__(self) -> None:
        self.counts: dict[tuple[CounterMetric, LabelValues], float] = {}

    def count(self, metric: CounterMetric, **labels: str) -> None:
        self.add(metric, 1.0, **labels)

    def add(self, metric: CounterMetric, amount: float, **labels: str) -> None:
        key = metric, metric.series(**labels)
        self.counts[key] = self.counts.get(key, 0.0) + amount

    def with_code(self, metric: CounterMetric, code: Code) -> float:
        """Count of a metric whose only label is a code."""
        return self.counts.get((metric, (code,)), 0.0)
