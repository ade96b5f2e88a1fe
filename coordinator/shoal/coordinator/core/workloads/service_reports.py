"""What an agreement delivered so far, by the counters of this region's gateways and devices."""

from collections.abc import Collection, Iterable

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.fleet.updates import sum_agreement_counts
from shoal.types.agreement import GUEST_TENANT, ServiceReport
from shoal.types.assignment import AgreementCounts, Served
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds
from shoal.types.workload import WorkloadKey


def service_report(fleet: Fleet, agreement: str, nodes: Collection[str] = ()) -> ServiceReport:
    """Report for either side of an agreement.

    Requests: as this region's gateways counted them since this coordinator started to receive their counters,
    without those refused because of the client's own mistake. Energy: of as many answered requests on those `nodes`
    that have the replicas here (tenant `guests`). latency_p95_s: the longest of any gateway now. cost_usd: 0; the
    caller sets the price.
    """
    counted = tuple(agreement_counts(fleet, agreement))
    requests = sum(each.attributable_requests for each in counted)
    # Late ones count too, because a region that hangs returns no error.
    errors = sum(each.errors + each.late for each in counted)
    served = tuple(_served_counts(fleet, nodes, WorkloadKey(GUEST_TENANT, agreement)))
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


def agreement_counts(fleet: Fleet, agreement: str) -> Iterable[AgreementCounts]:
    """Counters of each gateway since this coordinator started to receive them, across restarts of its front."""
    for state in fleet.nodes.values():
        if (latest := state.agreement_counts.get(agreement)) is not None:
            before = state.earlier_agreement_counts.get(agreement)
            yield sum_agreement_counts(before, latest) if before is not None else latest


def _served_counts(fleet: Fleet, nodes: Collection[str], key: WorkloadKey) -> Iterable[Served]:
    for state in (fleet.nodes[name] for name in sorted(nodes) if name in fleet.nodes):
        for observed in state.observed.values():
            if observed.workload == key:
                yield from (each for each in observed.served if each.joules >= 0)
