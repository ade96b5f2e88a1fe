"""What the record keeps of live moves: every step, once it is written; and which are to begin by themselves."""

from collections.abc import Iterable, Iterator

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.migrations import MIGRATIONS, StoredMigration
from shoal.coordinator.core.migration.budget import Held
from shoal.coordinator.core.migration.model import NEVER, Aborted, Migration, Shifting
from shoal.coordinator.core.migration.moves import forbids, left_dark
from shoal.coordinator.core.placement.model import Plan
from shoal.coordinator.ports import Transaction
from shoal.types.migration import Against
from shoal.types.units import Elapsed, Wall


def moves_in(transaction: Transaction) -> Iterator[Migration]:
    """As it writes them."""
    for key, value in sorted(transaction.puts.items()):
        if key.startswith(MIGRATIONS):
            yield records.load(StoredMigration, value).migration


def step_of(migration: Migration) -> str:
    """Its stage; of shifting, with the number of the step."""
    match migration.state:
        case Shifting(step=step):
            return f"{migration.stage} {step + 1}"
        case _:
            return str(migration.stage)


def told(migration: Migration) -> dict[str, object]:
    state, target = migration.state, migration.target
    return {
        "migration": migration.id,
        "step": step_of(migration),
        "source": migration.source.assignment,
        "target": target.assignment if target is not None else "",
        "share": migration.rule.steps[state.step] if isinstance(state, Shifting) else 0.0,
        "verifies": migration.rule.against is not Against.NONE,
        "gap_s": migration.rule.allow_gap_s if migration.gap else 0.0,
    }


def to_come(
    held: Iterable[Held], plan: Plan | None, migrations: Iterable[Migration], now: Elapsed, wall: Wall, within_s: float
) -> Iterator[str]:
    """Moves that begin by themselves once their time has come, and that is within so many seconds: those that something
    speaks for, held back until then; and those that documents or something else ask for still, where the place at which
    the last one failed may be tried again. now, wall: of the coordinator's clock."""
    held = tuple(held)
    for each in held:
        if NEVER < each.until <= wall + within_s:
            yield f"{each}, which ends by itself"
    asked = {each.proposal.workload for each in held}
    asked |= {each.workload for each in plan.workloads if each.refusal is not None} if plan is not None else set()
    for one in migrations:
        if one.workload in asked and now < _rests_until(one) <= now + within_s:
            yield f"what {one.id} was to do is tried again"


def _rests_until(migration: Migration) -> float:
    """Until then the place where it failed is not tried again; 0: nothing waits for that."""
    state = migration.state
    if not isinstance(state, Aborted) or migration.target is None or migration.cleared:
        return 0.0
    if migration.leaves_home or forbids(migration) or left_dark(migration):
        return 0.0
    return state.at + migration.rule.cooldown_s
