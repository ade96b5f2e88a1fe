"""Live moves in virtual time, one process killed at each state: the move ends, and nobody is answered wrongly or twice.

F05's part of migration: the coordinator is killed before and after it persists each state, by where the seed puts it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from simulation.scene import TEXT, Scene, tell

from harness.report import record
from shoal.coordinator.core.migration.model import Migration, Stage
from shoal.coordinator.core.placement.model import Aim
from shoal.simulator.machine import Machine
from shoal.simulator.operators import WHO
from shoal.types.codes import Code

SEEDS = 3
STATES = (
    Stage.PLANNED, Stage.RESERVED, Stage.STAGING, Stage.VERIFYING, Stage.SHIFTING, Stage.DRAINING, Stage.ROLLING_BACK,
)  # fmt: skip
ENDS_S = 120.0
"""Virtual seconds in which every one of these moves is over, its node or coordinator killed on the way."""
RETRYABLE = {Code.WORKER_CRASHED, Code.REPLICA_UNREACHABLE, Code.MODEL_NOT_READY}

Blow = Callable[[Scene, Machine, Machine], None]


def coordinator(scene: Scene, source: Machine, target: Machine) -> None:
    scene.cluster.kill_coordinator()


def of_source(scene: Scene, source: Machine, target: Machine) -> None:
    scene.cluster.kill_agent(source)


def of_target(scene: Scene, source: Machine, target: Machine) -> None:
    scene.cluster.kill_agent(target)


async def moved(scene: Scene, state: Stage, blow: Blow | None) -> Migration:
    """A move to the node without a replica, and the blow when it is first seen in `state`; how it ended."""
    (source,) = scene.replicas
    target = next(each for each in scene.cluster.machines if each.chips and each is not source)
    region = scene.cluster.region
    assert region is not None
    begun = await region.moving.migrate(TEXT, Aim(target.name), WHO)

    def now() -> Migration | None:
        living = scene.cluster.region
        return living.workloads.migrations.all.get(begun.id) if living is not None else None

    if state is Stage.ROLLING_BACK:
        await scene.until(lambda: (seen := now()) is not None and seen.stage is Stage.SHIFTING, 60.0, "shifting")
        await region.moving.cancel(begun.id, WHO)
    passed = [each.stage for each in begun.story]

    def reached() -> bool:
        seen = now()
        return seen is not None and (seen.is_over or state in {*passed, *(each.stage for each in seen.story)})

    await scene.until(reached, 60.0, f"{state}")
    if blow is not None:
        blow(scene, source, target)
    await scene.until(lambda: (seen := now()) is not None and seen.is_over, ENDS_S, f"the end, after {state}")
    ended = now()
    assert ended is not None
    return ended


def test_a_move_under_load_loses_nothing() -> None:
    sent = 0

    async def story(scene: Scene) -> None:
        async with scene.load():
            ended = await moved(scene, Stage.DRAINING, None)
            assert ended.stage is Stage.DONE, ended.story
            await scene.whole(20.0)

    for seed in range(SEEDS):
        scene = tell(seed, 1, story)
        assert scene.lost == 0, f"seed {seed}: {scene.failed}"
        sent += len(scene.answers)
    assert sent > SEEDS * 500


@pytest.mark.parametrize("blow", [coordinator, of_source, of_target], ids=lambda blow: blow.__name__)
def test_f05_a_move_ends_whoever_is_killed_at_whatever_state(blow: Blow) -> None:
    ends = Counter[str]()
    sent = lost = runs = 0

    for state in STATES:

        async def story(scene: Scene, state: Stage = state) -> None:
            async with scene.load():
                ended = await moved(scene, state, blow)
                code = str(ended.state.refusal.code) if ended.state.kind == "aborted" else ""
                ends[f"{ended.stage} {code}".strip()] += 1
                await scene.whole(60.0)

        for seed in range(SEEDS):
            scene = tell(seed, 1, story)
            runs += 1
            sent += len(scene.answers)
            lost += scene.lost
            assert {code for _, _, code in scene.failed} <= RETRYABLE, f"seed {seed}, {state}: {scene.failed[:3]}"
            if blow is coordinator:
                assert scene.lost == 0, f"seed {seed}, {state}: {scene.failed[:3]}"
    assert set(ends) - {"done"} <= {f"aborted {code}" for code in Code}
    assert ends["done"], "some go through"
    who = blow.__name__.replace("_", "-")
    record("F05", "S", runs, killed=who, states=len(STATES), sent=sent, lost=lost, **dict(ends))


def test_f05_a_move_goes_on_where_the_store_says_after_restarts_at_every_state() -> None:
    """The coordinator is killed again and again, a little later each time."""

    async def story(scene: Scene) -> None:
        async with scene.load():
            moving = asyncio.ensure_future(moved(scene, Stage.DRAINING, None))
            while not moving.done():
                await asyncio.sleep(0.7 + scene.world.now() % 1.9)
                if not moving.done():
                    scene.cluster.kill_coordinator()
                    await scene.until(lambda: scene.cluster.region is not None, 20.0, "a coordinator")
                    await asyncio.sleep(6.0)
            assert (await moving).stage is Stage.DONE
            await scene.whole(60.0)

    for seed in range(SEEDS):
        scene = tell(seed, 1, story)
        assert scene.lost == 0, f"seed {seed}: {scene.failed[:3]}"
