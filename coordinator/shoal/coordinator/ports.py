"""Ports of the coordinator: the Protocols that controllers depend on. Controllers name no adapter."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from shoal.coordinator.core.signals.model import SignalName, SignalReading
from shoal.types.agreement import Award, Grant, Notice, Release, Renewal, Renewed, ReportContent
from shoal.types.assignment import DesiredSet, Status
from shoal.types.codes import Refusal
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.link import Hello, Lease, Reported, ToAgent, Welcome
from shoal.types.metric import CounterMetric
from shoal.types.migration import PackRef
from shoal.types.offer import Advertisement, Answer, Directory, FederationRoots, Member, Solicitation
from shoal.types.profile import ModelProfile
from shoal.types.trace import Span
from shoal.types.units import Bytes, Elapsed, Seconds, Wall

T = TypeVar("T")
NEVER: Final = Wall(0.0)


class Clock(Protocol):
    """Monotonic time, wall time and sleep. Controllers use no other clock."""

    def now(self) -> Elapsed: ...
    def wall(self) -> Wall: ...
    async def sleep(self, seconds: Seconds) -> None: ...


class IdSource(Protocol):
    """The only source of names and secrets."""

    def name(self, kind: str) -> str:
        """A fresh name such as `a-4f1c9e02`: [a-z0-9-], never reused."""
        ...

    def secret(self) -> str:
        """At least 128 bits, URL-safe."""
        ...


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """One stored value."""

    key: str
    value: bytes
    # The store's revision counter when this key was last written.
    revision: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """A compare-and-set over several keys: all or nothing. A key in both `puts` and `deletes` is put."""

    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()
    # Revision read of each key; 0: the key must be absent. A key that is not listed is written unconditionally.
    expect: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreChange:
    """A write that a watcher sees."""

    key: str
    # None: the key was deleted.
    value: bytes | None
    revision: int


class StaleRevision(Exception):
    """A key in `expect` has a newer revision: the caller reads it again and decides again."""


class Compacted(Exception):
    """The store dropped changes after the requested revision. The caller lists again, then watches from `revision`, the
    newest one now.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"changes up to {revision} must be listed")
        self.revision = revision


class Store(Protocol):
    """The region's state of record: ordered keys (`nodes/edge-1`), bytes, one revision counter, transactions, watches.

    An acknowledged commit survives kill -9 and a power cut. Entry point group `shoal.stores`.
    """

    async def read(self, key: str) -> StoreRecord | None: ...
    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[StoreRecord, ...]:
        """Records under `prefix` in key order, from the first key greater than `after`; limit 0: all."""
        ...

    async def commit(self, transaction: Transaction) -> int:
        """The new revision. Raises StaleRevision, ShoalError(STORE_FULL | STORE_UNAVAILABLE)."""
        ...

    def watch(self, prefix: str, after: int) -> AsyncIterator[StoreChange]:
        """Every change under `prefix` with a revision greater than `after`, in order. Raises Compacted."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Everything that a store held at one revision, in key order."""

    # The store's revision counter at that time.
    revision: int
    # All records, in key order.
    records: tuple[StoreRecord, ...]


@dataclass(frozen=True, slots=True)
class StoreSetting:
    """A setting that a kind of store declares: the flag `--STORE-NAME` and the variable `SHOAL_STORE_NAME`."""

    # Its name without the store's: `endpoints`.
    name: str
    # What it means, for people.
    help: str
    # Value where it is not given.
    default: str = ""
    # Form of the value, for people; empty: the name says it.
    metavar: str = ""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to open a store."""

    # Data directory of this coordinator; no other process uses it.
    directory: Path
    # Whose state it is, as a key prefix: `region/eu`.
    scope: str
    # Values of the settings that the store declares, by name.
    settings: Mapping[str, str] = field(default_factory=dict)


class Election(Protocol):
    """Leader election among coordinators. It excludes nobody by itself: the term fences the leader's writes.

    is_shared: there can be other candidates, so each elected leader begins a new term.
    """

    @property
    def is_shared(self) -> bool: ...
    async def campaign(self) -> None:
        """Returns when this coordinator is elected. After a loss, a new call campaigns again."""
        ...

    async def wait_lost(self) -> None:
        """Returns when this coordinator has lost the leadership."""
        ...

    async def leader(self) -> bytes | None:
        """The leader's candidate value; None while there is no leader. Raises ShoalError(STORE_UNAVAILABLE)."""
        ...

    async def resign(self) -> None:
        """Gives up the leadership at once, so that the next leader need not wait for the lease to expire."""
        ...


class OpenStore(Store, Protocol):
    """What an entry point of `shoal.stores` opens: store, backups and election."""

    @property
    def recovery(self) -> Refusal | None:
        """Why the stored state is older than what was acknowledged; the region then opens a new history."""
        ...

    @property
    def stale(self) -> asyncio.Event:
        """Set once values read through this store may be wrong: a write refused as unavailable happened after all, or
        the stored state was restored from a copy. The store then takes no more writes, and callers with cached values
        reopen it.
        """
        ...

    async def backup(self) -> Path | None:
        """Path of a verified copy; None where the server keeps its own. Raises ShoalError."""
        ...

    async def snapshot(self) -> StoreSnapshot:
        """Raises ShoalError(STORE_UNAVAILABLE), or STORE_CORRUPT where the bytes read differ from those written."""
        ...

    def election(self, candidate: bytes) -> Election:
        """candidate: the value that other coordinators read from `leader` while this one leads."""
        ...


class StoreKind(Protocol):
    """An entry point of `shoal.stores`."""

    @property
    def SETTINGS(self) -> tuple[StoreSetting, ...]: ...

    async def from_options(self, given: StoreOptions, /) -> OpenStore:
        """Raises ShoalError, also where a setting is missing or wrong."""
        ...


class AgentLinks(Protocol):
    """The connected agents. A message to an agent that is not connected is dropped: state is resent on connect."""

    async def send(self, node: str, message: ToAgent) -> None: ...
    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None: ...


class Proofs(Protocol):
    """Signatures of this region over desired sets. A node presents one to a coordinator whose restored store lacks that
    set.
    """

    def sign(self, desired: DesiredSet) -> bytes:
        """A signature over the version and assignments; empty where it would be too large to send along."""
        ...

    def verify(self, node: str, proof: bytes) -> DesiredSet | None:
        """The signed version and assignments for this node, without the rest of the set; None where this region did not
        sign the proof.
        """
        ...


class LinkEvents(Protocol):
    """Callbacks of the link adapter; the fleet controller implements them. The adapter has authenticated `node`."""

    async def on_hello(self, node: str, role: Role, hello: Hello, *, peer: str = "") -> Welcome | Refusal:
        """peer: the address that the hello came from; empty where the link does not know it."""
        ...

    def on_status(self, node: str, epoch: int, status: Status) -> Refusal | Lease | None:
        """Handles a heartbeat; never waits. A refusal is counted and sent to the node, and the session stays open. A
        Lease is sent when the node asked for one.
        """
        ...

    async def on_message(self, node: str, epoch: int, message: Reported | Hello) -> Refusal | None:
        """Handles any other message. A refusal is counted and sent to the node, and the session stays open."""
        ...

    async def on_close(self, node: str, epoch: int) -> None: ...

    async def on_link_lost(self, nodes: Collection[str]) -> None:
        """The broker that carries these nodes' sessions does not answer the coordinator, so their silence proves
        nothing about them.
        """
        ...

    async def on_link_closed(self, sessions: Mapping[str, int], *, is_lost: bool) -> None:
        """The connection to the broker is over and these sessions with it: the epoch of each by node. Their silence
        proves nothing about them. is_lost: False where the coordinator gave it up, as for another certificate.
        """
        ...

    async def on_link_restored(self) -> None:
        """The broker answers again. Idempotent."""
        ...


class BrokerAccess(Protocol):
    """Access control of the MQTT broker. Both changes are remembered and applied once the broker is reachable."""

    async def admit(self, node: str) -> None: ...
    async def expel(self, node: str) -> None:
        """Removes the node's access and closes its connection."""
        ...

    async def certificate(self) -> bytes | None:
        """The broker's server certificate, PEM; None when it is unreachable, or when no trusted CA signed it."""
        ...


@dataclass(frozen=True, slots=True)
class VerifiedMessage(Generic[T]):
    """A message of another region whose signature was verified."""

    # Name of the region that signed it.
    signer: str
    # The parsed message.
    content: T
    # The signed message as received, for the ledger.
    evidence: bytes


class PeerRegions(Protocol):
    """Calls to other regions. Everything sent is signed as this region; everything returned was verified as the
    other's.

    Raises ShoalError(PEER_UNREACHABLE) where the outcome is unknown (the call may have taken effect), any other code
    where the other region refused.
    """

    async def request_bid(self, region: str, solicitation: Solicitation) -> VerifiedMessage[Answer]:
        """Solicits the region directly, for when the federation is unreachable."""
        ...

    async def award(self, region: str, award: Award) -> VerifiedMessage[Grant]: ...
    async def release(self, region: str, release: Release) -> None: ...
    async def renew(self, region: str, renewal: Renewal) -> VerifiedMessage[Renewed]: ...
    async def notify(self, region: str, notice: Notice) -> None: ...
    def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        """A model's bytes, as an agreement allows."""
        ...

    async def measure(self, region: str) -> Seconds:
        """One round trip to the region's coordinator."""
        ...


class PeerEvents(Protocol):
    """Callbacks of the peer adapter on the delegate's side, for authenticated regions that may trade.

    A refusal is raised as ShoalError. Repeated calls get the first answer and change nothing.
    """

    async def on_solicitation(self, solicitation: VerifiedMessage[Solicitation]) -> Answer: ...
    async def on_award(self, award: VerifiedMessage[Award]) -> Grant: ...
    async def on_release(self, release: VerifiedMessage[Release]) -> None: ...
    async def on_renewal(self, renewal: VerifiedMessage[Renewal]) -> Renewed: ...
    async def on_notice(self, notice: VerifiedMessage[Notice]) -> None:
        """A notice of the agreement's other side, be it origin or delegate."""
        ...

    async def authorise_fetch(self, region: str, agreement: str, digest: str) -> None:
        """Checks that this region may have these bytes.

        Raises ShoalError(AGREEMENT_UNKNOWN | TENANT_DENIED | RESIDENCY).
        """
        ...


class FetchCounter(Protocol):
    """Counts the models that were fetched from this coordinator."""

    def track(self, by: str, model: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Passes the chunks on and counts them. by: a node, or the agreement that a region fetches under."""
        ...


@dataclass(frozen=True, slots=True)
class AdvertiseAnswer:
    """What the federation answers to an advertisement."""

    # The directory, if the region's version of it is outdated.
    directory: Directory | None = None
    # The federation's own CAs, if the region trusts others; not checked yet.
    roots: FederationRoots | None = None


class FederationLink(Protocol):
    """Calls to the federation that this region joined. Raises ShoalError(FEDERATION_UNREACHABLE), or the federation's
    refusal.
    """

    async def advertise(self, advertisement: Advertisement) -> AdvertiseAnswer: ...

    async def solicit(self, solicitation: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        """The candidates' answers that came in time. Answers without a valid signature are left out and counted."""
        ...

    async def report(self, content: ReportContent) -> int:
        """Returns the sequence of the first ledger entry that the federation lacks."""
        ...


@dataclass(frozen=True, slots=True)
class JoinedFederation:
    """What a region knows of the federation that it is a member of."""

    # The federation's name.
    federation: str
    # Where members call the federation.
    address: str
    # Certificates (PEM) of the federation's CAs.
    roots: tuple[str, ...]
    # The newest directory received.
    directory: Directory
    # When `roots` last changed, by the federation's clock; 0: not since it was founded.
    roots_since: Wall = NEVER


class FederationRegistry(Protocol):
    """Membership in a federation: join, update, leave. Raises ShoalError(FEDERATION_UNREACHABLE), or the federation's
    refusal.
    """

    async def join(self, address: str, token: str, member: Member) -> JoinedFederation:
        """address: where tokens are redeemed. Also raises ShoalError(TOKEN_* | CERT_UNTRUSTED)."""
        ...

    async def update(self, member: Member) -> Directory:
        """Replaces this region's entry in the directory; returns the new directory."""
        ...

    async def leave(self) -> None: ...


class CandidateRegions(Protocol):
    """The federation's client for regions that may bid."""

    async def ask(self, member: Member, request: bytes, timeout_s: Seconds) -> VerifiedMessage[Answer]:
        """request: the origin's signed Solicitation, unchanged. The returned answer was verified as the member's.

        Raises ShoalError(PEER_UNREACHABLE), or the member's refusal.
        """
        ...


class Blobs(Protocol):
    """Content-addressed models and packs, by digest. Bytes are verified before they are visible."""

    async def digests(self) -> tuple[str, ...]:
        """Digests of all that are complete."""
        ...

    async def stat(self, digest: str) -> Bytes | None: ...
    def read(self, digest: str, offset: int) -> AsyncIterator[bytes]: ...
    def path(self, digest: str) -> str:
        """Of the complete file, which need not be there. Raises ShoalError(MODEL_DIGEST) for an invalid digest."""
        ...

    async def write(self, chunks: AsyncIterator[bytes], *, size: Bytes, digest: str) -> str:
        """Path of the complete, verified file. Raises ShoalError(MODEL_DIGEST | MODEL_TOO_LARGE | DISK_FULL)."""
        ...

    async def delete(self, digest: str, is_unrecorded: Callable[[], Awaitable[bool]]) -> None:
        """Deletes the bytes that are there now, unless `is_unrecorded`, which is asked after that, says no, or the same
        bytes are written once more meanwhile: another coordinator may do that, and record them."""
        ...


class Signals(Protocol):
    """Feeds of price and carbon, by the names in the Region document."""

    async def read(self, name: SignalName, source: str) -> tuple[SignalReading, ...]:
        """All readings of the feed in order of time, forecasts included; at least one.

        Raises ShoalError(SOURCE_DENIED | SOURCE_UNREACHABLE | SIGNAL_INVALID).
        """
        ...


class Inspector(Protocol):
    """Reads an untrusted model in a child process with limits on time, memory and files."""

    async def inspect(
        self,
        path: str,
        digest: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_background: bool = False,
    ) -> ModelProfile:
        """shapes: of inputs, that costs are counted at; others are chosen. is_background: whether nobody waits for it;
        it runs with the lowest priority, and no other inspection waits for it. Raises ShoalError(MODEL_UNKNOWN |
        MODEL_DIGEST | MODEL_INVALID | MODEL_PATH | MODEL_TOO_LARGE | CUSTOM_OP_DENIED | INVALID_ARGUMENT | INTERNAL);
        INTERNAL where this machine could not inspect it."""
        ...

    async def inspect_pack(self, path: str, digest: str, model: ModelProfile) -> PackRef:
        """Samples for a model with these inputs and outputs. Raises ShoalError as `inspect` does."""
        ...


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate that the region's CA signed."""

    # The certificate, PEM.
    pem: bytes
    # Decimal, as in the audit log.
    serial: str
    # When it expires.
    not_after: Wall
    # Fingerprint of the CA that signed it: SHA-256 of its DER, hex.
    issuer: str


@dataclass(frozen=True, slots=True)
class RecognisedCertificate:
    """A certificate that a CA of the region signed."""

    identity: Identity
    # Fingerprint of the CA that signed it: SHA-256 of its DER, hex.
    issuer: str


@dataclass(frozen=True, slots=True)
class RootInfo:
    """One CA of the region."""

    # SHA-256 of the CA's certificate (DER), hex.
    fingerprint: str
    # When it expires.
    not_after: Wall
    # issuing | next | trusted | retired
    state: str


class CertificateIssuer(Protocol):
    """The region's CA as it issues certificates. The caller decides what a certificate contains; the signing request
    does not.
    """

    @property
    def ca_pem(self) -> bytes:
        """Every trusted CA certificate, the issuing one first."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the issuing CA's certificate (DER), hex: what join tokens pin."""
        ...

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of all trusted CAs, the issuing one first."""
        ...

    def check(self, csr_pem: bytes, name: str) -> None:
        """Raises ShoalError(CSR_DENIED) when the request asks for more than a certificate for `name`."""
        ...

    def issue(
        self, csr_pem: bytes, role: Role, name: str, *, hosts: tuple[str, ...], lifetime_s: Seconds, wall: Wall
    ) -> IssuedCertificate:
        """hosts: addresses that the holder may serve at. Raises ShoalError(CSR_DENIED)."""
        ...


class CertificateAuthority(CertificateIssuer, Protocol):
    """A CertificateIssuer that also knows the certificates that it issued."""

    def recognise(self, certificate_pem: bytes, *, retired: bool = False) -> RecognisedCertificate:
        """Checks who signed the certificate, but not its dates. retired: also accept a CA that is no longer trusted.

        Raises ShoalError(CERT_UNTRUSTED | CERT_NAME_INVALID).
        """
        ...

    def verify_renewal(self, certificate_pem: bytes, csr_pem: bytes, nonce: str, signature: bytes) -> None:
        """Checks that the key of a recognised certificate signed a request for the next one.

        Raises ShoalError(SIGNATURE_INVALID).
        """
        ...


class RotatingAuthority(CertificateAuthority, Protocol):
    """A CA that another one can replace. stage: idle -> trust -> issue -> idle; since: when the stage began."""

    @property
    def stage(self) -> str: ...
    @property
    def since(self) -> Wall: ...
    @property
    def roots(self) -> tuple[str, ...]:
        """Certificates (PEM) of all trusted CAs, the issuing one first."""
        ...

    def infos(self) -> tuple[RootInfo, ...]: ...
    async def begin(self, wall: Wall) -> None:
        """idle -> trust. Durable when it returns, as are the others. Raises ShoalError(CONFLICT) at another stage."""
        ...

    async def promote(self, wall: Wall) -> None:
        """trust -> issue."""
        ...

    async def retire(self, wall: Wall) -> None:
        """issue -> idle; the old key is deleted."""
        ...


class SharedAuthority(RotatingAuthority, Protocol):
    """A RotatingAuthority whose files several processes share."""

    async def reload(self) -> None:
        """Takes over the stage that another process has reached. Raises ShoalError(STATE_CORRUPT)."""
        ...


class SpanExporter(Protocol):
    """Sends spans to a trace collector."""

    @property
    def is_enabled(self) -> bool:
        """True if a collector is configured."""
        ...

    def export(self, spans: Sequence[Span]) -> None:
        """Queues the spans and returns at once. Failures are not reported to the caller."""
        ...


class Meter(Protocol):
    """Counters of `shoal.coordinator.metrics`. Raises ValueError for labels that a declaration does not allow."""

    def count(self, metric: CounterMetric, **labels: str) -> None: ...
    def add(self, metric: CounterMetric, amount: float, **labels: str) -> None: ...
