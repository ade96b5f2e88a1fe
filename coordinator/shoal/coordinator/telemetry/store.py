"""A store that is timed: how long reads, scans and commits take, as those who wait for them see it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.coordinator.ports import Change, Clock, Election, OpenStore, Record, Snapshot, Transaction
from shoal.types.codes import Refusal
from shoal.types.units import Seconds

Taken = Callable[[str, Seconds], None]
"""(operation, how long it took)"""


class TimedStore:
    """ports.OpenStore. What failed or was refused took its time too."""

    def __init__(self, store: OpenStore, clock: Clock, taken: Taken) -> None:
        self._store = store
        self._clock = clock
        self._taken = taken

    @property
    def recovery(self) -> Refusal | None:
        return self._store.recovery

    @property
    def outdated(self) -> asyncio.Event:
        return self._store.outdated

    async def read(self, key: str) -> Record | None:
        with self._timed("read"):
            return await self._store.read(key)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        with self._timed("scan"):
            return await self._store.scan(prefix, after=after, limit=limit)

    async def commit(self, transaction: Transaction) -> int:
        with self._timed("commit"):
            return await self._store.commit(transaction)

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        return self._store.watch(prefix, after)

    async def backup(self) -> Path | None:
        with self._timed("copy"):
            return await self._store.backup()

    async def snapshot(self) -> Snapshot:
        with self._timed("snapshot"):
            return await self._store.snapshot()

    def election(self, candidate: bytes) -> Election:
        return self._store.election(candidate)

    async def close(self) -> None:
        await self._store.close()

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        began = self._clock.now()
        try:
            yield
        finally:
            self._taken(operation, Seconds(self._clock.now() - began))
