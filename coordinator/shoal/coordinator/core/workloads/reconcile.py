"""Turns chosen placements into each node's desired set: make before break, and missing reports alone remove nothing."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.placement.model import Move, PlacementPlan, ReplicaTarget, Triple, WorkloadPlan
from shoal.coordinator.core.prediction.demand import served_profile, work_of
from shoal.coordinator.core.workloads.failures import load_refusals
from shoal.coordinator.core.workloads.model import (
    AssignmentStage,
    Mark,
    ReconcilerMemory,
    RegionEvent,
    Replacement,
    WorkloadWait,
)
from shoal.coordinator.core.workloads.replacements import MovesUnderWay, PlacedAssignment, startable_replicas
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code, Refusal
from shoal.types.migration import DRAIN_S
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

Desired = Mapping[str, tuple[Assignment, ...]]


NOTHING_MOVES = MovesUnderWay()


@dataclass(frozen=True, slots=True)
class ReconcileOutcome:
    """Result of one call of `reconcile`."""

    # Assignments of every node in the input, and of those that got one.
    desired: Desired
    # Number of assignments ever created.
    issued: int
    # Marks of the assignments in `desired` alone.
    marks: Mapping[str, Mark]
    # What is not done yet, and why.
    waits: tuple[WorkloadWait, ...]
    # Events for the region's log.
    events: tuple[RegionEvent, ...]
    # New assignments that take over from one that serves.
    replacements: tuple[Replacement, ...] = ()


def reconcile(
    plan: PlacementPlan,
    desired: Desired,
    fleet: Fleet,
    profiles: Mapping[str, ModelProfile],
    broken: Mapping[str, Refusal],
    memory: ReconcilerMemory,
    marks: Mapping[str, Mark],
    now: Elapsed,
    wall: Wall,
    elsewhere: frozenset[WorkloadKey] = frozenset(),
    moving: MovesUnderWay = NOTHING_MOVES,
) -> ReconcileOutcome:
    """One step towards `plan`. desired: assignments of the plan's workloads and of deleted ones. marks: of these.
    elsewhere: workloads that another region serves, as every front knows by now.

    A replica that the plan no longer names serves on until others are in service. These are either the plan's own,
    all READY and in the routes for `route_propagation_s`, or another region's. Then it drains, and leaves when
    nothing is in flight or `DRAIN_S` passed. Without a full plan, nothing that runs is touched. A workload that is
    not in the plan was deleted: its replicas drain at once. A standby takes over at once when the plan says so. A
    replica that is to become a standby serves on until the others do, and an old standby stays until the new one is
    ready. Of two replicas of a move under way, each leaves when the move says so.
    """
    plans = {each.workload: each for each in plan.workloads}
    step = _Step(plans, fleet, profiles, broken, memory, marks, now, wall, elsewhere, moving.moves)
    replaced = list[Replacement]()
    after = {node: step.keep_on_node(node, assignments) for node, assignments in desired.items()}
    held = defaultdict[WorkloadKey, list[PlacedAssignment]](list)
    for node in sorted(desired):
        for one in desired[node]:
            held[one.workload].append((node, one))
    for each in plan.workloads:
        for target, source in startable_replicas(each, held.get(each.workload, ()), fleet, moving):
            node, assignment = step.create(target)
            after[node] = (*after.get(node, ()), assignment)
            if source is not None:
                replaced.append(Replacement(target.migration, each.workload, *source, node, assignment))
    for each in plan.workloads:
        step.record_pending(each)
    kept = {assignment.id for assignments in after.values() for assignment in assignments}
    after_marks = {name: mark for name, mark in step.marks.items() if name in kept}
    return ReconcileOutcome(after, step.issued, after_marks, tuple(step.waits), tuple(step.events), tuple(replaced))


class _Step:
    """One call of `reconcile`: the inputs, and the results collected so far."""

    def __init__(
        self,
        plans: Mapping[WorkloadKey, WorkloadPlan],
        fleet: Fleet,
        profiles: Mapping[str, ModelProfile],
        broken: Mapping[str, Refusal],
        memory: ReconcilerMemory,
        marks: Mapping[str, Mark],
        now: Elapsed,
        wall: Wall,
        elsewhere: frozenset[WorkloadKey],
        moves: tuple[Move, ...],
    ) -> None:
        self.plans = plans
        self.fleet = fleet
        self.profiles = profiles
        self.broken = broken
        self.now = now
        self.wall = wall
        self.elsewhere = elsewhere
        self.moves = {name: move for move in moves if move.target for name in (move.source, move.target)}
        self.unloadable = load_refusals(memory.unloadable)
        self.issued = memory.issued
        self.marks = dict(marks)
        self.route_propagation_s = fleet.timing.route_propagation_s
        self.waits = list[WorkloadWait]()
        self.events = list[RegionEvent]()
        self.targets = {
            target.existing_assignment: target
            for plan in plans.values()
            for target in plan.targets
            if target.existing_assignment
        }
        # Looked up for every replica: a withdrawn consent applies at once, also to replicas that are leaving.
        self.captures = {target.workload: target.capture for plan in plans.values() for target in plan.targets}
        self.to_zero = {target.workload: target.to_zero_after_s for plan in plans.values() for target in plan.targets}
        self.sessions = {target.workload: target.session for plan in plans.values() for target in plan.targets}
        self.in_service = {key: self._is_in_service(plan, standby=False) for key, plan in plans.items()}
        self.standbys_in_service = {key: self._is_in_service(plan, standby=True) for key, plan in plans.items()}

    def keep_on_node(self, node: str, assignments: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
        """The node's assignments that stay, with their current terms."""
        kept = list[Assignment]()
        for assignment in assignments:
            state = self.fleet.nodes.get(node)
            observed = None if state is None else state.observed.get(assignment.id)
            self._update_mark(node, assignment, state, observed)
            after = self._next(node, assignment, state, observed)
            if after is None:
                self._record_event("REMOVED", node, assignment, "")
                continue
            if after.draining and not assignment.draining:
                self.marks[assignment.id] = replace(
                    self.marks[assignment.id], stage=AssignmentStage.DRAINING, since=self.now
                )
                self._record_event("DRAINING", node, assignment, "")
            after = _with_values(
                after,
                capture=self.captures.get(after.workload, 0),
                session=self.sessions.get(after.workload, after.session),
                to_zero_after_s=self._to_zero_after_s(after),
            )
            kept.append(after)
            self._record_wait(node, after, state, observed)
        return tuple(kept)

    def create(self, target: ReplicaTarget) -> tuple[str, Assignment]:
        """A new replica. Its id is a hash of its properties and of the number of assignments before it."""
        self.issued += 1
        named = (str(target.workload), target.node, target.device, target.model, target.precision, str(self.issued))
        name = "a-" + hashlib.sha256("\0".join(named).encode()).hexdigest()[:16]
        made_in = target.precision if target.preparation is not None else ""
        served = served_profile(self.profiles[target.model], target.shapes, made_in)
        assignment = Assignment(
            id=name,
            workload=target.workload,
            revision=target.revision,
            model=target.model,
            model_bytes=target.model_bytes,
            device=target.device,
            provider=target.provider,
            precision=target.precision,
            draining=False,
            shared_worker=target.shared_worker,
            memory_bytes=target.memory_bytes,
            partition=target.partition,
            work=work_of(served),
            signed=target.signed,
            standby=target.standby,
            staged=target.staged,
            capture=target.capture,
            session=target.session,
            samples=target.samples,
            samples_bytes=target.samples_bytes,
            samples_count=target.samples_count,
            warm_up_optional=target.warm_up_optional,
            shapes=target.shapes,
            partial=target.partial,
            preparation=target.preparation,
            comparison=target.comparison,
            batching=target.batching,
            to_zero_after_s=None if target.standby else target.to_zero_after_s,
            provider_bytes=target.provider_bytes,
        )
        self.marks[name] = Mark(AssignmentStage.STARTING, self.now, target.terms)
        role = ", to stand by" if target.standby else ""
        self._record_event("ASSIGNED", target.node, assignment, f"{target.device}, {target.precision}{role}")
        self._record_wait(target.node, assignment, self.fleet.nodes.get(target.node), None)
        return target.node, assignment

    def record_pending(self, plan: WorkloadPlan) -> None:
        """Records a wait for a workload that lacks replicas. Placement is tried again with every change and every
        tick."""
        lacking = plan.refusal or plan.no_standby
        if lacking is not None:
            retry_at = Wall(self.wall + self.fleet.timing.heartbeat_s)
            self.waits.append(
                WorkloadWait(plan.workload, "", "", lacking.code, str(lacking), self.wall, retry_at, None)
            )

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _is_in_service(self, plan: WorkloadPlan, *, standby: bool) -> bool:
        """True if all requested (or standby) replicas of the plan are in service, for long enough that every front
        knows."""
        for target in plan.targets:
            if target.standby is not standby:
                continue
            state = self.fleet.nodes.get(target.node)
            observed = state.observed.get(target.existing_assignment) if state is not None else None
            mark = self.marks.get(target.existing_assignment)
            if target.staged and observed is not None and observed.phase is Phase.STAGED:
                continue
            in_service = (
                state is not None
                and state.liveness is Liveness.READY
                and state.has_full_status
                and state.front_ready
                and observed is not None
                and observed.phase is Phase.READY
                and mark is not None
                and mark.stage is AssignmentStage.SERVING
                and self.now - mark.since >= self.route_propagation_s
            )
            if not in_service:
                return False
        return True

    def _next(
        self, node: str, assignment: Assignment, state: NodeState | None, observed: Observed | None
    ) -> Assignment | None:
        """The assignment from now on; None: it leaves the desired set."""
        move = self.moves.get(assignment.id)
        target = self.targets.get(assignment.id)
        if target is not None and (move is None or move.leaving != assignment.id):
            # The target of a move has to load and to serve, or else the move would never end.
            is_arriving = move is not None and move.target == assignment.id
            standby = target.standby and not is_arriving and (assignment.standby or self._is_free(assignment.workload))
            # While it serves until others do, it is not confirmed as one that serves: the next plan would keep it as
            # such, in place of the better one that this plan starts.
            if standby is target.standby or is_arriving:
                mark = self.marks[assignment.id]
                if mark.terms != target.terms or mark.is_left_out:
                    self.marks[assignment.id] = replace(mark, terms=target.terms, is_left_out=False)
            else:
                self._leave_out(assignment)
            staged = (standby and target.staged) or self._is_staged_by_move(assignment)
            if assignment.staged and not staged:  # it loads now, and serves when it is ready
                self.marks[assignment.id] = Mark(AssignmentStage.STARTING, self.now, target.terms)
            if standby is not assignment.standby:
                self._record_event("STANDS_BY" if standby else "TOOK_OVER", node, assignment, assignment.device)
            return _with_values(
                assignment,
                revision=target.revision,
                batching=target.batching,
                partition=target.partition,
                signed=target.signed,
                standby=standby,
                staged=staged,
                samples=target.samples,
                samples_bytes=target.samples_bytes,
                samples_count=target.samples_count,
                warm_up_optional=target.warm_up_optional,
            )
        silent = state is None or state.liveness in (Liveness.SUSPECT, Liveness.LOST)
        lost = state is None or state.liveness is Liveness.LOST
        if assignment.draining:
            return None if lost or self._is_drained(assignment, state, observed) else assignment
        plan = self.plans.get(assignment.workload)
        idle = observed is None or observed.phase in (Phase.FAILED, Phase.GONE)
        if plan is None:
            return None if lost or (idle and not silent) else replace(assignment, draining=True)
        given_up = self.broken.get(assignment.id)
        if idle and not silent and given_up is not None and given_up.code is Code.POISONED:
            return None  # it runs nowhere, and would only crash again when its node restarts
        if (
            idle
            and not silent
            and given_up is not None
            and given_up.code in PERMANENT_LOAD_FAILURES
            and self._may_retry(assignment, state)
        ):
            return None  # a retry is a new assignment: for its node this one has failed for good
        if move is not None:
            if move.leaving != assignment.id or move.defers_drain:
                return replace(assignment, staged=self._is_staged_by_move(assignment))
            gone = idle or self._has_never_served(assignment) or (silent and move.leaving == move.target)
            return None if lost or gone else assignment if silent else replace(assignment, draining=True)
        if assignment.id in plan.awaiting_node:
            return assignment
        self._leave_out(assignment)
        evicted = self.in_service[assignment.workload] and assignment.id in plan.evicted
        free = self._is_free(assignment.workload) and (
            self.standbys_in_service[assignment.workload] or not assignment.standby
        )
        if free or evicted:
            if lost:
                return None
            if silent:
                return assignment
            return None if idle or self._has_never_served(assignment) else replace(assignment, draining=True)
        return assignment

    def _is_staged_by_move(self, assignment: Assignment) -> bool:
        """True if its move wants only its bytes on the node for now."""
        move = self.moves.get(assignment.id)
        return move is not None and assignment.id in move.staged

    def _to_zero_after_s(self, assignment: Assignment) -> Seconds | None:
        """None for one that must stay loaded: a standby takes over at once, and both replicas of a move are compared,
        and judged by what they serve."""
        if assignment.standby or assignment.id in self.moves:
            return None
        return self.to_zero.get(assignment.workload, assignment.to_zero_after_s)

    def _is_free(self, workload: WorkloadKey) -> bool:
        """True if all that is wanted serves, here or elsewhere: any other replica may leave or become a standby."""
        plan = self.plans[workload]
        full = plan.placed >= plan.wanted > 0 or workload in self.elsewhere
        return self.in_service[workload] and full

    def _has_never_served(self, assignment: Assignment) -> bool:
        mark = self.marks.get(assignment.id)
        return mark is not None and mark.stage is AssignmentStage.STARTING

    def _is_drained(self, assignment: Assignment, state: NodeState | None, observed: Observed | None) -> bool:
        mark = self.marks.get(assignment.id)
        age = self.now - mark.since if mark is not None else DRAIN_S
        if age >= self._drain_s(assignment):
            return True
        if state is None or state.liveness is not Liveness.READY or not state.has_full_status:
            return False
        if observed is None or observed.phase is Phase.GONE:
            return age >= self.route_propagation_s
        return observed.phase is Phase.DRAINING and observed.in_flight == 0 and age >= self.route_propagation_s

    def _drain_s(self, assignment: Assignment) -> Seconds:
        move = self.moves.get(assignment.id)
        return move.drain_s if move is not None else DRAIN_S

    def _update_mark(
        self, node: str, assignment: Assignment, state: NodeState | None, observed: Observed | None
    ) -> None:
        """Records when a replica was first seen READY. An assignment without a mark was decided by an earlier
        coordinator."""
        mark = self.marks.get(assignment.id)
        if mark is None:
            mark = Mark(AssignmentStage.DRAINING if assignment.draining else AssignmentStage.STARTING, self.now)
        ready = observed is not None and observed.phase is Phase.READY
        if ready and mark.stage is AssignmentStage.STARTING and state is not None and state.liveness is Liveness.READY:
            mark = replace(mark, stage=AssignmentStage.SERVING, since=self.now)
            self._record_event("READY", node, assignment, assignment.device)
        self.marks[assignment.id] = mark

    def _leave_out(self, assignment: Assignment) -> None:
        """Remembers that the plan has others in its place, if it has: they stay if this one was gone and comes back."""
        plan = self.plans[assignment.workload]
        if plan.placed >= plan.wanted and any(target.standby is assignment.standby for target in plan.targets):
            self.marks[assignment.id] = replace(self.marks[assignment.id], is_left_out=True)

    def _may_retry(self, assignment: Assignment, state: NodeState | None) -> bool:
        """True if an operator allowed its model to be tried again."""
        device = state.device(assignment.device) if state is not None else None
        if device is None:
            return False
        return Triple.of_assignment(assignment, device) not in self.unloadable

    # -- reporting ---------------------------------------------------------------------------------------------------

    def _record_wait(
        self, node: str, assignment: Assignment, state: NodeState | None, observed: Observed | None
    ) -> None:
        mark = self.marks[assignment.id]
        since = Wall(self.wall - (self.now - mark.since))
        code, reason, retry_at, gives_up_at = self._why(node, assignment, state, observed, mark)
        if code is not None:
            wait = WorkloadWait(assignment.workload, assignment.id, node, code, reason, since, retry_at, gives_up_at)
            self.waits.append(wait)

    def _why(
        self, node: str, assignment: Assignment, state: NodeState | None, observed: Observed | None, mark: Mark
    ) -> tuple[Code | None, str, Wall | None, Wall | None]:
        """(code, reason, retry_at, gives_up_at); code None: nothing is waited for."""
        soon = Wall(self.wall + self.fleet.timing.heartbeat_s)
        if assignment.draining:
            ends = Wall(self.wall + max(0.0, self._drain_s(assignment) - (self.now - mark.since)))
            flying = observed.in_flight if observed is not None else 0
            return Code.WAITING_FOR_DRAIN, f"{flying} requests in flight on {node}", None, ends
        if state is None or state.liveness is not Liveness.READY or not state.has_full_status:
            return Code.WAITING_FOR_LINK, f"{node} is silent", soon, None
        if (
            assignment.id not in self.targets
            and assignment.workload in self.plans
            and mark.stage is AssignmentStage.SERVING
        ):
            return Code.WAITING_FOR_REPLACEMENT, "serves until its replacement does", soon, None
        if observed is None:
            return Code.WAITING_FOR_LINK, f"{node} has not taken it up yet", soon, None
        retry_at, gives_up_at = observed.retry_at, observed.gives_up_at
        match observed.phase:
            case Phase.FETCHING:
                return Code.WAITING_FOR_FETCH, observed.reason, retry_at or soon, gives_up_at
            case Phase.LOADING:
                return Code.WAITING_FOR_LOAD, observed.reason, retry_at or soon, gives_up_at
            case Phase.WARMING:
                return Code.WAITING_FOR_WARMUP, observed.reason, retry_at or soon, gives_up_at
            case Phase.VERIFYING:
                return Code.WAITING_FOR_VERIFY, observed.reason, retry_at or soon, gives_up_at
            case Phase.FAILED if observed.code in PERMANENT_LOAD_FAILURES:
                return observed.code, observed.reason, None, gives_up_at or self.wall
            case Phase.FAILED:
                return Code.BACKING_OFF, f"{observed.code}: {observed.reason}", retry_at or soon, gives_up_at
            case Phase.READY:
                return None, "", None, None
            case Phase.STAGED if assignment.staged:
                if assignment.id in self.targets or assignment.id in self.moves:
                    return None, "", None, None
                return Code.WAITING_FOR_REPLACEMENT, "its bytes stay until what replaces it is there", soon, None
            case Phase.STAGED | Phase.DRAINING | Phase.GONE:
                return Code.WAITING_FOR_LINK, f"{node} acts on an earlier desired set", soon, None

    def _record_event(self, code: str, node: str, assignment: Assignment, message: str) -> None:
        self.events.append(RegionEvent(code, assignment.id, message, node, assignment.workload))


def _with_values(assignment: Assignment, **values: Any) -> Assignment:
    """With these values of its fields: the same one where it has them, as most do."""
    if all(getattr(assignment, name) == value for name, value in values.items()):
        return assignment
    return replace(assignment, **values)
