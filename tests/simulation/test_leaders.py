"""Several coordinators over one shared store, in virtual time: the real controllers, elections, and leaders that stand
still at any step and wake when another one leads; readers of the log that sleep past what the store remembers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from simulation.shared_store import Machine, Seat, Server, SharedStore

from harness.region import DIGEST, DOCUMENTS, Agent, CountingIds, KnownModels, Sent, World
from harness.report import record
from shoal.agent.core.session import Accept, check_welcome, judge
from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.catalog import DocumentKey
from shoal.coordinator.controllers.events import Event, EventLog
from shoal.coordinator.controllers.region import Region, RegionConfig
from shoal.coordinator.ports import StaleRevision
from shoal.simulator.chance import Chance
from shoal.simulator.loop import VirtualLoop, run
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.link import Hello, ToAgent, Welcome
from shoal.types.units import Bytes

POLICY = "apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {name}}}\nspec: {{optimize: {{cost: 1.0}}}}\n"
SEEDS = 12
SLEEPERS = 150
MANY = 1000
STORY_S = 14.0


@dataclass
class Coordinator:
    """One process: stands for election, leads, is replaced, stands again."""

    machine: Machine
    server: Server
    seat: Seat
    models: KnownModels
    ids: CountingIds
    agents: dict[str, "Node"]
    region: Region | None = None

    async def run(self) -> None:
        while True:
            await self.seat.win()
            await self.machine.awake.wait()
            config = RegionConfig("eu")
            store = SharedStore(self.server, self.machine)
            region = Region(store, self, self.models, self.models, self.machine, self.ids, config)
            store.term = partial(_term_of, region)
            try:
                await region.start(elected=True)
                self.region = region
                over = [asyncio.ensure_future(each) for each in (region.deposed.wait(), self.seat.lost(), region.run())]
                await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
                for each in over:
                    each.cancel()
            except StaleRevision:
                pass
            self.region = None
            await self.seat.resign()

    async def send(self, node: str, message: ToAgent) -> None:
        await self.machine.awake.wait()
        await self.machine.travel()
        self.agents[node].deliver(self, message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        pass


@dataclass
class Node:
    """An agent: the real core judges what it is sent; it does at once what it accepts."""

    name: str
    coordinators: list[Coordinator]
    server: Server
    held: DesiredSet | None = None
    accepted: int = 0
    stale: list[str] = field(default_factory=list)
    _session: tuple[Coordinator, Region, Welcome] | None = None
    _agent: Any = None

    async def run(self) -> None:
        while True:
            for each in self.coordinators:
                if each.region is not None and await self._connect(each, each.region):
                    await self._talk(each, each.region)
            await asyncio.sleep(0.2)

    def deliver(self, sender: Coordinator, message: ToAgent) -> None:
        """Also what arrives late, on a session that is over: only what it carries protects the node then."""
        if not isinstance(message, DesiredSet) or self._session is None:
            return
        welcome = self._session[2]
        judged = judge(self.held, message, node=self.name, history=welcome.history)
        if not isinstance(judged, Accept):
            return
        stored = self.server.records[f"desired/{self.name}"]
        newest = records.load(DesiredSet, stored.value).version
        version = judged.desired.version
        if (version.term, version.generation) > (newest.term, newest.generation):
            self.stale.append(f"{self.name} acts on {version}, which was never written; the store has {newest}")
        if self.held is not None and version.term < self.held.version.term:
            self.stale.append(f"{self.name} went back to term {version.term}")
        self.held = judged.desired
        self.accepted += 1

    async def _connect(self, coordinator: Coordinator, region: Region) -> bool:
        held = self.held.version if self.held is not None else None
        shown: Any = World(region, None, Sent(), coordinator.machine, coordinator.models, coordinator.ids)  # type: ignore[arg-type]
        agent = Agent(shown, self.name)
        hello = Hello(agent.node, "nonce", held, 1, coordinator.machine.wall())
        try:
            async with asyncio.timeout(2.0):
                answer = await region.fleet.opened(self.name, Role.AGENT, hello)
                if not isinstance(answer, Welcome) or check_welcome(hello, answer) is not None:
                    return False
                self._session, self._agent, agent.epoch = (coordinator, region, answer), agent, answer.epoch
                agent.version = held
                await self._report()
                await agent.measured()
        except TimeoutError:
            return False
        return True

    async def _talk(self, coordinator: Coordinator, region: Region) -> None:
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
        if self.held is not None:
            self._agent.world.sent.messages = [(self.name, self.held)]
            await self._agent.obey()
        else:
            await self._agent.report()


@dataclass
class Told:
    terms: int = 0
    acknowledged: int = 0
    accepted: int = 0
    stale: list[str] = field(default_factory=list)


async def story(loop: VirtualLoop, seed: int) -> Told:
    """Policies are applied all the time, while leaders are paused for up to three leases at any moment."""
    chance = Chance(seed)
    server, models, ids = Server(chance.stream("server")), KnownModels(), CountingIds()
    agents: dict[str, Node] = {}
    coordinators = []
    for number in range(3):
        machine = Machine(f"c{number}", chance.stream(f"c{number}"))
        seat = Seat(server, machine)
        coordinators.append(Coordinator(machine, server, seat, models, ids, agents))
    for name in ("edge-1", "edge-2"):
        agents[name] = Node(name, coordinators, server)
    tasks = [loop.create_task(each.run()) for each in coordinators]
    tasks += [loop.create_task(each.run()) for each in agents.values()]
    acknowledged: list[str] = []

    async def operate() -> None:
        leading = await _leading(coordinators)
        await leading.models.write(_bytes(), size=Bytes(1000), digest=DIGEST)
        await leading.region.models.push("ocr", Bytes(1000), DIGEST, _bytes(), actor="test")  # type: ignore[union-attr]
        await leading.region.workloads.apply(DOCUMENTS, {}, "", "test")  # type: ignore[union-attr]
        number = 0
        while True:
            number += 1
            name = f"p{number}"
            text = POLICY.format(name=name)
            chosen = chance.pick([each for each in coordinators if each.region is not None] or coordinators)
            region = chosen.region
            if region is not None:
                try:
                    async with asyncio.timeout(3.0):
                        applied = await region.workloads.apply([("p.yaml", text)], {}, "", "test")
                        assert not applied.planned.problems
                        acknowledged.append(name)
                except (TimeoutError, StaleRevision):
                    pass
                except ShoalError as error:
                    if error.code not in (Code.NOT_LEADER, Code.CONFLICT):
                        raise
            await asyncio.sleep(chance.between(0.05, 0.5))

    async def strike() -> None:
        while True:
            await asyncio.sleep(chance.between(0.5, 4.0))
            victim = await _leading(coordinators)
            victim.machine.pause()
            await asyncio.sleep(chance.between(0.1, 6.0))
            victim.machine.resume()

    working = [loop.create_task(operate()), loop.create_task(strike())]
    await asyncio.sleep(STORY_S)
    for each in working:
        if each.done():
            each.result()
        each.cancel()
    for one in coordinators:
        one.machine.resume()
    await asyncio.sleep(8.0)
    told = Told(server.term, len(acknowledged), sum(each.accepted for each in agents.values()))
    for each in tasks:
        if each.done():
            each.result()
    told.stale = [f"a write of term {term} in term {then}" for term, then in server.written if term < then]
    told.stale += [line for each in agents.values() for line in each.stale]
    stored = {key for key in server.records if key.startswith("documents/")}
    told.stale += [
        f"{name} was acknowledged and is lost"
        for name in acknowledged
        if DocumentKey("Policy", name).stored_at not in stored
    ]
    serving = [
        asked.id for each in agents.values() if each.held for asked in each.held.assignments if not asked.draining
    ]
    if len(serving) != 1:
        told.stale.append(f"one replica is wanted, and there are {serving}")
    for each in tasks:
        each.cancel()
    return told


def _term_of(region: Region) -> int:
    return region.truth.term


async def _leading(coordinators: list[Coordinator]) -> Coordinator:
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
        told = run(lambda loop, seed=seed: story(loop, seed))  # type: ignore[misc]
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
    chance = Chance(seed)
    server = Server(chance.stream("server"))
    machine = Machine("c0", chance.stream("c0"))
    log = EventLog(SharedStore(server, machine), machine, kept=10_000, audit_kept=10)
    await log.start()
    seen: list[list[int]] = [[] for _ in range(4)]

    async def read(number: int) -> None:
        mine = Machine(f"r{number}", chance.stream(f"r{number}"))
        async for event in EventLog(SharedStore(server, mine), mine, kept=10_000, audit_kept=10).follow(0):
            seen[number].append(event.sequence)
            if mine.chance.happens(0.1):
                await asyncio.sleep(mine.chance.between(0.0, 3.0))

    readers = [loop.create_task(read(number)) for number in range(len(seen))]
    compactions = 0
    for number in range(chance.whole(20, 60)):
        await log.write(*(Event("MORE", str(number), "") for _ in range(chance.whole(1, 3))))
        if chance.happens(0.15):
            server.compact()
            compactions += 1
        await asyncio.sleep(chance.delay(0.2))
    await asyncio.sleep(120.0)
    stored = [event.sequence for event in await log.past(0, 10_000)]
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
