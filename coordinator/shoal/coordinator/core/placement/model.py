"""What placement reads and what it answers. The answer mirrors `WorkloadPlan` of the operator API."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.prediction.model import Prediction
from shoal.types.assignment import Assignment, Measured
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.migration import DRAIN_S
from shoal.types.profile import ModelProfile
from shoal.types.signature import PublisherKey, SignedModel
from shoal.types.units import Bytes, Elapsed, Seconds, UsdPerHour, Wall
from shoal.types.workload import Declared, Intent, PartitionRule, Quota, Relaxation, Requirements, Standby, WorkloadKey


class Triple(NamedTuple):
    """What a crash is blamed on: poisoned across the fleet until one of the three changes."""

    model: str
    provider: str
    runtime_version: str


class Slot(NamedTuple):
    """One device of one node."""

    node: str
    device: str


class Trial(NamedTuple):
    """One model (by digest) on one device: what was measured there is remembered by this."""

    model: str
    node: str
    device: str


@dataclass(frozen=True, slots=True)
class RegionFacts:
    """name: the region's. residency: the label of `Region.location`. carbon_g_per_kwh: NaN where unknown.
    sleep_after_s: a device that can sleep does so when nothing has been on it for so long; None: it stays awake."""

    name: str
    residency: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    carbon_g_per_kwh: float = float("nan")
    sleep_after_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """One applied or proposed document; digest: SHA-256 of its normalised content."""

    kind: str
    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Publisher:
    """A key that the region knows. until: when it stops to count; None: never."""

    key: PublisherKey
    until: Wall | None = None


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """A model's signature that verifies under the region's key `key`. allow_version: as in SignedModel."""

    key: str
    bundle: bytes
    version: int
    expires_at: Wall | None
    allow_version: int = 0


@dataclass(frozen=True, slots=True)
class Signatures:
    """keys: those that the region declares, by name. models: by digest, what those keys signed."""

    keys: Mapping[str, Publisher] = field(default_factory=dict)
    models: Mapping[str, tuple[ModelSignature, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room on one device that is kept for a workload of tenant `guests`: a bid that is held, or an agreement without a
    replica yet. bid: the workload's name; it alone may take this room. busy: share of the device's time."""

    bid: str
    slot: Slot
    memory_bytes: Bytes
    busy: float


@dataclass(frozen=True, slots=True)
class Aim:
    """Where a replica that moves may go. Empty: anywhere but where it is. region: a workload that goes to another
    region, or comes home from one."""

    node: str = ""
    device: str = ""
    model: str = ""
    region: str = ""

    @classmethod
    def parse(cls, text: str) -> "Aim":
        """`NODE` or `NODE/DEVICE`. Raises ShoalError(FIELD_INVALID)."""
        node, _, device = text.partition("/")
        if not node or "/" in device or (not device and "/" in text):
            raise refuse(Code.FIELD_INVALID, f"target {text!r:.80}", "NODE or NODE/DEVICE", "see `shoal get devices`")
        return cls(node, device)

    @property
    def where(self) -> str:
        """Empty: anywhere."""
        return self.region or "/".join(filter(None, (self.node, self.device)))

    def allows(self, node: str, device: str, model: str) -> bool:
        return self.node in ("", node) and self.device in ("", device) and self.model in ("", model)


@dataclass(frozen=True, slots=True)
class Move:
    """What a live migration wants of the region now. source, target: assignments; target is empty until it has a place
    (then `aim` counts). share: of the source's requests that the target takes. leaves: which of the two is to go now,
    empty: none; drain_s: what it has to finish in. why: said of the one that does not count as a replica any more.
    stays: what leaves does not drain yet, it has sessions to hand over. gap: one device holds the larger of both, and
    not both at once. holds: those of the two that are to be staged."""

    migration: str
    workload: WorkloadKey
    source: str
    why: Refusal
    target: str = ""
    aim: Aim = Aim()
    share: float = 0.0
    leaves: str = ""
    drain_s: Seconds = DRAIN_S
    stays: bool = False
    gap: bool = False
    holds: tuple[str, ...] = ()

    @property
    def uncounted(self) -> str:
        """The assignment that does not count as a replica: the source, but for a move that is rolled back."""
        return self.target if self.target and self.leaves == self.target else self.source


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that placement looks at: the same inputs give the same plan, in whatever order the mappings were filled.

    profiles: by model digest. desired: every node's assignments as last decided, draining ones included; the others are
    the current replicas. terms: by assignment id, what its workload asked when it was last confirmed (`terms_of`); one
    that was confirmed under other terms yields to a gain. broken: assignments that do not count as replicas any more,
    and why (`workloads.trouble`). measured: warm-up figures remembered from earlier replicas. costs: USD/h of a whole
    device; absent = unknown. rtt_s: from a traffic origin to this region; absent = 0. seed breaks ties. elsewhere:
    workloads that another region runs under an agreement: no replica of theirs is wanted here. reserved: counts as
    taken. moves: of its two replicas one counts. blocked: places that may not take over a workload's model, and why.
    """

    region: RegionFacts
    fleet: Fleet
    intents: tuple[Intent, ...]
    profiles: Mapping[str, ModelProfile]
    desired: Mapping[str, tuple[Assignment, ...]]
    now: Elapsed
    wall: Wall
    seed: int = 0
    documents: tuple[DocumentRef, ...] = ()
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    terms: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, Refusal] = field(default_factory=dict)
    poisoned: frozenset[Triple] = frozenset()
    measured: Mapping[Trial, Measured] = field(default_factory=dict)
    costs: Mapping[Slot, UsdPerHour] = field(default_factory=dict)
    rtt_s: Mapping[str, Seconds] = field(default_factory=dict)
    signatures: Signatures = field(default_factory=Signatures)
    elsewhere: frozenset[WorkloadKey] = frozenset()
    reserved: tuple[Reservation, ...] = ()
    moves: tuple[Move, ...] = ()
    blocked: Mapping[tuple[WorkloadKey, Trial], Refusal] = field(default_factory=dict)


def terms_of(intent: Intent) -> str:
    """What a workload's documents ask of a placement, as a short hash: equal terms are no reason to move. Nor is a
    standby that is asked for, or not any more, nor what a schedule changes for a time: that is for triggers to see."""
    declared = intent.declared or Declared(intent.weights, intent.traffic)
    asked = (
        intent.models,
        without_standby(intent.require),
        intent.limits,
        declared.weights,
        tuple(replace(step, require=without_standby(step.require)) for step in intent.relax),
        declared.traffic,
        intent.schedule,
        intent.shared_worker,
        intent.max_batch,
    )
    return hashlib.blake2b(repr(asked).encode(), digest_size=8).hexdigest()


def without_standby(require: Requirements) -> Requirements:
    """What is asked of the replicas for requests."""
    return replace(require, standby=Standby.NONE)


@dataclass(frozen=True, slots=True)
class ScoreTerm:
    """normalised: 0 (best) to 1 over the workload's feasible candidates; unknown values count as 1."""

    name: str
    weight: float
    value: float
    unit: str
    normalised: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One (device, model variant) for one workload. refusal: the first constraint that excluded it; None: feasible.

    nearest: what would make it fit, as one would type it; empty when feasible. score: 0 best, NaN when excluded.
    standby: chosen to stand by; `chosen` is for requests.
    """

    node: str
    device: str
    model: str
    precision: str
    emulated: bool
    chosen: bool
    current: bool
    score: float
    terms: tuple[ScoreTerm, ...]
    prediction: Prediction | None
    cost_usd_per_h: float
    carbon_g_per_h: float
    refusal: Refusal | None
    nearest: str
    pareto: bool
    standby: bool = False


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """sign: `+` a new replica, `-` one that goes, `=` one that stays."""

    sign: str
    node: str
    device: str
    model: str
    precision: str
    assignment: str
    why: str


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that shall exist. keeps: the current assignment that is this replica; empty: a new one.

    signed: what its node is to verify; None where its policy asks for no signature. busy: share of the device's time
    that its declared traffic takes. standby: it takes requests when no other replica does. moves: the migration that
    waited for this place; empty for any other. instead: the replica in whose room it comes, and which has to go first.
    capture: requests that its node may keep, with consent. session: as the Intent has it. staged: it stands by as bytes
    on disk; its room is kept, so that it can be loaded.
    """

    workload: WorkloadKey
    revision: int
    node: str
    device: str
    provider: str
    model: str
    model_bytes: Bytes
    precision: str
    memory_bytes: Bytes
    max_batch: int
    shared_worker: bool
    partition: PartitionRule
    keeps: str
    terms: str
    signed: SignedModel | None = None
    busy: float = 0.0
    standby: bool = False
    moves: str = ""
    instead: str = ""
    capture: int = 0
    session: Mapping[str, str] = field(default_factory=dict)
    staged: bool = False


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """Why one workload is placed as it is. candidates: feasible first, best first.

    relaxed: changes of the policy's `relax` that were needed. refusal: set when replicas are missing. nearest: the
    smallest change that places it; proposal: the same as values, None where no change of the document helps. evicted:
    ids of replicas that run beyond their tenant's quota and drain, although the plan lacks replicas. elsewhere: another
    region runs it (DELEGATED): nothing is wanted here but a standby. wanted, placed: without standbys; targets: with.
    no_standby: why none stands by, though its policy asks for one and all other replicas are placed. unmoved: by
    migration, why it has no place yet.
    """

    workload: WorkloadKey
    policy: str
    wanted: int
    placed: int
    candidates: tuple[Candidate, ...]
    changes: tuple[PlacementChange, ...]
    refusal: Refusal | None
    relaxed: tuple[str, ...]
    nearest: str
    proposal: Relaxation | None
    targets: tuple[Target, ...]
    evicted: tuple[str, ...] = ()
    elsewhere: bool = False
    no_standby: Refusal | None = None
    unmoved: Mapping[str, Refusal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """workloads: in order of (priority descending, key). hash: over decisions alone, not telemetry or predictions."""

    workloads: tuple[WorkloadPlan, ...]
    hash: str

    @property
    def changes(self) -> bool:
        return any(change.sign != "=" for workload in self.workloads for change in workload.changes)

    def of(self, key: WorkloadKey) -> WorkloadPlan | None:
        return next((plan for plan in self.workloads if plan.workload == key), None)

    @property
    def targets(self) -> Mapping[WorkloadKey, tuple[Target, ...]]:
        return {plan.workload: plan.targets for plan in self.workloads}
