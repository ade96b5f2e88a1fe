"""The invariants of a region, checked on a snapshot: for `shoal doctor` and the simulator.

This module imports nouns and records alone, none of the code that it checks. Of the invariants I1 to I12 it checks
those that a snapshot can show; I9 and I11 need histories, and tests check them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal.coordinator.core.fleet.commitments import least_committed_bytes
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.placement.model import Reservation
from shoal.coordinator.core.workloads.model import AssignmentStage, DesiredContent, ReconcilerMemory, WorkloadWait
from shoal.coordinator.core.workloads.routes import (
    answering,
    has_served_before_silence,
    is_gateway,
    is_remote,
    is_status_current,
    nodes_kept_in_silence,
)
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment, Observed, Phase, Version
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code
from shoal.types.device import DeviceKind
from shoal.types.route import Endpoint, EndpointKind, EndpointState
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import Intent, Preempt, Quota, WorkloadKey

RECOVERY_S = Seconds(1000.0)
GRACE_S = Seconds(60.0)


@dataclass(frozen=True, slots=True)
class Promise:
    """What this region owes another."""

    # Id of the bid.
    bid: str
    # Id of its agreement; empty: room is held for the bid.
    agreement: str
    # End of the hold or the lease.
    until: Elapsed


@dataclass(frozen=True, slots=True)
class UnderwayMove:
    """A live move that is not over."""

    # Id of the migration.
    name: str
    # Its MigrationStage.
    stage: str
    # Assignments that it binds.
    replicas: tuple[str, ...]
    # Deadline of the stage.
    until: Elapsed
    # The workload whose local replicas all drain because another region has served; that agreement may be lost
    # meanwhile. None: it is no such move.
    leaves: WorkloadKey | None = None


@dataclass(frozen=True, slots=True)
class RegionSnapshot:
    """A region after one step."""

    # Nodes and what they report.
    fleet: Fleet
    # Applied workloads and guests.
    intents: tuple[Intent, ...]
    # Desired set of each node.
    desired: Mapping[str, DesiredContent]
    # State of the reconciler.
    memory: ReconcilerMemory
    # What is not done yet, and why.
    waits: tuple[WorkloadWait, ...]
    # Time of the step on the coordinator's clock.
    now: Elapsed
    # The same on the wall clock.
    wall: Wall
    # Workloads for which the plan found all replicas.
    placeable: frozenset[WorkloadKey] = frozenset()
    # Version of each node's desired set.
    versions: Mapping[str, Version] = field(default_factory=dict)
    # When each node's desired set was written.
    written_at: Mapping[str, Elapsed] = field(default_factory=dict)
    # Time without a ready replica allowed to a workload without its own `recovery`, in seconds.
    recovery_s: Seconds = RECOVERY_S
    # How late a deadline may be noticed, in seconds.
    grace_s: Seconds = GRACE_S
    # Room kept for bids and agreements.
    reserved: tuple[Reservation, ...] = ()
    # Every open bid and agreement.
    promises: tuple[Promise, ...] = ()
    # Every live move that is not over.
    moves: tuple[UnderwayMove, ...] = ()
    # Quotas by tenant: one that is lowered may take a workload's last replica.
    quotas: Mapping[str, Quota] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant."""

    # Its number, e.g. `I2`.
    invariant: str
    # Id or name of what violates it.
    subject: str
    # The violation in words.
    message: str


def check(snapshot: RegionSnapshot) -> tuple[Violation, ...]:
    """Every violated invariant; empty: all hold."""
    return tuple(violation for judge in _CHECKS for violation in judge(snapshot))


def _check_served(snapshot: RegionSnapshot) -> Iterator[Violation]:
    for intent in snapshot.intents:
        since = snapshot.memory.without_ready.get(str(intent.key))
        allowed = max(snapshot.recovery_s, intent.require.recovery_s or 0.0)
        if since is not None and intent.key in snapshot.placeable and snapshot.now - since > allowed:
            message = f"no ready replica for {snapshot.now - since:.0f} s, although devices fit"
            yield Violation("I1", str(intent.key), message)


def _check_not_oversold(snapshot: RegionSnapshot) -> Iterator[Violation]:
    for name, content in snapshot.desired.items():
        state = snapshot.fleet.nodes.get(name)
        for device in state.node.devices if state is not None else ():
            assert state is not None
            names = state.same_memory(device)
            loads = [each for each in content.assignments if each.device in names and not _is_bytes_only(each)]
            committed = least_committed_bytes(loads, state.observed)
            held = [each for each in snapshot.reserved if each.slot.node == name and each.slot.device in names]
            kept = sum(each.memory_bytes for each in held)
            total = device.memory_bytes
            if device.kind is DeviceKind.CPU and state.node.memory_limit_bytes > 0:
                total = min(total, state.node.memory_limit_bytes)
            if committed + kept > total:
                message = f"{committed} bytes committed and {kept} held of {total}"
                yield Violation("I2", f"{name}/{device.name}", message)


def _is_bytes_only(assignment: Assignment) -> bool:
    """True for one of two replicas that share their room: it loads only once the other has left. A standby has its
    own room."""
    return assignment.staged and not assignment.standby


def _check_one_owner(snapshot: RegionSnapshot) -> Iterator[Violation]:
    owners = Counter(assignment.id for content in snapshot.desired.values() for assignment in content.assignments)
    for name, count in owners.items():
        if count > 1:
            yield Violation("I3", name, f"assigned {count} times")
    holders = Counter(
        name
        for state in snapshot.fleet.nodes.values()
        for name, observed in state.observed.items()
        if observed.phase is Phase.READY
    )
    for name, count in holders.items():
        if count > 1:
            yield Violation("I3", name, f"ready on {count} nodes")


def _check_one_promise(snapshot: RegionSnapshot) -> Iterator[Violation]:
    """A hold becomes at most one agreement, an agreement has one bid, and room is kept for what is owed and no
    longer."""
    for name, count in Counter(each.bid for each in snapshot.promises).items():
        if count > 1:
            yield Violation("I3", name, f"a bid became {count} promises")
    for name, count in Counter(each.agreement for each in snapshot.promises if each.agreement).items():
        if count > 1:
            yield Violation("I3", name, f"an agreement of {count} bids")
    for each in snapshot.promises:
        if snapshot.now > each.until + snapshot.grace_s:
            late = snapshot.now - each.until
            yield Violation("I3", each.agreement or each.bid, f"kept {late:.0f} s after its end")
    owed = {each.agreement or each.bid for each in snapshot.promises}
    for name in sorted({each.bid for each in snapshot.reserved} - owed):
        yield Violation("I3", name, "room is kept and nothing is owed")


def _check_moves(snapshot: RegionSnapshot) -> Iterator[Violation]:
    """A move keeps its deadlines, and a replica belongs to one move."""
    for each in snapshot.moves:
        late = snapshot.now - each.until
        if late > snapshot.grace_s:
            yield Violation("I5", each.name, f"{each.stage} for {late:.0f} s past its deadline")
    for name, count in Counter(name for each in snapshot.moves for name in each.replicas).items():
        if count > 1:
            yield Violation("I3", name, f"{count} moves are of it")


def _check_routes(snapshot: RegionSnapshot) -> Iterator[Violation]:
    assigned = {
        assignment.id: (name, assignment)
        for name, content in snapshot.desired.items()
        for assignment in content.assignments
    }
    silent = dict[WorkloadKey, set[str]]()
    for name, one in assigned.values():
        if has_served_before_silence(snapshot.fleet.nodes.get(name), one):
            silent.setdefault(one.workload, set()).add(name)
    staying = {key: nodes_kept_in_silence(snapshot.fleet, found) for key, found in silent.items()}
    for name, content in snapshot.desired.items():
        is_current = is_status_current(snapshot.fleet.nodes.get(name))
        for route in content.routes:
            subject = f"{route.workload} at {name}"
            if len({endpoint.assignment for endpoint in route.endpoints}) != len(route.endpoints):
                yield Violation("I7", subject, "one replica twice in a route")
            if not route.endpoints and not route.pending_code:
                yield Violation("I5", subject, "an empty route without a reason")
            # They may stay where nobody else serves it. Its own replicas a node without a link judges itself.
            others = [each for each in route.endpoints if is_current or each.kind is not EndpointKind.LOCAL]
            is_unserved = not answering(others, snapshot.fleet)
            for endpoint in route.endpoints:
                if endpoint.kind is EndpointKind.GATEWAY:
                    yield from _check_leads_out(snapshot, subject, name, route.workload, endpoint)
                    continue
                node, assignment = assigned.get(endpoint.assignment, ("", None))
                if assignment is None or node != endpoint.node or assignment.workload != route.workload:
                    yield Violation("I4", subject, f"{endpoint.assignment} is not assigned to {endpoint.node}")
                    continue
                if (endpoint.kind is EndpointKind.LOCAL) != (endpoint.node == name):
                    yield Violation("I4", subject, f"{endpoint.assignment} is {endpoint.kind} from {name}")
                if assignment.standby is not (endpoint.state is EndpointState.STANDBY):
                    yield Violation("I4", subject, f"{endpoint.assignment} is {endpoint.state}, not as it was assigned")
                if assignment.draining:
                    yield Violation("I4", subject, f"{endpoint.assignment} is draining")
                if is_unserved and endpoint.node in staying.get(route.workload, ()):
                    continue
                # A node without a link judges its own replicas itself.
                if endpoint.node != name or is_current:
                    yield from _check_answers(snapshot, subject, endpoint.node, endpoint.assignment)


def _check_leads_out(
    snapshot: RegionSnapshot, subject: str, node: str, workload: WorkloadKey, endpoint: Endpoint
) -> Iterator[Violation]:
    """Another region is reached only through this region's gateways, and a guest's requests stay here."""
    if workload.tenant == GUEST_TENANT:
        yield Violation("I4", subject, f"a guest's requests leave for {endpoint.node}")
    leads_out = is_gateway(snapshot.fleet.nodes.get(node))
    if is_remote(endpoint) != leads_out:
        yield Violation("I4", subject, f"{endpoint.assignment} is routed to, not by this region's gateways alone")
    if not is_remote(endpoint):
        state = snapshot.fleet.nodes.get(endpoint.node)
        if state is None or (state.liveness in (Liveness.SUSPECT, Liveness.LOST) and not state.link_lost):
            yield Violation("I4", subject, f"the gateway {endpoint.node} is silent")


def _check_answers(snapshot: RegionSnapshot, subject: str, node: str, assignment: str) -> Iterator[Violation]:
    state = snapshot.fleet.nodes.get(node)
    if state is None or (state.liveness in (Liveness.SUSPECT, Liveness.LOST) and not state.link_lost):
        yield Violation("I4", subject, f"{assignment} is on {node}, which is silent")
    elif state.has_full_status and state.liveness is Liveness.READY:
        observed = state.observed.get(assignment)
        if observed is None or observed.phase is not Phase.READY:
            phase = "unknown" if observed is None else str(observed.phase)
            yield Violation("I4", subject, f"{assignment} on {node} is {phase}, not ready")


def _check_waits(snapshot: RegionSnapshot) -> Iterator[Violation]:
    explained = {wait.assignment for wait in snapshot.waits}
    for wait in snapshot.waits:
        subject = wait.assignment or str(wait.workload)
        if wait.retry_at is None and wait.gives_up_at is None:
            yield Violation("I5", subject, f"{wait.code} without an end")
        late = wait.gives_up_at is not None and wait.gives_up_at + snapshot.grace_s < snapshot.wall
        if late and wait.code is not Code.WAITING_FOR_LINK and wait.code not in PERMANENT_LOAD_FAILURES:
            yield Violation("I5", subject, f"{wait.code} past its deadline")
    for name, content in snapshot.desired.items():
        for assignment in content.assignments:
            if assignment.id not in explained and not _is_as_desired(snapshot, name, assignment):
                yield Violation("I5", assignment.id, f"not ready on {name}, and nothing says why")


def _check_not_ahead(snapshot: RegionSnapshot) -> Iterator[Violation]:
    for name, desired in snapshot.versions.items():
        state = snapshot.fleet.nodes.get(name)
        held = state.version if state is not None else None
        if held is not None and held.history == desired.history and held.generation > desired.generation:
            message = f"it holds generation {held.generation}, the region knows {desired.generation}"
            yield Violation("I6", name, message)


def _check_documented(snapshot: RegionSnapshot) -> Iterator[Violation]:
    intents = {intent.key: intent for intent in snapshot.intents}
    explained = {wait.assignment for wait in snapshot.waits}
    for name, content in snapshot.desired.items():
        for assignment in content.assignments:
            if assignment.draining or assignment.id in explained:
                continue
            intent = intents.get(assignment.workload)
            if intent is None or assignment.model not in {model.digest for model in intent.models}:
                yield Violation("I8", assignment.id, f"runs on {name} and no document asks for it")


def _check_not_blind(snapshot: RegionSnapshot) -> Iterator[Violation]:
    wanted = {intent.key for intent in snapshot.intents}
    draining = dict[WorkloadKey, str]()
    standing = set[WorkloadKey]()
    away = snapshot.memory.away
    relieved = {move.leaves for move in snapshot.moves}
    displacing = max((each.priority for each in snapshot.intents if each.preempt is Preempt.ALWAYS), default=None)
    if displacing is not None:
        relieved |= {each.key for each in snapshot.intents if each.priority < displacing}
    capped = {name for name, each in snapshot.quotas.items() if each.replicas is not None or each.memory is not None}
    relieved |= {key for key in wanted if key.tenant in capped}
    for content in snapshot.desired.values():
        for assignment in content.assignments:
            mark = snapshot.memory.marks.get(assignment.id)
            if assignment.draining:
                draining[assignment.workload] = assignment.id
            elif mark is not None and mark.stage is AssignmentStage.SERVING:
                standing.add(assignment.workload)
    for key, name in draining.items():
        if key in wanted and key not in standing | relieved and str(key) not in away:
            yield Violation("I10", str(key), f"{name} drains and no other replica has ever served")


def _check_converging(snapshot: RegionSnapshot) -> Iterator[Violation]:
    for name, written_at in snapshot.written_at.items():
        state = snapshot.fleet.nodes.get(name)
        if state is None or state.liveness is not Liveness.READY or not state.connected or not state.has_full_status:
            continue
        age = snapshot.now - max(written_at, state.since)
        if age > snapshot.grace_s and state.version != snapshot.versions.get(name):
            yield Violation("I12", name, f"has not taken up its desired set for {age:.0f} s")


def _is_ready(snapshot: RegionSnapshot, node: str, assignment: Assignment) -> bool:
    return _phase(snapshot, node, assignment) is Phase.READY and not assignment.draining


def _is_as_desired(snapshot: RegionSnapshot, node: str, assignment: Assignment) -> bool:
    staged = assignment.staged and _phase(snapshot, node, assignment) is Phase.STAGED
    return staged or _is_ready(snapshot, node, assignment)


def _phase(snapshot: RegionSnapshot, node: str, assignment: Assignment) -> Phase | None:
    state: NodeState | None = snapshot.fleet.nodes.get(node)
    observed: Observed | None = state.observed.get(assignment.id) if state is not None else None
    return observed.phase if observed is not None else None


_CHECKS = (
    _check_served,
    _check_not_oversold,
    _check_one_owner,
    _check_one_promise,
    _check_moves,
    _check_routes,
    _check_waits,
    _check_not_ahead,
    _check_documented,
    _check_not_blind,
    _check_converging,
)
