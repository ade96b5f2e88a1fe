"""Live migration of a replica: its stored state, and the observations that the state machine reads."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.placement.model import Aim
from shoal.types import latency
from shoal.types.assignment import Assignment, Observed
from shoal.types.codes import Refusal
from shoal.types.latency import Counts
from shoal.types.migration import UPGRADE_REMEDY, MigrationRule, Verdict
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey, variant_of

NEVER: Final = Wall(0.0)
START: Final = Elapsed(0.0)
ALWAYS: Final = Elapsed(-math.inf)
P95: Final = 0.95
RESTARTED_STEP_NOTE: Final = "held anew: who counts the requests began anew"
"""Note in the stages of a shift step that starts over because the request counters were reset."""
DEFAULT_SAMPLES: Final = MigrationRule().samples


class MigrationStage(StrEnum):
    """The stage of a migration, as commands and logs show it."""

    PLANNED = "planned"
    """It waits for a place that can hold the new replica beside the old one."""
    RESERVED = "reserved"
    """The new replica is assigned, but its node has not reported it yet."""
    STAGING = "staging"
    WARMING = "warming"
    VERIFYING = "verifying"
    CLEARING = "clearing"
    """The old replica leaves first because its device cannot hold both. No replica serves from here on."""
    SHIFTING = "shifting"
    DRAINING = "draining"
    DONE = "done"
    ROLLING_BACK = "rolling_back"
    RETURNING = "returning"
    """The old replica, which had left its device, loads again."""
    ABORTED = "aborted"


class Cause(StrEnum):
    OPERATOR = "operator"
    DOCUMENTS = "documents"
    """The applied documents ask for another place, model or precision."""
    DRAIN = "drain"
    """Its node is being drained."""
    LATENCY = "latency"
    SLO = "slo"
    """It is slower than its policy allows, or is about to be."""
    COST = "cost"
    ENERGY = "energy"
    CARBON = "carbon"
    PRICE = "price"
    OBJECTIVE = "objective"
    """The objective is better elsewhere, or a limit holds there. LATENCY, COST, ENERGY: this figure of the two
    places makes most of the difference. OBJECTIVE: the figure of a score term without a cause of its own does. CARBON
    follows the region's carbon intensity, PRICE its price of an hour."""
    SCHEDULE = "schedule"
    """An entry of the policy's `schedule` sets another objective at this time, and the usual objective would not ask
    for the move. Also the way back after that entry ends."""
    HEAT = "heat"
    """Its device is too hot or throttles."""
    POWER = "power"
    """Its node draws more power than it may."""
    NOTICE = "notice"
    """The region that runs it gave notice."""
    FAILBACK = "failback"
    """The place that it left can have it again."""
    CONSOLIDATION = "consolidation"
    """Its device can sleep once it has left."""
    PREEMPTION = "preemption"
    """A workload of higher priority needs its room."""
    WAKE = "wake"
    """The traffic declared for the time ahead exceeds what its place can do."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """One replica and where it runs: on a device of this region, or under an agreement in another region."""

    # Assignment id; the agreement's id if another region runs it.
    assignment: str
    # Node name; the region's name if another region runs it.
    node: str
    # Device name on the node; empty if another region runs it.
    device: str
    # Digest of the model.
    model: str
    # Precision that it runs in, e.g. fp16.
    precision: str
    # When the device's capability was measured; 0 if it has no receipt.
    receipt_at: Wall = NEVER
    # The other region that runs it; empty: this region does.
    region: str = ""
    # What stands in for the device, or for what the other region offered. Stored, so that it is still reported when
    # the node is gone.
    stand_in: str = ""
    # True: a node prepared the model in this precision.
    prepared: bool = False

    @property
    def variant(self) -> str:
        """As `workload.variant_of`."""
        return variant_of(self.model, self.precision if self.prepared else "")

    @property
    def where(self) -> str:
        """The place as people read it; devices that are not real are marked."""
        return (self.region or f"{self.node}/{self.device}") + (f" ({self.stand_in})" if self.stand_in else "")


def place_of(fleet: Fleet, node: str, one: Assignment) -> ReplicaPlace:
    """The place of `one` on `node`, by what the fleet reports of that node now."""
    state = fleet.nodes.get(node)
    receipt = state.receipts.get(one.device) if state is not None else None
    measured_at = receipt.measured_at if receipt is not None else NEVER
    stand_in = fleet.stand_in(node, one.device)
    return replica_place(node, one, stand_in, measured_at)


def replica_place(node: str, one: Assignment, stand_in: str, receipt_at: Wall = NEVER) -> ReplicaPlace:
    """The place of `one` on `node`, with what the fleet says of its device: as in `ReplicaPlace`."""
    return ReplicaPlace(
        assignment=one.id,
        node=node,
        device=one.device,
        model=one.model,
        precision=one.precision,
        receipt_at=receipt_at,
        stand_in=stand_in,
        prepared=one.preparation is not None,
    )


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """Service and cost of one replica; NaN where unknown. For a workload that moves between regions: all its
    replicas together."""

    # p95 latency at the worker, in seconds; for another region plus the RTT to it.
    latency_p95_s: float = math.nan
    # Joules per inference.
    joules: float = math.nan
    # USD/h of the device.
    cost: float = math.nan
    # g CO2/h at the declared request rate.
    carbon: float = math.nan


@dataclass(frozen=True, slots=True)
class ExpectedOutcome:
    """The prediction that a move is started for."""

    # The replica that leaves.
    before: ServiceFigures
    # The replica that takes over.
    after: ServiceFigures
    # Relative improvement of the workload's objective; negative if something else than the objective asks for the move.
    # For a consolidation its energy term is watts, including those of the device that may sleep, and what moving and
    # waking take.
    gain: float
    # Bytes of the model that the new replica's node still has to fetch.
    fetch_bytes: Bytes
    # From the start of the new replica to the end of the old one; NaN if unknown.
    seconds: Seconds
    # The part of them that earlier moves of the region took beyond what they waited for.
    overhead_s: Seconds = Seconds(0.0)


@dataclass(frozen=True, slots=True)
class ActualOutcome:
    """What a move achieved, measured over `over_s` after it was done."""

    # Latency and joules of the `requests` since then; NaN where nothing was measured.
    after: ServiceFigures
    # Relative improvement over the expected figures of the old replica; NaN without requests. For a consolidation it
    # includes the watts of the device that was to sleep, in the state that it is in.
    gain: float
    # Duration of the migration, from its first stages entry to its last.
    seconds: Seconds
    # Length of the measurement, in seconds.
    over_s: Seconds
    # Requests that the new replica got in that time.
    requests: int
    # Requests among them that failed.
    errors: int
    # Bytes of the model that the new replica's node, or the other region, fetched from here; None: they were not
    # counted for the whole time.
    fetch_bytes: Bytes | None = None


@dataclass(frozen=True, slots=True)
class MoveProposal:
    """A move that a trigger proposes."""

    # Workload of the replica.
    workload: WorkloadKey
    # The replica that would move.
    source: ReplicaPlace
    # Where it would go; empty if no place was searched or found.
    aim: Aim
    # Kind of the reason.
    cause: Cause
    # The reason in words, with its figures.
    reason: str
    # None if the reason is not a figure of a replica (a notice), or no place was searched or found.
    expected: ExpectedOutcome | None = None
    # Why there is no place to go; None if there is one, or none was searched.
    refusal: Refusal | None = None
    # It has a deadline: it waits neither for the condition to be sustained, nor for `cooldown` or a window.
    is_urgent: bool = False
    # The condition fell below its threshold again, but by less than the hysteresis band: it is not over, and starts
    # nothing.
    is_fading: bool = False
    # Its places were not searched in this scan.
    is_deferred: bool = False


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a replica has answered since it became ready, for all origins. Its worker counts; for a move between
    regions, the gateways of this region do."""

    # Requests, without those refused because of the client's own mistake.
    requests: int = 0
    # Requests among them that failed.
    errors: int = 0
    # p95 of `latencies` in seconds, less `way_s`; 0 without any.
    p95_s: float = 0.0
    # Joules of all requests; NaN if unknown.
    joules: float = 0.0
    # Histogram of the latencies; empty if an older node does not report it.
    latencies: Counts = ()
    # RTT in seconds to subtract from the latencies; 0 for replicas of this region.
    way_s: float = 0.0
    # Requests that their clients cancelled, or that missed the deadline that the client had set.
    late: int = 0

    def since(self, before: "RequestStats") -> "RequestStats":
        """The difference to `before`; all of it if the counters were reset in between."""
        counted = latency.subtract(self.latencies, before.latencies)
        if self.requests < before.requests or counted is None:
            return self
        after = replace(
            self,
            requests=self.requests - before.requests,
            errors=max(0, self.errors - before.errors),
            late=max(0, self.late - before.late),
            joules=self.joules - before.joules,
            latencies=counted,
        )
        return after.with_p95()

    def with_p95(self) -> "RequestStats":
        return replace(self, p95_s=self.quantile_s(P95))

    @property
    def p95_lower_bound_s(self) -> float:
        """Lower bound of the p95 given this few answers: the true one is below it with probability 1 in 40. 0
        without any."""
        total = sum(self.latencies)
        return self.quantile_s(P95 - 2 * math.sqrt(P95 * (1 - P95) / total)) if total else 0.0

    def quantile_s(self, share: float) -> float:
        """A quantile of `latencies`, less `way_s`; 0 without any."""
        total = sum(self.latencies)
        found = latency.quantile(enumerate(self.latencies), total, max(0.0, share)) if total else 0.0
        return max(0.0, found - self.way_s)


# -- states -----------------------------------------------------------------------------------------------------------
# since: when the state was entered. until: its deadline; then the migration gives it up, whatever it waits for.


@dataclass(frozen=True, slots=True)
class PlannedState:
    """It waits for a place."""

    # When it began to wait.
    since: Elapsed
    # Deadline for finding a place.
    until: Elapsed
    kind: Literal["planned"] = "planned"


@dataclass(frozen=True, slots=True)
class PreparingState:
    """The new replica starts and is verified."""

    # RESERVED, STAGING, WARMING or VERIFYING.
    stage: MigrationStage
    # When this stage began.
    since: Elapsed
    # Deadline of this stage.
    until: Elapsed
    # Discriminator of the stored form.
    kind: Literal["preparing"] = "preparing"


@dataclass(frozen=True, slots=True)
class GapState:
    """No replica serves: the old one leaves its device, then the new one starts there."""

    # CLEARING, then STAGING, WARMING or VERIFYING.
    stage: MigrationStage
    # When this stage began.
    since: Elapsed
    # Deadline of the whole gap, whatever the stage.
    until: Elapsed
    # Discriminator of the stored form.
    kind: Literal["alone"] = "alone"


@dataclass(frozen=True, slots=True)
class ShiftingState:
    """The new replica takes the share `rule.steps[step]` of the requests."""

    # Index into `rule.steps`.
    step: int
    # Counters of the old replica when the step began.
    source: RequestStats
    # Counters of the new replica when the step began.
    target: RequestStats
    # When the step began.
    since: Elapsed
    # When the guard judges the step.
    due: Elapsed
    # Deadline of the step.
    until: Elapsed
    # Sessions move: in the last step the old replica hands them over, and leaves when it has none. False where the
    # workload has none, and where the new replica cannot go on with their state: they end with the old one.
    stateful: bool = False
    # Discriminator of the stored form.
    kind: Literal["shifting"] = "shifting"


@dataclass(frozen=True, slots=True)
class DrainingState:
    """The old replica finishes its requests and takes no new ones. There is no way back from here."""

    since: Elapsed
    until: Elapsed
    kind: Literal["draining"] = "draining"


@dataclass(frozen=True, slots=True)
class RollingBackState:
    """The old replica has all requests again, and the new one leaves."""

    # Why the migration is rolled back.
    refusal: Refusal
    # When the rollback began.
    since: Elapsed
    # Deadline of the rollback.
    until: Elapsed
    # The new replica of a stateful workload still hands its sessions back, and drains only after that.
    handing: bool = False
    # Discriminator of the stored form.
    kind: Literal["rolling-back"] = "rolling-back"


@dataclass(frozen=True, slots=True)
class ReturningState:
    """The new replica is gone, and the old one, which had left the device, starts again."""

    refusal: Refusal
    since: Elapsed
    until: Elapsed
    kind: Literal["returning"] = "returning"


@dataclass(frozen=True, slots=True)
class DoneState:
    """The migration succeeded."""

    # When the old replica was gone, or its drain timed out.
    at: Elapsed = START
    # Counters of the new replica at that time.
    target: RequestStats = RequestStats()
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class AbortedState:
    """The migration failed."""

    # Why it was aborted.
    refusal: Refusal
    # When it was aborted; a temporary block on its target lasts from here.
    at: Elapsed
    kind: Literal["aborted"] = "aborted"


MigrationState = (
    PlannedState
    | PreparingState
    | GapState
    | ShiftingState
    | DrainingState
    | RollingBackState
    | ReturningState
    | DoneState
    | AbortedState
)
LiveMigrationState = (
    PlannedState | PreparingState | GapState | ShiftingState | DrainingState | RollingBackState | ReturningState
)


@dataclass(frozen=True, slots=True)
class StageEntry:
    """One entry in the stages of a migration."""

    # The stage that was entered.
    stage: MigrationStage
    # When it was entered.
    at: Wall
    # Details in words; empty: none.
    note: str = ""


@dataclass(frozen=True, slots=True)
class GuardReading:
    """What the guard read when a shift step ended or was cut short."""

    # Share of the requests that the new replica had.
    share: float
    # The old replica's requests of this step.
    source: RequestStats
    # The new replica's requests of this step.
    target: RequestStats
    # How long the step had lasted, in seconds.
    held_s: float
    # The new replica did well enough.
    passed: bool

    @property
    def is_conclusive(self) -> bool:
        """True if there was anything to judge: an answer of the new replica, or a failure of its own."""
        return not self.passed or self.target.requests > self.target.late


@dataclass(frozen=True, slots=True)
class Migration:
    """A live migration of one replica, or of a whole workload between regions, as it is stored."""

    # `m-` and a hash or the replica's id; unique within the region.
    id: str
    # Workload of the replica, or the one that moves as a whole.
    workload: WorkloadKey
    # Kind of the reason.
    cause: Cause
    # Operator who asked for it; empty: no operator did.
    actor: str
    # The replica that leaves; for a move between regions one that stands for all.
    source: ReplicaPlace
    # Where it is to go; empty parts are free.
    aim: Aim
    # The policy's migration rule when the migration began.
    rule: MigrationRule
    # State with what holds in it.
    state: MigrationState
    # The replica that takes over; None until it has a place.
    target: ReplicaPlace | None = None
    # Result of the verification; None until there is one.
    verdict: Verdict | None = None
    # One entry for each judged shift step, oldest first.
    readings: tuple[GuardReading, ...] = ()
    # Every stage entered, oldest first.
    stages: tuple[StageEntry, ...] = ()
    # The block on its target is lifted: by an operator, or because it no longer applies (the device was measured
    # again).
    cleared: bool = False
    # Why it began, in words.
    reason: str = ""
    # None until it has a place, unless it was proposed with a prediction.
    expected: ExpectedOutcome | None = None
    # What it achieved; None until it has been done for a while, or if that could not be measured.
    came: ActualOutcome | None = None
    # The device cannot hold both replicas, so the old one leaves first.
    gap: bool = False
    # When the old replica was sent away first; None: it was not.
    dark_since: Wall | None = None
    # How long no replica served, in seconds; None until one serves again.
    gap_s: Seconds | None = None
    # Hash of what its documents asked of other regions when an operator moved it back to this region; empty otherwise.
    asked: str = ""

    @property
    def stage(self) -> MigrationStage:
        match self.state:
            case PlannedState():
                return MigrationStage.PLANNED
            case PreparingState(stage=stage) | GapState(stage=stage):
                return stage
            case ReturningState():
                return MigrationStage.RETURNING
            case ShiftingState():
                return MigrationStage.SHIFTING
            case DrainingState():
                return MigrationStage.DRAINING
            case RollingBackState():
                return MigrationStage.ROLLING_BACK
            case DoneState():
                return MigrationStage.DONE
            case AbortedState():
                return MigrationStage.ABORTED

    @property
    def is_over(self) -> bool:
        return isinstance(self.state, DoneState | AbortedState)

    @property
    def is_cross_region(self) -> bool:
        """True if it moves a whole workload between this region and another."""
        return bool(self.aim.region)

    @property
    def leaves_region(self) -> bool:
        return self.is_cross_region and not self.source.region

    @property
    def remedy(self) -> str:
        """What to do about answers that differ from the serving replica's; empty if both have the same model."""
        return UPGRADE_REMEDY if self.target is not None and self.target.model != self.source.model else ""


# -- what the machine sees --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaObservation:
    """One of the two replicas as it is now."""

    # It is in a desired set.
    is_assigned: bool = False
    # Its node, device or place is gone for good.
    is_lost: bool = False
    # The node's last report is current.
    is_current: bool = False
    # The node's report of it; None if there is none.
    observed: Observed | None = None
    # Its requests are steps of sessions.
    is_stateful: bool = False
    # The front of its node is up and counts its requests.
    is_counted: bool = True
    # Its counters for a move between regions, kept by this region's gateways; None: take those of `observed`.
    stats: RequestStats | None = None

    @property
    def has_sessions(self) -> bool:
        """True also if the number of sessions is unknown."""
        return self.observed is None or not (self.is_current and self.is_counted) or self.observed.sessions > 0


@dataclass(frozen=True, slots=True)
class MigrationObservation:
    """What the state machine reads of the region in one step."""

    # The replica that leaves.
    source: ReplicaObservation
    # The replica that takes over.
    target: ReplicaObservation
    # Why the new replica counts as failed; None: it does not.
    target_failure: Refusal | None = None
    # Why the region no longer wants this move; None: it does.
    obsolete_reason: Refusal | None = None
    # Why it has no place yet; None if nothing stands in its way.
    placement_refusal: Refusal | None = None
    # Placement did not try it because other moves go first.
    is_queued: bool = False
    # Since when the same gateways have counted the requests of both replicas without a break; None: none does now.
    counts_since: Elapsed | None = ALWAYS


@dataclass(frozen=True, slots=True)
class MigrationEvent:
    """An event of a migration for the region's log."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """How long a migration may stay in each stage, in seconds, where its rule does not say."""

    # Waiting for a place in this region.
    planned_s: Seconds = Seconds(600.0)
    # Waiting for a place, for a move between regions.
    planned_cross_region_s: Seconds = Seconds(60.0)
    # Until the node reports the new replica.
    reserved_s: Seconds = Seconds(30.0)
    # Fetching and loading the model.
    staging_s: Seconds = Seconds(900.0)
    # Warming up, also of an old replica that returns.
    warming_s: Seconds = Seconds(330.0)
    # Comparing the default number of samples.
    verify_s: Seconds = Seconds(60.0)
    # Removing a replica, beyond its drain.
    rollback_s: Seconds = Seconds(60.0)
    # Until routes reach every front.
    route_propagation_s: Seconds = Seconds(2.0)
    # How late a node's report may arrive.
    report_s: Seconds = Seconds(15.0)
    # Added to `verify_s` for each sample beyond the default.
    sample_s: Seconds = Seconds(1.0)
    # Handing all sessions of a replica to the other.
    handover_s: Seconds = Seconds(60.0)

    def verify_timeout_s(self, samples: int) -> Seconds:
        """Time allowed for comparing this many inputs."""
        return Seconds(self.verify_s + self.sample_s * max(0, samples - DEFAULT_SAMPLES))
