"""What migrations ask of placement, and which placements the failed ones block."""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.migration.model import (
    AbortedState,
    DoneState,
    DrainingState,
    GapState,
    Migration,
    MigrationStage,
    PlannedState,
    PreparingState,
    ReturningState,
    RollingBackState,
    ShiftingState,
)
from shoal.coordinator.core.placement.model import Move, Trial
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code, Refusal
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import Intent, WorkloadKey

WRONG_ANSWER_CODES: Final = frozenset({Code.VERIFY_FAILED})
"""Failures that count against the place itself, until its device is measured again or an operator clears the model."""


def moves_of(
    migrations: Iterable[Migration], fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]
) -> tuple[Move, ...]:
    """Moves within the region that are not over, oldest first. Placement decides how many of the waiting ones go at
    once; a move that finds no place does not block others. One that waits and has lost its source is left out: there
    is nothing to place, and the step ends it. desired: assignments by node, of the nodes of the moves at least."""
    inside = (
        each
        for each in migrations
        if not each.is_cross_region and not (isinstance(each.state, PlannedState) and _is_gone(each, fleet, desired))
    )
    ordered = sorted(inside, key=lambda each: (isinstance(each.state, PlannedState), each.stages[0].at, each.id))
    return tuple(move for move in map(move_of, ordered) if move is not None)


def move_of(migration: Migration) -> Move | None:
    """The move that a migration asks for now; None if it is over."""
    source, target = migration.source.assignment, migration.target.assignment if migration.target else ""
    drain_s = migration.rule.drain_s
    goes = Refusal(Code.CONFLICT, f"it gives its place to another by {migration.id}")
    match migration.state:
        case PlannedState():
            return Move(migration.id, migration.workload, source, goes, aim=migration.aim)
        case PreparingState():
            staged = (target,) if migration.gap else ()
            return Move(migration.id, migration.workload, source, goes, target, gap=migration.gap, staged=staged)
        case GapState(stage=stage):
            holds = (source, target) if stage is MigrationStage.CLEARING else (source,)
            return Move(migration.id, migration.workload, source, goes, target, share=1.0, gap=True, staged=holds)
        case ShiftingState(step=step):
            return Move(migration.id, migration.workload, source, goes, target, share=migration.rule.steps[step])
        case DrainingState():
            return Move(
                migration.id, migration.workload, source, goes, target, share=1.0, leaving=source, drain_s=drain_s,
                gap=migration.gap, staged=(source,) if migration.gap else (),
            )  # fmt: skip
        case RollingBackState(refusal=refusal, handing=handing):
            return Move(
                migration.id, migration.workload, source, refusal, target, leaving=target, drain_s=drain_s,
                defers_drain=handing, gap=migration.gap, staged=(source,) if migration.dark_since is not None else (),
            )  # fmt: skip
        case ReturningState(refusal=refusal):
            return Move(migration.id, migration.workload, source, refusal, target, leaving=target, gap=True)
        case DoneState() | AbortedState():
            return None


UNTAKEN_REST_S: Final = Seconds(30.0)
"""After a node that was too busy to take a replica up, and so has tried nothing: as long as it was waited for."""


def blocked_placements(
    migrations: Collection[Migration],
    intents: Iterable[Intent],
    fleet: Fleet,
    desired: Mapping[str, tuple[Assignment, ...]],
    broken: Container[str],
    now: Elapsed,
    delegated: Mapping[WorkloadKey, DelegatedWorkload],
) -> Mapping[tuple[WorkloadKey, Trial], Refusal]:
    """Places that may not take over a workload's model, and why.

    After wrong answers: until the place's device is measured again, or `shoal model clear`. If they were compared
    with another region's answers, only for as long as that region has the workload; without it the local replicas
    have to do. After an outage in vain: while the old replica exists and is not `broken`, until a longer gap is
    allowed or an operator asks for the move. After any other failure: for the rule's `cooldown`, or UNTAKEN_REST_S at
    most where the node never took the replica up, and only while the replica to be replaced serves; but not after a
    load that failed for good, which is remembered by what was asked of it (`Inputs.unloadable`), so that another
    tolerance or other shapes are tried at once.
    """
    dark = {each.workload for each in migrations if had_outage(each)}
    allowed = {intent.key: intent.migration.allow_gap_s for intent in intents if intent.key in dark} if dark else {}
    found = dict[tuple[WorkloadKey, Trial], Refusal]()
    for each in migrations:
        if each.leaves_region or each.target is None or each.cleared or not isinstance(each.state, AbortedState):
            continue
        why, trial = each.state.refusal, Trial(each.target.variant, each.target.node, each.target.device)
        code, found_there, remedy = Code.MOVE_BLOCKED, f"{each.id} ended there: {why.code}", ""
        if has_wrong_answers(each):
            stands, asked, remedy = not is_block_outdated(each, fleet), "a device that is measured anew", each.remedy
            code, found_there = why.code, f"{each.id} on {each.target.where}" + (f": {why.found}" if why.found else "")
            stands = stands and (
                not each.is_cross_region or _is_delegated_to(each.source.region, delegated.get(each.workload))
            )
        elif had_outage(each):
            stands = allowed.get(each.workload, 0.0) <= each.rule.allow_gap_s
            stands = stands and each.source.assignment not in broken and _source_exists(each, fleet, desired)
            asked = f"`migration: allow_gap` above {each.rule.allow_gap_s:g} s"
        else:
            rest_s = each.rule.cooldown_s
            if why.code is Code.NODE_NOT_READY:
                rest_s = min(rest_s, UNTAKEN_REST_S)
            rests = now < each.state.at + rest_s and why.code not in PERMANENT_LOAD_FAILURES
            stands = rests and _source_serves(each, fleet, desired)
            asked = f"{rest_s:.0f} s after it"
        if stands:
            found[each.workload, trial] = Refusal(code, found_there, asked, remedy)
    return found


def has_wrong_answers(migration: Migration) -> bool:
    """True if its target gave wrong answers and the block is not cleared."""
    state = migration.state
    return isinstance(state, AbortedState) and state.refusal.code in WRONG_ANSWER_CODES and not migration.cleared


def clearable(migrations: Iterable[Migration], key: WorkloadKey) -> list[Migration]:
    """This workload's blocks that an operator lifts by asking for a move: all but those for wrong answers."""
    return [
        each
        for each in migrations
        if each.workload == key
        and isinstance(each.state, AbortedState)
        and not each.cleared
        and not has_wrong_answers(each)
    ]


def had_outage(migration: Migration) -> bool:
    """True if no replica served during it, it failed, and its block is not cleared."""
    return isinstance(migration.state, AbortedState) and migration.dark_since is not None and not migration.cleared


def is_block_outdated(migration: Migration, fleet: Fleet) -> bool:
    """True if the block on its target no longer applies: the device was measured again, or its node was removed."""
    if migration.target is None:
        return True
    if migration.target.region:
        return False  # another region's measurements are not visible here
    state = fleet.nodes.get(migration.target.node)
    receipt = state.receipts.get(migration.target.device) if state is not None else None
    return state is None or (receipt is not None and receipt.measured_at != migration.target.receipt_at)


def _is_delegated_to(region: str, delegated: DelegatedWorkload | None) -> bool:
    return delegated is not None and delegated.is_wanted and delegated.region == region


def _source_serves(migration: Migration, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]) -> bool:
    node, name = migration.source.node, migration.source.assignment
    state = fleet.nodes.get(node)
    if state is None or state.liveness is not Liveness.READY or not state.has_full_status:
        return False
    observed = state.observed.get(name)
    there = _source_exists(migration, fleet, desired)
    return there and observed is not None and observed.phase is Phase.READY


def _is_gone(migration: Migration, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]) -> bool:
    """True if the old replica, or the node that it was on, was removed."""
    node, name = migration.source.node, migration.source.assignment
    return node not in fleet.nodes or all(each.id != name for each in desired.get(node, ()))


def _source_exists(migration: Migration, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]) -> bool:
    """True if the old replica still exists, whatever its phase."""
    node, name = migration.source.node, migration.source.assignment
    state = fleet.nodes.get(node)
    stands = any(each.id == name and not each.draining for each in desired.get(node, ()))
    return stands and state is not None and state.liveness is not Liveness.LOST
