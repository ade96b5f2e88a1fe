"""Why a workload is placed as it is, and what would have to give where it is not."""

import math
from collections import Counter
from dataclasses import replace

from shoal.coordinator.core.placement.feasible import Fault, Order
from shoal.coordinator.core.placement.model import Candidate, Move, PlacementChange
from shoal.coordinator.core.placement.rank import pareto, score, tie, values
from shoal.coordinator.core.placement.relax import CATEGORY, Give, distance, merged, relaxation, typed
from shoal.coordinator.core.placement.solve import Level, Solver
from shoal.types.agreement import GUESTS
from shoal.types.codes import Code, Refusal
from shoal.types.workload import Relaxation, Spread, Standby

WAYS_MOST = 16
"""Candidates whose shortfalls are looked at for the nearest change."""
TRIALS_MOST = 24
"""Changes that are tried out for one workload that does not fit."""


def candidates(solver: Solver, level: Level) -> tuple[Candidate, ...]:
    """Every (device, model), chosen ones first, the standby, then by score; the excluded ones by how much would have to
    give."""
    scope, intent, options = solver.scope, solver.intent, solver.options
    replicas = level.require.replicas
    chosen = {pick.option.names for pick in level.picks}
    stands_by = level.standby.option.names if level.standby is not None else None
    assigned = [(each.node, each.assignment) for each in solver.counted]
    assigned += [(each.node, each.assignment) for each in solver.fallen]
    current = {(node, assignment.device, assignment.model) for node, assignment in assigned}
    fits = [index for index, found in enumerate(level.faults) if not found]
    figures = [values(scope, options[index], intent, replicas) for index in fits]
    terms, scores = score(figures, intent.weights)
    front = pareto(figures)
    place = {index: position for position, index in enumerate(fits)}
    rows = list[tuple[tuple[bool, int, float, bytes], Candidate]]()
    for index, option in enumerate(options):
        position = place.get(index)
        faults = _in_order(level.faults[index])
        gives = tuple(fault.give for fault in faults)
        candidate = Candidate(
            node=option.slot.node,
            device=option.slot.device,
            model=option.model.digest,
            precision=option.precision,
            emulated=option.device.emulated,
            chosen=option.names in chosen,
            current=option.names in current,
            score=math.nan if position is None else scores[position],
            terms=() if position is None else terms[position],
            prediction=option.prediction,
            cost_usd_per_h=option.cost,
            carbon_g_per_h=scope.carbon_g_per_h(option, intent, replicas),
            refusal=_with_remedy(faults[0], level) if faults else None,
            nearest=typed(gives, level.require, level.limits) if faults else "",
            pareto=position is not None and front[position],
            standby=option.names == stands_by,
        )
        weight = distance(gives) if position is None else scores[position]
        part = 0 if candidate.chosen else 1 if candidate.standby else 2
        rows.append(((position is None, part, weight, tie(scope.inputs.seed, *option.names)), candidate))
    return tuple(candidate for _, candidate in sorted(rows, key=lambda row: row[0]))


def changes(solver: Solver, level: Level) -> tuple[PlacementChange, ...]:
    """What applying would do to the replicas: `+` new ones, `=` those that stay, `-` those that go."""
    found = list[PlacementChange]()
    picks = level.picks if level.standby is None else (*level.picks, level.standby)
    kept = {pick.keeps.assignment.id for pick in picks if pick.keeps is not None}
    under_way = level.picks and all(pick.keeps is not None and solver.confirmed(pick.keeps) for pick in level.picks)
    for pick in level.picks:
        option, keeps = pick.option, pick.keeps
        sign, name, why = ("+", "", "the best that fits")
        if keeps is not None:
            sign, name, why = "=", keeps.assignment.id, "takes over" if keeps.assignment.standby else "stays"
        found.append(PlacementChange(sign, *option.slot, option.model.digest, option.precision, name, why))
    found += standing_by(solver, level)
    for standing in solver.counted:
        if standing.assignment.id in kept:
            continue
        if standing.assignment.id in level.evicted:
            sign, why = "-", "its tenant's quota is spent"
        elif not level.full:
            sign, why = "=", "serves until it can be replaced"
        elif under_way and not solver.confirmed(standing):
            sign, why = "=", "serves until its replacement does"
        else:
            sign, why = "-", "another is better, or was ready before it"
        asked = standing.assignment
        found.append(PlacementChange(sign, *standing.slot, asked.model, asked.precision, asked.id, why))
    for fallen in solver.fallen:
        asked = fallen.assignment
        sign = "-" if level.full and not under_way else "="
        found.append(
            PlacementChange(
                sign, fallen.node, asked.device, asked.model, asked.precision, asked.id, str(fallen.refusal)
            )
        )
    return tuple(found)


def standing_by(solver: Solver, level: Level) -> tuple[PlacementChange, ...]:
    """What applying would do to the standby."""
    if level.standby is None:
        return ()
    option, keeps = level.standby.option, level.standby.keeps
    late = any(
        fault.order is Order.LATENCY
        for fault in solver.scope.faults(option, solver.intent, level.require, level.limits)
    )
    why = "stands by, staged" if solver.intent.require.standby is Standby.STAGED else "stands by"
    why += ", slower than asked" if late else ""
    sign, name = ("=", keeps.assignment.id) if keeps is not None else ("+", "")
    return (PlacementChange(sign, *option.slot, option.model.digest, option.precision, name, why),)


def already_relaxed(solver: Solver, level: Level) -> tuple[str, ...]:
    """The steps that standing replicas live by: placed under them, and not moved back by figures alone."""
    intent = solver.intent
    if not intent.relax:
        return ()
    kept = [pick.option for pick in level.picks if pick.keeps is not None]
    settings = [(intent.require, intent.limits), *((step.require, step.limits) for step in intent.relax)]
    for count, (require, limits) in enumerate(settings):
        if not any(
            Order.LATENCY <= fault.order <= Order.POWER
            for option in kept
            for fault in solver.scope.faults(option, intent, require, limits)
        ):
            return tuple(step.change for step in intent.relax[:count])
    return ()


def nearest(solver: Solver, level: Level) -> tuple[Relaxation | None, str]:
    """The smallest change that really places every replica, found by trying; else what has to be done by hand.

    Tried, by distance: what each near candidate lacks, what several of them lack together, fewer replicas, less spread.
    """
    require, limits = level.require, level.limits
    ways = sorted(
        {merged(tuple(fault.give for fault in found)) for found in level.faults if found},
        key=lambda gives: (distance(gives), str(gives)),
    )
    by_document = [gives for gives in ways if all(give.in_document for give in gives)][:WAYS_MOST]
    trials = set(by_document)
    together: tuple[Give, ...] = ()
    for gives in by_document:
        together = merged((*together, *gives))
        trials.add(together)
    if require.replicas > 1:
        placed = len(level.picks)
        fewer = Give(replicas=max(1, placed), distance=1 - placed / require.replicas)
        closer = [
            Give(spread=spread, distance=CATEGORY)
            for spread in (Spread.DEVICE, Spread.NONE)
            if require.spread is Spread.NODE or (require.spread is Spread.DEVICE and spread is Spread.NONE)
        ]
        trials |= {merged((*gives, give)) for give in (fewer, *closer) for gives in ((), *by_document[:3])}
    for gives in sorted(trials, key=lambda gives: (distance(gives), str(gives)))[:TRIALS_MOST]:
        proposal = relaxation(gives, require, limits)
        if solver.solve(proposal.require, proposal.limits).full:
            return proposal, proposal.change
    return None, typed(ways[0], require, limits) if ways else "add a device to the region"


def refusal(solver: Solver, level: Level, remedy: str) -> Refusal:
    """Why replicas are missing: the first constraint of the candidate that comes nearest."""
    intent = solver.intent
    wanted, placed = level.require.replicas, len(level.picks)
    if solver.gave_up:
        places = ", ".join(f"{each.node}/{each.assignment.device}" for each in solver.broken)
        return Refusal(solver.broken[0].refusal.code, f"failed on {places}", f"{wanted} replicas", remedy)
    missing = [model.source for model in intent.models if model.digest not in solver.scope.inputs.profiles]
    if len(missing) == len(intent.models) and intent.key.tenant == GUESTS:
        return Refusal(Code.WAITING_FOR_FETCH, "its model is not here yet", "the bytes from its home region")
    if len(missing) == len(intent.models):
        return Refusal(Code.MODEL_UNKNOWN, ", ".join(missing), "a pushed model", "shoal model push FILE")
    excluded = [_in_order(found) for found in level.faults if found]
    if not excluded:
        code = Code.REPLICAS_SHORT if solver.options else Code.NO_CANDIDATE
        found = f"{placed} of {wanted} placed on {len(solver.options)} candidates"
        return Refusal(code, found, f"{wanted} replicas", remedy)
    counts = Counter(found[0].refusal.code for found in excluded)
    census = ", ".join(f"{code} x {count}" for code, count in sorted(counts.items()))
    if placed:
        return Refusal(Code.REPLICAS_SHORT, f"{placed} of {wanted} placed; {census}", f"{wanted} replicas", remedy)
    closest = min(excluded, key=lambda found: (distance(tuple(fault.give for fault in found)), str(found[0].refusal)))
    first = closest[0].refusal
    return Refusal(first.code, f"{first.found}; of all candidates: {census}", first.asked, remedy)


def unmoved(solver: Solver, move: Move) -> Refusal:
    """Why a move finds no place where it aims: the first constraint of the place that comes nearest."""
    level = solver.solve(solver.intent.require, solver.intent.limits)
    aimed = [
        _in_order(found)
        for option, found in zip(solver.options, level.faults, strict=True)
        if found and move.aim.allows(*option.names)
    ]
    spare = next((each for each in solver.reserve if move.aim.allows(*each.option.names)), None)
    if not aimed and spare is not None:
        found = f"its standby is on {spare.node}/{spare.assignment.device}"
        return Refusal(Code.CONFLICT, found, "another node or device", "aim elsewhere, or apply it without `standby`")
    if not aimed:
        where = move.aim.where or "another device"
        return Refusal(Code.NO_CANDIDATE, f"nothing to place it on at {where}", "a device that can run it")
    closest = min(aimed, key=lambda found: (distance(tuple(fault.give for fault in found)), str(found[0].refusal)))
    return _with_remedy(closest[0], level)


def _in_order(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.order))


def _with_remedy(fault: Fault, level: Level) -> Refusal:
    if fault.refusal.remedy:
        return fault.refusal
    return replace(fault.refusal, remedy=typed((fault.give,), level.require, level.limits))
