"""The local region as the origin controller sees it: how its workloads are placed here, even while another region runs
them.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from shoal.coordinator.controllers.fleet.controller import FleetController
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.migration.budget import cross_region_hold
from shoal.coordinator.core.migration.cross_region import cross_region_states, region_exclusions
from shoal.coordinator.core.negotiation.offer_selection import own_values
from shoal.coordinator.core.placement.model import PlacementPlan, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.rank import TermValues
from shoal.coordinator.core.workloads.cross_region_state import CrossRegionState
from shoal.coordinator.core.workloads.routes import gateways
from shoal.coordinator.core.workloads.service_reports import service_report
from shoal.coordinator.ports import Clock
from shoal.types.agreement import GUEST_TENANT, GatewayRef, ServiceReport
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Seconds, UsdPerHour
from shoal.types.workload import Intent, WorkloadKey

PLACE_CHECK_S: Final = Seconds(5.0)
"""Interval between checks for a local place of delegated workloads. One check covers all, because it runs placement."""


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """How a workload is placed in this region."""

    # True: this region has room for all its replicas now, even while another region runs it.
    is_placeable: bool
    # True: all wanted replicas serve here, and no route leads to another region.
    serves: bool


class LocalRegion(Protocol):
    """What the origin's side of delegations needs of its region."""

    def intents(self) -> tuple[Intent, ...]:
        """The region's own workloads, without guests."""
        ...

    def profiles(self) -> Mapping[str, ModelProfile]: ...
    def placement(self, key: WorkloadKey) -> LocalPlacement: ...
    def cross_region_state(self, key: WorkloadKey) -> CrossRegionState | None:
        """State of the workload's cross-region migration; None: there is none."""
        ...

    def may_leave(self, intent: Intent) -> bool:
        """Whether a move to another region that is not urgent may begin now."""
        ...

    def exclusions(self, key: WorkloadKey) -> frozenset[tuple[str, str]]:
        """Regions that gave wrong answers for the workload, each with the model's digest."""
        ...

    @property
    def moves_live(self) -> bool:
        """Whether workloads return to this region by a live move."""
        ...

    def figures(self, key: WorkloadKey) -> TermValues | None:
        """Figures of the best placement here (`offer_selection.own_values`); None: it has no place here."""
        ...

    @property
    def step_lock(self) -> asyncio.Lock:
        """Held while the region decides and stores where workloads run."""
        ...

    def has_budget(self, key: WorkloadKey) -> bool:
        """Whether the workload's tenant has a budget."""
        ...

    def budget_left(self, key: WorkloadKey) -> UsdPerHour | None:
        """What other workloads of its tenant, here and in other regions, leave of the budget; None: it has none."""
        ...

    def gateways(self) -> tuple[GatewayRef, ...]: ...
    def gateway_revocations(self) -> tuple[str, ...]:
        """Revoked serials of its gateways' certificates, which other regions must refuse."""
        ...

    def service_report(self, agreement: str) -> ServiceReport:
        """Service under an agreement as this region's gateways measured it."""
        ...


class LocalRegionAdapter:
    """Implements LocalRegion over the region's own controllers."""

    def __init__(self, workloads: WorkloadsController, fleet: FleetController, clock: Clock) -> None:
        self._workloads = workloads
        self._fleet = fleet
        self._clock = clock
        self._intents: tuple[tuple[Intent, ...], tuple[Intent, ...]] = ((), ())
        self._plans: tuple[PlacementPlan | None, dict[WorkloadKey, WorkloadPlan]] = (None, {})
        self._check_at = Elapsed(-math.inf)
        self._has_place_cache = dict[WorkloadKey, bool]()

    def intents(self) -> tuple[Intent, ...]:
        """The same tuple object until documents change."""
        adopted = self._workloads.intents
        if self._intents[0] is not adopted:
            self._intents = (adopted, tuple(intent for intent in adopted if intent.key.tenant != GUEST_TENANT))
        return self._intents[1]

    def profiles(self) -> Mapping[str, ModelProfile]:
        return self._workloads.catalog.profiles

    def placement(self, key: WorkloadKey) -> LocalPlacement:
        """By the last step's plan. A workload that the plan does not have yet counts as placeable."""
        latest = self._workloads.last_plan
        if self._plans[0] is not latest:
            self._plans = (latest, {each.workload: each for each in latest.workloads} if latest is not None else {})
        plan = self._plans[1].get(key)
        if plan is None:
            return LocalPlacement(is_placeable=True, serves=False)
        if plan.elsewhere:
            return LocalPlacement(self._has_place(key), serves=False)
        return LocalPlacement(plan.refusal is None, self._serves(plan))

    def cross_region_state(self, key: WorkloadKey) -> CrossRegionState | None:
        migrations = self._workloads.migrations.all.values()
        moves = [each for each in migrations if each.is_cross_region and each.workload == key]
        return cross_region_states(moves, self._clock.now()).get(key) if moves else None

    def may_leave(self, intent: Intent) -> bool:
        now, wall = self._clock.now(), self._clock.wall()
        migrations = self._workloads.migrations.all.values()
        return cross_region_hold(intent.key, intent.migration, migrations, now, wall) is None

    def exclusions(self, key: WorkloadKey) -> frozenset[tuple[str, str]]:
        return region_exclusions(self._workloads.migrations.all.values()).get(key, frozenset())

    @property
    def moves_live(self) -> bool:
        return True

    def figures(self, key: WorkloadKey) -> TermValues | None:
        plan = place(self._workloads.inputs(), explain=(key,), as_if_local=(key,)).of(key)
        return own_values(plan) if plan is not None else None

    @property
    def step_lock(self) -> asyncio.Lock:
        return self._workloads.step_lock

    def has_budget(self, key: WorkloadKey) -> bool:
        quota = self._workloads.catalog.quotas.get(key.tenant)
        return quota is not None and quota.cost is not None

    def budget_left(self, key: WorkloadKey) -> UsdPerHour | None:
        if not self.has_budget(key):
            return None
        return place(self._workloads.inputs(), explain=False).budget_left(key)

    def gateways(self) -> tuple[GatewayRef, ...]:
        return gateways(self._fleet.fleet)

    def gateway_revocations(self) -> tuple[str, ...]:
        return self._workloads.revoked_gateways

    def service_report(self, agreement: str) -> ServiceReport:
        return service_report(self._fleet.fleet, agreement)

    def _serves(self, plan: WorkloadPlan) -> bool:
        """Whether all wanted replicas of the plan are in the routes, and no other region is."""
        away = self._workloads.routes_to_other_region(plan.workload)
        return not away and self._workloads.endpoints(plan.workload) >= plan.wanted > 0

    def _has_place(self, key: WorkloadKey) -> bool:
        now = self._clock.now()
        if now >= self._check_at or key not in self._has_place_cache:
            self._check_at = Elapsed(now + PLACE_CHECK_S)
            inputs = self._workloads.inputs()
            away = {*inputs.elsewhere, *(each.workload for each in self._plans[1].values() if each.elsewhere)}
            plans = place(inputs, explain=False, as_if_local=away).workloads
            found = {each.workload: each.refusal is None for each in plans}
            self._has_place_cache = {each: found.get(each, False) for each in away}
        return self._has_place_cache.get(key, False)
