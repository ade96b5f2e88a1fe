"""Two or three regions and the replicas of their federation: the real negotiation controllers, each over a small
engine.

What a region acts on goes to the record whenever it changes; the federation's checkers read nothing else about it.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, TypeVar, cast

from shoal.coordinator import codec
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.delegate import DelegateController
from shoal.coordinator.controllers.federation.ledger import LEDGER, Ledger
from shoal.coordinator.controllers.federation.origin import OriginController
from shoal.coordinator.controllers.federation.service import FederationController
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.log.fencing import RegionFence
from shoal.coordinator.controllers.log.region_clock import RegionClock
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.core.negotiation.advertise import capacity_classes
from shoal.coordinator.core.negotiation.model import Active, IdleTrade
from shoal.coordinator.core.placement.model import Inputs
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.coordinator.ports import Clock as SleepingClock
from shoal.coordinator.ports import StoreChange, StoreRecord, Transaction
from shoal.host.event_wait import wait_or_timeout
from shoal.simulator.parts.cluster import SimIdSource
from shoal.simulator.parts.inter_region import (
    InterRegionNetwork,
    SimCandidateRegions,
    SimFederationLink,
    SimPeerRegions,
    serve_federation,
    serve_peer,
)
from shoal.simulator.parts.network import PathConditions
from shoal.simulator.parts.region_engine import RegionEngine, RegionResources
from shoal.simulator.parts.storage import SimStore, format_store
from shoal.simulator.world.disk import SimDisk
from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import SimClock, SimProcess, SimWorld
from shoal.types.agreement import GUEST_TENANT, ServiceReport
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import EnergySource
from shoal.types.offer import Advertisement, Answer, Directory, Member
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Joules, Seconds, Wall
from shoal.types.workload import Intent, TradeRule, WorkloadKey

if TYPE_CHECKING:
    from shoal.coordinator.controllers.documents.models import ModelsController
    from shoal.coordinator.controllers.workloads.step import WorkloadsController

FEDERATION: Final = "fed"
ADVERTISE_S: Final = 5.0
REQUESTS_PER_S: Final = 10.0
RTT_S: Final = 0.004
"""Between any two regions."""
LEASE_S: Final = Seconds(30.0)
TICK_S: Final = 0.5
COMPUTING_S: Final = 0.2
"""At most, for a bid: that of a real region of 300 nodes takes as long."""

T = TypeVar("T")


class SimFederation:
    """All regions and federation replicas, and the paths between them."""

    def __init__(
        self, world: SimWorld, estates: tuple[RegionResources, ...], profiles: Mapping[str, ModelProfile], replicas: int
    ) -> None:
        self.world = world
        self.network = InterRegionNetwork(world)
        self.sites = {estate.name: SimRegion(self, estate, estates, profiles) for estate in estates}
        self.store_disk = SimDisk(world, "etcd")
        self.replicas = {
            f"{FEDERATION}-{number}": FederationReplica(self, f"{FEDERATION}-{number}") for number in range(replicas)
        }
        self.members = [site.listing.member for site in self.sites.values()]
        """Regions that the federation admits."""
        self.is_over = False
        self._gateway_counts: dict[str, tuple[int, int, float]] = {}

    async def start(self) -> None:
        setup = SimProcess(self.world, "setup")
        for disk in (self.store_disk, *(site.disk for site in self.sites.values())):
            await format_store(setup, disk)
        self.store = SimStore(self.world, SimProcess(self.world, "etcd"), self.store_disk)
        for party in self.parties():
            party.boot()

    def parties(self) -> "tuple[SimRegion | FederationReplica, ...]":
        return (*self.sites.values(), *self.replicas.values())

    def gateway_report(self, origin: str, agreement: str) -> ServiceReport:
        """What the gateways of `origin` counted under an agreement, at ten requests a second while it is routed.

        Requests fail where no replica is, or no path leads there, whatever the state of the coordinators.
        """
        now = self.world.now()
        requests, errors, at = self._gateway_counts.get(agreement, (0, 0, now))
        there = next(
            (each for each in self.sites[origin].engine.delegations.values() if each.agreement == agreement), None
        )
        if there is not None and there.is_ready:
            sent = int(REQUESTS_PER_S * (now - at))
            guest = WorkloadKey(GUEST_TENANT, agreement)
            served = self.sites[there.region].engine.serves(guest) and self.network.is_open_both_ways(
                origin, there.region
            )
            requests, errors, at = requests + sent, errors + (0 if served else sent), at + sent / REQUESTS_PER_S
        else:
            at = now
        self._gateway_counts[agreement] = (requests, errors, at)
        latency_s = Seconds(RTT_S + 0.02 if requests > errors else 0.0)
        return ServiceReport(requests, errors, latency_s, Joules(0.0), EnergySource.ESTIMATED, 0.0)

    def paths(self) -> list[PathConditions]:
        """Both directions between any two processes."""
        names = [party.name for party in self.parties()]
        return [self.network.path(one, other) for one in names for other in names if one != other]

    def delegating_pairs(self) -> list[tuple[str, str]]:
        """Pairs of regions of which one runs a workload for the other."""
        return [(site.name, each.region) for site in self.sites.values() for each in site.engine.delegations.values()]

    def reset_paths(self) -> None:
        for path in self.paths():
            path.loss = path.late = path.duplicate = 0.0
            path.delay_s = 0.002

    def is_fully_listed(self) -> bool:
        """Whether every region is up and lists all the others."""
        everybody = {member.region for member in self.members}
        return all(site.is_up and site.listing.regions == everybody for site in self.sites.values())

    def missing(self, *, served: bool, known_agreements: Iterable[tuple[str, str]] = ()) -> list[str]:
        """What keeps the regions from being quiescent. served: every workload must be served. known_agreements:
        (region, agreement) that regions outside this federation object count on."""
        found = [f"{party.name} is down" for party in self.parties() if not party.is_up]
        if found:
            return found
        running = {(site.name, agreement) for site in self.sites.values() for agreement in site.guests}
        known_agreements = set(known_agreements)
        for site in self.sites.values():
            found += site.missing(served=served)
            known_agreements |= {
                (each.region, each.agreement) for each in site.engine.delegations.values() if each.is_wanted
            }
        found += [f"{region} runs {agreement} for nobody" for region, agreement in sorted(running - known_agreements)]
        found += [f"{region} does not run {agreement}" for region, agreement in sorted(known_agreements - running)]
        return found

    def read_ledgers(self) -> None:
        """Record each region's ledger from its first entry."""
        for site in self.sites.values():
            assert site.store is not None
            self.world.record("ledger", region=site.name, entries=ledger_facts(site.store))

    def end(self) -> None:
        self.is_over = True
        for party in self.parties():
            if party.process is not None:
                party.process.die()


class FederationListing:
    """A region's view of its federation: what it advertises and the directory that it received. A real region keeps the
    directory in its store."""

    def __init__(self, name: str, residency: str) -> None:
        self.member = Member(name, f"{name}:7447", ("simulated",), residency)
        self.directory: Directory | None = None
        self._sequence = 0

    @property
    def regions(self) -> frozenset[str]:
        """Regions that it knows, itself included."""
        return frozenset(each.region for each in self.directory.members) if self.directory is not None else frozenset()

    async def advertise(self, link: SimFederationLink, clock: SleepingClock, inputs: Callable[[], Inputs]) -> None:
        """Advertise periodically."""
        while True:
            self._sequence += 1
            advertisement = Advertisement(
                region=self.member.region,
                sequence=self._sequence,
                classes=capacity_classes(inputs()),
                residency=self.member.residency,
                lease_s=LEASE_S,
            )
            with suppress(ShoalError):
                self.directory = (await link.advertise(advertisement)).directory or self.directory
            await clock.sleep(Seconds(ADVERTISE_S if self.directory is not None else 0.5))


class Participant:
    """One process that may die, stop and start again."""

    def __init__(self, federation: SimFederation, name: str) -> None:
        self.federation = federation
        self.world = federation.world
        self.name = name
        self.process: SimProcess | None = None
        self.rng = self.world.rng.stream(f"party/{name}")
        self.clock = SimClock(self.world, booted_at=self.rng.uniform(1.0, 1e5))
        self.is_rebooting = False
        """True: its machine reboots with it."""
        self.is_powered_off = False
        """True: nothing of it runs, and nothing starts."""

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.alive

    def boot(self) -> None:
        """Start a new process on what its disk holds."""
        if self.federation.is_over or self.is_up or self.is_powered_off:
            return
        self.process = process = SimProcess(self.world, self.name)
        process.on_death(self._on_death)
        process.spawn(self._run_process(process), "run")

    def kill(self, *, reboots: bool = False, steps: int = 0) -> None:
        """Kill at once, or after `steps` more steps of its ports."""
        if self.process is None or not self.process.alive:
            return
        self.is_rebooting = reboots
        if steps:
            self.process.steps_to_live = steps
        else:
            self.world.record("fault.killed", process=self.name, where="any")
            self.process.die()

    def power_off(self) -> None:
        """Take everything down until `power_on`."""
        self.world.record("fault.dark", region=self.name)
        self.is_powered_off = True
        if self.process is not None:
            self.process.die()

    def power_on(self) -> None:
        self.is_powered_off = False
        self.boot()

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`."""
        process = self.process
        if process is None or not process.alive or process.is_paused:
            return
        self.world.record("fault.stopped", process=self.name, seconds=round(seconds, 3))
        self.world.record("region.stopped", region=self.name)
        process.pause()
        self.world.call_later(seconds, lambda: self.resume(process))

    def resume(self, process: SimProcess) -> None:
        if process.alive and process.is_paused:
            self.world.record("region.awake", region=self.name)
            process.resume()

    async def _run_process(self, process: SimProcess) -> None:
        raise NotImplementedError

    def _on_death(self) -> None:
        self.world.record("region.down", region=self.name)
        if self.is_rebooting:
            self.clock.reboot(self.rng.uniform(1.0, 100.0))
            self.world.record("fault.rebooted", process=self.name)
        self.is_rebooting = False
        self.world.call_later(0.05 + min(self.rng.exponential(1.0), 20.0), self.boot)


def unfinished_trades(region: str, trades: OriginController) -> list[str]:
    """Negotiations and agreements of a region that are half done."""
    found = [
        f"{region}: {key} is {type(trade.phase).__name__.lower()}"
        for key, trade in sorted(trades.trades.items())
        if not isinstance(trade.phase, IdleTrade | Active)
    ]
    found += [
        f"{region}: {each.agreement.id} of {key} is leaving"
        for key, trade in sorted(trades.trades.items())
        for each in trade.leaving
    ]
    return found


def delegation_facts(
    delegated: Mapping[WorkloadKey, DelegatedWorkload], trades: OriginController | None
) -> dict[str, object]:
    """What a region acts on of the workloads that others run for it, for the record."""
    known = trades.trades.values() if trades is not None else ()
    return {
        "workloads": tuple(
            (str(key), each.agreement, each.region, each.is_ready, each.is_wanted)
            for key, each in sorted(delegated.items())
        ),
        "leaving": tuple(sorted(each.agreement.id for trade in known for each in trade.leaving)),
    }


def ledger_facts(store: SimStore) -> tuple[tuple[tuple[str, object], ...], ...]:
    """Every stored entry, as plain facts."""
    kept = sorted((key, value) for key, value in store.contents().items() if key.startswith(LEDGER))
    return tuple(tuple(asdict(codec.load(LedgerEntry, value)).items()) for _, value in kept)


class OpenFederationAccess(FederationAccess):
    """To a delegate, every region is listed."""

    def member_of(self, region: str) -> Member | None:
        return Member(region, "", ("simulated",), "")


class SlowComputing:
    """As a thread computes: the region goes on meanwhile."""

    def __init__(self, clock: SleepingClock, rng: Rng) -> None:
        self._clock = clock
        self._rng = rng

    async def __call__(self, work: Callable[[], T], /) -> T:
        done = work()
        await self._clock.sleep(Seconds(self._rng.uniform(0.0, COMPUTING_S)))
        return done


class PausableClock:
    """The Clock port of one process: a sleep does not end while the process is stopped."""

    def __init__(self, clock: SimClock, process: SimProcess) -> None:
        self._clock = clock
        self._process = process

    def now(self) -> Elapsed:
        return self._clock.now()

    def wall(self) -> Wall:
        return self._clock.wall()

    async def sleep(self, seconds: Seconds) -> None:
        await self._clock.sleep(seconds)
        await self._process.wait_resumed()
        self._process.check()


class UnreliableStore(SimStore):
    """A store over a network: a commit that took effect may go unanswered. From then on the store refuses commits until
    the region has read everything again."""

    def __init__(self, world: SimWorld, process: SimProcess, disk: SimDisk, rng: Rng) -> None:
        super().__init__(world, process, disk)
        self._rng = rng
        self._is_stale = False
        self.unanswered_share = 0.0
        """Chance, 0 to 1, that a commit goes unanswered."""
        self.on_unanswered: Callable[[], None] = lambda: None

    async def commit(self, transaction: Transaction) -> int:
        if self._is_stale:
            raise self._refusal()
        revision = await super().commit(transaction)
        if self._rng.happens(self.unanswered_share):
            self._is_stale = True
            self._world.record("fault.unanswered", store=self._disk.name, revision=revision)
            self.on_unanswered()
        if self._is_stale:
            raise self._refusal()
        return revision

    def _refusal(self) -> ShoalError:
        return refuse(Code.STORE_UNAVAILABLE, "the store did not answer", "an answer", "it is tried again by itself")


class FederationReplica(Participant):
    """One replica of the federation; all replicas share one store."""

    async def _run_process(self, process: SimProcess) -> None:
        store = SharedSimStore(process, self.federation.store)
        clock = PausableClock(self.clock, process)
        events = EventLog(store, clock, kept=100, audit_kept=100)
        candidates = SimCandidateRegions(process, self.federation.network, self.name)
        controller = FederationController(FEDERATION, store, events, clock, NoMeter(), candidates)
        await controller.start()
        for wanted in self.federation.members:
            if wanted.region not in {member.region for member in controller.directory().members}:
                await controller.admit(wanted)
        self.federation.network.listen(self.name, process, serve_federation(FEDERATION, controller))
        self.world.record("region.up", region=self.name)
        await controller.run()


class SharedSimStore:
    """The Store port of one process on a store that other processes use as well."""

    def __init__(self, process: SimProcess, store: SimStore) -> None:
        self._process = process
        self._store = store

    async def read(self, key: str) -> StoreRecord | None:
        await self._step(f"read {key}")
        return await self._store.read(key)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[StoreRecord, ...]:
        await self._step(f"scan {prefix}")
        return await self._store.scan(prefix, after=after, limit=limit)

    async def commit(self, transaction: Transaction) -> int:
        await self._step("commit")
        revision = await self._store.commit(transaction)
        await self._step("committed")
        return revision

    async def watch(self, prefix: str, after: int) -> AsyncIterator[StoreChange]:
        async for change in self._store.watch(prefix, after):
            await self._step(f"watch {prefix}")
            yield change

    async def close(self) -> None:
        return None

    async def _step(self, where: str) -> None:
        await self._process.wait_resumed()
        self._process.gate(where)


class SimRegion(Participant):
    """One region: its engine, and its coordinator's process."""

    def __init__(
        self,
        federation: SimFederation,
        resources: RegionResources,
        others: tuple[RegionResources, ...],
        profiles: Mapping[str, ModelProfile],
    ) -> None:
        super().__init__(federation, resources.name)
        self.engine = RegionEngine(
            resources, RegionClock(self.clock), self.world.now, profiles, TradeRule("*", hold_share=1.0)
        )
        self.engine.gateway_report = lambda agreement: federation.gateway_report(resources.name, agreement)
        self.disk = SimDisk(self.world, resources.name, full_code=Code.STORE_FULL)
        self.listing = FederationListing(resources.name, resources.residency)
        self.rtt_s: Mapping[str, Seconds] = dict.fromkeys((other.name for other in others), Seconds(RTT_S))
        self.alter_answer: Callable[[Answer], Answer] = lambda answer: answer
        """Changes the bids that the region answers with."""
        self.store: UnreliableStore | None = None
        self.unanswered_share = 0.0
        self.origin: OriginController | None = None
        self.delegate: DelegateController | None = None
        self._recorded_facts: dict[str, object] = {}

    def set_intents(self, intents: tuple[Intent, ...]) -> None:
        """Set what its operators have applied."""
        self.engine.applied_intents = intents
        self.engine.wakeup.set()

    def set_unanswered_share(self, share: float) -> None:
        """Let this share of commits take effect unanswered."""
        self.unanswered_share = share
        if self.store is not None:
            self.store.unanswered_share = share

    def _schedule_restart(self) -> None:
        self.world.call_later(self.rng.uniform(0.05, 2.0), self.kill)

    def withdraw(self, agreement: str, ends_s: Seconds) -> None:
        """Give notice to the origin of an agreement."""
        bids, process = self.delegate, self.process
        if bids is None or process is None or not process.alive:
            return

        async def act() -> None:
            with suppress(ShoalError):
                await bids.withdraw(agreement, Code.NODE_CORDONED, ends_s)

        process.spawn(act(), "withdraw")

    @property
    def applied_intents(self) -> tuple[Intent, ...]:
        return self.engine.applied_intents

    @property
    def guests(self) -> tuple[str, ...]:
        """Agreements that it runs for others."""
        return tuple(sorted(each.intent.key.name for each in self.engine.guests))

    def missing(self, *, served: bool) -> list[str]:
        assert self.origin is not None
        found = unfinished_trades(self.name, self.origin)
        found += [f"{self.name} holds room for {bid}" for bid in self._held_bids()]
        for intent in self.applied_intents if served else ():
            away = self.engine.delegations.get(intent.key)
            if not (self.engine.serves(intent.key) or (away is not None and away.is_ready)):
                found.append(f"{self.name}: {intent.key} is not served")
        if not self.applied_intents:
            found += [f"{self.name}: {key} is delegated" for key in sorted(self.engine.delegations)]
        return found

    def record_state(self) -> None:
        """Record what the region acts on, if it changed."""
        engine = self.engine
        self._record_if_changed("holds", bids=self._held_bids())
        self._record_if_changed("guests", agreements=self.guests)
        self._record_if_changed("delegated", **delegation_facts(engine.delegations, self.origin))
        self._record_if_changed("room", devices=engine.memory_use())

    def _held_bids(self) -> tuple[str, ...]:
        return tuple(sorted({each.bid for each in self.engine.reservations} - set(self.guests)))

    def _record_if_changed(self, kind: str, **facts: object) -> None:
        if self._recorded_facts.get(kind) != facts:
            self._recorded_facts[kind] = facts
            self.world.record(kind, region=self.name, **facts)

    async def _run_process(self, process: SimProcess) -> None:
        world, network, engine = self.world, self.federation.network, self.engine
        self.store = store = UnreliableStore(world, process, self.disk, self.rng.stream("doubt"))
        store.unanswered_share = self.unanswered_share
        store.on_unanswered = self._schedule_restart
        clock = RegionClock(PausableClock(self.clock, process))
        ids, meter = SimIdSource(world, process), NoMeter()
        events = EventLog(store, clock, kept=200, audit_kept=200)
        truth = RegionFence(self.name, store, events, clock, ids, meter)
        context = ControllerContext(self.name, store, events, clock, ids, meter)
        ledger = Ledger(store, truth, clock)
        peers = SimPeerRegions(process, network, self.name)
        link = SimFederationLink(process, network, self.name, list(self.federation.replicas))
        access = OpenFederationAccess(peers, link, lambda: self.listing.directory, lambda: self.rtt_s)
        origin = OriginController(context, ledger, engine, access, on_change=engine.wakeup.set)
        delegate = DelegateController(
            context,
            ledger,
            cast("WorkloadsController", engine),
            cast("ModelsController", engine),
            access,
            origin=origin,
            on_change=engine.wakeup.set,
            compute=SlowComputing(clock, self.rng.stream("computing")),
        )
        await events.start()
        await truth.start()
        engine.restart(clock)
        await ledger.start()
        await delegate.start()
        await origin.start()
        self.origin, self.delegate = origin, delegate
        network.listen(self.name, process, serve_peer(self.name, delegate, self.alter_answer))
        world.record("region.up", region=self.name)
        process.spawn(self.listing.advertise(link, clock, engine.inputs), "advertise")
        await self._run(process, origin, delegate)

    async def _run(self, process: SimProcess, origin: OriginController, delegate: DelegateController) -> None:
        """As `RegionalCoordinator.run`: ticks at an interval, and steps if something happened or is in progress."""
        engine = self.engine
        while True:
            await delegate.tick()
            await origin.tick()
            if engine.wakeup.is_set() or engine.is_busy:
                engine.wakeup.clear()
                async with engine.step_lock:
                    engine.adopt_delegations(origin.delegations)
                    engine.step()
                await origin.tick()
            self.record_state()
            await self._wait_next_step(process)

    async def _wait_next_step(self, process: SimProcess) -> None:
        """Wait for the tick interval, or until something happens."""
        await wait_or_timeout(self.engine.wakeup, TICK_S)
        await process.wait_resumed()
        process.check()
