"""Rows of the fault table that real processes show too, one fault at a time in virtual time: both must agree.

Nothing else strikes here: what a region does under everything at once is the storm's.
"""

import asyncio

import pytest
from simulation.scene import GIVEN_UP, Scene, run_scenario

from harness.report import record
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.scenarios.region_faults import REGION_FAULTS
from shoal.simulator.scenarios.region_run import RegionScenario, run_seed
from shoal.types.codes import Code

RUNS = 8
POWER_SEEDS = 10
RETRYABLE = {Code.WORKER_CRASHED, Code.REPLICA_UNREACHABLE, Code.MODEL_NOT_READY}


async def hit(scene: Scene, machine: SimMachine, in_flight: int) -> int:
    """SIGKILL of its worker with so many requests inside; how many there were."""
    (worker,) = machine.workers.values()
    await scene.until(lambda: worker.in_flight >= in_flight, 5.0, f"{in_flight} requests in the worker")
    machine.kill_worker(worker.assignment.id, own_fault=False, why="killed from outside")
    assert not worker.alive
    return worker.in_flight


def test_f01_one_of_two_replicas_killed_under_load() -> None:
    sent = retried = 0

    async def scenario(scene: Scene) -> None:
        nonlocal retried
        async with scene.load():
            retried += await hit(scene, scene.replicas[0], 2)
            await scene.wait_whole(20.0)

    for seed in range(RUNS):
        scene = run_scenario(seed, 2, scenario)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers}"
        assert scene.starts() == 3, "loaded again once, by the node that had it"
        assert not scene.codes & {"POISONED", *GIVEN_UP}
        sent += len(scene.answers)
    record("F01", "S", RUNS, seeds=f"0..{RUNS - 1}", sent=sent, lost=0, in_flight_at_the_kill=retried)


def test_f02_the_only_replica_is_back_within_its_load_time_and_half_a_second() -> None:
    worst = 0.0
    failed = 0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        async with scene.load():
            await hit(scene, scene.replicas[0], 1)
            killed = scene.world.now()
            await scene.until(
                lambda: any(sent > killed for sent, _, code in scene.answers if code is None), 10.0, "an answer"
            )
            away = scene.world.now() - killed
            worst = max(worst, away - scene.seconds_of_last_load())
            await scene.wait_whole(20.0)

    for seed in range(RUNS):
        scene = run_scenario(seed, 1, scenario)
        assert {code for _, _, code in scene.failed_answers} <= RETRYABLE, f"seed {seed}"
        assert scene.failed_answers, "the blow missed"
        assert scene.starts() == 2
        assert not scene.codes & {"POISONED", *GIVEN_UP}
        failed += scene.lost_count
    assert worst <= 0.5
    record("F02", "S", RUNS, seeds=f"0..{RUNS - 1}", told_to_try_again=failed, away_beyond_load_s=round(worst, 3))


def test_f03_supervisor_killed_and_its_worker_adopted() -> None:
    sent = 0
    worst = 0.0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        machine = scene.replicas[0]
        worker = next(iter(machine.workers.values()))
        async with scene.load():
            scene.cluster.kill_agent(machine)
            assert machine.supervisor is not None
            assert not machine.supervisor.alive
            await scene.until(lambda: scene.last("worker.adopted") > scene.last("agent.died"), 20.0, "adoption")
            worst = max(worst, scene.last("worker.adopted") - scene.last("agent.started"))
            await scene.wait_whole(20.0)
        assert next(iter(machine.workers.values())) is worker, "the very same process"

    for seed in range(RUNS):
        scene = run_scenario(seed, 2, scenario)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers}"
        assert scene.starts() == 2, "nothing is reloaded"
        sent += len(scene.answers)
    assert worst <= 2.0
    record("F03", "S", RUNS, seeds=f"0..{RUNS - 1}", sent=sent, lost=0, adopted_s=round(worst, 3))


def test_f06_coordinator_down_for_a_minute_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unscaled: a minute passes in virtual time."""
    sent = 0
    worst = 0.0

    async def scenario(scene: Scene) -> None:
        nonlocal worst
        cluster = scene.cluster
        async with scene.load(every_s=0.05):
            with monkeypatch.context() as held:
                held.setattr(cluster, "start_coordinator", lambda: None)
                cluster.kill_coordinator()
                await asyncio.sleep(60.0)
                assert cluster.region is None
            cluster.start_coordinator()
            worst = max(worst, await scene.wait_whole(20.0))

    for seed in range(RUNS):
        scene = run_scenario(seed, 2, scenario)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers}"
        assert scene.starts() == 2, "nothing is restarted"
        assert not scene.codes & GIVEN_UP, "a node has one full window to report"
        sent += len(scene.answers)
    assert worst <= 5.0
    record("F06", "S", RUNS, seeds=f"0..{RUNS - 1}", outage_s=60, sent=sent, lost=0, view_complete_s=round(worst, 3))


def test_f14_power_cuts_of_coordinator_and_nodes_lose_nothing_acknowledged() -> None:
    """The storm with power cuts alone, among changes of documents: the judge compares what was acknowledged."""
    kinds = tuple(kind for kind in REGION_FAULTS if kind.name in {"node-power", "coordinator-power", "documents"})
    cuts = acknowledged = 0
    for seed in range(POWER_SEEDS):
        outcome = run_seed(seed, RegionScenario("power", faults=kinds))
        assert outcome.violations == (), f"seed {seed} of power cuts alone"
        cuts += outcome.fault_counts.get("fault.power", 0)
        acknowledged += sum(event.kind == "store.acked" for event in outcome.events)
    assert cuts > POWER_SEEDS, "the power was hardly ever cut"
    record("F14", "S", POWER_SEEDS, cuts=cuts, writes_acknowledged=acknowledged, lost=0)
