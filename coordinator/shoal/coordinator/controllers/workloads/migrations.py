"""Every migration as stored: written in the transaction of the step that changed it, and loaded by the next leader.

Finished migrations are kept for `shoal get migrations`, the newest KEPT of them, and for as long as one excludes a
place.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.core.migration.effects import had_outage, has_wrong_answers
from shoal.coordinator.core.migration.model import (
    AbortedState,
    DoneState,
    DrainingState,
    GapState,
    Migration,
    PlannedState,
    PreparingState,
    ReturningState,
    RollingBackState,
    ShiftingState,
)
from shoal.coordinator.core.migration.outcomes import OUTCOME_AFTER_S
from shoal.coordinator.core.workloads.invariants import UnderwayMove
from shoal.coordinator.ports import Store
from shoal.types.migration import Verdict
from shoal.types.units import Elapsed, Seconds

MIGRATIONS: Final = "moves/"
KEPT: Final = 500


@dataclass(frozen=True, slots=True)
class MigrationWrites:
    """The migration writes of one transaction."""

    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()


class MigrationRepository:
    """All migrations of one region."""

    def __init__(self) -> None:
        self.all: dict[str, Migration] = {}

    async def start(self, store: Store) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        stored = [codec.load(Migration, record.value) for record in await store.scan(MIGRATIONS)]
        self.all = {each.id: each for each in stored}

    def new_verdicts(self, changed: Mapping[str, Migration]) -> tuple[Migration, ...]:
        """Those of `changed` whose new replica got a verdict since they were last written."""
        known = {name: each.verdict for name, each in self.all.items()}
        return tuple(
            each
            for name, each in sorted(changed.items())
            if each.verdict is not None and each.verdict != known.get(name)
        )

    def newly_over(self, changed: Mapping[str, Migration]) -> tuple[Migration, ...]:
        """Those of `changed` that are over now and were not before."""
        return tuple(
            each
            for name, each in sorted(changed.items())
            if each.is_over and (name not in self.all or not self.all[name].is_over)
        )

    @property
    def live(self) -> Sequence[Migration]:
        """Migrations that are not over, oldest first."""
        return sorted((each for each in self.all.values() if not each.is_over), key=_start_time)

    @property
    def underway(self) -> tuple[UnderwayMove, ...]:
        """Migrations that are not over, as the invariants need them."""
        return underway(self.live)

    def writes(self, changed: Mapping[str, Migration]) -> MigrationWrites:
        """The writes for the transaction. The caller adopts them only after the commit."""
        puts = {MIGRATIONS + name: codec.dump(each) for name, each in changed.items()}
        after = {**self.all, **changed}
        over = (each for each in after.values() if each.is_over and not (has_wrong_answers(each) or had_outage(each)))
        spent = sorted(over, key=_end_time)
        old = [MIGRATIONS + each.id for each in spent if each.id not in changed]
        return MigrationWrites(puts, tuple(old[: max(0, len(spent) - KEPT)]))

    def adopt(self, changed: Mapping[str, Migration], written: MigrationWrites) -> None:
        gone = {key.removeprefix(MIGRATIONS) for key in written.deletes}
        self.all = {name: each for name, each in {**self.all, **changed}.items() if name not in gone}

    def next_deadline(self, now: Elapsed) -> Seconds | None:
        """Time until the next migration must act by time alone; None: none must."""
        times = [due - now for each in self.all.values() for due in _due(each) if due > now]
        return Seconds(min(times)) if times else None


def verdict_digest(verdict: Verdict) -> str:
    """SHA-256 of a verdict as stored with its migration, hex."""
    return hashlib.sha256(codec.dump(verdict)).hexdigest()


def underway(migrations: Iterable[Migration]) -> tuple[UnderwayMove, ...]:
    """Migrations that are not over, as the invariants need them."""
    return tuple(
        UnderwayMove(
            each.id,
            each.stage,
            (each.source.assignment, *((each.target.assignment,) if each.target is not None else ())),
            each.state.until,
            each.workload if each.leaves_region and isinstance(each.state, DrainingState) else None,
        )
        for each in migrations
        if not isinstance(each.state, DoneState | AbortedState)
    )


def _start_time(migration: Migration) -> tuple[float, str]:
    return migration.stages[0].at, migration.id


def _end_time(migration: Migration) -> tuple[float, str]:
    return migration.stages[-1].at, migration.id


def _due(migration: Migration) -> tuple[Elapsed, ...]:
    match migration.state:
        case ShiftingState(due=due, until=until):
            return due, until
        case (
            PlannedState(until=until)
            | PreparingState(until=until)
            | GapState(until=until)
            | DrainingState(until=until)
            | RollingBackState(until=until)
            | ReturningState(until=until)
        ):
            return (until,)
        case AbortedState(at=at):
            return (Elapsed(at + migration.rule.cooldown_s),)
        case DoneState(at=at):
            return (Elapsed(at + OUTCOME_AFTER_S),) if migration.came is None else ()
