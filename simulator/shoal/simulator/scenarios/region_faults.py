"""Seeded random faults of one region: which kinds strike in this run, how hard, and when.

Each seed enables only some kinds, so that rare combinations get room. Every fault is recorded when it strikes.
`SimCluster.clear_faults` ends all that would last.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.network import COORDINATOR, PathConditions
from shoal.simulator.world.rng import Rng

if TYPE_CHECKING:
    from shoal.simulator.parts.cluster import SimCluster

Inject = Callable[["SimCluster", Rng], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RegionFault:
    """One kind of fault."""

    name: str
    # Mean seconds between two faults of this kind, at full strength.
    every_s: float
    inject: Inject


async def _kill_agent(cluster: "SimCluster", rng: Rng) -> None:
    living = cluster.live_agents()
    if not living:
        return
    machine = rng.choice(living)
    if rng.happens(0.5):
        cluster.kill_after_steps(machine.supervisor, rng.randint(1, 60))
    else:
        cluster.kill_agent(machine)


async def _cut_power(cluster: "SimCluster", rng: Rng) -> None:
    machine = rng.choice(cluster.machines)
    cluster.cut_power(machine)
    cluster.world.call_later(rng.uniform(0.5, 8.0), lambda: cluster.restore_power(machine))


async def _kill_coordinator(cluster: "SimCluster", rng: Rng) -> None:
    if rng.happens(0.7):
        cluster.kill_after_steps(cluster.coordinator, rng.randint(1, 80))
    else:
        cluster.kill_coordinator()


async def _cut_coordinator_power(cluster: "SimCluster", rng: Rng) -> None:
    if rng.happens(0.7):
        cluster.kill_after_steps(cluster.coordinator, rng.randint(1, 80), power=True)
    else:
        cluster.kill_coordinator(power=True)


async def _degrade_paths(cluster: "SimCluster", rng: Rng) -> None:
    """Lose, duplicate and delay messages on every path for a while."""
    loss, late, duplicate = rng.uniform(0.0, 0.3), rng.uniform(0.0, 0.3), rng.uniform(0.0, 0.5)
    delay_s = rng.choice([0.002, 0.02, 0.2])
    cluster.world.record("fault.weather", loss=loss, late=late, duplicate=duplicate, delay=delay_s)
    for path in cluster.network.paths():
        path.loss, path.late, path.duplicate, path.delay_s = loss, late, duplicate, delay_s
    await asyncio.sleep(rng.uniform(2.0, 15.0))
    cluster.reset_paths()


async def _partition(cluster: "SimCluster", rng: Rng) -> None:
    """Cut one machine off from some others, in one direction or both."""
    machine = rng.choice(cluster.machines)
    names = [COORDINATOR, *(other.name for other in cluster.machines if other is not machine)]
    others = [COORDINATOR] if rng.happens(0.5) else rng.sample(names, rng.randint(1, len(names)))
    directions = rng.choice([(True, True), (True, True), (True, False), (False, True)])
    cut: list[PathConditions] = []
    for other in others:
        for wanted, path in zip(
            directions,
            (cluster.network.path(machine.name, other), cluster.network.path(other, machine.name)),
            strict=True,
        ):
            if wanted and not path.cut:
                path.cut = True
                cut.append(path)
    cluster.world.record("fault.cut", node=machine.name, others=tuple(others), directions=directions)
    await asyncio.sleep(rng.choice([0.5, 4.0, 9.0, 20.0]) * rng.uniform(0.5, 1.5))
    for path in cut:
        path.cut = False
    cluster.network.retransmit_all()
    cluster.world.record("fault.healed", node=machine.name, others=tuple(others))


async def _kill_broker(cluster: "SimCluster", rng: Rng) -> None:
    """Kill the broker; it returns with its retained messages, or empty."""
    broker = cluster.broker
    if broker is not None and broker.is_up:
        broker.die(forgets=rng.happens(0.5))
        cluster.world.call_later(rng.choice([0.1, 1.0, 6.0]) * rng.uniform(0.5, 1.5), broker.start)


async def _boot_duplicate(cluster: "SimCluster", rng: Rng) -> None:
    """Run a copy of a machine for a while, whether that machine is up, down or cut off."""
    duplicate = cluster.boot_duplicate(rng.choice([machine for machine in cluster.machines if machine.chips]))
    await asyncio.sleep(rng.uniform(2.0, 12.0))
    cluster.cut_power(duplicate)


async def _end_worker(cluster: "SimCluster", rng: Rng) -> None:
    machine = _pick_with_workers(cluster, rng)
    if machine is not None:
        name = rng.choice(sorted(machine.workers))
        model = machine.workers[name].assignment.model
        own = rng.happens(0.2) and cluster.own_faults[model] < 2  # a third crash would mark the model as poisoned
        cluster.own_faults[model] += own
        machine.kill_worker(name, own_fault=own, why="a fatal signal of its own" if own else "killed from outside")


async def _lose_device(cluster: "SimCluster", rng: Rng) -> None:
    """A device stops answering and takes its workers with it; later it is back."""
    machine = rng.choice([machine for machine in cluster.machines if machine.chips])
    device = rng.choice(sorted(machine.chips))
    cluster.world.record("fault.device", node=machine.name, device=device)
    machine.lost_devices.add(device)
    for name in sorted(machine.workers):
        if machine.workers[name].assignment.device == device:
            machine.kill_worker(name, own_fault=False, why="its device is gone")
    await asyncio.sleep(rng.uniform(0.5, 10.0))
    machine.lost_devices.discard(device)


async def _kill_front(cluster: "SimCluster", rng: Rng) -> None:
    rng.choice(cluster.machines).kill_front()


async def _slow_disk(cluster: "SimCluster", rng: Rng) -> None:
    disk = rng.choice([cluster.disk, *(machine.disk for machine in cluster.machines)])
    flush_s = rng.choice([0.02, 0.1, 1.0])
    cluster.world.record("fault.slow-disk", disk=disk.name, flush=flush_s)
    usual, disk.flush_s = disk.flush_s, flush_s
    await asyncio.sleep(rng.uniform(1.0, 8.0))
    disk.flush_s = min(usual, disk.flush_s)


async def _full_disk(cluster: "SimCluster", rng: Rng) -> None:
    disk = rng.choice([cluster.disk, *(machine.disk for machine in cluster.machines)])
    cluster.world.record("fault.full-disk", disk=disk.name)
    disk.full = True
    await asyncio.sleep(rng.uniform(0.5, 8.0))
    disk.full = False


async def _step_clock(cluster: "SimCluster", rng: Rng) -> None:
    clock = rng.choice([cluster.clock, *(machine.clock for machine in cluster.machines)])
    seconds = rng.choice([-31_536_000.0, -3600.0, -40.0, 40.0, 3600.0, 31_536_000.0])
    cluster.world.record("fault.clock", seconds=seconds)
    cluster.step_clock(clock, seconds)


async def _spoil_bytes(cluster: "SimCluster", rng: Rng) -> None:
    machine = rng.choice(cluster.machines)
    if machine.cached_models:
        digest = rng.choice(sorted(machine.cached_models))
        cluster.world.record("fault.spoiled", node=machine.name, digest=digest)
        machine.cached_models[digest] = False


async def _change_documents(cluster: "SimCluster", rng: Rng) -> None:
    await cluster.operators.act(rng)


async def _hang_up(cluster: "SimCluster", rng: Rng) -> None:
    await cluster.operators.hang_up(rng)


async def _cordon(cluster: "SimCluster", rng: Rng) -> None:
    machine = rng.choice(cluster.machines)
    await cluster.operators.cordon(machine.name, on=True)
    await asyncio.sleep(rng.uniform(1.0, 10.0))
    await cluster.operators.cordon(machine.name, on=False)


def _pick_with_workers(cluster: "SimCluster", rng: Rng) -> SimMachine | None:
    machines = [machine for machine in cluster.machines if machine.workers]
    return rng.choice(machines) if machines else None


REGION_FAULTS = (
    RegionFault("agent-kill", 6.0, _kill_agent),
    RegionFault("node-power", 9.0, _cut_power),
    RegionFault("coordinator-kill", 6.0, _kill_coordinator),
    RegionFault("coordinator-power", 8.0, _cut_coordinator_power),
    RegionFault("weather", 10.0, _degrade_paths),
    RegionFault("partition", 6.0, _partition),
    RegionFault("worker-end", 4.0, _end_worker),
    RegionFault("device-lost", 8.0, _lose_device),
    RegionFault("front-kill", 6.0, _kill_front),
    RegionFault("slow-disk", 6.0, _slow_disk),
    RegionFault("full-disk", 9.0, _full_disk),
    RegionFault("clock-step", 6.0, _step_clock),
    RegionFault("spoiled-bytes", 6.0, _spoil_bytes),
    RegionFault("documents", 4.0, _change_documents),
    RegionFault("hang-up", 4.0, _hang_up),
    RegionFault("cordon", 8.0, _cordon),
    RegionFault("broker-kill", 6.0, _kill_broker),
    RegionFault("duplicate", 9.0, _boot_duplicate),
)


class RegionFaultSchedule:
    """The faults of one run: the kinds that this seed enables."""

    def __init__(self, cluster: "SimCluster", kinds: tuple[RegionFault, ...] = REGION_FAULTS) -> None:
        self._cluster = cluster
        self._rng = cluster.world.rng.stream("storm")
        # One stream per kind: adding a kind leaves the draws of the others unchanged.
        self._streams = {kind.name: self._rng.stream(kind.name) for kind in kinds}
        drawn = [kind for kind in kinds if self._streams[kind.name].happens(0.35)]
        self.kinds = drawn or ([self._rng.choice(kinds)] if kinds else [])
        self._strength = {kind.name: self._streams[kind.name].uniform(0.5, 2.0) for kind in self.kinds}

    async def run(self, seconds: float) -> None:
        """Strike for `seconds`; return when every lasting fault is over."""
        async with asyncio.TaskGroup() as group:
            for kind in self.kinds:
                group.create_task(
                    self._inject_repeatedly(kind, self._streams[kind.name], self._cluster.world.now() + seconds)
                )
        self._cluster.reset_paths()

    async def _inject_repeatedly(self, kind: RegionFault, rng: Rng, until: float) -> None:
        while True:
            await asyncio.sleep(rng.exponential(kind.every_s / self._strength[kind.name]))
            if self._cluster.world.now() >= until:
                return
            await kind.inject(self._cluster, rng)
