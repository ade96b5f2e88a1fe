"""What the coordinator believes about its nodes: immutable values, replaced as messages arrive and time passes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from shoal.types.assignment import AgreementCounts, Ingress, Observed, Subscriptions, Version
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device, Node, Reading, SilentDevice
from shoal.types.link import OLDEST_PROTOCOL
from shoal.types.receipt import Receipt
from shoal.types.tenant import TenantUse
from shoal.types.units import UNKNOWN_TIME, Elapsed, Seconds, Wall
from shoal.types.workload import PartitionRule

DEFAULT_PARTITION = PartitionRule()
ORIGIN = Elapsed(0.0)
NEVER = Wall(0.0)

CLOCK_ALLOWANCE_S = Seconds(300.0)
"""Two clocks that are kept correct differ by less than this."""

SUSPECT_AFTER_HEARTBEATS = 3
"""A node is suspect when this many of its heartbeats are missing."""
ROUTE_PROPAGATION_HEARTBEATS = 2
"""Heartbeats that routes take to reach every front. A new replica is in the routes for this long, and a draining one
out of them, before the old one is removed."""


class Liveness(StrEnum):
    """never-seen: known from the store and silent since this coordinator started to watch it, within `lost_after_s`."""

    NEVER_SEEN = "never-seen"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LivenessTiming:
    """How silence is judged in the whole region: by the shortest times that any workload's `partition` rule asks
    for."""

    # Interval at which nodes send a heartbeat.
    heartbeat_s: Seconds = DEFAULT_PARTITION.heartbeat_s
    # A node is lost after this many seconds without a message.
    lost_after_s: Seconds = DEFAULT_PARTITION.lost_after_s

    @property
    def suspect_after_s(self) -> Seconds:
        return Seconds(SUSPECT_AFTER_HEARTBEATS * self.heartbeat_s)

    @property
    def route_propagation_s(self) -> Seconds:
        return Seconds(ROUTE_PROPAGATION_HEARTBEATS * self.heartbeat_s)


@dataclass(frozen=True, slots=True)
class DuplicateIdentity:
    """Two agents used one identity at the same time, and no operator has resolved it yet."""

    # Address of the agent that has the session.
    running: str
    # Address of the agent that was refused.
    other: str
    # When these two addresses were first seen together.
    since: Wall


@dataclass(slots=True)
class NodeState:
    """One node as last observed.

    Its fields are Final, and the class is not frozen: a frozen one of so many takes three times as long to make, and
    each heartbeat makes one.
    """

    # What the node said about itself in its hello.
    node: Final[Node]
    # As of the last `update_liveness`.
    liveness: Final[Liveness] = Liveness.NEVER_SEEN
    # When `liveness` became what it is.
    since: Final[Elapsed] = ORIGIN
    # Number of the node's current session; 0: no session yet.
    epoch: Final[int] = 0
    # Sequence number of the last status of this session; 0: none yet.
    sequence: Final[int] = 0
    # True while its session is open. A closed session alone does not make it suspect.
    connected: Final[bool] = False
    # When its last valid message arrived, or when this coordinator began to watch it.
    heard_at: Final[Elapsed] = ORIGIN
    # When its last valid message arrived, by the wall clock; NEVER: none so far.
    last_seen: Final[Wall] = NEVER
    # When the region first opened a session for it, as in its record; 0: not known.
    joined_at: Final[Wall] = UNKNOWN_TIME
    # True once a full status arrived since the node booted, so that `observed` is complete.
    has_full_status: Final[bool] = False
    # Version of the desired set that the node last persisted; None before the first.
    version: Final[Version | None] = None
    # Its assignments as it reports them, by assignment id.
    observed: Final[Mapping[str, Observed]] = field(default_factory=dict)
    # Last valid reading of each device, by device name. A device that does not answer its node has none.
    readings: Final[Mapping[str, Reading]] = field(default_factory=dict)
    # By device name: why it does not answer its node, and since when. Older agents do not say.
    silent: Final[Mapping[str, SilentDevice]] = field(default_factory=dict)
    # Capability receipts by device name.
    receipts: Final[Mapping[str, Receipt]] = field(default_factory=dict)
    # Requests that entered the region at this node since its front started, by workload and tenant.
    ingress: Final[tuple[Ingress, ...]] = ()
    # What limited tenants did at its front since that started.
    tenants: Final[tuple[TenantUse, ...]] = ()
    # True where its front answers requests.
    front_ready: Final[bool] = False
    # True where an operator allows nothing new on it.
    cordoned: Final[bool] = False
    # Absurd reports, minus the clean ones since.
    strikes: Final[int] = 0
    # True from QUARANTINE_AT strikes on, until the strikes are back at 0.
    quarantined: Final[bool] = False
    # The last absurd report; None where no strikes are left.
    refusal: Final[Refusal | None] = None
    # True where its certificates are refused; it counts as lost.
    revoked: Final[bool] = False
    # Set while two agents use its identity; None: no conflict.
    duplicate: Final[DuplicateIdentity | None] = None
    # Serial number of its certificate in decimal, as it reports it; empty: not reported yet.
    serial: Final[str] = ""
    # Fingerprints of the CAs that it trusts, as it reports them; empty: not reported yet.
    roots: Final[tuple[str, ...]] = ()
    # Our wall clock minus its own, as of its last message. Only the check of receipts' timestamps depends on it.
    skew_s: Final[Seconds] = Seconds(0.0)
    # True while the coordinator cannot reach the broker that carries its session. Its silence then proves nothing.
    link_lost: Final[bool] = False
    # The node is not judged for its silence before this time.
    grace_until: Final[Elapsed] = ORIGIN
    # Requests to and from other regions by agreement id, as last reported by its current front.
    agreement_counts: Final[Mapping[str, AgreementCounts]] = field(default_factory=dict)
    # The same for earlier fronts of the node, summed up, because a new front counts from 0.
    earlier_agreement_counts: Final[Mapping[str, AgreementCounts]] = field(default_factory=dict)
    # When this coordinator first heard that the node's current front was ready.
    counts_since: Final[Elapsed] = ORIGIN
    # Protocol version of its session.
    protocol: Final[int] = OLDEST_PROTOCOL
    # Workloads whose routes it asks for. None: not reported since this coordinator started.
    subscriptions: Final[Subscriptions | None] = None

    @property
    def is_skewed(self) -> bool:
        """Whether its clock or ours is wrong."""
        return abs(self.skew_s) > CLOCK_ALLOWANCE_S

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def link_lost_refusal(self) -> Refusal | None:
        """Why its silence proves nothing; None where it does."""
        if not self.link_lost:
            return None
        found = f"{self.name} comes by the broker, which the coordinator does not reach"
        return Refusal(
            Code.WAITING_FOR_LINK, found, "a broker that answers", "start the broker; what runs there goes on"
        )

    def device(self, name: str) -> Device | None:
        return next((device for device in self.node.devices if device.name == name), None)

    def same_hardware(self, device: Device) -> tuple[str, ...]:
        """Names of all devices that run on its hardware, its own among them."""
        own = device.hardware or device.name
        return tuple(each.name for each in self.node.devices if own in (each.hardware, each.name))

    def same_memory(self, device: Device) -> tuple[str, ...]:
        """Names of all devices that work in the same memory, its own among them."""
        return tuple(each.name for each in self.node.devices if each.memory_root == device.memory_root)

    def stand_in(self, device: str = "") -> str:
        """What stands in for that device; without a name, for any device of the node."""
        found = (each.stand_in for each in self.node.devices if device in ("", each.name))
        return next((each for each in found if each), "")


@dataclass(frozen=True, slots=True)
class MassSilence:
    """At least three nodes, and at least a third of those alive, fell silent within one window. The coordinator then
    replaces their replicas gradually, in the order of `nodes` (by name)."""

    # When the silence was detected.
    since: Elapsed
    nodes: tuple[str, ...]
    # True where enough of them were suspect or lost; False where some are only late.
    is_confirmed: bool


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes of the region."""

    # By name.
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    # How silence is judged.
    timing: LivenessTiming = LivenessTiming()
    # No node becomes suspect or lost before this time, because the coordinator itself started or paused.
    grace_until: Elapsed = ORIGIN
    # When `update_liveness` last ran; None: never.
    ticked_at: Elapsed | None = None
    # The mass silence that is under way; None: none.
    mass_silence: MassSilence | None = None

    def stand_in(self, node: str, device: str = "") -> str:
        """As `NodeState.stand_in`; empty for a node that the region does not know."""
        state = self.nodes.get(node)
        return "" if state is None else state.stand_in(device)

    def arithmetic(self, node: str, device: str, precision: str) -> str:
        """Precision in which that device computes models of this one; that of the models where it is unknown."""
        state = self.nodes.get(node)
        found = state.device(device) if state is not None else None
        return precision if found is None else found.arithmetic(precision)

    def with_node(self, state: NodeState) -> "Fleet":
        return replace(self, nodes={**self.nodes, state.name: state})


@dataclass(frozen=True, slots=True)
class LivenessChange:
    """One node's change of liveness, from `before` to `after`."""

    node: str
    before: Liveness
    after: Liveness
    # Seconds without a message when it was judged.
    silent_s: Seconds
