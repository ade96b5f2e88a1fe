"""A gateway and a few agents that serve one workload in virtual time, for scenarios with one fault at a time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shoal.simulator.checkers.region import find_violations
from shoal.simulator.parts.cluster import GIB, ClusterSpec, SimCluster
from shoal.simulator.parts.hardware import USUAL_W, Behaviour, chip
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.network import COORDINATOR
from shoal.simulator.parts.operators import OPERATOR_URI
from shoal.simulator.scenarios.region_run import make_checkers, model_digest, model_profile
from shoal.simulator.world.loop import VirtualLoop, run
from shoal.simulator.world.world import SimWorld
from shoal.types.codes import Code
from shoal.types.workload import WorkloadKey

GATEWAY = "gateway"
TEXT = WorkloadKey("default", "text")
LOAD_S = 0.5
GIVEN_UP = {"NODE_LOST", "NODE_SUSPECT"}

DOCUMENTS = """apiVersion: shoal/v1
kind: Policy
metadata: {{name: text}}
spec:
  require: {{availability: {{{replicas}}}{require}}}
  partition: {{{partition}}}
{policy}---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: text}}
spec:
  model: {{source: "{model}"}}
  policy: text
"""


@dataclass
class Scene:
    """The region, and clients who ask for its workload. partition, require, policy, standby: how its policy says so,
    more that it requires, and more lines of it."""

    world: SimWorld
    cluster: SimCluster
    partition: str = "serve: forever"
    require: str = ""
    policy: str = ""
    standby: str = "none"
    answers: list[tuple[float, float, Code | None]] = field(default_factory=list)
    """(sent, ended, the code; None: answered) of every request."""
    codes: set[str] = field(default_factory=set)
    """Of the region's events, once the load has ended."""

    @property
    def replicas(self) -> list[SimMachine]:
        return [machine for machine in self.cluster.machines if machine.workers]

    async def up(self, replicas: int) -> None:
        model = model_digest(0)
        self.cluster.operators.quota = replicas + (self.standby != "none")
        await self.cluster.start()
        await self.until(lambda: self.cluster.region is not None, 10.0, "a coordinator")
        assert self.cluster.region is not None
        await self.cluster.region.models.push(
            "", self.cluster.spec.profiles[model].size_bytes, model, _no_bytes(), actor=OPERATOR_URI
        )
        await self.apply(replicas)
        self.world.record("operator.wanted", workloads=(str(TEXT),))
        await self.wait_whole(60.0)

    async def apply(self, replicas: int) -> None:
        """The workload with so many replicas, each on a node of its own."""
        assert self.cluster.region is not None
        spread = f"replicas: {replicas}, spread: node" if replicas > 1 else "replicas: 1"
        spread += f", standby: {self.standby}" if self.standby != "none" else ""
        text = DOCUMENTS.format(
            model=model_digest(0), replicas=spread, partition=self.partition, require=self.require, policy=self.policy
        )
        applied = await self.cluster.region.documents.apply([("text.yaml", text)], {}, "", OPERATOR_URI)
        assert not applied.plan_result.problems

    async def until(self, condition: Callable[[], object], within_s: float, what: str) -> None:
        deadline = self.world.now() + within_s
        while not condition():
            assert self.world.now() < deadline, f"not within {within_s} virtual s: {what}"
            await asyncio.sleep(0.01)

    async def wait_whole(self, within_s: float) -> float:
        """Virtual seconds until nothing is missing."""
        began = self.world.now()
        while missing := await self.cluster.convergence.missing():
            assert self.world.now() < began + within_s, f"not whole within {within_s} virtual s: {missing}"
            await asyncio.sleep(0.05)
        return self.world.now() - began

    @asynccontextmanager
    async def load(self, every_s: float = 0.01, front: str = GATEWAY) -> AsyncIterator[None]:
        """Clients at one front before, while and after the block; all that they sent is waited for."""
        asking = asyncio.get_running_loop().create_task(self._ask(every_s, front))
        await self.until(lambda: len(self.answers) > 50, 30.0, "answers before the fault")
        yield
        count = len(self.answers)
        await self.until(lambda: len(self.answers) > count + 50, 30.0, "answers after the fault")
        asking.cancel()
        await asking
        self.codes = await self.event_codes()

    async def _ask(self, every_s: float, front: str) -> None:
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    group.create_task(self._one(front))
                    await asyncio.sleep(every_s)
            except asyncio.CancelledError:
                return

    async def _one(self, front: str) -> None:
        sent = self.world.now()
        code = await self.cluster.operators.request(front, TEXT)
        self.answers.append((sent, self.world.now(), code))

    def ready(self, machine: SimMachine) -> bool:
        """Whether it has a replica that answers."""
        return any(machine.is_ready(name) for name in machine.workers)

    def starts(self) -> int:
        return sum(event.kind == "worker.start" for event in self.world.history.events)

    def last(self, kind: str) -> float:
        """When that last happened."""
        return max((event.at for event in self.world.history.events if event.kind == kind), default=-1.0)

    def seconds_of_last_load(self) -> float:
        return self.last("worker.ready") - self.last("worker.start")

    @property
    def failed_answers(self) -> list[tuple[float, float, Code | None]]:
        return [answer for answer in self.answers if answer[2] is not None]

    @property
    def lost_count(self) -> int:
        return len(self.failed_answers)

    async def event_codes(self) -> set[str]:
        """Codes of the region's events."""
        assert self.cluster.region is not None
        return {str(event.code) for event in await self.cluster.region.events.events_after(0, 1000)}


def cut(scene: Scene, source: str, target: str, *, on: bool = True) -> None:
    """Cut the path in one direction; `on=False` heals it."""
    scene.cluster.network.path(source, target).cut = on
    if not on:
        scene.cluster.network.retransmit_all()


def isolate(scene: Scene, name: str, *, on: bool = True) -> None:
    """Cut every path from and to machine `name`; `on=False` heals them."""
    for other in (COORDINATOR, *(machine.name for machine in scene.cluster.machines if machine.name != name)):
        cut(scene, name, other, on=on)
        cut(scene, other, name, on=on)


Scenario = Callable[[Scene], Awaitable[None]]


def run_scenario(
    seed: int,
    replicas: int,
    scenario: Scenario,
    *,
    agents: int = 2,
    datagrams: bool = False,
    mqtt: bool = False,
    partition: str = "serve: forever",
    skews: tuple[float, ...] = (),
    watts: Mapping[str, float] | None = None,
    labels: Mapping[str, Mapping[str, str]] | None = None,
    require: str = "",
    policy: str = "",
    standby: str = "none",
) -> Scene:
    """Run the scenario in a region of its own. A violation that the checkers or the world found fails the test.

    skews: seconds by which the agents' wall clocks are ahead from the start. watts: power of agents' processors at
    work, where it is not the default."""
    scenes: list[Scene] = []

    async def whole(loop: VirtualLoop) -> None:
        world = SimWorld(loop, seed)
        names = [f"edge-{number}" for number in range(agents)]
        chips = {name: (chip("cpu0", 1e11, 8 * GIB, active_w=(watts or {}).get(name, USUAL_W)),) for name in names}
        cluster = SimCluster(
            world,
            ClusterSpec(
                nodes={GATEWAY: (), **chips},
                labels=labels or {},
                profiles={model_digest(0): model_profile(model_digest(0), 1e8, 2**20)},
                behaviours={model_digest(0): Behaviour(load_s=LOAD_S, serve_s=0.02)},
                datagrams=datagrams,
                mqtt=mqtt,
            ),
        )
        agents_first = [machine for machine in cluster.machines if machine.chips]
        for machine, skew in zip(agents_first, skews, strict=False):
            machine.clock.skew = skew
        scenes.append(Scene(world, cluster, partition, require, policy, standby))
        try:
            await scenes[0].up(replicas)
            await scenario(scenes[0])
        finally:
            cluster.end()

    run(whole)
    (scene,) = scenes
    assert scene.world.failures == [], f"seed {seed}"
    assert find_violations(scene.world.history.events, make_checkers()) == [], f"seed {seed}"
    return scene


async def _no_bytes() -> AsyncIterator[bytes]:
    return
    yield b""
