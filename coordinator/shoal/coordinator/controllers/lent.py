"""Models of what this region runs for others: fetched from their home once, dropped when nobody needs them for long."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from shoal.coordinator.controllers.catalog import Catalog
from shoal.coordinator.controllers.models import ModelsController
from shoal.coordinator.core.negotiation.hold import Granted
from shoal.coordinator.ports import Clock, Meter, Peers, StaleRevision
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Elapsed, Seconds

RETRY_S: Final = Seconds(1.0)
RETRY_MOST_S: Final = Seconds(30.0)
KEPT_S: Final = 3600.0
"""A lent model stays so long after its last guest: the next agreement of it need not fetch it."""

UNFIT: Final = frozenset(
    {
        Code.MODEL_INVALID,
        Code.MODEL_PATH,
        Code.MODEL_ARCHIVE,
        Code.MODEL_DIGEST,
        Code.MODEL_TOO_LARGE,
        Code.CUSTOM_OP_DENIED,
    }
)
"""Bytes that another try does not mend."""


class LentModels:
    """unfit: called with an agreement whose model is none, and why; what it raises is tried again."""

    def __init__(
        self,
        models: ModelsController,
        catalog: Callable[[], Catalog],
        peers: Peers,
        clock: Clock,
        meter: Meter,
        *,
        unfit: Callable[[str, Code], Awaitable[None]],
    ) -> None:
        self._models = models
        self._catalog = catalog
        self._peers = peers
        self._clock = clock
        self._meter = meter
        self._unfit = unfit
        self._wanted: Mapping[str, Granted] = {}
        """By digest, an agreement that runs it."""
        self._idle: dict[str, Elapsed] = {}
        """Lent models that no guest runs, since when."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def want(self, agreements: Iterable[Granted]) -> None:
        """These run now. Begins what is to be fetched or dropped, and waits for nothing."""
        self._wanted = {each.offer.model: each for each in agreements}
        known, now = self._catalog().models, self._clock.now()
        lent = {digest for digest, model in known.items() if model.lent}
        self._idle = {digest: self._idle.get(digest, now) for digest in sorted(lent - self._wanted.keys())}
        self._tasks = {digest: task for digest, task in self._tasks.items() if not task.done()}
        due = [digest for digest, since in self._idle.items() if now - since >= KEPT_S]
        for digest in (*sorted(self._wanted.keys() - known.keys()), *due):
            if digest not in self._tasks:
                work = self._borrow(digest) if digest in self._wanted else self._drop(digest)
                self._tasks[digest] = asyncio.ensure_future(work)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _borrow(self, digest: str) -> None:
        """Until the model is here or not wanted any more."""
        wait_s = RETRY_S
        while (granted := self._wanted.get(digest)) is not None and digest not in self._catalog().models:
            agreement, region = granted.award.agreement, granted.offer.origin
            size = next(each.size_bytes for each in granted.asked.models if each.digest == digest)
            try:
                await self._models.borrow(region, size, digest, self._peers.fetch(region, agreement, digest, 0))
                return
            except (ShoalError, StaleRevision) as error:
                code = error.code if isinstance(error, ShoalError) else Code.CONFLICT
                self._meter.count("models_not_borrowed", code=code)
            if code in UNFIT:
                with suppress(ShoalError):
                    await self._unfit(agreement, code)
            await self._clock.sleep(wait_s)
            wait_s = min(Seconds(2 * wait_s), RETRY_MOST_S)

    async def _drop(self, digest: str) -> None:
        with suppress(ShoalError, StaleRevision):
            await self._models.remove(digest, "coordinator")
