"""The limits of tenants at one front: a token bucket for the rate, and a count of what is inside.

A request is charged where it enters the region, once. Limits are this front's share of the tenant's quota.
"""

from collections.abc import Iterable
from typing import Final

from shoal.agent.core.routing import AdmissionRefusal
from shoal.types.codes import Code, Refusal
from shoal.types.tenant import TenantLimit, TenantUse
from shoal.types.units import Elapsed, Seconds

BURST_S: Final = 1.0
"""Seconds of the rate that may come at once, and at least one request. It is what the rate may be exceeded by, once."""
NO_SHARE_RETRY_S: Final = Seconds(1.0)
"""When to retry at a front without a share: by then the region may have given it one, with the next status."""
_SHARE_OF_NEWEST: Final = 0.1
"""Weight of the newest request in the mean time of requests inside; a mean over about the last ten."""


class TenantGate:
    """One tenant at one front. `leave` ends what `TenantLimits.enter` began."""

    __slots__ = ("_at", "_limit", "_mean_s", "_tokens", "admitted", "inside", "over_concurrency", "over_rate")

    def __init__(self, limit: TenantLimit, now: Elapsed) -> None:
        self._limit = limit
        # Empty at first, so that restarts of a front add nothing to the rate.
        self._tokens = 0.0
        self._at = now
        self._mean_s = 0.0
        self.inside = 0
        self.admitted = 0
        self.over_rate = 0
        self.over_concurrency = 0

    def change_limit(self, limit: TenantLimit, now: Elapsed) -> None:
        """From now on. Tokens beyond the new burst are lost."""
        if limit.rate is None or self._limit.rate is None:
            self._tokens, self._at = 0.0, now
        else:
            self._fill(self._limit.rate, now)
            self._tokens = min(self._tokens, _burst(limit.rate))
        self._limit = limit

    def is_open(self, now: Elapsed) -> bool:
        """Whether a request may enter now. Takes and counts nothing."""
        limit = self._limit
        if limit.concurrency is not None and self.inside >= limit.concurrency:
            return False
        if limit.rate is None:
            return True
        self._fill(limit.rate, now)
        return self._tokens >= 1.0

    def check(self, now: Elapsed) -> AdmissionRefusal | None:
        """None, or why a request may not enter now. Takes nothing; counts the refusal."""
        limit = self._limit
        if limit.concurrency is not None and self.inside >= limit.concurrency:
            self.over_concurrency += 1
            return self._refuse_concurrency(limit.concurrency)
        if limit.rate is not None:
            self._fill(limit.rate, now)
            if self._tokens < 1.0:
                self.over_rate += 1
                return self._refuse_rate(limit.rate)
        return None

    def take(self) -> None:
        """Let in a request that `check` accepts, or that the gate `is_open` for."""
        if self._limit.rate is not None:
            self._tokens -= 1.0
        self.inside += 1
        self.admitted += 1

    def leave(self, seconds: Seconds) -> None:
        """A request that was inside for `seconds` ended."""
        self.inside -= 1
        self._mean_s += _SHARE_OF_NEWEST * (seconds - self._mean_s) if self._mean_s else seconds

    def use(self) -> TenantUse:
        return TenantUse(self._limit.tenant, self.admitted, self.over_rate, self.over_concurrency, self.inside)

    def _fill(self, rate: float, now: Elapsed) -> None:
        if now > self._at:
            self._tokens = min(_burst(rate), self._tokens + (now - self._at) * rate)
            self._at = now

    def _refuse_rate(self, rate: float) -> AdmissionRefusal:
        wait_s = Seconds((1.0 - self._tokens) / rate) if rate > 0 else NO_SHARE_RETRY_S
        return AdmissionRefusal(
            Refusal(
                Code.TENANT_RATE,
                f"tenant {self._limit.tenant} asks for more than its rate",
                f"at most {rate:.4g}/s at this front, its share of the tenant's quota.rate",
                "retry after the time given, or raise quota.rate of the tenant",
            ),
            wait_s,
        )

    def _refuse_concurrency(self, concurrency: int) -> AdmissionRefusal:
        # By Little's law one of them ends in the mean time of one, over their number.
        wait_s = Seconds(self._mean_s / self.inside) if self.inside and self._mean_s else NO_SHARE_RETRY_S
        return AdmissionRefusal(
            Refusal(
                Code.TENANT_CONCURRENCY,
                f"{self.inside} requests of tenant {self._limit.tenant} are inside",
                f"at most {concurrency} at this front, its share of the tenant's quota.concurrency",
                "retry after the time given, or raise quota.concurrency of the tenant",
            ),
            wait_s,
        )


class TenantLimits:
    """The limited tenants of one front. It belongs to one thread."""

    def __init__(self) -> None:
        self._gates: dict[str, TenantGate] = {}

    def configure(self, limits: Iterable[TenantLimit], now: Elapsed) -> None:
        """Apply a complete list. A tenant that is not listed is unlimited; its counts go."""
        limited = [each for each in limits if each.rate is not None or each.concurrency is not None]
        self._gates = {each.tenant: self._gates.get(each.tenant) or TenantGate(each, now) for each in limited}
        for each in limited:
            self._gates[each.tenant].change_limit(each, now)

    def is_limited(self, tenant: str) -> bool:
        return tenant in self._gates

    def gate(self, tenant: str) -> TenantGate | None:
        """None: the tenant is unlimited."""
        return self._gates.get(tenant)

    def check(self, tenant: str, now: Elapsed) -> AdmissionRefusal | None:
        """None, or why a request of the tenant may not enter now. Takes nothing."""
        gate = self._gates.get(tenant)
        return None if gate is None else gate.check(now)

    def enter(self, tenant: str, now: Elapsed) -> TenantGate | AdmissionRefusal | None:
        """Let a request in, and charge it: the gate that it leaves by. None: the tenant is unlimited."""
        gate = self._gates.get(tenant)
        if gate is None:
            return None
        refused = gate.check(now)
        if refused is not None:
            return refused
        gate.take()
        return gate

    def uses(self) -> tuple[TenantUse, ...]:
        return tuple(gate.use() for gate in self._gates.values())


def _burst(rate: float) -> float:
    return max(1.0, rate * BURST_S)
