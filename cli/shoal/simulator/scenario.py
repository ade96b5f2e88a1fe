"""One run: a region comes up, a storm blows over it (safety), the storm ends and it must converge (liveness).

What a seed draws: the size of the region, its models and workloads, and through `faults` what strikes. The outcome
carries every violation that the judge, the invariants or the world itself found.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.simulator.chance import Chance
from shoal.simulator.cluster import GIB, Cluster, Spec
from shoal.simulator.faults import KINDS, Kind, Storm
from shoal.simulator.judge import judge
from shoal.simulator.loop import Deadlock, Livelock, VirtualLoop, run
from shoal.simulator.machine import Behaviour, Chip, chip
from shoal.simulator.world import Event, World
from shoal.types.profile import ModelProfile, OperatorCost, TensorSpec
from shoal.types.units import Bytes

START_S = 60.0
CONVERGE_S = 150.0
"""Virtual seconds after the last fault: the longest back-off of an assignment (60 s) twice, and room to load."""
STEADY_S = 4.0
"""Once converged nothing may start, stop or be decided again for so long."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """storm_s: bounds of the storm's length. datagrams: whether links may be the kind that loses and reorders."""

    name: str
    kinds: tuple[Kind, ...] = KINDS
    storm_s: tuple[float, float] = (8.0, 25.0)
    datagrams: float = 0.25
    poison: float = 0.25
    agents: tuple[int, int] = (2, 5)


@dataclass(frozen=True, slots=True)
class Outcome:
    """converged_s: virtual seconds from the storm's end. digest: of the whole record."""

    seed: int
    scenario: str
    violations: tuple[str, ...]
    virtual_s: float
    converged_s: float
    digest: str
    kinds: tuple[str, ...]
    struck: Mapping[str, int]
    counts: Mapping[str, int]
    events: tuple[Event, ...] = field(compare=False, repr=False)
    """The record; empty where many runs are played."""
    cause: BaseException | None = field(compare=False, repr=False)
    """The first exception that the code under test did not handle."""


def play(seed: int, scenario: Scenario) -> Outcome:
    """The whole run; the same seed and code give the same record, byte for byte."""
    gc.disable()  # when cycles are collected must not depend on what ran before
    runs: list[_Run] = []

    async def story(loop: VirtualLoop) -> None:
        runs.append(_Run(loop, seed, scenario))
        await runs[0].story()

    try:
        run(story)
    except (Deadlock, Livelock) as stuck:
        runs[0].world.fail(str(stuck), stuck)
    finally:
        gc.enable()
    return runs[0].outcome()


def digest(index: int) -> str:
    """The digest of the simulated model `index`."""
    return f"sha256:{index:064x}"


def profile(name: str, flops: float, size: int) -> ModelProfile:
    spec = TensorSpec("x", "FP32", (1, 4))
    return ModelProfile(
        digest=name,
        size_bytes=Bytes(size),
        ir_version=8,
        opset=17,
        domains={"": 17},
        producer="simulator",
        precision="fp32",
        inputs=(spec,),
        outputs=(spec,),
        reference_shapes={"x": (1, 4)},
        costs=(OperatorCost("MatMul", 4, flops, flops / 10),),
        weight_bytes=Bytes(size),
        activation_bytes=Bytes(size // 4),
        confident=True,
        metadata={},
    )


def region(chance: Chance, scenario: Scenario) -> Spec:
    """Who is in this run's region: a gateway, some agents with room to spare, a few models."""
    nodes: dict[str, tuple[Chip, ...]] = {"gateway": ()}
    for number in range(chance.whole(*scenario.agents)):
        chips = tuple(chip(f"cpu{index}", chance.between(1e10, 1e12), 8 * GIB) for index in range(chance.whole(1, 2)))
        nodes[f"edge-{number}"] = chips
    profiles, behaviours = {}, {}
    for index in range(4):
        name = digest(index)
        profiles[name] = profile(name, chance.between(1e8, 1e9), chance.whole(1, 200) << 20)
        behaviours[name] = Behaviour(chance.between(0.05, 3.0), chance.between(0.005, 0.3))
    if chance.happens(scenario.poison):
        behaviours[digest(3)] = Behaviour(load_s=0.2, crash_at_load=1.0)
    return Spec(
        nodes=nodes,
        labels={name: {"site": chance.pick(["shop", "lab"])} for name in nodes},
        profiles=profiles,
        behaviours=behaviours,
        datagrams=chance.happens(scenario.datagrams),
    )


class _Run:
    def __init__(self, loop: VirtualLoop, seed: int, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(loop, seed)
        self.chance = self.world.chance.stream("scenario")
        self.cluster = Cluster(self.world, region(self.chance, scenario))
        self.storm = Storm(self.cluster, scenario.kinds)
        self.converged_s = float("nan")

    def outcome(self) -> Outcome:
        history = self.world.history
        struck = Counter(event.kind for event in history.events if event.kind.startswith("fault."))
        return Outcome(
            seed=self.world.chance.seed,
            scenario=self.scenario.name,
            violations=(*self.world.failures, *judge(history.events)),
            virtual_s=self.world.now(),
            converged_s=self.converged_s,
            digest=history.digest(),
            kinds=tuple(kind.name for kind in self.storm.kinds),
            struck=dict(sorted(struck.items())),
            counts=dict(sorted(self.cluster.operators.counts.items())),
            events=tuple(history.events),
            cause=self.world.first_failure,
        )

    async def story(self) -> None:
        """Safety, then liveness."""
        try:
            await self._play()
        finally:
            self.cluster.end()

    async def _play(self) -> None:
        cluster, operators = self.cluster, self.cluster.operators
        await cluster.start()
        await operators.set_up(self.chance)
        if not await self._converges(START_S, "coming up"):
            return
        traffic = asyncio.get_running_loop().create_task(operators.send_requests(), name="traffic")
        self.world.record("storm.begins", kinds=tuple(kind.name for kind in self.storm.kinds))
        await self.storm.blow(self.chance.between(*self.scenario.storm_s))
        await cluster.calm()
        self.world.record("storm.ends")
        ended = self.world.now()
        if await self._converges(CONVERGE_S, "after the storm"):
            self.converged_s = self.world.now() - ended
            await self._stays()
        traffic.cancel()
        operators.read_all()

    async def _converges(self, within_s: float, when: str) -> bool:
        """I12: waits until nothing is missing; what still is, is the violation."""
        deadline = self.world.now() + within_s
        while missing := await self.cluster.missing():
            if self.world.now() >= deadline:
                self.world.fail(f"not converged within {within_s:.0f} s {when}: {'; '.join(missing)}")
                return False
            await asyncio.sleep(0.5)
        return True

    async def _stays(self) -> None:
        before = self.cluster.settled()
        await asyncio.sleep(STEADY_S)
        if (after := self.cluster.settled()) != before:
            self.world.fail(f"converged, and yet not at rest: {before} became {after}")


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("storm"),
        Scenario("calm", kinds=(), datagrams=0.0, storm_s=(1.0, 2.0)),
    )
}
