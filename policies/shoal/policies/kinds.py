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
    LabelName,
    Line,
    Name,
    Pattern,
    Power,
    Rate,
    Ratio,
    Selector,
    Share,
    Size,
    Unit,
)
from shoal.types.tenant import DEFAULT_WEIGHT
from shoal.types.units import DURATION, Seconds

API_VERSION: Final = "shoal/v1"


class DocumentPart(BaseModel):
    """A mapping of a document. Unknown fields are refused, values are not converted between types, and it is
    immutable.

    A field's `description` says what it means in one or two sentences, and what holds without it; `examples` are values
    as people type them. The JSON Schema and the reference are made from both; a field whose type has an example of its
    own (a quantity, a choice, true or false) needs none, and a mapping's follows from its fields, unless they only mean
    something together.
    """

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
    p95: Duration = Field(description="Bound on the 95th percentile of latency.", examples=["60ms"])
    measured_from: Literal["origin", "device"] = Field(
        default="origin",
        alias="from",
        description="Where latency is measured: `origin` includes network and queueing, `device` is the device's own "
        "time.",
    )


class Bound(DocumentPart):
    """How much two outputs of a model may differ."""

    metric: Literal["max_abs", "max_rel", "cosine", "top_k"] = Field(
        description="How two outputs are compared: largest absolute or relative difference, cosine similarity, or "
        "share of equal top classes. It judges moves, and the first answers of a device that computes in another "
        "precision.",
        examples=["cosine"],
    )
    at_least: float | None = Field(
        default=None, description="Least value that passes, for `cosine` and `top_k`.", examples=[0.98]
    )
    at_most: float | None = Field(
        default=None, description="Greatest value that passes, for `max_abs` and `max_rel`.", examples=[0.001]
    )

    @property
    def value(self) -> float:
        """The bound that is given; NaN without any. `check` ensures that it is the one that fits the metric."""
        given = self.at_least if self.at_least is not None else self.at_most
        return given if given is not None else float("nan")


class OutputBounds(DocumentPart):
    outputs: dict[Line, Bound] = Field(
        description="A bound of its own for each output, by the output's name.",
        examples=[{"logits": {"metric": "cosine", "at_least": 0.98}}],
    )


Tolerance = Annotated[
    Annotated[Bound, Tag("<all>")] | Annotated[OutputBounds, Tag("<outputs>")], Discriminator(_bounds_tag)
]
PrecisionName = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "int8", "int4"]


class Precision(DocumentPart):
    allow: Many[PrecisionName] = Field(
        description="Precisions that a replica may run at.", examples=[["fp32", "fp16", "int8"]]
    )
    prepare: bool = Field(
        default=False,
        description="Whether a node may make the model in an allowed precision itself where no source is in it: int8 "
        "from an fp32 model and its samples, or fp16. `tolerance` judges the result too.",
        examples=[True],
    )
    tolerance: Tolerance | None = Field(
        default=None,
        description="How much answers may differ when a replica moves; without it, the defaults of the precision.",
        examples=[{"metric": "cosine", "at_least": 0.98}],
    )


class SpreadOver(DocumentPart):
    """Replicas must differ in the value of a node label."""

    over: LabelName = Field(
        description="Node label in whose value replicas must differ; a node without it takes none.",
        examples=["site"],
    )


SpreadRule = Annotated[
    Annotated[Literal["none", "device", "node"], Tag("<short>")] | Annotated[SpreadOver, Tag("<mapping>")],
    Discriminator(_form_tag),
]


def spread_text(rule: str | SpreadOver) -> str:
    """The word, or the label."""
    return rule.over if isinstance(rule, SpreadOver) else rule


class PerLabel(DocumentPart):
    """One replica for each value of a node label."""

    label: LabelName = Field(
        description="Node label: the nodes that `where` admits and that have the same value of it get one replica "
        "together.",
        examples=["site"],
    )


PerRule = Annotated[
    Annotated[Literal["node"], Tag("<short>")] | Annotated[PerLabel, Tag("<mapping>")], Discriminator(_form_tag)
]


class Availability(DocumentPart):
    replicas: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=1, description="How many replicas serve.", examples=[2]
    )
    spread: SpreadRule = Field(
        default="none",
        description="What replicas must differ in: device, node, or with `{over: LABEL}` the value of a node label.",
        examples=["node", {"over": "site"}],
    )
    per: PerRule | None = Field(
        default=None,
        description="One replica for each node that `where` admits, or with `{label: LABEL}` for each value of a node "
        "label, instead of `replicas` and `spread`: a new node or site gets one by itself, and one that is lost is not "
        "replaced elsewhere.",
        examples=["node", {"label": "site"}],
    )
    standby: Literal["none", "warm", "staged"] = Field(
        default="none",
        description="Whether one more replica is kept in reserve: `warm` is loaded, `staged` only has its bytes on "
        "disk.",
        examples=["warm"],
    )
    recovery: Duration | None = Field(
        default=None,
        description="Time within which a lost replica is to be replaced. `shoal doctor` reports when it was not.",
        examples=["20s"],
    )


class SignedModelSpec(DocumentPart):
    keys: Many[Name] = Field(
        description="The model must be signed by one of these keys, which `spec.keys` of the Region declares.",
        examples=[["publisher"]],
    )


class TrustSpec(DocumentPart):
    capability: Literal["measured"] = Field(
        default="measured", description="A device counts only with figures that were measured, not declared."
    )
    within: Duration | None = Field(
        default=None, description="How old these figures may be; without it, of any age.", examples=["24h"]
    )
    signed_model: SignedModelSpec | None = Field(default=None, description="Which keys the model must be signed by.")


class Require(DocumentPart):
    """Hard requirements: a candidate that breaks one is rejected with a code."""

    latency: Latency | None = Field(default=None, description="The bound on latency.")
    where: Selector | None = Field(
        default=None,
        description="CEL expression over `node`, `device`, `model`, `region` and `now`; a candidate for which it is "
        "false is out.",
    )
    residency: Many[Name] | None = Field(
        default=None,
        description="Regions, or their declared residencies, where inputs and weights may be; without it, anywhere.",
        examples=[["eu"]],
    )
    precision: Precision | None = Field(
        default=None, description="Which precisions may serve, and how much they may differ."
    )
    availability: Availability | None = Field(
        default=None,
        description="How many replicas, how far apart, and in reserve.",
        examples=[{"replicas": 2, "spread": "node"}],
    )
    trust: TrustSpec | None = Field(default=None, description="What must be known of a device and a model.")
    partial: Share | None = Field(
        default=None,
        description="Share of the model's FLOPs that may run beside the device's execution provider; without it, not "
        "one node of the graph may.",
        examples=["10%"],
    )


class LimitsSpec(DocumentPart):
    cost: Cost | None = Field(default=None, description="Greatest cost of all replicas together.")
    energy: Energy | None = Field(default=None, description="Greatest energy of one inference.")
    carbon: Carbon | None = Field(
        default=None, description="Greatest emissions of all replicas together, at the region's carbon intensity."
    )
    node_power: Power | None = Field(
        default=None, description="Greatest power of all devices of a replica's node together."
    )


Weight = Annotated[float, Field(ge=0, le=1e6)]


class Optimize(DocumentPart):
    """Weights of the objective, normalised to sum 1."""

    energy: Weight = Field(default=0.0, description="Weight of energy per inference in the objective.", examples=[0.7])
    carbon: Weight = Field(default=0.0, description="Weight of emissions per hour in the objective.", examples=[0.2])
    cost: Weight = Field(default=0.0, description="Weight of cost per hour in the objective.", examples=[0.3])
    latency: Weight = Field(default=0.0, description="Weight of predicted latency in the objective.", examples=[0.3])

    def by_term(self) -> dict[str, float]:
        """The weights by the names of their score terms."""
        return {name: getattr(self, name) for name in type(self).model_fields}


class RelaxedAvailability(DocumentPart):
    replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        default=None, description="Fewer replicas, in this step.", examples=[1]
    )
    spread: SpreadRule | None = Field(
        default=None,
        description="A weaker spread, in this step: none < device < node < over a label. One label may follow another.",
        examples=["device", {"over": "site"}],
    )


class RelaxedLatency(DocumentPart):
    p95: Duration = Field(description="A longer bound on latency, in this step.", examples=["120ms"])


class RelaxedPrecision(DocumentPart):
    allow: Many[PrecisionName] = Field(
        description="More precisions, in this step: all that were allowed before, and others.",
        examples=[["fp32", "fp16", "int8"]],
    )


class RelaxedLimits(DocumentPart):
    cost: Cost | None = Field(default=None, description="A higher limit of cost, in this step.")
    energy: Energy | None = Field(default=None, description="A higher limit of energy, in this step.")


class Relax(DocumentPart):
    """One requirement that may be relaxed, after those before it."""

    latency: RelaxedLatency | None = Field(default=None, description="Loosens the bound on latency.")
    precision: RelaxedPrecision | None = Field(default=None, description="Allows more precisions.")
    availability: RelaxedAvailability | None = Field(default=None, description="Asks for fewer or closer replicas.")
    limits: RelaxedLimits | None = Field(default=None, description="Raises limits.")


class DelegationSpec(DocumentPart):
    """When another region may run the workload."""

    delegate: Literal["never", "when-infeasible", "when-better"] = Field(
        default="never",
        description="When another region may run the workload: never, when nothing here fits, or when it is better by "
        "`margin`.",
        examples=["when-infeasible"],
    )
    margin: Share | None = Field(
        default=None,
        description="By how much another region's offer must be better, with `when-better`.",
        examples=["15%"],
    )
    to: Annotated[Many[Pattern], Field(max_length=64)] = Field(
        default=(),
        description="Names of regions that may run it, `*` for any part; without it, any region.",
        examples=[["eu-*"]],
    )
    term: Duration = Field(default=Seconds(1800.0), description="Length of one term of an agreement; agreements renew.")


class MigrationWhen(DocumentPart):
    gain: Share | None = Field(
        default=None,
        description="Share by which the objective must improve before a replica moves by itself, follows a changed "
        "document, or takes over again once it is back; 10% without it.",
        examples=["15%"],
    )
    cooldown: Duration | None = Field(
        default=None,
        description="Time after a move of the workload in which no other begins by itself.",
        examples=["30m"],
    )
    max_concurrent: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="How many replicas of the workload may move at once.", examples=[1]
    )


class VerifySpec(DocumentPart):
    against: Literal["source", "reference", "none"] = Field(
        default="source",
        description="What a new replica's answers are compared with: the replica that it replaces, or a reference (the "
        "outputs in `model.samples`, else what the first replica answered). A reference also judges what takes the "
        "place of a lost replica.",
    )
    inputs: Literal["captured", "samples", "generated"] = Field(
        default="generated",
        description="Which inputs are compared: consented requests, pushed samples, or generated ones.",
        examples=["samples"],
    )
    samples: Annotated[int, Field(ge=8, le=4096)] = Field(
        default=8, description="How many inputs are compared.", examples=[32]
    )
    on_fail: Literal["abort", "continue"] = Field(
        default="abort",
        description="What a difference beyond the tolerance does: `abort` ends the move, `continue` reports it and "
        "goes on.",
    )


class GuardSpec(DocumentPart):
    errors: Share | None = Field(
        default=None, description="Share of its requests that the new replica may fail in a step.", examples=["0.5%"]
    )
    p95: Ratio | None = Field(
        default=None,
        description="How many times as slow as the old replica, or as its own prediction, the new one may be.",
        examples=["1.3x"],
    )


class Shift(DocumentPart):
    steps: Many[Share] = Field(
        description="Shares of the requests that the new replica takes, ascending; the last is 100%.",
        examples=[["1%", "10%", "50%", "100%"]],
    )
    hold: Duration | None = Field(default=None, description="How long each step is held.", examples=["5m"])
    guard: GuardSpec | None = Field(default=None, description="What sends all requests back to the old replica.")


class WindowSpec(DocumentPart):
    """Days and local times in `zone`. If `to` is not after `from`, the window ends on the day after."""

    days: Days = Field(description="Days on which moves may begin by themselves.", examples=["mon-fri"])
    opens: TimeOfDay = Field(alias="from", description="Local time at which the window opens.", examples=["22:00"])
    closes: TimeOfDay = Field(
        alias="to", description="Local time at which it closes; on the next day if it is not later.", examples=["05:00"]
    )
    zone: Zone = Field(description="Time zone of both.", examples=["Europe/Paris"])


class MigrationSpec(DocumentPart):
    when: MigrationWhen | None = Field(
        default=None, description="Lets replicas move by themselves; without it, none does."
    )
    verify: VerifySpec | None = Field(default=None, description="How answers are compared before requests move.")
    allow_gap: Duration | None = Field(
        default=None,
        description="How long no replica may serve where a device cannot hold both; without it, such a move is "
        "refused.",
        examples=["5s"],
    )
    shift: Shift | None = Field(default=None, description="How requests move, step by step, under a guard.")
    drain: Duration | None = Field(
        default=None, description="How long the old replica has to finish its requests.", examples=["30s"]
    )
    windows: Many[WindowSpec] = Field(
        default=(), description="When moves may begin by themselves; without it, at any time."
    )


Forever = Annotated[
    Annotated[Literal["forever"], Tag("<word>")] | Annotated[Duration, Tag("<quantity>")], Discriminator(_forever_tag)
]


Heartbeat = Annotated[Seconds, Unit(DURATION, least=0.2)]
"""One workload's counts for all nodes of its region. A coordinator that looks at its nodes less often than every three
heartbeats takes itself for paused, and loses nobody: it looks every 0.25 s, and later under load."""
LossTime = Annotated[Seconds, Unit(DURATION, least=1.0)]
"""One workload's counts for all nodes of its region: below a second, healthy nodes behind slow links would be lost."""


class Partition(DocumentPart):
    """What happens while node and coordinator are out of contact."""

    heartbeat: Heartbeat = Field(
        default=Seconds(1.0),
        description="Interval of the node's status reports. A node that missed three is suspect: nothing new goes "
        "there, and a replacement is prepared. The shortest that a workload's policy asks for counts for all nodes of "
        "the region.",
    )
    lost_after: LossTime = Field(
        default=Seconds(10.0),
        description="The node counts as lost after this long without a report; at least twice `heartbeat`. The "
        "shortest that a workload's policy asks for counts for all nodes of the region.",
    )
    serve: Forever = Field(
        default="forever",
        description="How long a node that is cut off keeps serving; then replicas drain, and their bytes stay.",
        examples=["12h"],
    )
    cold_boot: Literal["serve", "wait"] = Field(
        default="serve", description="What a node does that starts while it is cut off: serve what it had, or wait."
    )
    on_reconnect: Literal["keep-healthy"] = Field(
        default="keep-healthy",
        description="What happens to replicas when the node is back: those that are healthy stay.",
    )


class ScaleSpec(DocumentPart):
    """When a replica that nobody asks is unloaded."""

    to_zero_after: Duration = Field(
        description="How long a replica has no request before its node unloads it. Its next request waits until it is "
        "loaded again. Its place and memory stay reserved; a standby, and a session's replica while sessions are open, "
        "stay loaded.",
        examples=["10m"],
    )


class ScheduleSpec(DocumentPart):
    """Weights for a time: the first entry whose `when` holds applies, otherwise the policy's own weights."""

    when: Condition = Field(
        description="CEL expression over `now` and `region`. Placement also looks at it ahead of time."
    )
    optimize: Optimize = Field(description="The weights while it holds.")


class PolicySpec(DocumentPart):
    require: Require = Field(default=Require(), description="Hard requirements.")
    limits: LimitsSpec = Field(default=LimitsSpec(), description="Hard limits of cost, energy, carbon and power.")
    optimize: Optimize | None = Field(
        default=None, description="What is best among what is allowed.", examples=[{"energy": 0.7, "latency": 0.3}]
    )
    prefer: Annotated[Many[Selector], Field(max_length=8)] = Field(
        default=(),
        description="CEL expressions, the best first: a candidate for which an earlier one holds is chosen before all "
        "others, and among those `optimize` decides. Candidates for which none holds come last.",
        examples=[['device.kind == "npu"', 'device.kind == "gpu"']],
    )
    relax: Many[Relax] = Field(default=(), description="What may give, in this order, if nothing fits.")
    federation: DelegationSpec | None = Field(
        default=None,
        description="Delegation to other regions.",
        examples=[{"delegate": "when-better", "margin": "15%"}],
    )
    migration: MigrationSpec | None = Field(default=None, description="How and when replicas move.")
    partition: Partition = Field(
        default=Partition(), description="What holds while node and coordinator are out of contact."
    )
    scale: ScaleSpec | None = Field(
        default=None, description="When replicas scale to zero; without it, they stay loaded."
    )
    priority: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=100, description="Order of admission: placement serves higher ones first.", examples=[200]
    )
    preempt: Literal["never", "lower", "always"] = Field(
        default="never",
        description="What it may displace where it lacks room: nothing; replicas of lower priority that have another "
        "place, which move there; or all of lower priority: those that have no other place end.",
        examples=["lower"],
    )
    schedule: Many[ScheduleSpec] = Field(default=(), description="Other weights at certain times.")


class NameMetadata(DocumentPart):
    name: Name = Field(description="Name within its kind: a-z, 0-9 and inner hyphens.", examples=["frugal"])


_API_VERSION_FIELD: Final = "Version of the document language."
_KIND_FIELD: Final = "Kind of the document."


class Policy(DocumentPart):
    api_version: Literal["shoal/v1"] = Field(default=API_VERSION, alias="apiVersion", description=_API_VERSION_FIELD)
    kind: Literal["Policy"] = Field(default="Policy", description=_KIND_FIELD)
    metadata: NameMetadata = Field(description="Its name.")
    spec: PolicySpec = Field(default=PolicySpec(), description="What it asks.")


Axis = Annotated[int, Field(ge=-1, le=2**31)]
ShapeSpec = Annotated[Many[Axis], Field(max_length=16)]


class Variant(DocumentPart):
    source: Line = Field(
        description="A file, or the name or digest of a pushed model, that answers as the source does.",
        examples=["./ocr-int8.onnx"],
    )
    precision: PrecisionName | None = Field(
        default=None, description="Its precision; without it, as the graph states.", examples=["int8"]
    )


class ModelSpec(DocumentPart):
    source: Line = Field(
        description="A file, or the name or digest of a pushed model. `apply` pins it by digest.",
        examples=["./models/ocr.onnx"],
    )
    variants: Many[Variant] = Field(default=(), description="The same model in other precisions.")
    samples: Line | None = Field(
        default=None,
        description="An .npz file, or the digest of pushed samples: at least 8 inputs, with outputs if there are any. "
        "Warm-ups use the first. `apply` pins it by digest.",
        examples=["./models/ocr-samples.npz"],
    )
    warm_up: Literal["required", "optional"] = Field(
        default="required",
        description="`optional` lets a replica serve without a warm-up where neither samples nor generated inputs run.",
    )
    shapes: Annotated[dict[Line, ShapeSpec], Field(max_length=64)] = Field(
        default={},
        description="By input: the only shapes that are served, on every device; -1 leaves an axis open. Without it, "
        "all that the graph takes.",
        examples=[{"x": [1, 3, 48, 320]}],
    )


class TrafficSource(DocumentPart):
    """Declared requests per second from one origin: `peak` while `when` holds, `rate` otherwise."""

    origin: Name = Field(
        alias="from",
        description="Origin of the requests, under the name by which the front where they enter counts them.",
        examples=["eu-west"],
    )
    rate: Rate = Field(description="Requests per second from there.", examples=["10/s"])
    peak: Rate | None = Field(default=None, description="Requests per second while `when` holds.", examples=["40/s"])
    when: Condition | None = Field(
        default=None, description="CEL expression over `now` and `region`. Placement also looks at it ahead of time."
    )


class Batching(DocumentPart):
    """Several requests may run as one batch, where the worker measures that this pays."""

    max: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Most inputs of a batch of several requests. Where the worker measures that batches do not pay, "
        "each request runs alone.",
        examples=[16],
    )
    delay: Duration | None = Field(
        default=None,
        description="Longest time that a request waits for others while a runner is free; without it, none.",
        examples=["2ms"],
    )
    padding: bool = Field(
        default=False,
        description="Whether requests of unequal lengths may share a batch, filled up with zeros along the one named "
        "axis that the model leaves open beside the first. Done only where the worker finds that answers, cut back, "
        "stay the same within the policy's tolerance.",
        examples=[True],
    )


class Capture(DocumentPart):
    consent: bool = Field(
        default=False, description="Lets nodes keep requests in memory, to verify moves with them.", examples=[True]
    )
    max: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="How many requests a node keeps; 64 without it.", examples=[64]
    )


class StateTensors(DocumentPart):
    state: dict[Line, Line] = Field(
        description="For each input that takes state, the output that gives it: Shoal keeps the state of each session.",
        examples=[{"state": "stateN"}],
    )


Session = Annotated[
    Annotated[Literal["stateless"], Tag("<short>")] | Annotated[StateTensors, Tag("<mapping>")],
    Discriminator(_form_tag),
]


class WorkloadSpec(DocumentPart):
    model: ModelSpec = Field(description="What is served.")
    traffic: Many[TrafficSource] = Field(default=(), description="Declared traffic, by origin.")
    batching: Batching = Field(
        default=Batching(),
        description="Whether requests may run as one batch.",
        examples=[{"max": 16, "delay": "2ms"}],
    )
    capture: Capture = Field(default=Capture(), description="Whether requests may be kept to verify moves.")
    session: Session = Field(
        default="stateless", description="Whether requests belong together; `stateless`: each is by itself."
    )
    isolation: Literal["process", "shared"] = Field(
        default="process",
        description="`shared` lets it run in one worker process with other models of its tenant on the device.",
        examples=["shared"],
    )
    policy: Name | None = Field(
        default=None, description="Name of its Policy; without it, the defaults.", examples=["frugal"]
    )


class WorkloadMetadata(DocumentPart):
    name: Name = Field(
        description="Name within its tenant, by which clients call it: a-z, 0-9 and inner hyphens.", examples=["reader"]
    )
    tenant: Name = Field(default="default", description="The tenant that it belongs to.", examples=["shop"])
    labels: Annotated[dict[Name, Line], Field(max_length=64)] = Field(
        default={}, description="Labels for people and listings.", examples=[{"app": "kiosk"}]
    )


class Workload(DocumentPart):
    api_version: Literal["shoal/v1"] = Field(default=API_VERSION, alias="apiVersion", description=_API_VERSION_FIELD)
    kind: Literal["Workload"] = Field(default="Workload", description=_KIND_FIELD)
    metadata: WorkloadMetadata = Field(description="Its name, tenant and labels.")
    spec: WorkloadSpec = Field(description="What is served, and how.")


class TenantQuota(DocumentPart):
    replicas: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Most replicas of the tenant.", examples=[20]
    )
    memory: Size | None = Field(default=None, description="Most memory of its replicas together.", examples=["16GiB"])
    cost: Cost | None = Field(
        default=None,
        description="Greatest cost of its replicas, each its whole device, and of what other regions run for it. It "
        "ends nothing that runs.",
        examples=["5 USD/h"],
    )
    rate: Rate | None = Field(
        default=None,
        description="Most requests per second of its clients in the whole region; one second's worth may come at once.",
        examples=["120/s"],
    )
    concurrency: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        default=None, description="Most requests of its clients inside the region at once.", examples=[64]
    )


class TenantSpec(DocumentPart):
    quota: TenantQuota = Field(default=TenantQuota(), description="What it may hold and send.")
    weight: Annotated[float, Field(ge=0.01, le=100)] = Field(
        default=DEFAULT_WEIGHT,
        description="Its share of a front's turns beside other tenants whose requests wait there.",
        examples=[2.0],
    )
    regions: Many[Pattern] = Field(default=(), description="Regions that may run its workloads.", examples=[["eu-*"]])
    clients: Many[Line] = Field(default=(), description="Clients that belong to it.", examples=[["till-7"]])


class Tenant(DocumentPart):
    api_version: Literal["shoal/v1"] = Field(default=API_VERSION, alias="apiVersion", description=_API_VERSION_FIELD)
    kind: Literal["Tenant"] = Field(default="Tenant", description=_KIND_FIELD)
    metadata: NameMetadata = Field(description="Its name.", examples=[{"name": "shop"}])
    spec: TenantSpec = Field(default=TenantSpec(), description="What it may do.")


class Location(DocumentPart):
    lat: Annotated[float, Field(ge=-90, le=90)] | None = Field(
        default=None, description="Latitude in degrees.", examples=[48.86]
    )
    lon: Annotated[float, Field(ge=-180, le=180)] | None = Field(
        default=None, description="Longitude in degrees.", examples=[2.35]
    )
    residency: Name | None = Field(
        default=None, description="Where the region is, as `require.residency` of policies names it.", examples=["eu"]
    )


class PriceFeed(DocumentPart):
    source: Line = Field(
        description="A file in the coordinator's folder for signals, or an https URL.", examples=["./prices.csv"]
    )
    stale_after: Duration = Field(
        default=Seconds(7200.0),
        description="Age from which a value is marked as stale wherever it appears; it stays in use.",
    )


class CarbonFeed(DocumentPart):
    source: Line = Field(
        description="A file in the coordinator's folder for signals, or an https URL.",
        examples=["https://grid.example/eu.json"],
    )
    stale_after: Duration = Field(
        default=Seconds(7200.0),
        description="Age from which a value is marked as stale; then `fallback` applies, if given.",
    )
    fallback: Intensity | None = Field(
        default=None,
        description="Used where the source has given no value for `stale_after`; without it, the stale value.",
    )


Price = Annotated[Annotated[Cost, Tag("<short>")] | Annotated[PriceFeed, Tag("<mapping>")], Discriminator(_form_tag)]
CarbonSignal = Annotated[
    Annotated[Intensity, Tag("<short>")] | Annotated[CarbonFeed, Tag("<mapping>")], Discriminator(_form_tag)
]


class TradeSpec(DocumentPart):
    """Regions that this region runs workloads for, and for which of their tenants."""

    partner: Pattern = Field(
        alias="with",
        description="Names of regions whose workloads this region runs, `*` for any part. The first entry that fits "
        "counts.",
        examples=["eu-*"],
    )
    tenants: Many[Pattern] = Field(default=("*",), description="Which of their tenants.", examples=[["shop", "lab-*"]])
    hold_share: Share = Field(
        default=0.2,
        description="Greatest share of memory, and of devices' time, that one of these regions may occupy at once.",
    )


class ModelKey(DocumentPart):
    name: Name = Field(description="Name of the key, as policies use it.", examples=["publisher"])
    key: KeyText = Field(
        description="The publisher's public key: PEM, or its base64 on one line. `shoal model key FILE.pem` prints it.",
        examples=["MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE..."],
    )
    until: Day | None = Field(default=None, description="Last day (UTC) on which it is valid; without it, for ever.")


class SleepSpec(DocumentPart):
    after: Duration = Field(
        description="How long a device that can sleep must be idle before it does; without it, devices stay awake.",
        examples=["10m"],
    )


class RegionSpec(DocumentPart):
    location: Location = Field(default=Location(), description="Where it is.", examples=[{"residency": "eu"}])
    sleep: SleepSpec | None = Field(default=None, description="When its devices sleep.")
    price: Price | None = Field(
        default=None,
        description="What a node without the label `price` costs: a constant, or where the value comes from.",
        examples=["0.40 USD/h"],
    )
    carbon: CarbonSignal | None = Field(
        default=None,
        description="Carbon intensity of its electricity: a constant, or where the value comes from.",
        examples=["350 gCO2/kWh"],
    )
    trade: Many[TradeSpec] = Field(
        default=(), description="Regions that it runs workloads for; the first entry that fits counts."
    )
    keys: Many[ModelKey] = Field(default=(), description="Public keys of publishers of models.")


class Region(DocumentPart):
    api_version: Literal["shoal/v1"] = Field(default=API_VERSION, alias="apiVersion", description=_API_VERSION_FIELD)
    kind: Literal["Region"] = Field(default="Region", description=_KIND_FIELD)
    metadata: NameMetadata = Field(description="The region's own name.", examples=[{"name": "eu-west"}])
    spec: RegionSpec = Field(default=RegionSpec(), description="What is so in this region.")


Kind = Workload | Policy | Tenant | Region
KINDS: Final[Mapping[str, type[Workload] | type[Policy] | type[Tenant] | type[Region]]] = {
    "Workload": Workload,
    "Policy": Policy,
    "Tenant": Tenant,
    "Region": Region,
}
