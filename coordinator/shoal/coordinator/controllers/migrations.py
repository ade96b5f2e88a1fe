"""Every migration as it is stored: written in the transaction of the step that changed it, read again by whoever leads.

What is over is kept for `shoal get migrations`, the newest first; and as long as it forbids a place.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.core.migration.expected import SETTLED_S
from shoal.coordinator.core.migration.model import (
    Aborted,
    Alone,
    Done,
    Draining,
    Live,
    Migration,
    Planned,
    Preparing,
    Returning,
    RollingBack,
    Shifting,
)
from shoal.coordinator.core.migration.moves import forbids, left_dark
from shoal.coordinator.core.workloads.invariants import Underway
from shoal.coordinator.ports import Store
from shoal.types.migration import Verdict
from shoal.types.units import Elapsed, Seconds, Wall

MIGRATIONS: Final = "migrations/"
KEPT: Final = 500


@dataclass(frozen=True, slots=True)
class StoredMigration:
    """at: the elapsed time of the coordinator that wrote it."""

    at: Elapsed
    migration: Migration

    def restored(self, now: Elapsed, wall: Wall) -> Migration:
        """Moved to this process's elapsed time. Nobody watched in between; but what is over is as old as its story
        says."""
        state = self.migration.state
        if isinstance(state, Done | Aborted):
            age_s = max(0.0, wall - self.migration.story[-1].at)
            return replace(self.migration, state=replace(state, at=Elapsed(now - age_s)))
        return replace(self.migration, state=_moved(state, now - self.at))


@dataclass(frozen=True, slots=True)
class Written:
    """What a transaction writes of the migrations."""

    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()


class Migrations:
    """The book of one region."""

    def __init__(self) -> None:
        self.all: dict[str, Migration] = {}

    async def start(self, store: Store, now: Elapsed, wall: Wall) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        stored = [records.load(StoredMigration, record.value) for record in await store.scan(MIGRATIONS)]
        self.all = {each.migration.id: each.restored(now, wall) for each in stored}

    def judged(self, changed: Mapping[str, Migration]) -> tuple[Migration, ...]:
        """Of what is to be written, those whose new replica was judged since they were written last."""
        known = {name: each.verdict for name, each in self.all.items()}
        return tuple(
            each
            for name, each in sorted(changed.items())
            if each.verdict is not None and each.verdict != known.get(name)
        )

    def ended(self, changed: Mapping[str, Migration]) -> tuple[Migration, ...]:
        """Of what is to be adopted, those that are over now and were not before."""
        return tuple(
            each
            for name, each in sorted(changed.items())
            if each.is_over and (name not in self.all or not self.all[name].is_over)
        )

    @property
    def live(self) -> Sequence[Migration]:
        """Those that are not over, the oldest first."""
        return sorted((each for each in self.all.values() if not each.is_over), key=_began)

    @property
    def underway(self) -> tuple[Underway, ...]:
        """As the invariants look at them."""
        return underway(self.live)

    def written(self, changed: Mapping[str, Migration], now: Elapsed) -> Written:
        """For the transaction. Only what is committed is adopted."""
        puts = {MIGRATIONS + name: records.dump(StoredMigration(now, each)) for name, each in changed.items()}
        after = {**self.all, **changed}
        over = (each for each in after.values() if each.is_over and not (forbids(each) or left_dark(each)))
        spent = sorted(over, key=_ended)
        old = [MIGRATIONS + each.id for each in spent if each.id not in changed]
        return Written(puts, tuple(old[: max(0, len(spent) - KEPT)]))

    def adopt(self, changed: Mapping[str, Migration], written: Written) -> None:
        gone = {key.removeprefix(MIGRATIONS) for key in written.deletes}
        self.all = {name: each for name, each in {**self.all, **changed}.items() if name not in gone}

    def next_deadline(self, now: Elapsed) -> Seconds | None:
        """Until the next of them has something to do by time alone."""
        times = [due - now for each in self.all.values() for due in _due(each) if due > now]
        return Seconds(min(times)) if times else None


def verdict_digest(verdict: Verdict) -> str:
    """SHA-256 of a verdict as it is stored with its migration, in hexadecimal."""
    return hashlib.sha256(records.dump(verdict)).hexdigest()


def underway(migrations: Iterable[Migration]) -> tuple[Underway, ...]:
    """Those that are not over, as the invariants look at them."""
    return tuple(
        Underway(
            each.id,
            each.stage,
            (each.source.assignment, *((each.target.assignment,) if each.target is not None else ())),
            each.state.until,
            each.workload if each.leaves_home and isinstance(each.state, Draining) else None,
        )
        for each in migrations
        if not isinstance(each.state, Done | Aborted)
    )


def _began(migration: Migration) -> tuple[float, str]:
    return migration.story[0].at, migration.id


def _ended(migration: Migration) -> tuple[float, str]:
    return migration.story[-1].at, migration.id


def _due(migration: Migration) -> tuple[Elapsed, ...]:
    match migration.state:
        case Shifting(due=due, until=until):
            return due, until
        case (
            Planned(until=until)
            | Preparing(until=until)
            | Alone(until=until)
            | Draining(until=until)
            | RollingBack(until=until)
            | Returning(until=until)
        ):
            return (until,)
        case Aborted(at=at):
            return (Elapsed(at + migration.rule.cooldown_s),)
        case Done(at=at):
            return (Elapsed(at + SETTLED_S),) if migration.came is None else ()


def _moved(state: Live, by: float) -> Live:
    match state:
        case Shifting(since=since, due=due, until=until):
            return replace(state, since=Elapsed(since + by), due=Elapsed(due + by), until=Elapsed(until + by))
        case Planned() | Preparing() | Alone() | Draining() | RollingBack() | Returning():
            return replace(state, since=Elapsed(state.since + by), until=Elapsed(state.until + by))
