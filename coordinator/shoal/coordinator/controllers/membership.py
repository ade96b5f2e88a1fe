"""A region in a federation: joining and leaving, telling what is free, measuring how far the others are.

What it was last told is kept in the store, so that after a restart, and without the federation, it knows whom to trust
and where they are.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.ports import Clock, FederationDoor, FederationLink, Joined, Meter, Peers, StaleRevision, Store
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Advertisement, CapacityClass, Directory, Member, member_of, roots_of
from shoal.types.units import Elapsed, Seconds, Wall

KEY: Final = "federation"
LEASE_S: Final = Seconds(10.0)
EVERY_S: Final = Seconds(2.0)
MEASURE_EVERY_S: Final = Seconds(10.0)
MEASURED_KEPT: Final = 5
"""The least of so many round trips counts: more is a queue somewhere."""


@dataclass(frozen=True, slots=True)
class StoredMembership:
    joined: Joined
    at: Wall


@dataclass(frozen=True, slots=True)
class LedgerHeads:
    """own: digest of this region's newest entry. others: by counterpart, the last that it was shown of theirs."""

    own: str = ""
    others: Mapping[str, str] | None = None


class Membership:
    """own: this region as others shall know it now. capacity: what is free now. heads: of the ledgers."""

    def __init__(
        self,
        store: Store,
        truth: Truth,
        clock: Clock,
        meter: Meter,
        *,
        link: FederationLink,
        door: FederationDoor,
        peers: Peers,
        own: Callable[[], Member],
        capacity: Callable[[], tuple[CapacityClass, ...]],
        heads: Callable[[], LedgerHeads] = LedgerHeads,
    ) -> None:
        self._store = store
        self._truth = truth
        self._clock = clock
        self._meter = meter
        self._link = link
        self._door = door
        self._peers = peers
        self._own = own
        self._capacity = capacity
        self._heads = heads
        self._stored: StoredMembership | None = None
        self._sequence = 0
        self._round_trips = dict[str, deque[float]]()
        self._measure_at = Elapsed(0.0)
        self._woken = asyncio.Event()
        self._changing = asyncio.Lock()
        self.heard_at: Wall | None = None
        """When the federation last answered this process."""
        self.refusal: Refusal | None = None
        """Why it did not, the last time."""

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        record = await self._store.read(KEY)
        self._stored = records.load(StoredMembership, record.value) if record is not None else None

    @property
    def joined(self) -> Joined | None:
        return self._stored.joined if self._stored is not None else None

    @property
    def joined_at(self) -> Wall | None:
        return self._stored.at if self._stored is not None else None

    @property
    def directory(self) -> Directory | None:
        return self._stored.joined.directory if self._stored is not None else None

    @property
    def rtt(self) -> Mapping[str, Seconds]:
        """Round trips to the other regions' coordinators, of those that answer."""
        return {region: Seconds(min(seen)) for region, seen in self._round_trips.items() if seen}

    def roots_of(self, region: str) -> tuple[str, ...]:
        """Of the other members."""
        return roots_of(self.directory, region) if region != self._own().region else ()

    async def join(self, address: str, token: str, actor: str) -> Joined:
        """Raises ShoalError(CONFLICT | TOKEN_* | FEDERATION_UNREACHABLE | CERT_UNTRUSTED | STORE_*)."""
        async with self._changing:
            if self.joined is not None:
                raise refuse(
                    Code.CONFLICT,
                    f"this region is in {self.joined.federation}",
                    "a region that is in no federation",
                    "leave that one first: shoal federation leave",
                )
            joined = await self._door.join(address, token, self._own())
            event = Event("FEDERATION_JOINED", joined.federation, joined.address, actor)
            await self._put(StoredMembership(joined, self._clock.wall()), event)
        self._woken.set()
        return joined

    async def leave(self, actor: str, *, forget: bool = False) -> None:
        """forget: also where the federation does not answer, which then lists the region on.

        Raises ShoalError(CONFLICT | FEDERATION_UNREACHABLE | STORE_*)."""
        async with self._changing:
            event = Event("FEDERATION_LEFT", self._required().federation, "", actor)
            try:
                await self._door.leave()
            except ShoalError as error:
                if error.code is not Code.REGION_UNKNOWN and not forget:
                    raise
            await self._truth.commit({}, deletes=(KEY,), events=[event])
            self._stored = None
            self._round_trips.clear()
            self.heard_at = self.refusal = None

    def examine(self) -> Iterator[tuple[str, Refusal | None]]:
        """What doctor asks of a region in a federation, and why it is not in order."""
        if (joined := self.joined) is None:
            return
        yield f"{joined.federation} answers", self.refusal
        for member in self._others():
            refusal = None
            if member.region not in self._round_trips:
                remedy = "start its coordinator; open its port for peers to this one"
                refusal = Refusal(Code.PEER_UNREACHABLE, f"{member.region} at {member.address}", "an answer", remedy)
            yield f"{member.region} can be reached", refusal

    async def run(self) -> None:
        """For ever: tells and measures while the region is in a federation."""
        while True:
            if self.joined is not None:
                await self.step()
                await self.measure()
            await self._wait()

    async def step(self) -> None:
        """One advertisement, and what came of it."""
        try:
            directory = await self._link.advertise(self._advertisement())
            if directory is None and not self._is_listed():
                directory = await self._door.update(self._own())
            self.heard_at, self.refusal = self._clock.wall(), None
            if directory is not None:
                await self._learn(directory)
                if not self._is_listed():
                    await self._learn(await self._door.update(self._own()))
        except StaleRevision:
            self._meter.count("steps_failed")
        except ShoalError as error:
            self._meter.count("advertisements_failed", code=error.code)
            self.refusal = error.refusal

    async def measure(self) -> None:
        """One round trip to each of the other regions whose turn it is; to one that is new at once."""
        others, now = {member.region for member in self._others()}, self._clock.now()
        for region in self._round_trips.keys() - others:
            del self._round_trips[region]
        if now >= self._measure_at:
            self._measure_at = Elapsed(now + MEASURE_EVERY_S)
        else:
            others -= self._round_trips.keys()
        await asyncio.gather(*(self._measure(region) for region in sorted(others)))

    async def _measure(self, region: str) -> None:
        try:
            seconds = await self._peers.measure(region)
        except ShoalError as error:
            self._meter.count("measurements_failed", code=error.code)
            self._round_trips.pop(region, None)
            return
        self._round_trips.setdefault(region, deque(maxlen=MEASURED_KEPT)).append(seconds)

    def _advertisement(self) -> Advertisement:
        """Its number is the time, so that it grows also where a store was restored."""
        self._sequence = max(self._sequence + 1, int(self._clock.wall() * 1000))
        own, heads = self._own(), self._heads()
        return Advertisement(
            own.region,
            self._sequence,
            self._capacity(),
            own.residency,
            LEASE_S,
            dict(self.rtt),
            heads.own,
            dict(heads.others or {}),
            self._required().directory.version,
        )

    def _is_listed(self) -> bool:
        """As it is now."""
        own = self._own()
        listed = member_of(self._required().directory, own.region)
        return listed is not None and replace(listed, advertisement=None, trust=own.trust, standing=own.standing) == own

    async def _learn(self, directory: Directory) -> None:
        async with self._changing:
            if self._stored is not None and directory.version != self._stored.joined.directory.version:
                joined = replace(self._stored.joined, directory=directory)
                await self._put(replace(self._stored, joined=joined))

    async def _put(self, stored: StoredMembership, *events: Event) -> None:
        await self._truth.commit({KEY: records.dump(stored)}, events=events)
        self._stored = stored

    def _others(self) -> tuple[Member, ...]:
        directory, own = self.directory, self._own().region
        return tuple(member for member in directory.members if member.region != own) if directory is not None else ()

    def _required(self) -> Joined:
        if (joined := self.joined) is None:
            raise refuse(Code.CONFLICT, "this region is in no federation", "one", "shoal federation join")
        return joined

    async def _wait(self) -> None:
        """For the next time, or until it joined."""
        sleeping = asyncio.ensure_future(self._clock.sleep(EVERY_S))
        waking = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait({sleeping, waking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            waking.cancel()
            self._woken.clear()
