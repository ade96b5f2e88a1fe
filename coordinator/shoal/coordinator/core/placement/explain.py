"""Explains why a workload is placed as it is, and which change would place it where it is not."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.placement.columns import Excluded, Nowhere
from shoal.coordinator.core.placement.domains import taken_domains, weaker
from shoal.coordinator.core.placement.feasible import HARD_CONSTRAINTS, Constraint, Option, PlacementFault
from shoal.coordinator.core.placement.model import Candidate, Move, PlacementChange
from shoal.coordinator.core.placement.rank import explain_scores, pareto, tie_breaks_of
from shoal.coordinator.core.placement.relax import (
    CATEGORY_SIZE,
    RequiredRelaxation,
    apply_relaxations,
    distinct,
    render_change,
    total_size,
)
from shoal.coordinator.core.placement.replicas import CurrentReplica
from shoal.coordinator.core.placement.solve import Level, Solver
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against
from shoal.types.workload import DelegationMode, Relaxation, Standby

SHORTFALLS_MOST = 16
"""Candidates whose faults are examined for the nearest change."""
TRIALS_MOST = 24
"""Changes that are tried for one workload that does not fit."""
PERMANENT = frozenset(
    {
        Constraint.SELECTOR,
        Constraint.RESIDENCY,
        Constraint.SIGNATURE,
        Constraint.PRECISION,
        Constraint.LABEL,
        Constraint.OPERATORS,
        Constraint.POISONED,
        Constraint.SIGNATURE_AGE,
        Constraint.LATENCY,
        Constraint.COST,
        Constraint.ENERGY,
    }
)
"""Constraints that hold until a document, a model, a price or a device changes. The others may pass by themselves:
memory, utilisation, quota and power may become free, a silent node may return, a device may be measured."""
_TRANSIENT = frozenset({Code.NODE_NOT_READY, Code.LOAD_TIMEOUT, Code.FETCH_FAILED, Code.NODE_LOST, Code.DEVICE_LOST})
"""Failures after which a replica may still serve on the same device later."""
_TIME_DEPENDENT = re.compile(r"\b(now|carbon)\b")
"""Variables of an expression whose values change with time."""


def candidates(solver: Solver, level: Level) -> tuple[Candidate, ...]:
    """Every (device, model): the chosen ones, the standby, the other feasible ones by `prefer` and score, then the
    excluded ones by the size of the change that they need."""
    scope, intent, options = solver.scope, solver.intent, solver.options
    replicas = level.require.replicas
    chosen = {pick.option.key for pick in level.picks}
    stands_by = level.standby.option.key if level.standby is not None else None
    assigned = [(each.node, each.assignment) for each in solver.healthy]
    assigned += [(each.node, each.assignment) for each in solver.failed]
    current = {(node, assignment.device, assignment.variant) for node, assignment in assigned}
    exclusions = solver.exclusions(level)
    fits = [index for index, found in enumerate(exclusions) if not found]
    figures = [solver.values(options[index], level.require) for index in fits]
    terms, scores = explain_scores(figures, intent.weights)
    front = pareto(figures)
    place = {index: position for position, index in enumerate(fits)}
    order = tie_breaks_of(scope.inputs.seed, str(intent.key), (option.key for option in options))
    rows = list[tuple[tuple[bool, int, int, float, int], Candidate]]()
    for index, option in enumerate(options):
        position = place.get(index)
        faults = _in_order(exclusions[index])
        gives = tuple(fault.relaxation for fault in faults)
        candidate = Candidate(
            node=option.slot.node,
            device=option.slot.device,
            model=option.model.digest,
            precision=option.precision,
            variant=option.model.variant,
            stand_in=option.device.stand_in,
            chosen=option.key in chosen,
            current=option.key in current,
            score=math.nan if position is None else scores[position],
            terms=() if position is None else terms[position],
            prediction=option.prediction,
            cost_usd_per_h=option.cost,
            carbon_g_per_h=scope.carbon_g_per_h(option, intent, replicas),
            refusal=_with_remedy(faults[0], level) if faults else None,
            nearest=render_change(gives, level.require, level.limits) if faults else "",
            pareto=position is not None and front[position],
            standby=option.key == stands_by,
            preference=scope.preference(option, intent) + 1 if intent.prefer else 0,
        )
        weight = total_size(gives) if position is None else scores[position]
        part = 0 if candidate.chosen else 1 if candidate.standby else 2
        tier = 0 if position is None else candidate.preference
        rows.append(((position is None, part, tier, weight, order[index]), candidate))
    return tuple(candidate for _, candidate in sorted(rows, key=lambda row: row[0]))


STAYS_WITHOUT_TRIGGER = "stays: migration.when is not set"
"""Why a replica stays although another place is better by the gain of its policy: without `migration.when` no replica
moves by itself."""

TOOK_ITS_PLACE = (
    "another took its place; taking over again would gain less than `gain`, or it is not ready, or its node takes "
    "nothing new"
)
"""Why one that was gone and came back leaves."""


def changes(solver: Solver, level: Level, *, explain: bool = False) -> tuple[PlacementChange, ...]:
    """What applying the plan would do to the replicas: `+` new ones, `=` those that stay, `-` those that are removed.
    explain: whether to look for a better place for those that stay."""
    found = list[PlacementChange]()
    picks = level.picks if level.standby is None else (*level.picks, level.standby)
    kept = {pick.existing.assignment.id for pick in picks if pick.existing is not None}
    under_way = level.picks and all(
        pick.existing is not None and solver.is_confirmed(pick.existing) for pick in level.picks
    )
    for pick in level.picks:
        option, existing = pick.option, pick.existing
        sign, name, why = ("+", "", _why_chosen(solver, option))
        if existing is not None:
            sign, name, why = "=", existing.assignment.id, "takes over" if existing.assignment.standby else "stays"
            if explain and why == "stays" and (place := better_place(solver, level, existing)) is not None:
                why = f"{STAYS_WITHOUT_TRIGGER}, though {place.where} is better"
        found.append(PlacementChange(sign, *option.slot, option.model.digest, option.precision, name, why))
    found += standby_changes(solver, level)
    for replica in solver.healthy:
        if replica.assignment.id in kept:
            continue
        if replica.assignment.id in level.evicted:
            sign, why = "-", "its tenant's quota is spent"
        elif not level.is_full:
            sign, why = "=", "serves until it can be replaced"
        elif under_way and not solver.is_confirmed(replica):
            sign, why = "=", "serves until its replacement does"
        elif replica.assignment.id in solver.scope.inputs.left_out:
            sign, why = "-", TOOK_ITS_PLACE
        else:
            sign, why = "-", "another is better, or was ready before it"
        asked = replica.assignment
        found.append(PlacementChange(sign, *replica.slot, asked.model, asked.precision, asked.id, why))
    awaiting = solver.awaiting_node(level)
    for failed in solver.failed:
        asked = failed.assignment
        if asked.id in awaiting:
            why = f"waits for its node: {failed.refusal}"
            found.append(PlacementChange("=", failed.node, asked.device, asked.model, asked.precision, asked.id, why))
            continue
        sign = "-" if (level.is_full and not under_way) or failed.is_preempted else "="
        found.append(
            PlacementChange(
                sign, failed.node, asked.device, asked.model, asked.precision, asked.id, str(failed.refusal)
            )
        )
    return tuple(found)


def _why_chosen(solver: Solver, option: Option) -> str:
    alternatives = solver.intent.prefer
    if not alternatives:
        return "the best that fits"
    place = solver.scope.preference(option, solver.intent)
    if place == len(alternatives):
        return "the best that fits; nothing that `prefer` names does"
    return f"the best that fits, prefer {place + 1} of {len(alternatives)}: {alternatives[place]}"


def better_place(solver: Solver, level: Level, existing: CurrentReplica) -> Option | None:
    """Where a replica would move if its policy allowed moves by itself. None where the policy allows them, or where no
    place is better by the gain that it asks for."""
    if solver.intent.migration.automatic or not solver.is_confirmed(existing):
        return None
    picked = {pick.option.key for pick in level.picks}
    free = (
        option
        for option, found in zip(solver.options, solver.exclusions(level), strict=True)
        if not found and option.key not in picked
    )
    gains = [
        (solver.gain(option, existing, level.require), -solver.scope.preference(option, solver.intent), option)
        for option in free
    ]
    gain, _, best = max(gains, key=lambda one: (*one[:2], one[2].key), default=(-math.inf, 0, None))
    return best if gain >= solver.intent.migration.gain else None


def standby_changes(solver: Solver, level: Level) -> tuple[PlacementChange, ...]:
    """What applying the plan would do to the standby."""
    if level.standby is None:
        return ()
    option, existing = level.standby.option, level.standby.existing
    late = any(
        fault.constraint is Constraint.LATENCY
        for fault in solver.scope.faults(option, solver.intent, level.require, level.limits)
    )
    why = "stands by, staged" if solver.intent.require.standby is Standby.STAGED else "stands by"
    why += ", slower than asked" if late else ""
    sign, name = ("=", existing.assignment.id) if existing is not None else ("+", "")
    return (PlacementChange(sign, *option.slot, option.model.digest, option.precision, name, why),)


def relaxations_in_use(solver: Solver, level: Level) -> tuple[str, ...]:
    """The `relax` steps that current replicas depend on. They were placed under these steps, and better figures alone
    do not move them back."""
    intent = solver.intent
    if not intent.relax:
        return ()
    kept = [pick.option for pick in level.picks if pick.existing is not None]
    settings = [(intent.require, intent.limits), *((step.require, step.limits) for step in intent.relax)]
    for count, (require, limits) in enumerate(settings):
        if not any(
            Constraint.LATENCY <= fault.constraint <= Constraint.POWER
            for option in kept
            for fault in solver.scope.faults(option, intent, require, limits)
        ):
            return tuple(step.change for step in intent.relax[:count])
    return ()


def nearest(solver: Solver, level: Level) -> tuple[Relaxation | None, str]:
    """The smallest change that places every replica, found by trying; else None and what has to be done by hand.

    Tried in order of size: what each near candidate lacks, what several of them lack together, fewer replicas, less
    spread.
    """
    require, limits = level.require, level.limits
    ways = sorted(
        {distinct(tuple(fault.relaxation for fault in found)) for found in solver.exclusions(level) if found},
        key=lambda gives: (total_size(gives), str(gives)),
    )
    by_document = [gives for gives in ways if all(give.is_in_document for give in gives)][:SHORTFALLS_MOST]
    trials = set(by_document)
    together: tuple[RequiredRelaxation, ...] = ()
    for gives in by_document:
        together = distinct((*together, *gives))
        trials.add(together)
    if require.replicas > 1 and not solver.intent.per:
        placed = len(level.picks)
        fewer = RequiredRelaxation(replicas=max(1, placed), size=1 - placed / require.replicas)
        closer = [
            RequiredRelaxation(spread=spread, size=CATEGORY_SIZE * steps)
            for steps, spread in enumerate(weaker(require.spread), start=1)
        ]
        trials |= {distinct((*gives, give)) for give in (fewer, *closer) for gives in ((), *by_document[:3])}
    for gives in sorted(trials, key=_distance)[:TRIALS_MOST]:
        proposal = apply_relaxations(gives, require, limits)
        if solver.solve(proposal.require, proposal.limits).is_full:
            return proposal, proposal.change
    return None, render_change(ways[0], require, limits) if ways else "add a device to the region"


def _distance(gives: tuple[RequiredRelaxation, ...]) -> tuple[float, bool, str]:
    """The order in which changes are tried. Of equal ones, those last that admit what the documents rule out."""
    admits = any(give.where or give.precision or give.signed_by for give in gives)
    return total_size(gives), admits, str(gives)


def refusal(solver: Solver, level: Level, remedy: str) -> Refusal:
    """Why replicas are missing: the binding constraint, and how many candidates each constraint excludes."""
    intent = solver.intent
    wanted, placed, asked = level.require.replicas, len(level.picks), _replicas_asked(solver, level)
    if solver.has_given_up:
        places = ", ".join(f"{each.node}/{each.assignment.device}" for each in solver.broken_replicas)
        return Refusal(solver.broken_replicas[0].refusal.code, f"failed on {places}", asked, remedy)
    missing = [model.source for model in intent.models if model.digest not in solver.scope.inputs.profiles]
    if len(missing) == len(intent.models) and intent.key.tenant == GUEST_TENANT:
        return Refusal(Code.WAITING_FOR_FETCH, "its model is not here yet", "the bytes from its home region")
    if len(missing) == len(intent.models):
        return Refusal(Code.MODEL_UNKNOWN, ", ".join(missing), "a pushed model", "shoal model push FILE")
    excluded = [Excluded(_in_order(found), 1) for found in _relevant_faults(solver, level) if found]
    if not excluded:
        code = Code.REPLICAS_SHORT if solver.options else Code.NO_CANDIDATE
        found = f"{placed} of {wanted} placed on {len(solver.options)} candidates"
        return Refusal(code, found, asked, remedy)
    if not placed:
        return _refusal_of_all(excluded, len(solver.exclusions(level)), remedy)
    first, counts = _failed_comparison(excluded) or _binding_constraint(excluded), _code_counts(excluded)
    found = f"{placed} of {wanted} placed; {first.code}: {first.found}; {_constraint_counts(counts)}"
    return Refusal(Code.REPLICAS_SHORT, found, asked, remedy)


def nowhere(excluded: Sequence[Excluded], level: Level, remedy: str) -> Nowhere:
    """What a workload finds that no device can take whatever else is placed. excluded: all that there is."""
    ordered = [Excluded(_in_order(faults), count) for faults, count in excluded]
    refusal = _refusal_of_all(ordered, sum(count for _, count in excluded), remedy)
    return Nowhere(refusal, all(_is_lasting(faults, level.require.where) for faults, _ in excluded))


def _refusal_of_all(excluded: Sequence[Excluded], candidates: int, remedy: str) -> Refusal:
    """Why a workload has no replica at all. candidates: their number, those included that only others keep it from."""
    first, counts = _failed_comparison(excluded) or _binding_constraint(excluded), _code_counts(excluded)
    found = f"{first.found}; this excludes {counts.pop(first.code)} of {candidates} candidates"
    found += f", other constraints: {_constraint_counts(counts)}" if counts else ""
    return Refusal(first.code, found, first.asked, first.remedy or remedy)


def _code_counts(excluded: Sequence[Excluded]) -> Counter[Code]:
    """How many candidates each code excludes."""
    counts = Counter[Code]()
    for faults, count in excluded:
        for code in {fault.refusal.code for fault in faults}:
            counts[code] += count
    return counts


def _replicas_asked(solver: Solver, level: Level) -> str:
    per = solver.intent.per
    return f"{level.require.replicas} replicas" + (f", one for each {per}" if per else "")


def _relevant_faults(solver: Solver, level: Level) -> Sequence[tuple[PlacementFault, ...]]:
    """What excludes each option, and what excludes one more replica from where there are some. Of a workload that has
    one replica for each node or label: only where one is wanted and missing, if that is known."""
    every = [*solver.exclusions(level)]
    if not solver.intent.per:
        return (*every, *solver.faults_of_one_more(level))
    spread = level.require.spread
    taken = taken_domains(level.picks, spread)
    wanted = [
        found
        for option, found in zip(solver.options, every, strict=True)
        if option.domain(spread) not in taken
        and option.state.liveness is not Liveness.LOST
        and all(fault.constraint not in (Constraint.SELECTOR, Constraint.LABEL) for fault in found)
    ]
    return wanted or every


def _constraint_counts(counts: Mapping[Code, int]) -> str:
    """How many candidates each constraint excludes, as text."""
    return ", ".join(f"{code} x {count}" for code, count in sorted(counts.items()))


def _binding_constraint(excluded: Sequence[Excluded]) -> Refusal:
    """The binding constraint, as the candidate that comes nearest to meeting it reports it.

    Candidates that the documents rule out (`where`, residency, signature, precision) say nothing about why the others
    do not fit, so they count only where there are no others. Of the rest, those count that break the fewest
    constraints. The constraint that excludes most of them binds. Of several that is one which no document relaxes, and
    then the one that even its nearest candidate misses by most.
    """
    meant = [each for each in excluded if not any(fault.constraint in HARD_CONSTRAINTS for fault in each.faults)]
    fewest = min(len({fault.constraint for fault in faults}) for faults, _ in meant or excluded)
    by_code, counts = dict[Code, list[PlacementFault]](), Counter[Code]()
    for faults, count in meant or excluded:
        if len({fault.constraint for fault in faults}) == fewest:
            for code, fault in {fault.refusal.code: fault for fault in reversed(faults)}.items():
                by_code.setdefault(code, []).append(fault)
                counts[code] += count
    nearest = {
        code: min(faults, key=lambda fault: (total_size((fault.relaxation,)), str(fault.refusal)))
        for code, faults in by_code.items()
    }
    binding = max(
        by_code,
        key=lambda code: (
            counts[code],
            not nearest[code].relaxation.is_in_document,
            total_size((nearest[code].relaxation,)),
            -nearest[code].constraint,
            code,  # so that the order of candidates says nothing
        ),
    )
    return nearest[binding].refusal


def _failed_comparison(excluded: Sequence[Excluded]) -> Refusal | None:
    """A place where the model's answers differed from those of the serving replica. This is reported first, because it
    says more than the constraints that exclude other places."""
    wrong = [fault.refusal for faults, _ in excluded for fault in faults if fault.refusal.code is Code.VERIFY_FAILED]
    return min(wrong, key=str, default=None)


def comparison_models(solver: Solver, level: Level) -> tuple[str, ...]:
    """Digests of other models whose answers a new replica of this workload must reproduce before it takes a request."""
    intent = solver.intent
    wanted = {model.digest for model in intent.models}
    rule = intent.migration
    if intent.back or rule.advisory or rule.against is not Against.SOURCE or all(pick.existing for pick in level.picks):
        return ()
    running = [*(each.assignment for each in solver.healthy), *(each.assignment for each in solver.failed)]
    return tuple(sorted({one.model for one in running} - wanted))


def is_final(solver: Solver, level: Level, nowhere: Nowhere | None = None) -> bool:
    """Whether replicas stay missing until somebody changes something, because no unused device of the region can take
    one by waiting. A workload that other regions may run, or whose requirements depend on the time, is never final.
    nowhere: what is known of it."""
    intent = solver.intent
    may_change = intent.delegation.mode is not DelegationMode.NEVER or bool(intent.schedule)
    if level.is_full or may_change or intent.key.tenant == GUEST_TENANT:
        return False
    if nowhere is None and not solver.options:
        return False
    return nowhere.is_permanent if nowhere is not None else is_permanent(solver, level)


def is_permanent(solver: Solver, level: Level) -> bool:
    """Whether what excludes each unused device stays until somebody changes something."""
    if solver.has_given_up:
        return all(each.refusal.code not in _TRANSIENT for each in solver.broken_replicas)
    picked = {pick.option.key for pick in level.picks}
    return all(
        _is_lasting(found, level.require.where)
        for option, found in zip(solver.options, solver.exclusions(level), strict=True)
        if option.key not in picked
    )


def _is_lasting(faults: Sequence[PlacementFault], where: str) -> bool:
    return any(is_lasting(fault, where) for fault in faults)


def is_lasting(fault: PlacementFault, where: str) -> bool:
    """Whether a fault stays until somebody changes something. where: the selector; one over the time may admit the
    candidate later."""
    is_time_dependent = _TIME_DEPENDENT.search(where) is not None
    if fault.constraint is Constraint.FAILED_HERE:
        return fault.refusal.code not in (*_TRANSIENT, Code.MOVE_BLOCKED)
    return fault.constraint in PERMANENT and not (is_time_dependent and fault.constraint is Constraint.SELECTOR)


def move_refusal(solver: Solver, move: Move, level: Level | None = None) -> Refusal:
    """Why a move finds no place where it aims: the first constraint of the place that comes nearest. level: by which;
    None: by the policy's own setting."""
    level = level or solver.solve(solver.intent.require, solver.intent.limits)
    aimed = [
        _in_order(found)
        for option, found in zip(solver.options, solver.exclusions(level), strict=True)
        if found and move.aim.allows(*option.key)
    ]
    spare = next((each for each in solver.standbys if move.aim.allows(*each.option.key)), None)
    if not aimed and spare is not None:
        found = f"its standby is on {spare.node}/{spare.assignment.device}"
        return Refusal(Code.CONFLICT, found, "another node or device", "aim elsewhere, or apply it without `standby`")
    if not aimed:
        where = move.aim.where or "another device"
        return Refusal(Code.NO_CANDIDATE, f"nothing to place it on at {where}", "a device that can run it")
    closest = min(
        aimed, key=lambda found: (total_size(tuple(fault.relaxation for fault in found)), str(found[0].refusal))
    )
    return _with_remedy(closest[0], level)


def _in_order(faults: tuple[PlacementFault, ...]) -> tuple[PlacementFault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.constraint))


def _with_remedy(fault: PlacementFault, level: Level) -> Refusal:
    if fault.refusal.remedy:
        return fault.refusal
    return replace(fault.refusal, remedy=render_change((fault.relaxation,), level.require, level.limits))
