"""What travels on an agent's link: hello and welcome, then status, receipts, events up and desired sets down."""

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
"""The versions of these messages that this program speaks. What a receiver may pass over, as it does with a field that
it does not know, needs no new one. What it must not pass over, and a value or a kind of message that it would refuse,
is sent only in sessions of the version that brought it: so two versions of a program understand each other."""
SPANS_PROTOCOL: Final = 2
"""Since when an agent can be asked for spans."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session. nonce: fresh, echoed in the welcome. holds: the desired set it acts on; proof: what
    came with that. protocol, newest: the oldest version that it speaks, and the newest (0: that alone)."""

    node: Node
    nonce: str
    holds: Version | None
    protocol: int
    sent_at: Wall
    proof: bytes = b""
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer: the session epoch it issued, its wall clock, the heartbeat it expects. protocol: the
    version that both speak from now on; 0: the first."""

    epoch: int
    nonce: str
    history: str
    term: int
    heartbeat_s: Seconds
    coordinator_time: Wall
    protocol: int = 0


def spoken(hello: Hello, *, oldest: int = OLDEST_PROTOCOL, newest: int = PROTOCOL) -> int | None:
    """The newest version that both speak: who said this hello, and who speaks `oldest` to `newest`. None: there is
    none."""
    common = min(max(hello.newest, hello.protocol), newest)
    return common if common >= max(hello.protocol, oldest) else None


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """Something that happened on a node, for the region's event log."""

    code: str
    subject: str
    message: str
    at: Wall


@dataclass(frozen=True, slots=True)
class Receipts:
    receipts: tuple[SignedReceipt, ...]


@dataclass(frozen=True, slots=True)
class NodeEvents:
    events: tuple[NodeEvent, ...]


@dataclass(frozen=True, slots=True)
class ProbeNow:
    """Measure these devices again (all, when empty)."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A message was dropped, or the session ends; `fatal` sessions are not retried before an operator acts."""

    refusal: Refusal
    fatal: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """What the node has alone, it has for `seconds` more, counted from when it sent the status of this sequence."""

    sequence: int
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class LogsAsked:
    """What the node's processes logged, after what an earlier answer ended with; empty: the last `lines`."""

    request: int
    after: str
    lines: int


@dataclass(frozen=True, slots=True)
class LogLines:
    """The answer to a `LogsAsked`, oldest first. after: where the next one goes on. more: there is more already."""

    request: int
    lines: tuple[str, ...]
    after: str
    more: bool


@dataclass(frozen=True, slots=True)
class SpansAsked:
    """What the node's front remembers of one trace."""

    request: int
    trace: str


@dataclass(frozen=True, slots=True)
class SpansFound:
    """The answer to a `SpansAsked`."""

    request: int
    spans: tuple[Span, ...]


Reported = Receipts | NodeEvents | LogLines | SpansFound
"""What a session carries up beside its hello and its statuses."""
FromAgent = Hello | Status | Reported
ToAgent = Welcome | DesiredSet | ProbeNow | Refused | Lease | LogsAsked | SpansAsked
