"""The queue of moves as stored. Its records have a key of their own, which earlier versions leave alone."""

from collections.abc import Mapping, Sequence
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.workloads.migrations import MigrationWrites
from shoal.coordinator.core.migration.queue import QueuedMove, to_forget, waiting
from shoal.coordinator.ports import Store
from shoal.types.codes import Refusal

QUEUE: Final = "move-queue/"


class MoveQueueRepository:
    """Moves that wait, and those that ended in the queue."""

    def __init__(self) -> None:
        self.all: dict[str, QueuedMove] = {}
        self.reasons: dict[str, Refusal] = {}
        """By id, what refused it at the last look; not stored."""

    async def start(self, store: Store) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        stored = [codec.load(QueuedMove, record.value) for record in await store.scan(QUEUE)]
        self.all = {each.id: each for each in stored}

    @property
    def waiting(self) -> Sequence[QueuedMove]:
        """Oldest first."""
        return waiting(self.all.values())

    def reason_of(self, queued: QueuedMove) -> Refusal:
        """Why it ended, or what it waits for."""
        return queued.ended or self.reasons.get(queued.id, queued.reason)

    def writes(self, changed: Mapping[str, QueuedMove | None]) -> MigrationWrites:
        """For the transaction. changed: None: it left the queue. The caller adopts them only after the commit."""
        puts = {QUEUE + name: codec.dump(each) for name, each in changed.items() if each is not None}
        left = [name for name, each in changed.items() if each is None]
        after = {**self.all, **changed}
        forgotten = to_forget([each for each in after.values() if each is not None])
        return MigrationWrites(
            {key: value for key, value in puts.items() if key.removeprefix(QUEUE) not in forgotten},
            tuple(QUEUE + name for name in (*left, *forgotten)),
        )

    def adopt(self, changed: Mapping[str, QueuedMove | None], written: MigrationWrites) -> None:
        gone = {key.removeprefix(QUEUE) for key in written.deletes}
        after = {**self.all, **changed}
        self.all = {name: each for name, each in after.items() if each is not None and name not in gone}
        self.reasons = {name: each for name, each in self.reasons.items() if name in self.all}
