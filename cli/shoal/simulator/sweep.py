"""Many seeds, on all cores."""

import multiprocessing
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from shoal.simulator import crossing, matrix, negotiation
from shoal.simulator.scenario import SCENARIOS, Outcome, play

BATCH = 4
PLAYS: Final[Mapping[str, Callable[[int], Outcome]]] = {
    **{name: partial(play, scenario=scenario) for name, scenario in SCENARIOS.items()},
    negotiation.NAME: negotiation.play,
    matrix.NAME: matrix.play,
    crossing.NAME: crossing.play,
}
"""What there is to play: one run of a seed."""


def sweep(seeds: Iterable[int], scenario: str, jobs: int) -> Generator[Outcome]:
    """The outcomes in the order of seeds, without their records: a failing seed is played again to read its story."""
    if jobs <= 1:
        yield from map(partial(_play, scenario=scenario), seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(partial(_play, scenario=scenario), seeds, chunksize=BATCH)


def replay(outcome: Outcome) -> str:
    """The one command that plays this run again."""
    return f"python -m shoal.simulator --seed {outcome.seed} --scenario {outcome.scenario} -v"


def _play(seed: int, scenario: str) -> Outcome:
    return replace(PLAYS[scenario](seed), events=(), cause=None)
