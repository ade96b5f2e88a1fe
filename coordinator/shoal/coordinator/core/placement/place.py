"""Plans where every workload runs. Placement is pure and deterministic, and explains itself. Guide:
docs/guides/placement.md."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Final

from shoal.coordinator.core.fleet.commitments import memory_of
from shoal.coordinator.core.placement import explain as why
from shoal.coordinator.core.placement.accuracy import batching_of, comparison_of, preparation_of
from shoal.coordinator.core.placement.allocations import (
    NOTHING_STANDS,
    Allocations,
    Baseline,
    QuotaCaps,
    StandingReplicas,
    busy_share,
    initial_allocations,
    memory_requirement,
    rank_of,
    wants_standby,
)
from shoal.coordinator.core.placement.columns import DeviceColumns
from shoal.coordinator.core.placement.contention import Pick
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.joint import better_places, is_worth_trying
from shoal.coordinator.core.placement.model import (
    SUMS,
    Inputs,
    Move,
    PlacementChange,
    PlacementPlan,
    ReplicaTarget,
    Reservation,
    Slot,
    WorkloadPlan,
)
from shoal.coordinator.core.placement.preempt import preemptions
from shoal.coordinator.core.placement.replicas import WorkloadReplicas, replicas_of
from shoal.coordinator.core.placement.signatures import make_signed_model
from shoal.coordinator.core.placement.solve import Level, Occupancy, OptionKey, Solver
from shoal.coordinator.core.placement.tenant_cost import TenantBudget, TenantCost
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against
from shoal.types.units import Bytes
from shoal.types.workload import Intent, Preempt, Standby, WorkloadKey


def place(
    inputs: Inputs,
    *,
    explain: bool | Collection[WorkloadKey] = True,
    as_if_local: Collection[WorkloadKey] = (),
    standing: StandingReplicas = NOTHING_STANDS,
    columns: DeviceColumns | None = None,
) -> PlacementPlan:
    """Where every workload should run, why, and which change would place it where it cannot run.

    explain: for all workloads, none, or these. Without it there are no candidates and no proposals, and a workload
    whose replicas all stay costs nothing that grows with the fleet. The decisions, and so the hash, are the same.
    as_if_local: workloads that another region runs. Each is planned as if it ran here and everything else stayed where
    it is. Such a plan takes no capacity from others.
    standing: replicas of other workloads, of which nothing is to be decided.
    columns: the devices of the same inputs as arrays; without it, and where something is explained, each is looked at.
    """
    scope = Scope(inputs, standing.allocations.occupants)
    columns = None if explain else columns
    intents = sorted(inputs.intents, key=rank_of)
    current = _current_replicas(scope, intents)
    caps = QuotaCaps(scope, [(intent, current[intent.key]) for intent in intents])
    allocations = initial_allocations(
        scope, ((intent, current[intent.key]) for intent in intents), standing.allocations
    )
    initial = allocations
    decided = Decided((), allocations, lambda: initial, caps)
    concerned = {*inputs.desired, *(each.slot.node for each in inputs.reserved)}
    if columns is not None:
        columns.touch(concerned)
    for _, equals in groupby(intents, key=lambda intent: intent.priority):
        group = _PriorityGroup(scope, tuple(equals), current, decided, as_if_local, standing, columns)
        decided = group.decide(explain)
        concerned |= group.concerned
    plans, allocations = decided.plans, decided.allocations
    if columns is not None:
        columns.touch(concerned)  # nothing of this plan is in the next one's inputs, unless it is stored
    budgets = tuple(
        TenantBudget(tenant, quota.cost, allocations.usage(tenant).cost)
        for tenant, quota in sorted(inputs.quotas.items())
        if quota.cost is not None
    )
    return PlacementPlan(plans, _hash(inputs, plans, standing.decided), budgets)


def _current_replicas(scope: Scope, intents: Sequence[Intent]) -> dict[WorkloadKey, WorkloadReplicas]:
    """Each workload's replicas, without those that have to leave although they have no other place. The others move
    (`migration.triggers.preempt`)."""
    current = {intent.key: replicas_of(scope, intent) for intent in intents}
    if not any(intent.preempt is Preempt.ALWAYS for intent in intents):
        return current
    leaves = {each.assignment: each for each in preemptions(scope, intents, current) if not each.has_place}
    losing = {each.workload for each in leaves.values()}
    refusals = {name: each.refusal for name, each in leaves.items()}
    return current | {
        intent.key: replicas_of(scope, intent, preempted=refusals) for intent in intents if intent.key in losing
    }


MOST_NESTED: Final = 64
"""A baseline asks that of the priority before; every so many one is worked out, so that nobody asks through more."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided so far."""

    # The plans, in order.
    plans: tuple[WorkloadPlan, ...]
    # Capacity that is taken, all decisions included.
    allocations: Allocations
    # The same without the decisions, and as if their workloads had no replicas.
    baseline: Callable[[], Allocations]
    # What the quotas let the workloads that follow keep.
    caps: QuotaCaps
    # Number of priorities that were decided.
    depth: int = 0


class _PriorityGroup:
    """The workloads of one priority: decided one after the other, and their new replicas then together."""

    def __init__(
        self, scope: Scope, intents: Sequence[Intent], current: Mapping[WorkloadKey, WorkloadReplicas],
        before: Decided, as_if_local: Collection[WorkloadKey], standing: StandingReplicas,
        columns: DeviceColumns | None,
    ) -> None:  # fmt: skip
        self._scope = scope
        self._intents = intents
        self._current = current
        self._before = before
        self._as_if_local = as_if_local
        self._standing = standing
        self._columns = columns
        self.concerned = set[str]()
        """Nodes of workloads that were decided."""
        # Workloads whose candidates are kept, and the last solver of each.
        self._shared: Collection[WorkloadKey] = ()
        self._solvers = dict[WorkloadKey, Solver]()

    def decide(self, explain: bool | Collection[WorkloadKey]) -> Decided:
        lacking = [intent for intent in self._intents if self._lacks(intent)]
        rows = sum(intent.require.replicas for intent in lacking)
        devices: Sized = self._columns if self._columns is not None else self._scope.devices
        if not is_worth_trying(rows, len(devices)):
            return self._decide(explain, {})
        self._shared = {intent.key for intent in lacking}
        found = self._decide(False, {})
        better = better_places(self._scope, [self._solvers[intent.key] for intent in lacking], found.allocations)
        if better:
            together = self._decide(explain, better)
            if self._placed(together) >= self._placed(found):
                return together
            self._touch(self.concerned)  # columns may say what was taken together
        return self._decide(explain, {}) if explain else found

    def _lacks(self, intent: Intent) -> bool:
        """Whether a workload may need a new replica here, and nothing of it moves."""
        current = self._current[intent.key]
        moves = any(move.workload == intent.key for move in self._scope.inputs.moves)
        away = intent.key in self._scope.inputs.elsewhere
        return len(current.active) < intent.require.replicas and not moves and not away

    def _placed(self, decided: Decided) -> int:
        return sum(plan.placed for plan in decided.plans[len(self._before.plans) :])

    def _decide(
        self, explain: bool | Collection[WorkloadKey], preferred: Mapping[WorkloadKey, Sequence[OptionKey]]
    ) -> Decided:
        """Decides one after the other. preferred: places that new replicas try first."""
        scope, inputs = self._scope, self._scope.inputs
        allocations, caps = self._before.allocations, self._before.caps.copy()
        baseline = Baseline(self._before.baseline)
        plans = list(self._before.plans)
        self._touch(self.concerned)
        for intent in self._intents:
            replicas, tenant = self._current[intent.key], intent.key.tenant
            away = intent.key in inputs.elsewhere
            if away and intent.key not in self._as_if_local:
                at_first = self._at_first(baseline, intent, ())
                spare = Solver(scope, intent, replicas, caps.of(intent.key), allocations, at_first, elsewhere=True)
                plan, allocations = _plan_elsewhere(spare, allocations)
                plans.append(_with_cost(plan, spare, allocations))
                self._touch(_nodes_of(plan, replicas))
                continue
            # A guest workload may use the capacity that is reserved for it.
            is_guest = tenant == GUEST_TENANT
            own = [each for each in inputs.reserved if each.bid == intent.key.name] if is_guest else []
            free, free_at_first = allocations.with_reservations(own, -1), self._at_first(baseline, intent, own)
            self._touch({each.slot.node for each in own} | {each.node for each in replicas.healthy})
            solver = self._solver(intent, caps.of(intent.key), free, free_at_first, preferred.get(intent.key, ()))
            asked = explain if isinstance(explain, bool) else intent.key in explain
            plan, after = _place_moves(solver, *_plan_workload(solver, explain=asked), explain=asked)
            plan, after = _replace_in_place(solver, plan, after, explain=asked)
            after = after.with_awarded(scope, intent.key, _cost_beside(solver, after))
            plans.append(_with_cost(plan, solver, after))
            self._touch({each.slot.node for each in own} | _nodes_of(plan, replicas))
            if not away:
                caps.decide(intent.key, {target.existing_assignment for target in plan.targets})
                # The reservation stays while the guest has no place. The baseline loses this workload, so that later
                # ones can tell OUTRANKED from a real shortage.
                allocations = after if plan.targets else after.with_reservations(own)
                baseline.take_out(partial(_without, scope, intent, replicas, own))
        depth = self._before.depth + 1
        if depth % MOST_NESTED == 0:
            baseline.at(len(baseline))
        return Decided(tuple(plans), allocations, partial(baseline.at, len(baseline)), caps, depth)

    def _at_first(self, baseline: Baseline, intent: Intent, own: Sequence[Reservation]) -> Callable[[], Allocations]:
        """What is left of a baseline now, for this workload."""
        number, standing = len(baseline), self._standing
        return lambda: standing.baseline(baseline.at(number), intent).with_reservations(own, -1)

    def _touch(self, nodes: Set[str]) -> None:
        """The next workload finds something else taken there."""
        self.concerned |= nodes
        if self._columns is not None:
            self._columns.touch(nodes)

    def _solver(
        self,
        intent: Intent,
        cap: int,
        allocations: Allocations,
        baseline: Callable[[], Allocations],
        preferred: Sequence[OptionKey],
    ) -> Solver:
        """A solver that shares the candidates of an earlier one of the same workload."""
        known = self._solvers.get(intent.key)
        solver = Solver(
            self._scope, intent, self._current[intent.key], cap, allocations, baseline, preferred=preferred,
            table=known.table if known is not None else None, columns=self._columns,
        )  # fmt: skip
        if intent.key in self._shared:
            self._solvers[intent.key] = solver
        return solver


def _without(
    scope: Scope, intent: Intent, replicas: WorkloadReplicas, own: Sequence[Reservation], baseline: Allocations
) -> Allocations:
    """own: what is reserved for the workload."""
    return baseline.with_reservations(own, -1).without_workload(scope, intent, replicas)


def _nodes_of(plan: WorkloadPlan, replicas: WorkloadReplicas) -> Set[str]:
    """Where something may be taken or freed by a plan."""
    held = {each.node for each in replicas.healthy} | {each.node for each in replicas.failed}
    return held | {each.node for each in plan.targets}


def _cost_beside(solver: Solver, after: Allocations) -> TenantCost:
    """What the solver's workload costs. after: the allocations with it."""
    tenant = solver.intent.key.tenant
    if after is solver.given:
        return solver.cost
    return after.usage(tenant).cost.plus(solver.allocations.usage(tenant).cost, -1)


def _with_cost(plan: WorkloadPlan, solver: Solver, after: Allocations) -> WorkloadPlan:
    return replace(plan, cost=_cost_beside(solver, after))


def _place_moves(
    base: Solver, plan: WorkloadPlan, after: Allocations, *, explain: bool
) -> tuple[WorkloadPlan, Allocations]:
    """Adds as many of the waiting moves as find a place and may run concurrently. For the others, the plan says why
    they wait."""
    scope, intent = base.scope, base.intent
    waiting = [move for move in scope.inputs.moves if move.workload == intent.key and not move.target]
    room = intent.migration.max_concurrent - sum(move.workload == intent.key for move in scope.placed_moves)
    accepted, refusals, best = list[Move](), dict[str, Refusal](), plan
    for move in waiting:
        if len(accepted) >= room:
            break
        moving = (*accepted, move)
        solver = base.with_moves(replicas_of(scope, intent, moving), moving)
        found, allocations = _plan_workload(solver, explain=explain)
        if found.placed >= plan.placed and sum(bool(target.migration) for target in found.targets) == len(moving):
            accepted, best, after = [*moving], found, allocations
            continue
        instead = _place_with_gap(base, move.source, moving, plan.placed, explain=explain)
        if instead is None or isinstance(instead, Refusal):
            refusals[move.migration] = instead or why.move_refusal(solver, move)
        else:
            accepted, (best, after) = [*moving], instead
    return (replace(best, unplaced_moves=refusals) if refusals else best), after


def _place_with_gap(
    base: Solver, source: str, moving: Sequence[Move], placed: int, *, explain: bool
) -> tuple[WorkloadPlan, Allocations] | Refusal | None:
    """The plan with a new replica in the memory of `source`, which is unloaded before the new one loads. Only where the
    policy allows a gap and the device of `source` is the only place.

    Returns None where that does not help, and a refusal where the gap would exceed what the policy allows.
    """
    scope, intent = base.scope, base.intent
    if intent.migration.allow_gap_s <= 0 or intent.session or any(move.gap for move in scope.placed_moves):
        return None  # sessions would be lost while no replica serves
    leaving = next(
        (_occupancy(scope, *each) for each in scope.current.get(intent.key, ()) if each[1].id == source), None
    )
    if leaving is None:
        return None
    solver = base.with_moves(replicas_of(scope, intent, moving), moving, leaving)
    found, allocations = _plan_workload(solver, explain=explain)
    new = [each for each in found.targets if not each.existing_assignment]
    last = new[-1] if new else None
    if found.placed < max(placed, 1) or last is None or (last.node, last.device) != leaving.slot or last.standby:
        return None
    needed_s, allowed_s = _gap_s(solver, last, source), intent.migration.allow_gap_s
    if needed_s > allowed_s:
        gap = f"{needed_s:.1f} s for the new one to come up, and the old one again should it fail"
        return Refusal(Code.NO_ROOM_FOR_BOTH, gap, f"within `migration: allow_gap` {allowed_s:g} s")
    targets = tuple(replace(each, replaces=source, staged=True) if each is last else each for each in found.targets)
    kept = Bytes(max(0, leaving.memory_bytes - last.memory_bytes))
    return replace(found, targets=targets), allocations.with_freed_memory(leaving.slot, Bytes(-kept))


def _gap_s(solver: Solver, target: ReplicaTarget, source: str) -> float:
    """The longest time without a serving replica, by what is known or predicted of both."""
    scope, rule = solver.scope, solver.intent.migration
    names = (target.node, target.device, target.variant)
    there = next((each.prediction for each in solver.options if each.key == names), None)
    state = scope.inputs.fleet.nodes.get(target.node)
    observed = state.observed.get(source) if state is not None else None
    again_s = observed.measured.load_s if observed is not None and observed.measured is not None else 0.0
    if there is None:
        return again_s
    compared_s = 0.0 if rule.against is Against.NONE else rule.samples * there.latency_p95_s.mid
    return there.load_s.mid + compared_s + again_s + scope.inputs.fleet.timing.route_propagation_s


def _occupancy(scope: Scope, node: str, assignment: Assignment) -> Occupancy:
    state = scope.inputs.fleet.nodes.get(node)
    observed = state.observed.get(assignment.id) if state is not None else None
    return Occupancy(assignment.id, Slot(node, assignment.device), memory_of(assignment, observed))


def _replace_in_place(
    base: Solver, plan: WorkloadPlan, after: Allocations, *, explain: bool
) -> tuple[WorkloadPlan, Allocations]:
    """Where replicas lack a place only because the ones that they replace occupy it: puts one of them into that
    memory."""
    scope, intent = base.scope, base.intent
    busy = any(move.workload == intent.key for move in scope.inputs.moves)
    if intent.migration.allow_gap_s <= 0 or plan.placed >= plan.wanted or busy:
        return plan, after
    kept = {target.existing_assignment for target in plan.targets}
    superseded = [each.assignment.id for each in base.failed if each.refusal.code is Code.CONFLICT]
    superseded += [each.assignment.id for each in base.active if each.assignment.id not in kept]
    for source in superseded:
        found = _place_with_gap(base, source, (), plan.placed + 1, explain=explain)
        if isinstance(found, Refusal):
            plan = replace(plan, refusal=found)
        elif found is not None:
            return found
    return plan, after


def _plan_workload(solver: Solver, *, explain: bool) -> tuple[WorkloadPlan, Allocations]:
    """Tries the policy's own setting, then its `relax` steps in order. Takes the first that places all replicas, else
    the one that places most."""
    intent = solver.intent
    level = None if explain else solver.steady_level()
    is_steady = level is not None
    relaxed: tuple[str, ...] = ()
    if level is None:
        level, relaxed = solver.choose()
    proposal, change = why.nearest(solver, level) if explain and not level.is_full else (None, "")
    refusal, is_final = _why_short(solver, level, change, explain=explain)
    plan = WorkloadPlan(
        workload=intent.key,
        policy=intent.policy,
        wanted=level.wanted,
        placed=len(level.picks),
        candidates=why.candidates(solver, level) if explain else (),
        changes=why.changes(solver, level, explain=explain),
        refusal=refusal,
        relaxed=relaxed or why.relaxations_in_use(solver, level),
        nearest=change,
        proposal=proposal,
        targets=_targets(solver, level),
        evicted=(*level.evicted, *(each.assignment.id for each in solver.failed if each.is_preempted)),
        awaiting_node=solver.awaiting_node(level),
        no_standby=level.no_standby,
        is_final=is_final,
        is_steady=is_steady,
        compared_with=why.comparison_models(solver, level) if explain else (),
    )
    return plan, level.allocations


def _why_short(solver: Solver, level: Level, remedy: str, *, explain: bool) -> tuple[Refusal | None, bool]:
    """Why replicas are missing, and whether they stay missing until somebody changes something. Where no device can
    take any whatever else is placed, that is found once for all workloads that ask for the same."""
    if level.is_full:
        return None, False
    known = None if explain or level.picks else solver.known_nowhere(level.require, level.limits)
    if known is not None:
        return known.refusal, why.is_final(solver, level, known)
    excluded = None if explain or level.picks else solver.excluded_everywhere(level)
    if excluded is None:
        return why.refusal(solver, level, remedy), why.is_final(solver, level)
    known = why.nowhere(excluded, level, remedy)
    solver.remember_nowhere(level, known)
    return known.refusal, why.is_final(solver, level, known)


def _plan_elsewhere(solver: Solver, allocations: Allocations) -> tuple[WorkloadPlan, Allocations]:
    """Plans a standby where the policy asks for one. Other replicas that still run here keep their capacity until they
    are gone."""
    intent = solver.intent
    level = solver.steady_level() or solver.solve(intent.require, intent.limits) if wants_standby(intent) else None
    targets = _targets(solver, level) if level is not None else ()
    runs = [(each.node, each.assignment) for each in solver.healthy]
    runs += [(each.node, each.assignment) for each in solver.failed]
    kept = {target.existing_assignment for target in targets}
    plan = WorkloadPlan(
        workload=intent.key,
        policy=intent.policy,
        wanted=0,
        placed=0,
        candidates=(),
        changes=(
            *(why.standby_changes(solver, level) if level is not None else ()),
            *(
                PlacementChange("-", node, one.device, one.model, one.precision, one.id, "another region runs it")
                for node, one in runs
                if one.id not in kept
            ),
        ),
        refusal=None,
        relaxed=(),
        nearest="",
        proposal=None,
        targets=targets,
        elsewhere=True,
        no_standby=level.no_standby if level is not None else None,
    )
    if level is None:
        return plan, allocations
    return plan, level.allocations.with_awarded(solver.scope, intent.key, _cost_beside(solver, level.allocations))


def _targets(solver: Solver, level: Level) -> tuple[ReplicaTarget, ...]:
    """Replicas for requests first, the standby last."""
    found = [_target(solver, pick, level.require.replicas) for pick in level.picks]
    if level.standby is not None:
        found.append(_target(solver, level.standby, level.require.replicas, standby=True))
    return tuple(found)


def _target(solver: Solver, pick: Pick, replicas: int, *, standby: bool = False) -> ReplicaTarget:
    inputs, intent, option = solver.scope.inputs, solver.intent, pick.option
    kept = pick.existing.assignment if pick.existing is not None else None
    pack = intent.packs.get(option.model.digest)
    return ReplicaTarget(
        workload=intent.key,
        revision=intent.revision,
        node=option.slot.node,
        device=option.slot.device,
        provider=option.device.provider,
        model=option.model.digest,
        model_bytes=option.profile.size_bytes,
        precision=option.precision,
        memory_bytes=kept.memory_bytes if kept is not None else memory_requirement(option),
        shared_worker=intent.shared_worker,
        partition=intent.partition,
        existing_assignment=kept.id if kept is not None else "",
        terms=solver.terms,
        signed=make_signed_model(inputs.signatures, option.model.digest, intent.require, inputs.wall),
        busy=busy_share(solver.scope, intent, option, replicas),
        standby=standby,
        staged=standby and intent.require.standby is Standby.STAGED,
        migration=pick.move.migration if pick.move is not None else "",
        capture=intent.capture,
        session=intent.session,
        samples=intent.samples_of(option.model.digest),
        samples_bytes=pack.size_bytes if pack is not None else Bytes(0),
        samples_count=pack.count if pack is not None else 0,
        warm_up_optional=intent.warm_up_optional,
        shapes=intent.shapes,
        partial=intent.require.partial,
        preparation=preparation_of(intent, option.precision) if option.model.prepared else None,
        comparison=comparison_of(intent, option.device, option.precision),
        batching=batching_of(intent, option.device, option.precision),
        to_zero_after_s=intent.to_zero_after_s,
        provider_bytes=kept.provider_bytes if kept is not None else _provider_bytes(intent, option),
    )


def _provider_bytes(intent: Intent, option: Option) -> Bytes:
    """0 where every replica has a worker of its own."""
    if not intent.shared_worker or option.receipt is None:
        return Bytes(0)
    return Bytes(min(option.receipt.provider_bytes, memory_requirement(option)))


def _hash(inputs: Inputs, plans: Iterable[WorkloadPlan], standing: int) -> str:
    """First 16 hex digits of the SHA-256 over the documents, all targets and the workloads that lack replicas.

    Of the documents and of the targets it is the sums that count (`number_of`), so that the plan of what changed has
    the hash of the plan of everything. standing: the sum of targets that are not in the plans.
    """
    targets = standing + sum(target.number for plan in plans for target in plan.targets)
    decided = {
        "documents": inputs.documents % SUMS,
        "targets": targets % SUMS,
        "short": sorted(plan.workload for plan in plans if plan.placed < plan.wanted),
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]
