"""What the region's migrations want of it now, and what those that failed forbid."""

from collections.abc import Container, Iterable, Mapping
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.migration.model import (
    Aborted,
    Alone,
    Done,
    Draining,
    Migration,
    Planned,
    Preparing,
    Returning,
    RollingBack,
    Shifting,
    Stage,
)
from shoal.coordinator.core.placement.model import Move, Trial
from shoal.coordinator.core.workloads.model import Delegated
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.units import Elapsed
from shoal.types.workload import Intent, WorkloadKey

WRONG: Final = frozenset({Code.VERIFY_FAILED})
"""What speaks against the place itself, until its device is measured anew or an operator clears the model."""


def moves_of(migrations: Iterable[Migration]) -> tuple[Move, ...]:
    """Of all inside the region that are not over, the oldest first. How many of those that wait go at once, placement
    says: one that finds no place holds nobody up."""
    inside = (each for each in migrations if not each.crosses)
    ordered = sorted(inside, key=lambda each: (isinstance(each.state, Planned), each.story[0].at, each.id))
    return tuple(move for move in map(move_of, ordered) if move is not None)


def move_of(migration: Migration) -> Move | None:
    """None of one that is over."""
    source, target = migration.source.assignment, migration.target.assignment if migration.target else ""
    drain_s = migration.rule.drain_s
    goes = Refusal(Code.CONFLICT, f"it gives its place to another by {migration.id}")
    match migration.state:
        case Planned():
            return Move(migration.id, migration.workload, source, goes, aim=migration.aim)
        case Preparing():
            staged = (target,) if migration.gap else ()
            return Move(migration.id, migration.workload, source, goes, target, gap=migration.gap, holds=staged)
        case Alone(stage=stage):
            holds = (source, target) if stage is Stage.CLEARING else (source,)
            return Move(migration.id, migration.workload, source, goes, target, share=1.0, gap=True, holds=holds)
        case Shifting(step=step):
            return Move(migration.id, migration.workload, source, goes, target, share=migration.rule.steps[step])
        case Draining():
            return Move(
                migration.id, migration.workload, source, goes, target, share=1.0, leaves=source, drain_s=drain_s,
                gap=migration.gap, holds=(source,) if migration.gap else (),
            )  # fmt: skip
        case RollingBack(refusal=refusal, handing=handing):
            return Move(
                migration.id, migration.workload, source, refusal, target, leaves=target, drain_s=drain_s,
                stays=handing, gap=migration.gap, holds=(source,) if migration.dark_since is not None else (),
            )  # fmt: skip
        case Returning(refusal=refusal):
            return Move(migration.id, migration.workload, source, refusal, target, leaves=target, gap=True)
        case Done() | Aborted():
            return None


def blocked(
    migrations: Iterable[Migration],
    intents: Iterable[Intent],
    fleet: Fleet,
    desired: Mapping[str, tuple[Assignment, ...]],
    broken: Container[str],
    now: Elapsed,
    delegated: Mapping[WorkloadKey, Delegated],
) -> Mapping[tuple[WorkloadKey, Trial], Refusal]:
    """Places that may not take over a workload's model, and why.

    One that gave wrong answers: until its device is measured anew or `shoal model clear`; measured by another region's,
    as long as that one has the workload: then home has to do with what it has. One for which nobody served,
    and in vain: as long as the old replica is there and not `broken`, until a longer gap is allowed or an operator asks
    for it. Where something else went amiss: for the rule's `cooldown`, and only while the replica that it was to
    replace serves.
    """
    allowed = {intent.key: intent.migration.allow_gap_s for intent in intents}
    found = dict[tuple[WorkloadKey, Trial], Refusal]()
    for each in migrations:
        if each.leaves_home or each.target is None or each.cleared or not isinstance(each.state, Aborted):
            continue
        code, trial = each.state.refusal.code, Trial(each.target.model, each.target.node, each.target.device)
        if forbids(each):
            stands, asked = not outlived(each, fleet), "a device that is measured anew"
            stands = stands and (not each.crosses or _has(each.source.region, delegated.get(each.workload)))
        elif left_dark(each):
            stands = allowed.get(each.workload, 0.0) <= each.rule.allow_gap_s
            stands = stands and each.source.assignment not in broken and _is_there(each, fleet, desired)
            asked = f"`migration: allow_gap` above {each.rule.allow_gap_s:g} s"
        else:
            stands = now < each.state.at + each.rule.cooldown_s and _serves(each, fleet, desired)
            asked = f"{each.rule.cooldown_s:.0f} s after it"
        if stands:
            found[each.workload, trial] = Refusal(Code.MOVE_BLOCKED, f"{each.id} ended there: {code}", asked)
    return found


def forbids(migration: Migration) -> bool:
    """Its target gave wrong answers, and nobody has taken that back."""
    state = migration.state
    return isinstance(state, Aborted) and state.refusal.code in WRONG and not migration.cleared


def left_dark(migration: Migration) -> bool:
    """Nobody served for it, in vain, and nobody has asked for it again."""
    return isinstance(migration.state, Aborted) and migration.dark_since is not None and not migration.cleared


def outlived(migration: Migration, fleet: Fleet) -> bool:
    """What its target is blamed for says nothing any more: the device was measured anew, or its node was removed."""
    if migration.target is None:
        return True
    if migration.target.region:
        return False  # what it measures is not seen from here
    state = fleet.nodes.get(migration.target.node)
    receipt = state.receipts.get(migration.target.device) if state is not None else None
    return state is None or (receipt is not None and receipt.measured_at != migration.target.receipt_at)


def _has(region: str, delegated: Delegated | None) -> bool:
    return delegated is not None and delegated.wanted and delegated.region == region


def _serves(migration: Migration, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]) -> bool:
    node, name = migration.source.node, migration.source.assignment
    state = fleet.nodes.get(node)
    if state is None or state.liveness is not Liveness.READY or not state.reported:
        return False
    observed = state.observed.get(name)
    there = _is_there(migration, fleet, desired)
    return there and observed is not None and observed.phase is Phase.READY


def _is_there(migration: Migration, fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]) -> bool:
    """The old replica is one still, whatever it does at this moment."""
    node, name = migration.source.node, migration.source.assignment
    state = fleet.nodes.get(node)
    stands = any(each.id == name and not each.draining for each in desired.get(node, ()))
    return stands and state is not None and state.liveness is not Liveness.LOST
