"""Messages of an agent's link: hello and welcome, then status, receipts and events up, and desired sets down."""

from dataclasses import dataclass
from typing import Final

from shoal.types.assignment import DesiredSet, Status, Version
from shoal.types.codes import Refusal
from shoal.types.device import Node
from shoal.types.receipt import SignedReceipt
from shoal.types.trace import Span
from shoal.types.units import Seconds, Wall

OLDEST_PROTOCOL: Final = 1
PROTOCOL: Final = 2
"""Versions of these messages that this program speaks: OLDEST_PROTOCOL to PROTOCOL.

A receiver ignores fields that it does not know, so such a field needs no new version. A field that must not be ignored
needs one, as does a value or kind of message that an older receiver would refuse. It is sent only in sessions of the
version that introduced it. So two versions of a program understand each other.
"""
SPANS_PROTOCOL: Final = 2
"""First version in which an agent answers SpansAsked."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session."""

    # What the agent reports about its node.
    node: Node
    # Fresh for each session; the welcome echoes it.
    nonce: str
    # Version of the desired set that the node acts on; None without any.
    holds: Version | None
    # Oldest protocol version that the agent speaks.
    protocol: int
    # When it was sent, by the node's clock.
    sent_at: Wall
    # Proof that came with the desired set that the node acts on; empty without any.
    proof: bytes = b""
    # Newest protocol version that the agent speaks; 0: only `protocol`.
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer to a hello."""

    # Session epoch that the coordinator issued.
    epoch: int
    # Nonce of the hello that this answers.
    nonce: str
    # History of the coordinator's store (see Version).
    history: str
    # Term of the leading coordinator (see Version).
    term: int
    # Interval of status reports that the coordinator expects.
    heartbeat_s: Seconds
    # The coordinator's clock.
    coordinator_time: Wall
    # Protocol version of this session; 0: the first.
    protocol: int = 0


def negotiate_protocol(hello: Hello, *, oldest: int = OLDEST_PROTOCOL, newest: int = PROTOCOL) -> int | None:
    """The newest version that both sides speak: the sender of the hello, and a program that speaks `oldest` to
    `newest`. None if there is none."""
    common = min(max(hello.newest, hello.protocol), newest)
    return common if common >= max(hello.protocol, oldest) else None


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """An event on a node, for the region's event log."""

    # A code of `types.codes`; the coordinator logs any other one as CODE_UNKNOWN.
    code: str
    # What it happened to, such as an assignment or a device.
    subject: str
    # The event in words.
    message: str
    # When it happened, by the node's clock.
    at: Wall


@dataclass(frozen=True, slots=True)
class Receipts:
    receipts: tuple[SignedReceipt, ...]


@dataclass(frozen=True, slots=True)
class NodeEvents:
    events: tuple[NodeEvent, ...]


@dataclass(frozen=True, slots=True)
class ProbeNow:
    """Asks the node to measure these devices again (all, when empty)."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A message was dropped, or the session ends. After a `fatal` one the agent waits until an operator acts."""

    refusal: Refusal
    fatal: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """Exclusive use of what the node asked a lease for."""

    # Status report that the lease answers.
    sequence: int
    # Length of the lease, counted from when the node sent that report.
    seconds: Seconds
    # Stays the same until the region gives the node up; empty from a coordinator that does not send it.
    claim: str = ""


@dataclass(frozen=True, slots=True)
class LogsAsked:
    """Asks for what the node's processes logged."""

    # Correlates the answer with the request.
    request: int
    # Where an earlier answer ended; empty: the last `lines`.
    after: str
    # Limit of the number of lines.
    lines: int


@dataclass(frozen=True, slots=True)
class LogLines:
    """The answer to a `LogsAsked`, oldest line first."""

    # As in the `LogsAsked` that it answers.
    request: int
    lines: tuple[str, ...]
    # Where the next request continues.
    after: str
    # True: more lines exist already.
    more: bool


@dataclass(frozen=True, slots=True)
class SpansAsked:
    """Asks for the spans of one trace that the node's front keeps."""

    # Correlates the answer with the request.
    request: int
    # Id of the trace.
    trace: str


@dataclass(frozen=True, slots=True)
class SpansFound:
    """The answer to a `SpansAsked`."""

    # As in the `SpansAsked` that it answers.
    request: int
    spans: tuple[Span, ...]


Reported = Receipts | NodeEvents | LogLines | SpansFound
"""Messages that an agent sends up, apart from its hello and its statuses."""
FromAgent = Hello | Status | Reported
ToAgent = Welcome | DesiredSet | ProbeNow | Refused | Lease | LogsAsked | SpansAsked
