"""A workload that goes to another region, or comes home, while something breaks at a step of its move: it ends by
itself, somebody serves whenever somebody could, nobody is answered wrongly, and nothing is left in the end.

`pytest tests/simulation/test_crossing_rows.py --crossing-seeds N`, or SHOAL_CROSSING_SEEDS; 10,000 by one command:
`python -m shoal.simulator --scenario crossing --seed 0 --count 10000`.
"""

import pytest
from simulation.struck import played

from shoal.simulator.crossing import CELLS, NAME, WAYS
from shoal.simulator.sweep import sweep


def test_f05_a_blow_at_a_step_of_a_move_between_regions(crossing_seeds: range) -> None:
    struck(crossing_seeds)


@pytest.mark.long
@pytest.mark.timeout(14400)
def test_f05_five_thousand_moves_between_regions() -> None:
    struck(range(100_000, 105_000))


def test_the_same_seed_crosses_the_same_way() -> None:
    first = [outcome.digest for outcome in sweep(range(3), NAME, 1)]
    assert first == [outcome.digest for outcome in sweep(range(3), NAME, 2)]


def struck(seeds: range) -> None:
    cells = played(NAME, seeds, of=len(CELLS), missed_most=1 / 10, done_least=1 / 3, between_regions=True)
    assert {cell.partition(" ")[0] for cell in cells} == set(WAYS)
