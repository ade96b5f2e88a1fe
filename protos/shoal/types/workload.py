"""A workload as placement sees it: documents resolved, quantities in SI.

`shoal.policies.resolve` makes an Intent from the YAML kinds. Placement and reconcile read nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from shoal.types.migration import MigrationRule, PackRef
from shoal.types.tenant import DEFAULT_WEIGHT
from shoal.types.units import Bytes, GramsPerHour, Joules, PerSecond, Seconds, UsdPerHour, Watts

SESSION_BYTES: Final = Bytes(32 * 2**20)
"""Limit on the state of one session of a stateful workload."""


SERVED_VERSION: Final = "1"
"""Clients see this one version of a workload, whichever revision serves it."""


class WorkloadKey(NamedTuple):
    """Identity of a workload. Clients of `tenant` call it by `name`."""

    tenant: str
    name: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"


class Standby(StrEnum):
    NONE = "none"
    WARM = "warm"
    STAGED = "staged"


class Preempt(StrEnum):
    """What a workload may displace that lacks room."""

    NEVER = "never"
    LOWER = "lower"
    """Replicas of lower priority that have another place: they move there."""
    ALWAYS = "always"
    """Replicas of lower priority; those that have no other place end."""


class Spread(StrEnum):
    """What replicas of a workload must differ in. Any other text is the name of a node label, in whose value they must
    differ."""

    NONE = "none"
    DEVICE = "device"
    NODE = "node"

    @classmethod
    def of(cls, text: str) -> str:
        """The member of that name, else the label."""
        return cls(text) if text in set(cls) else text


PREPARABLE: Final = ("int8", "fp16")
"""Precisions that a node can make of a model in fp32."""
NEEDS_SAMPLES: Final = ("int8",)
"""Those that it can only make by samples of the model's inputs."""


def variant_of(digest: str, prepared: str) -> str:
    """Identity of what a replica runs. digest: the model's. prepared: the precision in which a node made it; empty: it
    runs as it was pushed."""
    return f"{digest}+{prepared}" if prepared else digest


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model by digest (`sha256:<hex>`), pinned on apply."""

    # The model as the document names it.
    source: str
    digest: str
    # As the document states, otherwise the profile's.
    precision: str
    # True: it was pushed in another precision, and a node makes it, by the model's samples where there are any.
    prepared: bool = False

    @property
    def variant(self) -> str:
        """As `variant_of`."""
        return variant_of(self.digest, self.precision if self.prepared else "")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a policy; None: no limit."""

    cost: UsdPerHour | None = None
    # Per inference.
    energy: Joules | None = None
    carbon: GramsPerHour | None = None
    # Of all devices of a replica's node together.
    node_power: Watts | None = None


Weights = Mapping[str, float]
"""Weights of the objective by the name of the score term: positive, with sum 1. An absent term has no weight."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a candidate must meet."""

    # None: no bound.
    latency_p95_s: Seconds | None
    # True: the bound includes the round trip from where requests enter.
    latency_from_origin: bool
    # Selector as CEL text; empty: any device.
    where: str
    # Regions, or their declared residencies, where the data may be; empty: anywhere.
    residency: tuple[str, ...]
    # Acceptable precisions; empty: any.
    precisions: tuple[str, ...]
    # Number of replicas to place.
    replicas: int
    # What replicas must differ in: a `Spread`, or the name of a node label.
    spread: str
    # Whether a standby replica is kept, and whether it is loaded.
    standby: Standby
    # Time within which a lost replica is to be replaced, which `shoal doctor` checks; None: the default.
    recovery_s: Seconds | None
    # True: only devices whose receipt is from a probe, not from a profile.
    measured_only: bool
    # Greatest age of the receipt; None: any.
    measured_within_s: Seconds | None
    # Names of publishers' keys, one of which must have signed the model; empty: an unsigned model is accepted.
    signed_by: tuple[str, ...] = ()
    # Share of the model's FLOPs that may run beside the device's provider; None: not one node may.
    partial: float | None = None

    def may_be_in(self, region: str, lies_in: str) -> bool:
        """Whether the workload's data may be in `region`, by the region's name or by its declared residency `lies_in`
        (empty where it declares none)."""
        return not self.residency or region in self.residency or (lies_in != "" and lies_in in self.residency)


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One requirement that may be relaxed, tried in the policy's order."""

    # The change as it was typed, for display.
    change: str
    # Requirements that replace the current ones.
    require: Requirements
    # Limits that replace the current ones.
    limits: Limits


@dataclass(frozen=True, slots=True)
class Traffic:
    """Declared requests from one origin. The rate is `peak` while `when` holds, otherwise `rate`."""

    # Name under which the front where requests enter counts them.
    origin: str
    rate: PerSecond
    peak: PerSecond
    # CEL over `now` and `region`; empty: `rate` always applies.
    when: str = ""


@dataclass(frozen=True, slots=True)
class ScheduledWeights:
    """Weights that apply while `when` (CEL over `now` and `region`) holds."""

    when: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class DeclaredValues:
    """Values from the documents that a schedule replaces for a time."""

    weights: Weights
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True)
class PartitionRule:
    """What a node does while it and its coordinator are out of contact."""

    heartbeat_s: Seconds = Seconds(1.0)
    # The coordinator counts the node as lost after this long without a report.
    lost_after_s: Seconds = Seconds(10.0)
    # How long the node keeps serving; None: without limit.
    serve_s: Seconds | None = None
    # True: the node serves after a restart although it has not reached its coordinator.
    cold_boot_serve: bool = True


class DelegationMode(StrEnum):
    NEVER = "never"
    WHEN_INFEASIBLE = "when-infeasible"
    WHEN_BETTER = "when-better"


@dataclass(frozen=True, slots=True)
class DelegationRule:
    """When another region may run the workload."""

    mode: DelegationMode = DelegationMode.NEVER
    # Share (0 to 1) by which another region's offer must be better than the best local candidate, under the workload's
    # own objective.
    margin: float = 0.0
    # Patterns of region names (`*` matches any part of one).
    to: tuple[str, ...] = ("*",)
    # Length of one term of the agreement; it renews.
    term_s: Seconds = Seconds(1800.0)


@dataclass(frozen=True, slots=True)
class TradeRule:
    """A region that this region runs workloads for, and how much."""

    # Pattern of region names.
    partner: str
    # Patterns of tenant names.
    tenants: tuple[str, ...] = ("*",)
    # Greatest share (0 to 1) of the region's memory, and of its devices' time, that one partner may occupy: bids that
    # hold capacity and running workloads together.
    hold_share: float = 0.2


@dataclass(frozen=True, slots=True)
class Intent:
    """One workload with its policy applied."""

    # Identity of the workload.
    key: WorkloadKey
    # Grows with every applied change of the workload.
    revision: int
    # Labels of the workload's document.
    labels: Mapping[str, str]
    # Name of the policy.
    policy: str
    # The source model first, then its variants.
    models: tuple[ModelRef, ...]
    # What a candidate must meet.
    require: Requirements
    # Limits on cost, energy, carbon and power.
    limits: Limits
    # Weights of the objective that apply now.
    weights: Weights
    # Requirements that may be relaxed, in order.
    relax: tuple[Relaxation, ...]
    # Expected requests by origin that apply now.
    traffic: tuple[Traffic, ...]
    # What nodes do while their coordinator is out of contact.
    partition: PartitionRule
    # Placement serves higher ones first.
    priority: int
    # True: it may share a worker process with other models of its tenant.
    shared_worker: bool
    # Most inputs of a batch that is made of several requests; 1: each request runs alone.
    max_batch: int = 1
    # Longest time that a request waits for others of its batch while a runner is free.
    batch_delay_s: Seconds = Seconds(0.0)
    # Whether requests of unequal lengths may be filled up with zeros to share a batch.
    batch_padding: bool = False
    # When another region may run it.
    delegation: DelegationRule = DelegationRule()
    # How a replica of it is replaced.
    migration: MigrationRule = field(default_factory=MigrationRule)
    # How many of its requests a node may keep in memory to verify migrations with, by its owner's consent; 0: none.
    capture: int = 0
    # Stateful workload: each input that takes state, and the output that yields it. Empty: stateless.
    session: Mapping[str, str] = field(default_factory=dict)
    # Weights for a time; the first entry that holds applies. Empty: no schedule.
    schedule: tuple[ScheduledWeights, ...] = ()
    # What the documents state, where `weights` and `traffic` are those that apply now; None where they are the
    # documents' own.
    declared: DeclaredValues | None = None
    # True: this revision came from a rollback.
    back: bool = False
    # By model digest: samples that its warm-up uses. The workload's own, otherwise those pushed for the model.
    packs: Mapping[str, PackRef] = field(default_factory=dict)
    # True: a replica serves even if no known input runs in its warm-up.
    warm_up_optional: bool = False
    # By input name: the only shapes that are served; -1 for an axis that stays open. Empty: all that the graph takes.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # What it displaces where it lacks room.
    preempt: Preempt = Preempt.NEVER
    # Selectors as CEL texts: a candidate that an earlier one admits is better, whatever the objective says. One that
    # none admits comes last. Empty: the objective alone counts.
    prefer: tuple[str, ...] = ()
    # One replica for each matching node (`node`), or for each value of this node label; empty: as many as `require`
    # says. Otherwise `require` has the number of them, which follows the fleet, and the same spread.
    per: str = ""
    # A replica without a request for this long is unloaded until the next one; None: it stays loaded.
    to_zero_after_s: Seconds | None = None

    def samples_of(self, model: str) -> str:
        """Digest of the samples of a model, by its digest; empty where it has none."""
        pack = self.packs.get(model)
        return pack.digest if pack is not None else ""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may use of the region. None: unlimited."""

    # Name of the tenant.
    tenant: str
    # Replicas of all its workloads.
    replicas: int | None = None
    # Memory of these replicas.
    memory: Bytes | None = None
    # What its replicas may cost, each its whole device, and what other regions run for it.
    cost: UsdPerHour | None = None
    # Requests of its clients a second.
    rate: PerSecond | None = None
    # Requests of its clients inside the region at once.
    concurrency: int | None = None
    # Its weight beside other tenants whose requests wait at a front.
    weight: float = DEFAULT_WEIGHT
