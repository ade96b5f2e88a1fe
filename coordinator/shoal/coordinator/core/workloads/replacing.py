"""Which new replica of a plan takes over from which that serves: every such pair is a live move."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.placement.model import Move, Target, WorkloadPlan
from shoal.types.assignment import Assignment, Phase
from shoal.types.workload import WorkloadKey

Held = tuple[str, Assignment]
"""A replica with its node."""


@dataclass(frozen=True, slots=True)
class Moving:
    """moves: those under way, or that wait for a place. most: by workload, replicas that move at once; 0: it crosses to
    another region or home."""

    moves: tuple[Move, ...] = ()
    most: Mapping[WorkloadKey, int] = field(default_factory=dict)


def starts(
    plan: WorkloadPlan, desired: Mapping[str, tuple[Assignment, ...]], fleet: Fleet, moving: Moving
) -> tuple[tuple[Target, Held | None], ...]:
    """The plan's new replicas that may come now, each with the one whose place it takes: the nearest. Others wait until
    moves of their workload have ended: as many as may are under way, or one of them is not wanted any more; or until
    it is known whether those that are not wanted any more serve: what takes over from one that does has to show its
    answers beside it, and a coordinator that has just begun has not heard every node."""
    new = [target for target in plan.targets if not target.keeps]
    if not new:
        return ()
    held = [(node, one) for node in sorted(desired) for one in desired[node] if one.workload == plan.workload]
    serving = [each for each in held if _serves(each, fleet)]
    mine = [move for move in moving.moves if move.workload == plan.workload]
    under_way = [move for move in mine if move.target]
    kept = {target.keeps for target in plan.targets}
    bound = {name for move in mine for name in (move.source, move.target)}
    leaving = [each for each in held if each[1].id not in kept | bound]
    free = [each for each in leaving if _serves(each, fleet)]
    unheard = any(_may_serve(each, fleet) for each in leaving)
    crossed = any(move.leaves != move.source and move.target not in kept for move in under_way)
    room = moving.most.get(plan.workload, 1) - len(under_way)
    found = list[tuple[Target, Held | None]]()
    for target in new:
        asked = next((move.source for move in mine if move.migration == target.moves), "")
        if not asked and target.instead and room > 0:
            asked = target.instead
            room -= 1
        if asked:
            found.append((target, next(each for each in held if each[1].id == asked)))
        elif target.standby or not (free or unheard or (crossed and serving)):
            found.append((target, None))
        elif free and not crossed and room > 0:
            nearest = min(free, key=lambda each: (each[0] != target.node, each[1].device != target.device))
            free.remove(nearest)
            found.append((target, nearest))
            room -= 1
    return tuple(found)


def _serves(held: Held, fleet: Fleet) -> bool:
    node, assignment = held
    state = fleet.nodes.get(node)
    if state is None or state.liveness is not Liveness.READY or not (state.reported and state.front_ready):
        return False
    observed = state.observed.get(assignment.id)
    return _takes_requests(assignment) and observed is not None and observed.phase is Phase.READY


def _may_serve(held: Held, fleet: Fleet) -> bool:
    """Its node has not told what it runs, and is not silent for long enough to count as lost."""
    node, assignment = held
    state = fleet.nodes.get(node)
    if state is None or state.reported:
        return False
    return _takes_requests(assignment) and state.liveness in (Liveness.NEVER_SEEN, Liveness.READY)


def _takes_requests(assignment: Assignment) -> bool:
    return not (assignment.draining or assignment.standby)
