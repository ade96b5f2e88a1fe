"""A seeded storm: which kinds of fault strike in this run, how hard, and when.

Each seed turns on only some kinds, so that rare pairs get room. Every fault is recorded when it strikes; `Storm.calm`
takes back all that would last.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.simulator.chance import Chance
from shoal.simulator.machine import Machine
from shoal.simulator.network import COORDINATOR, Conditions

if TYPE_CHECKING:
    from shoal.simulator.cluster import Cluster

Strike = Callable[["Cluster", Chance], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault. every_s: mean seconds between strikes at full strength."""

    name: str
    every_s: float
    strike: Strike


async def _kill_agent(cluster: "Cluster", chance: Chance) -> None:
    living = cluster.living_agents()
    if not living:
        return
    machine = chance.pick(living)
    if chance.happens(0.5):
        cluster.arm(machine.supervisor, chance.whole(1, 60))
    else:
        cluster.kill_agent(machine)


async def _cut_power(cluster: "Cluster", chance: Chance) -> None:
    machine = chance.pick(cluster.machines)
    cluster.cut_power(machine)
    cluster.world.later(chance.between(0.5, 8.0), lambda: cluster.restore_power(machine))


async def _kill_coordinator(cluster: "Cluster", chance: Chance) -> None:
    if chance.happens(0.7):
        cluster.arm(cluster.coordinator, chance.whole(1, 80))
    else:
        cluster.kill_coordinator()


async def _cut_coordinator_power(cluster: "Cluster", chance: Chance) -> None:
    if chance.happens(0.7):
        cluster.arm(cluster.coordinator, chance.whole(1, 80), power=True)
    else:
        cluster.kill_coordinator(power=True)


async def _weather(cluster: "Cluster", chance: Chance) -> None:
    """Loss, duplication and delay on every path for a while."""
    loss, late, duplicate = chance.between(0.0, 0.3), chance.between(0.0, 0.3), chance.between(0.0, 0.5)
    delay_s = chance.pick([0.002, 0.02, 0.2])
    cluster.world.record("fault.weather", loss=loss, late=late, duplicate=duplicate, delay=delay_s)
    for path in cluster.network.paths():
        path.loss, path.late, path.duplicate, path.delay_s = loss, late, duplicate, delay_s
    await asyncio.sleep(chance.between(2.0, 15.0))
    cluster.clear_weather()


async def _partition(cluster: "Cluster", chance: Chance) -> None:
    """One machine loses sight of some others, in one direction or both."""
    machine = chance.pick(cluster.machines)
    names = [COORDINATOR, *(other.name for other in cluster.machines if other is not machine)]
    others = [COORDINATOR] if chance.happens(0.5) else chance.some(names, chance.whole(1, len(names)))
    directions = chance.pick([(True, True), (True, True), (True, False), (False, True)])
    cut: list[Conditions] = []
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
    await asyncio.sleep(chance.pick([0.5, 4.0, 9.0, 20.0]) * chance.between(0.5, 1.5))
    for path in cut:
        path.cut = False
    cluster.network.healed()
    cluster.world.record("fault.healed", node=machine.name, others=tuple(others))


async def _kill_broker(cluster: "Cluster", chance: Chance) -> None:
    """With what it keeps, or empty when it is back."""
    broker = cluster.broker
    if broker is not None and broker.is_up:
        broker.die(forgets=chance.happens(0.5))
        cluster.world.later(chance.pick([0.1, 1.0, 6.0]) * chance.between(0.5, 1.5), broker.start)


async def _boot_twin(cluster: "Cluster", chance: Chance) -> None:
    """Somebody runs a copy of a machine for a while, be that machine up, down or cut off."""
    twin = cluster.boot_twin(chance.pick([machine for machine in cluster.machines if machine.chips]))
    await asyncio.sleep(chance.between(2.0, 12.0))
    cluster.cut_power(twin)


async def _end_worker(cluster: "Cluster", chance: Chance) -> None:
    machine = _with_workers(cluster, chance)
    if machine is not None:
        name = chance.pick(sorted(machine.workers))
        model = machine.workers[name].assignment.model
        own = chance.happens(0.2) and cluster.own_faults[model] < 2  # with the third the model counts as poisoned
        cluster.own_faults[model] += own
        machine.kill_worker(name, own_fault=own, why="a fatal signal of its own" if own else "killed from outside")


async def _lose_device(cluster: "Cluster", chance: Chance) -> None:
    """It answers no more, and takes its workers with it; then it is back."""
    machine = chance.pick([machine for machine in cluster.machines if machine.chips])
    device = chance.pick(sorted(machine.chips))
    cluster.world.record("fault.device", node=machine.name, device=device)
    machine.lost_devices.add(device)
    for name in sorted(machine.workers):
        if machine.workers[name].assignment.device == device:
            machine.kill_worker(name, own_fault=False, why="its device is gone")
    await asyncio.sleep(chance.between(0.5, 10.0))
    machine.lost_devices.discard(device)


async def _kill_front(cluster: "Cluster", chance: Chance) -> None:
    chance.pick(cluster.machines).kill_front()


async def _slow_disk(cluster: "Cluster", chance: Chance) -> None:
    disk = chance.pick([cluster.disk, *(machine.disk for machine in cluster.machines)])
    flush_s = chance.pick([0.02, 0.1, 1.0])
    cluster.world.record("fault.slow-disk", disk=disk.name, flush=flush_s)
    usual, disk.flush_s = disk.flush_s, flush_s
    await asyncio.sleep(chance.between(1.0, 8.0))
    disk.flush_s = min(usual, disk.flush_s)


async def _full_disk(cluster: "Cluster", chance: Chance) -> None:
    disk = chance.pick([cluster.disk, *(machine.disk for machine in cluster.machines)])
    cluster.world.record("fault.full-disk", disk=disk.name)
    disk.full = True
    await asyncio.sleep(chance.between(0.5, 8.0))
    disk.full = False


async def _step_clock(cluster: "Cluster", chance: Chance) -> None:
    clock = chance.pick([cluster.clock, *(machine.clock for machine in cluster.machines)])
    seconds = chance.pick([-31_536_000.0, -3600.0, -40.0, 40.0, 3600.0, 31_536_000.0])
    cluster.world.record("fault.clock", seconds=seconds)
    cluster.step_clock(clock, seconds)


async def _spoil_bytes(cluster: "Cluster", chance: Chance) -> None:
    machine = chance.pick(cluster.machines)
    if machine.bytes:
        digest = chance.pick(sorted(machine.bytes))
        cluster.world.record("fault.spoiled", node=machine.name, digest=digest)
        machine.bytes[digest] = False


async def _change_documents(cluster: "Cluster", chance: Chance) -> None:
    await cluster.operators.act(chance)


async def _hang_up(cluster: "Cluster", chance: Chance) -> None:
    await cluster.operators.hang_up(chance)


async def _cordon(cluster: "Cluster", chance: Chance) -> None:
    machine = chance.pick(cluster.machines)
    await cluster.operators.cordon(machine.name, on=True)
    await asyncio.sleep(chance.between(1.0, 10.0))
    await cluster.operators.cordon(machine.name, on=False)


def _with_workers(cluster: "Cluster", chance: Chance) -> Machine | None:
    machines = [machine for machine in cluster.machines if machine.workers]
    return chance.pick(machines) if machines else None


KINDS = (
    Kind("agent-kill", 6.0, _kill_agent),
    Kind("node-power", 9.0, _cut_power),
    Kind("coordinator-kill", 6.0, _kill_coordinator),
    Kind("coordinator-power", 8.0, _cut_coordinator_power),
    Kind("weather", 10.0, _weather),
    Kind("partition", 6.0, _partition),
    Kind("worker-end", 4.0, _end_worker),
    Kind("device-lost", 8.0, _lose_device),
    Kind("front-kill", 6.0, _kill_front),
    Kind("slow-disk", 6.0, _slow_disk),
    Kind("full-disk", 9.0, _full_disk),
    Kind("clock-step", 6.0, _step_clock),
    Kind("spoiled-bytes", 6.0, _spoil_bytes),
    Kind("documents", 4.0, _change_documents),
    Kind("hang-up", 4.0, _hang_up),
    Kind("cordon", 8.0, _cordon),
    Kind("broker-kill", 6.0, _kill_broker),
    Kind("twin", 9.0, _boot_twin),
)


class Storm:
    """The faults of one run: the kinds that this seed turned on."""

    def __init__(self, cluster: "Cluster", kinds: tuple[Kind, ...] = KINDS) -> None:
        self._cluster = cluster
        self._chance = cluster.world.chance.stream("storm")
        # By streams of their own: a kind that is added shifts no other's draw.
        self._streams = {kind.name: self._chance.stream(kind.name) for kind in kinds}
        drawn = [kind for kind in kinds if self._streams[kind.name].happens(0.35)]
        self.kinds = drawn or ([self._chance.pick(kinds)] if kinds else [])
        self._strength = {kind.name: self._streams[kind.name].between(0.5, 2.0) for kind in self.kinds}

    async def blow(self, seconds: float) -> None:
        """Strike for `seconds`; returns when every fault that lasts is over."""
        async with asyncio.TaskGroup() as group:
            for kind in self.kinds:
                group.create_task(self._strike(kind, self._streams[kind.name], self._cluster.world.now() + seconds))
        self._cluster.clear_weather()

    async def _strike(self, kind: Kind, chance: Chance, until: float) -> None:
        while True:
            await asyncio.sleep(chance.delay(kind.every_s / self._strength[kind.name]))
            if self._cluster.world.now() >= until:
                return
            await kind.strike(self._cluster, chance)
