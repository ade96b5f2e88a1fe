"""Counts of the requests that entered the region at this front, by workload and origin, and of their outcomes."""

import bisect
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from shoal.agent import metrics
from shoal.agent.core.cross_region_traffic import CrossRegionTraffic
from shoal.types.assignment import AgreementCounts, Ingress
from shoal.types.codes import Code, is_lost
from shoal.types.metric import Distribution, LabelValues, MetricReadings
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

_CLIENT_FAULTS: Final = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.TOO_LARGE,
        Code.FIELD_TOO_MANY,
        Code.SHM_DENIED,
        Code.UNIMPLEMENTED,
        Code.SESSION_INVALID,
        Code.CANCELLED,
    }
)
"""Refusals that say nothing about the region: it would be refused everywhere, or its caller gave it up."""
_BUCKETS: Final = metrics.FRONT_SECONDS.buckets


@dataclass(slots=True)
class _Count:
    """Counters of one workload and origin."""

    # Requests that entered here.
    requests: int = 0
    # Requests that were answered.
    answered: int = 0
    # Requests that took more than one attempt, whatever their outcome.
    retried: int = 0
    # Requests that were refused, or cancelled by their caller.
    refused: int = 0
    # Requests that failed after an attempt, not through their caller's fault.
    lost: int = 0
    # Of those refused: what their clients got wrong, gave up, or gave too little time.
    client_faults: int = 0

    @property
    def in_flight(self) -> int:
        return self.requests - self.answered - self.refused - self.lost


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of one workload over all origins."""

    # Requests that were answered.
    answered: int
    # Requests without an answer: refused or lost.
    failed: int
    # Sum of the seconds from arrival to answer, of those answered.
    seconds: float
    # When the newest answer was given, elapsed clock; None without one.
    newest_at: Elapsed | None


@dataclass(slots=True)
class _Latency:
    # Answers by bucket of _BUCKETS, not cumulative.
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    # Sum of the seconds of all answers.
    seconds: float = 0.0
    # When the newest answer was given, elapsed clock; None without one.
    newest_at: Elapsed | None = None


class RequestMeter:
    """Counts since the front started, or had a route of the workload again after a time without. requests = answered +
    refused + lost + those in flight."""

    def __init__(self) -> None:
        self._counts: dict[WorkloadKey, dict[str, _Count]] = {}
        """By workload, then by origin."""
        self._latencies: dict[WorkloadKey, _Latency] = {}
        self._cross_region = CrossRegionTraffic()
        self.codes: Counter[Code] = Counter()
        """Refusals of all calls, also of those that entered elsewhere or named no known workload."""

    def record_entry(self, workload: WorkloadKey, origin: str) -> None:
        self._count(workload, origin).requests += 1

    def record_answer(self, workload: WorkloadKey, origin: str, attempts: int, seconds: Seconds, at: Elapsed) -> None:
        count = self._count(workload, origin)
        count.answered += 1
        count.retried += attempts > 1
        latency = self._latencies.get(workload)
        if latency is None:
            latency = self._latencies[workload] = _Latency()
        latency.buckets[bisect.bisect_left(_BUCKETS, seconds)] += 1
        latency.seconds += seconds
        latency.newest_at = at

    def totals(self, workload: WorkloadKey) -> Totals:
        counts = self._counts.get(workload, {}).values()
        latency = self._latencies.get(workload, _Latency())
        return Totals(
            answered=sum(count.answered for count in counts),
            failed=sum(count.refused + count.lost for count in counts),
            seconds=latency.seconds,
            newest_at=latency.newest_at,
        )

    def record_failure(
        self,
        workload: WorkloadKey,
        origin: str,
        attempts: int,
        code: Code,
        *,
        caller_deadline: bool = False,
        is_too_early: bool = False,
    ) -> None:
        """A request without an answer. `attempts` is 0 if it was refused before it was sent; `caller_deadline` is True
        if its caller set the deadline; `is_too_early` is True if an answer was not due by then."""
        count = self._count(workload, origin)
        count.retried += attempts > 1
        if attempts and is_lost(code, own_limit=caller_deadline):
            count.lost += 1
        else:
            count.refused += 1
            count.client_faults += code in _CLIENT_FAULTS or (code is Code.DEADLINE_EXCEEDED and is_too_early)

    def record_traffic(self, agreement: str, region: str, outcome: Seconds | Code) -> None:
        """As `CrossRegionTraffic.add`."""
        self._cross_region.add(agreement, region, outcome)

    def keep_workloads(self, workloads: Collection[WorkloadKey]) -> None:
        """Drop the counts of all other workloads, once no request of theirs is in flight: every status lists them all.
        Whoever reads them takes a counter that begins anew."""
        self._counts = {
            key: counts
            for key, counts in self._counts.items()
            if key in workloads or any(count.in_flight > 0 for count in counts.values())
        }
        self._latencies = {key: latency for key, latency in self._latencies.items() if key in self._counts}

    def keep_agreements(self, agreements: Collection[str]) -> None:
        """Drop the cross-region counts of all other agreements."""
        self._cross_region.keep(agreements)

    def agreement_counts(self) -> tuple[AgreementCounts, ...]:
        return self._cross_region.agreement_counts()

    def ingress(self) -> tuple[Ingress, ...]:
        return tuple(
            Ingress(
                *(workload, origin, each.requests, each.answered, each.retried, each.refused, each.lost),
                client_faults=each.client_faults,
            )
            for workload, counts in tuple(self._counts.items())
            for origin, each in tuple(counts.items())
        )

    def latencies(self) -> Iterator[tuple[LabelValues, Distribution]]:
        """The histogram of each workload, by (tenant, workload)."""
        for workload, latency in tuple(self._latencies.items()):
            yield (workload.tenant, workload.name), Distribution(tuple(latency.buckets), latency.seconds)

    def _count(self, workload: WorkloadKey, origin: str) -> _Count:
        counts = self._counts.get(workload)
        if counts is None:
            counts = self._counts[workload] = {}
        count = counts.get(origin)
        if count is None:
            count = counts[origin] = _Count()
        return count


def readings(meter: RequestMeter, in_flight: int, ejected: int) -> MetricReadings:
    """What the front's page says of one meter; made at each scrape, so that serving pays nothing for it."""
    ingress = {(each.workload.tenant, each.workload.name, each.origin): each for each in meter.ingress()}
    agreement_counts = {(each.agreement, each.region): each for each in meter.agreement_counts()}
    return {
        metrics.FRONT_REQUESTS: {
            (*entry, outcome): getattr(each, outcome) for entry, each in ingress.items() for outcome in metrics.ENDED
        },
        metrics.FRONT_RETRIED: {entry: each.retried for entry, each in ingress.items()},
        metrics.FRONT_REFUSALS: {(code,): count for code, count in tuple(meter.codes.items())},
        metrics.FRONT_SECONDS: dict(meter.latencies()),
        metrics.FRONT_IN_FLIGHT: {(): in_flight},
        metrics.FRONT_EJECTED: {(): ejected},
        metrics.FRONT_AGREEMENT_REQUESTS: {
            (*series, outcome): count for series, each in agreement_counts.items() for outcome, count in _outcomes(each)
        },
        metrics.FRONT_AGREEMENT_P95: {series: each.latency_p95_s for series, each in agreement_counts.items()},
    }


def _outcomes(each: AgreementCounts) -> Iterator[tuple[str, int]]:
    # Counted, not derived: the event loop goes on counting, and a difference could fall.
    yield "answered", sum(each.latencies)
    yield "refused", each.refused
    yield "late", each.late
    yield "error", each.errors
