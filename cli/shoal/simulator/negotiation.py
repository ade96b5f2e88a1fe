"""One run of regions that trade: a workload that has no place at home finds one elsewhere, under faults at every step.

What a seed draws: two or three regions and what they have, one or two replicas of their federation, what is wanted
where, which faults strike and when. Safety is the judge's while they do; when they end, all must come to rest: what is
wanted serves, at home or under one agreement that both sides know; nothing is held, nothing is half done. Then it is
taken back, and nothing must be left.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from shoal.simulator.chance import Chance
from shoal.simulator.cluster import GIB
from shoal.simulator.home import Estate
from shoal.simulator.judge import judge
from shoal.simulator.machine import chip
from shoal.simulator.regions import Federated
from shoal.simulator.scenario import Outcome, digest, live, profile
from shoal.simulator.trade_judge import rules
from shoal.simulator.trouble import Trouble
from shoal.simulator.world import World
from shoal.types.units import PerSecond, Seconds
from shoal.types.workload import (
    Delegation,
    DelegationMode,
    Intent,
    Limits,
    ModelRef,
    PartitionRule,
    Relaxation,
    Requirements,
    Spread,
    Standby,
    Traffic,
    Weights,
    WorkloadKey,
)

NAME: Final = "negotiation"
HOME, AWAY, FAR = "north", "south", "west"
LATENCY: Final = Weights(1.0, 0.0, 0.0)
ROOM_FOR_ONE: Final = 200 << 20
TEXT: Final = WorkloadKey("shop", "text")
REST_S: Final = 150.0
"""Virtual seconds from the last fault until all is at rest: two leases, a rest after many tries, and room to load."""
START_S: Final = 30.0
STEADY_S: Final = 1.0
LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Draw:
    """What a seed is about. sure: all that is wanted has a place somewhere."""

    estates: tuple[Estate, ...]
    replicas: int
    wanted: Mapping[str, tuple[Intent, ...]]
    sure: bool


Story = Callable[["Stage"], Coroutine[Any, Any, None]]


def intent(
    key: WorkloadKey,
    latency_s: float | None,
    *,
    mode: DelegationMode = DelegationMode.WHEN_INFEASIBLE,
    relax_s: float | None = None,
    margin: float = 0.0,
    weights: Weights = LATENCY,
) -> Intent:
    """One replica of the simulated model 0, answered within `latency_s`; None: however long it takes."""
    require = Requirements(
        latency_p95_s=None if latency_s is None else Seconds(latency_s),
        latency_from_origin=True,
        where="",
        residency=(),
        precisions=(),
        replicas=1,
        spread=Spread.NONE,
        standby=Standby.NONE,
        recovery_s=None,
        measured_only=False,
        measured_within_s=None,
    )
    relax: tuple[Relaxation, ...] = ()
    if relax_s is not None:
        easier = replace(require, latency_p95_s=Seconds(relax_s))
        relax = (Relaxation(f"latency: {{p95: {relax_s * 1000:.0f}ms}}", easier, Limits()),)
    return Intent(
        key=key,
        revision=1,
        labels={},
        policy="text",
        models=(ModelRef("text.onnx", digest(0), ""),),
        require=require,
        limits=Limits(),
        weights=weights,
        relax=relax,
        traffic=(Traffic("", PerSecond(2.0), PerSecond(4.0)),),
        partition=PartitionRule(),
        priority=100,
        shared_worker=False,
        delegation=Delegation(mode=mode, margin=margin),
    )


def estate(name: str, flops: float, *, memory: int = GIB, nodes: int = 1, price: float = 1.0) -> Estate:
    chips = {f"edge-{number}": chip("cpu0", flops, memory) for number in range(nodes)}
    return Estate(name, name, chips, dict.fromkeys(chips, price))


def drawn(chance: Chance) -> Draw:
    """Homes need 1 s for an inference of a second's work, others 10 or 40 ms; asked for are 100 ms, or 20 that may
    give to 250. By chance two regions ask the third, there is room for one of two, or home would do but is slow."""
    counter, hopeless = chance.happens(0.2), chance.happens(0.05)
    others = (AWAY, FAR)[: chance.whole(1, 2)]
    both = len(others) == 2 and chance.happens(0.3)
    crowded = chance.happens(0.15)
    better = chance.happens(0.15)
    speed = 1e9 if hopeless else 2.5e10 if counter else 1e11
    estates = [estate(HOME, 1e9)]
    for name in others:
        flops = 1e9 if both and name == AWAY else speed * chance.between(1.0, 1.5)
        memory = ROOM_FOR_ONE if crowded else GIB
        estates.append(estate(name, flops, memory=memory, price=chance.between(0.5, 2.0)))
    mode = DelegationMode.WHEN_BETTER if better else DelegationMode.WHEN_INFEASIBLE
    latency_s = None if better else 0.02 if counter else 0.1
    text = intent(TEXT, latency_s, mode=mode, relax_s=0.25 if counter and not better else None, margin=0.2)
    wanted: dict[str, tuple[Intent, ...]] = {HOME: (text,)}
    if chance.happens(0.3):
        wanted[HOME] += (intent(WorkloadKey("shop", "faces"), 0.25),)
    if both:
        wanted[AWAY] = (intent(WorkloadKey("lab", "speech"), 0.25),)
    return Draw(tuple(estates), chance.whole(1, 2), wanted, sure=not (hopeless or crowded))


PROFILES: Final = {digest(0): profile(digest(0), 1e9, 20 << 20)}


def play(seed: int) -> Outcome:
    """The whole run; the same seed and code give the same record, byte for byte."""
    return perform(seed, drawn, negotiate)


def perform(seed: int, draw: Callable[[Chance], Draw], story: Story) -> Outcome:
    stages: list[Stage] = []

    async def told(world: World) -> None:
        what = draw(world.chance.stream("draw"))
        stages.append(Stage(Federated(world, what.estates, PROFILES, what.replicas), what))
        try:
            await story(stages[0])
        finally:
            stages[0].federated.end()

    live(seed, told)
    return stages[0].outcome()


class Stage:
    """One run's regions, and what a story needs to know of them."""

    def __init__(self, federated: Federated, draw: Draw) -> None:
        self.federated = federated
        self.world = federated.world
        self.draw = draw
        self.chance = self.world.chance.stream("story")
        self.kinds: tuple[str, ...] = ()
        self.rested_s = float("nan")

    async def rests(self, missing: Callable[[], list[str]], within_s: float, when: str) -> float:
        """I12: virtual seconds until nothing is missing for a while; what still is, is the violation."""
        began = since = self.world.now()
        while self.world.now() < since + STEADY_S:
            if found := missing():
                if self.world.now() >= began + within_s:
                    self.world.fail(f"not at rest within {within_s:.0f} s {when}: {'; '.join(found)}")
                    await asyncio.get_running_loop().create_future()  # the story ends here
                since = self.world.now() + LOOK_S
            await asyncio.sleep(LOOK_S)
        return since - began

    def outcome(self) -> Outcome:
        world = self.world
        events = world.history.events
        struck = Counter(event.kind for event in events if event.kind.startswith("fault."))
        said = Counter(event.facts["what"].lower() for event in events if event.kind == "said")
        return Outcome(
            seed=world.chance.seed,
            scenario=NAME,
            violations=(*world.failures, *judge(events, rules())),
            virtual_s=world.now(),
            converged_s=self.rested_s,
            digest=world.history.digest(),
            kinds=self.kinds,
            struck=dict(sorted(struck.items())),
            counts=dict(sorted(said.items())),
            events=tuple(events),
            cause=world.first_failure,
        )


async def negotiate(stage: Stage) -> None:
    """Safety while faults strike, then rest, then nothing left."""
    federated, draw = stage.federated, stage.draw
    await federated.start()
    await stage.rests(lambda: [] if federated.is_known() else ["somebody is not listed"], START_S, "coming up")
    for region, intents in draw.wanted.items():
        federated.sites[region].want(intents)
    trouble = Trouble(federated)
    stage.kinds = trouble.kinds
    stage.world.record("storm.begins", kinds=stage.kinds)
    await trouble.strike(stage.chance.between(1.0, 12.0))
    trouble.calm()
    stage.world.record("storm.ends")
    stage.rested_s = await stage.rests(lambda: federated.missing(served=draw.sure), REST_S, "after the storm")
    for site in federated.sites.values():
        site.want(())
    await stage.rests(lambda: federated.missing(served=False), REST_S, "after all was taken back")
    federated.read_ledgers()
    stage.world.record("story.ends")
