"""What this region's gateways counted of the requests that other regions serve, over time."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.negotiation import trade_times
from shoal.coordinator.core.negotiation.model import OriginAgreement
from shoal.coordinator.ports import Clock
from shoal.types.agreement import ServiceReport
from shoal.types.offer import Offer
from shoal.types.units import Elapsed, Seconds

FAILING_S: Final = Seconds(1.0)
"""Gateways report their counts once a heartbeat: failures matter after this long without a success."""
OBSERVATIONS_KEPT: Final = 64
OBSERVATION_S: Final = Seconds(0.25)
"""Minimum time between two kept observations, so that those kept reach back beyond `FAILING_S`."""
ALL_FAILING_S: Final = Seconds(10.0)
"""A delegate that reports READY is left when at least `ALL_FAILING_LEAST` requests failed for this long and none
succeeded. This is longer than a delegate needs to notice and report a loss."""
ALL_FAILING_LEAST: Final = 5


@dataclass(frozen=True, slots=True)
class ServiceObservation:
    """Counts of this region's gateways under an agreement at one time, since the agreement began."""

    # When they were counted.
    at: Elapsed
    # Requests without an error.
    succeeded: int
    # Requests that failed.
    errors: int


class ServiceObservations:
    """Of every agreement, since this process began to count."""

    def __init__(self, service_report: Callable[[str], ServiceReport], clock: Clock) -> None:
        """service_report: counts under an agreement now."""
        self._service_report = service_report
        self._clock = clock
        self._by_agreement: dict[str, tuple[ServiceObservation, ...]] = {}
        self._began_at: dict[str, Elapsed] = {}

    def report(self, agreement: str, offer: Offer | None) -> ServiceReport:
        """The counts now, and what the time since the first report costs at the price of the offer."""
        report = self._service_report(agreement)
        self._observe(agreement, report)
        now = self._clock.now()
        hours = (now - self._began_at.setdefault(agreement, now)) / 3600
        return replace(report, cost_usd=offer.cost * hours) if offer is not None else report

    def is_failing(self, agreement: OriginAgreement | None) -> bool:
        """Whether requests failed under the agreement since its delegate last answered, and none succeeded for
        FAILING_S.
        """
        now = self._clock.now()
        if agreement is None or now - agreement.heard_at < trade_times.LOST_S / 2:
            return False
        seen = self._observe(agreement.id, self._service_report(agreement.id))
        before = [each for each in seen if each.at <= agreement.heard_at] or seen[:1]
        lately = [each for each in seen if each.at <= now - FAILING_S]
        newest = seen[-1]
        return bool(lately) and newest.succeeded == lately[-1].succeeded and newest.errors > before[-1].errors

    def failing_agreement(self, agreements: Iterable[OriginAgreement]) -> str:
        """The one under which requests failed for ALL_FAILING_S up to now, and none succeeded, by the counts of each
        renewal; empty: none.
        """
        now = self._clock.now()
        for each in agreements:
            seen = self._by_agreement.get(each.id, ())
            before = [one for one in seen if one.at <= now - ALL_FAILING_S]
            half = [one for one in seen if one.at <= now - ALL_FAILING_S / 2]
            if before and seen[-1].succeeded == before[-1].succeeded:
                failed, lately = seen[-1].errors - before[-1].errors, seen[-1].errors - half[-1].errors
                if failed >= ALL_FAILING_LEAST and lately:
                    return each.id
        return ""

    def drop_others(self, active: Collection[str], live: Collection[str]) -> None:
        """Forgets ended agreements. active: those that are not leaving. live: under which requests may be in flight."""
        self._began_at = {name: since for name, since in self._began_at.items() if name in active}
        self._by_agreement = {name: seen for name, seen in self._by_agreement.items() if name in live}

    def _observe(self, agreement: str, report: ServiceReport) -> tuple[ServiceObservation, ...]:
        newest = ServiceObservation(self._clock.now(), report.requests - report.errors, report.errors)
        seen = self._by_agreement.get(agreement, ())
        if len(seen) > 1 and seen[-1].at - seen[-2].at < OBSERVATION_S:
            seen = seen[:-1]  # too close to the one before: the newest replaces it
        self._by_agreement[agreement] = (*seen, newest)[-OBSERVATIONS_KEPT:]
        return self._by_agreement[agreement]
