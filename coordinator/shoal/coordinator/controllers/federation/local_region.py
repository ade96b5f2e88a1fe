"""The local region as the origin controller sees it: how its workloads are placed here, even while another region runs
them.
"""

import asyncio
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from shoal.coordinator.controllers.fleet.controller import FleetController
from shoal.coordinator.controllers.workloads.apply import Compute, inline
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
from shoal.types.codes import ShoalError
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
    def placement(self, key: WorkloadKey) -> LocalPlacement | None:
        """None: that is being computed, since another region began to run it."""
        ...

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

    async def figures(self, key: WorkloadKey) -> TermValues | None:
        """Figures of the best placement here (`offer_selection.own_values`); None: it has no place here."""
        ...

    @property
    def step_lock(self) -> asyncio.Lock:
        """Held while the region decides and stores where workloads run."""
        ...

    def has_budget(self, key: WorkloadKey) -> bool:
        """Whether the workload's tenant has a budget."""
        ...

    async def budget_left(self, key: WorkloadKey) -> UsdPerHour | None:
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

    def __init__(
        self, workloads: WorkloadsController, fleet: FleetController, clock: Clock, compute: Compute = inline
    ) -> None:
        """compute: where placements run, which take as long as a plan of the region: one at a time."""
        self._workloads = workloads
        self._fleet = fleet
        self._clock = clock
        self._compute = compute
        self._computing = asyncio.Lock()
        self._check: asyncio.Task[None] | None = None
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

    def stop(self) -> None:
        """Cancels what is being computed."""
        if self._check is not None:
            self._check.cancel()

    def placement(self, key: WorkloadKey) -> LocalPlacement | None:
        """By the last step's plan. A workload that the plan does not have yet counts as placeable."""
        latest = self._workloads.last_plan
        if self._plans[0] is not latest:
            self._plans = (latest, {each.workload: each for each in latest.workloads} if latest is not None else {})
        plan = self._plans[1].get(key)
        if plan is None:
            return LocalPlacement(is_placeable=True, serves=False)
        if plan.elsewhere:
            found = self._has_place(key)
            return LocalPlacement(found, serves=False) if found is not None else None
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

    async def figures(self, key: WorkloadKey) -> TermValues | None:
        plan = (await self._place(explain=(key,), as_if_local=(key,))).of(key)
        return own_values(plan) if plan is not None else None

    @property
    def step_lock(self) -> asyncio.Lock:
        return self._workloads.step_lock

    def has_budget(self, key: WorkloadKey) -> bool:
        quota = self._workloads.catalog.quotas.get(key.tenant)
        return quota is not None and quota.cost is not None

    async def budget_left(self, key: WorkloadKey) -> UsdPerHour | None:
        return (await self._place(explain=False)).budget_left(key) if self.has_budget(key) else None

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

    def _has_place(self, key: WorkloadKey) -> bool | None:
        """By the last check, while the next one is computed; None: there was none that looked at it."""
        is_due = self._clock.now() >= self._check_at or key not in self._has_place_cache
        if is_due and (self._check is None or self._check.done()):
            self._check = asyncio.create_task(self._check_places())
        return self._has_place_cache.get(key)

    async def _check_places(self) -> None:
        away = frozenset(each.workload for each in self._plans[1].values() if each.elsewhere)
        with suppress(ShoalError):  # too much to compute: the next look is the next try
            found = {each.workload: each.refusal is None for each in (await self._place(as_if_local=away)).workloads}
            self._has_place_cache = {each: found.get(each, False) for each in away}
            self._check_at = Elapsed(self._clock.now() + PLACE_CHECK_S)

    async def _place(
        self, *, explain: Literal[False] | tuple[WorkloadKey, ...] = False, as_if_local: Collection[WorkloadKey] = ()
    ) -> PlacementPlan:
        """A plan of the region as it is when its turn comes."""
        async with self._computing:
            inputs = self._workloads.inputs_as_of_now()
            return await self._compute(lambda: place(inputs(), explain=explain, as_if_local=as_if_local))
