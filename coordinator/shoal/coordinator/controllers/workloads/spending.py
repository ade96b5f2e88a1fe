"""What workloads cost, as a counter."""

from collections.abc import Mapping

from shoal.coordinator import metrics
from shoal.coordinator.ports import Meter
from shoal.types.units import Elapsed, UsdPerHour
from shoal.types.workload import WorkloadKey


class SpendingMeter:
    """Adds the cost of the time between two steps, at the rates of the earlier one."""

    def __init__(self, meter: Meter) -> None:
        self.rates: Mapping[tuple[WorkloadKey, str], UsdPerHour] = {}
        """By workload and by the region that runs it; empty: this one."""
        self._meter = meter
        self._counted_at = Elapsed(0.0)

    def count(self, now: Elapsed) -> None:
        hours = (now - self._counted_at) / 3600
        self._counted_at = now
        for (workload, region), rate in self.rates.items():
            named = {"tenant": workload.tenant, "workload": workload.name, "counterpart": region}
            self._meter.add(metrics.COST, rate * hours, **named)
