"""Current cost of the region's workloads: its devices by the hour, and what other regions charge."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.types.assignment import Assignment
from shoal.types.units import UsdPerHour
from shoal.types.workload import WorkloadKey


def rates(
    desired: Mapping[str, Iterable[Assignment]],
    costs: Mapping[Slot, UsdPerHour],
    delegated: Mapping[WorkloadKey, DelegatedWorkload],
) -> Mapping[tuple[WorkloadKey, str], UsdPerHour]:
    """USD/h by workload and by the region that runs it; empty: this one. The replicas on a device share its price
    evenly; another region costs what it bid. Anything without a price is left out.

    desired: by node, all that it is to run.
    """
    on = [(Slot(node, each.device), each.workload) for node, assignments in desired.items() for each in assignments]
    sharing = Counter(slot for slot, _ in on)
    found = dict[tuple[WorkloadKey, str], float]()
    for slot, workload in on:
        if slot in costs:
            found[workload, ""] = found.get((workload, ""), 0.0) + costs[slot] / sharing[slot]
    for workload, each in delegated.items():
        if each.bid is not None and 0 <= each.bid.cost < math.inf:
            found[workload, each.region] = each.bid.cost
    return {key: UsdPerHour(rate) for key, rate in found.items()}
