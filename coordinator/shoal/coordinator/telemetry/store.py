"""A store that measures how long reads, scans and commits take for their callers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.coordinator.ports import Clock, Election, OpenStore, StoreChange, StoreRecord, StoreSnapshot, Transaction
from shoal.types.codes import Refusal
from shoal.types.units import Seconds

LatencyObserver = Callable[[str, Seconds], None]
"""(operation, duration)"""


class TimedStore:
    """ports.OpenStore. Failed and refused operations count too."""

    def __init__(self, store: OpenStore, clock: Clock, observe: LatencyObserver) -> None:
        self._store = store
        self._clock = clock
        self._observe = observe

    @property
    def recovery(self) -> Refusal | None:
        return self._store.recovery

    @property
    def stale(self) -> asyncio.Event:
        return self._store.stale

    async def read(self, key: str) -> StoreRecord | None:
        with self._timer("read"):
            return await self._store.read(key)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[StoreRecord, ...]:
        with self._timer("scan"):
            return await self._store.scan(prefix, after=after, limit=limit)

    async def commit(self, transaction: Transaction) -> int:
        with self._timer("commit"):
            return await self._store.commit(transaction)

    def watch(self, prefix: str, after: int) -> AsyncIterator[StoreChange]:
        return self._store.watch(prefix, after)

    async def backup(self) -> Path | None:
        with self._timer("copy"):
            return await self._store.backup()

    async def snapshot(self) -> StoreSnapshot:
        with self._timer("snapshot"):
            return await self._store.snapshot()

    def election(self, candidate: bytes) -> Election:
        return self._store.election(candidate)

    async def close(self) -> None:
        await self._store.close()

    @contextmanager
    def _timer(self, operation: str) -> Iterator[None]:
        began = self._clock.now()
        try:
            yield
        finally:
            self._observe(operation, Seconds(self._clock.now() - began))
