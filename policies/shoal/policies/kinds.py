"""The four kinds, typed: what a document may say. What this release acts on is said by `check`, not here."""

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
from shoal.types.units import Seconds

API_VERSION: Final = "shoal/v1"


class Part(BaseModel):
    """A mapping of a document: every field known, no value bent to fit, nothing changed after."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, serialize_by_alias=True)


T = TypeVar("T")
Many = Annotated[tuple[T, ...], Field(max_length=256)]

UNION_TAGS: Final = frozenset({"<mapping>", "<short>", "<word>", "<quantity>", "<all>", "<outputs>"})
"""How pydantic's locations name the form that a field was written in; no part of a document's path."""


def _form(value: Any) -> str:
    """Tells a field's short form (a word or a quantity) from its mapping."""
    return "<mapping>" if isinstance(value, dict | BaseModel) else "<short>"


def _forever(value: Any) -> str:
    return "<word>" if value == "forever" else "<quantity>"


def _bounds(value: Any) -> str:
    whole = isinstance(value, OutputBounds) or (isinstance(value, dict) and "outputs" in value)
    return "<outputs>" if whole else "<all>"


class Latency(Part):
    """`from: origin` includes network and queueing; `from: device` is the device's own time."""

    p95: Duration
    measured_from: Literal["origin", "device"] = Field("origin", alias="from")


class Bound(Part):
    """How far two outputs of a model may lie apart."""

    metric: Literal["max_abs", "max_rel", "cosine", "top_k"]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def value(self) -> float:
        """Of whichever bound is given; `check` sees that it is the one that the metric has."""
        given = self.at_least if self.at_least is not None else self.at_most
        return given if given is not None else float("nan")


class OutputBounds(Part):
    outputs: dict[Line, Bound]


Tolerance = Annotated[
    Annotated[Bound, Tag("<all>")] | Annotated[OutputBounds, Tag("<outputs>")], Discriminator(_bounds)
]
PrecisionName = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "int8", "int4"]


class Precision(Part):
    allow: Many[PrecisionName]
    tolerance: Tolerance | None = None


class Availability(Part):
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    spread: Literal["none", "device", "node"] = "none"
    standby: Literal["none", "warm", "staged"] = "none"
    recovery: Duration | None = None


class SignedModel(Part):
    """One of these keys, which the Region's `keys` declare, must have signed the model."""

    keys: Many[Name]


class Trust(Part):
    """capability, within: a device must have a receipt that was measured, not declared, and within that time."""

    capability: Literal["measured"] = "measured"
    within: Duration | None = None
    signed_model: SignedModel | None = None


class Require(Part):
    """Hard: a candidate that breaks one is out, with a code."""

    latency: Latency | None = None
    where: Selector | None = None
    residency: Many[Name] | None = None
    precision: Precision | None = None
    availability: Availability | None = None
    trust: Trust | None = None


class Limits(Part):
    cost: Cost | None = None
    energy: Energy | None = None
    carbon: Carbon | None = None
    node_power: Power | None = None


Weight = Annotated[float, Field(ge=0, le=1e6)]


class Optimize(Part):
    """Weights of the objective, normalised to sum 1."""

    energy: Weight = 0.0
    cost: Weight = 0.0
    latency: Weight = 0.0


class RelaxedAvailability(Part):
    replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    spread: Literal["none", "device", "node"] | None = None


class RelaxedLatency(Part):
    p95: Duration


class RelaxedPrecision(Part):
    allow: Many[PrecisionName]


class RelaxedLimits(Part):
    cost: Cost | None = None
    energy: Energy | None = None


class Relax(Part):
    """One thing that may give, after those before it."""

    latency: RelaxedLatency | None = None
    precision: RelaxedPrecision | None = None
    availability: RelaxedAvailability | None = None
    limits: RelaxedLimits | None = None


class Delegation(Part):
    """When another region may run the workload. margin: by how much it must be better; to: any region if not given."""

    delegate: Literal["never", "when-infeasible", "when-better"] = "never"
    margin: Share | None = None
    to: Many[Pattern] = ()
    term: Duration = Seconds(1800.0)


class MigrationWhen(Part):
    gain: Share | None = None
    cooldown: Duration | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None


class Verify(Part):
    against: Literal["source", "reference", "none"] = "source"
    inputs: Literal["captured", "samples", "generated"] = "generated"
    samples: Annotated[int, Field(ge=8, le=4096)] = 8
    on_fail: Literal["abort", "continue"] = "abort"


class Guard(Part):
    errors: Share | None = None
    p95: Ratio | None = None


class Shift(Part):
    steps: Many[Share]
    hold: Duration | None = None
    guard: Guard | None = None


class Window(Part):
    """On these days, by the clock on the wall; `to` not after `from` is the day after."""

    days: Days
    opens: TimeOfDay = Field(alias="from")
    closes: TimeOfDay = Field(alias="to")
    zone: Zone


class Migration(Part):
    when: MigrationWhen | None = None
    verify: Verify | None = None
    allow_gap: Duration | None = None
    shift: Shift | None = None
    drain: Duration | None = None
    windows: Many[Window] = ()


Forever = Annotated[
    Annotated[Literal["forever"], Tag("<word>")] | Annotated[Duration, Tag("<quantity>")], Discriminator(_forever)
]


class Partition(Part):
    """When node and coordinator lose sight of each other. cold_boot: what a node does that starts while cut off."""

    heartbeat: Duration = Seconds(1.0)
    lost_after: Duration = Seconds(10.0)
    serve: Forever = "forever"
    cold_boot: Literal["serve", "wait"] = "serve"
    on_reconnect: Literal["keep-healthy"] = "keep-healthy"


class Schedule(Part):
    """An objective for a time: the first entry whose `when` holds counts, the policy's own where none does."""

    when: Condition
    optimize: Optimize


class PolicySpec(Part):
    require: Require = Require()
    limits: Limits = Limits()
    optimize: Optimize | None = None
    relax: Many[Relax] = ()
    federation: Delegation | None = None
    migration: Migration | None = None
    partition: Partition = Partition()
    priority: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    schedule: Many[Schedule] = ()


class Named(Part):
    name: Name


class Policy(Part):
    api_version: Literal["shoal/v1"] = Field(API_VERSION, alias="apiVersion")
    kind: Literal["Policy"] = "Policy"
    metadata: Named
    spec: PolicySpec = PolicySpec()


class Variant(Part):
    source: Line
    precision: PrecisionName | None = None


class Model(Part):
    source: Line
    variants: Many[Variant] = ()
    samples: Line | None = None


class TrafficSource(Part):
    """Declared requests a second from one origin: `peak` while `when` holds, `rate` otherwise."""

    origin: Name = Field(alias="from")
    rate: Rate
    peak: Rate | None = None
    when: Condition | None = None


class Batching(Part):
    max: Annotated[int, Field(ge=1, le=4096)] = 1
    delay: Duration | None = None


class Capture(Part):
    consent: bool = False
    max: Annotated[int, Field(ge=1, le=4096)] | None = None


class StateTensors(Part):
    """state: the input that takes the state -> the output that gives it."""

    state: dict[Line, Line]


Session = Annotated[
    Annotated[Literal["stateless"], Tag("<short>")] | Annotated[StateTensors, Tag("<mapping>")], Discriminator(_form)
]


class WorkloadSpec(Part):
    model: Model
    traffic: Many[TrafficSource] = ()
    batching: Batching = Batching()
    capture: Capture = Capture()
    session: Session = "stateless"
    isolation: Literal["process", "shared"] = "process"
    policy: Name | None = None


class WorkloadMetadata(Part):
    name: Name
    tenant: Name = "default"
    labels: Annotated[dict[Name, Line], Field(max_length=64)] = {}


class Workload(Part):
    api_version: Literal["shoal/v1"] = Field(API_VERSION, alias="apiVersion")
    kind: Literal["Workload"] = "Workload"
    metadata: WorkloadMetadata
    spec: WorkloadSpec


class TenantQuota(Part):
    replicas: Annotated[int, Field(ge=0)] | None = None
    memory: Size | None = None
    rate: Rate | None = None
    cost: Cost | None = None


class TenantSpec(Part):
    quota: TenantQuota = TenantQuota()
    weight: Weight | None = None
    regions: Many[Pattern] = ()
    clients: Many[Line] = ()


class Tenant(Part):
    api_version: Literal["shoal/v1"] = Field(API_VERSION, alias="apiVersion")
    kind: Literal["Tenant"] = "Tenant"
    metadata: Named
    spec: TenantSpec = TenantSpec()


class Location(Part):
    lat: Annotated[float, Field(ge=-90, le=90)] | None = None
    lon: Annotated[float, Field(ge=-180, le=180)] | None = None
    residency: Name | None = None


class PriceFeed(Part):
    """source: a file in the coordinator's folder for signals, or an https URL. A value older than stale_after counts
    on, and is marked wherever it appears."""

    source: Line
    stale_after: Duration = Seconds(7200.0)


class CarbonFeed(Part):
    """fallback: what counts where the source gave nothing for stale_after."""

    source: Line
    stale_after: Duration = Seconds(7200.0)
    fallback: Intensity | None = None


Price = Annotated[Annotated[Cost, Tag("<short>")] | Annotated[PriceFeed, Tag("<mapping>")], Discriminator(_form)]
CarbonSignal = Annotated[
    Annotated[Intensity, Tag("<short>")] | Annotated[CarbonFeed, Tag("<mapping>")], Discriminator(_form)
]


class Trade(Part):
    """Regions that this one works for, and for which of their tenants.

    hold_share: the most of its memory, and of its devices' time, that one of them may have at once.
    """

    partner: Pattern = Field(alias="with")
    tenants: Many[Pattern] = ("*",)
    hold_share: Share = 0.2


class ModelKey(Part):
    """A publisher's public key under the name that policies give it. until: the last day (UTC) on which it counts."""

    name: Name
    key: KeyText
    until: Day | None = None


class Sleep(Part):
    """after: a device that can sleep does so when nothing has been on it for this long."""

    after: Duration


class RegionSpec(Part):
    location: Location = Location()
    sleep: Sleep | None = None
    price: Price | None = None
    carbon: CarbonSignal | None = None
    trade: Many[Trade] = ()
    keys: Many[ModelKey] = ()


class Region(Part):
    api_version: Literal["shoal/v1"] = Field(API_VERSION, alias="apiVersion")
    kind: Literal["Region"] = "Region"
    metadata: Named
    spec: RegionSpec = RegionSpec()


Kind = Workload | Policy | Tenant | Region
KINDS: Final[Mapping[str, type[Workload] | type[Policy] | type[Tenant] | type[Region]]] = {
    "Workload": Workload,
    "Policy": Policy,
    "Tenant": Tenant,
    "Region": Region,
}
