"""Rows of the fault table that real processes show too, one fault at a time in virtual time: both must agree.

Nothing else strikes here: what a region does under everything at once is the storm's.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from harness.report import record
from shoal.simulator.cluster import GIB, Cluster, Spec
from shoal.simulator.faults import KINDS
from shoal.simulator.judge import judge
from shoal.simulator.loop import VirtualLoop, run
from shoal.simulator.machine import Behaviour, Machine, chip
from shoal.simulator.operators import WHO
from shoal.simulator.scenario import Scenario, digest, play, profile
from shoal.simulator.world import World
from shoal.types.codes import Code
from shoal.types.workload import WorkloadKey

RUNS = 30
POWER_SEEDS = 40
GATEWAY = "gateway"
TEXT = WorkloadKey("default", "text")
LOAD_S = 0.5
RETRYABLE = {Code.WORKER_CRASHED, Code.REPLICA_UNREACHABLE, Code.MODEL_NOT_READY}
GIVEN_UP = {"NODE_LOST", "NODE_SUSPECT"}

DOCUMENTS = """apiVersion: shoal/v1
kind: Policy
metadata: {{name: text}}
spec:
  require: {{availability: {{{replicas}}}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: text}}
spec:
  model: {{source: "{model}"}}
  policy: text
"""


@dataclass
class Scene:
    """A gateway and two agents that serve one workload; clients who ask for it at the gateway."""

    world: World
    cluster: Cluster
    answers: list[tuple[float, float, Code | None]] = field(default_factory=list)
    """(sent, ended, the code; None: answered) of every request."""
    codes: set[str] = field(default_factory=set)
    """Of the region's events, once the load has ended."""

    @property
    def replicas(self) -> list[Machine]:
        return [machine for machine in self.cluster.machines if machine.workers]

    async def up(self, replicas: int) -> None:
        model = digest(0)
        self.cluster.operators.quota = replicas
        await self.cluster.start()
        await self.until(lambda: self.cluster.region is not None, 10.0, "a coordinator")
        assert self.cluster.region is not None
        await self.cluster.region.models.push(
            "", self.cluster.spec.profiles[model].size_bytes, model, _no_bytes(), actor=WHO
        )
        spread = f"replicas: {replicas}, spread: node" if replicas > 1 else "replicas: 1"
        text = DOCUMENTS.format(model=model, replicas=spread)
        applied = await self.cluster.region.workloads.apply([("text.yaml", text)], {}, "", WHO)
        assert not applied.planned.problems
        self.world.record("operator.wanted", workloads=(str(TEXT),))
        await self.whole(60.0)

    async def until(self, condition: Callable[[], object], within_s: float, what: str) -> None:
        deadline = self.world.now() + within_s
        while not condition():
            assert self.world.now() < deadline, f"not within {within_s} virtual s: {what}"
            await asyncio.sleep(0.01)

    async def whole(self, within_s: float) -> float:
        """Virtual seconds until nothing is missing."""
        began = self.world.now()
        while missing := await self.cluster.missing():
            assert self.world.now() < began + within_s, f"not whole within {within_s} virtual s: {missing}"
            await asyncio.sleep(0.05)
        return self.world.now() - began

    @asynccontextmanager
    async def load(self, every_s: float = 0.01) -> AsyncIterator[None]:
        """Clients at the gateway before, while and after the block; all that they sent is waited for."""
        asking = asyncio.get_running_loop().create_task(self._ask(every_s))
        await self.until(lambda: len(self.answers) > 50, 30.0, "answers before the fault")
        yield
        count = len(self.answers)
        await self.until(lambda: len(self.answers) > count + 50, 30.0, "answers after the fault")
        asking.cancel()
        await asking
        self.codes = await self._told()

    async def _ask(self, every_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    group.create_task(self._one())
                    await asyncio.sleep(every_s)
            except asyncio.CancelledError:
                return

    async def _one(self) -> None:
        sent = self.world.now()
        code = await self.cluster.operators.request(GATEWAY, TEXT)
        self.answers.append((sent, self.world.now(), code))

    def starts(self) -> int:
        return sum(event.kind == "worker.start" for event in self.world.history.events)

    def last(self, kind: str) -> float:
        """When that last happened."""
        return max((event.at for event in self.world.history.events if event.kind == kind), default=-1.0)

    def seconds_of_last_load(self) -> float:
        return self.last("worker.ready") - self.last("worker.start")

    @property
    def failed(self) -> list[tuple[float, float, Code | None]]:
        return [answer for answer in self.answers if answer[2] is not None]

    @property
    def lost(self) -> int:
        return len(self.failed)

    async def _told(self) -> set[str]:
        """Codes of the region's events."""
        assert self.cluster.region is not None
        return {str(event.code) for event in await self.cluster.region.events.past(0, 1000)}


Story = Callable[[Scene], Awaitable[None]]


def tell(seed: int, replicas: int, story: Story) -> Scene:
    """The story in a region of its own; what the judge, the invariants or the world found fails the test."""
    scenes: list[Scene] = []

    async def whole(loop: VirtualLoop) -> None:
        world = World(loop, seed)
        chips = {f"edge-{number}": (chip("cpu0", 1e11, 8 * GIB),) for number in range(2)}
        cluster = Cluster(
            world,
            Spec(
                nodes={GATEWAY: (), **chips},
                labels={},
                profiles={digest(0): profile(digest(0), 1e8, 2**20)},
                behaviours={digest(0): Behaviour(load_s=LOAD_S, serve_s=0.02)},
            ),
        )
        scenes.append(Scene(world, cluster))
        try:
            await scenes[0].up(replicas)
            await story(scenes[0])
        finally:
            cluster.end()

    run(whole)
    (scene,) = scenes
    assert scene.world.failures == [], f"seed {seed}"
    assert judge(scene.world.history.events) == [], f"seed {seed}"
    return scene


async def _no_bytes() -> AsyncIterator[bytes]:
    return
    yield b""


async def hit(scene: Scene, machine: Machine, in_flight: int) -> int:
    """SIGKILL of its worker with so many requests inside; how many there were."""
    (worker,) = machine.workers.values()
    await scene.until(lambda: worker.in_flight >= in_flight, 5.0, f"{in_flight} requests in the worker")
    machine.kill_worker(worker.assignment.id, own_fault=False, why="killed from outside")
    assert not worker.alive
    return worker.in_flight


def test_f01_one_of_two_replicas_killed_under_load() -> None:
    sent = retried = 0

    async def story(scene: Scene) -> None:
        nonlocal retried
        async with scene.load():
            retried += await hit(scene, scene.replicas[0], 2)
            await scene.whole(20.0)

    for seed in range(RUNS):
        scene = tell(seed, 2, story)
        assert scene.lost == 0, f"seed {seed}: {scene.failed}"
        assert scene.starts() == 3, "loaded again once, by the node that had it"
        assert not scene.codes & {"POISONED", *GIVEN_UP}
        sent += len(scene.answers)
    record("F01", "S", RUNS, seeds=f"0..{RUNS - 1}", sent=sent, lost=0, in_flight_at_the_kill=retried)


def test_f02_the_only_replica_is_back_within_its_load_time_and_half_a_second() -> None:
    worst = 0.0
    failed = 0

    async def story(scene: Scene) -> None:
        nonlocal worst
        async with scene.load():
            await hit(scene, scene.replicas[0], 1)
            killed = scene.world.now()
            await scene.until(
                lambda: any(sent > killed for sent, _, code in scene.answers if code is None), 10.0, "an answer"
            )
            away = scene.world.now() - killed
            worst = max(worst, away - scene.seconds_of_last_load())
            await scene.whole(20.0)

    for seed in range(RUNS):
        scene = tell(seed, 1, story)
        assert {code for _, _, code in scene.failed} <= RETRYABLE, f"seed {seed}"
        assert scene.failed, "the blow missed"
        assert scene.starts() == 2
        assert not scene.codes & {"POISONED", *GIVEN_UP}
        failed += scene.lost
    assert worst <= 0.5
    record("F02", "S", RUNS, seeds=f"0..{RUNS - 1}", told_to_try_again=failed, away_beyond_load_s=round(worst, 3))


def test_f03_supervisor_killed_and_its_worker_adopted() -> None:
    sent = 0
    worst = 0.0

    async def story(scene: Scene) -> None:
        nonlocal worst
        machine = scene.replicas[0]
        worker = next(iter(machine.workers.values()))
        async with scene.load():
            scene.cluster.kill_agent(machine)
            assert machine.supervisor is not None
            assert not machine.supervisor.alive
            await scene.until(lambda: scene.last("worker.adopted") > scene.last("agent.died"), 20.0, "adoption")
            worst = max(worst, scene.last("worker.adopted") - scene.last("agent.started"))
            await scene.whole(20.0)
        assert next(iter(machine.workers.values())) is worker, "the very same process"

    for seed in range(RUNS):
        scene = tell(seed, 2, story)
        assert scene.lost == 0, f"seed {seed}: {scene.failed}"
        assert scene.starts() == 2, "nothing is reloaded"
        sent += len(scene.answers)
    assert worst <= 2.0
    record("F03", "S", RUNS, seeds=f"0..{RUNS - 1}", sent=sent, lost=0, adopted_s=round(worst, 3))


def test_f06_coordinator_down_for_a_minute_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unscaled: a minute passes in virtual time."""
    sent = 0
    worst = 0.0

    async def story(scene: Scene) -> None:
        nonlocal worst
        cluster = scene.cluster
        async with scene.load(every_s=0.05):
            with monkeypatch.context() as held:
                held.setattr(cluster, "start_coordinator", lambda: None)
                cluster.kill_coordinator()
                await asyncio.sleep(60.0)
                assert cluster.region is None
            cluster.start_coordinator()
            worst = max(worst, await scene.whole(20.0))

    for seed in range(RUNS):
        scene = tell(seed, 2, story)
        assert scene.lost == 0, f"seed {seed}: {scene.failed}"
        assert scene.starts() == 2, "nothing is restarted"
        assert not scene.codes & GIVEN_UP, "a node has one full window to report"
        sent += len(scene.answers)
    assert worst <= 5.0
    record("F06", "S", RUNS, seeds=f"0..{RUNS - 1}", outage_s=60, sent=sent, lost=0, view_complete_s=round(worst, 3))


def test_f14_power_cuts_of_coordinator_and_nodes_lose_nothing_acknowledged() -> None:
    """The storm with power cuts alone, among changes of documents: the judge compares what was acknowledged."""
    kinds = tuple(kind for kind in KINDS if kind.name in {"node-power", "coordinator-power", "documents"})
    cuts = acknowledged = 0
    for seed in range(POWER_SEEDS):
        outcome = play(seed, Scenario("power", kinds=kinds))
        assert outcome.violations == (), f"seed {seed} of power cuts alone"
        cuts += outcome.struck.get("fault.power", 0)
        acknowledged += sum(event.kind == "store.acked" for event in outcome.events)
    assert cuts > POWER_SEEDS, "the power was hardly ever cut"
    record("F14", "S", POWER_SEEDS, cuts=cuts, writes_acknowledged=acknowledged, lost=0)
