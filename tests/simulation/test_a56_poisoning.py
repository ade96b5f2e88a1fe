"""A56: a tenant crashes its own workers on purpose, to have a model blocked. Another tenant's replicas of that model
are replaced after a node loss."""

import asyncio

from simulation.scene import TEXT, Scene, run_scenario

from harness.report import record
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.operators import OPERATOR_URI
from shoal.simulator.scenarios.region_run import model_digest
from shoal.types.workload import WorkloadKey

RUNS = 10
CRASHES = 3
SHOP = WorkloadKey("shop", "again")
DOCUMENT = f"""apiVersion: shoal/v1
kind: Tenant
metadata: {{name: {SHOP.tenant}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: {SHOP.name}, tenant: {SHOP.tenant}}}
spec:
  model: {{source: "{model_digest(0)}"}}
"""


def host_of(scene: Scene, workload: WorkloadKey) -> SimMachine | None:
    """Where a replica of it is ready."""
    for machine in scene.cluster.machines:
        for name, worker in machine.workers.items():
            if worker.assignment.workload == workload and machine.is_ready(name):
                return machine
    return None


def is_assigned(scene: Scene, workload: WorkloadKey) -> bool:
    region = scene.cluster.region
    assert region is not None
    wanted = region.workloads.desired.values()
    return any(each.workload == workload for content in wanted for each in content.assignments)


def crash(machine: SimMachine, workload: WorkloadKey) -> None:
    """With a request in flight."""
    (name,) = [name for name, worker in machine.workers.items() if worker.assignment.workload == workload]
    machine.kill_worker(name, own_fault=True, why="crashed at a request")


def test_a56_a_model_that_one_tenant_crashed_is_replaced_for_another_after_a_node_loss() -> None:
    replaced = list[float]()

    async def scenario(scene: Scene) -> None:
        region = scene.cluster.region
        assert region is not None
        applied = await region.documents.apply([("again.yaml", DOCUMENT)], {}, "", OPERATOR_URI)
        assert not applied.plan_result.problems
        scene.world.record("operator.wanted", workloads=(str(TEXT), str(SHOP)))
        for number in range(CRASHES):
            await scene.until(lambda: host_of(scene, SHOP), 60.0, f"its replica before crash {number + 1}")
            machine = host_of(scene, SHOP)
            assert machine is not None
            crash(machine, SHOP)
            await asyncio.sleep(0.5)
        await scene.until(lambda: not is_assigned(scene, SHOP), 60.0, "what crashed to be taken away")
        (poisoned,) = [
            each.message
            for each in await region.events.events_after(0, 1000)
            if each.code == "POISONED" and each.subject == model_digest(0)
        ]
        assert poisoned.endswith(f" for {SHOP.tenant}")
        victim = host_of(scene, TEXT)
        assert victim is not None
        at = scene.world.now()
        scene.cluster.cut_power(victim)
        await scene.until(lambda: host_of(scene, TEXT) not in (None, victim), 60.0, "the other tenant's replica")
        replaced.append(scene.world.now() - at)
        assert host_of(scene, SHOP) is None
        scene.cluster.restore_power(victim)
        await scene.until(lambda: victim.supervisor is not None and host_of(scene, TEXT), 60.0, "the node to be back")

    for seed in range(RUNS):
        run_scenario(seed, 1, scenario, agents=3)
    record("A56", "S", RUNS, crashes=CRASHES, replaced_worst_s=round(max(replaced), 1))
