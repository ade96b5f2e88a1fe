"""A store on a server that several coordinators share, in virtual time: each can stand still before a request is
carried out, after it, and anywhere else. The server forgets changes; the seat of the leader is held by a lease."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from shoal.coordinator import codec
from shoal.coordinator.controllers.log.fencing import KEY, RegionRecord
from shoal.coordinator.ports import Compacted, StaleRevision, StoreChange, StoreRecord, Transaction
from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import EPOCH
from shoal.types.units import Elapsed, Seconds, Wall

LEASE_S = 2.0
RENEW_S = 0.5
LOOK_S = 0.25


@dataclass
class Server:
    """What is true. term: of the region's record; written: the term of whoever made each transaction, and then."""

    rng: Rng
    records: dict[str, StoreRecord] = field(default_factory=dict)
    changes: list[StoreChange] = field(default_factory=list)
    revision: int = 0
    compacted: int = 0
    term: int = 0
    written: list[tuple[int, int]] = field(default_factory=list)
    seat: tuple[str, float] = ("", 0.0)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def commit(self, transaction: Transaction, term: int) -> int:
        for key, revision in transaction.expect.items():
            held = self.records.get(key)
            if (held.revision if held else 0) != revision:
                raise StaleRevision(key)
        self.revision += 1
        if KEY in transaction.puts:
            self.term = term = codec.load(RegionRecord, transaction.puts[KEY]).term
        self.written.append((term, self.term))
        for key, value in transaction.puts.items():
            self.records[key] = StoreRecord(key, value, self.revision)
            self.changes.append(StoreChange(key, value, self.revision))
        for key in transaction.deletes:
            if key not in transaction.puts and self.records.pop(key, None) is not None:
                self.changes.append(StoreChange(key, None, self.revision))
        self.news.set()
        self.news = asyncio.Event()
        return self.revision

    def compact(self) -> None:
        self.compacted = self.revision
        self.changes.clear()


class CoordinatorHost:
    """A coordinator's: its clock, and its process, which may stand still. ports.Clock."""

    def __init__(self, name: str, chance: Rng) -> None:
        self.name = name
        self.rng = chance
        self.awake = asyncio.Event()
        self.awake.set()

    def now(self) -> Elapsed:
        return Elapsed(asyncio.get_running_loop().time())

    def wall(self) -> Wall:
        return Wall(EPOCH + self.now())

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)
        await self.awake.wait()

    async def travel(self) -> None:
        """To the server or back."""
        await asyncio.sleep(self.rng.exponential(0.004))

    def pause(self) -> None:
        self.awake.clear()

    def resume(self) -> None:
        self.awake.set()


class SharedStore:
    """ports.Store, as one machine sees the server. term: what its coordinator believes, for the server to count."""

    def __init__(self, server: Server, machine: CoordinatorHost) -> None:
        self.server = server
        self.machine = machine
        self.term: Callable[[], int] = lambda: 0

    async def read(self, key: str) -> StoreRecord | None:
        await self._wait_sent()
        found = self.server.records.get(key)
        await self._wait_answered()
        return found

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[StoreRecord, ...]:
        await self._wait_sent()
        keys = sorted(key for key in self.server.records if key.startswith(prefix) and key > after)
        found = tuple(self.server.records[key] for key in (keys[:limit] if limit else keys))
        await self._wait_answered()
        return found

    async def commit(self, transaction: Transaction) -> int:
        """Shielded: what was sent is carried out, whatever becomes of its sender."""
        carried = asyncio.ensure_future(self._commit(transaction))
        carried.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(carried)

    async def _commit(self, transaction: Transaction) -> int:
        await self._wait_sent()
        try:
            return self.server.commit(transaction, self.term())
        finally:
            await self._wait_answered()

    async def watch(self, prefix: str, after: int) -> AsyncIterator[StoreChange]:
        while True:
            await self._wait_sent()
            if after < self.server.compacted:
                raise Compacted(self.server.revision)
            news, fresh = self.server.news, [each for each in self.server.changes if each.revision > after]
            # A server may tell in parts.
            if fresh and self.machine.rng.happens(0.3):
                last = self.machine.rng.choice(fresh).revision
                fresh = [each for each in fresh if each.revision <= last]
            await self._wait_answered()
            for change in fresh:
                after = change.revision
                if change.key.startswith(prefix):
                    yield change
            if not fresh:
                await news.wait()

    async def close(self) -> None:
        pass

    async def _wait_sent(self) -> None:
        await self.machine.awake.wait()
        await self.machine.travel()

    async def _wait_answered(self) -> None:
        await self.machine.travel()
        await self.machine.awake.wait()


class SimulatedElection:
    """ports.Election on the server's clock."""

    is_shared = True

    def __init__(self, server: Server, machine: CoordinatorHost) -> None:
        self._server = server
        self._machine = machine

    async def campaign(self) -> None:
        while not self._take():
            await self._machine.sleep(Seconds(LOOK_S))

    async def wait_lost(self) -> None:
        while self._holds():
            self._take()
            await self._machine.sleep(Seconds(RENEW_S))

    async def leader(self) -> bytes | None:
        return self._server.seat[0].encode() or None

    async def resign(self) -> None:
        if self._holds():
            self._server.seat = ("", 0.0)

    def _holds(self) -> bool:
        holder, until = self._server.seat
        return holder == self._machine.name and self._machine.now() < until

    def _take(self) -> bool:
        holder, until = self._server.seat
        now = self._machine.now()
        if holder not in ("", self._machine.name) and now < until:
            return False
        self._server.seat = (self._machine.name, now + LEASE_S)
        return True
