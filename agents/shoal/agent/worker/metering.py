"""Metering of one replica by origin of its requests: counts, errors, latency, busy time, joules."""

import bisect
import math
import threading
from typing import Final

from shoal.agent.core.histogram import Histogram
from shoal.agent.ports import BATCHES, Batches
from shoal.agent.worker.energy import Energy
from shoal.types.assignment import Served
from shoal.types.latency import Counts
from shoal.types.units import Joules, Seconds

MAX_ORIGINS: Final = 256
OTHERS: Final = "others"
"""Origins beyond the first 256 are counted together, so that invented names cannot fill the memory."""


class _Account:
    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.refused = 0
        self.late = 0
        self.pace_missed = 0
        self.busy_s = 0.0
        self.latency = Histogram()


class Metering:
    """Runner threads call it. A reader gets a consistent view."""

    def __init__(self, energy: Energy) -> None:
        self._energy = energy
        self._accounts: dict[str, _Account] = {}
        self._batches = [0] * (len(BATCHES) + 1)
        self._inputs = 0
        self._lock = threading.Lock()

    def record_answer(
        self, origin: str, latency_s: float, busy_s: float, *, pace_missed: bool = False, batch: int | None = 1
    ) -> None:
        """`latency_s`: from arrival to answer. `busy_s`: the device's part of it. Both in device time on an emulated
        device. `batch`: inputs of its run; None: they were counted with another answer of that run."""
        with self._lock:
            if batch is not None:
                self._batches[bisect.bisect_left(BATCHES, batch)] += 1
                self._inputs += batch
            account = self._account(origin)
            account.requests += 1
            account.busy_s += busy_s
            account.pace_missed += pace_missed
            account.latency.add(latency_s)

    def record_failure(self, origin: str, busy_s: float, *, own_fault: bool, is_late: bool = False) -> None:
        """`own_fault`: the request was well formed and still got no answer. `is_late`: its client cancelled it, or its
        deadline passed.

        Only a comparison with another replica can tell whether that deadline was long enough.
        """
        with self._lock:
            account = self._account(origin)
            account.requests += 1
            account.late += is_late
            account.errors += own_fault and not is_late
            account.refused += not own_fault and not is_late
            account.busy_s += busy_s

    def batches(self) -> Batches:
        with self._lock:
            return Batches(tuple(self._batches), self._inputs)

    def latencies(self) -> Counts:
        """Latencies of all answered requests, whatever their origin."""
        with self._lock:
            return Histogram.of(account.latency for account in self._accounts.values()).counts

    def totals_by_origin(self) -> tuple[Served, ...]:
        with self._lock:
            joules = self._energy.joules({origin: account.busy_s for origin, account in self._accounts.items()})
            return tuple(
                Served(
                    origin=origin,
                    requests=account.requests,
                    errors=account.errors,
                    latency_p50_s=Seconds(account.latency.quantile(0.5)),
                    latency_p95_s=Seconds(account.latency.quantile(0.95)),
                    joules=Joules(joules.get(origin, math.nan)),
                    energy_source=self._energy.source,
                    pace_missed=account.pace_missed,
                    refused=account.refused,
                    late=account.late,
                )
                for origin, account in self._accounts.items()
            )

    def _account(self, origin: str) -> _Account:
        if origin not in self._accounts and len(self._accounts) >= MAX_ORIGINS:
            origin = OTHERS
        return self._accounts.setdefault(origin, _Account())
