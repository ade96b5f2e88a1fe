"""Runs many seeds on all cores."""

import multiprocessing
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from shoal.simulator.scenarios import cross_region, matrix, negotiation
from shoal.simulator.scenarios.region_run import SCENARIOS, RunOutcome, run_seed

BATCH = 4
RUN_BY_SCENARIO: Final[Mapping[str, Callable[[int], RunOutcome]]] = {
    **{name: partial(run_seed, scenario=scenario) for name, scenario in SCENARIOS.items()},
    negotiation.NAME: negotiation.run_seed,
    matrix.NAME: matrix.run_seed,
    cross_region.NAME: cross_region.run_seed,
}
"""Scenario name -> function that runs one seed."""


def run_seeds(seeds: Iterable[int], scenario: str, jobs: int) -> Generator[RunOutcome]:
    """Outcomes in the order of seeds, without their records: repeat a failing seed to read its record."""
    if jobs <= 1:
        yield from map(partial(_run_seed, scenario=scenario), seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(partial(_run_seed, scenario=scenario), seeds, chunksize=BATCH)


def replay(outcome: RunOutcome) -> str:
    """The command line that repeats this run."""
    return f"python -m shoal.simulator --seed {outcome.seed} --scenario {outcome.scenario} -v"


def _run_seed(seed: int, scenario: str) -> RunOutcome:
    return replace(RUN_BY_SCENARIO[scenario](seed), events=(), cause=None)
