"""What a coordinator needs from the world. Controllers know these Protocols and no adapter by name."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shoal.types.codes import Refusal
from shoal.types.device import Role
from shoal.types.link import FromAgent, Hello, ToAgent, Welcome
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, Elapsed, Seconds, Wall


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


class AgentLinks(Protocol):
    """The connected agents. Sending to one that is not connected drops the message: state is resent on connect."""

    async def send(self, node: str, message: ToAgent) -> None: ...
    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None: ...


class LinkEvents(Protocol):
    """What the link adapter calls; the fleet controller implements it. The adapter has authenticated `node`."""

    async def opened(self, node: str, role: Role, hello: Hello) -> Welcome | Refusal: ...
    async def received(self, node: str, epoch: int, message: FromAgent) -> Refusal | None:
        """A refusal is counted and told to the node; the session goes on."""
        ...

    async def closed(self, node: str, epoch: int) -> None: ...


class Blobs(Protocol):
    """Models by digest. Bytes are verified before they are visible."""

    async def stat(self, digest: str) -> Bytes | None: ...
    def read(self, digest: str, offset: int) -> AsyncIterator[bytes]: ...
    async def write(self, chunks: AsyncIterator[bytes], *, size: Bytes, digest: str) -> str:
        """Path of the complete, verified file. Raises ShoalError(MODEL_DIGEST | MODEL_TOO_LARGE | DISK_FULL)."""
        ...

    async def delete(self, digest: str) -> None: ...


class Inspector(Protocol):
    """Reads a stranger's model in a child process with limits on time, memory and files."""

    async def inspect(self, path: str, digest: str) -> ModelProfile:
        """Raises ShoalError(MODEL_INVALID | MODEL_PATH | MODEL_TOO_LARGE | CUSTOM_OP_DENIED)."""
        ...


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that the region's CA signed. serial: decimal, as in the audit log."""

    pem: bytes
    serial: str
    not_after: Wall


class Authority(Protocol):
    """The region's CA. What it issues comes from the caller, never from the signing request."""

    @property
    def ca_pem(self) -> bytes: ...
    @property
    def fingerprint(self) -> str:
        """SHA-256 of the CA's certificate (DER), hex: what join tokens pin."""
        ...

    def check(self, csr_pem: bytes, name: str) -> None:
        """Raises ShoalError(CSR_DENIED) when the request asks for more than a certificate for `name`."""
        ...

    def issue(
        self, csr_pem: bytes, role: Role, name: str, *, hosts: tuple[str, ...], lifetime_s: Seconds, wall: Wall
    ) -> Issued:
        """hosts: addresses that the holder may serve at. Raises ShoalError(CSR_DENIED)."""
        ...


class Meter(Protocol):
    """Counters for what is refused or dropped, beside the events; `shoal_coordinator_<name>_total`."""

    def count(self, name: str, **labels: str) -> None: ...
