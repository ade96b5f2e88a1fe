"""What trades ask of their region: how its workloads stand at home, though another region may run them."""

import math
from collections.abc import Mapping
from typing import Final

from shoal.coordinator.controllers.fleet import FleetController
from shoal.coordinator.controllers.trades import Standing
from shoal.coordinator.controllers.workloads import WorkloadsController
from shoal.coordinator.core.migration.crossing import barred_of
from shoal.coordinator.core.negotiation.choice import Figures, own_figures
from shoal.coordinator.core.placement.model import Plan, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads.delivered import delivered
from shoal.coordinator.core.workloads.model import Course
from shoal.coordinator.core.workloads.routes import gateways
from shoal.coordinator.ports import Clock
from shoal.types.agreement import GUESTS, GatewayRef, ServiceReport
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import Intent, WorkloadKey

LOOK_S: Final = Seconds(5.0)
"""Whether home has a place for what runs elsewhere is looked at so often, for all of it at once: it costs a placement.
"""


class RegionHome:
    """Implements trades.Home over the region's own controllers."""

    def __init__(self, workloads: WorkloadsController, fleet: FleetController, clock: Clock) -> None:
        self._workloads = workloads
        self._fleet = fleet
        self._clock = clock
        self._intents: tuple[tuple[Intent, ...], tuple[Intent, ...]] = ((), ())
        self._plans: tuple[Plan | None, dict[WorkloadKey, WorkloadPlan]] = (None, {})
        self._look_at = Elapsed(-math.inf)
        self._looked = dict[WorkloadKey, bool]()

    def intents(self) -> tuple[Intent, ...]:
        """The very same tuple until documents change."""
        adopted = self._workloads.intents
        if self._intents[0] is not adopted:
            self._intents = (adopted, tuple(intent for intent in adopted if intent.key.tenant != GUESTS))
        return self._intents[1]

    def profiles(self) -> Mapping[str, ModelProfile]:
        return self._workloads.catalog.profiles

    def standing(self, key: WorkloadKey) -> Standing:
        """By the last step's plan; what it has not seen yet may still have a place."""
        latest = self._workloads.plan_now
        if self._plans[0] is not latest:
            self._plans = (latest, {each.workload: each for each in latest.workloads} if latest is not None else {})
        plan = self._plans[1].get(key)
        if plan is None:
            return Standing(placed=True, serves=False)
        if plan.elsewhere:
            return Standing(self._could_be_placed(key), serves=False)
        return Standing(plan.refusal is None, self._workloads.serves_at_home(key))

    def course(self, key: WorkloadKey) -> Course | None:
        return self._workloads.course(key)

    def may_leave(self, intent: Intent) -> bool:
        return self._workloads.may_leave(intent)

    def barred(self, key: WorkloadKey) -> frozenset[tuple[str, str]]:
        return barred_of(self._workloads.migrations.all.values()).get(key, frozenset())

    @property
    def moves_live(self) -> bool:
        return True

    def figures(self, key: WorkloadKey) -> Figures | None:
        plan = place(self._workloads.inputs(), explain=(key,), at_home=(key,)).of(key)
        return own_figures(plan) if plan is not None else None

    def gateways(self) -> tuple[GatewayRef, ...]:
        return gateways(self._fleet.fleet)

    def revoked(self) -> tuple[str, ...]:
        return self._workloads.revoked_gateways

    def delivered(self, agreement: str) -> ServiceReport:
        return delivered(self._fleet.fleet, agreement)

    def _could_be_placed(self, key: WorkloadKey) -> bool:
        now = self._clock.now()
        if now >= self._look_at or key not in self._looked:
            self._look_at = Elapsed(now + LOOK_S)
            inputs = self._workloads.inputs()
            away = {*inputs.elsewhere, *(each.workload for each in self._plans[1].values() if each.elsewhere)}
            plans = place(inputs, explain=False, at_home=away).workloads
            found = {each.workload: each.refusal is None for each in plans}
            self._looked = {each: found.get(each, False) for each in away}
        return self._looked.get(key, False)
