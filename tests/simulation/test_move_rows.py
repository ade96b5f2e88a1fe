"""Live moves and placements in virtual time, one process killed at a step (F05): each ends, nobody is answered wrongly
or twice, who asks again is answered, and the region is whole.

`pytest tests/simulation/test_move_rows.py --matrix-seeds N`, or SHOAL_MATRIX_SEEDS; 10,000 by one command:
`python -m shoal.simulator --scenario matrix --seed 0 --count 10000`.
"""

import asyncio
from collections import Counter

import pytest
from simulation.scene import TEXT, Scene, tell
from simulation.struck import JOBS, played, told

from shoal.coordinator.core.migration.model import Migration, Stage
from shoal.coordinator.core.placement.model import Aim
from shoal.simulator.matrix import CELLS
from shoal.simulator.operators import WHO
from shoal.simulator.sweep import sweep

SEEDS = 3
ONCE_FAILED = (
    1572,  # what runs on a node that a new coordinator had not heard was replaced by what nobody verified
    3454,  # the same
    268,  # what was about to move by itself counted as at rest
    2168,  # the same
    7721,  # the same: its place could be looked at again, as a move there had failed long enough ago
    1600,  # so did what was about to be tried again
    2680,  # the same
    3391,  # the same
)
"""Seeds of the matrix, and what they found."""
ENDS_S = 120.0
"""Virtual seconds in which every one of these moves is over, its coordinator killed on the way."""


async def moved(scene: Scene) -> Migration:
    """A move to the node without a replica; how it ended."""
    (source,) = scene.replicas
    target = next(each for each in scene.cluster.machines if each.chips and each is not source)
    region = scene.cluster.region
    assert region is not None
    begun = await region.moving.migrate(TEXT, Aim(target.name), WHO)

    def now() -> Migration | None:
        living = scene.cluster.region
        return living.workloads.migrations.all.get(begun.id) if living is not None else None

    await scene.until(lambda: (seen := now()) is not None and seen.is_over, ENDS_S, "its end")
    ended = now()
    assert ended is not None
    return ended


def test_a_move_under_load_loses_nothing() -> None:
    sent = 0

    async def story(scene: Scene) -> None:
        async with scene.load():
            ended = await moved(scene)
            assert ended.stage is Stage.DONE, ended.story
            await scene.whole(20.0)

    for seed in range(SEEDS):
        scene = tell(seed, 1, story)
        assert scene.lost == 0, f"seed {seed}: {scene.failed}"
        sent += len(scene.answers)
    assert sent > SEEDS * 500


def test_f05_a_process_killed_at_a_step_of_a_machine(matrix_seeds: range) -> None:
    """Cells of the matrix: step of a move or a placement, moment, victim (`shoal.simulator.matrix`)."""
    struck(matrix_seeds)


def test_f05_seeds_that_once_failed() -> None:
    failed = [outcome for outcome in sweep(ONCE_FAILED, "matrix", JOBS) if outcome.violations]
    assert not failed, "\n".join(map(told, failed))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_f05_ten_thousand_cells() -> None:
    """Every cell some twenty times."""
    assert set(struck(range(100_000, 110_000))) == {str(cell) for cell in CELLS}


def struck(seeds: range) -> Counter[str]:
    return played("matrix", seeds, of=len(CELLS), missed_most=1 / 20, done_least=1 / 2)


def test_f05_a_move_goes_on_where_the_store_says_after_restarts_at_every_state() -> None:
    """The coordinator is killed again and again, a little later each time."""

    async def story(scene: Scene) -> None:
        async with scene.load():
            moving = asyncio.ensure_future(moved(scene))
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
