"""One run of regions that negotiate: a workload that does not fit locally is delegated, with faults at every step.

A seed draws two or three regions and their resources, one or two replicas of their federation, the workloads of each
region, and which faults strike when. Checkers watch safety meanwhile. When the faults end, everything must come to
rest: each workload is served, locally or under one agreement that both sides know, and nothing is held or half done.
Then the workloads are deleted, and nothing may be left.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from shoal.simulator.checkers.federation import make_checkers
from shoal.simulator.checkers.region import find_violations
from shoal.simulator.parts.cluster import GIB
from shoal.simulator.parts.federation import SimFederation
from shoal.simulator.parts.hardware import chip
from shoal.simulator.parts.region_engine import RegionResources
from shoal.simulator.scenarios.federation_faults import FederationFaultSchedule
from shoal.simulator.scenarios.region_run import RunOutcome, model_digest, model_profile, run_world
from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import SimWorld
from shoal.types.units import PerSecond, Seconds
from shoal.types.workload import (
    DelegationMode,
    DelegationRule,
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
LATENCY_ONLY: Final[Weights] = {"latency": 1.0}
ONE_REPLICA_BYTES: Final = 200 << 20
TEXT: Final = WorkloadKey("shop", "text")
QUIESCENT_TIMEOUT_S: Final = 150.0
"""Virtual seconds from the last fault until all is quiescent: two leases, a back-off after many attempts, and time to
load."""
START_TIMEOUT_S: Final = 30.0
QUIESCENT_S: Final = 1.0
POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class NegotiationDraw:
    """What the seed draws."""

    resources: tuple[RegionResources, ...]
    replicas: int
    intents: Mapping[str, tuple[Intent, ...]]
    # True: every workload fits in some region.
    is_placeable: bool


NegotiationBody = Callable[["FederationRun"], Coroutine[Any, Any, None]]


def make_intent(
    key: WorkloadKey,
    latency_s: float | None,
    *,
    mode: DelegationMode = DelegationMode.WHEN_INFEASIBLE,
    relax_s: float | None = None,
    margin: float = 0.0,
    weights: Weights = LATENCY_ONLY,
) -> Intent:
    """One replica of simulated model 0 with a p95 of at most `latency_s` seconds; None: no bound."""
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
        models=(ModelRef("text.onnx", model_digest(0), ""),),
        require=require,
        limits=Limits(),
        weights=weights,
        relax=relax,
        traffic=(Traffic("", PerSecond(2.0), PerSecond(4.0)),),
        partition=PartitionRule(),
        priority=100,
        shared_worker=False,
        delegation=DelegationRule(mode=mode, margin=margin),
    )


def make_resources(
    name: str, flops: float, *, memory: int = GIB, nodes: int = 1, price: float = 1.0
) -> RegionResources:
    chips = {f"edge-{number}": chip("cpu0", flops, memory) for number in range(nodes)}
    return RegionResources(name, name, chips, dict.fromkeys(chips, price))


def draw_run(rng: Rng) -> NegotiationDraw:
    """Draw the regions and their workloads.

    The local region needs 1 s per inference, the others 10 or 40 ms. The workload asks for 100 ms, or for 20 ms
    relaxable to 250 ms. By chance two regions solicit the third, there is room for only one of two workloads, or the
    local region would do but is slow.
    """
    counter, hopeless = rng.happens(0.2), rng.happens(0.05)
    others = (AWAY, FAR)[: rng.randint(1, 2)]
    both = len(others) == 2 and rng.happens(0.3)
    crowded = rng.happens(0.15)
    better = rng.happens(0.15)
    speed = 1e9 if hopeless else 2.5e10 if counter else 1e11
    estates = [make_resources(HOME, 1e9)]
    for name in others:
        flops = 1e9 if both and name == AWAY else speed * rng.uniform(1.0, 1.5)
        memory = ONE_REPLICA_BYTES if crowded else GIB
        estates.append(make_resources(name, flops, memory=memory, price=rng.uniform(0.5, 2.0)))
    mode = DelegationMode.WHEN_BETTER if better else DelegationMode.WHEN_INFEASIBLE
    latency_s = None if better else 0.02 if counter else 0.1
    text = make_intent(TEXT, latency_s, mode=mode, relax_s=0.25 if counter and not better else None, margin=0.2)
    wanted: dict[str, tuple[Intent, ...]] = {HOME: (text,)}
    if rng.happens(0.3):
        wanted[HOME] += (make_intent(WorkloadKey("shop", "faces"), 0.25),)
    if both:
        wanted[AWAY] = (make_intent(WorkloadKey("lab", "speech"), 0.25),)
    return NegotiationDraw(tuple(estates), rng.randint(1, 2), wanted, is_placeable=not (hopeless or crowded))


PROFILES: Final = {model_digest(0): model_profile(model_digest(0), 1e9, 20 << 20)}


def run_seed(seed: int) -> RunOutcome:
    """Execute the whole run. The same seed and code give the same record, byte for byte."""
    return run_federation(seed, draw_run, negotiate)


def run_federation(seed: int, draw: Callable[[Rng], NegotiationDraw], scenario: NegotiationBody) -> RunOutcome:
    stages: list[FederationRun] = []

    async def run_scenario(world: SimWorld) -> None:
        what = draw(world.rng.stream("draw"))
        stages.append(FederationRun(SimFederation(world, what.resources, PROFILES, what.replicas), what))
        try:
            await scenario(stages[0])
        finally:
            stages[0].federation.end()

    run_world(seed, run_scenario)
    return stages[0].outcome()


class FederationRun:
    """The regions of one run, and what a scenario needs to know about them."""

    def __init__(self, federation: SimFederation, draw: NegotiationDraw) -> None:
        self.federation = federation
        self.world = federation.world
        self.draw = draw
        self.rng = self.world.rng.stream("scenario")
        self.kinds: tuple[str, ...] = ()
        self.quiescent_after_s = float("nan")

    async def wait_quiescent(self, missing: Callable[[], list[str]], within_s: float, when: str) -> float:
        """I12: return the virtual seconds until nothing has been missing for a while; whatever still is at the limit
        fails the run."""
        began = since = self.world.now()
        while self.world.now() < since + QUIESCENT_S:
            if found := missing():
                if self.world.now() >= began + within_s:
                    self.world.fail(f"not at rest within {within_s:.0f} s {when}: {'; '.join(found)}")
                    await asyncio.get_running_loop().create_future()  # the run ends here
                since = self.world.now() + POLL_S
            await asyncio.sleep(POLL_S)
        return since - began

    def outcome(self) -> RunOutcome:
        world = self.world
        events = world.history.events
        struck = Counter(event.kind for event in events if event.kind.startswith("fault."))
        said = Counter(event.facts["what"].lower() for event in events if event.kind == "said")
        return RunOutcome(
            seed=world.rng.seed,
            scenario=NAME,
            violations=(*world.failures, *find_violations(events, make_checkers())),
            virtual_s=world.now(),
            converged_s=self.quiescent_after_s,
            digest=world.history.digest(),
            kinds=self.kinds,
            fault_counts=dict(sorted(struck.items())),
            counts=dict(sorted(said.items())),
            events=tuple(events),
            cause=world.first_failure,
        )


async def negotiate(stage: FederationRun) -> None:
    """Safety under faults, then quiescence, then deletion without remains."""
    federation, draw = stage.federation, stage.draw
    await federation.start()
    await stage.wait_quiescent(
        lambda: [] if federation.is_fully_listed() else ["somebody is not listed"], START_TIMEOUT_S, "coming up"
    )
    for region, intents in draw.intents.items():
        federation.sites[region].set_intents(intents)
    trouble = FederationFaultSchedule(federation)
    stage.kinds = trouble.kinds
    stage.world.record("storm.begins", kinds=stage.kinds)
    await trouble.run(stage.rng.uniform(1.0, 12.0))
    trouble.clear()
    stage.world.record("storm.ends")
    stage.quiescent_after_s = await stage.wait_quiescent(
        lambda: federation.missing(served=draw.is_placeable), QUIESCENT_TIMEOUT_S, "after the storm"
    )
    for site in federation.sites.values():
        site.set_intents(())
    await stage.wait_quiescent(
        lambda: federation.missing(served=False), QUIESCENT_TIMEOUT_S, "after all was taken back"
    )
    federation.read_ledgers()
    stage.world.record("run.ends")
