"""The plan of the last step, put together of what each step planned."""

from collections.abc import Iterable, Mapping

from shoal.coordinator.core.placement.allocations import rank_of
from shoal.coordinator.core.placement.model import PlacementPlan, WorkloadPlan
from shoal.coordinator.core.placement.tenant_cost import TenantBudget
from shoal.coordinator.core.workloads.model import Decision
from shoal.types.workload import Intent, WorkloadKey


class LastPlans:
    """Of all workloads of the region."""

    def __init__(self) -> None:
        self._plans: dict[WorkloadKey, WorkloadPlan] = {}
        self._budgets: tuple[TenantBudget, ...] = ()
        self._seen: tuple[Intent, ...] | None = None
        self._intents: Mapping[WorkloadKey, Intent] | None = None
        self._whole: PlacementPlan | None = None

    def adopt(self, decision: Decision, intents: tuple[Intent, ...]) -> None:
        """A step was stored. intents: of all workloads."""
        if decision.is_whole:
            self._plans = {}
        self._plans.update({each.workload: each for each in decision.plan.workloads})
        self._budgets = decision.plan.budgets
        if intents is not self._seen:
            self._seen, self._intents = intents, None
        self._whole = None

    def all(self) -> Iterable[WorkloadPlan]:
        """In no order."""
        known = self.intents
        return (plan for key, plan in self._plans.items() if key in known)

    @property
    def plan(self) -> PlacementPlan | None:
        """None before the first step."""
        if self._whole is None and self._seen is not None:
            ranked = sorted(self._seen, key=rank_of)
            plans = tuple(plan for each in ranked if (plan := self._plans.get(each.key)) is not None)
            self._whole = PlacementPlan(plans, "", self._budgets)
        return self._whole

    @property
    def intents(self) -> Mapping[WorkloadKey, Intent]:
        """What was planned, by key."""
        if self._intents is None:
            self._intents = {each.key: each for each in self._seen or ()}
            self._plans = {key: plan for key, plan in self._plans.items() if key in self._intents}
        return self._intents
