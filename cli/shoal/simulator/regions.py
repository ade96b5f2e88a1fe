"""Two or three regions and the replicas of their federation: the real controllers of trade over a small engine each.

What a region acts on is told to the record whenever it changes; the judge of trades reads nothing else of it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, cast

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.bids import BidsController
from shoal.coordinator.controllers.events import EventLog
from shoal.coordinator.controllers.federation import FederationController
from shoal.coordinator.controllers.ledger import LEDGER, Ledger
from shoal.coordinator.controllers.region import NoMeter
from shoal.coordinator.controllers.trades import TradesController
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.core.negotiation.advertise import classes
from shoal.coordinator.core.negotiation.model import Active, Resting
from shoal.coordinator.core.placement.model import Inputs
from shoal.coordinator.core.workloads.model import Delegated
from shoal.coordinator.ports import Change, Record, Transaction
from shoal.coordinator.ports import Clock as SleepingClock
from shoal.simulator.between import Between, Candidates, FederationEnd, Peers, federation, peer
from shoal.simulator.chance import Chance
from shoal.simulator.cluster import Ids
from shoal.simulator.disk import Disk
from shoal.simulator.home import Estate, Home
from shoal.simulator.network import Conditions
from shoal.simulator.storage import Store, format_store
from shoal.simulator.world import Clock, Process, World
from shoal.types.agreement import GUESTS, ServiceReport
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import EnergySource
from shoal.types.offer import Advertisement, Answer, Directory, Member
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Joules, Seconds, Wall
from shoal.types.workload import Intent, Trade, WorkloadKey

if TYPE_CHECKING:
    from shoal.coordinator.controllers.models import ModelsController
    from shoal.coordinator.controllers.workloads import WorkloadsController

FEDERATION: Final = "fed"
ADVERTISE_S: Final = 5.0
REQUESTS_PER_S: Final = 10.0
WAY_S: Final = 0.004
"""There and back between any two regions."""
LEASE_S: Final = Seconds(30.0)
TICK_S: Final = 0.5


class Federated:
    """All of them, and the paths between."""

    def __init__(
        self, world: World, estates: tuple[Estate, ...], profiles: Mapping[str, ModelProfile], replicas: int
    ) -> None:
        self.world = world
        self.between = Between(world)
        self.sites = {estate.name: Site(self, estate, estates, profiles) for estate in estates}
        self.store_disk = Disk(world, "etcd")
        self.replicas = {
            f"{FEDERATION}-{number}": Replica(self, f"{FEDERATION}-{number}") for number in range(replicas)
        }
        self.members = [site.listed.member for site in self.sites.values()]
        """Whom its federation admits."""
        self.over = False
        self._crossings: dict[str, tuple[int, int, float]] = {}

    async def start(self) -> None:
        setup = Process(self.world, "setup")
        for disk in (self.store_disk, *(site.disk for site in self.sites.values())):
            await format_store(setup, disk)
        self.store = Store(self.world, Process(self.world, "etcd"), self.store_disk)
        for party in self.parties():
            party.boot()

    def parties(self) -> "tuple[Site | Replica, ...]":
        return (*self.sites.values(), *self.replicas.values())

    def crossed(self, origin: str, agreement: str) -> ServiceReport:
        """What the gateways of `origin` counted under an agreement, at ten requests a second while it is in the routes:
        they fail where no replica is, or no way leads there, whatever the coordinators are at."""
        now = self.world.now()
        requests, errors, at = self._crossings.get(agreement, (0, 0, now))
        there = next((each for each in self.sites[origin].home.delegated.values() if each.agreement == agreement), None)
        if there is not None and there.ready:
            sent = int(REQUESTS_PER_S * (now - at))
            guest = WorkloadKey(GUESTS, agreement)
            served = self.sites[there.region].home.serves(guest) and self.between.open_both_ways(origin, there.region)
            requests, errors, at = requests + sent, errors + (0 if served else sent), at + sent / REQUESTS_PER_S
        else:
            at = now
        self._crossings[agreement] = (requests, errors, at)
        latency_s = Seconds(WAY_S + 0.02 if requests > errors else 0.0)
        return ServiceReport(requests, errors, latency_s, Joules(0.0), EnergySource.ESTIMATED, 0.0)

    def paths(self) -> list[Conditions]:
        """Both ways between any two parties."""
        names = [party.name for party in self.parties()]
        return [self.between.path(one, other) for one in names for other in names if one != other]

    def pairs(self) -> list[tuple[str, str]]:
        """Regions of which one works for the other."""
        return [(site.name, each.region) for site in self.sites.values() for each in site.home.delegated.values()]

    def clear_weather(self) -> None:
        for path in self.paths():
            path.loss = path.late = path.duplicate = 0.0
            path.delay_s = 0.002

    def is_known(self) -> bool:
        """Everybody is up and knows of everybody."""
        everybody = {member.region for member in self.members}
        return all(site.is_up and site.listed.regions == everybody for site in self.sites.values())

    def missing(self, *, served: bool, believed: Iterable[tuple[str, str]] = ()) -> list[str]:
        """What keeps the regions from being at rest; served: what is wanted must be. believed: by regions beside these,
        (region, agreement)."""
        found = [f"{party.name} is down" for party in self.parties() if not party.is_up]
        if found:
            return found
        running = {(site.name, agreement) for site in self.sites.values() for agreement in site.guests}
        believed = set(believed)
        for site in self.sites.values():
            found += site.missing(served=served)
            believed |= {(each.region, each.agreement) for each in site.home.delegated.values() if each.wanted}
        found += [f"{region} runs {agreement} for nobody" for region, agreement in sorted(running - believed)]
        found += [f"{region} does not run {agreement}" for region, agreement in sorted(believed - running)]
        return found

    def read_ledgers(self) -> None:
        """What each region's ledger says, from its first entry."""
        for site in self.sites.values():
            assert site.store is not None
            self.world.record("ledger", region=site.name, entries=ledger_of(site.store))

    def end(self) -> None:
        self.over = True
        for party in self.parties():
            if party.process is not None:
                party.process.die()


class Listed:
    """A region in its federation: what it tells of itself, and what it was told of all. A real one keeps that in its
    store."""

    def __init__(self, name: str, residency: str) -> None:
        self.member = Member(name, f"{name}:7447", ("simulated",), residency)
        self.directory: Directory | None = None
        self._sequence = 0

    @property
    def regions(self) -> frozenset[str]:
        """Those that it knows, itself included."""
        return frozenset(each.region for each in self.directory.members) if self.directory is not None else frozenset()

    async def advertise(self, link: FederationEnd, clock: SleepingClock, inputs: Callable[[], Inputs]) -> None:
        """Again and again."""
        while True:
            self._sequence += 1
            advertisement = Advertisement(
                region=self.member.region,
                sequence=self._sequence,
                classes=classes(inputs()),
                residency=self.member.residency,
                lease_s=LEASE_S,
            )
            with suppress(ShoalError):
                self.directory = await link.advertise(advertisement) or self.directory
            await clock.sleep(Seconds(ADVERTISE_S if self.directory is not None else 0.5))


class Party:
    """One process that may die, stop and start again."""

    def __init__(self, federated: Federated, name: str) -> None:
        self.federated = federated
        self.world = federated.world
        self.name = name
        self.process: Process | None = None
        self.chance = self.world.chance.stream(f"party/{name}")
        self.clock = Clock(self.world, booted_at=self.chance.between(1.0, 1e5))
        self.reboots = False
        """Its machine goes down with it."""
        self.dark = False
        """Nothing of it is up, and nothing comes up."""

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.alive

    def boot(self) -> None:
        """A new process on what its disk holds."""
        if self.federated.over or self.is_up or self.dark:
            return
        self.process = process = Process(self.world, self.name)
        process.on_death(self._died)
        process.spawn(self._live(process), "run")

    def kill(self, *, reboots: bool = False, steps: int = 0) -> None:
        """At once, or after so many more steps of its ports."""
        if self.process is None or not self.process.alive:
            return
        self.reboots = reboots
        if steps:
            self.process.fuse = steps
        else:
            self.world.record("fault.killed", process=self.name, where="any")
            self.process.die()

    def go_dark(self) -> None:
        """All of it, until `light`."""
        self.world.record("fault.dark", region=self.name)
        self.dark = True
        if self.process is not None:
            self.process.die()

    def light(self) -> None:
        self.dark = False
        self.boot()

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT."""
        process = self.process
        if process is None or not process.alive or process.is_stopped:
            return
        self.world.record("fault.stopped", process=self.name, seconds=round(seconds, 3))
        self.world.record("region.stopped", region=self.name)
        process.stop()
        self.world.later(seconds, lambda: self.go_on(process))

    def go_on(self, process: Process) -> None:
        if process.alive and process.is_stopped:
            self.world.record("region.awake", region=self.name)
            process.go_on()

    async def _live(self, process: Process) -> None:
        raise NotImplementedError

    def _died(self) -> None:
        self.world.record("region.down", region=self.name)
        if self.reboots:
            self.clock.reboot(self.chance.between(1.0, 100.0))
            self.world.record("fault.rebooted", process=self.name)
        self.reboots = False
        self.world.later(0.05 + min(self.chance.delay(1.0), 20.0), self.boot)


def unsettled(region: str, trades: TradesController) -> list[str]:
    """What of a region's trades is half done."""
    found = [
        f"{region}: {key} is {type(trade.phase).__name__.lower()}"
        for key, trade in sorted(trades.trades.items())
        if not isinstance(trade.phase, Resting | Active)
    ]
    found += [
        f"{region}: {each.deal.agreement} of {key} is leaving"
        for key, trade in sorted(trades.trades.items())
        for each in trade.leaving
    ]
    return found


def delegations(delegated: Mapping[WorkloadKey, Delegated], trades: TradesController | None) -> dict[str, object]:
    """What a region acts on of what others run for it, for the record."""
    known = trades.trades.values() if trades is not None else ()
    return {
        "workloads": tuple(
            (str(key), each.agreement, each.region, each.ready, each.wanted) for key, each in sorted(delegated.items())
        ),
        "leaving": tuple(sorted(each.deal.agreement for trade in known for each in trade.leaving)),
    }


def ledger_of(store: Store) -> tuple[tuple[tuple[str, object], ...], ...]:
    """Every entry that is stored, as plain facts."""
    kept = sorted((key, value) for key, value in store.contents().items() if key.startswith(LEDGER))
    return tuple(tuple(asdict(records.load(LedgerEntry, value)).items()) for _, value in kept)


class Running:
    """The Clock port of one process: whoever sleeps in a stopped process sleeps on."""

    def __init__(self, clock: Clock, process: Process) -> None:
        self._clock = clock
        self._process = process

    def now(self) -> Elapsed:
        return self._clock.now()

    def wall(self) -> Wall:
        return self._clock.wall()

    async def sleep(self, seconds: Seconds) -> None:
        await self._clock.sleep(seconds)
        await self._process.awake()
        self._process.check()


class Doubtful(Store):
    """A store over a network: a commit that it took may go unanswered. From then on it takes no other, until its region
    has read everything anew."""

    def __init__(self, world: World, process: Process, disk: Disk, chance: Chance) -> None:
        super().__init__(world, process, disk)
        self._chance = chance
        self._outdated = False
        self.doubt = 0.0
        """How often that happens."""
        self.on_doubt: Callable[[], None] = lambda: None

    async def commit(self, transaction: Transaction) -> int:
        if self._outdated:
            raise self._refusal()
        revision = await super().commit(transaction)
        if self._chance.happens(self.doubt):
            self._outdated = True
            self._world.record("fault.unanswered", store=self._disk.name, revision=revision)
            self.on_doubt()
        if self._outdated:
            raise self._refusal()
        return revision

    def _refusal(self) -> ShoalError:
        return refuse(Code.STORE_UNAVAILABLE, "the store did not answer", "an answer", "it is tried again by itself")


class Replica(Party):
    """One replica of the federation; all share one store."""

    async def _live(self, process: Process) -> None:
        store = Shared(process, self.federated.store)
        clock = Running(self.clock, process)
        events = EventLog(store, clock, kept=100, audit_kept=100)
        candidates = Candidates(process, self.federated.between, self.name)
        controller = FederationController(FEDERATION, store, events, clock, NoMeter(), candidates)
        await controller.start()
        for wanted in self.federated.members:
            if wanted.region not in {member.region for member in controller.directory().members}:
                await controller.admit(wanted)
        self.federated.between.listen(self.name, process, federation(FEDERATION, controller))
        self.world.record("region.up", region=self.name)
        await controller.run()


class Shared:
    """The Store port of one process on a store that others use too."""

    def __init__(self, process: Process, store: Store) -> None:
        self._process = process
        self._store = store

    async def read(self, key: str) -> Record | None:
        await self._step(f"read {key}")
        return await self._store.read(key)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        await self._step(f"scan {prefix}")
        return await self._store.scan(prefix, after=after, limit=limit)

    async def commit(self, transaction: Transaction) -> int:
        await self._step("commit")
        revision = await self._store.commit(transaction)
        await self._step("committed")
        return revision

    async def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        async for change in self._store.watch(prefix, after):
            await self._step(f"watch {prefix}")
            yield change

    async def close(self) -> None:
        return None

    async def _step(self, where: str) -> None:
        await self._process.awake()
        self._process.gate(where)


class Site(Party):
    """One region: what stands there, and its coordinator's process."""

    def __init__(
        self, federated: Federated, estate: Estate, others: tuple[Estate, ...], profiles: Mapping[str, ModelProfile]
    ) -> None:
        super().__init__(federated, estate.name)
        self.home = Home(estate, self.clock, self.world.now, profiles, Trade("*", hold_share=1.0))
        self.home.crossed = lambda agreement: federated.crossed(estate.name, agreement)
        self.disk = Disk(self.world, estate.name, full_code=Code.STORE_FULL)
        self.listed = Listed(estate.name, estate.residency)
        self.rtt_s: Mapping[str, Seconds] = dict.fromkeys((other.name for other in others), Seconds(WAY_S))
        self.tells: Callable[[Answer], Answer] = lambda answer: answer
        """What it makes of its own bids."""
        self.store: Doubtful | None = None
        self.doubt = 0.0
        self.trades: TradesController | None = None
        self.bids: BidsController | None = None
        self._told: dict[str, object] = {}

    def want(self, intents: tuple[Intent, ...]) -> None:
        """What its operators have applied."""
        self.home.wanted = intents
        self.home.woken.set()

    def doubts(self, share: float) -> None:
        """So many commits are done and not answered."""
        self.doubt = share
        if self.store is not None:
            self.store.doubt = share

    def _reads_anew(self) -> None:
        self.world.later(self.chance.between(0.05, 2.0), self.kill)

    def withdraw(self, agreement: str, ends_s: Seconds) -> None:
        """Notice to whom it works for."""
        bids, process = self.bids, self.process
        if bids is None or process is None or not process.alive:
            return

        async def act() -> None:
            with suppress(ShoalError):
                await bids.withdraw(agreement, Code.NODE_CORDONED, ends_s)

        process.spawn(act(), "withdraw")

    @property
    def wanted(self) -> tuple[Intent, ...]:
        return self.home.wanted

    @property
    def guests(self) -> tuple[str, ...]:
        """Agreements that it runs for others."""
        return tuple(sorted(each.intent.key.name for each in self.home.guests))

    def missing(self, *, served: bool) -> list[str]:
        assert self.trades is not None
        found = unsettled(self.name, self.trades)
        found += [f"{self.name} holds room for {bid}" for bid in self._holds()]
        for intent in self.wanted if served else ():
            away = self.home.delegated.get(intent.key)
            if not (self.home.serves(intent.key) or (away is not None and away.ready)):
                found.append(f"{self.name}: {intent.key} is not served")
        if not self.wanted:
            found += [f"{self.name}: {key} is delegated" for key in sorted(self.home.delegated)]
        return found

    def look(self) -> None:
        """Tells the record what the region acts on, where that changed."""
        home = self.home
        self._tell("holds", bids=self._holds())
        self._tell("guests", agreements=self.guests)
        self._tell("delegated", **delegations(home.delegated, self.trades))
        self._tell("room", devices=home.room())

    def _holds(self) -> tuple[str, ...]:
        return tuple(sorted({each.bid for each in self.home.reserved} - set(self.guests)))

    def _tell(self, kind: str, **facts: object) -> None:
        if self._told.get(kind) != facts:
            self._told[kind] = facts
            self.world.record(kind, region=self.name, **facts)

    async def _live(self, process: Process) -> None:
        world, between, home = self.world, self.federated.between, self.home
        self.store = store = Doubtful(world, process, self.disk, self.chance.stream("doubt"))
        store.doubt = self.doubt
        store.on_doubt = self._reads_anew
        clock, ids, meter = Running(self.clock, process), Ids(world, process), NoMeter()
        events = EventLog(store, clock, kept=200, audit_kept=200)
        truth = Truth(self.name, store, events, ids, meter)
        ledger = Ledger(store, truth, clock)
        peers = Peers(process, between, self.name)
        link = FederationEnd(process, between, self.name, list(self.federated.replicas))
        trades = TradesController(
            self.name, store, ledger, home, peers, clock, ids, meter,
            federation=link, directory=lambda: self.listed.directory, rtt=lambda: self.rtt_s, changed=home.woken.set,
        )  # fmt: skip
        bids = BidsController(
            self.name, store, ledger, cast("WorkloadsController", home), cast("ModelsController", home), home.fleet,
            clock, ids, meter,
            peers=peers, origin=trades, changed=home.woken.set,
            listed=lambda region: Member(region, "", ("simulated",), ""),
        )  # fmt: skip
        home.restart()
        await events.start()
        await truth.start()
        await ledger.start()
        await bids.start()
        await trades.start()
        self.trades, self.bids = trades, bids
        between.listen(self.name, process, peer(self.name, bids, self.tells))
        world.record("region.up", region=self.name)
        process.spawn(self.listed.advertise(link, clock, home.inputs), "advertise")
        await self._run(process, trades, bids)

    async def _run(self, process: Process, trades: TradesController, bids: BidsController) -> None:
        """As `Region.run`: a tick every so often, a look when something happened or is on its way."""
        home = self.home
        while True:
            await bids.tick()
            await trades.tick()
            if home.woken.is_set() or home.is_busy:
                home.woken.clear()
                async with home.stepping:
                    home.adopt_trades(trades.delegated)
                    home.step()
                await trades.tick()
            self.look()
            await self._wait(process)

    async def _wait(self, process: Process) -> None:
        """For the next look, or until something happens."""
        try:
            async with asyncio.timeout(TICK_S):
                await self.home.woken.wait()
        except TimeoutError:
            pass
        await process.awake()
        process.check()
