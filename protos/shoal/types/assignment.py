"""Desired state that a coordinator sends to a node, and observed state that the node reports back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shoal.types.codes import Code
from shoal.types.device import EnergySource, Reading, SilentDevice
from shoal.types.latency import Counts
from shoal.types.migration import Handover, SessionSource, Tolerance, Verdict, Verification, Verifier
from shoal.types.profile import TensorSpec
from shoal.types.route import Route
from shoal.types.signature import SignedModel
from shoal.types.tenant import TenantLimit, TenantUse
from shoal.types.units import Bytes, Joules, Seconds, Wall
from shoal.types.workload import PartitionRule, WorkloadKey, variant_of


class Phase(StrEnum):
    FETCHING = "fetching"
    LOADING = "loading"
    WARMING = "warming"
    # Warmed up; takes no requests until its verification has passed.
    VERIFYING = "verifying"
    # Its bytes are on disk and nothing is loaded, as the assignment asks.
    STAGED = "staged"
    # It takes requests. One that is scaled to zero is ready too: they wait until it is loaded (Observed.is_unloaded).
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of one inference at batch 1, taken from the model's profile. An emulated device paces itself by it. All zero
    means unknown."""

    # FLOPs of convolutions; a receipt carries a rate of their own for them.
    conv_flops: float = 0.0
    # FLOPs of matrix products; a receipt carries a rate of their own for them.
    matmul_flops: float = 0.0
    # FLOPs of all other operators.
    other_flops: float = 0.0
    # Bytes that all operators read and write (ModelProfile.bytes_moved).
    bytes: float = 0.0
    # Number of nodes in the graph.
    nodes: int = 0
    # Reference shape of each input. The costs above hold for these; warm-up runs at them, and costs of other sizes are
    # scaled by their element counts.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # By name of an integer input that the graph takes as indices: exclusive upper bound of its values. Generated inputs
    # keep to it.
    below: Mapping[str, int] = field(default_factory=dict)
    # As ModelProfile.operands.
    operands: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # FLOPs of one node of each operator, on average; operators without any are left out.
    node_flops: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a node makes the model of an assignment, in the assignment's precision, of the model as it was pushed, by
    the assignment's samples where it has any."""

    # How far the answers of what it makes may be from those of the pushed model.
    tolerances: tuple[Tolerance, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the answers of a model that was just loaded are compared with those of the same node's processor, because its
    device computes in another precision than the model's. Inputs are the assignment's samples, or generated."""

    # How far they may be from the processor's.
    tolerances: tuple[Tolerance, ...]
    # Number of inputs, as far as time allows.
    samples: int
    # True: what differs is reported, and the replica serves.
    advisory: bool = False


@dataclass(frozen=True, slots=True)
class Batching:
    """What a workload's documents say of running several of its requests as one batch. Whether that pays, the worker
    measures."""

    # Most inputs of a batch.
    max: int
    # Longest time that a request waits for others while a runner is free.
    delay_s: Seconds = Seconds(0.0)
    # The policy's p95 latency. None: it has none.
    latency_s: Seconds | None = None
    # How far the answer of a request in a batch may be from its answer alone.
    tolerances: tuple[Tolerance, ...] = ()
    # Whether requests of unequal lengths may be filled up with zeros to share a batch.
    padding: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """One replica that one node must keep. An id never changes meaning: another model or device gets another id."""

    # Unique name of the replica, never reused.
    id: str
    # Workload that the replica serves.
    workload: WorkloadKey
    # Revision of the workload that the replica belongs to.
    revision: int
    # Digest of the model, `sha256:<hex>`.
    model: str
    # Size of the model's artifact.
    model_bytes: Bytes
    # Name of the device on the node (`cpu0`, `gpu0`).
    device: str
    # ONNX Runtime's name of the execution provider.
    provider: str
    # Precision that the model runs at (`fp32`, `fp16`, `int8`, ..).
    precision: str
    # True: finish what is in flight, take nothing new.
    draining: bool
    # True: it may share a worker process with other models of its tenant.
    shared_worker: bool
    # Memory that the coordinator committed for it.
    memory_bytes: Bytes
    # What the node does with it while the coordinator is out of contact.
    partition: PartitionRule
    # Cost of one inference, which the coordinator fills in from the ModelProfile.
    work: Work = Work()
    # Signature to check, where the workload's policy requires a publisher's signature; None where it does not.
    signed: SignedModel | None = None
    # Set on a replica that takes over from another, until it has passed.
    verification: Verification | None = None
    # Set on a replica that another takes over from: who may ask for its answers.
    verifiers: tuple[Verifier, ...] = ()
    # How many of its requests the node may keep in memory, with the workload's consent, to verify migrations with; 0:
    # none.
    capture: int = 0
    # Kept ready for when no other replica answers. Its node runs it like any other, unless `staged` is set.
    standby: bool = False
    # With `standby`: the model's bytes are fetched and nothing is loaded.
    staged: bool = False
    # Stateful workload: each input that takes state, and the output that yields it. Empty: stateless.
    session: Mapping[str, str] = field(default_factory=dict)
    # Where its sessions go; None: they stay.
    handover: Handover | None = None
    # Nodes that may hand sessions over to it.
    handover_sources: tuple[SessionSource, ...] = ()
    # Digest of sample inputs that its warm-up tries first; empty: only those that its graph implies.
    samples: str = ""
    # Size of the artifact that `samples` names.
    samples_bytes: Bytes = Bytes(0)
    # Number of inputs in it.
    samples_count: int = 0
    # True: if no known input runs, it serves without a warm-up and reports that.
    warm_up_optional: bool = False
    # By input name: the only shapes that it serves; -1 for an axis that stays open. Empty: all that the graph takes.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Share of its FLOPs that may run beside the device's provider; None: not one node may.
    partial: float | None = None
    # What is to be done to the model before it is loaded; None: it is loaded as it was pushed.
    preparation: Preparation | None = None
    # How its answers are judged when it is loaded, unless `verification` compares them; None: they are not.
    comparison: Comparison | None = None
    # How its requests may run in batches; None: each runs alone.
    batching: Batching | None = None
    # Its node unloads it after this long without a request, and loads it again for the next one; None: it stays loaded.
    to_zero_after_s: Seconds | None = None
    # The part of `memory_bytes` that the provider takes once in a worker that several share; 0: unknown, or its worker
    # is its own.
    provider_bytes: Bytes = Bytes(0)

    @property
    def variant(self) -> str:
        """As `workload.variant_of`."""
        return variant_of(self.model, self.precision if self.preparation is not None else "")


@dataclass(frozen=True, slots=True)
class Version:
    """Version of a desired set, ordered by (history, term, generation). Generations compare only within one history."""

    # Name of the store's history. A store that turns out to be an old copy opens a new one, in which agents accept
    # lower generations.
    history: str
    # Election of the leading coordinator; 1 where the region has a single coordinator.
    term: int
    # Grows with each change of the node's desired set.
    generation: int


@dataclass(frozen=True, slots=True)
class Credential:
    """A tenant's bearer token as its SHA-256. The token itself is not stored."""

    tenant: str
    # SHA-256 of the whole token as the client sends it, hex.
    token_sha256: str
    expires_at: Wall


@dataclass(frozen=True, slots=True)
class Trust:
    """Certificates that a node trusts and those that it refuses."""

    # Certificates (PEM) of the region's CAs; the issuing one comes first.
    roots: tuple[str, ...] = ()
    # Serial numbers (decimal) of certificates that are refused although they have not expired.
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerTrust:
    """Another region whose gateways this gateway may exchange requests with."""

    # Name of the other region.
    region: str
    # CAs of that region (PEM). They are accepted for names of that region alone.
    roots: tuple[str, ...]
    # Names of the gateways that may connect.
    gateways: tuple[str, ...]
    # Agreements under which they may call here. They may call nothing else.
    agreements: tuple[str, ...]
    # Serial numbers (decimal) of that region's certificates that are refused although they have not expired.
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Front:
    """Another node of the region that forwards requests to this one, or that this one forwards to."""

    # Name of the other node.
    node: str
    # X25519 public key that checks its forwards, hex; empty where its version signs none.
    key: str
    # Workloads whose requests it may forward here.
    workloads: tuple[WorkloadKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Which requests this node accepts from other fronts, and from clients."""

    # Fronts that may forward here.
    fronts: tuple[Front, ...] = ()
    # Tenants whose clients may call this node for any workload; `*` stands for all. Clients of other tenants may call
    # it only for the workloads that it serves itself.
    enters: tuple[str, ...] = ()

    def may_enter(self, tenant: str) -> bool:
        """Whether that tenant's clients may call this node for any workload."""
        return "*" in self.enters or tenant in self.enters


@dataclass(frozen=True, slots=True)
class DesiredSet:
    """Everything that a node must run and route. The node persists it before it acts."""

    # Node that the set is for.
    node: str
    # Orders desired sets; a node refuses an older one.
    version: Version
    # All replicas that the node must keep; any other one ends.
    assignments: tuple[Assignment, ...]
    # Where the node's front may send requests.
    routes: tuple[Route, ...]
    # Digests that the artifact cache must keep.
    pins: tuple[str, ...]
    # Bearer tokens that the node's front accepts.
    credentials: tuple[Credential, ...]
    # Interval of the node's status reports.
    heartbeat_s: Seconds
    # None from a coordinator that does not send it: the node keeps what it was enrolled with.
    trust: Trust | None = None
    # Other regions that a gateway may exchange requests with; empty for other nodes.
    peers: tuple[PeerTrust, ...] = ()
    # The coordinator's signature of this set. The node shows it in its hellos; only coordinators read it.
    proof: bytes = b""
    # Names of the node's devices that must sleep; every other device must be awake.
    asleep: tuple[str, ...] = ()
    # None from a coordinator that does not send it: every front of the region may forward here.
    forwarding: Forwarding | None = None
    # What tenants may use of this node's front; one that is not listed is unlimited.
    tenants: tuple[TenantLimit, ...] = ()
    # True: `routes` lists what the node serves and what it subscribed to; others may exist. False: it lists all that
    # may enter at the node.
    routes_on_demand: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that one origin sent since the replica became ready. Latencies are measured at the worker."""

    # Name under which the front where they entered counts requests (`spec.traffic.from`).
    origin: str
    # All that the worker took and finished, with or without an answer.
    requests: int
    # Of `requests`: not answered, through a fault of the replica.
    errors: int
    # Median over answered requests; NaN where none was answered.
    latency_p50_s: Seconds
    # 95th percentile over answered requests; NaN where none was answered.
    latency_p95_s: Seconds
    # Energy of all these requests together; NaN where unknown.
    joules: Joules
    # Where `joules` comes from.
    energy_source: EnergySource
    # Of `requests`: answered later than the emulated device's pace.
    pace_missed: int = 0
    # Of `requests`: refused for an error of their client. They do not count for or against the replica.
    refused: int = 0
    # Of `requests`: cancelled by their clients, or not answered before the deadline that the clients had set.
    late: int = 0

    @property
    def successes(self) -> int:
        return max(0, self.requests - self.errors - self.refused - self.late)


@dataclass(frozen=True, slots=True)
class Measured:
    """What loading and warming up one replica took on its node. It replaces the prediction."""

    # From the start of the load until the engine can run.
    load_s: Seconds
    # Growth of the worker's peak resident memory.
    memory_bytes: Bytes
    # Median of the warm-up runs at batch 1; 0 without any.
    latency_p50_s: Seconds
    # 95th percentile of the warm-up runs at batch 1; 0 without any.
    latency_p95_s: Seconds
    # Energy of one inference; 0 without any run.
    joules: Joules
    # Where `joules` comes from.
    energy_source: EnergySource
    # Number of timed warm-up runs; 0 where the warm-up was skipped.
    samples: int
    # What preparing the model took on this node when it was done; 0 where nothing was prepared.
    prepare_s: Seconds = Seconds(0.0)
    # Processor time of the load, where one thread of the worker did all of it; 0 elsewhere, and from an older agent.
    load_cpu_s: Seconds = Seconds(0.0)
    # Its worker had loaded another model before: what the provider takes for itself is not in `memory_bytes`. False
    # from an older agent.
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """One assignment as its node sees it. Every wait and every failure carries a code, a reason and its times."""

    # The assignment's id.
    assignment: str
    # Workload that the assignment serves.
    workload: WorkloadKey
    # Digest of the model.
    model: str
    # Name of the device on the node.
    device: str
    # Where its lifecycle stands.
    phase: Phase
    # When it entered `phase`.
    since: Wall
    # Why it waits or failed; None where it does neither.
    code: Code | None
    # `code` in words; empty where there is none.
    reason: str
    # When the node tries again; None: no retry is scheduled.
    retry_at: Wall | None
    # When the node stops trying; None: no deadline.
    gives_up_at: Wall | None
    # Requests that it is running now.
    in_flight: int
    # How many times the node loaded it again.
    restarts: int
    # What its load and warm-up took; None before that.
    measured: Measured | None
    # Service since it became ready, by origin.
    served: tuple[Served, ...]
    # Inputs of the loaded model; empty before it is loaded, and in a status without room for them.
    inputs: tuple[TensorSpec, ...] = ()
    # Outputs of the loaded model; empty before it is loaded, and in a status without room for them.
    outputs: tuple[TensorSpec, ...] = ()
    # Result of its verification; None where none was asked for or it has not ended.
    verdict: Verdict | None = None
    # Stateful workload: number of sessions whose state it holds now.
    sessions: int = 0
    # Histogram of the worker's latencies, over all answers since it became ready and all origins; empty from an older
    # node, which does not report it.
    latencies: Counts = ()
    # For a replica that FAILED because its worker crashed. True: every crash came during loading, with no request in
    # flight. Otherwise its tenant's requests may have caused them; an older node always reports False.
    crashed_at_load: bool = False

    @property
    def is_unloaded(self) -> bool:
        """Whether it takes requests although nothing is loaded yet: it was scaled to zero, or loads for the first of
        them. Its memory is committed and not in use."""
        return self.phase is Phase.READY and self.code in (Code.SCALED_TO_ZERO, Code.WAITING_FOR_WAKE)


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """All workloads whose routes a node asks for, beside those that it serves."""

    # In order, each once; at most MAX_SUBSCRIPTIONS.
    workloads: tuple[WorkloadKey, ...]


NO_SUBSCRIPTIONS: Final = Subscriptions(())
MAX_SUBSCRIPTIONS: Final = 4_096
"""Workloads that one node may subscribe to. Their routes fit into one desired set with room to spare: one of two
replicas takes some 250 bytes, and a message of the link may have 4 MiB."""


MAX_INGRESS: Final = 16_384
"""Entries of `Status.ingress` that are known of a node at a time: a gateway's for every workload of a large region."""
MAX_INGRESS_PART: Final = 2_048
"""Entries of `Status.ingress` in one message; a node with more sends them in turn. A third of the fields that a message
may have, so that the rest of a status has room; 22 ms to read on a core that others use too."""
MAX_STATUS_TENSORS: Final = 4_096
"""Inputs and outputs of all replicas in one status: two models of the most that they may have, or 400 of ten."""


@dataclass(frozen=True, slots=True)
class Status:
    """A node's report."""

    # Name of the node.
    node: str
    # Session that the report belongs to, as the coordinator issued it.
    epoch: int
    # Number of the report within the session.
    sequence: int
    # True: `observed` lists everything. False: only what changed since the last sequence number.
    full: bool
    # Desired set that the node last persisted; None before the first.
    version: Version | None
    # Assignments as the node sees them.
    observed: tuple[Observed, ...]
    # Assignments that were reported before and no longer exist.
    gone: tuple[str, ...]
    # Current readings of the node's devices.
    readings: tuple[Reading, ...]
    # Requests that entered the region at this node: all of them, or those in `ingress_range`.
    ingress: tuple["Ingress", ...]
    # When the node made the report, by its own clock.
    taken_at: Wall
    # True: the node's front accepts requests.
    front_ready: bool
    # Serial number of the node's certificate, decimal. Empty: unchanged since an earlier report of the session.
    serial: str = ""
    # Fingerprints of the CAs that the node trusts. Empty: unchanged since an earlier report of the session.
    roots: tuple[str, ...] = ()
    # Requests to and from other regions; only a gateway has any.
    agreement_counts: tuple["AgreementCounts", ...] = ()
    # True: the node holds state of sessions that no other node may have, and asks for a lease of it.
    asks_lease: bool = False
    # Devices that do not answer the node; each other one is in `readings`, or was not measured since it came back.
    silent: tuple[SilentDevice, ...] = ()
    # What limited tenants did at its front.
    tenants: tuple[TenantUse, ...] = ()
    # None: unchanged since an earlier report of the session.
    subscriptions: Subscriptions | None = None
    # Where `ingress` is a part: all that there is in this range; what was told of others holds. None: it is the whole.
    ingress_range: "IngressRange | None" = None


@dataclass(frozen=True, slots=True)
class IngressRange:
    """A range of Ingress by `Ingress.key`."""

    # Those with a greater key; empty: from the beginning.
    after: str
    # Those up to this key; empty: to the end.
    until: str

    def has(self, key: str) -> bool:
        return key > self.after and (not self.until or key <= self.until)


@dataclass(frozen=True, slots=True)
class Ingress:
    """Requests of one workload and tenant that entered the region at this node: the demand. Counted since its front
    started, or had a route of the workload again after a time without. requests = answered + refused + lost + in
    flight."""

    # Workload that was asked for.
    workload: WorkloadKey
    # Name under which the front where they entered counts requests (`spec.traffic.from`).
    origin: str
    # All that entered.
    requests: int
    # Those that got an answer.
    answered: int
    # Those that took more than one attempt, whatever came of them.
    retried: int
    # Those that were refused, or that their caller cancelled.
    refused: int
    # Those that were sent to a replica and got neither an answer nor a refusal.
    lost: int
    # Of those refused: what their clients got wrong, gave up, or gave too little time.
    client_faults: int = 0

    @property
    def key(self) -> str:
        """TENANT/NAME/ORIGIN."""
        return f"{self.workload.tenant}/{self.workload.name}/{self.origin}"


@dataclass(frozen=True, slots=True)
class AgreementCounts:
    """Requests that left for another region, or came from it, under one agreement, at this gateway since its front
    started."""

    # Agreement that the requests count under.
    agreement: str
    # Name of the other region.
    region: str
    # All that left or came.
    requests: int
    # Not answered, through a fault of the side that was to serve them.
    errors: int
    # 95th percentile of the newest requests; 0 without any. Where they left, it includes the round trip between the
    # regions.
    latency_p95_s: Seconds
    # Histogram over all answered requests; empty from an older front, which does not report it.
    latencies: Counts = ()
    # Of `requests`: refused for an error of their clients, or cancelled by them.
    refused: int = 0
    # Of `requests`: not answered before the deadlines that their clients had set.
    late: int = 0

    @property
    def attributable_requests(self) -> int:
        """Requests whose outcome is evidence about the side that was to serve them."""
        return max(0, self.requests - self.refused)
