"""One run: a region comes up, a storm blows over it (safety), the storm ends and it must converge (liveness).

What a seed draws: the size of the region, its models and workloads, and through `faults` what strikes. The outcome
carries every violation that the judge, the invariants or the world itself found.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.simulator.chance import Chance
from shoal.simulator.cluster import GIB, Cluster, Spec
from shoal.simulator.faults import KINDS, Kind, Storm
from shoal.simulator.judge import Rule, judge, rules
from shoal.simulator.loop import Deadlock, Livelock, VirtualLoop, run
from shoal.simulator.machine import Behaviour, Chip, chip
from shoal.simulator.world import Event, World
from shoal.types.profile import ModelProfile, OperatorCost, TensorSpec
from shoal.types.units import Bytes

START_S = 60.0
CONVERGE_S = 150.0
"""Virtual seconds after the last fault: the longest back-off of an assignment (60 s) twice, and room to load."""
LOOK_S = 2.5
"""Nothing is missing for so long: the region has looked at everything meanwhile."""
STEADY_S = 3.0
"""Once converged nothing may start, stop or be decided again for so long."""


Story = Callable[["Stage"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """storm_s: bounds of the storm's length. mqtt, datagrams: how often the links go over a broker, and else how often
    they are the kind that loses and reorders."""

    name: str
    kinds: tuple[Kind, ...] = KINDS
    storm_s: tuple[float, float] = (8.0, 25.0)
    datagrams: float = 0.25
    mqtt: float = 0.3
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
    return perform(seed, scenario.name, partial(region, scenario=scenario), partial(_storm, scenario=scenario))


def perform(seed: int, name: str, spec: Callable[[Chance], Spec], story: Story) -> Outcome:
    """A region as `spec` draws it, and a story told with it."""
    runs: list[Stage] = []

    async def told(world: World) -> None:
        runs.append(Stage(world, Cluster(world, spec(world.chance.stream("region")))))
        try:
            await story(runs[0])
        finally:
            runs[0].cluster.end()

    live(seed, told)
    return runs[0].outcome(name)


def live(seed: int, story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Tells `story` in a world of its own, to its end or to the first failure."""
    gc.disable()  # when cycles are collected must not depend on what ran before
    worlds: list[World] = []

    async def main(loop: VirtualLoop) -> None:
        worlds.append(World(loop, seed))
        telling = asyncio.ensure_future(story(worlds[0]))
        failing = asyncio.ensure_future(worlds[0].failed.wait())
        try:
            await asyncio.wait((telling, failing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failing.cancel()
            if not telling.done():
                telling.cancel()
                await asyncio.wait((telling,))
        if not telling.cancelled():
            telling.result()

    try:
        run(main)
    except (Deadlock, Livelock) as stuck:
        worlds[0].fail(str(stuck), stuck)
    finally:
        gc.enable()


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
    sleep = chance.stream("sleep")  # of its own: it shifts no other draw
    for number in range(chance.whole(*scenario.agents)):
        wake_s = sleep.between(0.2, 5.0) if sleep.happens(0.5) else None
        chips = tuple(
            chip(f"cpu{index}", chance.between(1e10, 1e12), 8 * GIB, wake_s) for index in range(chance.whole(1, 2))
        )
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
        mqtt=chance.stream("mqtt").happens(scenario.mqtt),
        sleep_after_s=sleep.between(1.0, 8.0) if sleep.happens(0.3) else None,
    )


class Stage:
    """One run's region, and what a story needs to know of it."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self.world = world
        self.cluster = cluster
        self.chance = world.chance.stream("scenario")
        self.kinds: tuple[str, ...] = ()
        self.converged_s = float("nan")
        self.rules: Callable[[], tuple[Rule, ...]] = rules
        """By which its record is judged."""

    def outcome(self, name: str) -> Outcome:
        history = self.world.history
        struck = Counter(event.kind for event in history.events if event.kind.startswith("fault."))
        return Outcome(
            seed=self.world.chance.seed,
            scenario=name,
            violations=(*self.world.failures, *judge(history.events, self.rules())),
            virtual_s=self.world.now(),
            converged_s=self.converged_s,
            digest=history.digest(),
            kinds=self.kinds,
            struck=dict(sorted(struck.items())),
            counts=dict(sorted(self.cluster.operators.counts.items())),
            events=tuple(history.events),
            cause=self.world.first_failure,
        )

    async def converges(self, within_s: float, when: str) -> float:
        """I12: virtual seconds until nothing is missing, nor any move about to begin while it shall be at rest; what
        still is, is the violation."""
        began = since = self.world.now()
        while self.world.now() < since + LOOK_S:
            if missing := await self.cluster.missing(LOOK_S + STEADY_S):
                if self.world.now() >= began + within_s:
                    self.world.fail(f"not converged within {within_s:.0f} s {when}: {'; '.join(missing)}")
                    await asyncio.get_running_loop().create_future()  # the story ends here
                since = self.world.now() + 0.5
            await asyncio.sleep(0.5)
        return since - began

    async def stays(self, seconds: float) -> None:
        """Converged is at rest: nothing starts, nothing is decided again."""
        before = self.cluster.settled()
        await asyncio.sleep(seconds)
        if (after := self.cluster.settled()) != before:
            self.world.fail(f"converged, and yet not at rest: {before} became {after}")


async def _storm(stage: Stage, scenario: Scenario) -> None:
    """Safety, then liveness."""
    cluster, operators = stage.cluster, stage.cluster.operators
    storm = Storm(cluster, scenario.kinds)
    stage.kinds = tuple(kind.name for kind in storm.kinds)
    await cluster.start()
    await operators.set_up(stage.chance)
    await stage.converges(START_S, "coming up")
    traffic = asyncio.ensure_future(operators.send_requests())
    stage.world.record("storm.begins", kinds=stage.kinds)
    await storm.blow(stage.chance.between(*scenario.storm_s))
    await cluster.calm()
    stage.world.record("storm.ends")
    stage.converged_s = await stage.converges(CONVERGE_S, "after the storm")
    await stage.stays(STEADY_S)
    traffic.cancel()
    operators.read_all()
    operators.read_memory()
    operators.read_audit()


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("storm"),
        Scenario("calm", kinds=(), datagrams=0.0, mqtt=0.5, storm_s=(1.0, 2.0)),
    )
}
