"""What is remembered of one live move of a replica, and what the machine is shown of the region."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from shoal.coordinator.core.placement.model import Aim
from shoal.types import latency
from shoal.types.assignment import Observed
from shoal.types.codes import Refusal
from shoal.types.latency import Counts
from shoal.types.migration import MigrationRule, Verdict
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

NEVER: Final = Wall(0.0)
START: Final = Elapsed(0.0)
ALWAYS: Final = Elapsed(-math.inf)
P95: Final = 0.95
HELD_ANEW: Final = "held anew: who counts the requests began anew"
"""What the story says of a step whose counts broke off."""
USUAL_SAMPLES: Final = MigrationRule().samples


class Stage(StrEnum):
    """Where a migration is, as people read it."""

    PLANNED = "planned"
    """Waits for a place that can hold it beside the old one."""
    RESERVED = "reserved"
    """The new replica is assigned; its node has not taken it up."""
    STAGING = "staging"
    WARMING = "warming"
    VERIFYING = "verifying"
    CLEARING = "clearing"
    """The old one goes first: its device cannot hold both. Nobody serves from now on."""
    SHIFTING = "shifting"
    DRAINING = "draining"
    DONE = "done"
    ROLLING_BACK = "rolling_back"
    RETURNING = "returning"
    """The old one, which had gone, is loaded again."""
    ABORTED = "aborted"


class Cause(StrEnum):
    OPERATOR = "operator"
    DOCUMENTS = "documents"
    """What was applied asks for another place, model or precision."""
    DRAIN = "drain"
    """Its node is to be emptied."""
    LATENCY = "latency"
    SLO = "slo"
    """It is slower than its policy allows, or is about to be."""
    COST = "cost"
    ENERGY = "energy"
    CARBON = "carbon"
    PRICE = "price"
    """The objective is better elsewhere, or a limit is kept there. LATENCY, COST, ENERGY: that figure of the places
    makes most of the difference; CARBON, PRICE: it goes with the region's intensity, or its price of an hour."""
    SCHEDULE = "schedule"
    """Another objective holds at this time by the policy's `schedule`, and what it says otherwise would not ask for the
    move; or the way back, once that holds no more."""
    HEAT = "heat"
    """Its device is too hot, or slows itself down."""
    POWER = "power"
    """Its node draws more than it may."""
    NOTICE = "notice"
    """The region that runs it has given notice."""
    FAILBACK = "failback"
    """The place that it was taken from can have it again."""
    CONSOLIDATION = "consolidation"
    """Its device may sleep without it."""
    WAKE = "wake"
    """More is about to be asked of it than its place can do."""


@dataclass(frozen=True, slots=True)
class Place:
    """One replica. receipt_at: when the device's capability was measured; 0 where it has no receipt. region: of what
    another region runs: then `assignment` is the agreement, and node and device are empty."""

    assignment: str
    node: str
    device: str
    model: str
    precision: str
    receipt_at: Wall = NEVER
    region: str = ""

    @property
    def where(self) -> str:
        return self.region or f"{self.node}/{self.device}"


@dataclass(frozen=True, slots=True)
class Service:
    """What one replica gives and takes. latency_p95_s: at the worker, seconds; joules: per inference; cost: USD/h of
    its device; carbon: g/h at the declared rate. NaN where unknown. Of a workload that moves between regions: all its
    replicas together, and another region's latency with the way there and back."""

    latency_p95_s: float = math.nan
    joules: float = math.nan
    cost: float = math.nan
    carbon: float = math.nan


@dataclass(frozen=True, slots=True)
class Expected:
    """What a move is begun for, as predicted then. before, after: the replica that goes, the one that comes. gain: the
    share by which the workload's objective is better after it; negative where something else than that asks for it. Of
    a consolidation its energy is watts, with those of the device that may sleep and what moving and waking take.
    fetch_bytes: what the new one's node lacks of the model. seconds: from the new one's first to the old one's last."""

    before: Service
    after: Service
    gain: float
    fetch_bytes: Bytes
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Came:
    """What a move brought, measured over `over_s` after it was done. after: latency and joules of the `requests` since,
    and gain of that over what the old one was expected to go on with, NaN without any; of a consolidation with the
    watts of the device that sleeps, if it does. seconds: as in `Expected`. fetch_bytes: what the new one's node, or the
    other region, fetched of the model here; None: it was not counted all the time."""

    after: Service
    gain: float
    seconds: Seconds
    over_s: Seconds
    requests: int
    errors: int
    fetch_bytes: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A move that something speaks for. reason: in words, with the figures that say so. expected: None where what it is
    begun for is no figure of a replica (a notice). refusal: why it has nowhere to go. urgent: it has a deadline, and
    waits neither until its condition has held for a while, nor for `cooldown` or a window. fading: its condition fell
    below its threshold again, by less than the band: it is not over, and begins nothing. waits: where it could go was
    not looked at yet."""

    workload: WorkloadKey
    source: Place
    aim: Aim
    cause: Cause
    reason: str
    expected: Expected | None = None
    refusal: Refusal | None = None
    urgent: bool = False
    fading: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """What a replica has answered since it was ready, for all origins, as its worker counts it; what crosses between
    regions as this region's gateways do. latencies: of the answers, empty where an older node does not say. p95_s:
    theirs, less `way_s`; 0 without any. joules: NaN where unknown."""

    requests: int = 0
    errors: int = 0
    p95_s: float = 0.0
    joules: float = 0.0
    latencies: Counts = ()
    way_s: float = 0.0

    def since(self, before: "Figures") -> "Figures":
        """What came after `before`; all of it where the counters began anew."""
        counted = latency.since(self.latencies, before.latencies)
        if self.requests < before.requests or counted is None:
            return self
        after = replace(
            self,
            requests=self.requests - before.requests,
            errors=max(0, self.errors - before.errors),
            joules=self.joules - before.joules,
            latencies=counted,
        )
        return after.with_p95()

    def with_p95(self) -> "Figures":
        return replace(self, p95_s=self.quantile_s(P95))

    @property
    def surely_s(self) -> float:
        """What so few answers show of the p95: with a chance of 1 in 40 that it is shorter. 0 without any."""
        total = sum(self.latencies)
        return self.quantile_s(P95 - 2 * math.sqrt(P95 * (1 - P95) / total)) if total else 0.0

    def quantile_s(self, share: float) -> float:
        """Of `latencies`; 0 without any."""
        total = sum(self.latencies)
        found = latency.quantile(enumerate(self.latencies), total, max(0.0, share)) if total else 0.0
        return max(0.0, found - self.way_s)


# -- states -----------------------------------------------------------------------------------------------------------
# since: when it was entered. until: then it is given up, whatever it waits for.


@dataclass(frozen=True, slots=True)
class Planned:
    since: Elapsed
    until: Elapsed
    kind: Literal["planned"] = "planned"


@dataclass(frozen=True, slots=True)
class Preparing:
    """The new replica comes up and shows what it has to. stage: RESERVED, STAGING, WARMING or VERIFYING."""

    stage: Stage
    since: Elapsed
    until: Elapsed
    kind: Literal["preparing"] = "preparing"


@dataclass(frozen=True, slots=True)
class Alone:
    """Nobody serves: the old replica is to let go of its device, then the new one comes up there. stage: CLEARING, then
    STAGING, WARMING or VERIFYING. until: of the whole gap, whatever the stage."""

    stage: Stage
    since: Elapsed
    until: Elapsed
    kind: Literal["alone"] = "alone"


@dataclass(frozen=True, slots=True)
class Shifting:
    """The new replica takes `rule.steps[step]` of the old one's requests. source, target: figures as the step began.
    due: then the guard judges. stateful:
    at the last step the old one hands its sessions over, and goes when it has none."""

    step: int
    source: Figures
    target: Figures
    since: Elapsed
    due: Elapsed
    until: Elapsed
    stateful: bool = False
    kind: Literal["shifting"] = "shifting"


@dataclass(frozen=True, slots=True)
class Draining:
    """The old replica finishes what it has. There is no way back from here: it takes nothing any more."""

    since: Elapsed
    until: Elapsed
    kind: Literal["draining"] = "draining"


@dataclass(frozen=True, slots=True)
class RollingBack:
    """The old replica has all requests again, the new one goes. handing: not before the sessions that it has, of a
    stateful workload, are back with the old one."""

    refusal: Refusal
    since: Elapsed
    until: Elapsed
    handing: bool = False
    kind: Literal["rolling-back"] = "rolling-back"


@dataclass(frozen=True, slots=True)
class Returning:
    """The new replica is gone, and the old one, which had let go of the device, comes up again."""

    refusal: Refusal
    since: Elapsed
    until: Elapsed
    kind: Literal["returning"] = "returning"


@dataclass(frozen=True, slots=True)
class Done:
    """at: since when; target: what it had answered by then."""

    at: Elapsed = START
    target: Figures = Figures()
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Aborted:
    """at: since when; what is blocked after it ends by this."""

    refusal: Refusal
    at: Elapsed
    kind: Literal["aborted"] = "aborted"


State = Planned | Preparing | Alone | Shifting | Draining | RollingBack | Returning | Done | Aborted
Live = Planned | Preparing | Alone | Shifting | Draining | RollingBack | Returning


@dataclass(frozen=True, slots=True)
class Entered:
    """One line of a migration's story."""

    stage: Stage
    at: Wall
    note: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the guard read as a step of shifting ended, or was ended."""

    share: float
    source: Figures
    target: Figures
    held_s: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Migration:
    """target: None until it has a place. rule: as the policy was when it began. cleared: an operator took back what was
    held against its target after it, or its device was measured anew. reason: why it was begun, in words. expected:
    None until it has a place, where nothing told it before. came: None until it was done for a while. gap: its
    device cannot hold both replicas. dark_since: when the old one was sent away first; gap_s: for how long nobody
    served, None until somebody does again. asked: what its documents asked of others when an operator had it
    brought home."""

    id: str
    workload: WorkloadKey
    cause: Cause
    actor: str
    source: Place
    aim: Aim
    rule: MigrationRule
    state: State
    target: Place | None = None
    verdict: Verdict | None = None
    readings: tuple[Reading, ...] = ()
    story: tuple[Entered, ...] = ()
    cleared: bool = False
    reason: str = ""
    expected: Expected | None = None
    came: Came | None = None
    gap: bool = False
    dark_since: Wall | None = None
    gap_s: Seconds | None = None
    asked: str = ""

    @property
    def stage(self) -> Stage:
        match self.state:
            case Planned():
                return Stage.PLANNED
            case Preparing(stage=stage) | Alone(stage=stage):
                return stage
            case Returning():
                return Stage.RETURNING
            case Shifting():
                return Stage.SHIFTING
            case Draining():
                return Stage.DRAINING
            case RollingBack():
                return Stage.ROLLING_BACK
            case Done():
                return Stage.DONE
            case Aborted():
                return Stage.ABORTED

    @property
    def is_over(self) -> bool:
        return isinstance(self.state, Done | Aborted)

    @property
    def crosses(self) -> bool:
        """It moves a whole workload between this region and another."""
        return bool(self.aim.region)

    @property
    def leaves_home(self) -> bool:
        return self.crosses and not self.source.region


# -- what the machine sees --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sight:
    """One of the two replicas now. assigned: it is in a desired set. lost: its node, device or place is gone for good.
    seen: what its node says counts now. observed: as its node says, None where it has not. stateful: its
    requests are steps of sessions. counted: its node's front is there to count them. figures: of what it has answered,
    of a move between regions, as this region's gateways count it; None: as `observed` says."""

    assigned: bool = False
    lost: bool = False
    seen: bool = False
    observed: Observed | None = None
    stateful: bool = False
    counted: bool = True
    figures: Figures | None = None

    @property
    def has_sessions(self) -> bool:
        """Also where nobody can say."""
        return self.observed is None or not (self.seen and self.counted) or self.observed.sessions > 0


@dataclass(frozen=True, slots=True)
class Seen:
    """broken: why the new replica counts as failed. unwanted: why the region does not want this move any more, None
    where it does. waits: why it has no place yet. queued: it was not looked at, others of its
    workload come first. counts_since: since then one and the same counts the requests of both, and is heard; None:
    nobody does now."""

    source: Sight
    target: Sight
    broken: Refusal | None = None
    unwanted: Refusal | None = None
    waits: Refusal | None = None
    queued: bool = False
    counts_since: Elapsed | None = ALWAYS


@dataclass(frozen=True, slots=True)
class Told:
    """An event of a migration for the region's log."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a migration may stay in each state, where its rule does not say. settle_s: what routes take to reach
    every front. report_s: how much later than due a node's word may come. sample_s: more of `verify_s` for each sample
    beyond the usual ones. hand_s: for all sessions of a replica to go to the other."""

    planned_s: Seconds = Seconds(600.0)
    crossing_s: Seconds = Seconds(60.0)
    reserved_s: Seconds = Seconds(30.0)
    staging_s: Seconds = Seconds(900.0)
    warming_s: Seconds = Seconds(330.0)
    verify_s: Seconds = Seconds(60.0)
    rollback_s: Seconds = Seconds(60.0)
    settle_s: Seconds = Seconds(2.0)
    report_s: Seconds = Seconds(15.0)
    sample_s: Seconds = Seconds(1.0)
    hand_s: Seconds = Seconds(60.0)

    def verify_within(self, samples: int) -> Seconds:
        """What comparing so many inputs may take."""
        return Seconds(self.verify_s + self.sample_s * max(0, samples - USUAL_SAMPLES))
