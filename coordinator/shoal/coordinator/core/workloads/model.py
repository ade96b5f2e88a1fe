"""Input, stored state and output of the workload reconciler."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from immutables import Map

from shoal.coordinator.core.fleet.state import DEFAULT_PARTITION, Fleet
from shoal.coordinator.core.placement.model import (
    NO_OVERHEADS,
    Move,
    MoveOverheads,
    PlacementPlan,
    RegionFacts,
    Reservation,
    Signatures,
    Slot,
    Trial,
    Triple,
)
from shoal.coordinator.core.prediction.exchange import ImportedMeasurements, with_imported
from shoal.coordinator.core.prediction.residuals import Residual
from shoal.coordinator.core.workloads.cross_region_state import CrossRegionState
from shoal.types.agreement import GatewayRef
from shoal.types.assignment import Assignment, Forwarding, Measured, PeerTrust
from shoal.types.codes import Code, Refusal
from shoal.types.migration import PackRef
from shoal.types.offer import Offer
from shoal.types.profile import ModelProfile
from shoal.types.route import Endpoint, Route
from shoal.types.tenant import TenantLimit
from shoal.types.units import Bytes, Elapsed, Seconds, UsdPerHour, Wall
from shoal.types.workload import Intent, Quota, WorkloadKey


@dataclass(frozen=True, slots=True)
class Reference:
    """The recorded answers of a model."""

    # The samples with the answers.
    pack: PackRef
    # Assignment that gave the answers.
    by: str


References = Mapping[tuple[str, str], Reference]
"""By (model digest, digest of the samples answered; empty: generated inputs)."""


class AssignmentStage(StrEnum):
    """The coordinator's view of one assignment."""

    STARTING = "starting"
    SERVING = "serving"
    """It was seen READY since it was assigned, whatever happened later."""
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Mark:
    """The coordinator's view of one assignment."""

    # STARTING, SERVING or DRAINING.
    stage: AssignmentStage
    # When it entered the stage, on the coordinator's clock.
    since: Elapsed
    # Terms (`terms_of`) under which it was last confirmed; empty: never.
    terms: str = ""
    # True: the last plan has others in its role, and not this one. They stay if this one was gone and comes back.
    is_left_out: bool = False


@dataclass(frozen=True, slots=True)
class RouteTable:
    """A workload's route before it is written for one node: the endpoints as other nodes see them."""

    # Grows by 1 with every change of the table.
    generation: int
    # Replicas of this region, then the gateways of another region. Only this region's gateways use the latter.
    endpoints: tuple[Endpoint, ...]
    # Why there are no endpoints (a Code); empty if there are some.
    pending_code: str
    # The same in words.
    pending_reason: str
    # This region's gateways, which every other node uses to reach another region.
    through: tuple[Endpoint, ...] = ()
    # Requests are steps of sessions (as in Route).
    stateful: bool = False
    # Replicas that take no new sessions now but may still have some; their weight is 0.
    keeping: tuple[Endpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Crashes:
    """Own-fault crashes of one triple, with one requester's requests or at load."""

    # Model, provider and runtime version.
    triple: Triple
    # Crashes counted; 0 after an operator cleared the model.
    count: int
    # When the newest one was counted.
    last_at: Elapsed
    # (assignment, restarts) already counted, so that a repeated report counts nothing.
    seen: tuple[tuple[str, int], ...]
    # As `requester_of` returns it; empty: it crashed at load, with no request in flight.
    requester: str = ""


@dataclass(frozen=True, slots=True)
class Unloadable:
    """A load failure that no retry changes. It applies to every device with this provider and runtime."""

    triple: Triple
    refusal: Refusal
    # The assignment that showed it. After `cleared`, a repeated report of the same assignment is ignored.
    assignment: str
    # An operator allowed a retry.
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class PendingMove:
    """A condition for a move that holds, or may still hold."""

    # Since when it holds.
    since: Elapsed
    # The HoldReason last reported as an event; empty: none yet.
    told: str = ""
    # Since when its replica cannot be observed; None while it can.
    unseen: Elapsed | None = None


@dataclass(frozen=True, slots=True)
class ReconcilerMemory:
    """State that the reconciler carries from step to step; persisted with the desired sets in one transaction."""

    # Number of assignments ever created, so that ids never repeat.
    issued: int = 0
    # Stage of each assignment in a desired set, by id.
    marks: Map[str, Mark] = field(default_factory=Map)
    # Route tables, by `str(WorkloadKey)`.
    tables: Map[str, RouteTable] = field(default_factory=Map)
    # Crash counts, sorted by triple and requester.
    crashes: tuple[Crashes, ...] = ()
    # What the newest warm-up of each model on each device measured; kept when the replica is gone.
    measured: Map[Trial, Measured] = field(default_factory=Map)
    # Their latencies against what the devices' receipts promised, where these promised any.
    residuals: Map[Trial, Residual] = field(default_factory=Map)
    # What other regions measured, by region.
    imported: Map[str, ImportedMeasurements] = field(default_factory=Map)
    # Since when replicas or a standby could not be placed, by `str(WorkloadKey)`.
    short: Mapping[str, Elapsed] = field(default_factory=dict)
    # Since when no replica was ready, by `str(WorkloadKey)`.
    without_ready: Mapping[str, Elapsed] = field(default_factory=dict)
    # Since when the route leads to the region that is to run the workload, by `str(WorkloadKey)`.
    away: Mapping[str, Elapsed] = field(default_factory=dict)
    # Since when the local region, which is to run the workload again, has all its replicas in the route, by
    # `str(WorkloadKey)`.
    back: Mapping[str, Elapsed] = field(default_factory=dict)
    # Conditions for moves, by `ASSIGNMENT TRIGGER`.
    pending: Mapping[str, PendingMove] = field(default_factory=dict)
    # Since when nothing has been on a device that can sleep, by `NODE/DEVICE`.
    idle: Mapping[str, Elapsed] = field(default_factory=dict)
    # Load failures that no retry changes, sorted by triple.
    unloadable: tuple[Unloadable, ...] = ()
    # Since when tenants have cost more than their budget, by name.
    over_budget: Mapping[str, Elapsed] = field(default_factory=dict)

    @property
    def known_residuals(self) -> Map[Any, Residual]:
        """All that predictions are learnt from: the region's residuals, and imported ones. The same object until either
        changes."""
        return with_imported(self.residuals, self.imported)


@dataclass(frozen=True, slots=True)
class WorkloadWait:
    """Why something is not done yet. The times are wall clock, for people."""

    # Workload that waits, or whose assignment does.
    workload: WorkloadKey
    # Assignment that waits; empty: the whole workload lacks replicas.
    assignment: str
    # Node of the assignment; empty without one.
    node: str
    # Kind of the wait.
    code: Code
    # The reason in words.
    reason: str
    # Since when it waits.
    since: Wall
    # Next attempt; None: none is scheduled.
    retry_at: Wall | None
    # When it is given up; None: no such deadline.
    gives_up_at: Wall | None


@dataclass(frozen=True, slots=True)
class RegionEvent:
    """An event for the region's log."""

    # ASSIGNED, READY, DRAINING, REMOVED, POISONED and the like, or a Code.
    code: str
    # Id of what it is about: an assignment, migration, model digest or `NODE/DEVICE`.
    subject: str
    # The event in words; may be empty.
    message: str
    # Node it is about; empty if none.
    node: str
    # Workload it is about; None if none.
    workload: WorkloadKey | None


@dataclass(frozen=True, slots=True)
class DelegatedWorkload:
    """A workload of this region that another region runs."""

    # Id of the agreement.
    agreement: str
    # The region that runs it.
    region: str
    # Gateways of that region.
    gateways: tuple[GatewayRef, ...]
    # It serves there, so the route may lead there and local replicas may go.
    is_ready: bool
    # It is to run there. False: notice was given, and the local region takes it back.
    is_wanted: bool = True
    # Digest of the model, as in the bid.
    model: str = ""
    # Precision, as in the bid.
    precision: str = ""
    # Why it is to come back, once the local replicas have proved as good; empty: it stays, or the agreement is broken.
    return_reason: str = ""
    # RTT between the regions, in seconds.
    rtt_s: Seconds = Seconds(0.0)
    # The offer that was awarded. Not compared: an agreement belongs to one offer, and unknown figures of it (NaN) equal
    # nothing.
    bid: Offer | None = field(default=None, compare=False)
    # Joules per inference there, as that region meters them; None: not reported.
    joules: float | None = None

    @property
    def is_broken(self) -> bool:
        """True after a breach: nothing is compared with its answers, and nothing waits for it."""
        return not self.is_wanted and not self.return_reason


@dataclass(frozen=True, slots=True)
class DesiredContent:
    """A node's desired set without its version and credentials; only a change of it makes a new generation."""

    # What the node runs.
    assignments: tuple[Assignment, ...] = ()
    # Where its front may send requests.
    routes: tuple[Route, ...] = ()
    # Digests that its cache must keep.
    pins: tuple[str, ...] = ()
    # Interval of its heartbeats, in seconds.
    heartbeat_s: Seconds = DEFAULT_PARTITION.heartbeat_s
    # Other regions' gateways that a gateway may meet; empty for other nodes.
    peers: tuple[PeerTrust, ...] = ()
    # Its devices that are to sleep; every other one is to be awake.
    asleep: tuple[str, ...] = ()
    # Which requests the node takes, from which fronts and clients; None: not stated.
    forwarding: Forwarding | None = None
    # What tenants may use of its front; one that is not listed is unlimited.
    tenants: tuple[TenantLimit, ...] = ()
    # Whether `routes` lists what it serves and what it subscribed to, or all that may enter there.
    routes_on_demand: bool = False


@dataclass(frozen=True, slots=True)
class EntryDemand:
    """What a tenant's clients asked of one entry."""

    # Requests a second, with those that were refused.
    per_s: float = 0.0
    # Requests inside when it reported.
    inside: int = 0
    # True where some were refused because too many were inside.
    was_full: bool = False


TenantDemands = Mapping[tuple[str, str], EntryDemand]
"""By (tenant, node)."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A new replica that takes over from one that serves."""

    # The migration that waited for this place; empty: the plan started the move.
    migration: str
    # Workload of both replicas.
    workload: WorkloadKey
    # Node of the old replica.
    source_node: str
    # The old replica, which serves.
    source: Assignment
    # Node of the new replica.
    target_node: str
    # The new replica, just created.
    target: Assignment


@dataclass(frozen=True, slots=True)
class ModelFetch:
    """One finished fetch of a model's bytes from this coordinator."""

    # The node, or the agreement under which another region fetched.
    by: str
    # Digest of the model.
    model: str
    # When the fetch ended.
    at: Wall
    # Number of bytes fetched.
    size: Bytes


@dataclass(frozen=True, slots=True)
class RegionState:
    """Everything the region's controller knows when it takes one step."""

    # Facts about this region.
    region: RegionFacts
    # Nodes and what they report.
    fleet: Fleet
    # Applied workloads, and those run for other regions (tenant `guests`, named by agreement).
    intents: tuple[Intent, ...]
    # Profiles of the region's models, by digest.
    profiles: Mapping[str, ModelProfile]
    # Desired set of each node, as last decided.
    desired: Mapping[str, DesiredContent]
    # Reconciler state of the last step.
    memory: ReconcilerMemory
    # Quotas, by tenant.
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    # USD/h of a whole device; absent: unknown.
    costs: Mapping[Slot, UsdPerHour] = field(default_factory=dict)
    # RTT in seconds from a traffic origin to this region; for guests alone, and 0 if absent.
    rtt_s: Mapping[str, Seconds] = field(default_factory=dict)
    # Applied documents, as in `Inputs`.
    documents: int = 0
    # Breaks ties in placement.
    seed: int = 0
    # Signatures of the models.
    signatures: Signatures = field(default_factory=Signatures)
    # Own workloads that other regions run.
    delegations: Mapping[WorkloadKey, DelegatedWorkload] = field(default_factory=dict)
    # USD/h of what other regions run or are to run, as in Inputs.
    awarded: Mapping[WorkloadKey, UsdPerHour | None] = field(default_factory=dict)
    # Room kept for bids, and for agreements without a replica yet.
    reserved: tuple[Reservation, ...] = ()
    # Other regions' gateways that this region's gateways may meet.
    peers: tuple[PeerTrust, ...] = ()
    # Why the last trade of a workload found no region.
    last_refusals: Mapping[WorkloadKey, Refusal] = field(default_factory=dict)
    # Fetches from this coordinator, complete since `fetches_counted_since`.
    fetches: tuple[ModelFetch, ...] = ()
    # Since when fetches are counted; None: they are not.
    fetches_counted_since: Wall | None = None
    # Recorded answers, for verification.
    references: References = field(default_factory=dict)
    # What limited tenants asked of each entry lately.
    demands: TenantDemands = field(default_factory=dict)
    # Nodes that hold the limits of tenants that were decided last.
    confirmed: Container[str] = frozenset()
    # Nodes whose state is not that of the step before; None: not known, any may differ.
    changed_nodes: frozenset[str] | None = None
    # The fleet as reported this moment, with what moves are judged by; None: `fleet` is.
    live: Fleet | None = None


@dataclass(frozen=True, slots=True)
class MigrationEffects:
    """What the region's migrations ask of placement and routes in one step."""

    # Moves under way (as in Inputs).
    moves: tuple[Move, ...]
    # Places that may not take over a workload's model, and why (as in Inputs).
    blocked: Mapping[tuple[WorkloadKey, Trial], Refusal]
    # Workloads that move to another region or back.
    cross_region_states: Mapping[WorkloadKey, CrossRegionState]
    # Agreements under which another region has served: moves ended at them, or came back from them.
    served_agreements: frozenset[str]
    # What earlier moves took beyond what they waited for (as in Inputs).
    overheads: MoveOverheads = NO_OVERHEADS


NO_MIGRATIONS: Final = MigrationEffects((), {}, {}, frozenset())


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of one step. The caller persists it, then sends."""

    # The plan of the workloads that were decided about, without explanations.
    plan: PlacementPlan
    # Content of every node that was looked at, changed or not: of all nodes where everything was decided.
    desired: Mapping[str, DesiredContent]
    # Reconciler state for the next step.
    memory: ReconcilerMemory
    # What is not done yet, and why.
    waits: tuple[WorkloadWait, ...]
    # Events for the region's log.
    events: tuple[RegionEvent, ...]
    # Moves that begin, or that have a place now.
    replacements: tuple[Replacement, ...] = ()
    # True: every workload was decided about.
    is_whole: bool = True
    # Workloads whose marks or tables are others than before.
    remembered: frozenset[WorkloadKey] = frozenset()
    # What was measured in this step, or is forgotten.
    measured: frozenset[Trial] = frozenset()
    # Number of new warm-ups from which nothing is learnt, because they are too far off their roofline.
    absurd: int = 0
    # Number of workloads about which an earlier decision was audited.
    audited: int = 0
    # Those of them about which it was another, and nodes of which columns said what is not so.
    refuted: tuple[str, ...] = ()
    # Workloads whose routes may be others than before where a node has nothing itself; None: any may be.
    rerouted: frozenset[WorkloadKey] | None = None
