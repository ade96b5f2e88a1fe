"""What travels on an agent's link: hello and welcome, then status, receipts, events up and desired sets down."""

from dataclasses import dataclass

from shoal.types.assignment import DesiredSet, Status, Version
from shoal.types.codes import Refusal
from shoal.types.device import Node
from shoal.types.receipt import SignedReceipt
from shoal.types.units import Seconds, Wall


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session. nonce: fresh, echoed in the welcome. holds: the desired set it acts on; proof: what
    came with that."""

    node: Node
    nonce: str
    holds: Version | None
    protocol: int
    sent_at: Wall
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer: the session epoch it issued, its wall clock, the heartbeat it expects."""

    epoch: int
    nonce: str
    history: str
    term: int
    heartbeat_s: Seconds
    coordinator_time: Wall


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


Reported = Receipts | NodeEvents | LogLines
"""What a session carries up beside its hello and its statuses."""
FromAgent = Hello | Status | Reported
ToAgent = Welcome | DesiredSet | ProbeNow | Refused | Lease | LogsAsked
