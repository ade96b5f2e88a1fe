"""Models of guest workloads: fetched once from their origin region, dropped after an hour without use."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from shoal.coordinator import metrics
from shoal.coordinator.controllers.documents.models import ModelsController
from shoal.coordinator.core.catalog.model import Catalog
from shoal.coordinator.core.negotiation.hold import GrantedBid
from shoal.coordinator.ports import Clock, Meter, PeerRegions, StaleRevision
from shoal.types.backoff import delay
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Elapsed, Seconds

RETRY_S: Final = Seconds(1.0)
RETRY_MOST_S: Final = Seconds(30.0)
IDLE_S: Final = 3600.0
"""How long a guest model stays after its last guest, so that the next agreement need not fetch it again."""

UNUSABLE_MODEL_CODES: Final = frozenset(
    {
        Code.MODEL_INVALID,
        Code.MODEL_PATH,
        Code.MODEL_ARCHIVE,
        Code.MODEL_DIGEST,
        Code.MODEL_TOO_LARGE,
        Code.CUSTOM_OP_DENIED,
    }
)
"""Failures of the bytes themselves, which another fetch does not repair."""


class GuestModels:
    """Fetches and drops guest models. on_unusable: called with an agreement whose model is unusable, and the code. If
    it raises, it is called again after the next attempt.
    """

    def __init__(
        self,
        models: ModelsController,
        catalog: Callable[[], Catalog],
        peers: PeerRegions,
        clock: Clock,
        meter: Meter,
        *,
        on_unusable: Callable[[str, Code], Awaitable[None]],
    ) -> None:
        self._models = models
        self._catalog = catalog
        self._peers = peers
        self._clock = clock
        self._meter = meter
        self._on_unusable = on_unusable
        self._in_use: Mapping[str, GrantedBid] = {}
        """By model digest, an agreement that uses it."""
        self._idle_since: dict[str, Elapsed] = {}
        """Guest models that no guest uses, and since when."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def reconcile(self, agreements: Iterable[GrantedBid]) -> None:
        """Takes the agreements that run now. Starts the fetches and removals that are due, and waits for nothing."""
        self._in_use = {each.offer.model: each for each in agreements}
        known, now = self._catalog().models, self._clock.now()
        guests = {digest for digest, model in known.items() if model.guest_of}
        self._idle_since = {
            digest: self._idle_since.get(digest, now) for digest in sorted(guests - self._in_use.keys())
        }
        self._tasks = {digest: task for digest, task in self._tasks.items() if not task.done()}
        due = [digest for digest, since in self._idle_since.items() if now - since >= IDLE_S]
        for digest in (*sorted(self._in_use.keys() - known.keys()), *due):
            if digest not in self._tasks:
                work = self._fetch(digest) if digest in self._in_use else self._drop(digest)
                self._tasks[digest] = asyncio.ensure_future(work)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _fetch(self, digest: str) -> None:
        """Retries until the model is here or no longer needed."""
        attempts = 0
        while (granted := self._in_use.get(digest)) is not None and digest not in self._catalog().models:
            agreement, region = granted.award.agreement, granted.offer.origin
            size = next(each.size_bytes for each in granted.asked.models if each.digest == digest)
            try:
                await self._models.push_guest(region, size, digest, self._peers.fetch(region, agreement, digest, 0))
                return
            except (ShoalError, StaleRevision) as error:
                code = error.code if isinstance(error, ShoalError) else Code.CONFLICT
                self._meter.count(metrics.GUEST_MODEL_FETCHES_FAILED, code=code)
            if code in UNUSABLE_MODEL_CODES:
                with suppress(ShoalError):
                    await self._on_unusable(agreement, code)
            await self._clock.sleep(delay(digest, attempts, base_s=RETRY_S, cap_s=RETRY_MOST_S, jitter=0.0))
            attempts += 1

    async def _drop(self, digest: str) -> None:
        with suppress(ShoalError, StaleRevision):
            await self._models.remove(digest, "coordinator")
