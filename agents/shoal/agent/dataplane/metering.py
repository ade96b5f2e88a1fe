"""What entered the region at this front, by workload and origin, and how it ended: demand, and the truth about loss."""

import bisect
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.agent.core.histogram import Histogram
from shoal.agent.core.routing import Fault
from shoal.types.assignment import Crossing, Ingress
from shoal.types.codes import Code
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

LOST_CODES: Final = frozenset(
    {Code.REPLICA_UNREACHABLE, Code.WORKER_CRASHED, Code.REQUEST_CRASHED_WORKER, Code.DEADLINE_EXCEEDED, Code.INTERNAL}
)
"""Refusals that leave open whether a replica did the work: the request was sent and has no answer."""
NEWEST: Final = 256
"""Answered requests of one agreement that its p95 is of."""
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class _Count:
    requests: int = 0
    answered: int = 0
    retried: int = 0
    refused: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Latency:
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    seconds: float = 0.0


@dataclass(slots=True)
class _Crossed:
    requests: int = 0
    errors: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    latencies: Histogram = field(default_factory=Histogram)

    @property
    def p95_s(self) -> Seconds:
        ordered = sorted(self.seconds)
        return Seconds(ordered[(95 * len(ordered) - 1) // 100] if ordered else 0.0)


class Meter:
    """Counts since the front started. requests = answered + refused + lost + those inside; retried: requests that took
    more than one attempt. A request that its caller gave up counts as refused."""

    def __init__(self) -> None:
        self._counts: dict[tuple[WorkloadKey, str], _Count] = {}
        self._latencies: dict[WorkloadKey, _Latency] = {}
        self._crossed: dict[tuple[str, str], _Crossed] = {}
        self.codes: Counter[Code] = Counter()
        """Refusals of all calls, also of those that entered elsewhere or asked for nothing we know."""

    def entered(self, workload: WorkloadKey, origin: str) -> None:
        self._count(workload, origin).requests += 1

    def answered(self, workload: WorkloadKey, origin: str, attempts: int, seconds: Seconds) -> None:
        count = self._count(workload, origin)
        count.answered += 1
        count.retried += attempts > 1
        latency = self._latencies.setdefault(workload, _Latency())
        latency.buckets[bisect.bisect_left(_BUCKETS, seconds)] += 1
        latency.seconds += seconds

    def ended(self, workload: WorkloadKey, origin: str, attempts: int, code: Code) -> None:
        """Without an answer. attempts: 0 when it was turned away before it was sent."""
        count = self._count(workload, origin)
        count.retried += attempts > 1
        if attempts and code in LOST_CODES:
            count.lost += 1
        else:
            count.refused += 1

    def crossed(self, agreement: str, region: str, outcome: Seconds | Fault) -> None:
        """One request left for that region, or came from it. outcome: until its answer, or whose fault there is none.
        Given up by its caller counts as the request's own."""
        count = self._crossed.setdefault((agreement, region), _Crossed())
        count.requests += 1
        if not isinstance(outcome, Fault):
            count.seconds.append(outcome)
            count.latencies.add(outcome)
        elif outcome is not Fault.REQUEST:
            count.errors += 1

    def forget(self, agreements: Collection[str]) -> None:
        """All crossings but of these agreements."""
        self._crossed = {key: each for key, each in self._crossed.items() if key[0] in agreements}

    def crossings(self) -> tuple[Crossing, ...]:
        return tuple(
            Crossing(agreement, region, each.requests, each.errors, each.p95_s, each.latencies.counts)
            for (agreement, region), each in self._crossed.items()
        )

    def ingress(self) -> tuple[Ingress, ...]:
        return tuple(
            Ingress(workload, origin, each.requests, each.answered, each.retried, each.refused, each.lost)
            for (workload, origin), each in self._counts.items()
        )

    def latencies(self) -> Iterator[tuple[WorkloadKey, list[tuple[str, float]], float]]:
        """(workload, cumulative buckets as Prometheus wants them, sum of seconds)."""
        bounds = (*map(str, _BUCKETS), "+Inf")
        for workload, latency in tuple(self._latencies.items()):
            counts = map(float, itertools.accumulate(latency.buckets))
            yield workload, list(zip(bounds, counts, strict=True)), latency.seconds

    def _count(self, workload: WorkloadKey, origin: str) -> _Count:
        return self._counts.setdefault((workload, origin), _Count())


class FrontCollector(Collector):
    """`shoal_front_*` of one meter, made when scraped: nothing is paid for it while serving."""

    def __init__(self, meter: Meter, in_flight: Callable[[], int], ejected: Callable[[], int]) -> None:
        self._meter = meter
        self._in_flight = in_flight
        self._ejected = ejected

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "shoal_front_requests", "requests that entered here", labels=("tenant", "workload", "origin", "outcome")
        )
        for each in self._meter.ingress():
            key = (each.workload.tenant, each.workload.name, each.origin)
            for outcome in ("answered", "retried", "refused", "lost"):
                requests.add_metric((*key, outcome), getattr(each, outcome))
        yield requests
        refusals = CounterMetricFamily("shoal_front_refusals", "refusals of any call, by code", labels=("code",))
        for code, count in tuple(self._meter.codes.items()):
            refusals.add_metric((code,), count)
        yield refusals
        seconds = HistogramMetricFamily(
            "shoal_front_request_seconds", "from a request's arrival to its answer", labels=("tenant", "workload")
        )
        for workload, buckets, total in self._meter.latencies():
            seconds.add_metric(workload, buckets, total)
        yield seconds
        yield from self._crossings()
        yield GaugeMetricFamily("shoal_front_in_flight", "requests inside the front", value=self._in_flight())
        yield GaugeMetricFamily("shoal_front_ejected", "replicas that get nothing now", value=self._ejected())

    def _crossings(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "shoal_front_crossings",
            "requests that left for another region or came from it",
            labels=("agreement", "counterpart", "outcome"),
        )
        p95 = GaugeMetricFamily(
            "shoal_front_crossing_p95_seconds",
            f"of the newest {NEWEST} answered requests of an agreement",
            labels=("agreement", "counterpart"),
        )
        for each in self._meter.crossings():
            requests.add_metric((each.agreement, each.region, "all"), each.requests)
            requests.add_metric((each.agreement, each.region, "error"), each.errors)
            p95.add_metric((each.agreement, each.region), each.latency_p95_s)
        yield requests
        yield p95
