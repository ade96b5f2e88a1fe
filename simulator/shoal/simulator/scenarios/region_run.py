"""One run: a region starts, random faults strike it (safety), the faults end and it must converge (liveness).

A seed draws the size of the region, its models and workloads and, through `region_faults`, the faults. The outcome
holds every violation that the checkers, the invariants or the world itself found.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.agent.core.routing import AdmissionLimits
from shoal.simulator.checkers import region, requests
from shoal.simulator.checkers.region import Checker, find_violations
from shoal.simulator.parts.cluster import GIB, ClusterSpec, SimCluster
from shoal.simulator.parts.front import TIMEOUT_S
from shoal.simulator.parts.hardware import USUAL_RUNNERS, Behaviour, Chip, chip
from shoal.simulator.parts.machine import USUAL_LIMITS
from shoal.simulator.parts.operators import REQUEST_INTERVAL_S
from shoal.simulator.scenarios.region_faults import REGION_FAULTS, RegionFault, RegionFaultSchedule
from shoal.simulator.scenarios.request_faults import REQUEST_FAULTS, use_every_replica
from shoal.simulator.world.loop import Deadlock, Livelock, VirtualLoop, run
from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import SimEvent, SimWorld
from shoal.types.profile import ModelProfile, OperatorCost, TensorSpec
from shoal.types.units import Bytes, Seconds

START_TIMEOUT_S = 60.0
CONVERGE_TIMEOUT_S = 150.0
"""Virtual seconds after the last fault: twice the longest back-off of an assignment (60 s), and time to load."""
NOTHING_MISSING_S = 2.5
"""For how long nothing may be missing: the region has stepped over everything meanwhile."""
QUIESCENT_S = 3.0
"""For how long nothing may start, stop or be decided once the region has converged."""

QUEUES_S = 1.5
"""Mean seconds between two moves that may wait."""
QUEUE_S = 15.0
"""Virtual seconds after the last fault in which moves that wait may begin; those that still do are taken back."""
MANY_REQUESTS_S = 0.03
"""Mean seconds between two requests, where a run is about requests."""
CLIENT_TIMEOUTS_S = (Seconds(0.3), Seconds(2.0), TIMEOUT_S)
SMALL_LIMITS = AdmissionLimits(per_replica=8, per_way=16, per_tenant=64)
RegionBody = Callable[["RegionRun"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class RegionScenario:
    """Bounds and chances from which a seed draws a run with random faults."""

    # As `--scenario` names it.
    name: str
    # Kinds of faults to draw from; empty: no faults.
    faults: tuple[RegionFault, ...] = REGION_FAULTS
    # Bounds of how long faults strike, in seconds.
    faults_s: tuple[float, float] = (8.0, 25.0)
    # Chance that links lose and reorder messages; without effect on a run over a broker.
    datagrams: float = 0.25
    # Chance that the agents' links go over a broker.
    mqtt: float = 0.3
    # Chance that one model crashes every worker that loads it.
    poison: float = 0.25
    # Bounds of the number of agents.
    agents: tuple[int, int] = (2, 5)
    # True: it is about requests: many of them with deadlines, workers that run one at a time, fronts with little room;
    # at the end every replica must be used.
    requests: bool = False
    # Chance that a workload's replicas are scaled to zero.
    to_zero: float = 0.0
    # Mean seconds between two clients' requests.
    request_every_s: float = REQUEST_INTERVAL_S
    # True: operators ask for moves that may wait in the queue, throughout.
    queues: bool = False


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of one run."""

    # What the run was drawn from.
    seed: int
    # Its name.
    scenario: str
    # What the checkers, the invariants or the world found; empty: the run passed.
    violations: tuple[str, ...]
    # Virtual seconds of the whole run.
    virtual_s: float
    # Virtual seconds from the end of the faults to convergence; NaN if it did not get there.
    converged_s: float
    # Of the whole record; the same for the same seed and code.
    digest: str
    # Kinds of faults that the run could inject.
    kinds: tuple[str, ...]
    # Faults that were injected, by event kind.
    fault_counts: Mapping[str, int]
    # Clients' requests by outcome: `ok` or a code.
    counts: Mapping[str, int]
    # The record; empty where many runs are executed.
    events: tuple[SimEvent, ...] = field(compare=False, repr=False)
    # The first exception that the code under test did not handle; None: there was none.
    cause: BaseException | None = field(compare=False, repr=False)


def run_seed(seed: int, scenario: RegionScenario) -> RunOutcome:
    """Execute the whole run. The same seed and code give the same record, byte for byte."""
    return run_region(
        seed, scenario.name, partial(draw_spec, scenario=scenario), partial(_run_random_faults, scenario=scenario)
    )


def run_region(seed: int, name: str, spec: Callable[[Rng], ClusterSpec], scenario: RegionBody) -> RunOutcome:
    """Execute `scenario` on a region that `spec` draws."""
    runs: list[RegionRun] = []

    async def run_scenario(world: SimWorld) -> None:
        runs.append(RegionRun(world, SimCluster(world, spec(world.rng.stream("region")))))
        try:
            await scenario(runs[0])
        finally:
            runs[0].cluster.end()

    run_world(seed, run_scenario)
    return runs[0].outcome(name)


def run_world(seed: int, scenario: Callable[[SimWorld], Coroutine[Any, Any, None]]) -> None:
    """Execute `scenario` in a world of its own, to its end or to the first failure."""
    gc.disable()  # when cycles are collected must not depend on what ran before
    worlds: list[SimWorld] = []

    async def main(loop: VirtualLoop) -> None:
        worlds.append(SimWorld(loop, seed))
        telling = asyncio.ensure_future(scenario(worlds[0]))
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


def model_digest(index: int) -> str:
    """The digest of the simulated model `index`."""
    return f"sha256:{index:064x}"


def model_profile(name: str, flops: float, size: int) -> ModelProfile:
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


def draw_spec(rng: Rng, scenario: RegionScenario) -> ClusterSpec:
    """Draw the region of this run: a gateway, some agents with spare room, a few models."""
    nodes: dict[str, tuple[Chip, ...]] = {"gateway": ()}
    runners = 1 if scenario.requests else USUAL_RUNNERS
    sleep = rng.stream("sleep")  # its own stream: it leaves other draws unchanged
    for number in range(rng.randint(*scenario.agents)):
        wake_s = sleep.uniform(0.2, 5.0) if sleep.happens(0.5) else None
        chips = tuple(
            chip(f"cpu{index}", rng.uniform(1e10, 1e12), 8 * GIB, wake_s, runners=runners)
            for index in range(rng.randint(1, 2))
        )
        nodes[f"edge-{number}"] = chips
    profiles, behaviours = {}, {}
    for index in range(4):
        name = model_digest(index)
        profiles[name] = model_profile(name, rng.uniform(1e8, 1e9), rng.randint(1, 200) << 20)
        behaviours[name] = Behaviour(rng.uniform(0.05, 3.0), rng.uniform(0.005, 0.3))
    if rng.happens(scenario.poison):
        behaviours[model_digest(3)] = Behaviour(load_s=0.2, crash_at_load=1.0)
    return ClusterSpec(
        nodes=nodes,
        labels={name: {"site": rng.choice(["shop", "lab"])} for name in nodes},
        profiles=profiles,
        behaviours=behaviours,
        datagrams=rng.happens(scenario.datagrams),
        mqtt=rng.stream("mqtt").happens(scenario.mqtt),
        sleep_after_s=sleep.uniform(1.0, 8.0) if sleep.happens(0.3) else None,
        limits=SMALL_LIMITS if scenario.requests else USUAL_LIMITS,
        to_zero=scenario.to_zero,
    )


def make_checkers() -> tuple[Checker, ...]:
    """Checkers of one region's record."""
    return (*region.make_checkers(), *requests.make_checkers())


class RegionRun:
    """The region of one run, and what a scenario needs to know about it."""

    def __init__(self, world: SimWorld, cluster: SimCluster) -> None:
        self.world = world
        self.cluster = cluster
        self.rng = world.rng.stream("scenario")
        self.kinds: tuple[str, ...] = ()
        self.converged_s = float("nan")
        self.make_checkers: Callable[[], tuple[Checker, ...]] = make_checkers
        """Checkers of the run's record."""

    def outcome(self, name: str) -> RunOutcome:
        history = self.world.history
        struck = Counter(event.kind for event in history.events if event.kind.startswith("fault."))
        return RunOutcome(
            seed=self.world.rng.seed,
            scenario=name,
            violations=(*self.world.failures, *find_violations(history.events, self.make_checkers())),
            virtual_s=self.world.now(),
            converged_s=self.converged_s,
            digest=history.digest(),
            kinds=self.kinds,
            fault_counts=dict(sorted(struck.items())),
            counts=dict(sorted(self.cluster.operators.counts.items())),
            events=tuple(history.events),
            cause=self.world.first_failure,
        )

    async def wait_converged(self, within_s: float, when: str) -> float:
        """I12: return the virtual seconds until nothing is missing and no migration is about to begin during the
        quiescent time. Whatever still is missing at the limit fails the run."""
        began = since = self.world.now()
        while self.world.now() < since + NOTHING_MISSING_S:
            if missing := await self.cluster.convergence.missing(NOTHING_MISSING_S + QUIESCENT_S):
                if self.world.now() >= began + within_s:
                    self.world.fail(f"not converged within {within_s:.0f} s {when}: {'; '.join(missing)}")
                    await asyncio.get_running_loop().create_future()  # the run ends here
                since = self.world.now() + 0.5
            await asyncio.sleep(0.5)
        return since - began

    async def check_quiescent(self, seconds: float) -> None:
        """A converged region is quiescent: nothing starts and nothing is decided again."""
        before = self.cluster.convergence.quiescent_state()
        await asyncio.sleep(seconds)
        if (after := self.cluster.convergence.quiescent_state()) != before:
            self.world.fail(f"converged, and yet not at rest: {before} became {after}")


async def _run_random_faults(stage: RegionRun, scenario: RegionScenario) -> None:
    """Safety, then liveness."""
    cluster, operators = stage.cluster, stage.cluster.operators
    storm = RegionFaultSchedule(cluster, scenario.faults)
    stage.kinds = tuple(kind.name for kind in storm.kinds)
    await cluster.start()
    await operators.set_up(stage.rng)
    await stage.wait_converged(START_TIMEOUT_S, "coming up")
    traffic = asyncio.ensure_future(
        operators.send_requests(scenario.request_every_s, CLIENT_TIMEOUTS_S if scenario.requests else (TIMEOUT_S,))
    )
    stage.world.record("storm.begins", kinds=stage.kinds)
    asking = asyncio.ensure_future(operators.queue_moves(QUEUES_S)) if scenario.queues else None
    await storm.run(stage.rng.uniform(*scenario.faults_s))
    if asking is not None:
        asking.cancel()
    if scenario.requests:
        traffic.cancel()
    await cluster.clear_faults()
    stage.world.record("storm.ends")
    if scenario.queues:
        await asyncio.sleep(QUEUE_S)
        await operators.empty_queue()
    stage.converged_s = await stage.wait_converged(CONVERGE_TIMEOUT_S, "after the storm")
    await stage.check_quiescent(QUIESCENT_S)
    traffic.cancel()
    if scenario.requests:
        await use_every_replica(cluster)
    operators.read_all()
    operators.read_memory()
    operators.read_audit()


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        RegionScenario("storm"),
        RegionScenario("idle", to_zero=0.7, request_every_s=2.0),
        RegionScenario("queue", queues=True),
        RegionScenario("calm", faults=(), datagrams=0.0, mqtt=0.5, faults_s=(1.0, 2.0)),
        RegionScenario(
            "requests",
            faults=REQUEST_FAULTS,
            datagrams=0.0,
            mqtt=0.0,
            faults_s=(6.0, 14.0),
            poison=0.0,
            requests=True,
            request_every_s=MANY_REQUESTS_S,
        ),
    )
}
