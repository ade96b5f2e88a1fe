"""What the record keeps of live moves: every step, once it is written."""

from collections.abc import Iterator

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.migrations import MIGRATIONS, StoredMigration
from shoal.coordinator.core.migration.model import Migration, Shifting
from shoal.coordinator.ports import Transaction
from shoal.types.migration import Against


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
