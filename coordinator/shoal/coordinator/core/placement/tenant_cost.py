"""What a tenant's placed replicas cost, and whether that is within its budget (`quota.cost`)."""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from shoal.types.units import UsdPerHour

ROUNDING: Final = 1e-9
"""Share by which a sum may exceed a budget and still count as equal to it: ten replicas of 0.1 USD/h meet 1 USD/h. A
sum of n floats is wrong by less than n x 2^-53 of itself, so this covers some millions of replicas."""


EXACT: Final = 2.0**40
"""Prices are rounded to multiples of 1/EXACT USD/h. Sums of such are exact up to 2^13 USD/h, so that they do not depend
on their order, nor on what was added and taken out before. ROUNDING covers the error for prices above 0.0005 USD/h."""


class TenantCost(NamedTuple):
    """Cost of some replicas. Each counts its whole device, as `limits.cost` does."""

    # USD/h of those with a known price.
    usd_per_h: float = 0.0
    # Number of those without one.
    unpriced: int = 0

    @classmethod
    def of(cls, usd_per_h: float) -> "TenantCost":
        """Of one replica; NaN or infinite: it has no known price."""
        return cls(round(usd_per_h * EXACT) / EXACT) if math.isfinite(usd_per_h) else cls(0.0, 1)

    def plus(self, other: "TenantCost", sign: int = 1) -> "TenantCost":
        return TenantCost(self.usd_per_h + sign * other.usd_per_h, self.unpriced + sign * other.unpriced)

    def times(self, sign: int) -> "TenantCost":
        return TenantCost(sign * self.usd_per_h, sign * self.unpriced)

    def beyond(self, other: "TenantCost") -> "TenantCost":
        """By how much it is more than the other; nothing where it is less."""
        return TenantCost(max(0.0, self.usd_per_h - other.usd_per_h), max(0, self.unpriced - other.unpriced))

    def exceeds(self, budget: UsdPerHour) -> bool:
        """An unknown price never counts as a low one: with one, no budget is met."""
        return self.unpriced > 0 or self.usd_per_h > budget * (1 + ROUNDING)

    def remainder_of(self, budget: UsdPerHour) -> UsdPerHour:
        """What it leaves of a budget; 0 if it exceeds it."""
        return UsdPerHour(0.0 if self.exceeds(budget) else max(0.0, budget - self.usd_per_h))


NO_COST: Final = TenantCost()


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """A tenant's budget, and what of it is used."""

    # Name of the tenant.
    tenant: str
    # Its `quota.cost`.
    limit: UsdPerHour
    # Cost of what is placed for it here, and of what other regions are to run for it.
    cost: TenantCost

    @property
    def is_exceeded(self) -> bool:
        """A price rose or became unknown, or the budget was lowered. What runs stays; nothing new is placed."""
        return self.cost.exceeds(self.limit)
