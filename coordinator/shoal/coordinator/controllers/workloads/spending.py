"""What workloads cost, as a counter."""

from collections.abc import Mapping
from typing import Final

from shoal.coordinator import metrics
from shoal.coordinator.ports import Meter
from shoal.types.units import Elapsed, Seconds, UsdPerHour
from shoal.types.workload import WorkloadKey

COUNT_S: Final = Seconds(15.0)
"""In a region at rest costs are counted this often: as often as Prometheus reads them by default."""


class SpendingMeter:
    """Adds the cost of the time between two steps, at the rates of the earlier one."""

    def __init__(self, meter: Meter) -> None:
        self.rates: Mapping[tuple[WorkloadKey, str], UsdPerHour] = {}
        """By workload and by the region that runs it; empty: this one."""
        self._meter = meter
        self._counted_at = Elapsed(0.0)

    def count_now_and_then(self, now: Elapsed) -> None:
        """Counts where nothing was counted for a while, and the rates are still what they were."""
        if now - self._counted_at >= COUNT_S:
            self.count(now)

    def count(self, now: Elapsed) -> None:
        hours = (now - self._counted_at) / 3600
        self._counted_at = now
        for (workload, region), rate in self.rates.items():
            named = {"tenant": workload.tenant, "workload": workload.name, "counterpart": region}
            self._meter.add(metrics.COST, rate * hours, **named)
