"""Which tenants cost more than their budget, for the region's log. Nothing is ended by it: what runs stays."""

from collections.abc import Iterable, Mapping
from typing import Final

from shoal.coordinator.core.placement.tenant_cost import TenantBudget
from shoal.coordinator.core.workloads.model import RegionEvent
from shoal.types.units import COST, Elapsed, show_quantity, show_usd_per_hour

EXCEEDED_EVENT: Final = "BUDGET_EXCEEDED"
MET_EVENT: Final = "BUDGET_MET"


def over_budget(before: Mapping[str, Elapsed], budgets: Iterable[TenantBudget], now: Elapsed) -> Mapping[str, Elapsed]:
    """Since when each tenant that exceeds its budget has done so."""
    return {each.tenant: before.get(each.tenant, now) for each in budgets if each.is_exceeded}


def budget_events(before: Mapping[str, Elapsed], budgets: Iterable[TenantBudget]) -> tuple[RegionEvent, ...]:
    """Budgets that are exceeded from now on, and those that are met again or gone. before: those exceeded so far."""
    now = {each.tenant: each for each in budgets}
    exceeded = {name for name, each in now.items() if each.is_exceeded}
    events = [
        RegionEvent(EXCEEDED_EVENT, name, f"{_describe(now[name])}: what runs stays, nothing new is placed", "", None)
        for name in sorted(exceeded - before.keys())
    ]
    events += [
        RegionEvent(MET_EVENT, name, _describe(now[name]) if name in now else "it has no budget now", "", None)
        for name in sorted(before.keys() - exceeded)
    ]
    return tuple(events)


def _describe(budget: TenantBudget) -> str:
    limit = show_quantity(budget.limit, COST)
    if budget.cost.unpriced:
        return f"{budget.cost.unpriced} of its replicas have no known price, its budget is {limit}"
    return f"it costs {show_usd_per_hour(budget.cost.usd_per_h)}, its budget is {limit}"
