"""Pairs new replicas of a plan with the serving ones that they replace: every pair is a live move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.placement.model import Move, ReplicaTarget, WorkloadPlan
from shoal.types.assignment import Assignment, Phase
from shoal.types.workload import WorkloadKey

PlacedAssignment = tuple[str, Assignment]
"""A replica with its node."""


@dataclass(frozen=True, slots=True)
class MovesUnderWay:
    """The moves that limit what may start."""

    # Moves under way, and those that wait for a place.
    moves: tuple[Move, ...] = ()
    # Most simultaneous moves of a workload's replicas; 0: it moves between regions. Absent: 1.
    max_by_workload: Mapping[WorkloadKey, int] = field(default_factory=dict)


def startable_replicas(
    plan: WorkloadPlan, held: Sequence[PlacedAssignment], fleet: Fleet, moving: MovesUnderWay
) -> tuple[tuple[ReplicaTarget, PlacedAssignment | None], ...]:
    """The plan's new replicas that may start now, each with the nearest one that it replaces, or None. held: all
    assignments of the workload, by node.

    Others wait for moves of their workload to end: the limit is reached, or one of the moves is no longer wanted.
    They also wait until it is known whether the unwanted replicas serve. What replaces a serving replica has to be
    verified beside it, and a coordinator that has just started has not heard from every node.
    """
    new = [target for target in plan.targets if not target.existing_assignment]
    if not new:
        return ()
    serving = [each for each in held if _serves(each, fleet)]
    mine = [move for move in moving.moves if move.workload == plan.workload]
    under_way = [move for move in mine if move.target]
    kept = {target.existing_assignment for target in plan.targets}
    bound = {name for move in mine for name in (move.source, move.target)}
    leaving = [each for each in held if each[1].id not in kept | bound]
    free = [each for each in leaving if _serves(each, fleet)]
    unheard = any(_may_serve(each, fleet) for each in leaving)
    move_under_way = any(move.leaving != move.source and move.target not in kept for move in under_way)
    room = moving.max_by_workload.get(plan.workload, 1) - len(under_way)
    found = list[tuple[ReplicaTarget, PlacedAssignment | None]]()
    for target in new:
        asked = next((move.source for move in mine if move.migration == target.migration), "")
        if not asked and target.replaces and room > 0:
            asked = target.replaces
            room -= 1
        if asked:
            found.append((target, next((each for each in held if each[1].id == asked), None)))
        elif target.standby or not (free or unheard or (move_under_way and serving)):
            found.append((target, None))
        elif free and not move_under_way and room > 0:
            nearest = min(free, key=lambda each: (each[0] != target.node, each[1].device != target.device))
            free.remove(nearest)
            found.append((target, nearest))
            room -= 1
    return tuple(found)


def _serves(held: PlacedAssignment, fleet: Fleet) -> bool:
    node, assignment = held
    state = fleet.nodes.get(node)
    if state is None or state.liveness is not Liveness.READY or not (state.has_full_status and state.front_ready):
        return False
    observed = state.observed.get(assignment.id)
    return _takes_requests(assignment) and observed is not None and observed.phase is Phase.READY


def _may_serve(held: PlacedAssignment, fleet: Fleet) -> bool:
    """True if its node has not reported what it runs, and has not been silent for long enough to count as lost."""
    node, assignment = held
    state = fleet.nodes.get(node)
    if state is None or state.has_full_status:
        return False
    return _takes_requests(assignment) and state.liveness in (Liveness.NEVER_SEEN, Liveness.READY)


def _takes_requests(assignment: Assignment) -> bool:
    return not (assignment.draining or assignment.standby)
