"""F46: no feasible replacement, an empty list of candidates, a node that never returns, a deletion while cut off.
The old replica stays, and deletions end by their deadline."""

import asyncio

from simulation.scene import TEXT, Scene, run_scenario

from harness.report import record
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.placement.model import Aim
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.network import COORDINATOR
from shoal.simulator.parts.operators import OPERATOR_URI
from shoal.types.codes import Code, ShoalError

RUNS = 6
SILENT_S = 60.0
"""Well beyond `lost_after`."""
RARELY_S = 0.05
"""Between two requests of that long a time: each takes 10 ms of a core."""


def cut(scene: Scene, machine: SimMachine, *, off: bool) -> None:
    """Between it and its coordinator alone: who asks at its own front, or at a gateway, still reaches it."""
    for one, other in ((machine.name, COORDINATOR), (COORDINATOR, machine.name)):
        scene.cluster.network.path(one, other).cut = off
    if not off:
        scene.cluster.network.retransmit_all()


def test_f46_without_a_replacement_the_old_replica_stays() -> None:
    """It is silent, then lost, with no other device: blindness stops nothing, and it is taken back as it was."""
    sent = 0

    async def scenario(scene: Scene) -> None:
        (machine,) = scene.replicas
        kept = dict(machine.workers)
        async with scene.load(RARELY_S, machine.name):
            cut(scene, machine, off=True)
            await asyncio.sleep(SILENT_S)
            assert scene.cluster.region is not None
            codes = {str(wait.code) for wait in scene.cluster.region.workloads.waits}
            assert codes, "a wait says what is missing"
            assert machine.workers == kept
            cut(scene, machine, off=False)
            await scene.wait_whole(30.0)
        assert machine.workers == kept, "the very same process"
        assert scene.starts() == 1

    for seed in range(RUNS):
        scene = run_scenario(seed, 1, scenario, agents=1)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:3]}"
        sent += len(scene.answers)
    record("F46", "S", RUNS, case="no feasible replacement", sent=sent, lost=0, restarted=0)


def test_f46_an_empty_list_of_candidates_moves_nothing() -> None:
    """A move with nowhere to go waits, says for what, and is taken back: the replica serves all the while."""

    async def scenario(scene: Scene) -> None:
        (machine,) = scene.replicas
        region = scene.cluster.region
        assert region is not None
        async with scene.load():
            try:
                begun = await region.moves.migrate(TEXT, Aim(), OPERATOR_URI)
            except ShoalError as error:
                refused.append(error.code)
            else:
                await asyncio.sleep(10.0)
                assert region.workloads.migrations.all[begun.id].target is None
                await region.moves.cancel(begun.id, OPERATOR_URI)
                ended.append(region.workloads.migrations.all[begun.id].stage)
        assert scene.replicas == [machine]

    refused, ended = list[Code](), list[str]()
    for seed in range(RUNS):
        scene = run_scenario(seed, 1, scenario, agents=1)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:3]}"
        assert scene.starts() == 1
    assert len(refused) + len(ended) == RUNS
    assert set(map(str, ended)) <= {"aborted", "rolling_back"}
    record("F46", "S", RUNS, case="empty list of candidates", refused=len(refused), taken_back=len(ended))


def test_f46_deleted_while_its_node_is_cut_off_and_never_returns() -> None:
    """The deletion ends when the node is lost; what was on it is named until then; should it return, it drains."""
    worst = 0.0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        (machine,) = scene.replicas
        region = scene.cluster.region
        assert region is not None
        cut(scene, machine, off=True)
        await asyncio.sleep(1.0)
        await region.documents.delete(DocumentKey("Workload", f"{TEXT.tenant}/{TEXT.name}"), OPERATOR_URI)
        scene.world.record("operator.wanted", workloads=())
        scene.cluster.operators.deleted_at[str(TEXT)] = at = scene.world.now()
        await asyncio.sleep(1.0)
        assert any(wait.node == machine.name for wait in region.workloads.waits), "the remainder is named"
        await scene.until(
            lambda: not any(each.assignments for each in region.workloads.desired.values()), 60.0, "the deletion's end"
        )
        worst = max(worst, scene.world.now() - at)
        assert machine.workers, "nobody told it"
        cut(scene, machine, off=False)
        await scene.until(lambda: not machine.workers, 60.0, "it to drain what is not wanted any more")

    for seed in range(RUNS):
        run_scenario(seed, 1, scenario, agents=1)
    record("F46", "S", RUNS, case="deleted while cut off", ended_worst_s=round(worst, 1))
