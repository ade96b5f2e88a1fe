"""What a tenant may use of one front, and what it used."""

from dataclasses import dataclass
from typing import Final

from shoal.types.units import PerSecond

DEFAULT_WEIGHT: Final = 1.0
"""Weight of a tenant whose document gives none."""


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """What one tenant's clients may use of one front: this front's share of the tenant's quota."""

    # Name of the tenant.
    tenant: str
    # Requests a second that may enter here; None: unlimited.
    rate: PerSecond | None = None
    # Requests that may be inside here at once; None: unlimited.
    concurrency: int | None = None
    # Its weight beside other tenants whose requests wait; more than 0.
    weight: float = DEFAULT_WEIGHT


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What the clients of one limited tenant did at one front since it started.
    total = admitted + over_rate + over_concurrency."""

    # Name of the tenant.
    tenant: str
    # Requests that its limits let in.
    admitted: int = 0
    # Requests that were refused with TENANT_RATE.
    over_rate: int = 0
    # Requests that were refused with TENANT_CONCURRENCY.
    over_concurrency: int = 0
    # Requests inside now.
    inside: int = 0

    @property
    def total(self) -> int:
        return self.admitted + self.over_rate + self.over_concurrency
