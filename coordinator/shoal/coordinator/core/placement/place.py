"""Where every workload runs: pure, deterministic, and able to say why. Guide: docs/guides/placement.md."""

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from shoal.coordinator.core.fleet.commitments import memory_of
from shoal.coordinator.core.placement import explain as why
from shoal.coordinator.core.placement.books import Books, busy_share, opened, quota_caps, wants_standby
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.model import Inputs, Move, PlacementChange, Plan, Slot, Target, WorkloadPlan
from shoal.coordinator.core.placement.signatures import sealed
from shoal.coordinator.core.placement.solve import Level, Occupied, Pick, Solver, memory_needed
from shoal.coordinator.core.placement.standing import current_of
from shoal.types.agreement import GUESTS
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against
from shoal.types.units import Bytes
from shoal.types.workload import Standby, WorkloadKey


def place(
    inputs: Inputs, *, explain: bool | Collection[WorkloadKey] = True, at_home: Collection[WorkloadKey] = ()
) -> Plan:
    """Where every workload shall run, why, and what would have to give where it cannot.

    explain: for all, none, or these. Without it there are no candidates and no proposals, and a workload whose replicas
    all stand costs nothing that grows with the fleet; the decisions, and so the hash, are the same.
    at_home: of those elsewhere, where each would be placed if no other region ran it, and the others were where they
    are: such a plan takes no room from anybody.
    """
    scope = Scope(inputs)
    intents = sorted(inputs.intents, key=lambda intent: (-intent.priority, intent.key))
    current = {intent.key: current_of(scope, intent) for intent in intents}
    caps = quota_caps(scope, [(intent, current[intent.key]) for intent in intents])
    opening = opened(scope, ((intent, current[intent.key]) for intent in intents))
    books = opening
    plans = list[WorkloadPlan]()
    for intent in intents:
        stands = current[intent.key]
        away = intent.key in inputs.elsewhere
        if away and intent.key not in at_home:
            spare = Solver(scope, intent, stands, caps[intent.key], books, opening, elsewhere=True)
            plan, books = _elsewhere(spare, books)
            plans.append(plan)
            continue
        is_guest = intent.key.tenant == GUESTS
        own = [each for each in inputs.reserved if each.bid == intent.key.name] if is_guest else []
        free, free_at_first = books.reserving(own, -1), opening.reserving(own, -1)
        solver = Solver(scope, intent, stands, caps[intent.key], free, free_at_first)
        asked = explain if isinstance(explain, bool) else intent.key in explain
        plan, after = _moved(solver, *_workload(solver, explain=asked), explain=asked)
        plan, after = _replaced(solver, plan, after, explain=asked)
        plans.append(plan)
        if not away:
            books = after if plan.targets else after.reserving(own)
            opening = free_at_first.without(scope, intent, stands)
    return Plan(tuple(plans), _hash(inputs, plans))


def _moved(unmoved: Solver, plan: WorkloadPlan, after: Books, *, explain: bool) -> tuple[WorkloadPlan, Books]:
    """With as many of the moves that wait for a place as find one and may go at once, and what the others lack."""
    scope, intent = unmoved.scope, unmoved.intent
    waiting = [move for move in scope.inputs.moves if move.workload == intent.key and not move.target]
    room = intent.migration.max_concurrent - sum(move.workload == intent.key for move in scope.moving)
    taken, held, best = list[Move](), dict[str, Refusal](), plan
    for move in waiting:
        if len(taken) >= room:
            break
        moving = (*taken, move)
        solver = unmoved.moved(current_of(scope, intent, moving), moving)
        found, books = _workload(solver, explain=explain)
        if found.placed >= plan.placed and sum(bool(target.moves) for target in found.targets) == len(moving):
            taken, best, after = [*moving], found, books
            continue
        instead = _instead(unmoved, move.source, moving, plan.placed, explain=explain)
        if instead is None or isinstance(instead, Refusal):
            held[move.migration] = instead or why.unmoved(solver, move)
        else:
            taken, (best, after) = [*moving], instead
    return (replace(best, unmoved=held) if held else best), after


def _instead(
    unmoved: Solver, source: str, moving: Sequence[Move], placed: int, *, explain: bool
) -> tuple[WorkloadPlan, Books] | Refusal | None:
    """With a new replica in the room of `source`, which goes before that is loaded, where the policy allows a gap and
    nothing else helps: the source's device is the only place for it. A refusal where the gap is too short for it."""
    scope, intent = unmoved.scope, unmoved.intent
    if intent.migration.allow_gap_s <= 0 or intent.session or any(move.gap for move in scope.moving):
        return None  # sessions have nowhere to be while nobody serves
    leaving = next(
        (_occupied(scope, *each) for each in scope.current.get(intent.key, ()) if each[1].id == source), None
    )
    if leaving is None:
        return None
    solver = unmoved.moved(current_of(scope, intent, moving), moving, leaving)
    found, books = _workload(solver, explain=explain)
    new = [each for each in found.targets if not each.keeps]
    last = new[-1] if new else None
    if found.placed < max(placed, 1) or last is None or (last.node, last.device) != leaving.slot or last.standby:
        return None
    needed_s, allowed_s = _gap_s(solver, last, source), intent.migration.allow_gap_s
    if needed_s > allowed_s:
        gap = f"{needed_s:.1f} s for the new one to come up, and the old one again should it fail"
        return Refusal(Code.NO_ROOM_FOR_BOTH, gap, f"within `migration: allow_gap` {allowed_s:g} s")
    targets = tuple(replace(each, instead=source, staged=True) if each is last else each for each in found.targets)
    kept = Bytes(max(0, leaving.memory - last.memory_bytes))
    return replace(found, targets=targets), books.freed(leaving.slot, Bytes(-kept))


def _gap_s(solver: Solver, target: Target, source: str) -> float:
    """For how long nobody may serve at the most, by what is known or predicted of both."""
    scope, rule = solver.scope, solver.intent.migration
    names = (target.node, target.device, target.model)
    there = next((each.prediction for each in solver.options if each.names == names), None)
    state = scope.inputs.fleet.nodes.get(target.node)
    observed = state.observed.get(source) if state is not None else None
    again_s = observed.measured.load_s if observed is not None and observed.measured is not None else 0.0
    if there is None:
        return again_s
    compared_s = 0.0 if rule.against is Against.NONE else rule.samples * there.latency_p95_s.mid
    return there.load_s.mid + compared_s + again_s + scope.inputs.fleet.timing.settle_s


def _occupied(scope: Scope, node: str, assignment: Assignment) -> Occupied:
    state = scope.inputs.fleet.nodes.get(node)
    observed = state.observed.get(assignment.id) if state is not None else None
    return Occupied(assignment.id, Slot(node, assignment.device), memory_of(assignment, observed))


def _replaced(unmoved: Solver, plan: WorkloadPlan, after: Books, *, explain: bool) -> tuple[WorkloadPlan, Books]:
    """Where replicas lack a place only because what they replace is there: one of them in that room."""
    scope, intent = unmoved.scope, unmoved.intent
    busy = any(move.workload == intent.key for move in scope.inputs.moves)
    if intent.migration.allow_gap_s <= 0 or plan.placed >= plan.wanted or busy:
        return plan, after
    kept = {target.keeps for target in plan.targets}
    superseded = [each.assignment.id for each in unmoved.fallen if each.refusal.code is Code.CONFLICT]
    superseded += [each.assignment.id for each in unmoved.standing if each.assignment.id not in kept]
    for source in superseded:
        found = _instead(unmoved, source, (), plan.placed + 1, explain=explain)
        if isinstance(found, Refusal):
            plan = replace(plan, refusal=found)
        elif found is not None:
            return found
    return plan, after


def _workload(solver: Solver, *, explain: bool) -> tuple[WorkloadPlan, Books]:
    """The policy's own setting, then its `relax` steps in order: the first that places all replicas, else most."""
    intent = solver.intent
    level = None if explain else solver.unmoved()
    relaxed: tuple[str, ...] = ()
    if level is None:
        levels = [solver.solve(intent.require, intent.limits)]
        for step in intent.relax:
            if levels[-1].full:
                break
            levels.append(solver.solve(step.require, step.limits))
        index = max(range(len(levels)), key=lambda index: (levels[index].full, len(levels[index].picks), -index))
        level = levels[index]
        relaxed = tuple(step.change for step in intent.relax[:index])
    proposal, change = why.nearest(solver, level) if explain and not level.full else (None, "")
    plan = WorkloadPlan(
        workload=intent.key,
        policy=intent.policy,
        wanted=level.wanted,
        placed=len(level.picks),
        candidates=why.candidates(solver, level) if explain else (),
        changes=why.changes(solver, level),
        refusal=None if level.full else why.refusal(solver, level, change),
        relaxed=relaxed or why.already_relaxed(solver, level),
        nearest=change,
        proposal=proposal,
        targets=_targets(solver, level),
        evicted=level.evicted,
        no_standby=level.no_standby,
    )
    return plan, level.books


def _elsewhere(solver: Solver, books: Books) -> tuple[WorkloadPlan, Books]:
    """A standby, where the policy asks for one. What else still runs here keeps its room until it is gone."""
    intent = solver.intent
    level = solver.unmoved() or solver.solve(intent.require, intent.limits) if wants_standby(intent) else None
    targets = _targets(solver, level) if level is not None else ()
    runs = [(each.node, each.assignment) for each in solver.counted]
    runs += [(each.node, each.assignment) for each in solver.fallen]
    kept = {target.keeps for target in targets}
    plan = WorkloadPlan(
        workload=intent.key,
        policy=intent.policy,
        wanted=0,
        placed=0,
        candidates=(),
        changes=(
            *(why.standing_by(solver, level) if level is not None else ()),
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
    return plan, level.books if level is not None else books


def _targets(solver: Solver, level: Level) -> tuple[Target, ...]:
    """The standby last."""
    found = [_target(solver, pick, level.require.replicas) for pick in level.picks]
    if level.standby is not None:
        found.append(_target(solver, level.standby, level.require.replicas, standby=True))
    return tuple(found)


def _target(solver: Solver, pick: Pick, replicas: int, *, standby: bool = False) -> Target:
    inputs, intent, option = solver.scope.inputs, solver.intent, pick.option
    kept = pick.keeps.assignment if pick.keeps is not None else None
    return Target(
        workload=intent.key,
        revision=intent.revision,
        node=option.slot.node,
        device=option.slot.device,
        provider=option.device.provider,
        model=option.model.digest,
        model_bytes=option.profile.size_bytes,
        precision=option.precision,
        memory_bytes=kept.memory_bytes if kept is not None else memory_needed(option),
        max_batch=intent.max_batch,
        shared_worker=intent.shared_worker,
        partition=intent.partition,
        keeps=kept.id if kept is not None else "",
        terms=solver.terms,
        signed=sealed(inputs.signatures, option.model.digest, intent.require, inputs.wall),
        busy=busy_share(solver.scope, intent, option, replicas),
        standby=standby,
        staged=standby and intent.require.standby is Standby.STAGED,
        moves=pick.moves.migration if pick.moves is not None else "",
        capture=intent.capture,
        session=intent.session,
    )


def _hash(inputs: Inputs, plans: Iterable[WorkloadPlan]) -> str:
    """SHA-256 over the documents and the chosen (workload, node, device, model, precision), first 16 hex digits."""
    decided = {
        "documents": sorted((each.kind, each.name, each.digest) for each in inputs.documents),
        "targets": sorted(
            (*plan.workload, target.node, target.device, target.model, target.precision, *_role(target))
            for plan in plans
            for target in plan.targets
        ),
        "short": sorted(plan.workload for plan in plans if plan.placed < plan.wanted),
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]


def _role(target: Target) -> tuple[str, ...]:
    return ("standby",) if target.standby else ()
