"""A workload that goes to another region, or comes home, while something breaks at a step of its move: it ends by
itself, somebody serves whenever somebody could, nobody is answered wrongly, and nothing is left in the end.

`pytest tests/simulation/test_cross_region_rows.py --cross-region-seeds N`, or SHOAL_CROSS_REGION_SEEDS.
10,000 by one command: `python -m shoal.simulator --scenario cross-region --seed 0 --count 10000`.
"""

import pytest
from simulation.fault_matrix import run_matrix

from shoal.simulator.run.seeds import run_seeds
from shoal.simulator.scenarios.cross_region import CELLS, DIRECTIONS, NAME


def test_f05_a_blow_at_a_step_of_a_move_between_regions(cross_region_seeds: range) -> None:
    run_cells(cross_region_seeds)


@pytest.mark.long
@pytest.mark.timeout(14400)
def test_f05_five_thousand_moves_between_regions() -> None:
    run_cells(range(100_000, 105_000))


def test_the_same_seed_crosses_the_same_way() -> None:
    first = [outcome.digest for outcome in run_seeds(range(2), NAME, 1)]
    assert first == [outcome.digest for outcome in run_seeds(range(2), NAME, 2)]


def run_cells(seeds: range) -> None:
    cells = run_matrix(NAME, seeds, of=len(CELLS), missed_most=1 / 10, done_least=1 / 3, between_regions=True)
    assert {cell.partition(" ")[0] for cell in cells} == set(DIRECTIONS)
