"""What the reconciler reads, remembers and answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.coordinator.core.fleet.state import DEFAULTS, Fleet
from shoal.coordinator.core.placement.model import (
    DocumentRef,
    Move,
    Plan,
    RegionFacts,
    Reservation,
    Signatures,
    Slot,
    Trial,
    Triple,
)
from shoal.types.agreement import GatewayRef
from shoal.types.assignment import Assignment, Measured, PeerTrust
from shoal.types.codes import Code, Refusal
from shoal.types.migration import PackRef
from shoal.types.offer import Offer
from shoal.types.profile import ModelProfile
from shoal.types.route import Endpoint, Route
from shoal.types.units import Bytes, Elapsed, Seconds, UsdPerHour, Wall
from shoal.types.workload import Intent, Quota, WorkloadKey


@dataclass(frozen=True, slots=True)
class Reference:
    """What the assignment `by` answered."""

    pack: PackRef
    by: str


References = Mapping[tuple[str, str], Reference]
"""By model and by the samples that were answered (digests; empty: made-up ones)."""


class Stage(StrEnum):
    """Where the coordinator is with one assignment. serving: seen READY since it was assigned, whatever came after."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Mark:
    """When an assignment entered its stage, on the coordinator's clock; under which terms it was last confirmed."""

    stage: Stage
    since: Elapsed
    terms: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A workload's route before it is written for one node: endpoints as peers see them.

    Those of another region's gateways are for this region's gateways; every other node goes through these: `through`.
    stateful: as in Route; keeping: replicas that take no new sessions now and may have some, of no weight.
    """

    generation: int
    endpoints: tuple[Endpoint, ...]
    pending_code: str
    pending_reason: str
    through: tuple[Endpoint, ...] = ()
    stateful: bool = False
    keeping: tuple[Endpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Crashes:
    """Own-fault crashes of one triple. seen: (assignment, restarts) already counted: a replay changes nothing."""

    triple: Triple
    count: int
    last_at: Elapsed
    seen: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Remembered:
    """What warming a model on a device showed, kept when its replica is gone."""

    trial: Trial
    measured: Measured


@dataclass(frozen=True, slots=True)
class Pending:
    """Something speaks for a move, since then. told: what holds it back, as events said last; empty: nothing yet.
    unseen: since when its replica cannot be looked at; None while it can."""

    since: Elapsed
    told: str = ""
    unseen: Elapsed | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What reconciling carries from step to step; persisted with the desired sets in one transaction.

    issued: assignments ever created, so that ids never repeat. marks: by assignment id. By `str(WorkloadKey)`: tables;
    short (since when replicas, or a standby, could not be placed); without_ready (since when no replica was ready);
    away (since when the region that shall run it is in its route); back (since when home, which shall run it again, has
    all its replicas there). pending: what speaks for a move, by `ASSIGNMENT TRIGGER`. idle: by
    `NODE/DEVICE` of those that can sleep, since when nothing has been on them. Plain JSON: no key is a tuple.
    """

    issued: int = 0
    marks: Mapping[str, Mark] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    crashes: tuple[Crashes, ...] = ()
    measured: tuple[Remembered, ...] = ()
    short: Mapping[str, Elapsed] = field(default_factory=dict)
    without_ready: Mapping[str, Elapsed] = field(default_factory=dict)
    away: Mapping[str, Elapsed] = field(default_factory=dict)
    back: Mapping[str, Elapsed] = field(default_factory=dict)
    pending: Mapping[str, Pending] = field(default_factory=dict)
    idle: Mapping[str, Elapsed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wait:
    """Why something is not done yet. since, retry_at, gives_up_at: wall clock, for people."""

    workload: WorkloadKey
    assignment: str
    node: str
    code: Code
    reason: str
    since: Wall
    retry_at: Wall | None
    gives_up_at: Wall | None


@dataclass(frozen=True, slots=True)
class Happened:
    """An event for the region's log. code: ASSIGNED, READY, DRAINING, REMOVED, POISONED, or a Code."""

    code: str
    subject: str
    message: str
    node: str
    workload: WorkloadKey | None


@dataclass(frozen=True, slots=True)
class Delegated:
    """A workload that another region runs. gateways: of that region. ready: it serves there, so that its route may lead
    there and home replicas may go. wanted: it shall run there; False: notice was given, and home takes it back. model,
    precision: as it was bid. returns: why it is to come home, once that is shown to be as good; empty: it stays, or is
    broken. way_s: there and back, between the regions. bid: what it was given there for. joules: of an inference there,
    as that region meters it; None: it has not said."""

    agreement: str
    region: str
    gateways: tuple[GatewayRef, ...]
    ready: bool
    wanted: bool = True
    model: str = ""
    precision: str = ""
    returns: str = ""
    way_s: Seconds = Seconds(0.0)
    # Not compared: an agreement is of one, and what is unknown of an offer (NaN) equals nothing.
    bid: Offer | None = field(default=None, compare=False)
    joules: float | None = None

    @property
    def is_broken(self) -> bool:
        """Breached: nothing is compared with it, and nobody waits for it."""
        return not self.wanted and not self.returns


@dataclass(frozen=True, slots=True)
class Course:
    """A workload on its way between home and another region. share: of its requests that go there. home: it is wanted
    here. goes: there, not home. leaves: the agreement is to be given up. stays: there is no way back from there but
    another move. agreement: says nothing of any other; empty until there is one. wrong: its answers are: it gets no
    request, even where home has nobody. rests: it came home lately, and leaves again only where it must; asked: as long
    as its documents ask for this, however long ago; empty: whatever they ask for. over: its move is."""

    region: str
    share: float
    home: bool
    goes: bool = False
    leaves: bool = False
    stays: bool = False
    agreement: str = ""
    wrong: bool = False
    rests: bool = False
    asked: str = ""
    over: bool = False


@dataclass(frozen=True, slots=True)
class Content:
    """A node's desired set without its version and credentials; a new generation is due only when this changes."""

    assignments: tuple[Assignment, ...] = ()
    routes: tuple[Route, ...] = ()
    pins: tuple[str, ...] = ()
    heartbeat_s: Seconds = DEFAULTS.heartbeat_s
    peers: tuple[PeerTrust, ...] = ()
    asleep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Replaced:
    """A new replica that takes over from one that serves. migration: what waited for it; empty: the plan wants it."""

    migration: str
    workload: WorkloadKey
    source_node: str
    source: Assignment
    target_node: str
    target: Assignment


@dataclass(frozen=True, slots=True)
class Fetched:
    """So much of a model's bytes, at once. by: a node, or the agreement that another region fetches under. at: when it
    ended."""

    by: str
    model: str
    at: Wall
    size: Bytes


@dataclass(frozen=True, slots=True)
class World:
    """Everything the region's controller knows when it takes one step.

    delegated: own workloads that run elsewhere. Those that other regions have run here are among `intents`, of tenant
    `guests`, by agreement. reserved: for bids that are held. peers: whom this region's gateways may meet. moves,
    blocked: as Inputs has them. courses: of workloads that go to another region, or come home. crossed: agreements that
    moves ended at, or came home from. turned: why the last
    trade of a workload came to nothing. fetched: from this coordinator, all of it since `counted_since`; None: nothing
    was counted. references: what replicas recorded.
    """

    region: RegionFacts
    fleet: Fleet
    intents: tuple[Intent, ...]
    profiles: Mapping[str, ModelProfile]
    desired: Mapping[str, Content]
    memory: Memory
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    costs: Mapping[Slot, UsdPerHour] = field(default_factory=dict)
    rtt_s: Mapping[str, Seconds] = field(default_factory=dict)
    documents: tuple[DocumentRef, ...] = ()
    seed: int = 0
    signatures: Signatures = field(default_factory=Signatures)
    delegated: Mapping[WorkloadKey, Delegated] = field(default_factory=dict)
    reserved: tuple[Reservation, ...] = ()
    peers: tuple[PeerTrust, ...] = ()
    moves: tuple[Move, ...] = ()
    blocked: Mapping[tuple[WorkloadKey, Trial], Refusal] = field(default_factory=dict)
    courses: Mapping[WorkloadKey, Course] = field(default_factory=dict)
    crossed: frozenset[str] = frozenset()
    turned: Mapping[WorkloadKey, Refusal] = field(default_factory=dict)
    fetched: tuple[Fetched, ...] = ()
    counted_since: Wall | None = None
    references: References = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """One step's outcome. desired: every node's content, changed or not. replaced: moves that begin or have a place.
    The caller persists, then sends."""

    plan: Plan
    desired: Mapping[str, Content]
    memory: Memory
    waits: tuple[Wait, ...]
    events: tuple[Happened, ...]
    replaced: tuple[Replaced, ...] = ()
