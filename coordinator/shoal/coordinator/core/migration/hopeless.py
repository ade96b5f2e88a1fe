"""Whether a move that is refused now can ever begin by waiting, and which passing reason it waits for."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.fleet.commitments import total_bytes
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.core.migration.estimate import MoveAnswer, estimate_move
from shoal.coordinator.core.placement.allocations import QuotaCaps, initial_allocations
from shoal.coordinator.core.placement.explain import is_lasting, move_refusal
from shoal.coordinator.core.placement.feasible import Constraint, PlacementFault, Scope
from shoal.coordinator.core.placement.model import Aim, Inputs, Move
from shoal.coordinator.core.placement.replicas import replicas_of
from shoal.coordinator.core.placement.solve import Solver
from shoal.coordinator.core.workloads.schedule import is_time_dependent
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.units import Watts
from shoal.types.workload import Intent, WorkloadKey

_TRIAL: Final = "trial"
_OF_AN_EMPTY_DEVICE: Final = frozenset({Constraint.MEMORY, Constraint.UTILISATION, Constraint.QUOTA})
"""What an empty device, or a tenant without another workload, lacks, nobody can free."""
_OF_THE_HOUR: Final = frozenset({Constraint.UTILISATION, Constraint.LATENCY})
"""What a workload whose demand depends on the time may lack now alone: its peak ends."""


def hopeless_refusal(inputs: Inputs, key: WorkloadKey, aim: Aim, source: str) -> Refusal | None:
    """Why the replica `source` could not move to the aim even if nothing else ran in the region, its nodes were ready
    and no earlier move there had failed; None: it could, so waiting may help.

    Every level is tried that a start tries: the policy's own setting, and each of its `relax` steps.
    """
    intent = next(each for each in inputs.intents if each.key == key)
    scope = Scope(_relieved(inputs, intent, aim))
    move = Move(_TRIAL, key, source, Refusal(Code.MOVE_HELD, "it would move"), aim=aim)
    replicas = replicas_of(scope, intent, (move,))
    given = initial_allocations(scope, [(intent, replicas)])
    cap = QuotaCaps(scope, [(intent, replicas)]).of(key)
    solver = Solver(scope, intent, replicas, cap, given, pending_moves=(move,))
    levels = [solver.solve(intent.require, intent.limits)]
    levels += [solver.solve(step.require, step.limits) for step in intent.relax]
    aimed = [option for option in solver.options if aim.allows(*option.key)]
    if not aimed and not _is_known(inputs.fleet.nodes.get(aim.node)):
        return None
    for level in levels:
        for option, found in zip(solver.options, solver.exclusions(level), strict=True):
            if aim.allows(*option.key) and not any(_lasts(fault, level.require.where, intent) for fault in found):
                return None
    return move_refusal(solver, move, levels[-1])


def passing_refusal(inputs: Inputs, key: WorkloadKey, aim: Aim, replica: str, refusal: Refusal) -> Refusal:
    """What a move waits for, where `refusal` is what the policy's own setting says: where its `relax` steps admit the
    place, it is what they lack."""
    intent = next(each for each in inputs.intents if each.key == key)
    if not intent.relax:
        return refusal
    last = intent.relax[-1]
    relaxed = replace(intent, require=last.require, limits=last.limits, relax=())
    intents = tuple(relaxed if each.key == key else each for each in inputs.intents)
    found = estimate_move(replace(inputs, intents=intents), key, aim, replica)
    return refusal if found.answer is not MoveAnswer.NO else found.refusal or refusal


def _lasts(fault: PlacementFault, where: str, intent: Intent) -> bool:
    if fault.constraint in _OF_THE_HOUR and is_time_dependent(intent):
        return False
    return (
        fault.refusal.code is Code.CERT_REVOKED or fault.constraint in _OF_AN_EMPTY_DEVICE or is_lasting(fault, where)
    )


def _relieved(inputs: Inputs, intent: Intent, aim: Aim) -> Inputs:
    """The region as it could become by waiting: of all workloads only this one, nodes at the aim that are ready and
    take new work, devices with all of their memory, and no block."""
    nodes = {
        name: _ready(state, inputs) if aim.node in ("", name) else state for name, state in inputs.fleet.nodes.items()
    }
    own = {
        node: tuple(one for one in assignments if one.workload == intent.key)
        for node, assignments in inputs.desired.items()
    }
    return replace(
        inputs, fleet=replace(inputs.fleet, nodes=nodes), intents=(intent,), desired=own, reserved=(), moves=(),
        blocked={}, broken_assignments={}, awarded={}, elsewhere=frozenset(),
    )  # fmt: skip


def _ready(state: NodeState, inputs: Inputs) -> NodeState:
    return replace(
        state, liveness=Liveness.READY, has_full_status=True, front_ready=True, cordoned=False, quarantined=False,
        silent={}, readings=_idle_readings(state, inputs),
    )  # fmt: skip


def _idle_readings(state: NodeState, inputs: Inputs) -> Mapping[str, Reading]:
    """Of every device of a node, with as much free memory as it can ever have."""
    found = dict[str, Reading]()
    for device in state.node.devices:
        free = total_bytes(device, state)
        unread = Reading(device.name, free, math.nan, math.nan, Watts(math.nan), math.nan, inputs.wall)
        known = state.readings.get(device.name, unread)
        found[device.name] = known if math.isnan(known.free_bytes) else replace(known, free_bytes=free)
    return found


def _is_known(state: NodeState | None) -> bool:
    """Whether a node has said in this region what devices it has."""
    return state is not None and state.liveness is Liveness.READY
