"""Desired state down, observed state up: what a coordinator asks of a node, and what the node says is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.types.codes import Code
from shoal.types.device import EnergySource, Reading
from shoal.types.latency import Counts
from shoal.types.migration import Giver, Handover, Verdict, Verification, Verifier
from shoal.types.profile import TensorSpec
from shoal.types.route import Route
from shoal.types.signature import SignedModel
from shoal.types.units import Bytes, Joules, Seconds, Wall
from shoal.types.workload import PartitionRule, WorkloadKey


class Phase(StrEnum):
    FETCHING = "fetching"
    LOADING = "loading"
    WARMING = "warming"
    VERIFYING = "verifying"
    """Warm, and not to take requests before it has passed its verification."""
    STAGED = "staged"
    """Its bytes are on disk, and nothing is loaded: as asked for."""
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Work:
    """What one inference at batch 1 costs, from the model's profile: enough for an emulated device to pace itself.

    FLOPs by the class whose rate a receipt carries (`other`: neither convolution nor matrix product), bytes read and
    written by all operators (ModelProfile.bytes_moved), nodes in the graph. All zero: unknown. shapes: each input's
    reference shape, which these costs are for; warm-up runs at these, and other sizes are scaled by their elements.
    below: of integer inputs that the graph takes as indices, what every value must be below; inputs that are made up
    keep to it.
    """

    conv_flops: float = 0.0
    matmul_flops: float = 0.0
    other_flops: float = 0.0
    bytes: float = 0.0
    nodes: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    below: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One replica that one node shall keep. id never changes meaning: another model or device is another id.

    draining: finish what is in flight, take nothing new. memory_bytes: what the coordinator committed for it. work:
    filled by the coordinator from the ModelProfile. signed: where the workload's policy asks for a publisher's
    signature; None where it does not. verification: of a replica that takes over from another, until it has passed.
    verifiers: of a replica that another takes over from. capture: how many of its requests the node may keep in memory,
    with the workload's consent, to verify moves with; 0: none. standby: kept ready for when no other replica
    answers; its node runs it as any, but where it is staged: then its bytes are fetched, and nothing is loaded.
    session: of a stateful workload, each input that takes state and the output that gives it. handover: where its
    sessions go; givers: who may hand it sessions.
    """

    id: str
    workload: WorkloadKey
    revision: int
    model: str
    model_bytes: Bytes
    device: str
    provider: str
    precision: str
    draining: bool
    shared_worker: bool
    memory_bytes: Bytes
    max_batch: int
    partition: PartitionRule
    work: Work = Work()
    signed: SignedModel | None = None
    verification: Verification | None = None
    verifiers: tuple[Verifier, ...] = ()
    capture: int = 0
    standby: bool = False
    staged: bool = False
    session: Mapping[str, str] = field(default_factory=dict)
    handover: Handover | None = None
    givers: tuple[Giver, ...] = ()


@dataclass(frozen=True, slots=True)
class Version:
    """Which truth: compared as (history, term, generation); generations compare only within one history."""

    history: str
    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class Credential:
    """A bearer token of a tenant, as its SHA-256; the token itself is nowhere kept."""

    tenant: str
    token_sha256: str
    expires_at: Wall


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a node believes. roots: certificates (PEM) of the region's CAs, the one that issues first. revoked: serial
    numbers (decimal) of certificates that are refused though their time is not over."""

    roots: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerTrust:
    """Another region whose gateways this gateway may meet, and no other. roots: its CAs (PEM), which count for names of
    that region alone. gateways: names. agreements: under which they may call here; they may call nothing else. revoked:
    serials (decimal) of its certificates that are refused though their time is not over."""

    region: str
    roots: tuple[str, ...]
    gateways: tuple[str, ...]
    agreements: tuple[str, ...]
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DesiredSet:
    """All that a node shall run and route; persisted there before it acts. pins: digests that the cache must keep.

    trust: None from a coordinator that does not tell; then what the node was enrolled with stands. peers: for gateways.
    proof: what the coordinator signed of this set, for the node to show in its hellos; read by coordinators alone.
    asleep: its devices that shall sleep; every other one is to be awake.
    """

    node: str
    version: Version
    assignments: tuple[Assignment, ...]
    routes: tuple[Route, ...]
    pins: tuple[str, ...]
    credentials: tuple[Credential, ...]
    heartbeat_s: Seconds
    trust: Trust | None = None
    peers: tuple[PeerTrust, ...] = ()
    proof: bytes = b""
    asleep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """Service since the replica became ready, for one origin of requests. Latencies: seconds at the worker."""

    origin: str
    requests: int
    errors: int
    latency_p50_s: Seconds
    latency_p95_s: Seconds
    joules: Joules
    energy_source: EnergySource
    pace_missed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What loading and warming one replica cost here; replaces the prediction. latencies at batch 1."""

    load_s: Seconds
    memory_bytes: Bytes
    latency_p50_s: Seconds
    latency_p95_s: Seconds
    joules: Joules
    energy_source: EnergySource
    samples: int


@dataclass(frozen=True, slots=True)
class Observed:
    """One assignment as its node sees it. code, reason, retry_at, gives_up_at: every wait and failure says why."""

    assignment: str
    workload: WorkloadKey
    model: str
    device: str
    phase: Phase
    since: Wall
    code: Code | None
    reason: str
    retry_at: Wall | None
    gives_up_at: Wall | None
    in_flight: int
    restarts: int
    measured: Measured | None
    served: tuple[Served, ...]
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    verdict: Verdict | None = None
    sessions: int = 0
    """Of a stateful workload: those whose state it has now."""
    latencies: Counts = ()
    """Seconds at the worker of all that it answered since it was ready, from any origin; empty where an older node does
    not say."""


@dataclass(frozen=True, slots=True)
class Status:
    """A node's report. full: `observed` lists everything; else only what changed since the last sequence number."""

    node: str
    epoch: int
    sequence: int
    full: bool
    version: Version | None
    """The desired set last persisted; None before the first."""
    observed: tuple[Observed, ...]
    gone: tuple[str, ...]
    """Assignments that were reported before and are no more."""
    readings: tuple[Reading, ...]
    ingress: tuple["Ingress", ...]
    taken_at: Wall
    front_ready: bool
    serial: str = ""
    """Of the node's certificate, decimal. Empty, as `roots`: as told before in this session."""
    roots: tuple[str, ...] = ()
    """Fingerprints of the CAs that it trusts."""
    crossings: tuple["Crossing", ...] = ()
    """At a gateway."""
    alone: bool = False
    """It has what nobody else may have, and asks for a lease of it."""


@dataclass(frozen=True, slots=True)
class Ingress:
    """Requests that entered the region at this node since its front started: the demand, by workload and tenant."""

    workload: WorkloadKey
    origin: str
    requests: int
    answered: int
    retried: int
    refused: int
    lost: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """Requests that left for another region, or came from it, under one agreement: at this gateway, since its front
    started. region: the other one. errors: not answered, through no fault of the request. latency_p95_s: of the newest
    requests, 0 without any; where they left, the way there and back is in it. latencies: of all that were answered;
    empty where an older front does not say."""

    agreement: str
    region: str
    requests: int
    errors: int
    latency_p95_s: Seconds
    latencies: Counts = ()
