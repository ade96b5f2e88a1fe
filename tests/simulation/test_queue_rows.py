"""Moves that wait in the queue, in virtual time: they begin when nothing refuses them any more, once, and are verified
as any other; coordinators die while they wait.

More seeds: `python -m shoal.simulator --scenario queue --seed 0 --count 1000`.
"""

import asyncio
from collections import Counter

import pytest
from simulation.scene import TEXT, Scene, run_scenario

from shoal.coordinator.core.migration.model import MigrationStage
from shoal.coordinator.core.migration.queue import QueuedMove
from shoal.coordinator.core.placement.model import Aim
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.operators import OPERATOR_URI
from shoal.simulator.run.seeds import replay
from shoal.simulator.scenarios.region_run import SCENARIOS, run_seed

SEEDS = 2
ENDS_S = 120.0
"""Virtual seconds from the moment when nothing refuses the move to its end."""


async def queue_move(scene: Scene, target: SimMachine) -> QueuedMove:
    region = scene.cluster.region
    assert region is not None
    found = await region.queued_moves.migrate(TEXT, Aim(target.name), OPERATOR_URI)
    assert isinstance(found, QueuedMove)
    return found


def waits(scene: Scene, name: str) -> bool:
    """False also while no coordinator is up."""
    region = scene.cluster.region
    return region is not None and any(each.id == name for each in region.workloads.queue.waiting)


async def wait_done(scene: Scene, name: str) -> None:
    def is_over() -> bool:
        region = scene.cluster.region
        found = region.workloads.migrations.all.get(name) if region is not None else None
        return found is not None and found.is_over

    await scene.until(is_over, ENDS_S, f"the end of {name}")
    assert scene.cluster.region is not None
    ended = scene.cluster.region.moves.get(name)
    assert ended.stage is MigrationStage.DONE, ended.stages
    assert ended.verdict is not None
    assert ended.verdict.passed


def begun_moves(scene: Scene) -> list[str]:
    """Moves that left the queue because they began."""
    return [
        str(event.facts["migration"])
        for event in scene.world.history.events
        if event.kind == "move.queue" and not event.facts["stage"]
    ]


def test_a_queued_move_waits_over_dead_coordinators_and_then_loses_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        (source,) = scene.replicas
        target = next(each for each in scene.cluster.machines if each.chips and each is not source)
        await scene.cluster.operators.cordon(target.name, on=True)
        async with scene.load():
            move = await queue_move(scene, target)
            for _ in range(2):
                await asyncio.sleep(3.0)
                scene.cluster.kill_coordinator()
                await scene.until(lambda: scene.cluster.region is not None, 20.0, "a coordinator")
                await asyncio.sleep(5.0)
                assert waits(scene, move.id)
                assert scene.replicas == [source]
            await scene.cluster.operators.cordon(target.name, on=False)
            await scene.until(lambda: not waits(scene, move.id), 20.0, "its begin")
            await wait_done(scene, move.id)
            await scene.wait_whole(20.0)
        assert scene.replicas == [target]
        assert begun_moves(scene) == [move.id]

    for seed in range(SEEDS):
        scene = run_scenario(seed, 1, scenario)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:3]}"


def test_a_coordinator_that_dies_as_the_move_begins_begins_it_once() -> None:
    """At every step of its ports around the commit."""

    async def scenario(scene: Scene) -> None:
        (source,) = scene.replicas
        target = next(each for each in scene.cluster.machines if each.chips and each is not source)
        await scene.cluster.operators.cordon(target.name, on=True)
        async with scene.load():
            move = await queue_move(scene, target)
            await scene.cluster.operators.cordon(target.name, on=False)
            scene.cluster.kill_after_steps(scene.cluster.coordinator, scene.world.rng.seed % 12 + 1)
            await wait_done(scene, move.id)
            await scene.wait_whole(60.0)
        assert scene.cluster.region is not None
        assert [*scene.cluster.region.workloads.migrations.all] == [move.id]
        assert begun_moves(scene) in ([move.id], []), "[]: it died after the commit was durable and before it was told"

    for seed in range(0, 12, 3):
        scene = run_scenario(seed, 1, scenario)
        assert scene.lost_count == 0, f"seed {seed}: {scene.failed_answers[:3]}"


def test_a_move_whose_node_dies_while_it_waits_ends_or_waits_on() -> None:
    """The source's machine loses its power: the region replaces the replica, and the move goes on with that one."""

    async def scenario(scene: Scene) -> None:
        (source,) = scene.replicas
        target, third = (each for each in scene.cluster.machines if each.chips and each is not source)
        await scene.cluster.operators.cordon(target.name, on=True)
        async with scene.load():
            move = await queue_move(scene, target)
            scene.cluster.cut_power(source)
            await scene.until(lambda: scene.ready(third), 120.0, "a replacement")
            assert waits(scene, move.id)
            await scene.cluster.operators.cordon(target.name, on=False)
            await wait_done(scene, move.id)
        assert scene.ready(target)

    scene = run_scenario(0, 1, scenario, agents=3)
    assert {"MIGRATION_QUEUED", "MIGRATION_DONE"} <= scene.codes


@pytest.mark.timeout(3600)
def test_storms_with_queued_moves_are_safe_and_converge() -> None:
    """Every checker of a storm, the one of verification among them, over moves that wait."""
    seen = Counter[str]()
    for seed in range(3):
        outcome = run_seed(seed, SCENARIOS["queue"])
        assert not outcome.violations, f"{replay(outcome)}\n{outcome.violations[:5]}"
        seen.update(str(event.facts["stage"]) or "begun" for event in outcome.events if event.kind == "move.queue")
    assert seen["queued"] > 0, seen
    assert seen["begun"] > 0, seen
