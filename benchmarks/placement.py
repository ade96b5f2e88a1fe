"""How placement scales, how well it chooses, and what fits: `shoal bench placement` `--scale`, `--quality`, `--memory`.

`--quality` (`_placement/quality.py`): 200 instances of published latencies and joules, up to 200 services on 60
devices, beside the optimum of HiGHS and the rules of other schedulers; the exit status is 1 where a goal is missed.

`--memory` (`_placement/memory.py`): 200 placements of real models into little memory, which a foreign process of a
seeded schedule shares, beside placement by count and by file size; the exit status is 1 where memory ran out under
Shoal. It needs a control group (root, or `systemd-run --user --scope -p Delegate=yes`). `--quick`: under two minutes.

`--scale`: one regional coordinator in this process, with its real controllers over a SQLite store. Its agents are only
values, which send their heartbeats on time and do at once what they are told (`_placement/agents.py`). The region
stands when it begins: two workloads a node (`_placement/standing.py`). Then, for each size:

- idle: steps of a region in which nothing happens, with all heartbeats;
- applies: one workload after the other; a decision is what the step computes, without the store;
- lost: one node falls silent, until its two replicas are placed elsewhere;
- mass: many workloads in one apply, until all are placed;
- churn: applies, deletions, lost and returning nodes and work that fits nowhere, `--churn` a second. Applies ask for
  no plan (`shoal apply --no-plan`), unless `--plans` is given.

Times of steps and decisions are processor time of the loop's thread and of the one where steps decide, so that a busy
machine changes them little.
`durable_per_s` are placements of `mass` a second by the clock, from the apply to the last commit. `loop_stall_ms` is
the most processor time for which the event loop let nobody else run, heartbeats among them, after the start.
`memory_gb` is the most that this process had, agents included. `growth` is the exponent of the nodes by which the
median decision grows between the smallest and the largest size. The last line is one JSON object.
"""

import argparse
import asyncio
import gc
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from _machine import machine_line
from _placement.agents import LoopMonitor, NoModels, ScaleAgent, ScaleLinks
from _placement.standing import REGION, fill, workload_text

from shoal.coordinator.api.compute_pool import ComputePool
from shoal.coordinator.clock import CoordinatorClock, SystemIds
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.controllers.runner import Transition
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.main import GC_THRESHOLD
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.host import gc_freeze
from shoal.types.workload import WorkloadKey

T = TypeVar("T")
SIZES: Final = (1_000, 5_000, 15_000, 100_000)
HEARTBEATS_PER_S: Final = 5_000
"""Most heartbeats a second: beyond this many nodes they are sent less often, as a policy of such a region says."""
SETTLE_S: Final = 600.0
"""Time for the region to come to rest after its start, and for each part to end."""
ACTOR: Final = "benchmark"


@dataclass(frozen=True, slots=True)
class Load:
    """How much of everything."""

    # Seconds of rest.
    idle_s: float
    # Workloads applied one by one.
    applies: int
    # Workloads of the one large apply.
    mass: int
    # Events a second of the churn.
    churn_per_s: float
    # Seconds of the churn.
    churn_s: float
    # Whether the applies of the churn ask what they change.
    churn_plans: bool


@dataclass(frozen=True, slots=True)
class ScaleFigures:
    """Results of one size."""

    # Nodes of the region; it has two more, which are gateways.
    nodes: int
    # Median of the idle steps.
    idle_step_ms: float
    # Share of a core that the process takes while idle, agents and heartbeats included.
    idle_core: float
    # Of the steps that placed one workload: median.
    decision_p50_ms: float
    # The same: 99th percentile.
    decision_p99_ms: float
    # From the call of apply until it returned.
    apply_p50_ms: float
    # From the call of apply until the workload was ready.
    ready_p50_ms: float
    # From when a node was found silent until its replicas were sent elsewhere.
    lost_ms: float
    # Placements committed a second.
    durable_per_s: float
    # Events of the churn that took place a second.
    churn_per_s: float
    # Desired sets sent in all parts.
    sets: int
    # Routes in each of them, on average.
    routes_per_set: float
    # Longest time without a turn for others, in processor time of the loop's thread.
    loop_stall_ms: float
    # The same by the clock: other processes of the machine count too.
    loop_wait_ms: float
    # Most memory of the process.
    memory_gb: float
    # One heartbeat, at the coordinator.
    heartbeat_us: float
    # From the opened store to a region at rest.
    start_s: float


class StepThread:
    """Where steps decide, as in the coordinator's program, and how long that takes."""

    def __init__(self) -> None:
        self.pool = ComputePool(threads=1)
        self.decisions: list[float] = []
        """Processor seconds of each decision."""
        self.used_s = 0.0
        """Processor seconds of the thread."""
        self.meanwhile_s = 0.0
        """Processor seconds of the loop's thread while a step waited for this one."""

    async def decide(self, work: Callable[[], T], /) -> T:
        def run_timed() -> T:
            began = time.thread_time()
            found = work()
            took = time.thread_time() - began
            self.used_s += took
            if isinstance(found, Transition):
                self.decisions.append(took)
            return found

        began = time.thread_time()
        try:
            return await self.pool.run("steps", run_timed, limited=False)
        finally:
            self.meanwhile_s += time.thread_time() - began


class ScaleRun:
    """One size."""

    def __init__(self, region: RegionalCoordinator, links: ScaleLinks, load: Load, thread: StepThread) -> None:
        self.region = region
        self.thread = thread
        self.links = links
        self.load = load
        self.pool = ComputePool()
        """Where the operator API reads and plans documents, beside the loop."""
        self.steps: list[float] = []
        """Processor seconds of each step, of both threads: of an idle one all is its own."""
        step = region.workloads.step

        async def timed_step() -> None:
            began, own_s = time.thread_time(), thread.used_s - thread.meanwhile_s
            await step()
            self.steps.append(time.thread_time() - began + thread.used_s - thread.meanwhile_s - own_s)

        region.workloads.step = timed_step  # type: ignore[method-assign]

    async def until(self, what: str, condition: Callable[[], bool], most_s: float = SETTLE_S) -> float:
        """Seconds until the condition held."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > most_s:
                raise TimeoutError(f"{what}: not within {most_s:g} s")
            await asyncio.sleep(0.002)
        return time.monotonic() - began

    async def at_rest(self) -> None:
        """Until every agent holds its set and three steps changed nothing."""
        seen, quiet = -1, 0
        while quiet < 3:
            before = len(self.steps)
            await self.until("a step", lambda: len(self.steps) > before)  # noqa: B023
            quiet = quiet + 1 if self.links.sets == seen and not self.region.workloads.waits else 0
            seen = self.links.sets

    async def idle(self) -> tuple[float, float]:
        """Median seconds of a step, and the share of a core that was used."""
        self.steps.clear()
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(self.load.idle_s)
        await self.until("three steps", lambda: len(self.steps) >= 3)
        return statistics.median(self.steps), (time.process_time() - cpu) / (time.monotonic() - began)

    async def applies(self) -> tuple[list[float], list[float], list[float]]:
        """Seconds of each decision that placed one workload, of each apply, and until each was ready."""
        decided, applied, ready = list[float](), list[float](), list[float]()
        for number in range(self.load.applies):
            key = await self._apply(f"one-{number}", number)
            began, (took, self.thread.decisions) = time.monotonic(), (self._took, [])
            await self.until("a placement", lambda: key in self.links.ready_at)  # noqa: B023
            applied.append(took)
            decided.append(max(self.thread.decisions, default=math.nan))
            ready.append(took + self.links.ready_at[key] - began)
        return decided, applied, ready

    async def lose_node(self) -> float:
        """Seconds from when a node is found silent until all of its replicas were sent elsewhere."""
        name = next(
            name for name, one in sorted(self.links.agents.items()) if one.node.devices and len(one.observed) >= 2
        )
        one = self.links.agents[name]
        held = {each.workload for each in one.observed.values()}
        for key in held:
            self.links.sent_at.pop(key, None)
        one.up = False
        await self.until("a loss", lambda: self.region.fleet.fleet.nodes[name].liveness != "ready")
        return await self.until("replacements", lambda: held <= self.links.sent_at.keys())

    async def mass(self) -> float:
        """Placements a second of one large apply."""
        texts = [(f"mass-{at}", workload_text(f"mass-{at}", at)) for at in range(self.load.mass)]
        began = time.monotonic()
        await self._apply_texts(texts, with_plan=True)
        wanted = {WorkloadKey(f"t{at % 20}", f"mass-{at}") for at in range(self.load.mass)}
        await self.until("all placements", lambda: wanted <= self.links.sent_at.keys())
        return self.load.mass / (max(self.links.sent_at[key] for key in wanted) - began)

    async def churn(self) -> float:
        """Events a second that took place, each apply waited for by its own task."""
        count, due, began = 0, time.monotonic(), time.monotonic()
        names = [name for name, one in sorted(self.links.agents.items()) if one.node.devices][10:]
        kept: list[DocumentKey] = []
        while (now := time.monotonic()) - began < self.load.churn_s:
            if now < due:
                await asyncio.sleep(due - now)
            due += 1 / self.load.churn_per_s
            kind = count % 10
            if kind < 4:
                key = await self._apply(f"churn-{count}", count, with_plan=self.load.churn_plans)
                kept.append(DocumentKey("Workload", str(key)))
            elif kind < 7 and kept:
                await self.region.documents.delete(kept.pop(0), ACTOR)
            elif kind == 7:
                await self._apply(f"nowhere-{count}", count, "impossible", with_plan=self.load.churn_plans)
            else:
                one = self.links.agents[names[count % len(names)]]
                one.up = not one.up
            count += 1
        return count / (time.monotonic() - began)

    async def _apply(self, name: str, number: int, policy: str = "", *, with_plan: bool = True) -> WorkloadKey:
        await self._apply_texts([(name, workload_text(name, number, policy))], with_plan=with_plan)
        return WorkloadKey(f"t{number % 20}", name)

    async def _apply_texts(self, texts: Sequence[tuple[str, str]], *, with_plan: bool) -> None:
        began, compute = time.monotonic(), partial(self.pool.run, ACTOR)
        done = await self.region.documents.apply(texts, {}, "", ACTOR, with_plan=with_plan, compute=compute)
        self._took = time.monotonic() - began
        if not done.revision:
            raise RuntimeError(f"not applied: {done.plan_result.problems[:1]} {done.plan_differences[:1]}")


async def measure(nodes: int, load: Load, folder: Path) -> ScaleFigures:
    heartbeat_s = max(1.0, nodes / HEARTBEATS_PER_S)
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])  # as the coordinator's program has it
    clock = CoordinatorClock()
    store = await SqliteStore.open(folder)
    standing = await fill(store, nodes, clock.wall(), heartbeat_s)
    _log(f"{nodes} nodes written")
    began = time.monotonic()
    links = ScaleLinks({each.name: ScaleAgent(each, standing.epoch) for each in standing.nodes}, heartbeat_s)
    thread = StepThread()
    region = RegionalCoordinator(
        store, links, NoModels(), NoModels(), clock, SystemIds(), RegionConfig(REGION), decide=thread.decide
    )
    await region.start()
    links.attach(region)
    run, monitor = ScaleRun(region, links, load, thread), LoopMonitor()
    tasks = [
        asyncio.create_task(each) for each in (links.run(), region.run(), monitor.run(), gc_freeze.collect_regularly())
    ]
    try:
        await run.at_rest()
        start_s = time.monotonic() - began
        _log(f"at rest after {start_s:.1f} s")
        monitor.reset()
        links.heard_s, links.heard, links.sets, links.routes = 0.0, 0, 0, 0
        idle_s, core = await run.idle()
        _log(f"idle step {idle_s * 1e3:.2f} ms, {core:.0%} of a core")
        heartbeat_us = 1e6 * links.heard_s / max(1, links.heard)
        decided, applied, ready = await run.applies()
        _log(f"decision {_p(decided, 0.5) * 1e3:.2f} ms, apply {_p(applied, 0.5) * 1e3:.1f} ms")
        lost_s = await run.lose_node()
        per_s = await run.mass() if load.mass else math.nan
        _log(f"{per_s:.0f} durable placements/s")
        churned = await run.churn() if load.churn_s else math.nan
    finally:
        run.pool.stop()
        thread.pool.stop()
        region.stop()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        await store.close()
    return ScaleFigures(
        nodes=nodes,
        idle_step_ms=1e3 * idle_s,
        idle_core=core,
        decision_p50_ms=1e3 * _p(decided, 0.5),
        decision_p99_ms=1e3 * _p(decided, 0.99),
        apply_p50_ms=1e3 * _p(applied, 0.5),
        ready_p50_ms=1e3 * _p(ready, 0.5),
        lost_ms=1e3 * lost_s,
        durable_per_s=per_s,
        churn_per_s=churned,
        sets=links.sets,
        routes_per_set=links.routes / max(1, links.sets),
        loop_stall_ms=1e3 * monitor.stall_s,
        loop_wait_ms=1e3 * monitor.wait_s,
        memory_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        heartbeat_us=heartbeat_us,
        start_s=start_s,
    )


def growth(found: Sequence[ScaleFigures]) -> float:
    """Exponent of the nodes by which the median decision grows; NaN for one size."""
    first, last = min(found, key=lambda each: each.nodes), max(found, key=lambda each: each.nodes)
    if first.nodes == last.nodes:
        return math.nan
    return math.log(last.decision_p50_ms / first.decision_p50_ms) / math.log(last.nodes / first.nodes)


def _p(values: Sequence[float], share: float) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[min(len(known) - 1, int(share * len(known)))] if known else math.nan


def _log(line: str) -> None:
    print(f"# {line}", file=sys.stderr, flush=True)


def _of_child(nodes: int, options: Sequence[str]) -> ScaleFigures:
    """One size in a process of its own, so that memory is its own."""
    command = [sys.executable, __file__, "--scale", "--nodes", str(nodes), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (found,) = json.loads(done.stdout.splitlines()[-1])["sizes"]
    return ScaleFigures(**found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parts = parser.add_mutually_exclusive_group(required=True)
    parts.add_argument("--scale", action="store_true", help="what a region's steps cost, by its size")
    parts.add_argument("--quality", action="store_true", help="how near to the optimum placement chooses")
    parts.add_argument("--memory", action="store_true", help="real models near the limit of memory")
    parser.add_argument("--nodes", type=int, help="this size alone; default: " + ", ".join(map(str, SIZES)))
    parser.add_argument("--idle", type=float, default=15.0, help="seconds of rest")
    parser.add_argument("--applies", type=int, default=200, help="workloads applied one by one")
    parser.add_argument("--mass", type=int, default=10_000, help="workloads of the one large apply")
    parser.add_argument("--churn", type=float, default=100.0, help="events a second")
    parser.add_argument("--churn-seconds", type=float, default=10.0)
    parser.add_argument("--plans", action="store_true", help="applies of the churn ask for plans")
    parser.add_argument("--instances", type=int, default=200, help="of --quality")
    parser.add_argument("--seed", type=int, default=1, help="of the instances")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for HiGHS on one instance")
    parser.add_argument("--data", type=Path, help="measurements for the instances; default: those in _placement")
    parser.add_argument("--placements", type=int, default=200, help="of --memory, by each rule")
    parser.add_argument("--room", type=int, default=1024, help="of --memory: MiB of the machine that is imitated")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of --memory: of each rule, then none is begun")
    parser.add_argument("--quick", action="store_true", help="of --memory: a few models and placements")
    given = parser.parse_args()
    print(machine_line(), flush=True)
    if given.quality:
        from _placement import quality

        sys.exit(quality.main(given.data, given.instances, given.seed, given.limit))
    if given.memory:
        from _placement import memory
        from _prediction.live_models import MODELS

        names, count = (memory.QUICK_MODELS, memory.QUICK_PLACEMENTS) if given.quick else (MODELS, given.placements)
        sys.exit(memory.main(tuple(names), count, given.room, given.seed, given.seconds))
    if given.nodes is None:
        options = [each for each in sys.argv[1:] if each != "--scale"]
        found = [_of_child(nodes, options) for nodes in SIZES]
    else:
        load = Load(given.idle, given.applies, given.mass, given.churn, given.churn_seconds, given.plans)
        with tempfile.TemporaryDirectory() as folder:
            found = [asyncio.run(measure(given.nodes, load, Path(folder) / "store"))]
    for each in found:
        print("  ".join(f"{name} {value:.6g}" for name, value in asdict(each).items()))
    exponent = growth(found)
    document = {"sizes": [asdict(each) for each in found], "growth": None if math.isnan(exponent) else exponent}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
