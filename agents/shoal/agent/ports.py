"""What the agent needs from the world. The supervisor knows these Protocols and no adapter by name."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from shoal.types.assignment import (
    Assignment,
    Credential,
    Crossing,
    DesiredSet,
    Ingress,
    Measured,
    PeerTrust,
    Served,
    Trust,
)
from shoal.types.codes import Refusal, ShoalError
from shoal.types.device import Device, Reading
from shoal.types.latency import Counts
from shoal.types.link import FromAgent, Hello, LogLines, LogsAsked, Refused, SpansAsked, SpansFound, ToAgent, Welcome
from shoal.types.migration import Giver, Handover, Verdict, Verification, Verifier
from shoal.types.profile import TensorSpec
from shoal.types.receipt import Rates, Receipt, SignedReceipt
from shoal.types.route import Route
from shoal.types.units import Bytes, Elapsed, Seconds, Wall, Watts
from shoal.types.workload import WorkloadKey


class Clock(Protocol):
    def now(self) -> Elapsed: ...
    def wall(self) -> Wall: ...
    async def sleep(self, seconds: Seconds) -> None: ...


class Sightings(Protocol):
    """What must outlive this process of when its coordinator was last heard. Nothing here waits for a disk."""

    def heard(self) -> Elapsed | None:
        """The coordinator's last word to this run or an earlier one, on the Clock's scale; None without any."""
        ...

    def linked(self, coordinator_time: Wall) -> None:
        """A session began; coordinator_time: what its welcome says."""
        ...

    def cut_off(self) -> None: ...


class Log(Protocol):
    """One structured event; `error` marks what a person should look at."""

    def __call__(self, event: str, *, error: bool = False, **fields: str | float | None) -> None: ...


class Logs(Protocol):
    """What this node's processes logged."""

    async def read(self, asked: LogsAsked) -> LogLines: ...


class Spans(Protocol):
    """What this node's front remembers of traces."""

    async def spans(self, asked: SpansAsked) -> SpansFound:
        """Raises ShoalError while the front is being restarted."""
        ...


class Driver(Protocol):
    """One family of devices (entry point group `shoal.devices`). Imports no runtime: runs in the supervisor."""

    def discover(self) -> tuple[Device, ...]:
        """Devices present now; empty where the family's library or hardware is missing. Never raises for absence."""
        ...

    def read(self, device: str) -> Reading:
        """Raises ShoalError(DEVICE_LOST)."""
        ...

    def pace(self, device: str) -> "Pace | None":
        """How a worker must pace and meter this device; None for a real one."""
        ...

    def rest(self, device: str, asleep: bool) -> Seconds:
        """Puts a device to sleep, or wakes it; asked again it changes nothing. Until it can run something, from now on:
        of one that sleeps what waking takes. 0 and no sleep where it cannot (`Device.rest` is None)."""
        ...


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """What configuration tells drivers. emulate: one emulated device each, `PROFILE` or `PROFILE=SIZE` of its memory.
    wake_scale: they wake in so many times what their profile says. condition: a file that says how they are now."""

    emulate: tuple[str, ...] = ()
    time_scale: float = 1.0
    wake_scale: float = 1.0
    condition: Path | None = None


class DriverFactory(Protocol):
    """What an entry point of group `shoal.devices` is. Raises ShoalError(FIELD_INVALID) on options it cannot meet."""

    def __call__(self, clock: Clock, options: DriverOptions) -> Driver: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """An emulated device's behaviour.

    One inference of Work w takes launch_s + w.nodes * node_s + max(w.conv_flops / conv rate + (w.matmul_flops +
    w.other_flops) / matmul rate, w.bytes / elementwise_bytes) seconds of device time; its answer waits `time_scale`
    times that.
    """

    profile: str
    source: str
    rates: Rates
    time_scale: float
    memory_bytes: Bytes
    active_w: Watts
    idle_w: Watts


class Session(Protocol):
    """One connected session of the link. Both methods raise ShoalError when it is over."""

    welcome: Welcome

    async def send(self, message: FromAgent) -> None: ...
    async def receive(self) -> ToAgent: ...
    async def close(self) -> None: ...


class LinkRefused(ShoalError):
    """The coordinator answered a hello with a refusal. fatal: as in Refused."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.refusal)
        self.refused = refused


class Link(Protocol):
    async def connect(self, hello: Hello) -> Session:
        """Raises LinkRefused, ShoalError(COORDINATOR_UNREACHABLE | CERT_* | ...)."""
        ...


class Journal(Protocol):
    """The desired set and receipts on disk. `save` returns only when a power cut cannot lose it."""

    async def load(self) -> DesiredSet | None:
        """The last saved set; a corrupt file is set aside and the previous verified copy returned."""
        ...

    async def save(self, desired: DesiredSet) -> None:
        """Raises ShoalError(DISK_FULL)."""
        ...

    async def load_receipts(self) -> tuple[SignedReceipt, ...]: ...
    async def save_receipts(self, receipts: tuple[SignedReceipt, ...]) -> None: ...


class Cache(Protocol):
    """Model bytes by digest, with a quota; pinned digests stay."""

    async def admit(self, asked: Assignment) -> None:
        """Judges the publisher's signature before anything is loaded, where the assignment or this device asks for one.

        Raises ShoalError(SIGNATURE_REQUIRED | SIGNATURE_INVALID | MODEL_ROLLBACK | DISK_FULL)."""
        ...

    async def ensure(self, digest: str, size: Bytes) -> str:
        """Path of verified bytes, fetched (resumably) when absent.

        Raises ShoalError(FETCH_FAILED | MODEL_DIGEST | DISK_FULL | MODEL_UNKNOWN)."""
        ...

    async def discard(self, digest: str) -> None:
        """Set aside bytes that turned out corrupt, so that the next `ensure` fetches again."""
        ...

    async def collect(self, pinned: frozenset[str]) -> tuple[str, ...]:
        """Delete least recently used digests over the quota, never a pinned one; returns what went."""
        ...


class Recordings(Protocol):
    """Where recordings go: the coordinator."""

    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None:
        """What this replica of the model answered. When it returns, that is the model's reference.

        Raises ShoalError(CONFLICT | ROLE_DENIED | ..): another's is, or that was not asked, or nobody took it yet."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """What this node shows and whom it believes. serial: of its certificate. roots: fingerprints of CAs."""

    serial: str = ""
    roots: tuple[str, ...] = ()


class Membership(Protocol):
    """This node's place in its region: certificate and trust, kept up on disk."""

    def held(self) -> Held: ...
    async def adopt(self, trust: Trust) -> None:
        """Trusts these CAs from now on; on disk when it returns. Raises ShoalError(DISK_FULL | MESSAGE_INVALID)."""
        ...

    def doubt(self, refusal: Refusal) -> None:
        """The link was refused so: about a certificate, it may mean that this node's must be renewed, or is revoked."""
        ...


class Signer(Protocol):
    def sign_receipt(self, receipt: Receipt) -> SignedReceipt: ...


@dataclass(frozen=True, slots=True)
class WorkerReady:
    assignment: str
    measured: Measured
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class WorkerPhase:
    """Progress inside the worker: loading -> warming."""

    assignment: str
    phase: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The runtime refused the model; the process itself is well."""

    assignment: str
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """own_fault: a fatal signal raised by itself or an exit while loading or running; a kill from outside is not."""

    assignment: str
    own_fault: bool
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class WorkerAdopted:
    """A worker of an earlier supervisor answered with its nonce and still holds this assignment. verdict: as `judged`
    was told of it."""

    assignment: str
    ready: WorkerReady | None
    verdict: Verdict | None = None


WorkerEvent = WorkerReady | WorkerPhase | WorkerFailed | WorkerExited | WorkerAdopted


BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Upper bounds of how many inputs a request brings."""


@dataclass(frozen=True, slots=True)
class Batches:
    """How many inputs each answered request brought, to one replica. counts: requests by the first of `BATCHES` that is
    no less; the last: of more. inputs: of all of them."""

    counts: tuple[int, ...] = (0,) * (len(BATCHES) + 1)
    inputs: int = 0


NO_BATCHES: Final = Batches()


@dataclass(frozen=True, slots=True)
class WorkerStats:
    assignment: str
    in_flight: int
    served: tuple[Served, ...]
    batches: Batches = NO_BATCHES
    latencies: Counts = ()


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker of this node that is ready and takes requests: where the front reaches it (Unix socket, its nonce)."""

    assignment: str
    workload: WorkloadKey
    socket: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Witness:
    """A replica of this node that another is compared with, or may be. verifiers: who may ask it; nobody else. capture:
    how many of its requests are kept in memory for that, with the workload's consent."""

    assignment: str
    verifiers: tuple[Verifier, ...]
    capture: int = 0


@dataclass(frozen=True, slots=True)
class Keeper:
    """A replica of this node whose sessions the front keeps, whether or not its worker is there now. session: each
    input that takes state, and the output that gives it. handover: where they go; givers: who may hand it some."""

    assignment: str
    workload: WorkloadKey
    session: Mapping[str, str]
    handover: Handover | None = None
    givers: tuple[Giver, ...] = ()


class Workers(Protocol):
    """Worker processes: one per assignment, or for several shared ones, and a spare. Outcomes come by `events`."""

    async def adopt(self) -> tuple[WorkerAdopted, ...]:
        """Workers left by an earlier supervisor (pid, start time, nonce checked); what cannot be adopted is ended."""
        ...

    async def start(self, assignment: Assignment, path: str) -> None: ...
    async def stop(self, assignment: str) -> None:
        """Ends the worker at once; draining is the caller's business. Unknown names are no error."""
        ...

    def local(self, assignment: str) -> LocalWorker | None:
        """Where the front reaches this started worker; None when there is none."""
        ...

    async def judged(self, assignment: str, verdict: Verdict) -> None:
        """So that whoever adopts the worker knows. Unknown names are no error."""
        ...

    async def probe(self, device: Device) -> Receipt:
        """Measure one device in a worker, at most 10 s. node and signature are filled in by the caller."""
        ...

    def events(self) -> AsyncIterator[WorkerEvent]: ...
    async def stats(self) -> tuple[WorkerStats, ...]: ...
    async def close(self, *, keep: bool) -> None:
        """keep: leave workers running for the next supervisor."""
        ...


@dataclass(frozen=True, slots=True)
class FrontStats:
    ready: bool
    ingress: tuple[Ingress, ...]
    in_flight: tuple[tuple[str, int], ...]
    """(assignment, requests in flight towards it) for local endpoints."""
    crossings: tuple[Crossing, ...] = ()
    sessions: tuple[tuple[str, int], ...] = ()
    """(assignment, sessions that it has)"""


@dataclass(frozen=True, slots=True)
class Recorded:
    """verdict: whether its answers can be a reference. content: the pack of inputs and answers; empty where not."""

    verdict: Verdict
    content: bytes


class Front(Protocol):
    """The data-plane process, kept running; configured whole each time."""

    @property
    def adopted(self) -> bool:
        """Whether it runs since an earlier supervisor, so that it serves what that one told it, if nobody else does."""
        ...

    async def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...] = (),
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        witnesses: tuple[Witness, ...] = (),
        keepers: tuple[Keeper, ...] = (),
    ) -> None:
        """Idempotent. Returns when the front has taken it; a front that is restarted gets the last one again.

        workers: those that may take new requests (ready, not draining). One that is left out gets nothing new and
        finishes what it has. revoked: serials of certificates that are refused. peers: other regions that a gateway
        may meet. witnesses: of the workers, those that others may be compared with. keepers: of stateful workloads; the
        sessions of one that is left out are lost."""
        ...

    async def lease(self, seconds: Seconds) -> None:
        """What this node has alone (sessions), it has for so long from now, and no longer than it was last told."""
        ...

    async def verify(self, worker: LocalWorker, asked: Verification, pack: str) -> Verdict:
        """Compares what this worker answers with what `asked` names. pack: path of its verified bytes, "" without one.

        Raises ShoalError where there is no verdict to be had, or not yet: the source does not answer, say."""
        ...

    async def record(self, worker: LocalWorker, asked: Verification, pack: str) -> Recorded:
        """What this worker answers, as its model's reference. pack: path of inputs, "": they are made up.

        Raises ShoalError where that came to nothing yet."""
        ...

    async def stats(self) -> FrontStats: ...
    async def close(self, *, keep: bool) -> None: ...
