"""Which replicas have to leave so that a workload of higher priority gets room.

Only workloads whose policy says `preempt` ask for it, and only replicas of lower priority leave. With `lower` each of
them has another place to go to; with `always` that is not asked. What leaves already counts as gone, so that nothing
else is asked to leave while it does.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.core.fleet.commitments import memory_of
from shoal.coordinator.core.placement.allocations import Allocations, initial_allocations
from shoal.coordinator.core.placement.domains import taken_domains
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Move, Slot
from shoal.coordinator.core.placement.replicas import CurrentReplica, WorkloadReplicas, replicas_of
from shoal.coordinator.core.placement.solve import Level, Solver
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal
from shoal.types.workload import Intent, Preempt, WorkloadKey

PLACES_MOST: Final = 8
"""Places for one replica whose occupants are asked for another place, the best first."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A replica that has to leave."""

    # Its workload.
    workload: WorkloadKey
    # Its assignment.
    assignment: str
    # Where it is.
    slot: Slot
    # The workload that needs the room.
    by: WorkloadKey
    # Whether it has another place to go to.
    has_place: bool

    @property
    def refusal(self) -> Refusal:
        """Why it no longer counts as a replica."""
        found = f"{self.by} needs {self.slot.node}/{self.slot.device}"
        return Refusal(Code.PREEMPTED, found, "room elsewhere", "add a device, or raise its priority")


@dataclass(frozen=True, slots=True)
class _Occupant:
    """A replica of lower priority on hardware that somebody wants."""

    intent: Intent
    replica: CurrentReplica


def preemptions(
    scope: Scope, intents: Collection[Intent], current: Mapping[WorkloadKey, WorkloadReplicas]
) -> tuple[Preemption, ...]:
    """What has to leave, for the workloads of highest priority first. intents: all workloads of the region."""
    waiting = [intent for intent in intents if _waits(scope, intent, current)]
    if not waiting:
        return ()
    moving = {move.workload for move in scope.inputs.moves}
    allocations = _without_leaving(scope, initial_allocations(scope, ((each, current[each.key]) for each in intents)))
    found = list[Preemption]()
    for intent in sorted(waiting, key=lambda each: (-each.priority, each.key)):
        healthy = len(current[intent.key].healthy)
        solver = Solver(scope, intent, current[intent.key], healthy, allocations)
        level, _ = solver.choose()
        allocations = level.allocations
        gone = {each.assignment for each in found}
        occupants = [
            _Occupant(each, replica)
            for each in sorted(intents, key=lambda each: (each.priority, each.key))
            if each.priority < intent.priority and each.key not in moving and each.key.tenant != GUEST_TENANT
            for replica in current[each.key].active
            if replica.assignment.id not in gone
        ]
        if level.is_full or not occupants:
            continue
        leaves = _cheapest(solver, level, occupants, current)
        for each, has_place in leaves:
            slot = each.replica.slot
            found.append(Preemption(each.intent.key, each.replica.assignment.id, slot, intent.key, has_place))
            allocations = allocations.without_replica(scope, each.intent, each.replica)
    return tuple(found)


def _waits(scope: Scope, intent: Intent, current: Mapping[WorkloadKey, WorkloadReplicas]) -> bool:
    lacks = len(current[intent.key].active) < intent.require.replicas
    return intent.preempt is not Preempt.NEVER and lacks and intent.key not in scope.inputs.elsewhere


def _without_leaving(scope: Scope, allocations: Allocations) -> Allocations:
    """Without the memory of replicas that drain or move away."""
    moving = {move.excluded_assignment for move in scope.inputs.moves}
    for node, assignments in sorted(scope.inputs.desired.items()):
        state = scope.inputs.fleet.nodes.get(node)
        for one in assignments:
            if one.draining or one.id in moving:
                observed = state.observed.get(one.id) if state is not None else None
                allocations = allocations.with_freed_memory(Slot(node, one.device), memory_of(one, observed))
    return allocations


def _cheapest(
    solver: Solver, level: Level, occupants: Sequence[_Occupant], current: Mapping[WorkloadKey, WorkloadReplicas]
) -> Sequence[tuple[_Occupant, bool]]:
    """Who leaves so that one more replica finds room, and whether each has another place: the least important, then
    the fewest. Empty where nothing helps, or where the policy does not ask for it."""
    by_node = dict[str, list[_Occupant]]()
    for each in occupants:
        by_node.setdefault(each.replica.node, []).append(each)
    rows = list[tuple[tuple[int, int, int], list[_Occupant]]]()
    for rank, option in enumerate(_candidates(solver, level)):
        leaves = _who_leaves(solver, level, option, by_node.get(option.slot.node, ()))
        if leaves:
            rows.append(((max(each.intent.priority for each in leaves), len(leaves), rank), leaves))
    best: Sequence[tuple[_Occupant, bool]] = ()
    for _, leaves in sorted(rows, key=lambda row: row[0])[:PLACES_MOST]:
        judged = [(each, _has_place(solver.scope, each, current[each.intent.key], level)) for each in leaves]
        if all(has_place for _, has_place in judged):
            return judged
        best = best or judged
    return best if solver.intent.preempt is Preempt.ALWAYS else ()


def _candidates(solver: Solver, level: Level) -> Iterator[Option]:
    """Options for one more replica that only lack room, by rank."""
    held = {each.option.key for each in solver.healthy}
    taken = taken_domains(level.picks, level.require.spread)
    for option in solver.best_first(level.require, level.limits):
        if option.key not in held and option.domain(level.require.spread) not in taken:
            yield option


def _who_leaves(solver: Solver, level: Level, option: Option, occupants: Sequence[_Occupant]) -> list[_Occupant]:
    """The occupants, least important first, without whom a replica fits there; empty where even that is not enough."""
    shared = {*option.state.same_memory(option.device), *option.state.same_hardware(option.device)}
    allocations, leaves = level.allocations, list[_Occupant]()
    for each in occupants:
        if each.replica.assignment.device not in shared:
            continue
        leaves.append(each)
        allocations = allocations.without_replica(solver.scope, each.intent, each.replica)
        if not solver.lacks_room(option, level, allocations):
            break
    if not leaves or solver.lacks_room(option, level, allocations):
        return []
    # Who was asked first may not be needed any more.
    for each in tuple(leaves):
        without = [other for other in leaves if other is not each]
        less = level.allocations
        for other in without:
            less = less.without_replica(solver.scope, other.intent, other.replica)
        if without and not solver.lacks_room(option, level, less):
            leaves = without
    return leaves


def _has_place(scope: Scope, occupant: _Occupant, replicas: WorkloadReplicas, level: Level) -> bool:
    """Whether it could run on another device, beside all that is placed."""
    intent, slot = occupant.intent, occupant.replica.slot
    move = Move("", intent.key, occupant.replica.assignment.id, Refusal(Code.PREEMPTED, "it has to leave"))
    stays = Solver(scope, intent, replicas, len(replicas.healthy), level.allocations)
    leaves = stays.with_moves(replicas_of(scope, intent, (move,)), (move,))
    return any(option.slot != slot for option in leaves.places(intent.require, intent.limits))
