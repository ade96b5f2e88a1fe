"""Live moves and placements in virtual time, one process killed at a step (F05): each ends, nobody is answered wrongly
or twice, who asks again is answered, and the region is whole.

`pytest tests/simulation/test_move_rows.py --matrix-seeds N`, or SHOAL_MATRIX_SEEDS; 10,000 by one command:
`python -m shoal.simulator --scenario matrix --seed 0 --count 10000`.
"""

import asyncio
import os
from collections import Counter
from time import perf_counter

import pytest
from simulation.scene import TEXT, Scene, tell

from harness.report import record
from shoal.coordinator.core.migration.model import Migration, Stage
from shoal.coordinator.core.placement.model import Aim
from shoal.simulator.matrix import CELLS
from shoal.simulator.operators import WHO
from shoal.simulator.scenario import Outcome
from shoal.simulator.sweep import replay, sweep

SEEDS = 3
ENDS_S = 120.0
"""Virtual seconds in which every one of these moves is over, its coordinator killed on the way."""
JOBS = os.cpu_count() or 1


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
    played(matrix_seeds)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_f05_ten_thousand_cells() -> None:
    """Every cell some twenty times."""
    assert set(played(range(100_000, 110_000))) == {str(cell) for cell in CELLS}


def played(seeds: range) -> Counter[str]:
    """How often each cell was struck."""
    began = perf_counter()
    outcomes = list(sweep(seeds, "matrix", JOBS))
    took = perf_counter() - began
    failed = [outcome for outcome in outcomes if outcome.violations]
    struck = Counter(outcome.kinds[0] for outcome in outcomes if outcome.struck.get("fault.struck"))
    missed = [outcome.seed for outcome in outcomes if not outcome.struck.get("fault.struck")]
    counts = Counter[str]()
    for outcome in outcomes:
        counts.update(outcome.counts)
    ends = {name: count for name, count in sorted(counts.items()) if name.startswith(("done", "aborted"))}
    settled = [outcome.converged_s for outcome in outcomes if not outcome.violations]
    record(
        "F05", "S", len(outcomes), cells=len(struck), of=len(CELLS), missed=len(missed), ends=ends,
        asked=counts["asked"], refused_at_first=counts["failed"], lost=counts["lost"],
        converged_worst_s=round(max(settled), 1), ms_each=round(1000 * took / len(outcomes)),
    )  # fmt: skip
    assert not failed, f"{len(failed)} of {len(outcomes)} seeds failed\n" + "\n".join(map(told, failed[:10]))
    assert len(missed) <= len(outcomes) / 20, f"the blow missed its moment: seeds {missed[:20]}"
    assert counts["lost"] == 0
    assert ends["done"] > sum(ends.values()) / 2
    return struck


def told(outcome: Outcome) -> str:
    return f"{outcome.kinds}: {replay(outcome)}\n    " + "\n    ".join(outcome.violations[:5])


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
