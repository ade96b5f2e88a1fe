"""What an agreement brought so far, from what this region's gateways and devices counted."""

from collections.abc import Collection, Iterable

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.fleet.updates import united
from shoal.types.agreement import GUESTS, ServiceReport
from shoal.types.assignment import Crossing, Served
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds
from shoal.types.workload import WorkloadKey


def delivered(fleet: Fleet, agreement: str, nodes: Collection[str] = ()) -> ServiceReport:
    """Of either side: requests as its gateways counted them since this coordinator began to hear them, and the energy
    that so many cost on those `nodes` that have its replicas here (tenant `guests`). cost_usd 0: what a price makes of
    it is the caller's business. latency_p95_s: of the gateway that saw the longest, as it is now.
    """
    counted = tuple(crossed(fleet, agreement))
    requests, errors = sum(each.requests for each in counted), sum(each.errors for each in counted)
    served = tuple(_served(fleet, nodes, WorkloadKey(GUESTS, agreement)))
    metered = sum(each.requests for each in served)
    sources = {each.energy_source for each in served}
    each_j = sum(each.joules for each in served) / metered if metered else 0.0
    return ServiceReport(
        requests=requests,
        errors=errors,
        latency_p95_s=Seconds(max((each.latency_p95_s for each in counted), default=0.0)),
        joules=Joules(each_j * (requests - errors)),
        energy_source=sources.pop() if len(sources) == 1 else EnergySource.ESTIMATED,
        cost_usd=0.0,
    )


def crossed(fleet: Fleet, agreement: str) -> Iterable[Crossing]:
    """As each gateway counted since this coordinator began to hear it, whichever of its fronts."""
    for state in fleet.nodes.values():
        if (latest := state.crossings.get(agreement)) is not None:
            before = state.crossed.get(agreement)
            yield united(before, latest) if before is not None else latest


def _served(fleet: Fleet, nodes: Collection[str], key: WorkloadKey) -> Iterable[Served]:
    for state in (fleet.nodes[name] for name in sorted(nodes) if name in fleet.nodes):
        for observed in state.observed.values():
            if observed.workload == key:
                yield from (each for each in observed.served if each.joules >= 0)
