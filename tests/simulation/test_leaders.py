"""Several coordinators over one shared store, in virtual time: the real controllers, elections, and leaders that stand
still at any step and wake when another one leads; readers of the log that sleep past what the store remembers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from simulation.shared_store import CoordinatorHost, Server, SharedStore, SimulatedElection

from harness.fakes.region import DIGEST, DOCUMENTS, CountingIds, FakeAgent, KnownModels, RecordedLinks, RegionFixture
from harness.report import record
from shoal.agent.core.link_session import AcceptSet, check_welcome, evaluate
from shoal.coordinator import codec
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.ports import StaleRevision
from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.rng import Rng
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.link import Hello, ToAgent, Welcome
from shoal.types.units import Bytes

POLICY = "apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {name}}}\nspec: {{optimize: {{cost: 1.0}}}}\n"
SEEDS = 12
SLEEPERS = 150
MANY = 1000
SCENARIO_S = 14.0


@dataclass
class SimulatedCoordinator:
    """One process: stands for election, leads, is replaced, stands again."""

    machine: CoordinatorHost
    server: Server
    election: SimulatedElection
    models: KnownModels
    ids: CountingIds
    agents: dict[str, "SimulatedNode"]
    region: RegionalCoordinator | None = None

    async def run(self) -> None:
        while True:
            await self.election.campaign()
            await self.machine.awake.wait()
            config = RegionConfig("eu")
            store = SharedStore(self.server, self.machine)
            region = RegionalCoordinator(store, self, self.models, self.models, self.machine, self.ids, config)
            store.term = partial(_term_of, region)
            try:
                await region.start(elected=True)
                self.region = region
                over = [
                    asyncio.ensure_future(each)
                    for each in (region.leadership_loss.wait(), self.election.wait_lost(), region.run())
                ]
                await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
                for each in over:
                    each.cancel()
            except StaleRevision:
                pass
            self.region = None
            await self.election.resign()

    async def send(self, node: str, message: ToAgent) -> None:
        await self.machine.awake.wait()
        await self.machine.travel()
        self.agents[node].on_message(self, message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        pass


@dataclass
class SimulatedNode:
    """An agent: the real core judges what it is sent; it does at once what it accepts."""

    name: str
    coordinators: list[SimulatedCoordinator]
    server: Server
    stored_set: DesiredSet | None = None
    accepted_versions: int = 0
    stale: list[str] = field(default_factory=list)
    _session: tuple[SimulatedCoordinator, RegionalCoordinator, Welcome] | None = None
    _agent: Any = None

    async def run(self) -> None:
        while True:
            for each in self.coordinators:
                if each.region is not None and await self._connect(each, each.region):
                    await self._talk(each, each.region)
            await asyncio.sleep(0.2)

    def on_message(self, sender: SimulatedCoordinator, message: ToAgent) -> None:
        """Also what arrives late, on a session that is over: only what it carries protects the node then."""
        if not isinstance(message, DesiredSet) or self._session is None:
            return
        welcome = self._session[2]
        judged = evaluate(self.stored_set, message, node=self.name, history=welcome.history)
        if not isinstance(judged, AcceptSet):
            return
        stored = self.server.records[f"desired/{self.name}"]
        newest = codec.load(DesiredSet, stored.value).version
        version = judged.desired_set.version
        if (version.term, version.generation) > (newest.term, newest.generation):
            self.stale.append(f"{self.name} acts on {version}, which was never written; the store has {newest}")
        if self.stored_set is not None and version.term < self.stored_set.version.term:
            self.stale.append(f"{self.name} went back to term {version.term}")
        self.stored_set = judged.desired_set
        self.accepted_versions += 1

    async def _connect(self, coordinator: SimulatedCoordinator, region: RegionalCoordinator) -> bool:
        held = self.stored_set.version if self.stored_set is not None else None
        parts: Any = (region, None, RecordedLinks(), coordinator.machine, coordinator.models, coordinator.ids)
        shown: Any = RegionFixture(*parts)
        agent = FakeAgent(shown, self.name)
        hello = Hello(agent.node, "nonce", held, 1, coordinator.machine.wall())
        try:
            async with asyncio.timeout(2.0):
                answer = await region.fleet.on_hello(self.name, Role.AGENT, hello)
                if not isinstance(answer, Welcome) or check_welcome(hello, answer) is not None:
                    return False
                self._session, self._agent, agent.epoch = (coordinator, region, answer), agent, answer.epoch
                agent.version = held
                await self._report()
                await agent.send_receipt()
        except TimeoutError:
            return False
        return True

    async def _talk(self, coordinator: SimulatedCoordinator, region: RegionalCoordinator) -> None:
        """Until the coordinator leads no more, or stands still for three beats."""
        silent = 0
        while coordinator.region is region and silent < 3:
            await asyncio.sleep(1.0)
            if coordinator.machine.awake.is_set():
                silent = 0
                await self._report()
            else:
                silent += 1

    async def _report(self) -> None:
        if self.stored_set is not None:
            self._agent.world.links.messages = [(self.name, self.stored_set)]
            await self._agent.apply_desired()
        else:
            await self._agent.report()


@dataclass
class RunResult:
    terms: int = 0
    acknowledged: int = 0
    accepted: int = 0
    stale: list[str] = field(default_factory=list)


async def run_scenario(loop: VirtualLoop, seed: int) -> RunResult:
    """Policies are applied all the time, while leaders are paused for up to three leases at any moment."""
    chance = Rng(seed)
    server, models, ids = Server(chance.stream("server")), KnownModels(), CountingIds()
    agents: dict[str, SimulatedNode] = {}
    coordinators = []
    for number in range(3):
        machine = CoordinatorHost(f"c{number}", chance.stream(f"c{number}"))
        seat = SimulatedElection(server, machine)
        coordinators.append(SimulatedCoordinator(machine, server, seat, models, ids, agents))
    for name in ("edge-1", "edge-2"):
        agents[name] = SimulatedNode(name, coordinators, server)
    tasks = [loop.create_task(each.run()) for each in coordinators]
    tasks += [loop.create_task(each.run()) for each in agents.values()]
    acknowledged: list[str] = []

    async def operate() -> None:
        leading = await _leading(coordinators)
        await leading.models.write(_bytes(), size=Bytes(1000), digest=DIGEST)
        await leading.region.models.push("ocr", Bytes(1000), DIGEST, _bytes(), actor="test")  # type: ignore[union-attr]
        await leading.region.documents.apply(DOCUMENTS, {}, "", "test")  # type: ignore[union-attr]
        number = 0
        while True:
            number += 1
            name = f"p{number}"
            text = POLICY.format(name=name)
            chosen = chance.choice([each for each in coordinators if each.region is not None] or coordinators)
            region = chosen.region
            if region is not None:
                try:
                    async with asyncio.timeout(3.0):
                        applied = await region.documents.apply([("p.yaml", text)], {}, "", "test")
                        assert not applied.plan_result.problems
                        acknowledged.append(name)
                except (TimeoutError, StaleRevision):
                    pass
                except ShoalError as error:
                    if error.code not in (Code.NOT_LEADER, Code.CONFLICT):
                        raise
            await asyncio.sleep(chance.uniform(0.05, 0.5))

    async def strike() -> None:
        while True:
            await asyncio.sleep(chance.uniform(0.5, 4.0))
            victim = await _leading(coordinators)
            victim.machine.pause()
            await asyncio.sleep(chance.uniform(0.1, 6.0))
            victim.machine.resume()

    working = [loop.create_task(operate()), loop.create_task(strike())]
    await asyncio.sleep(SCENARIO_S)
    for each in working:
        if each.done():
            each.result()
        each.cancel()
    for one in coordinators:
        one.machine.resume()
    await asyncio.sleep(8.0)
    told = RunResult(server.term, len(acknowledged), sum(each.accepted_versions for each in agents.values()))
    for each in tasks:
        if each.done():
            each.result()
    told.stale = [f"a write of term {term} in term {then}" for term, then in server.written if term < then]
    told.stale += [line for each in agents.values() for line in each.stale]
    stored = {key for key in server.records if key.startswith("documents/")}
    told.stale += [
        f"{name} was acknowledged and is lost"
        for name in acknowledged
        if DocumentKey("Policy", name).store_key not in stored
    ]
    serving = [
        asked.id
        for each in agents.values()
        if each.stored_set
        for asked in each.stored_set.assignments
        if not asked.draining
    ]
    if len(serving) != 1:
        told.stale.append(f"one replica is wanted, and there are {serving}")
    for each in tasks:
        each.cancel()
    return told


def _term_of(region: RegionalCoordinator) -> int:
    return region.fence.term


async def _leading(coordinators: list[SimulatedCoordinator]) -> SimulatedCoordinator:
    while True:
        for each in coordinators:
            if each.region is not None and each.machine.awake.is_set():
                return each
        await asyncio.sleep(0.05)


async def _bytes() -> AsyncIterator[bytes]:
    yield b"x" * 1000


def leaders(seeds: range) -> None:
    terms = acknowledged = accepted = 0
    for seed in seeds:
        told = run(lambda loop, seed=seed: run_scenario(loop, seed))  # type: ignore[misc]
        assert told.stale == [], f"seed {seed}"
        terms, acknowledged, accepted = terms + told.terms, acknowledged + told.acknowledged, accepted + told.accepted
    assert terms > 2 * len(seeds), "hardly anybody was replaced"
    record(
        "F08", "S", len(seeds), seeds=f"{seeds.start}..{seeds.stop - 1}", terms=terms, acknowledged=acknowledged,
        lost=0, sets_accepted=accepted, stale_effects=0,
    )  # fmt: skip


def test_f08_a_leader_that_stood_still_changes_nothing() -> None:
    leaders(range(SEEDS))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_f08_a_thousand_seeds() -> None:
    leaders(range(MANY))


async def sleepers(loop: VirtualLoop, seed: int) -> tuple[int, int]:
    """Four readers of the event log, and a store that forgets; (events written, times that one listed again)."""
    chance = Rng(seed)
    server = Server(chance.stream("server"))
    machine = CoordinatorHost("c0", chance.stream("c0"))
    log = EventLog(SharedStore(server, machine), machine, kept=10_000, audit_kept=10)
    await log.start()
    seen: list[list[int]] = [[] for _ in range(4)]

    async def read(number: int) -> None:
        mine = CoordinatorHost(f"r{number}", chance.stream(f"r{number}"))
        async for event in EventLog(SharedStore(server, mine), mine, kept=10_000, audit_kept=10).follow(0):
            seen[number].append(event.sequence)
            if mine.rng.happens(0.1):
                await asyncio.sleep(mine.rng.uniform(0.0, 3.0))

    readers = [loop.create_task(read(number)) for number in range(len(seen))]
    compactions = 0
    for number in range(chance.randint(20, 60)):
        await log.write(*(LogEvent("MORE", str(number), "") for _ in range(chance.randint(1, 3))))
        if chance.happens(0.15):
            server.compact()
            compactions += 1
        await asyncio.sleep(chance.exponential(0.2))
    await asyncio.sleep(120.0)
    stored = [event.sequence for event in await log.events_after(0, 10_000)]
    for each in readers:
        if each.done():
            each.result()
        each.cancel()
    for one in seen:
        assert one == stored, f"seed {seed}: each event once, in order, and none missing: {one} {stored}"
    return len(stored), compactions


def forgetful(seeds: range) -> None:
    events = compactions = 0
    for seed in seeds:
        more, forgotten = run(lambda loop, seed=seed: sleepers(loop, seed))  # type: ignore[misc]
        events, compactions = events + more, compactions + forgotten
    assert compactions > len(seeds)
    record(
        "F11", "S", len(seeds), seeds=f"{seeds.start}..{seeds.stop - 1}", events=events, compactions=compactions,
        missed=0, twice=0,
    )  # fmt: skip


def test_f11_who_sleeps_past_a_compaction_ends_with_what_a_fresh_read_shows() -> None:
    forgetful(range(SLEEPERS))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_f11_a_thousand_seeds() -> None:
    forgetful(range(MANY))
