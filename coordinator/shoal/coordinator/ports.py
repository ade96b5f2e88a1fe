"""What a coordinator needs from the world. Controllers know these Protocols and no adapter by name."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from cryptography.x509 import Certificate

from shoal.coordinator.core.signals.model import Reading, SignalName
from shoal.types.agreement import Award, Delivered, Grant, Notice, Release, Renewal, Renewed
from shoal.types.assignment import DesiredSet, Status
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Refusal
from shoal.types.device import Role
from shoal.types.link import Hello, Lease, Reported, ToAgent, Welcome
from shoal.types.migration import PackRef
from shoal.types.offer import Advertisement, Answer, Directory, Member, Solicitation
from shoal.types.profile import ModelProfile
from shoal.types.trace import Span
from shoal.types.units import Bytes, Elapsed, Seconds, Wall

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> Elapsed: ...
    def wall(self) -> Wall: ...
    async def sleep(self, seconds: Seconds) -> None: ...


class Ids(Protocol):
    """The only source of names and secrets."""

    def name(self, kind: str) -> str:
        """A fresh name such as `a-4f1c9e02`: [a-z0-9-], never reused."""
        ...

    def secret(self) -> str:
        """At least 128 bits, URL-safe."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """One stored value. revision: the store's counter when this key was last written."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """All or nothing. expect: key -> revision read (0: must be absent); keys not listed are written blindly.

    A key that is put and deleted is put.
    """

    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()
    expect: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A write seen by a watcher; value None: deleted."""

    key: str
    value: bytes | None
    revision: int


class StaleRevision(Exception):
    """A key in `expect` has moved on: read and decide again."""


class Compacted(Exception):
    """Changes after the asked revision are no longer kept: list again, then watch from `revision`, the newest now."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"changes up to {revision} must be listed")
        self.revision = revision


class Store(Protocol):
    """The region's truth: ordered keys (`nodes/edge-1`), bytes, one revision counter, transactions, watches.

    An acknowledged commit survives kill -9 and a power cut. Entry point group `shoal.stores`.
    """

    async def read(self, key: str) -> Record | None: ...
    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        """Records under `prefix` in key order, from the first key greater than `after`; limit 0: all."""
        ...

    async def commit(self, transaction: Transaction) -> int:
        """The new revision. Raises StaleRevision, ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        ...

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        """Every change under `prefix` with a revision greater than `after`, in order. Raises Compacted."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a store held at one revision, in key order."""

    revision: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """directory: of this coordinator alone. scope: whose truth it is (`region/eu`); the rest for stores on servers.

    prefix: before the scope, where the server is shared. ca, certificate, key: PEM files."""

    directory: Path
    scope: str
    prefix: str = "shoal"
    endpoints: tuple[str, ...] = ()
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class Election(Protocol):
    """Who of several coordinators leads. Excludes nobody by itself: the leader's writes are fenced by its term.

    shared: whether there can be others, so that each that is elected begins a new term.
    """

    @property
    def shared(self) -> bool: ...
    async def win(self) -> None:
        """Returns when this one is elected. Again after a loss: stands again."""
        ...

    async def lost(self) -> None:
        """Returns when this one leads no more."""
        ...

    async def leader(self) -> bytes | None:
        """What the one that leads said of itself; None while nobody does. Raises ShoalError(STORE_UNAVAILABLE)."""
        ...

    async def resign(self) -> None:
        """So that another one need not wait."""
        ...


class OpenStore(Store, Protocol):
    """What an entry point of `shoal.stores` opens, by `configured(StoreOptions)`: a store, its copies, its election."""

    @property
    def recovery(self) -> Refusal | None:
        """Why what is there is older than what was acknowledged; opens a new history."""
        ...

    @property
    def outdated(self) -> asyncio.Event:
        """Set once what was read by this store no longer counts (a write that was refused as unavailable happened after
        all, or what is stored was put back): it takes no more writes; whoever remembers anything opens it anew."""
        ...

    async def backup(self) -> Path | None:
        """A verified copy; None where the server keeps its own. Raises ShoalError."""
        ...

    async def snapshot(self) -> Snapshot:
        """Raises ShoalError(STORE_UNAVAILABLE), STORE_CORRUPT where what is read is not what was written."""
        ...

    def election(self, candidate: bytes) -> Election:
        """candidate: what others are told of this coordinator when it leads."""
        ...


class AgentLinks(Protocol):
    """The connected agents. Sending to one that is not connected drops the message: state is resent on connect."""

    async def send(self, node: str, message: ToAgent) -> None: ...
    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None: ...


class Proofs(Protocol):
    """What this region signed of the sets that it told its nodes, so that they can show it to a coordinator that does
    not know it any more."""

    def of(self, desired: DesiredSet) -> bytes:
        """Of its version and assignments; empty where it would be too large to carry along."""
        ...

    def read(self, node: str, proof: bytes) -> DesiredSet | None:
        """What was signed for this node (the rest of the set left out); None where this region did not sign it."""
        ...


class LinkEvents(Protocol):
    """What the link adapter calls; the fleet controller implements it. The adapter has authenticated `node`."""

    async def opened(self, node: str, role: Role, hello: Hello, *, peer: str = "") -> Welcome | Refusal:
        """peer: the address that the hello came from, where the link tells it."""
        ...

    def heard(self, node: str, epoch: int, status: Status) -> Refusal | Lease | None:
        """A heartbeat: never waits. A refusal is counted and told to the node; the session goes on. So is the lease
        that the node asks for."""
        ...

    async def received(self, node: str, epoch: int, message: Reported | Hello) -> Refusal | None:
        """Any other message, likewise."""
        ...

    async def closed(self, node: str, epoch: int) -> None: ...

    async def blinded(self, nodes: Collection[str]) -> None:
        """What carries these nodes' sessions does not answer the coordinator: their silence is its own."""
        ...

    async def sighted(self) -> None:
        """It answers again; called as often as one likes."""
        ...


class Broker(Protocol):
    """Who may speak at the MQTT broker. Both are kept in mind and carried out as soon as the broker is there."""

    async def admit(self, node: str) -> None: ...
    async def expel(self, node: str) -> None:
        """Ends its connection too."""
        ...

    async def certificate(self) -> Certificate | None:
        """What it shows to who connects now; None when it is not there, or shows none of a CA that is trusted."""
        ...


@dataclass(frozen=True, slots=True)
class Heard(Generic[T]):
    """What another region said, its signature verified. evidence: the signed message as it came, for the ledger."""

    by: str
    what: T
    evidence: bytes


class Peers(Protocol):
    """Other regions. Everything sent is signed as this region; everything returned was verified to be the other's.

    Raises ShoalError(PEER_UNREACHABLE) where the outcome is unknown (it may have been done), any other code where the
    other region refused."""

    async def bid(self, region: str, solicitation: Solicitation) -> Heard[Answer]:
        """Asked directly: where the federation cannot be reached."""
        ...

    async def award(self, region: str, award: Award) -> Heard[Grant]: ...
    async def release(self, region: str, release: Release) -> None: ...
    async def renew(self, region: str, renewal: Renewal) -> Heard[Renewed]: ...
    async def notify(self, region: str, notice: Notice) -> None: ...
    def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        """A model's bytes, as an agreement allows."""
        ...

    async def measure(self, region: str) -> Seconds:
        """One round trip to its coordinator."""
        ...


class PeerEvents(Protocol):
    """What the peers' adapter calls on the delegate's side, for regions it has authenticated and that may trade.

    A refusal is raised as ShoalError. Repeated calls get the first answer and change nothing."""

    async def bid(self, asked: Heard[Solicitation]) -> Answer: ...
    async def awarded(self, award: Heard[Award]) -> Grant: ...
    async def released(self, release: Heard[Release]) -> None: ...
    async def renewed(self, renewal: Heard[Renewal]) -> Renewed: ...
    async def noticed(self, notice: Heard[Notice]) -> None:
        """Of either side, from the other."""
        ...

    async def lend(self, region: str, agreement: str, digest: str) -> None:
        """Whether this region may have these bytes.

        Raises ShoalError(AGREEMENT_UNKNOWN | TENANT_DENIED | RESIDENCY)."""
        ...


class FederationLink(Protocol):
    """The federation that this region joined. Raises ShoalError(FEDERATION_UNREACHABLE), or as it refused."""

    async def advertise(self, advertisement: Advertisement) -> Directory | None:
        """The directory where it changed since the last that was returned."""
        ...

    async def solicit(self, solicitation: Solicitation) -> tuple[Heard[Answer], ...]:
        """What the candidates answered in time; answers that are not validly signed are left out and counted."""
        ...

    async def report(self, delivered: tuple[Delivered, ...], entries: tuple[LedgerEntry, ...]) -> int:
        """Sequence of the first ledger entry that it lacks."""
        ...


@dataclass(frozen=True, slots=True)
class Joined:
    """What a region knows of the federation that it is in. roots: its CAs (PEM). address: where members call it."""

    federation: str
    address: str
    roots: tuple[str, ...]
    directory: Directory


class FederationDoor(Protocol):
    """How a region comes into a federation, stays known there, and goes. Raises ShoalError(FEDERATION_UNREACHABLE), or
    as the federation refused."""

    async def join(self, address: str, token: str, member: Member) -> Joined:
        """address: where tokens are redeemed. Raises also ShoalError(TOKEN_* | CERT_UNTRUSTED)."""
        ...

    async def update(self, member: Member) -> Directory:
        """This region as it is from now on."""
        ...

    async def leave(self) -> None: ...


class Candidates(Protocol):
    """The federation's way to regions that may bid."""

    async def ask(self, member: Member, asked: bytes, within: Seconds) -> Heard[Answer]:
        """asked: the origin's signed Solicitation as it came. What is returned was verified to be the member's.

        Raises ShoalError(PEER_UNREACHABLE), or as the member refused."""
        ...


class Blobs(Protocol):
    """Models by digest. Bytes are verified before they are visible."""

    async def stat(self, digest: str) -> Bytes | None: ...
    def read(self, digest: str, offset: int) -> AsyncIterator[bytes]: ...
    async def write(self, chunks: AsyncIterator[bytes], *, size: Bytes, digest: str) -> str:
        """Path of the complete, verified file. Raises ShoalError(MODEL_DIGEST | MODEL_TOO_LARGE | DISK_FULL)."""
        ...

    async def delete(self, digest: str) -> None: ...


class Signals(Protocol):
    """Feeds of price and carbon, called as the Region document calls them."""

    async def read(self, name: SignalName, source: str) -> tuple[Reading, ...]:
        """In order of time, at least one; all that the feed says, forecasts included.

        Raises ShoalError(SOURCE_DENIED | SOURCE_UNREACHABLE | SIGNAL_INVALID).
        """
        ...


class Inspector(Protocol):
    """Reads a stranger's model in a child process with limits on time, memory and files."""

    async def inspect(self, path: str, digest: str) -> ModelProfile:
        """Raises ShoalError(MODEL_INVALID | MODEL_PATH | MODEL_TOO_LARGE | CUSTOM_OP_DENIED)."""
        ...

    async def inspect_pack(self, path: str, digest: str, model: ModelProfile) -> PackRef:
        """Samples for a model with these inputs and outputs. Raises ShoalError as `inspect` does."""
        ...


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that the region's CA signed. serial: decimal, as in the audit log. issuer: the CA's fingerprint."""

    pem: bytes
    serial: str
    not_after: Wall
    issuer: str


@dataclass(frozen=True, slots=True)
class RootInfo:
    """One CA of the region. state: issuing | next | trusted | retired."""

    fingerprint: str
    not_after: Wall
    state: str


class Authority(Protocol):
    """The region's CA. What it issues comes from the caller, never from the signing request."""

    @property
    def ca_pem(self) -> bytes:
        """Every CA that is trusted, the one that issues first."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the issuing CA's certificate (DER), hex: what join tokens pin."""
        ...

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of all that are trusted, the one that issues first."""
        ...

    def recognise(self, certificate: Certificate, *, retired: bool = False) -> str:
        """The fingerprint of the CA that signed it, whatever its dates. retired: also one that is trusted no more.

        Raises ShoalError(CERT_UNTRUSTED).
        """
        ...

    def check(self, csr_pem: bytes, name: str) -> None:
        """Raises ShoalError(CSR_DENIED) when the request asks for more than a certificate for `name`."""
        ...

    def issue(
        self, csr_pem: bytes, role: Role, name: str, *, hosts: tuple[str, ...], lifetime_s: Seconds, wall: Wall
    ) -> Issued:
        """hosts: addresses that the holder may serve at. Raises ShoalError(CSR_DENIED)."""
        ...


class RotatingAuthority(Authority, Protocol):
    """A CA that can be followed by another. stage: idle -> trust -> issue -> idle; since: when it began."""

    @property
    def stage(self) -> str: ...
    @property
    def since(self) -> Wall: ...
    @property
    def roots(self) -> tuple[str, ...]:
        """Certificates (PEM) of all that are trusted, the one that issues first."""
        ...

    def infos(self) -> tuple[RootInfo, ...]: ...
    async def begin(self, wall: Wall) -> None:
        """idle -> trust. Durable when it returns, as the others are. Raises ShoalError(CONFLICT) at another stage."""
        ...

    async def promote(self, wall: Wall) -> None:
        """trust -> issue."""
        ...

    async def retire(self, wall: Wall) -> None:
        """issue -> idle; the old key is deleted."""
        ...


class Traces(Protocol):
    """Who collects spans."""

    @property
    def wanted(self) -> bool:
        """Whether anybody does."""
        ...

    def told(self, spans: Sequence[Span]) -> None:
        """Returns at once; what came of it nobody waits for."""
        ...


class Meter(Protocol):
    """Counters, beside the events; `shoal_coordinator_<name>_total`."""

    def count(self, name: str, **labels: str) -> None: ...
    def add(self, name: str, amount: float, **labels: str) -> None: ...
