"""A workload that goes to another region, or comes home, while something breaks at a step of its move: it ends by
itself, somebody serves whenever somebody could, nobody is answered wrongly, and nothing is left in the end.

`pytest tests/simulation/test_crossing_rows.py --crossing-seeds N`, or SHOAL_CROSSING_SEEDS; 10,000 by one command:
`python -m shoal.simulator --scenario crossing --seed 0 --count 10000`.
"""

import os
from collections import Counter
from time import perf_counter

import pytest

from harness.report import record
from shoal.simulator.crossing import CELLS, NAME, WAYS
from shoal.simulator.scenario import Outcome
from shoal.simulator.sweep import replay, sweep

JOBS = os.cpu_count() or 1


def test_f05_a_blow_at_a_step_of_a_move_between_regions(crossing_seeds: range) -> None:
    played(crossing_seeds)


@pytest.mark.long
@pytest.mark.timeout(14400)
def test_f05_five_thousand_moves_between_regions() -> None:
    played(range(100_000, 105_000))


def test_the_same_seed_crosses_the_same_way() -> None:
    first = [outcome.digest for outcome in sweep(range(3), NAME, 1)]
    assert first == [outcome.digest for outcome in sweep(range(3), NAME, 2)]


def told(outcome: Outcome) -> str:
    return f"{outcome.kinds}: {replay(outcome)}\n    " + "\n    ".join(outcome.violations[:5])


def played(seeds: range) -> None:
    began = perf_counter()
    outcomes = list(sweep(seeds, NAME, JOBS))
    took = perf_counter() - began
    failed = [outcome for outcome in outcomes if outcome.violations]
    struck = Counter(outcome.kinds[0] for outcome in outcomes if outcome.struck.get("fault.struck"))
    missed = [outcome.seed for outcome in outcomes if not outcome.struck.get("fault.struck")]
    counts = Counter[str]()
    for outcome in outcomes:
        counts.update(outcome.counts)
    ends = {name: count for name, count in sorted(counts.items()) if name.startswith(("done", "aborted"))}
    record(
        "F05", "S", len(outcomes), between_regions=True, cells=len(struck), of=len(CELLS), missed=len(missed),
        ends=ends, asked=counts["asked"], refused_at_first=counts["failed"], lost=counts["lost"],
        at_rest_worst_s=round(max(each.converged_s for each in outcomes if not each.violations), 1),
        ms_each=round(1000 * took / len(outcomes)),
    )  # fmt: skip
    assert not failed, f"{len(failed)} of {len(outcomes)} seeds failed\n" + "\n".join(map(told, failed[:10]))
    assert len(missed) <= len(outcomes) / 10, f"the blow missed its moment: seeds {missed[:20]}"
    assert counts["lost"] == 0
    assert ends["done"] > sum(ends.values()) / 3
    assert {cell.partition(" ")[0] for cell in struck} == set(WAYS)
