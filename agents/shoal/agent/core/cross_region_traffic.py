"""Counts of the requests to and from other regions, by agreement: both sides of an agreement are judged by them."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from shoal.agent.core.histogram import Histogram
from shoal.agent.core.routing import AttemptFault, fault_of
from shoal.types.assignment import AgreementCounts
from shoal.types.codes import Code
from shoal.types.units import Seconds

P95_WINDOW: Final = 256
"""Newest answered requests of one agreement that its p95 is computed from."""
_RUN_FAILED: Final = frozenset({Code.INTERNAL, Code.RUNTIME_FAILED})
"""Errors that go back to the caller, because another replica would fail as well, but are not the caller's fault."""


@dataclass(slots=True)
class _CrossRegionCount:
    """Counters of the requests to or from another region under one agreement."""

    # All requests.
    requests: int = 0
    # Requests that failed through a fault of the serving side.
    errors: int = 0
    # Requests that failed through their client's fault, or that it cancelled.
    refused: int = 0
    # Requests that were not answered by their deadline.
    late: int = 0
    # Seconds of the newest answered requests, for the p95.
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=P95_WINDOW))
    # Seconds of all answered requests.
    latencies: Histogram = field(default_factory=Histogram)

    @property
    def p95_s(self) -> Seconds:
        ordered = sorted(self.seconds)
        return Seconds(ordered[(95 * len(ordered) - 1) // 100] if ordered else 0.0)


class CrossRegionTraffic:
    """The counts of one front since it started."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _CrossRegionCount] = {}

    def add(self, agreement: str, region: str, outcome: Seconds | Code) -> None:
        """Count one request to or from that region. `outcome` is the seconds to its answer, or why there is none.

        CANCELLED (its caller gave up) counts as the request's own fault.
        """
        count = self._counts.setdefault((agreement, region), _CrossRegionCount())
        count.requests += 1
        if not isinstance(outcome, Code):
            count.seconds.append(outcome)
            count.latencies.add(outcome)
            return
        fault = fault_of(outcome)
        count.late += fault is AttemptFault.LATE
        count.refused += fault is AttemptFault.REQUEST and outcome not in _RUN_FAILED
        count.errors += outcome in _RUN_FAILED or fault not in (AttemptFault.LATE, AttemptFault.REQUEST)

    def keep(self, agreements: Collection[str]) -> None:
        """Drop the counts of all other agreements."""
        self._counts = {key: each for key, each in self._counts.items() if key[0] in agreements}

    def agreement_counts(self) -> tuple[AgreementCounts, ...]:
        return tuple(
            AgreementCounts(
                *(agreement, region, each.requests, each.errors, each.p95_s, each.latencies.counts),
                refused=each.refused,
                late=each.late,
            )
            for (agreement, region), each in self._counts.items()
        )
