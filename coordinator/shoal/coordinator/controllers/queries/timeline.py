"""Measures the region every ten seconds for the timeline, in slices, and keeps its coarse steps in the store.

The store has one key for each coarse step of a day, which the next day's step replaces: it is bounded by itself.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from shoal.coordinator import codec
from shoal.coordinator.controllers.fleet.controller import FleetController
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.timeline import COARSE, FINE, REGION, SUBJECTS_MOST, CoarseStep, Timeline, Values
from shoal.coordinator.ports import StaleRevision
from shoal.types.assignment import Observed, Phase
from shoal.types.codes import ShoalError
from shoal.types.latency import Counts, bucket_of, merge, quantile, subtract
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import Intent, WorkloadKey

STEPS: Final = "timeline/"
SLICE_NODES: Final = 25
SLICE_WORKLOADS: Final = 50
"""Nodes, and workloads, that are read before the loop gets its turn."""

log: Final = structlog.get_logger("shoal.coordinator")


@dataclass(slots=True)
class Sums:
    """What one workload did since the last measurement, over all nodes."""

    # That entered the region.
    requests: int = 0
    # That were sent to a replica and got neither an answer nor a refusal.
    lost: int = 0
    # Finished by its replicas, without those that their clients ended or got wrong.
    served: int = 0
    # Of `served`: not answered.
    errors: int = 0
    # Inferences whose energy is known.
    metered: int = 0
    # Their energy.
    joules: float = 0.0
    # Histogram of what was answered.
    latencies: Counts = ()
    # Replicas that are ready now.
    ready: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """What one replica did since it became ready."""

    # Finished, without those that their clients ended or got wrong.
    requests: int
    # Of `requests`: not answered.
    errors: int
    # Inferences whose energy is known.
    metered: int
    # Their energy.
    joules: float
    # Histogram of what was answered.
    latencies: Counts

    @classmethod
    def of(cls, observed: Observed) -> "ReplicaCounts":
        metered = [each for each in observed.served if math.isfinite(each.joules)]
        return cls(
            sum(each.successes + each.errors for each in observed.served),
            sum(each.errors for each in observed.served),
            sum(each.requests for each in metered),
            math.fsum(each.joules for each in metered),
            observed.latencies,
        )

    def since(self, before: "ReplicaCounts | None") -> "ReplicaCounts":
        """What came after `before`; all of it, where the replica was loaded again meanwhile."""
        latencies = subtract(self.latencies, before.latencies) if before is not None else None
        if before is None or latencies is None or self.requests < before.requests:
            return self
        return ReplicaCounts(
            self.requests - before.requests,
            max(0, self.errors - before.errors),
            max(0, self.metered - before.metered),
            max(0.0, self.joules - before.joules),
            latencies,
        )


NOTHING: Final = ReplicaCounts(0, 0, 0, 0.0, ())


@dataclass(slots=True)
class Reading:
    """One look at all counters, and what changed since the look before it."""

    # By workload.
    sums: defaultdict[WorkloadKey, Sums] = field(default_factory=lambda: defaultdict(Sums))
    # What devices draw now, of those that say it.
    watts: float = math.nan
    # By assignment: its last report, and the counts in it.
    served: dict[str, tuple[Observed, ReplicaCounts]] = field(default_factory=dict)
    # Requests and losses since their front started, by node, workload and origin.
    entered: dict[tuple[str, WorkloadKey, str], tuple[int, int]] = field(default_factory=dict)

    def add(self, state: NodeState, before: "Reading | None") -> None:
        """before: the last look; None: this is the first, in which nothing has happened yet."""
        for each in state.ingress:
            at = (state.name, each.workload, each.origin)
            counted = self.entered[at] = (each.requests, each.lost)
            # Of one that was not there before, nobody knows since when it counts: gateways tell of many in parts.
            known = before.entered.get(at, counted) if before is not None else counted
            if known[0] > counted[0]:  # its front started again
                known = (0, 0)
            sums = self.sums[each.workload]
            sums.requests += counted[0] - known[0]
            sums.lost += max(0, counted[1] - known[1])
        for name, observed in state.observed.items():
            self._add_served(name, observed, before)
        drawn = [
            reading.power_w
            for reading in state.readings.values()
            if math.isfinite(reading.power_w) and _has_own_meter(state, reading.device)
        ]
        if drawn and state.connected:
            self.watts = math.fsum((0.0 if math.isnan(self.watts) else self.watts, *drawn))

    def _add_served(self, name: str, observed: Observed, before: "Reading | None") -> None:
        known = before.served.get(name) if before is not None else None
        sums = self.sums[observed.workload]
        sums.ready += observed.phase is Phase.READY
        if known is not None and known[0] is observed:
            self.served[name] = known
            return
        total = ReplicaCounts.of(observed)
        self.served[name] = (observed, total)
        did = total.since(known[1] if known is not None else None) if before is not None else NOTHING
        sums.served += did.requests
        sums.errors += did.errors
        sums.metered += did.metered
        sums.joules += did.joules
        if did.latencies:
            sums.latencies = merge(sums.latencies, did.latencies)


class TimelineController:
    """carbon: of the region, g/kWh; NaN where nobody says."""

    def __init__(
        self,
        context: RegionContext,
        workloads: WorkloadsController,
        fleet: FleetController,
        carbon: Callable[[], float],
    ) -> None:
        self.timeline = Timeline()
        self.revision = 0
        """Grows with each measurement."""
        self._context = context
        self._clock = context.clock
        self._workloads = workloads
        self._fleet = fleet
        self._carbon = carbon
        self._before: Reading | None = None
        self._measured_at = Elapsed(0.0)

    async def start(self) -> None:
        """Reads the coarse steps of the last day. One that cannot be read is left out, and logged: figures decide
        nothing."""
        newest = int(self._clock.wall() // COARSE.step_s)
        for record in await self._context.store.scan(STEPS):
            try:
                step = codec.load(CoarseStep, record.value)
            except ShoalError as error:
                log.warning("timeline_step_unreadable", key=record.key, code=error.code, error=str(error))
                continue
            if newest - COARSE.steps < step.number <= newest:
                self.timeline.restore(step)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(Seconds(FINE.step_s - self._clock.wall() % FINE.step_s))
            await self.measure()

    async def measure(self) -> None:
        fleet, intents, now = self._fleet.fleet, self._workloads.intents, self._clock.now()
        reading = Reading()
        for number, state in enumerate(fleet.nodes.values()):
            reading.add(state, self._before)
            if number % SLICE_NODES == SLICE_NODES - 1:
                await asyncio.sleep(0)
        passed_s = now - self._measured_at if self._before is not None else math.nan
        self._before, self._measured_at = reading, now
        values = await self._values(reading, fleet, intents, passed_s)
        ended = self.timeline.add(self._clock.wall(), values)
        self.revision += 1
        if ended is not None:
            await self._store(ended)

    async def _values(
        self, reading: Reading, fleet: Fleet, intents: tuple[Intent, ...], passed_s: float
    ) -> Mapping[str, Values]:
        costs: dict[WorkloadKey, float] = {}
        for (key, _), rate in self._workloads.cost_rates.items():
            costs[key] = costs.get(key, 0.0) + rate
        carbon = self._carbon()
        found = {REGION: region_values(reading, fleet, passed_s, costs, carbon)}
        for number, intent in enumerate(intents[:SUBJECTS_MOST]):
            cost = costs.get(intent.key, math.nan)
            found[str(intent.key)] = workload_values(reading.sums[intent.key], intent, passed_s, cost, carbon)
            if number % SLICE_WORKLOADS == SLICE_WORKLOADS - 1:
                await asyncio.sleep(0)
        return found

    async def _store(self, step: CoarseStep) -> None:
        key = f"{STEPS}{step.number % COARSE.steps:03}"
        try:
            await self._context.events.commit({key: codec.dump(step)})
        except (ShoalError, StaleRevision) as error:
            log.debug("timeline_write_failed", error=str(error))


def workload_values(sums: Sums, intent: Intent, passed_s: float, cost: float, carbon: float) -> Values:
    """In the order of timeline.FIGURES. passed_s: since the last measurement; NaN: there was none."""
    answered, bound = sum(sums.latencies), intent.require.latency_p95_s
    occurring = ((bucket, count) for bucket, count in enumerate(sums.latencies) if count)
    within = math.nan
    if bound is not None and answered + sums.errors:
        within = sum(sums.latencies[: bucket_of(bound) + 1]) / (answered + sums.errors)
    return (
        sums.requests / passed_s,
        sums.lost / passed_s,
        quantile(occurring, answered, 0.95),
        within,
        sums.joules / sums.metered if sums.metered else math.nan,
        cost,
        sums.joules / passed_s * carbon / 1000.0,
        min(1.0, sums.ready / intent.require.replicas) if intent.require.replicas else math.nan,
    )


def region_values(
    reading: Reading, fleet: Fleet, passed_s: float, costs: Mapping[WorkloadKey, float], carbon: float
) -> Values:
    """As `workload_values`. Its p95 and its share within a bound are left out: workloads have bounds of their own."""
    every = reading.sums.values()
    ready = sum(state.liveness is Liveness.READY for state in fleet.nodes.values())
    return (
        sum(each.requests for each in every) / passed_s,
        sum(each.lost for each in every) / passed_s,
        math.nan,
        math.nan,
        reading.watts,
        math.fsum(costs.values()),
        math.fsum(each.joules for each in every) / passed_s * carbon / 1000.0,
        ready / len(fleet.nodes) if fleet.nodes else math.nan,
    )


def _has_own_meter(state: NodeState, device: str) -> bool:
    """False for a device whose power another device of its node counts too."""
    found = state.device(device)
    return found is not None and found.power_root == found.name
