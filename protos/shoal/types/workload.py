"""A workload as the engine sees it: its documents resolved, quantities in SI.

`shoal.policies.resolve` makes an Intent from the YAML kinds; placement and reconcile read nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from shoal.types.migration import MigrationRule
from shoal.types.units import Bytes, GramsPerHour, Joules, PerSecond, Seconds, UsdPerHour, Watts

SESSION_BYTES: Final = Bytes(32 * 2**20)
"""Most that one session of a stateful workload may hold."""


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


class Spread(StrEnum):
    NONE = "none"
    DEVICE = "device"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model by digest (`sha256:<hex>`), pinned on apply. precision: as the document says, else the profile's."""

    source: str
    digest: str
    precision: str


@dataclass(frozen=True, slots=True)
class Limits:
    """None where the policy sets no limit. joules: per inference."""

    cost: UsdPerHour | None = None
    energy: Joules | None = None
    carbon: GramsPerHour | None = None
    node_power: Watts | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """The objective; non-negative, sum 1."""

    latency: float
    cost: float
    energy: float


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a candidate must meet. latency_p95_s None: no bound. where: CEL text, empty for any device.

    signed_by: names of publishers' keys, one of which must have signed the model; empty: unsigned ones will do.
    """

    latency_p95_s: Seconds | None
    latency_from_origin: bool
    where: str
    residency: tuple[str, ...]
    precisions: tuple[str, ...]
    replicas: int
    spread: Spread
    standby: Standby
    recovery_s: Seconds | None
    measured_only: bool
    measured_within_s: Seconds | None
    signed_by: tuple[str, ...] = ()

    def may_be_in(self, region: str, lies_in: str) -> bool:
        """Whether its data may be in `region`, by its name or its `residency` (empty where it declares none)."""
        return not self.residency or region in self.residency or (lies_in != "" and lies_in in self.residency)


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One thing that may give, tried in the policy's order. `change` shows it as typed; the results replace."""

    change: str
    require: Requirements
    limits: Limits


@dataclass(frozen=True, slots=True)
class Traffic:
    """Declared requests from one origin: `peak` while `when` (CEL over `now` and `region`) holds, else `rate`. Without
    `when` the rate is what counts."""

    origin: str
    rate: PerSecond
    peak: PerSecond
    when: str = ""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The objective while `when` (CEL over `now` and `region`) holds."""

    when: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class Declared:
    """What the documents say of what a schedule changes."""

    weights: Weights
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True)
class PartitionRule:
    """How a node behaves when it and its coordinator lose sight of each other. serve_s None: for ever."""

    heartbeat_s: Seconds = Seconds(1.0)
    lost_after_s: Seconds = Seconds(10.0)
    serve_s: Seconds | None = None
    cold_boot_serve: bool = True


class DelegationMode(StrEnum):
    NEVER = "never"
    WHEN_INFEASIBLE = "when-infeasible"
    WHEN_BETTER = "when-better"


@dataclass(frozen=True, slots=True)
class Delegation:
    """When another region may run the workload. to: patterns of the names of regions (`*` for any part of one).

    margin: share by which another region's offer must beat the best at home, under the workload's own objective.
    term_s: how long an agreement is asked for at a time; it renews.
    """

    mode: DelegationMode = DelegationMode.NEVER
    margin: float = 0.0
    to: tuple[str, ...] = ("*",)
    term_s: Seconds = Seconds(1800.0)


@dataclass(frozen=True, slots=True)
class Trade:
    """Regions that the region works for. partner, tenants: patterns of names.

    hold_share: the most of the region's memory, and of its devices' time, that one partner may have at once, in bids
    that hold room and in what runs for it.
    """

    partner: str
    tenants: tuple[str, ...] = ("*",)
    hold_share: float = 0.2


@dataclass(frozen=True, slots=True)
class Intent:
    """One workload with its policy applied. models: the source first, then its variants. capture: how many of its
    requests a node may keep in memory to verify moves with, as its owner consents; 0: none. session: of a stateful one,
    each input that takes state and the output that gives it. schedule: objectives for a time, the first that holds
    counts. declared: where weights and traffic are those that hold now, what the documents say; None where they are the
    documents' own. back: a rollback brought it back."""

    key: WorkloadKey
    revision: int
    labels: Mapping[str, str]
    policy: str
    models: tuple[ModelRef, ...]
    require: Requirements
    limits: Limits
    weights: Weights
    relax: tuple[Relaxation, ...]
    traffic: tuple[Traffic, ...]
    partition: PartitionRule
    priority: int
    shared_worker: bool
    max_batch: int = 1
    delegation: Delegation = Delegation()
    migration: MigrationRule = field(default_factory=MigrationRule)
    capture: int = 0
    session: Mapping[str, str] = field(default_factory=dict)
    schedule: tuple[Scheduled, ...] = ()
    declared: Declared | None = None
    back: bool = False


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may hold in the region. None: unlimited."""

    tenant: str
    replicas: int | None = None
    memory: Bytes | None = None
