"""The input and the output of placement. The output mirrors `WorkloadPlan` of the operator API."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from immutables import Map

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.placement.tenant_cost import NO_COST, TenantBudget, TenantCost
from shoal.coordinator.core.prediction.model import Prediction
from shoal.coordinator.core.prediction.residuals import Residual
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment, Batching, Comparison, Measured, Preparation
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.device import Device
from shoal.types.migration import DRAIN_S, Tolerance
from shoal.types.profile import ModelProfile
from shoal.types.signature import PublisherKey, SignedModel
from shoal.types.units import Bytes, Elapsed, Seconds, UsdPerHour, Wall
from shoal.types.workload import (
    DeclaredValues,
    Intent,
    PartitionRule,
    Quota,
    Relaxation,
    Requirements,
    Standby,
    WorkloadKey,
    variant_of,
)

SUMS: Final = 2**256
"""Sums of numbers by `number_of` are taken modulo this."""


def number_of(*parts: str) -> int:
    """The SHA-256 of these names as a number. Sums of such tell sets apart (AdHash: Bellare and Micciancio, "A New
    Paradigm for Collision-Free Hashing", 1997), and follow what comes and goes."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest())


class Judged(NamedTuple):
    """By what the answers of a load are judged."""

    # Precision that the node makes of the model; empty: it is loaded as it was pushed.
    made: str
    # Digest of the samples; empty: inputs are generated.
    samples: str
    # How far the answers may be from those of the pushed model on the processor: (output, metric, bound, k) of each.
    tolerances: tuple[tuple[str, str, float, int], ...]

    @classmethod
    def of(
        cls, precision: str, samples: str, preparation: Preparation | None, comparison: Comparison | None
    ) -> "Judged | None":
        """None: no difference of its answers refuses it."""
        if preparation is not None:
            return cls(precision, samples, _bounds(preparation.tolerances))
        if comparison is not None and not comparison.advisory:
            return cls("", samples, _bounds(comparison.tolerances))
        return None

    @classmethod
    def of_assignment(cls, one: Assignment) -> "Judged | None":
        return cls.of(one.precision, one.samples, one.preparation, one.comparison)


def _bounds(tolerances: Sequence[Tolerance]) -> tuple[tuple[str, str, float, int], ...]:
    return tuple((each.output, str(each.metric), each.bound, each.k) for each in tolerances)


class Triple(NamedTuple):
    """What a crash or a failed load is attributed to: a model on one version of one runtime."""

    model: str
    provider: str
    runtime_version: str
    # Of a failed load: the shapes and the share beside the device with which it was tried, and by what it was judged;
    # empty: none was given.
    asked: str = ""

    @classmethod
    def of_load(
        cls,
        model: str,
        device: Device,
        shapes: Mapping[str, tuple[int, ...]],
        partial: float | None,
        judged: Judged | None = None,
    ) -> "Triple":
        """What a failed load is attributed to: with other shapes or a wider tolerance the same model may load."""
        given = () if judged is None else (tuple(judged),)
        asked = repr((sorted(shapes.items()), partial, *given)) if shapes or partial is not None or given else ""
        return cls(model, device.provider, device.runtime_version, asked)

    @classmethod
    def of_assignment(cls, one: Assignment, device: Device) -> "Triple":
        """What a failed load of this assignment is attributed to."""
        return cls.of_load(one.model, device, one.shapes, one.partial, Judged.of_assignment(one))


class Poisoning(NamedTuple):
    """`triple` is not placed for `requester` until one of its three parts changes or an operator clears the model."""

    triple: Triple
    # As `requester_of` returns it; empty: for every requester.
    requester: str


def requester_of(workload: WorkloadKey) -> str:
    """Whose requests reach this workload's replicas: those of its tenant. For a guest workload it is the workload
    itself, so that the crashes of each agreement are counted apart."""
    return str(workload) if workload.tenant == GUEST_TENANT else workload.tenant


class Slot(NamedTuple):
    """One device of one node."""

    node: str
    device: str


class Trial(NamedTuple):
    """One model (by `variant_of`) on one device: the key under which its measurements are remembered."""

    model: str
    node: str
    device: str


@dataclass(frozen=True, slots=True)
class RegionFacts:
    """What placement knows about its own region."""

    # The region's name.
    name: str
    # The label from `Region.location`; empty where the region declares none.
    residency: str = ""
    # Labels of the region, by name.
    labels: Mapping[str, str] = field(default_factory=dict)
    # Carbon intensity of the grid in gCO2/kWh; NaN where unknown.
    carbon_g_per_kwh: float = float("nan")
    # A device that can sleep does so after this many seconds without a replica; None: devices never sleep.
    sleep_after_s: Seconds | None = None

    @property
    def fields(self) -> Mapping[str, object]:
        """`region` as an expression sees it."""
        return {"name": self.name, "residency": self.residency, "carbon": self.carbon_g_per_kwh}


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A publisher's key that the region trusts."""

    key: PublisherKey
    # The key is no longer valid from this time on; None: it never expires.
    until: Wall | None = None


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """A signature of a model, verified under one of the region's keys."""

    # Name of the key that verifies it, as the Region document declares it.
    key: str
    # The signature as pushed: an OpenSSF model signature (JSON).
    bundle: bytes
    # The model version that the publisher signed.
    version: int
    # The signature is no longer valid from this time on; None: it never expires.
    expires_at: Wall | None
    # As in SignedModel: an older version that the region still accepts; 0: none.
    allow_version: int = 0


@dataclass(frozen=True, slots=True)
class Signatures:
    """The publishers' keys of the region, and what they signed."""

    # Keys that the region declares, by name.
    keys: Mapping[str, TrustedKey] = field(default_factory=dict)
    # Verified signatures by model digest.
    models: Mapping[str, tuple[ModelSignature, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Capacity on one device that is kept for a guest workload: for a bid that is held, or for an agreement that has no
    replica yet."""

    # Name of the guest workload. It alone may use this capacity.
    bid: str
    slot: Slot
    memory_bytes: Bytes
    # Share of the device's time that is kept, 0 to 1.
    busy: float


@dataclass(frozen=True, slots=True)
class Aim:
    """Where a replica that moves may go. All fields empty: anywhere but where it is now."""

    # Name of the node; empty: any node.
    node: str = ""
    # Name of the device; empty: any device.
    device: str = ""
    # The model, by `variant_of`; empty: any.
    model: str = ""
    # The other region of a workload that moves there or returns from it; empty: a move within this region.
    region: str = ""

    @classmethod
    def parse(cls, text: str) -> "Aim":
        """Parses `NODE` or `NODE/DEVICE`. Raises ShoalError(FIELD_INVALID)."""
        node, _, device = text.partition("/")
        if not node or "/" in device or (not device and "/" in text):
            raise refuse(Code.FIELD_INVALID, f"target {text!r:.80}", "NODE or NODE/DEVICE", "see `shoal get devices`")
        return cls(node, device)

    @property
    def where(self) -> str:
        """For people; empty: anywhere."""
        return self.region or "/".join(filter(None, (self.node, self.device)))

    def allows(self, node: str, device: str, model: str) -> bool:
        return self.node in ("", node) and self.device in ("", device) and self.model in ("", model)


@dataclass(frozen=True, slots=True)
class Move:
    """What one live migration needs from the region in its current state."""

    # Id of the migration.
    migration: str
    # The workload that moves.
    workload: WorkloadKey
    # Id of the assignment that moves.
    source: str
    # Reason shown for the replica that no longer counts (`excluded`).
    why: Refusal
    # Id of the new assignment; empty until it has a place. Until then `aim` applies.
    target: str = ""
    # Where the target may be placed.
    aim: Aim = Aim()
    # Share of the source's requests that the target takes, 0 to 1.
    share: float = 0.0
    # Which of the two assignments drains now; empty: neither.
    leaving: str = ""
    # Time that the leaving replica has to finish its requests.
    drain_s: Seconds = DRAIN_S
    # True while the leaving replica must not drain yet, because it still hands over sessions.
    defers_drain: bool = False
    # True where one device holds both, but not at the same time: its memory counts for the larger one only.
    gap: bool = False
    # Ids of those of the two that keep only their bytes on disk for now.
    staged: tuple[str, ...] = ()

    @property
    def excluded_assignment(self) -> str:
        """The assignment that does not count as a replica: the source, or the target of a move that rolls back."""
        return self.target if self.target and self.leaving == self.target else self.source


class MoveOverheads(NamedTuple):
    """What moves of a region take beyond what they wait for, in the median: processes that start, messages, looks of
    the coordinator."""

    # Where the node had the model.
    cached_s: Seconds
    # Where it had to fetch it.
    fetched_s: Seconds

    def of(self, fetch_bytes: Bytes) -> Seconds:
        return self.fetched_s if fetch_bytes > 0 else self.cached_s


NO_OVERHEADS: Final = MoveOverheads(Seconds(0.0), Seconds(0.0))
"""Before any move was done."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that placement reads. The same inputs give the same plan, in whatever order the mappings were filled."""

    # The region that is planned.
    region: RegionFacts
    # Its nodes as last observed.
    fleet: Fleet
    # The workloads with their policies applied, in any order.
    intents: tuple[Intent, ...]
    # Model profiles by digest. A model without one cannot be placed.
    profiles: Mapping[str, ModelProfile]
    # Each node's assignments as last decided, by node. Draining ones are included; the others are the current replicas.
    desired: Mapping[str, tuple[Assignment, ...]]
    # Current time on the monotonic clock.
    now: Elapsed
    # Current wall-clock time, for expiry dates and for expressions over `now`.
    wall: Wall
    # Breaks ties between equal candidates.
    seed: int = 0
    # Sum of `number_of` (kind, name, digest) of each document that the plan's hash covers.
    documents: int = 0
    # Quotas by tenant; a tenant without one is unlimited.
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    # By assignment id, `terms_of` its workload when the replica was last confirmed. A replica confirmed under other
    # terms may be replaced by a better place.
    terms: Mapping[str, str] = field(default_factory=dict)
    # Ids of assignments in whose place the last plan has others (`Mark.is_left_out`).
    left_out: frozenset[str] = frozenset()
    # By assignment id, why it no longer counts as a replica (`broken_assignments` of core.workloads.failures).
    broken_assignments: Mapping[str, Refusal] = field(default_factory=dict)
    # Models that crashed a runtime repeatedly, and for whose requests.
    poisoned: frozenset[Poisoning] = frozenset()
    # Load failures that are permanent for a model on a runtime version, as some node of the region showed.
    unloadable: Mapping[Triple, Refusal] = field(default_factory=dict)
    # Warm-up measurements of earlier replicas.
    measured: Mapping[Trial, Measured] = field(default_factory=dict)
    # Of all warm-ups, by how much they missed what receipts promised.
    residuals: Map[Any, Residual] = field(default_factory=Map)
    # USD/h of a whole device; an absent device has an unknown cost.
    costs: Mapping[Slot, UsdPerHour] = field(default_factory=dict)
    # Round-trip time from a traffic origin to this region; an absent origin counts as 0.
    rtt_s: Mapping[str, Seconds] = field(default_factory=dict)
    # The region's publisher keys and the models that they signed.
    signatures: Signatures = field(default_factory=Signatures)
    # Workloads that another region runs under an agreement. They need no replica here, except a standby.
    elsewhere: frozenset[WorkloadKey] = frozenset()
    # USD/h of the offer of the region that runs or is to run a workload, from its award until that is over; None: it
    # named no price. It counts toward the tenant's budget.
    awarded: Mapping[WorkloadKey, UsdPerHour | None] = field(default_factory=dict)
    # Capacity kept for guest workloads; it counts as taken.
    reserved: tuple[Reservation, ...] = ()
    # Live migrations. Only one of the two replicas of each counts.
    moves: tuple[Move, ...] = ()
    # Places that must not take over a workload's model, and why: an earlier move there failed.
    blocked: Mapping[tuple[WorkloadKey, Trial], Refusal] = field(default_factory=dict)
    # What the region's moves took beyond what they waited for.
    move_overheads: MoveOverheads = NO_OVERHEADS
    # As `desired`, where that has assignments of the workloads alone that are asked about: of all. Empty: it has all.
    all_desired: Mapping[str, tuple[Assignment, ...]] = field(default_factory=dict)

    def assignments_on(self, node: str) -> tuple[Assignment, ...]:
        """All that the node has, of whatever workload."""
        return (self.all_desired or self.desired).get(node, ())

    def is_poisoned(self, triple: Triple, workload: WorkloadKey) -> bool:
        asked = (Poisoning(triple, ""), Poisoning(triple, requester_of(workload)))
        return not self.poisoned.isdisjoint(asked)


def terms_of(intent: Intent) -> str:
    """A short hash of what a workload's documents ask of a placement. Equal terms are no reason to move.

    The hash leaves out a standby, because adding or removing one must not move replicas, and a number of replicas that
    follows the fleet. It uses the declared weights
    and traffic instead of those that a schedule sets for a time, because migration triggers react to these.
    """
    declared = intent.declared or DeclaredValues(intent.weights, intent.traffic)
    asked = (
        intent.models,
        _lasting(intent, intent.require),
        intent.limits,
        sorted(declared.weights.items()),
        tuple(replace(step, require=_lasting(intent, step.require)) for step in intent.relax),
        declared.traffic,
        [(entry.when, sorted(entry.weights.items())) for entry in intent.schedule],
        intent.shared_worker,
        intent.max_batch,
        *([intent.batch_delay_s] if intent.batch_delay_s else []),
        *(["padding"] if intent.batch_padding else []),
        *([sorted(intent.shapes.items())] if intent.shapes else []),
        *([intent.prefer] if intent.prefer else []),
        *([intent.per] if intent.per else []),
    )
    return hashlib.blake2b(repr(asked).encode(), digest_size=8).hexdigest()


def _lasting(intent: Intent, require: Requirements) -> Requirements:
    asked = without_standby(require)
    return replace(asked, replicas=0) if intent.per else asked


def without_standby(require: Requirements) -> Requirements:
    """The requirements on replicas that take requests."""
    return require if require.standby is Standby.NONE else replace(require, standby=Standby.NONE)


@dataclass(frozen=True, slots=True)
class ScoreTerm:
    """One term of a candidate's score."""

    # Name of the term, as in `optimize` of a policy.
    name: str
    # Weight in the policy's objective, 0 to 1: the exponent of the term.
    weight: float
    # Predicted value in `unit`; NaN where unknown.
    value: float
    # Unit of `value`.
    unit: str
    # The value as a multiple of that of the workload's best candidate; NaN where unknown.
    normalised: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One (device, model variant) for one workload, and why it was chosen, ranked or excluded."""

    # Name of the node.
    node: str
    # Name of the device on that node.
    device: str
    # Digest of the model variant.
    model: str
    # Precision it runs in, such as `fp32`.
    precision: str
    # What it is, by `variant_of`.
    variant: str
    # What stands in for a real device: `emulated` or `simulated`; empty: nothing.
    stand_in: str
    # True where a replica for requests is placed here; a standby has `standby` instead.
    chosen: bool
    # True where a replica of the workload is assigned here now, healthy or failed.
    current: bool
    # The objective as a multiple of that of the best candidate, 1 best; NaN where excluded.
    score: float
    # Terms of the score; empty where excluded.
    terms: tuple[ScoreTerm, ...]
    # None where nothing could be predicted.
    prediction: Prediction | None
    # Cost of the whole device in USD/h; NaN where unknown.
    cost_usd_per_h: float
    # Emissions of one replica in gCO2/h; NaN where unknown.
    carbon_g_per_h: float
    # First constraint that excludes it; None: it is feasible.
    refusal: Refusal | None
    # Change that would make it feasible, as one would type it; empty where it is feasible.
    nearest: str
    # True where no other feasible candidate is as good in every term and better in one.
    pareto: bool
    # True where the standby is placed here.
    standby: bool = False
    # The first alternative of `prefer` that it fulfils, from 1 on; one more than there are where it fulfils none; 0
    # without `prefer`.
    preference: int = 0

    @property
    def is_prepared(self) -> bool:
        """Whether its node makes the model in this precision."""
        return self.variant != self.model


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """One replica in the diff that a plan shows."""

    # `+` a new replica, `-` one that is removed, `=` one that stays.
    sign: str
    # Name of the node.
    node: str
    # Name of the device on that node.
    device: str
    # Digest of the model variant.
    model: str
    # Precision it runs in.
    precision: str
    # Id of the current assignment; empty for a new replica.
    assignment: str
    # Reason, for people.
    why: str


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """A replica that should exist: what reconciliation turns into an assignment."""

    # The workload it serves.
    workload: WorkloadKey
    # Revision of the workload that is planned.
    revision: int
    # Name of the node.
    node: str
    # Name of the device on that node.
    device: str
    # ONNX Runtime execution provider of the device.
    provider: str
    # Digest of the model variant.
    model: str
    # Size of the model file.
    model_bytes: Bytes
    # Precision it runs in.
    precision: str
    # Memory to commit: that of the current assignment, or the upper end of the prediction for a new one.
    memory_bytes: Bytes
    # True where it may share a worker process with other models of its tenant.
    shared_worker: bool
    # What its node does while it is cut off from the coordinator.
    partition: PartitionRule
    # Id of the current assignment that is this replica; empty: a new one.
    existing_assignment: str
    # `terms_of` its workload; equal terms later confirm the replica.
    terms: str
    # What its node has to verify; None where the policy asks for no signature.
    signed: SignedModel | None = None
    # Share of the device's time that its declared traffic takes; 1: all of it, 0: no traffic is declared.
    busy: float = 0.0
    # True where it takes requests only when no other replica answers.
    standby: bool = False
    # Id of the migration that waited for this place; empty for any other replica.
    migration: str = ""
    # Id of the assignment whose memory it needs, and which is unloaded first; empty: none.
    replaces: str = ""
    # Number of recent requests that its node may keep in memory to verify moves, with the owner's consent; 0: none.
    capture: int = 0
    # As in Intent: by each input that takes session state, the output that produces it. Empty: stateless.
    session: Mapping[str, str] = field(default_factory=dict)
    # True where only its bytes are kept on disk. Its memory is committed, so that it can be loaded.
    staged: bool = False
    # As in Assignment: digest of the inputs that feed its warm-up first; empty: those that its graph implies.
    samples: str = ""
    # Size of these inputs.
    samples_bytes: Bytes = Bytes(0)
    # Number of these inputs.
    samples_count: int = 0
    # As in Assignment: it serves without a warm-up where no known input runs.
    warm_up_optional: bool = False
    # As in Assignment: the only shapes that it serves.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # As in Assignment: share of its FLOPs that may run beside the device's provider.
    partial: float | None = None
    # As in Assignment: what its node does to the model before it loads it.
    preparation: Preparation | None = None
    # As in Assignment: how its answers are compared with the processor's when it is loaded.
    comparison: Comparison | None = None
    # As in Assignment: how its requests may run in batches; None: each runs alone.
    batching: Batching | None = None
    # As in Assignment: how long it has no request before its node unloads it; None: it stays loaded.
    to_zero_after_s: Seconds | None = None
    # As in Assignment: the part of `memory_bytes` that its provider takes once in a shared worker.
    provider_bytes: Bytes = Bytes(0)

    @property
    def number(self) -> int:
        """Of what was chosen."""
        role = ("standby",) if self.standby else ()
        return number_of(*self.workload, self.node, self.device, self.model, self.precision, *role)

    @property
    def variant(self) -> str:
        return variant_of(self.model, self.precision if self.preparation is not None else "")


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """Where one workload is placed, and why."""

    # The workload.
    workload: WorkloadKey
    # Name of its policy.
    policy: str
    # Replicas asked for, without the standby.
    wanted: int
    # Replicas that have a place, without the standby.
    placed: int
    # Feasible ones first, the best of them first. Empty in a plan without explanations.
    candidates: tuple[Candidate, ...]
    # What applying the plan would do to each replica.
    changes: tuple[PlacementChange, ...]
    # Why replicas are missing; None where all are placed.
    refusal: Refusal | None
    # Changes of the policy's `relax` that the plan uses, as typed.
    relaxed: tuple[str, ...]
    # Smallest change that would place it, as typed; empty where it is placed or nothing was searched.
    nearest: str
    # The same as values; None where no change of the document helps.
    proposal: Relaxation | None
    # The replicas that should exist, the standby last.
    targets: tuple[ReplicaTarget, ...]
    # Ids of replicas beyond the tenant's quota. They drain, although the plan lacks replicas.
    evicted: tuple[str, ...] = ()
    # Ids of replicas on lost nodes, of a workload that has one for each node or label: they wait for their node.
    awaiting_node: tuple[str, ...] = ()
    # True where another region runs it (DELEGATED). It needs nothing here but a standby.
    elsewhere: bool = False
    # Why it has no standby although its policy asks for one and all other replicas are placed; else None.
    no_standby: Refusal | None = None
    # By migration id, why that move has no place yet.
    unplaced_moves: Mapping[str, Refusal] = field(default_factory=dict)
    # True where replicas stay missing until somebody changes something.
    is_final: bool = False
    # Digests of other models whose answers the new replicas must reproduce before they take a request.
    compared_with: tuple[str, ...] = ()
    # All its replicas are there and confirmed: nothing had to be decided. Not told where candidates are asked for.
    is_steady: bool = False
    # What counts toward its tenant's budget: its replicas here, or its service elsewhere where that costs more.
    cost: TenantCost = NO_COST


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The plan of all workloads."""

    # In order of (priority descending, key).
    workloads: tuple[WorkloadPlan, ...]
    # Covers the decisions alone, not telemetry or predictions.
    hash: str
    # Of each tenant that has a budget, by name.
    budgets: tuple[TenantBudget, ...] = ()

    @property
    def has_changes(self) -> bool:
        return any(change.sign != "=" for workload in self.workloads for change in workload.changes)

    def budget_left(self, key: WorkloadKey) -> UsdPerHour | None:
        """What all other workloads of its tenant leave a workload of the budget; None: the tenant has none."""
        budget = next((each for each in self.budgets if each.tenant == key.tenant), None)
        if budget is None:
            return None
        own = self.of(key)
        return budget.cost.plus(own.cost if own is not None else NO_COST, -1).remainder_of(budget.limit)

    def of(self, key: WorkloadKey) -> WorkloadPlan | None:
        return next((plan for plan in self.workloads if plan.workload == key), None)

    @property
    def targets(self) -> Mapping[WorkloadKey, tuple[ReplicaTarget, ...]]:
        return {plan.workload: plan.targets for plan in self.workloads}
