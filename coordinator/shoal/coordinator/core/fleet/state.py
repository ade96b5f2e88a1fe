"""What the coordinator believes about its nodes: immutable values, replaced as messages and time come in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from shoal.types.assignment import Crossing, Ingress, Observed, Version
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device, Node, Reading
from shoal.types.link import OLDEST_PROTOCOL
from shoal.types.receipt import Receipt
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import PartitionRule

DEFAULTS = PartitionRule()
ORIGIN = Elapsed(0.0)
NEVER = Wall(0.0)

CLOCK_ALLOWANCE_S = Seconds(300.0)
"""How far two clocks may differ: by less than this when they are kept."""

SUSPECT_AFTER_BEATS = 3
"""A node is suspect when this many of its heartbeats are missing."""
SETTLE_BEATS = 2
"""Heartbeats that a new replica is in the routes, and a draining one out of them, before the old one goes: the time
that routes take to reach every front."""


class Liveness(StrEnum):
    """never-seen: known from the store, silent since this coordinator began to watch, still in its window."""

    NEVER_SEEN = "never-seen"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Timing:
    """How silence is judged, for the whole region: the shortest that any workload's `partition` rule asks for."""

    heartbeat_s: Seconds = DEFAULTS.heartbeat_s
    lost_after_s: Seconds = DEFAULTS.lost_after_s

    @property
    def suspect_after_s(self) -> Seconds:
        return Seconds(SUSPECT_AFTER_BEATS * self.heartbeat_s)

    @property
    def settle_s(self) -> Seconds:
        return Seconds(SETTLE_BEATS * self.heartbeat_s)


@dataclass(frozen=True, slots=True)
class Twins:
    """Two agents showed one identity at once, and an operator has yet to say what that means. running, other: where the
    one with the session and the one that was refused called from."""

    running: str
    other: str
    since: Wall


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node as last heard.

    epoch 0: no session yet. heard_at: last valid message. reported: a full status came in this boot of the node, so
    `observed` is whole. strikes: absurd reports less clean ones since; quarantined while they persist. refusal: the
    last absurdity. since: when `liveness` became what it is. revoked: its certificates are refused; it counts as lost.
    serial, roots: of its certificate and of the CAs that it trusts, as it says. skew_s: our wall clock less its own, as
    last heard; nothing is decided by it. hidden: the coordinator has lost what carried its session, so that its silence
    proves nothing; excused_until: it is not judged for its silence before. crossings: by agreement, as last said;
    crossed: of earlier fronts of the node, which began to count anew. counts_since: when this coordinator first heard
    that its front, as it is now, was ready. protocol: that of its session.
    """

    node: Node
    liveness: Liveness = Liveness.NEVER_SEEN
    since: Elapsed = ORIGIN
    epoch: int = 0
    sequence: int = 0
    connected: bool = False
    heard_at: Elapsed = ORIGIN
    last_seen: Wall = NEVER
    reported: bool = False
    version: Version | None = None
    observed: Mapping[str, Observed] = field(default_factory=dict)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    receipts: Mapping[str, Receipt] = field(default_factory=dict)
    ingress: tuple[Ingress, ...] = ()
    front_ready: bool = False
    cordoned: bool = False
    strikes: int = 0
    quarantined: bool = False
    refusal: Refusal | None = None
    revoked: bool = False
    twins: Twins | None = None
    serial: str = ""
    roots: tuple[str, ...] = ()
    skew_s: Seconds = Seconds(0.0)
    hidden: bool = False
    excused_until: Elapsed = ORIGIN
    crossings: Mapping[str, Crossing] = field(default_factory=dict)
    crossed: Mapping[str, Crossing] = field(default_factory=dict)
    counts_since: Elapsed = ORIGIN
    protocol: int = OLDEST_PROTOCOL

    @property
    def is_skewed(self) -> bool:
        """Whether its clock, or ours, is wrong."""
        return abs(self.skew_s) > CLOCK_ALLOWANCE_S

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def unheard(self) -> Refusal | None:
        """Why its silence says nothing about it, where that is so."""
        if not self.hidden:
            return None
        found = f"{self.name} comes by the broker, which the coordinator does not reach"
        return Refusal(
            Code.WAITING_FOR_LINK, found, "a broker that answers", "start the broker; what runs there goes on"
        )

    def device(self, name: str) -> Device | None:
        return next((device for device in self.node.devices if device.name == name), None)


@dataclass(frozen=True, slots=True)
class MassSilence:
    """At least three nodes and a third of those alive fell silent in one window: their replacement is paced.

    nodes: by name. sure: enough of them were suspect; else some are only late."""

    since: Elapsed
    nodes: tuple[str, ...]
    sure: bool


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes of the region by name.

    patient_until: the observer itself started or paused, so nobody becomes suspect before. ticked_at: the last `judge`.
    """

    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    timing: Timing = Timing()
    patient_until: Elapsed = ORIGIN
    ticked_at: Elapsed | None = None
    mass_silence: MassSilence | None = None

    def put(self, state: NodeState) -> "Fleet":
        return replace(self, nodes={**self.nodes, state.name: state})


@dataclass(frozen=True, slots=True)
class LivenessChange:
    """silent_s: seconds without a message when it was judged."""

    node: str
    before: Liveness
    after: Liveness
    silent_s: Seconds
