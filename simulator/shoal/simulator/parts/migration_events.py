"""Events of live migrations for the record: every step once it is committed, and migrations about to begin by
themselves."""

from collections.abc import Iterable, Iterator

from shoal.coordinator import codec
from shoal.coordinator.controllers.workloads.migrations import MIGRATIONS
from shoal.coordinator.controllers.workloads.move_queue import QUEUE
from shoal.coordinator.core.migration.budget import MoveHold
from shoal.coordinator.core.migration.effects import had_outage, has_wrong_answers
from shoal.coordinator.core.migration.model import NEVER, AbortedState, Migration, ShiftingState
from shoal.coordinator.core.migration.queue import QueuedMove
from shoal.coordinator.core.placement.model import PlacementPlan
from shoal.coordinator.ports import Transaction
from shoal.types.migration import Against
from shoal.types.units import Elapsed, Wall


def migrations_in(transaction: Transaction) -> Iterator[Migration]:
    """Migrations as the transaction writes them."""
    for key, value in sorted(transaction.puts.items()):
        if key.startswith(MIGRATIONS):
            yield codec.load(Migration, value)


def queued_moves_in(transaction: Transaction) -> Iterator[tuple[str, str]]:
    """Moves that the transaction puts into the queue or takes out of it, with their stage; empty: they begin."""
    for key, value in sorted(transaction.puts.items()):
        if key.startswith(QUEUE):
            yield key.removeprefix(QUEUE), codec.load(QueuedMove, value).stage
    yield from ((key.removeprefix(QUEUE), "") for key in sorted(transaction.deletes) if key.startswith(QUEUE))


def step_of(migration: Migration) -> str:
    """The migration's stage; while shifting, with the number of the step."""
    match migration.state:
        case ShiftingState(step=step):
            return f"{migration.stage} {step + 1}"
        case _:
            return str(migration.stage)


def migration_facts(migration: Migration) -> dict[str, object]:
    state, target = migration.state, migration.target
    return {
        "migration": migration.id,
        "step": step_of(migration),
        "source": migration.source.assignment,
        "target": target.assignment if target is not None else "",
        "share": migration.rule.steps[state.step] if isinstance(state, ShiftingState) else 0.0,
        "verifies": migration.rule.against is not Against.NONE,
        "gap_s": migration.rule.allow_gap_s if migration.gap else 0.0,
    }


def pending_moves(
    holds: Iterable[MoveHold],
    plan: PlacementPlan | None,
    migrations: Iterable[Migration],
    now: Elapsed,
    wall: Wall,
    within_s: float,
) -> Iterator[str]:
    """Migrations that will begin by themselves within `within_s` seconds. now, wall: of the coordinator's clock.

    These are proposals that are held back until then, and failed migrations that documents or a proposal still ask for,
    whose target may be tried again by then.
    """
    holds = tuple(holds)
    for each in holds:
        if NEVER < each.until <= wall + within_s:
            yield f"{each}, which ends by itself"
    asked = {each.proposal.workload for each in holds}
    asked |= {each.workload for each in plan.workloads if each.refusal is not None} if plan is not None else set()
    for one in migrations:
        if one.workload in asked and now < _cooldown_until(one) <= now + within_s:
            yield f"what {one.id} was to do is tried again"


def _cooldown_until(migration: Migration) -> float:
    """When the target that failed may be tried again; 0: nothing waits for that."""
    state = migration.state
    if not isinstance(state, AbortedState) or migration.target is None or migration.cleared:
        return 0.0
    if migration.leaves_region or has_wrong_answers(migration) or had_outage(migration):
        return 0.0
    return state.at + migration.rule.cooldown_s
