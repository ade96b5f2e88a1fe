"""A coordinator that does not lead: it reads what the leader writes, and says of all else where the leader is."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Final

from shoal.coordinator.controllers.region import Region
from shoal.coordinator.controllers.truth import KEY
from shoal.coordinator.ports import Clock, Compacted, Election, Store
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Seconds

READ: Final = frozenset({"WhoAmI", "Get", "History", "Events", "GetAuthority", "List"})
"""Methods that a follower answers, of `Get` those kinds of which all is in the store: no reading or liveness, which
only the leader hears, no plan, which is made of them, and no price of a feed, which only the leader reads."""
STORED: Final = frozenset({"tokens", "events", "policies", "tenants", "ledger"})
LOOK_S: Final = Seconds(0.5)


class Following:
    """leader: where its link listens, as it said itself; empty while nobody leads. revision: of the store; every change
    up to it was read."""

    def __init__(self, region: Region, store: Store, election: Election, clock: Clock) -> None:
        self.leader = ""
        self.revision = 0
        self._told = 0
        self._region = region
        self._store = store
        self._election = election
        self._clock = clock

    async def read(self) -> None:
        """Raises ShoalError."""
        await self._read()
        self.leader = await self._found()

    def elsewhere(self, method: str, kind: str = "") -> Refusal | None:
        """Why this is not for a follower to answer. method: its name; kind: of `Get`."""
        name = method.rsplit("/", 1)[-1]
        if name in READ and (not kind or kind in STORED):
            return None
        where = f"at {self.leader}" if self.leader else "being elected"
        return Refusal(Code.NOT_LEADER, "this coordinator follows", f"the leader is {where}", "call it there")

    async def run(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Reads again when the store has changed, at most twice a second, until cancelled. Raises
        ShoalError(STORE_CORRUPT) when it is another store now."""
        news = asyncio.Event()
        watching = asyncio.ensure_future(self._watch(news))
        try:
            while True:
                await self._clock.sleep(LOOK_S)
                try:
                    self.leader = await self._found()
                    if news.is_set():
                        news.clear()
                        await self._read()
                        await changed()
                except ShoalError as error:
                    if error.code is Code.STORE_CORRUPT:
                        raise
        finally:
            watching.cancel()

    async def _read(self) -> None:
        told = self._told
        if not told:
            found = await self._store.read(KEY)
            told = self._told = found.revision if found is not None else 0
        await self._region.follow()
        self.revision = told

    async def _watch(self, news: asyncio.Event) -> None:
        while True:
            try:
                async for change in self._store.watch("", self._told):
                    self._told = change.revision
                    news.set()
            except Compacted as gone:
                self._told = gone.revision
                news.set()
            except ShoalError:  # the store is away; what it says of itself `run` meets too
                await self._clock.sleep(LOOK_S)

    async def _found(self) -> str:
        said = await self._election.leader()
        return str(json.loads(said)["link"]) if said else ""
