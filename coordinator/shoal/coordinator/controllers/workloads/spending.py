"""What workloads cost, as a counter."""

from collections.abc import Mapping
from typing import Final

from shoal.coordinator import metrics
from shoal.coordinator.core.placement.costs import DeviceCosts
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.workloads.model import DelegatedWorkload, DesiredContent
from shoal.coordinator.core.workloads.spending import rates
from shoal.coordinator.ports import Meter
from shoal.types.units import Elapsed, Seconds, UsdPerHour
from shoal.types.workload import WorkloadKey

COUNT_S: Final = Seconds(15.0)
"""While no rate changes, costs are counted this often: as often as Prometheus reads them by default."""
ELSEWHERE: Final = ""

Rates = Mapping[tuple[WorkloadKey, str], UsdPerHour]
"""By workload and by the region that runs it; empty: this one."""


class SpendingMeter:
    """Adds the cost of the time between two counts, at the rates of that time."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._counted_at = Elapsed(0.0)
        self._rates: dict[str, Rates] = {}
        """By node; under ELSEWHERE, what other regions charge."""
        self._contents: dict[str, DesiredContent] = {}
        self._costs: Mapping[Slot, UsdPerHour] = {}

    @property
    def rates(self) -> Rates:
        """Of the whole region, as of the last step."""
        found = dict[tuple[WorkloadKey, str], UsdPerHour]()
        for of_node in self._rates.values():
            for key, rate in of_node.items():
                found[key] = UsdPerHour(found.get(key, 0.0) + rate)
        return found

    def adopt(
        self,
        changed: Mapping[str, DesiredContent | None],
        costs: Mapping[Slot, UsdPerHour],
        delegated: Mapping[WorkloadKey, DelegatedWorkload],
        now: Elapsed,
    ) -> None:
        """From now on: other desired sets of these nodes (None: gone), or other prices of them."""
        self._contents.update({node: content for node, content in changed.items() if content is not None})
        gone = [node for node, content in changed.items() if content is None]
        is_repriced = not (isinstance(costs, DeviceCosts) and costs == self._costs)
        self._costs = costs
        found = {
            node: rates({node: self._contents[node].assignments}, costs, {})
            for node in (self._contents if is_repriced else changed.keys() - set(gone))
        }
        found[ELSEWHERE] = rates({}, costs, delegated)
        before = {node: self._rates.get(node, {}) for node in (*found, *gone)}
        if before == {**found, **{node: {} for node in gone}}:
            return
        self.count(now)
        self._rates.update({node: each for node, each in found.items() if each})
        for node in (*gone, *(node for node, each in found.items() if not each)):
            self._rates.pop(node, None)
        for node in gone:
            self._contents.pop(node, None)

    def count_now_and_then(self, now: Elapsed) -> None:
        """Counts where nothing was counted for a while."""
        if now - self._counted_at >= COUNT_S:
            self.count(now)

    def count(self, now: Elapsed) -> None:
        hours = (now - self._counted_at) / 3600
        self._counted_at = now
        for of_node in self._rates.values():
            for (workload, region), rate in of_node.items():
                named = {"tenant": workload.tenant, "workload": workload.name, "counterpart": region}
                self._meter.add(metrics.COST, rate * hours, **named)
