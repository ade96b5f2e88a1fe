"""Whether a place still has room beside what else is placed: capacity of the device, quota of the tenant, spread."""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from shoal.coordinator.core.fleet.commitments import admissible_bytes
from shoal.coordinator.core.placement.allocations import (
    Allocations,
    QuotaUsage,
    awarded_cost,
    busy_share,
    memory_requirement,
)
from shoal.coordinator.core.placement.domains import Domain, is_label, show_spread, weaker
from shoal.coordinator.core.placement.feasible import (
    Constraint,
    Option,
    PlacementFault,
    Scope,
    memory_fault,
    utilisation_fault,
)
from shoal.coordinator.core.placement.model import Move
from shoal.coordinator.core.placement.relax import CATEGORY_SIZE, RequiredRelaxation, manual_remedy, round_up
from shoal.coordinator.core.placement.replicas import CurrentReplica
from shoal.coordinator.core.placement.tenant_cost import TenantCost
from shoal.types.codes import Code, Refusal
from shoal.types.units import COST, UsdPerHour, show_bytes, show_quantity, show_usd_per_hour
from shoal.types.workload import Intent, Requirements

UTILISATION_MOST = 0.7
"""Declared traffic may use this share of a device: at 0.7 an M/D/1 queue adds about one service time."""


@dataclass(frozen=True, slots=True)
class Pick:
    """A chosen replica."""

    # Where it runs.
    option: Option
    # The current replica that it is; None: a new one.
    existing: CurrentReplica | None
    # The move that waited for this place; None: none did.
    move: Move | None = None

    def domain(self, spread: str) -> Domain:
        return self.option.domain(spread)


class ContentionCheck:
    """For one workload: what excludes an option that is feasible by itself."""

    def __init__(
        self, scope: Scope, intent: Intent, allocations: Allocations, baseline: Callable[[], Allocations]
    ) -> None:
        """allocations: with everything that was decided before this workload. baseline: without those decisions, and as
        if their workloads had no replicas."""
        self._scope = scope
        self._intent = intent
        self._allocations = allocations
        self._baseline = baseline

    def faults(
        self, option: Option, taken: Set[Domain], require: Requirements, allocations: Allocations
    ) -> tuple[PlacementFault, ...]:
        """Violations of constraints that depend on what else is placed. taken: domains of other replicas."""
        found = self.capacity_faults(option, require, allocations)
        return found if option.domain(require.spread) not in taken else (*found, _spread_fault(option, require))

    def capacity_faults(
        self, option: Option, require: Requirements, allocations: Allocations
    ) -> tuple[PlacementFault, ...]:
        """Violations of device capacity and quota."""
        usage = allocations.usage(self._intent.key.tenant)
        quota = self._quota_fault(option, usage.with_replica(memory_requirement(option), TenantCost.of(option.cost)))
        return (*self._device_faults(option, require, allocations), *((quota,) if quota is not None else ()))

    def _device_faults(
        self, option: Option, require: Requirements, allocations: Allocations
    ) -> tuple[PlacementFault, ...]:
        """Shortages of the device's memory and time. OUTRANKED where workloads that were decided before this one took
        them."""
        found = self._shortages(option, require, allocations)
        if (
            found
            and self._shortages(option, require, self._allocations)
            and not self._shortages(option, require, self._baseline())
        ):
            slot = f"{option.slot.node}/{option.slot.device}"
            lacking = " and ".join(fault.refusal.code for fault in found)
            refusal = Refusal(
                Code.OUTRANKED, f"{lacking} on {slot} after workloads of higher rank", "room for this one"
            )
            return (
                PlacementFault(
                    Constraint.MEMORY, refusal, manual_remedy(f"raise its priority above {self._intent.priority}")
                ),
            )
        return found

    def _shortages(self, option: Option, require: Requirements, allocations: Allocations) -> tuple[PlacementFault, ...]:
        """Faults of memory and utilisation on the option's device under these allocations."""
        memory, booked = allocations.of_hardware(option)
        admissible = admissible_bytes(option.device, option.state, memory)
        busy = busy_share(self._scope, self._intent, option, require.replicas)
        found = (
            memory_fault(option, memory_requirement(option), admissible),
            utilisation_fault(option, busy, booked, UTILISATION_MOST, require.replicas),
        )
        return tuple(fault for fault in found if fault is not None)

    def _quota_fault(self, option: Option, would_hold: QuotaUsage) -> PlacementFault | None:
        """The limit of the tenant's quota that would be exceeded; None where none would be. would_hold: with a new
        replica there."""
        tenant = self._intent.key.tenant
        quota = self._scope.inputs.quotas.get(tenant)
        if quota is None:
            return None
        if quota.replicas is not None and would_hold.replicas > quota.replicas:
            found = f"{tenant} would have {would_hold.replicas} replicas"
            remedy = f"quota: {{replicas: {would_hold.replicas}}} of tenant {tenant}"
            return PlacementFault(
                Constraint.QUOTA, Refusal(Code.QUOTA, found, f"at most {quota.replicas}"), manual_remedy(remedy)
            )
        if quota.memory is not None and would_hold.memory > quota.memory:
            found = f"{tenant} would have {show_bytes(would_hold.memory)}"
            remedy = f"quota: {{memory: {show_bytes(would_hold.memory)}}} of tenant {tenant}"
            refusal = Refusal(Code.QUOTA, found, f"at most {show_bytes(quota.memory)}")
            return PlacementFault(Constraint.QUOTA, refusal, manual_remedy(remedy))
        if quota.cost is not None:
            here = would_hold.cost.plus(self._allocations.usage(tenant).cost, -1)
            elsewhere = awarded_cost(self._scope.inputs, self._intent.key).beyond(here)
            if (cost := would_hold.cost.plus(elsewhere)).exceeds(quota.cost):
                return _cost_fault(tenant, quota.cost, option, cost)
        return None


def _cost_fault(tenant: str, budget: UsdPerHour, option: Option, would_cost: TenantCost) -> PlacementFault:
    """The fault of a replica that the tenant's budget does not cover."""
    if math.isnan(option.cost):
        found, remedy = f"{option.where} has no known price", f"set the label `price` of node {option.slot.node}"
    elif would_cost.unpriced:
        found = f"{tenant} has {would_cost.unpriced} replicas without a known price"
        remedy = "set the label `price` of their nodes, or the region's price"
    else:
        found = f"{tenant} would cost {show_usd_per_hour(would_cost.usd_per_h)}"
        more = show_quantity(round_up(would_cost.usd_per_h, COST, budget), COST)
        remedy = f"quota: {{cost: {more}}} of tenant {tenant}"
    refusal = Refusal(Code.QUOTA, found, f"at most {show_quantity(budget, COST)}")
    return PlacementFault(Constraint.QUOTA, refusal, manual_remedy(remedy))


def is_on_other_node(option: Option, picks: Sequence[Pick]) -> bool:
    """Whether none of these replicas is on the option's node, so that a standby does not fail together with them."""
    return all(pick.option.slot.node != option.slot.node for pick in picks)


def _spread_fault(option: Option, require: Requirements) -> PlacementFault:
    kind, *names = option.domain(require.spread)
    taken = f"{kind} {names[0]}" if is_label(require.spread) else "/".join(names)
    refusal = Refusal(Code.SPREAD_CONFLICT, f"{taken} has a replica already", f"spread: {show_spread(require.spread)}")
    relaxation = RequiredRelaxation(spread=weaker(require.spread)[0], size=CATEGORY_SIZE)
    return PlacementFault(Constraint.SPREAD, refusal, relaxation)
