"""A region's membership in a federation: join, leave, advertise free capacity, measure RTT to the other regions.

The last directory is stored, so that after a restart, and without the federation, the region knows whom to trust and
where they are.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.federation.trusted_roots import check_roots, newer_roots, outdated_roots
from shoal.coordinator.ports import (
    FederationLink,
    FederationRegistry,
    JoinedFederation,
    PeerRegions,
    StaleRevision,
)
from shoal.host.event_wait import wait_or_timeout
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import (
    Advertisement,
    CapacityClass,
    Directory,
    FederationRoots,
    Member,
    member_of,
    roots_of,
)
from shoal.types.units import Elapsed, Seconds, Wall

KEY: Final = "federation"
ADVERTISEMENT_LEASE_S: Final = Seconds(10.0)
ADVERTISE_INTERVAL_S: Final = Seconds(0.8)
"""A region removed from the directory is unknown here within a second: row A60 of the attacks."""
MEASURE_INTERVAL_S: Final = Seconds(10.0)
RTT_SAMPLES_KEPT: Final = 5
"""RTT is the minimum of this many round trips: queueing must not count as distance."""


@dataclass(frozen=True, slots=True)
class StoredMembership:
    # The federation and its newest directory.
    """The membership as stored."""

    joined: JoinedFederation
    # When this region joined.
    at: Wall


@dataclass(frozen=True, slots=True)
class LedgerHeads:
    """Ledger heads for the advertisement."""

    # Digest of this region's newest ledger entry.
    own: str = ""
    # By counterpart, the last digest of its ledger that this region was shown.
    others: Mapping[str, str] | None = None


class FederationMembership:
    """Joins, leaves and keeps the region's directory entry fresh. own: this region's current entry. capacity: what is
    free now. fingerprints_of: of CAs (PEM) of a federation by its name; raises ShoalError(FIELD_INVALID) for something
    else. heads: of the ledgers.
    """

    def __init__(
        self,
        context: RegionContext,
        *,
        link: FederationLink,
        registry: FederationRegistry,
        peers: PeerRegions,
        own: Callable[[], Member],
        capacity: Callable[[], tuple[CapacityClass, ...]],
        fingerprints_of: Callable[[tuple[str, ...], str], tuple[str, ...]],
        heads: Callable[[], LedgerHeads] = LedgerHeads,
    ) -> None:
        self._store = context.store
        self._fence = context.fence
        self._clock = context.clock
        self._meter = context.meter
        self._link = link
        self._registry = registry
        self._peers = peers
        self._own = own
        self._capacity = capacity
        self._fingerprints_of = fingerprints_of
        self._heads = heads
        self._stored: StoredMembership | None = None
        self._sequence = 0
        self._round_trips = dict[str, deque[float]]()
        self._measure_at = Elapsed(0.0)
        self._wake = asyncio.Event()
        self._changing = asyncio.Lock()
        self.last_answer_at: Wall | None = None
        """When the federation last answered this process."""
        self.refusal: Refusal | None = None
        """Why the federation did not answer the last call; None if it did."""

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        record = await self._store.read(KEY)
        self._stored = codec.load(StoredMembership, record.value) if record is not None else None

    @property
    def current(self) -> JoinedFederation | None:
        return self._stored.joined if self._stored is not None else None

    @property
    def joined_at(self) -> Wall | None:
        return self._stored.at if self._stored is not None else None

    @property
    def directory(self) -> Directory | None:
        return self._stored.joined.directory if self._stored is not None else None

    @property
    def rtt(self) -> Mapping[str, Seconds]:
        """RTT to the other regions' coordinators that answer: the minimum of the last RTT_SAMPLES_KEPT."""
        return {region: Seconds(min(seen)) for region, seen in self._round_trips.items() if seen}

    def roots_of(self, region: str) -> tuple[str, ...]:
        """CA certificates (PEM) of another member; empty for this region."""
        return roots_of(self.directory, region) if region != self._own().region else ()

    async def join(self, address: str, token: str, actor: str) -> JoinedFederation:
        """Raises ShoalError(CONFLICT | TOKEN_* | FEDERATION_UNREACHABLE | CERT_UNTRUSTED | STORE_*)."""
        async with self._changing:
            if self.current is not None:
                raise refuse(
                    Code.CONFLICT,
                    f"this region is in {self.current.federation}",
                    "a region that is in no federation",
                    "leave that one first: shoal federation leave",
                )
            joined = await self._registry.join(address, token, self._own())
            event = LogEvent("FEDERATION_JOINED", joined.federation, joined.address, actor)
            await self._put(StoredMembership(joined, self._clock.wall()), event)
        self._wake.set()
        return joined

    async def leave(self, actor: str, *, forget: bool = False) -> None:
        """forget: leave even if the federation does not answer; it then keeps listing the region.

        Raises ShoalError(CONFLICT | FEDERATION_UNREACHABLE | STORE_*).
        """
        async with self._changing:
            event = LogEvent("FEDERATION_LEFT", self._require_membership().federation, "", actor)
            try:
                await self._registry.leave()
            except ShoalError as error:
                if error.code is not Code.REGION_UNKNOWN and not forget:
                    raise
            await self._fence.commit({}, deletes=(KEY,), events=[event])
            self._stored = None
            self._round_trips.clear()
            self.last_answer_at = self.refusal = None

    def examine(self) -> Iterator[tuple[str, Refusal | None]]:
        """The checks of `shoal doctor` for a region in a federation, each with the reason why it fails."""
        if (joined := self.current) is None:
            return
        yield f"{joined.federation} answers", self.refusal
        for member in self._others():
            refusal = None
            if member.region not in self._round_trips:
                remedy = "start its coordinator; open its port for peers to this one"
                refusal = Refusal(Code.PEER_UNREACHABLE, f"{member.region} at {member.address}", "an answer", remedy)
            yield f"{member.region} can be reached", refusal

    async def run(self) -> None:
        """Advertises and measures for ever, while the region is in a federation. Advertising waits for no measurement:
        each region that does not answer takes seconds, and what the federation says meanwhile would count late."""
        measuring: asyncio.Task[None] | None = None
        try:
            while True:
                if self.current is not None:
                    await self.step()
                    if measuring is None or measuring.done():
                        measuring = asyncio.create_task(self.measure())
                await self._wait()
        finally:
            if measuring is not None:
                measuring.cancel()

    async def step(self) -> None:
        """Sends one advertisement and adopts the returned directory and the federation's CAs."""
        before = self._stored
        try:
            answer = await self._link.advertise(self._advertisement())
            if self._still_in(before) is None:
                return
            refusal = await self._adopt_roots(answer.roots, before) if answer.roots is not None else None
            directory = answer.directory
            if directory is None and not self.is_listed:
                directory = await self._registry.update(self._own())
            if self._still_in(before) is None:
                return
            self.last_answer_at, self.refusal = self._clock.wall(), refusal
            if directory is not None:
                await self._adopt_directory(directory, before)
                if not self.is_listed:
                    await self._adopt_directory(await self._registry.update(self._own()), before)
        except StaleRevision:
            self._meter.count(metrics.STEPS_FAILED)
        except ShoalError as error:
            self._meter.count(metrics.ADVERTISEMENTS_FAILED, code=error.code)
            if self._still_in(before) is not None:
                self.refusal = error.refusal

    async def measure(self) -> None:
        """Measures one round trip to each region that is due, and to a new region at once."""
        others, now = {member.region for member in self._others()}, self._clock.now()
        for region in self._round_trips.keys() - others:
            del self._round_trips[region]
        if now >= self._measure_at:
            self._measure_at = Elapsed(now + MEASURE_INTERVAL_S)
        else:
            others -= self._round_trips.keys()
        await asyncio.gather(*(self._measure(region) for region in sorted(others)))

    async def _measure(self, region: str) -> None:
        before = self._stored
        try:
            seconds = await self._peers.measure(region)
        except ShoalError as error:
            self._meter.count(metrics.MEASUREMENTS_FAILED, code=error.code)
            self._round_trips.pop(region, None)
            return
        if self._still_in(before) is not None:
            self._round_trips.setdefault(region, deque(maxlen=RTT_SAMPLES_KEPT)).append(seconds)

    def _advertisement(self) -> Advertisement:
        """Its sequence number is the time, so that it also grows after a store was restored."""
        self._sequence = max(self._sequence + 1, int(self._clock.wall() * 1000))
        own, heads, joined = self._own(), self._heads(), self._require_membership()
        return Advertisement(
            own.region,
            self._sequence,
            self._capacity(),
            own.residency,
            ADVERTISEMENT_LEASE_S,
            dict(self.rtt),
            heads.own,
            dict(heads.others or {}),
            joined.directory.version,
            self._fingerprints_of(joined.roots, joined.federation),
        )

    @property
    def is_listed(self) -> bool:
        """Whether the federation lists this region with its current entry, which names all its CAs. Raises
        ShoalError(CONFLICT) in no federation."""
        own = self._own()
        listed = member_of(self._require_membership().directory, own.region)
        return listed is not None and replace(listed, advertisement=None, trust=own.trust, standing=own.standing) == own

    async def _adopt_directory(self, directory: Directory, before: StoredMembership | None) -> None:
        async with self._changing:
            stored = self._still_in(before)
            if stored is not None and directory.version != stored.joined.directory.version:
                await self._put(replace(stored, joined=replace(stored.joined, directory=directory)))

    async def _adopt_roots(self, told: FederationRoots, before: StoredMembership | None) -> Refusal | None:
        """Trusts the CAs that the federation names, which a CA that was trusted so far vouches for. Returns why they
        are refused; the ones before then stay."""
        if (refusal := check_roots(told, self._clock.wall())) is not None:
            return refusal
        async with self._changing:
            if (stored := self._still_in(before)) is None:
                return None
            joined = stored.joined
            try:
                fingerprints = self._fingerprints_of(told.pems, joined.federation)
            except ShoalError as error:
                return error.refusal
            held = FederationRoots(joined.roots, joined.roots_since)
            adopted = newer_roots(held, told)
            if adopted == held:
                return outdated_roots(held, told)
            joined = replace(joined, roots=adopted.pems, roots_since=adopted.since)
            message = "trusts " + ", ".join(each[:16] for each in fingerprints)
            event = LogEvent("FEDERATION_CA_CHANGED", joined.federation, message)
            await self._put(replace(stored, joined=joined), event)
        return None

    def _still_in(self, before: StoredMembership | None) -> StoredMembership | None:
        """The membership, unless it ended while an answer was awaited: another federation's answer does not count."""
        stored = self._stored
        if stored is None or before is None:
            return None
        is_same = (stored.joined.federation, stored.at) == (before.joined.federation, before.at)
        return stored if is_same else None

    async def _put(self, stored: StoredMembership, *events: LogEvent) -> None:
        await self._fence.commit({KEY: codec.dump(stored)}, events=events)
        self._stored = stored

    def _others(self) -> tuple[Member, ...]:
        directory, own = self.directory, self._own().region
        return tuple(member for member in directory.members if member.region != own) if directory is not None else ()

    def _require_membership(self) -> JoinedFederation:
        if (joined := self.current) is None:
            raise refuse(Code.CONFLICT, "this region is in no federation", "one", "shoal federation join")
        return joined

    async def _wait(self) -> None:
        """Waits for the next interval, or until the region joined."""
        try:
            await wait_or_timeout(self._wake, ADVERTISE_INTERVAL_S, self._clock)
        finally:
            self._wake.clear()
