"""Refuses requests of tenants that are over their limits: `core.tenant_limits` decides."""

from collections.abc import Iterable

import structlog

from shoal.agent import metrics
from shoal.agent.core.routing import AdmissionRefusal
from shoal.agent.core.tenant_limits import TenantGate, TenantLimits
from shoal.agent.dataplane.log_budget import LogBudget
from shoal.agent.dataplane.metering import RequestMeter
from shoal.agent.dataplane.transport import CallRefused
from shoal.agent.ports import AgentClock
from shoal.types.metric import MetricReadings
from shoal.types.tenant import TenantLimit, TenantUse

_log = structlog.get_logger(__name__)


class TenantAdmission:
    """Of one front, whatever transport a request came by. Only requests that enter the region here are counted."""

    def __init__(self, clock: AgentClock, meter: RequestMeter) -> None:
        self._clock = clock
        self._meter = meter
        self._limits = TenantLimits()
        self._log_budget = LogBudget()

    def configure(self, limits: Iterable[TenantLimit]) -> None:
        """Apply a complete list."""
        self._limits.configure(limits, self._clock.now())

    def check(self, tenant: str) -> None:
        """Before the request is read. Raises CallRefused(TENANT_RATE | TENANT_CONCURRENCY)."""
        if not self._limits.is_limited(tenant):
            return
        refused = self._limits.check(tenant, self._clock.now())
        if refused is not None:
            raise self._refuse(tenant, refused)

    def enter(self, tenant: str) -> TenantGate | None:
        """Charge a request; it must `leave` the gate. None: the tenant is unlimited. Raises as `check`."""
        if not self._limits.is_limited(tenant):
            return None
        entered = self._limits.enter(tenant, self._clock.now())
        if isinstance(entered, AdmissionRefusal):
            raise self._refuse(tenant, entered)
        return entered

    def gate(self, tenant: str) -> TenantGate | None:
        """Of a tenant with limits: a request that it `is_open` for may `take` it. None: the tenant is unlimited."""
        return self._limits.gate(tenant)

    def uses(self) -> tuple[TenantUse, ...]:
        return self._limits.uses()

    def readings(self) -> MetricReadings:
        """Of the metrics page; made at each scrape."""
        found = self.uses()
        return {
            metrics.FRONT_TENANT_REQUESTS: {
                (each.tenant, outcome): getattr(each, outcome) for each in found for outcome in metrics.LIMITED
            },
            metrics.FRONT_TENANT_INSIDE: {(each.tenant,): each.inside for each in found},
        }

    def _refuse(self, tenant: str, refused: AdmissionRefusal) -> CallRefused:
        self._meter.codes[refused.refusal.code] += 1
        suppressed = self._log_budget.take(self._clock.now())
        if suppressed is not None:
            _log.info("tenant_refused", tenant=tenant, code=refused.refusal.code, suppressed=suppressed)
        return CallRefused(refused.refusal, refused.retry_after_s)
