"""Who fetched how much of which model from this coordinator: the network use of moves."""

from collections.abc import AsyncIterator
from typing import Final

from shoal.coordinator.core.workloads.model import ModelFetch
from shoal.coordinator.ports import Clock
from shoal.types.units import Bytes, Wall

KEPT: Final = 500


class Fetches:
    """ports.FetchCounter of the newest fetches, in memory only: fetches before `since` are unknown."""

    def __init__(self, clock: Clock) -> None:
        self.since = clock.wall()
        self.all: tuple[ModelFetch, ...] = ()
        self._clock = clock

    async def track(self, by: str, model: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for data in chunks:
                yield data
                size += len(data)
        finally:
            self.count(by, model, Bytes(size))

    def count(self, by: str, model: str, size: Bytes) -> None:
        if len(self.all) >= KEPT:
            self.since = Wall(max(self.since, self.all[0].at))
        self.all = (*self.all, ModelFetch(by, model, self._clock.wall(), size))[-KEPT:]
