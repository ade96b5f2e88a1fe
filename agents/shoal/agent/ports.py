"""Ports of the agent: what the supervisor needs from outside. It knows these Protocols and no adapter by name."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shoal.agent.core.wakes import UnloadedReplica
from shoal.types.assignment import (
    AgreementCounts,
    Assignment,
    Credential,
    DesiredSet,
    Forwarding,
    Ingress,
    Measured,
    PeerTrust,
    Served,
    Trust,
)
from shoal.types.codes import Refusal, ShoalError
from shoal.types.device import Device
from shoal.types.latency import Counts
from shoal.types.link import FromAgent, Hello, LogLines, LogsAsked, Refused, SpansAsked, SpansFound, ToAgent, Welcome
from shoal.types.migration import Handover, SessionSource, Verdict, Verification, Verifier
from shoal.types.profile import TensorSpec
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.types.route import Route
from shoal.types.tenant import TenantLimit, TenantUse
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey


class AgentClock(Protocol):
    """Elapsed time that continues across restarts, and the trusted wall clock."""

    def now(self) -> Elapsed: ...
    def wall(self) -> Wall: ...
    async def sleep(self, seconds: Seconds) -> None: ...


class CoordinatorContact(Protocol):
    """When the coordinator was last in contact, kept across restarts of this process. No method waits for a disk."""

    def last_contact(self) -> Elapsed | None:
        """Time of the last message from the coordinator, in this run or an earlier one, on the clock's scale. None if
        there was none."""
        ...

    def on_link_up(self, coordinator_time: Wall) -> None:
        """A session began. `coordinator_time` is the coordinator's wall clock, from its welcome."""
        ...

    def on_link_lost(self) -> None: ...


class Log(Protocol):
    """Writes structured events: a name of `shoal.host.log_events` and fields. structlog's loggers are such."""

    def info(self, event: str, /, **fields: str | float | None) -> None:
        """The state changed."""
        ...

    def warning(self, event: str, /, **fields: str | float | None) -> None:
        """The node goes on, and somebody should look."""
        ...

    def error(self, event: str, /, **fields: str | float | None) -> None:
        """Something is not done."""
        ...


class Logs(Protocol):
    """Reads the log files of this node's processes."""

    async def read(self, asked: LogsAsked) -> LogLines: ...


class Spans(Protocol):
    """Reads the trace spans that this node's front keeps in memory."""

    async def spans(self, asked: SpansAsked) -> SpansFound:
        """Raises ShoalError while the front restarts."""
        ...


class LinkSession(Protocol):
    """One connected session of the link. `send` and `receive` raise ShoalError once the session is over."""

    welcome: Welcome

    async def send(self, message: FromAgent) -> None: ...
    async def receive(self) -> ToAgent: ...
    async def close(self) -> None: ...


class LinkRefused(ShoalError):
    """The coordinator answered a hello with a refusal. `message.fatal` is as in Refused."""

    def __init__(self, message: Refused) -> None:
        super().__init__(message.refusal)
        self.message = message


class CoordinatorLink(Protocol):
    """Opens sessions with a coordinator of the region."""

    async def connect(self, hello: Hello) -> LinkSession:
        """Raises LinkRefused, ShoalError(COORDINATOR_UNREACHABLE | CERT_* | ...)."""
        ...


class AgentJournal(Protocol):
    """The desired set and the receipts on disk. `save` returns only when a power cut cannot lose the set."""

    async def load(self) -> DesiredSet | None:
        """The last saved set. A corrupt file is moved aside, and the previous verified copy is returned."""
        ...

    async def save(self, desired: DesiredSet) -> None:
        """Raises ShoalError(DISK_FULL)."""
        ...

    async def load_receipts(self) -> tuple[SignedReceipt, ...]: ...
    async def save_receipts(self, receipts: tuple[SignedReceipt, ...]) -> None: ...


class ModelCache(Protocol):
    """Model bytes by digest, within a quota. Pinned digests are never evicted."""

    async def admit(self, asked: Assignment) -> None:
        """Verify the publisher's signature before anything is loaded, if the assignment or this device requires one.

        Raises ShoalError(SIGNATURE_REQUIRED | SIGNATURE_INVALID | MODEL_ROLLBACK | DISK_FULL).
        """
        ...

    async def ensure(self, digest: str, size: Bytes) -> str:
        """Path of verified bytes. A missing file is fetched, and a broken transfer resumes.

        Raises ShoalError(FETCH_FAILED | MODEL_DIGEST | DISK_FULL | MODEL_UNKNOWN).
        """
        ...

    async def discard(self, digest: str) -> bool:
        """Move bytes aside that are not what their digest says, so that the next `ensure` fetches them again. Returns
        whether there were such. Raises ShoalError(FETCH_FAILED)."""
        ...

    async def collect(self, pinned: frozenset[str]) -> tuple[str, ...]:
        """Delete the least recently used digests over the quota, never a pinned one. Returns the deleted digests."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that this node made of a pushed one."""

    # Path of the model.
    path: str
    # Digest that the bytes at `path` must have.
    digest: str
    # What it is, for people. Empty: it answers as the pushed one does.
    note: str
    # Seconds that making it took.
    prepare_s: Seconds
    # True: it is the compiled form for one device, which takes the shapes that it was compiled for.
    compiled: bool = False
    # Operators that the device's provider took when it compiled them.
    operators: tuple[str, ...] = ()


class ModelPreparer(Protocol):
    """Makes what is loaded in place of a pushed model: in another precision, and compiled for its device."""

    def is_needed(self, asked: Assignment) -> bool:
        """Whether something is made of the assignment's model before it is loaded."""
        ...

    async def prepare(
        self, asked: Assignment, model: str, samples: str, on_start: Callable[[], None]
    ) -> PreparedModel | None:
        """What is loaded for this assignment, made of the pushed model at the path `model` by the samples at `samples`,
        or kept from an earlier time. None: the pushed one, as no compiled form could be made. One is made at a time;
        `on_start` is called when it is this one's turn. Cancelled: it is given up.

        Raises ShoalError(PREPARE_FAILED | PREPARE_UNAVAILABLE | OUT_OF_MEMORY | DISK_FULL | ..).
        """
        ...

    def reject(self, prepared: PreparedModel) -> None:
        """A compiled model could not be loaded: it is not offered again, and none is compiled in its place."""
        ...


class RecordingSink(Protocol):
    """Uploads recordings to the coordinator."""

    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None:
        """Upload the answers of this replica. When this returns, they are the reference of the model.

        Raises ShoalError(CONFLICT | ROLE_DENIED | ..): another recording is the reference already, this one was not
        requested, or no coordinator accepted it yet.
        """
        ...


@dataclass(frozen=True, slots=True)
class NodeTrust:
    """The certificate that this node presents and the CAs that it trusts."""

    # Serial number (decimal) of this node's certificate. Empty without one.
    serial: str = ""
    # Fingerprints of the trusted CAs.
    roots: tuple[str, ...] = ()


class NodeMembership(Protocol):
    """This node's certificate and trusted CAs, kept current on disk."""

    def current_trust(self) -> NodeTrust: ...
    async def adopt(self, trust: Trust) -> None:
        """Trust these CAs from now on. They are on disk when this returns. Raises ShoalError(DISK_FULL |
        MESSAGE_INVALID)."""
        ...

    def on_link_refused(self, refusal: Refusal) -> None:
        """The link was refused. A refusal about the certificate may mean that it needs renewal or is revoked."""
        ...


class ReceiptSigner(Protocol):
    """Signs capability receipts with the node's key."""

    async def sign_receipts(self, receipts: Sequence[Receipt]) -> tuple[SignedReceipt, ...]:
        """In the same order. Raises ShoalError(UNAUTHENTICATED | INTERNAL)."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A replica is loaded and warm, and accepts requests. It comes again when there is more to know of it."""

    # Id of the assignment.
    assignment: str
    # What loading and warming up cost on this device.
    measured: Measured
    # Inputs of the loaded graph; -1 for a dynamic axis.
    inputs: tuple[TensorSpec, ...]
    # Outputs of the loaded graph; -1 for a dynamic axis.
    outputs: tuple[TensorSpec, ...]
    # What people are to know of it: that it had no warm-up and why, that part of it runs beside its device, whether it
    # runs requests in batches.
    note: str = ""
    # Operators that the device's provider took. Empty for the processor's own.
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerPhase:
    """Progress inside the worker: loading, then warming."""

    assignment: str
    phase: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The runtime refused the model. The worker process itself is healthy."""

    assignment: str
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker process ended while it held this assignment."""

    # Id of the assignment.
    assignment: str
    # True for a fatal signal that the process raised itself, and for an exit while loading or running. False for a kill
    # from outside.
    own_fault: bool
    # Why the process ended.
    refusal: Refusal
    # True if the replica was loading or warming up, and its process had no request in flight.
    at_load: bool = False


@dataclass(frozen=True, slots=True)
class WorkerAdopted:
    """A worker of an earlier supervisor answered with its nonce and still holds this assignment."""

    # Id of the assignment.
    assignment: str
    # None while the replica still loads.
    ready: WorkerReady | None
    # As stored by `WorkerPool.record_verdict`. None if no verification finished.
    verdict: Verdict | None = None


WorkerEvent = WorkerReady | WorkerPhase | WorkerFailed | WorkerExited | WorkerAdopted


BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Upper bounds of the histogram buckets of batch sizes (inputs per run)."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Histogram of the batch sizes of answered runs, for one replica."""

    # Runs per bucket of `BATCHES`; the last entry counts larger batches.
    counts: tuple[int, ...] = (0,) * (len(BATCHES) + 1)
    # Sum of all batch sizes.
    inputs: int = 0


NO_BATCHES: Final = Batches()


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counters of one replica, from its worker's last status."""

    # Id of the assignment.
    assignment: str
    # Requests that wait or run in the worker.
    in_flight: int
    # Totals since the replica became ready, one entry per origin of requests.
    served: tuple[Served, ...]
    # Batch sizes of the answered runs.
    batches: Batches = NO_BATCHES
    # Histogram of latencies (`types.latency`); () before the first answer.
    latencies: Counts = ()


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A ready worker of this node that accepts requests, with the address for the front."""

    # Id of the assignment.
    assignment: str
    # The workload that it serves.
    workload: WorkloadKey
    # Path of the worker's Unix socket.
    socket: str
    # Secret that the worker expects in the hello of a connection.
    nonce: str


@dataclass(frozen=True, slots=True)
class VerificationSource:
    """A replica of this node whose answers other replicas are compared with, or may be."""

    # Id of the assignment.
    assignment: str
    # Who may request a comparison. All others are refused.
    verifiers: tuple[Verifier, ...]
    # How many of its requests the front keeps in memory for comparisons, with the workload's consent. 0: none.
    capture: int = 0


@dataclass(frozen=True, slots=True)
class StatefulReplica:
    """A replica of this node whose sessions the front keeps, whether or not its worker runs now."""

    # Id of the assignment.
    assignment: str
    # The workload that it serves.
    workload: WorkloadKey
    # For each input that takes state, the name of the output that returns it.
    session: Mapping[str, str]
    # Where the sessions migrate to. None: they stay.
    handover: Handover | None = None
    # Handover sources: the nodes that may hand sessions to this replica, each for one migration.
    handover_sources: tuple[SessionSource, ...] = ()


class WorkerPool(Protocol):
    """Worker processes: one per assignment or per group of shared assignments, and a spare. Results arrive through
    `events`."""

    async def adopt(self) -> tuple[WorkerAdopted, ...]:
        """Adopt the workers that an earlier supervisor left (pid, start time and nonce checked). Kill all others."""
        ...

    async def start(
        self, assignment: Assignment, path: str, samples: str = "", prepared: PreparedModel | None = None
    ) -> None:
        """Load an assignment from `path`, or the model that this node made of that. `samples` is the path of warm-up
        inputs; empty: generated inputs are used."""
        ...

    async def stop(self, assignment: str) -> None:
        """Kill the worker at once; draining is up to the caller. An unknown name is not an error."""
        ...

    def local(self, assignment: str) -> LocalWorker | None:
        """The address of this worker for the front. None if the worker is not ready."""
        ...

    async def record_verdict(self, assignment: str, verdict: Verdict) -> None:
        """Store the verdict with the worker, so that a supervisor that adopts it knows. An unknown name is not an
        error."""
        ...

    async def probe(self, device: Device) -> Receipt:
        """Measure one device in a worker, in at most 10 s. The caller fills in node and signature."""
        ...

    def worker_bytes(self) -> Bytes:
        """Memory of this node that the next replica's process takes before it has a model; 0 where a spare stands."""
        ...

    def may_share(self, new: Assignment, held: Collection[Assignment]) -> bool:
        """Whether `new` would join a worker that holds `held`."""
        ...

    def events(self) -> AsyncIterator[WorkerEvent]: ...
    async def stats(self) -> tuple[WorkerStats, ...]: ...
    async def close(self, *, keep: bool) -> None:
        """With `keep`, workers keep running for the next supervisor."""
        ...


@dataclass(frozen=True, slots=True)
class FrontStats:
    """Counters of the front process."""

    # True if the front runs, is configured, and accepts requests.
    ready: bool
    # Requests that entered the region at this node, by workload.
    ingress: tuple[Ingress, ...]
    # (assignment, requests in flight towards it), for local endpoints.
    in_flight: tuple[tuple[str, int], ...]
    # Requests that crossed between regions, by agreement.
    agreement_counts: tuple[AgreementCounts, ...] = ()
    # (assignment, sessions it holds).
    sessions: tuple[tuple[str, int], ...] = ()
    # (front of the region, its forwards that this front has refused since it started).
    denied: tuple[tuple[str, int], ...] = ()
    # What limited tenants did here.
    tenants: tuple[TenantUse, ...] = ()
    # Assignments to whose workers it sends nothing new, as it was told that they are unloaded.
    unloaded: tuple[str, ...] = ()
    # Workloads that clients ask for and the front has no routes of. None: it is of a version that does not wait for
    # them.
    asked: tuple[WorkloadKey, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReferenceRecording:
    """Result of recording a replica's answers as a reference."""

    # Whether the answers can serve as a reference.
    verdict: Verdict
    # The sample pack of inputs and answers. Empty if they cannot.
    content: bytes


class FrontControl(Protocol):
    """The data-plane process, kept running. `configure` replaces its whole configuration."""

    @property
    def is_adopted(self) -> bool:
        """True if an earlier supervisor started this front, and it still serves that configuration."""
        ...

    @property
    def waits_for_routes(self) -> bool:
        """False if it is an adopted one of a version that refuses requests for workloads that it has no routes of."""
        ...

    async def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...] = (),
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        verification_sources: tuple[VerificationSource, ...] = (),
        stateful_replicas: tuple[StatefulReplica, ...] = (),
        forwarding: Forwarding | None = None,
        tenants: tuple[TenantLimit, ...] = (),
        unloaded: tuple[UnloadedReplica, ...] = (),
        routes_on_demand: bool = False,
    ) -> None:
        """Replace the configuration. Idempotent. Returns when the front has applied it; a restarted front gets the last
        one again.

        - workers: those that may accept new requests (ready, not draining). A worker that is left out gets no new
          request and finishes those in flight.
        - revoked: serials of certificates to refuse.
        - peers: other regions that a gateway may connect to.
        - verification_sources: workers that other replicas may be compared with.
        - stateful_replicas: replicas of stateful workloads. The sessions of one that is left out are lost.
        - forwarding: who may forward requests here. None: every front of the region.
        - tenants: what tenants may use of this front. One that is left out is unlimited.
        - unloaded: replicas that requests wait for here, as they have no worker now. `wakes` names them.
        - routes_on_demand: workloads may exist that `routes` does not list. Requests for them wait, and `stats` name
          them.
        """
        ...

    def wakes(self) -> AsyncIterator[str]:
        """Assignments that were `unloaded` in the last configuration, and that requests wait for since."""
        ...

    async def lease(self, seconds: Seconds, claim: str) -> None:
        """Grant this node exclusive ownership of its sessions for `seconds` from now. The last call decides when it
        ends.

        A different `claim` after a gap drops the sessions held before.
        """
        ...

    async def verify(self, worker: LocalWorker, asked: Verification, pack: str) -> Verdict:
        """Compare this worker's answers with the source that `asked` names. `pack` is the path of its verified sample
        pack, "" for none.

        Raises ShoalError if no verdict is possible, or not yet; for example, the source does not answer.
        """
        ...

    async def record(self, worker: LocalWorker, asked: Verification, pack: str) -> ReferenceRecording:
        """Record this worker's answers as the reference of its model. `pack` is the path of inputs, "" for generated
        ones.

        Raises ShoalError if there is no recording yet.
        """
        ...

    async def stats(self) -> FrontStats: ...

    async def next_ask(self, within_s: Seconds) -> None:
        """Return when the front asks for routes that it does not have, as its `stats` say, or after `within_s`."""
        ...

    async def close(self, *, keep: bool) -> None: ...
