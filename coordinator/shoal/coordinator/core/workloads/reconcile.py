"""From chosen placements to what every node shall hold: make before break, and blindness destroys nothing."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.placement.model import Move, Plan, Target, WorkloadPlan
from shoal.coordinator.core.prediction.demand import work_of
from shoal.coordinator.core.workloads.model import Happened, Mark, Memory, Replaced, Stage, Wait
from shoal.coordinator.core.workloads.replacing import Moving, starts
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.migration import DRAIN_S
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

Desired = Mapping[str, tuple[Assignment, ...]]


NOTHING_MOVES = Moving()


@dataclass(frozen=True, slots=True)
class Outcome:
    """desired: assignments of every node named in the input, and of those that got one. marks: of these alone.
    replaced: of the new ones, those that take over from one that serves."""

    desired: Desired
    issued: int
    marks: Mapping[str, Mark]
    waits: tuple[Wait, ...]
    events: tuple[Happened, ...]
    replaced: tuple[Replaced, ...] = ()


def reconcile(
    plan: Plan,
    desired: Desired,
    fleet: Fleet,
    profiles: Mapping[str, ModelProfile],
    broken: Mapping[str, Refusal],
    memory: Memory,
    now: Elapsed,
    wall: Wall,
    elsewhere: frozenset[WorkloadKey] = frozenset(),
    moving: Moving = NOTHING_MOVES,
) -> Outcome:
    """One step towards `plan`. elsewhere: workloads that another region serves, as every front knows by now.

    A replica that the plan does not name any more serves on until the plan's own are all observed READY and have been
    in the routes for a moment, or another region's are; then it drains, and goes when nothing is in flight or
    `DRAIN_S` passed. Without a full plan nothing that runs is touched. A workload that is not in the plan was deleted:
    its replicas drain at once. One that stands by takes over at once when the plan says so; one that is to stand by
    serves on until the others do, and an old standby stays until the new one is ready. Of two replicas between which a
    move is under way each goes when that says so.
    """
    plans = {each.workload: each for each in plan.workloads}
    step = _Step(plans, fleet, profiles, broken, memory, now, wall, elsewhere, moving.moves)
    replaced = list[Replaced]()
    after = {node: step.node(node, assignments) for node, assignments in desired.items()}
    for each in plan.workloads:
        for target, source in starts(each, desired, fleet, moving):
            node, assignment = step.create(target)
            after[node] = (*after.get(node, ()), assignment)
            if source is not None:
                replaced.append(Replaced(target.moves, each.workload, *source, node, assignment))
    for each in plan.workloads:
        step.pending(each)
    kept = {assignment.id for assignments in after.values() for assignment in assignments}
    marks = {name: mark for name, mark in step.marks.items() if name in kept}
    return Outcome(after, step.issued, marks, tuple(step.waits), tuple(step.events), tuple(replaced))


class _Step:
    """One call of `reconcile`: the inputs, and what is gathered on the way."""

    def __init__(
        self, plans: Mapping[WorkloadKey, WorkloadPlan], fleet: Fleet, profiles: Mapping[str, ModelProfile],
        broken: Mapping[str, Refusal], memory: Memory, now: Elapsed, wall: Wall, elsewhere: frozenset[WorkloadKey],
        moves: tuple[Move, ...],
    ) -> None:  # fmt: skip
        self.plans = plans
        self.fleet = fleet
        self.profiles = profiles
        self.broken = broken
        self.now = now
        self.wall = wall
        self.elsewhere = elsewhere
        self.moves = {name: move for move in moves if move.target for name in (move.source, move.target)}
        self.issued = memory.issued
        self.marks = dict(memory.marks)
        self.settle_s = fleet.timing.settle_s
        self.waits = list[Wait]()
        self.events = list[Happened]()
        self.targets = {target.keeps: target for plan in plans.values() for target in plan.targets if target.keeps}
        self.captures = {target.workload: target.capture for plan in plans.values() for target in plan.targets}
        self.sessions = {target.workload: target.session for plan in plans.values() for target in plan.targets}
        """A consent that was taken back counts at once, also for what only leaves."""
        self.served = {key: self._in_service(plan, standby=False) for key, plan in plans.items()}
        self.relieved = {key: self._in_service(plan, standby=True) for key, plan in plans.items()}

    def node(self, node: str, assignments: tuple[Assignment, ...]) -> tuple[Assignment, ...]:
        """What stays of a node's assignments, with their terms of now."""
        kept = list[Assignment]()
        for assignment in assignments:
            state = self.fleet.nodes.get(node)
            observed = None if state is None else state.observed.get(assignment.id)
            self._follow(node, assignment, state, observed)
            after = self._after(node, assignment, state, observed)
            if after is None:
                self._say("REMOVED", node, assignment, "")
                continue
            if after.draining and not assignment.draining:
                self.marks[assignment.id] = replace(self.marks[assignment.id], stage=Stage.DRAINING, since=self.now)
                self._say("DRAINING", node, assignment, "")
            session = self.sessions.get(after.workload, after.session)
            after = replace(after, capture=self.captures.get(after.workload, 0), session=session)
            kept.append(after)
            self._wait(node, after, state, observed)
        return tuple(kept)

    def create(self, target: Target) -> tuple[str, Assignment]:
        """A new replica. Its id is a hash of what it is and of the count of all before it."""
        self.issued += 1
        named = (str(target.workload), target.node, target.device, target.model, target.precision, str(self.issued))
        name = "a-" + hashlib.sha256("\0".join(named).encode()).hexdigest()[:16]
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
            max_batch=target.max_batch,
            partition=target.partition,
            work=work_of(self.profiles[target.model]),
            signed=target.signed,
            standby=target.standby,
            staged=target.staged,
            capture=target.capture,
            session=target.session,
        )
        self.marks[name] = Mark(Stage.STARTING, self.now, target.terms)
        role = ", to stand by" if target.standby else ""
        self._say("ASSIGNED", target.node, assignment, f"{target.device}, {target.precision}{role}")
        self._wait(target.node, assignment, self.fleet.nodes.get(target.node), None)
        return target.node, assignment

    def pending(self, plan: WorkloadPlan) -> None:
        """A wait for a workload that lacks replicas: placement is tried again with every change and every tick."""
        lacking = plan.refusal or plan.no_standby
        if lacking is not None:
            retry_at = Wall(self.wall + self.fleet.timing.heartbeat_s)
            self.waits.append(Wait(plan.workload, "", "", lacking.code, str(lacking), self.wall, retry_at, None))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _in_service(self, plan: WorkloadPlan, *, standby: bool) -> bool:
        """All replicas that the plan names for requests, or to stand by, are in service, and were long enough for every
        front to know."""
        for target in plan.targets:
            if target.standby is not standby:
                continue
            state = self.fleet.nodes.get(target.node)
            observed = state.observed.get(target.keeps) if state is not None else None
            mark = self.marks.get(target.keeps)
            if target.staged and observed is not None and observed.phase is Phase.STAGED:
                continue
            in_service = (
                state is not None
                and state.liveness is Liveness.READY
                and state.reported
                and state.front_ready
                and observed is not None
                and observed.phase is Phase.READY
                and mark is not None
                and mark.stage is Stage.SERVING
                and self.now - mark.since >= self.settle_s
            )
            if not in_service:
                return False
        return True

    def _after(
        self, node: str, assignment: Assignment, state: NodeState | None, observed: Observed | None
    ) -> Assignment | None:
        """The assignment as it shall be from now on; None: it leaves the desired set."""
        move = self.moves.get(assignment.id)
        target = self.targets.get(assignment.id)
        if target is not None and (move is None or move.leaves != assignment.id):
            self.marks[assignment.id] = replace(self.marks[assignment.id], terms=target.terms)
            standby = target.standby and (assignment.standby or self._is_free(assignment.workload))
            staged = (standby and target.staged) or self._is_held(assignment)
            if assignment.staged and not staged:  # it loads from now on, and serves when it is ready
                self.marks[assignment.id] = Mark(Stage.STARTING, self.now, target.terms)
            if standby is not assignment.standby:
                self._say("STANDS_BY" if standby else "TOOK_OVER", node, assignment, assignment.device)
            return replace(
                assignment,
                revision=target.revision,
                max_batch=target.max_batch,
                partition=target.partition,
                signed=target.signed,
                standby=standby,
                staged=staged,
            )
        silent = state is None or state.liveness in (Liveness.SUSPECT, Liveness.LOST)
        lost = state is None or state.liveness is Liveness.LOST
        if assignment.draining:
            return None if lost or self._drained(assignment, state, observed) else assignment
        plan = self.plans.get(assignment.workload)
        idle = observed is None or observed.phase in (Phase.FAILED, Phase.GONE)
        if plan is None:
            return None if lost or (idle and not silent) else replace(assignment, draining=True)
        given_up = self.broken.get(assignment.id)
        if idle and not silent and given_up is not None and given_up.code is Code.POISONED:
            return None  # it runs nowhere any more, and would only crash again when its node starts anew
        if move is not None:
            if move.leaves != assignment.id or move.stays:
                return replace(assignment, staged=self._is_held(assignment))
            gone = idle or self._never_served(assignment) or (silent and move.leaves == move.target)
            return None if lost or gone else assignment if silent else replace(assignment, draining=True)
        evicted = self.served[assignment.workload] and assignment.id in plan.evicted
        free = self._is_free(assignment.workload) and (self.relieved[assignment.workload] or not assignment.standby)
        if free or evicted:
            if lost:
                return None
            if silent:
                return assignment
            return None if idle or self._never_served(assignment) else replace(assignment, draining=True)
        return assignment

    def _is_held(self, assignment: Assignment) -> bool:
        """Whether its move wants its bytes alone for now."""
        move = self.moves.get(assignment.id)
        return move is not None and assignment.id in move.holds

    def _is_free(self, workload: WorkloadKey) -> bool:
        """Whether all that is wanted serves, here or elsewhere: whatever else there is may go, or stand by."""
        plan = self.plans[workload]
        full = plan.placed >= plan.wanted > 0 or workload in self.elsewhere
        return self.served[workload] and full

    def _never_served(self, assignment: Assignment) -> bool:
        mark = self.marks.get(assignment.id)
        return mark is not None and mark.stage is Stage.STARTING

    def _drained(self, assignment: Assignment, state: NodeState | None, observed: Observed | None) -> bool:
        mark = self.marks.get(assignment.id)
        age = self.now - mark.since if mark is not None else DRAIN_S
        if age >= self._drain_s(assignment):
            return True
        if state is None or state.liveness is not Liveness.READY or not state.reported:
            return False
        if observed is None or observed.phase is Phase.GONE:
            return age >= self.settle_s
        return observed.phase is Phase.DRAINING and observed.in_flight == 0 and age >= self.settle_s

    def _drain_s(self, assignment: Assignment) -> Seconds:
        move = self.moves.get(assignment.id)
        return move.drain_s if move is not None else DRAIN_S

    def _follow(self, node: str, assignment: Assignment, state: NodeState | None, observed: Observed | None) -> None:
        """Note when a replica was first seen READY. One that is unknown here was decided by an earlier coordinator."""
        mark = self.marks.get(assignment.id)
        if mark is None:
            mark = Mark(Stage.DRAINING if assignment.draining else Stage.STARTING, self.now)
        ready = observed is not None and observed.phase is Phase.READY
        if ready and mark.stage is Stage.STARTING and state is not None and state.liveness is Liveness.READY:
            mark = Mark(Stage.SERVING, self.now, mark.terms)
            self._say("READY", node, assignment, assignment.device)
        self.marks[assignment.id] = mark

    # -- telling -----------------------------------------------------------------------------------------------------

    def _wait(self, node: str, assignment: Assignment, state: NodeState | None, observed: Observed | None) -> None:
        mark = self.marks[assignment.id]
        since = Wall(self.wall - (self.now - mark.since))
        code, reason, retry_at, gives_up_at = self._why(node, assignment, state, observed, mark)
        if code is not None:
            wait = Wait(assignment.workload, assignment.id, node, code, reason, since, retry_at, gives_up_at)
            self.waits.append(wait)

    def _why(
        self, node: str, assignment: Assignment, state: NodeState | None, observed: Observed | None, mark: Mark
    ) -> tuple[Code | None, str, Wall | None, Wall | None]:
        """(code, reason, retry_at, gives_up_at); code None where nothing is waited for."""
        soon = Wall(self.wall + self.fleet.timing.heartbeat_s)
        if assignment.draining:
            ends = Wall(self.wall + max(0.0, self._drain_s(assignment) - (self.now - mark.since)))
            flying = observed.in_flight if observed is not None else 0
            return Code.WAITING_FOR_DRAIN, f"{flying} requests in flight on {node}", None, ends
        if state is None or state.liveness is not Liveness.READY or not state.reported:
            return Code.WAITING_FOR_LINK, f"{node} is silent", soon, None
        if assignment.id not in self.targets and assignment.workload in self.plans and mark.stage is Stage.SERVING:
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

    def _say(self, code: str, node: str, assignment: Assignment, message: str) -> None:
        self.events.append(Happened(code, assignment.id, message, node, assignment.workload))
