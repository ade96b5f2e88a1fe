"""What the region's migrations want of it now, and what those that failed forbid."""

from collections.abc import Iterable, Mapping
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.migration.model import (
    Aborted,
    Done,
    Draining,
    Migration,
    Planned,
    Preparing,
    RollingBack,
    Shifting,
)
from shoal.coordinator.core.placement.model import Move, Trial
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.units import Elapsed
from shoal.types.workload import WorkloadKey

WRONG: Final = frozenset({Code.VERIFY_FAILED})
"""What speaks against the place itself, until its device is measured anew or an operator clears the model."""


def moves_of(migrations: Iterable[Migration]) -> tuple[Move, ...]:
    """Of all that are not over, the oldest first. Of those of one workload that wait for a place only so many ask for
    one that `max_concurrent` are on their way."""
    found, going = list[Move](), dict[WorkloadKey, int]()
    ordered = sorted(migrations, key=lambda each: (isinstance(each.state, Planned), each.story[0].at, each.id))
    for migration in ordered:
        move = move_of(migration)
        if move is None or (not move.target and going.get(move.workload, 0) >= migration.rule.max_concurrent):
            continue
        going[move.workload] = going.get(move.workload, 0) + 1
        found.append(move)
    return tuple(found)


def move_of(migration: Migration) -> Move | None:
    """None of one that is over."""
    source, target = migration.source.assignment, migration.target.assignment if migration.target else ""
    drain_s = migration.rule.drain_s
    goes = Refusal(Code.CONFLICT, f"it gives its place to another by {migration.id}")
    match migration.state:
        case Planned():
            return Move(migration.id, migration.workload, source, goes, aim=migration.aim)
        case Preparing():
            return Move(migration.id, migration.workload, source, goes, target)
        case Shifting(step=step):
            return Move(migration.id, migration.workload, source, goes, target, share=migration.rule.steps[step])
        case Draining():
            return Move(
                migration.id, migration.workload, source, goes, target, share=1.0, leaves=source, drain_s=drain_s
            )
        case RollingBack(refusal=refusal):
            return Move(migration.id, migration.workload, source, refusal, target, leaves=target, drain_s=drain_s)
        case Done() | Aborted():
            return None


def blocked(
    migrations: Iterable[Migration],
    fleet: Fleet,
    desired: Mapping[str, tuple[Assignment, ...]],
    now: Elapsed,
) -> Mapping[tuple[WorkloadKey, Trial], Refusal]:
    """Places that may not take over a workload's model, and why.

    One that gave wrong answers: until its device is measured anew or `shoal model clear`. Where something else went
    amiss: for the rule's `cooldown`, and only while the replica that it was to replace serves.
    """
    found = dict[tuple[WorkloadKey, Trial], Refusal]()
    for each in migrations:
        if each.target is None or each.cleared or not isinstance(each.state, Aborted):
            continue
        code, trial = each.state.refusal.code, Trial(each.target.model, each.target.node, each.target.device)
        if code in WRONG:
            state = fleet.nodes.get(each.target.node)
            receipt = state.receipts.get(each.target.device) if state is not None else None
            stands = receipt is None or receipt.measured_at == each.target.receipt_at
        else:
            stands = now < each.state.at + each.rule.cooldown_s and _serves(each, fleet, desired)
        if stands:
            asked = "a device that is measured anew" if code in WRONG else f"{each.rule.cooldown_s:.0f} s after it"
            found[each.workload, trial] = Refusal(Code.MOVE_BLOCKED, f"{each.id} ended there: {code}", asked)
    return found


def _serves(migration: Migration, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]) -> bool:
    node, name = migration.source.node, migration.source.assignment
    state = fleet.nodes.get(node)
    if state is None or state.liveness is not Liveness.READY or not state.reported:
        return False
    observed = state.observed.get(name)
    stands = any(each.id == name and not each.draining for each in desired.get(node, ()))
    return stands and observed is not None and observed.phase is Phase.READY
