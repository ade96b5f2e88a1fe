"""Seeded faults that requests meet: replicas that hang, slow down, die or cannot be reached, bursts, and a request that
ends its worker. Beside them some of a region's other faults strike."""

import asyncio
from typing import TYPE_CHECKING, Final

from shoal.simulator.scenarios.region_faults import REGION_FAULTS, RegionFault
from shoal.simulator.world.rng import Rng
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

if TYPE_CHECKING:
    from shoal.simulator.parts.cluster import SimCluster
    from shoal.simulator.parts.machine import SimMachine

LONGEST_EJECTION_S: Final = 10.0
REQUESTS_PER_REPLICA: Final = 20
"""A replica with its share of so many requests that gets none is not used: by chance, this is once in e^20 times."""
PROBED_FRONTS: Final = 3
_BESIDE: Final = (
    "agent-kill", "node-power", "weather", "worker-end", "device-lost", "front-kill", "documents", "cordon",
)  # fmt: skip


async def _stop_worker(cluster: "SimCluster", rng: Rng) -> None:
    """SIGSTOP for a while."""
    machines = [machine for machine in cluster.machines if machine.workers]
    if machines:
        machine = rng.choice(machines)
        machine.pause_worker(rng.choice(sorted(machine.workers)), rng.choice([0.5, 2.0, 5.0]) * rng.uniform(0.5, 1.5))


async def _slow_machine(cluster: "SimCluster", rng: Rng) -> None:
    machine = rng.choice([machine for machine in cluster.machines if machine.chips])
    machine.slowdown = rng.choice([5.0, 50.0])
    cluster.world.record("fault.slow", node=machine.name, times=machine.slowdown)
    await asyncio.sleep(rng.uniform(0.5, 4.0))
    machine.slowdown = 1.0


async def _cut_fronts(cluster: "SimCluster", rng: Rng) -> None:
    """Two machines do not reach each other, or one of them not the other; their coordinator sees both."""
    one, other = rng.sample([machine.name for machine in cluster.machines], 2)
    ends = [(one, other), (other, one)][: rng.randint(1, 2)]
    cluster.world.record("fault.cut", ways=tuple(ends))
    for source, target in ends:
        cluster.network.path(source, target).cut = True
    await asyncio.sleep(rng.choice([0.3, 2.0, 6.0]) * rng.uniform(0.5, 1.5))
    for source, target in ends:
        cluster.network.path(source, target).cut = False


async def _burst(cluster: "SimCluster", rng: Rng) -> None:
    """Many requests at once at one front."""
    found = _any_route(cluster, rng)
    if found is None:
        return
    machine, workload = found
    count, timeout_s = rng.randint(20, 120), Seconds(rng.choice([0.2, 1.0, 5.0]))
    cluster.world.record("fault.burst", node=machine.name, count=count, timeout_s=timeout_s)
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(cluster.operators.count_request(machine.name, workload, timeout_s=timeout_s))


async def _poison(cluster: "SimCluster", rng: Rng) -> None:
    """A request that ends its worker; its client insists. At the third crash of a model the region would give it up, so
    each model meets it once."""
    found = _any_route(cluster, rng)
    if found is None:
        return
    machine, workload = found
    endpoints = {each.assignment for each in machine.front.routes[workload].endpoints}
    models = {
        worker.assignment.model
        for each in cluster.machines
        for name, worker in each.workers.items()
        if name in endpoints
    }
    if not models or any(cluster.own_faults[model] for model in models):
        return
    for model in models:
        cluster.own_faults[model] = 2
    content = f"poison {workload.name} at {machine.name}".encode()  # fronts do not tell each other whom they suspect
    cluster.world.record("fault.poison", node=machine.name, workload=str(workload))
    for _ in range(3):
        await cluster.operators.count_request(machine.name, workload, content)
        await asyncio.sleep(rng.uniform(0.0, 2.0))


def _any_route(cluster: "SimCluster", rng: Rng) -> "tuple[SimMachine, WorkloadKey] | None":
    """A front, and a workload that it has a route for."""
    machine = rng.choice(cluster.machines)
    return (machine, rng.choice(sorted(machine.front.routes))) if machine.front.routes else None


REQUEST_FAULTS: Final = (
    RegionFault("worker-stop", 3.0, _stop_worker),
    RegionFault("slow-machine", 4.0, _slow_machine),
    RegionFault("front-partition", 3.0, _cut_fronts),
    RegionFault("burst", 2.0, _burst),
    RegionFault("poison-request", 5.0, _poison),
    *(each for each in REGION_FAULTS if each.name in _BESIDE),
)


async def use_every_replica(cluster: "SimCluster") -> None:
    """At some fronts of a region at rest, one after the other, ask one request after the other, until each replica must
    have had some. What was ejected may be used again by then."""
    world = cluster.world
    await asyncio.sleep(LONGEST_EJECTION_S)
    world.record("requests.calm", per_replica=REQUESTS_PER_REPLICA)
    for machine in cluster.surviving_machines()[:PROBED_FRONTS]:
        async with asyncio.TaskGroup() as group:
            for workload, route in sorted(machine.front.routes.items()):
                if route.endpoints:
                    group.create_task(_ask(cluster, machine.name, workload, len(route.endpoints)))
    world.record("requests.rest")


async def _ask(cluster: "SimCluster", front: str, workload: WorkloadKey, replicas: int) -> None:
    for _ in range(REQUESTS_PER_REPLICA * replicas):
        code = await cluster.operators.request(front, workload)
        if code is not None:
            cluster.world.fail(f"{front} answers {workload} with {code}, and the region is at rest")
