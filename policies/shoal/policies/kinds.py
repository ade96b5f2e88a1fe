"""The four kinds as typed models: what a document may contain. `check` decides which fields this release acts on."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from shoal.policies.calendar import Days, TimeOfDay, Zone
from shoal.policies.quantities import (
    Carbon,
    Condition,
    Cost,
    Day,
    Duration,
    Energy,
    Intensity,
    KeyText,
    Line,
    Name,
    Pattern,
    Power,
    Rate,
    Ratio,
    Selector,
    Share,
    Size,
)
from shoal.types.tenant import DEFAULT_WEIGHT
from shoal.types.units import Seconds

API_VERSION: Final = "shoal/v1"


class DocumentPart(BaseModel):
    """A mapping of a document. Unknown fields are refused, values are not converted between types, and it is
    immutable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, serialize_by_alias=True)


T = TypeVar("T")
Many = Annotated[tuple[T, ...], Field(max_length=256)]

UNION_TAGS: Final = frozenset({"<mapping>", "<short>", "<word>", "<quantity>", "<all>", "<outputs>"})
"""Names in pydantic's locations for the form that a field was written in; they are not part of a document's path."""


def _form_tag(value: Any) -> str:
    """Distinguishes a field's short form (a word or a quantity) from its mapping."""
    return "<mapping>" if isinstance(value, dict | BaseModel) else "<short>"


def _forever_tag(value: Any) -> str:
    return "<word>" if value == "forever" else "<quantity>"


def _bounds_tag(value: Any) -> str:
    whole = isinstance(value, OutputBounds) or (isinstance(value, dict) and "outputs" in value)
    return "<outputs>" if whole else "<all>"


class Latency(DocumentPart):
    """`from: origin` includes network and queueing; `from: device` is the device's own time."""

    # Bound on the 95th percentile.
    p95: Duration
    measured_from: Literal["origin", "device"] = Field("origin", alias="from")


class Bound(DocumentPart):
    """How much two outputs of a model may differ."""

    metric: Literal["max_abs", "max_rel", "cosine", "top_k"]
    # For cosine and top_k.
    at_least: float | None = None
    # For max_abs and max_rel.
    at_most: float | None = None

    @property
    def value(self) -> float:
        """The bound that is given; NaN without any. `check` ensures that it is the one that fits the metric."""
        given = self.at_least if self.at_least is not None else self.at_most
        return given if given is not None else float("nan")


class OutputBounds(DocumentPart):
    # By name of the output.
    outputs: dict[Line, Bound]


Tolerance = Annotated[
    Annotated[Bound, Tag("<all>")] | Annotated[OutputBounds, Tag("<outputs>")], Discriminator(_bounds_tag)
]
PrecisionName = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "int8", "int4"]


class Precision(DocumentPart):
    # Precisions that a candidate may run at.
    allow: Many[PrecisionName]
    # Whether a node may make the model in a precision of `allow` itself, where neither the source nor a variant is
    # in it: int8 by the model's samples, fp16 without or with them.
    prepare: bool = False
    # How much answers may differ when a replica migrates; None: the defaults of the precision.
    tolerance: Tolerance | None = None


class Availability(DocumentPart):
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    # Whether replicas must be on different devices or nodes.
    spread: Literal["none", "device", "node"] = "none"
    # Whether a standby replica is kept: warm is loaded, staged only has its bytes on disk.
    standby: Literal["none", "warm", "staged"] = "none"
    # Time within which a lost replica is to be replaced.
    recovery: Duration | None = None


class SignedModelSpec(DocumentPart):
    """The model must be signed by one of these keys, which the Region's `keys` declare."""

    keys: Many[Name]


class TrustSpec(DocumentPart):
    """capability, within: a device needs a receipt that was measured, not declared, and that is no older than this."""

    capability: Literal["measured"] = "measured"
    within: Duration | None = None
    signed_model: SignedModelSpec | None = None


class Require(DocumentPart):
    """Hard requirements: a candidate that breaks one is rejected with a code."""

    latency: Latency | None = None
    # CEL over node, device, model, region and now.
    where: Selector | None = None
    # Regions, or their declared residencies, where inputs and weights may be; None: anywhere.
    residency: Many[Name] | None = None
    precision: Precision | None = None
    availability: Availability | None = None
    trust: TrustSpec | None = None
    # Share of the model's FLOPs that may run beside the device's provider. None: not one node may.
    partial: Share | None = None


class LimitsSpec(DocumentPart):
    cost: Cost | None = None
    # Per inference.
    energy: Energy | None = None
    carbon: Carbon | None = None
    # Of all devices of a replica's node together.
    node_power: Power | None = None


Weight = Annotated[float, Field(ge=0, le=1e6)]


class Optimize(DocumentPart):
    """Weights of the objective, normalised to sum 1."""

    energy: Weight = 0.0
    cost: Weight = 0.0
    latency: Weight = 0.0

    def by_term(self) -> dict[str, float]:
        """The weights by the names of their score terms."""
        return {name: getattr(self, name) for name in type(self).model_fields}


class RelaxedAvailability(DocumentPart):
    replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    spread: Literal["none", "device", "node"] | None = None


class RelaxedLatency(DocumentPart):
    p95: Duration


class RelaxedPrecision(DocumentPart):
    allow: Many[PrecisionName]


class RelaxedLimits(DocumentPart):
    cost: Cost | None = None
    energy: Energy | None = None


class Relax(DocumentPart):
    """One requirement that may be relaxed, after those before it."""

    latency: RelaxedLatency | None = None
    precision: RelaxedPrecision | None = None
    availability: RelaxedAvailability | None = None
    limits: RelaxedLimits | None = None


class DelegationSpec(DocumentPart):
    """When another region may run the workload. margin: by how much its offer must be better. to: without it, any
    region."""

    delegate: Literal["never", "when-infeasible", "when-better"] = "never"
    # Share by which another region's offer must be better.
    margin: Share | None = None
    # Patterns of region names; empty: any region.
    to: Many[Pattern] = ()
    # Length of one term of an agreement; it renews.
    term: Duration = Seconds(1800.0)


class MigrationWhen(DocumentPart):
    # Share by which the objective must improve; None: the default of MigrationRule, as for the fields below.
    gain: Share | None = None
    cooldown: Duration | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None


class VerifySpec(DocumentPart):
    against: Literal["source", "reference", "none"] = "source"
    inputs: Literal["captured", "samples", "generated"] = "generated"
    # Number of inputs to compare.
    samples: Annotated[int, Field(ge=8, le=4096)] = 8
    # continue: report differing answers and go on.
    on_fail: Literal["abort", "continue"] = "abort"


class GuardSpec(DocumentPart):
    # Share of its requests that the new replica may fail in a step.
    errors: Share | None = None
    # How many times as slow the new replica may be.
    p95: Ratio | None = None


class Shift(DocumentPart):
    # Shares of the requests that the new replica takes, ascending; the last is 100%.
    steps: Many[Share]
    # How long each step is held.
    hold: Duration | None = None
    guard: GuardSpec | None = None


class WindowSpec(DocumentPart):
    """Days and local times in `zone`. If `to` is not after `from`, the window ends on the day after."""

    days: Days
    opens: TimeOfDay = Field(alias="from")
    closes: TimeOfDay = Field(alias="to")
    zone: Zone


class MigrationSpec(DocumentPart):
    # Allows automatic migrations; None: none begin.
    when: MigrationWhen | None = None
    verify: VerifySpec | None = None
    # How long no replica may serve where a device cannot hold both.
    allow_gap: Duration | None = None
    shift: Shift | None = None
    # How long the old replica has to finish its requests.
    drain: Duration | None = None
    # When automatic migrations may begin; empty: at any time.
    windows: Many[WindowSpec] = ()


Forever = Annotated[
    Annotated[Literal["forever"], Tag("<word>")] | Annotated[Duration, Tag("<quantity>")], Discriminator(_forever_tag)
]


class Partition(DocumentPart):
    """What happens while node and coordinator are out of contact. cold_boot: what a node does that starts while
    disconnected."""

    # Interval of the node's status reports.
    heartbeat: Duration = Seconds(1.0)
    # The node counts as lost after this long without a report.
    lost_after: Duration = Seconds(10.0)
    # How long the node keeps serving.
    serve: Forever = "forever"
    cold_boot: Literal["serve", "wait"] = "serve"
    on_reconnect: Literal["keep-healthy"] = "keep-healthy"


class ScheduleSpec(DocumentPart):
    """Weights for a time: the first entry whose `when` holds applies, otherwise the policy's own weights."""

    when: Condition
    optimize: Optimize


class PolicySpec(DocumentPart):
    require: Require = Require()
    limits: LimitsSpec = LimitsSpec()
    optimize: Optimize | None = None
    relax: Many[Relax] = ()
    federation: DelegationSpec | None = None
    migration: MigrationSpec | None = None
    partition: Partition = Partition()
    # Placement serves higher ones first.
    priority: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    schedule: Many[ScheduleSpec] = ()


class NameMetadata(DocumentPart):
    name: Name


class Policy(DocumentPart):
    api_version: Literal["shoal/v1"] = Field(API_VERSION, alias="apiVersion")
    kind: Literal["Policy"] = "Policy"
    metadata: NameMetadata
    spec: PolicySpec = PolicySpec()


Axis = Annotated[int, Field(ge=-1, le=2**31)]
ShapeSpec = Annotated[Many[Axis], Field(max_length=16)]


class Variant(DocumentPart):
    source: Line
    # None: as the graph states.
    precision: PrecisionName | None = None


class ModelSpec(DocumentPart):
    # A file, or the name or digest of a pushed model.
    source: Line
    variants: Many[Variant] = ()
    # An .npz file, or the digest of pushed samples; None: without samples.
    samples: Line | None = None
    warm_up: Literal["required", "optional"] = "required"
    # By input: the only shapes that are served; -1 leaves an axis open. Empty: all that the graph takes.
    shapes: Annotated[dict[Line, ShapeSpec], Field(max_length=64)] = {}


class TrafficSource(DocumentPart):
    """Declared requests per second from one origin: `peak` while `when` holds, `rate` otherwise."""

    # Name under which the front where requests enter counts them.
    origin: Name = Field(alias="from")
    rate: Rate
    peak: Rate | None = None
    when: Condition | None = None


class Batching(DocumentPart):
    """Several requests may run as one batch, where the worker measures that this pays."""

    # Most inputs of a batch; 1: each request runs alone.
    max: Annotated[int, Field(ge=1, le=4096)] = 1
    # Longest time that a request waits for others while a runner is free; None: it does not wait.
    delay: Duration | None = None


class Capture(DocumentPart):
    # True: nodes may keep requests in memory to verify migrations with.
    consent: bool = False
    # How many requests a node keeps; None: the default of `resolve`.
    max: Annotated[int, Field(ge=1, le=4096)] | None = None


class StateTensors(DocumentPart):
    """state: input that takes the state -> output that yields it."""

    state: dict[Line, Line]


Session = Annotated[
    Annotated[Literal["stateless"], Tag("<short>")] | Annotated[StateTensors, Tag("<mapping>")],
    Discriminator(_form_tag),
]


class WorkloadSpec(DocumentPart):
    model: ModelSpec
    traffic: Many[TrafficSource] = ()
    batching: Batching = Batching()
    capture: Capture = Capture()
    session: Session = "stateless"
    # shared: it may share a worker process with other models of its tenant.
    isolation: Literal["process", "shared"] = "process"
    # Name of a Policy; None: the defaults.
    policy: Name | None = None


class WorkloadMetadata(DocumentPart):
    name: Name
    tenant: Name = "default"
    labels: Annotated[dict[Name, Line], Field(max_length=64)] = {}


class Workload(DocumentPart):
    api_version: Literal["shoal/v1"] = Field(API_VERSION, alias="apiVersion")
    kind: Literal["Workload"] = "Workload"
    metadata: WorkloadMetadata
    spec: WorkloadSpec


class TenantQuota(DocumentPart):
    replicas: Annotated[int, Field(ge=0)] | None = None
    memory: Size | None = None
    cost: Cost | None = None
    # Of the requests of its clients, where they enter the region.
    rate: Rate | None = None
    concurrency: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


class TenantSpec(DocumentPart):
    quota: TenantQuota = TenantQuota()
    # Beside other tenants whose requests wait at a front.
    weight: Annotated[float, Field(ge=0.01, le=100)] = DEFAULT_WEIGHT
    regions: Many[Pattern] = ()
    clients: Many[Line] = ()


class Tenant(DocumentPart):
    api_version: Literal["shoal/v1"] = Field(API_VERSION, alias="apiVersion")
    kind: Literal["Tenant"] = "Tenant"
    metadata: NameMetadata
    spec: TenantSpec = TenantSpec()


class Location(DocumentPart):
    lat: Annotated[float, Field(ge=-90, le=90)] | None = None
    lon: Annotated[float, Field(ge=-180, le=180)] | None = None
    # Where the region is, as `require.residency` of policies names it.
    residency: Name | None = None


class PriceFeed(DocumentPart):
    """source: a file in the coordinator's folder for signals, or an https URL. A value older than stale_after stays in
    use, and is marked as stale wherever it appears."""

    source: Line
    stale_after: Duration = Seconds(7200.0)


class CarbonFeed(DocumentPart):
    """fallback: used where the source has given no value for stale_after."""

    source: Line
    stale_after: Duration = Seconds(7200.0)
    fallback: Intensity | None = None


Price = Annotated[Annotated[Cost, Tag("<short>")] | Annotated[PriceFeed, Tag("<mapping>")], Discriminator(_form_tag)]
CarbonSignal = Annotated[
    Annotated[Intensity, Tag("<short>")] | Annotated[CarbonFeed, Tag("<mapping>")], Discriminator(_form_tag)
]


class TradeSpec(DocumentPart):
    """Regions that this region runs workloads for, and for which of their tenants.

    hold_share: greatest share of its memory, and of its devices' time, that one of them may occupy at once.
    """

    partner: Pattern = Field(alias="with")
    tenants: Many[Pattern] = ("*",)
    hold_share: Share = 0.2


class ModelKey(DocumentPart):
    """A publisher's public key under the name that policies use. until: the last day (UTC) on which it is valid."""

    name: Name
    key: KeyText
    until: Day | None = None


class SleepSpec(DocumentPart):
    """after: how long a device that can sleep must be idle before it does."""

    after: Duration


class RegionSpec(DocumentPart):
    location: Location = Location()
    # None: devices are not put to sleep.
    sleep: SleepSpec | None = None
    price: Price | None = None
    carbon: CarbonSignal | None = None
    # The first entry that matches applies.
    trade: Many[TradeSpec] = ()
    keys: Many[ModelKey] = ()


class Region(DocumentPart):
    api_version: Literal["shoal/v1"] = Field(API_VERSION, alias="apiVersion")
    kind: Literal["Region"] = "Region"
    metadata: NameMetadata
    spec: RegionSpec = RegionSpec()


Kind = Workload | Policy | Tenant | Region
KINDS: Final[Mapping[str, type[Workload] | type[Policy] | type[Tenant] | type[Region]]] = {
    "Workload": Workload,
    "Policy": Policy,
    "Tenant": Tenant,
    "Region": Region,
}
