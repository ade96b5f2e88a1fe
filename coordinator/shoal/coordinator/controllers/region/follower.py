"""A coordinator that does not lead: it serves reads from the stored state and redirects the rest to the leader."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Final

from shoal.coordinator.controllers.log.fencing import KEY
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.ports import Clock, Compacted, Election, Store
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Seconds

READ_METHODS: Final = frozenset({"WhoAmI", "Get", "History", "Events", "GetAuthority", "List"})
"""Methods that a follower answers; of `Get` only the kinds that are entirely in the store. Readings, liveness and feeds
reach only the leader, and plans depend on them."""
STORED_KINDS: Final = frozenset({"tokens", "events", "policies", "tenants", "ledger"})
POLL_S: Final = Seconds(0.5)


class Follower:
    """leader: address of the leader's link, as published by the leader; empty while there is none. revision: store
    revision up to which every change was read.
    """

    def __init__(self, region: RegionalCoordinator, store: Store, election: Election, clock: Clock) -> None:
        self.leader = ""
        self.revision = 0
        self._seen_revision = 0
        self._region = region
        self._store = store
        self._election = election
        self._clock = clock

    async def read(self) -> None:
        """Reads the store and the leader's address. Raises ShoalError."""
        await self._read()
        self.leader = await self._leader_address()

    def redirect(self, method: str, kind: str = "") -> Refusal | None:
        """Why a follower does not answer this; None if it does. method: its name; kind: of `Get`."""
        name = method.rsplit("/", 1)[-1]
        if name in READ_METHODS and (not kind or kind in STORED_KINDS):
            return None
        where = f"at {self.leader}" if self.leader else "being elected"
        return Refusal(Code.NOT_LEADER, "this coordinator follows", f"the leader is {where}", "call it there")

    async def run(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Reads again when the store changed, at most twice a second, until cancelled. Raises ShoalError(STORE_CORRUPT)
        when the store was replaced by another.
        """
        news = asyncio.Event()
        watching = asyncio.ensure_future(self._watch(news))
        try:
            while True:
                await self._clock.sleep(POLL_S)
                try:
                    self.leader = await self._leader_address()
                    if news.is_set():
                        news.clear()
                        await self._read()
                        await on_change()
                except ShoalError as error:
                    if error.code is Code.STORE_CORRUPT:
                        raise
        finally:
            watching.cancel()

    async def _read(self) -> None:
        told = self._seen_revision
        if not told:
            found = await self._store.read(KEY)
            told = self._seen_revision = found.revision if found is not None else 0
        await self._region.follow()
        self.revision = told

    async def _watch(self, news: asyncio.Event) -> None:
        while True:
            try:
                async for change in self._store.watch("", self._seen_revision):
                    self._seen_revision = change.revision
                    news.set()
            except Compacted as gone:
                self._seen_revision = gone.revision
                news.set()
            except ShoalError:  # the store is unavailable; `run` gets the same error
                await self._clock.sleep(POLL_S)

    async def _leader_address(self) -> str:
        said = await self._election.leader()
        return str(json.loads(said)["link"]) if said else ""
