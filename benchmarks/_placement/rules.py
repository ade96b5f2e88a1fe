"""Rules that schedulers place by: each row in its turn, where it fits beside those before it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from shoal.coordinator.core.placement.local_search import UNPLACED, AssignmentProblem, Flags, Floats, Ints


@dataclass(frozen=True, slots=True)
class Figures:
    """What a rule looks at: tables of rows and columns."""

    # Predicted p95 latency in seconds.
    latency: Floats
    # USD/h of the device.
    price: Floats
    # Joules of one inference.
    joules: Floats
    # Logarithm of the objective.
    objective: Floats
    # A number for each row, for what is bound without a look at the devices.
    names: Ints


Rule = Callable[[Figures, int, Floats], Floats]
"""Figures, row and the share of each column's device that is taken -> what to choose the least of, by column."""

ONE_BY_ONE: Final = "one by one"
RULES: Final[Mapping[str, Rule]] = {
    "spread": lambda _figures, _row, taken: taken,
    "bin-pack": lambda _figures, _row, taken: -taken,
    "latency-greedy": lambda figures, row, _taken: figures.latency[row],
    "cheapest-first": lambda figures, row, _taken: figures.price[row],
    "energy-greedy": lambda figures, row, _taken: figures.joules[row],
    ONE_BY_ONE: lambda figures, row, _taken: figures.objective[row],
}
STATIC: Final = "static binding"


def place_by(rule: Rule, problem: AssignmentProblem, figures: Figures) -> Ints:
    """The column of each row, in their order; UNPLACED where nothing has room. Equals go to the first column."""
    memory, time = problem.memory_left.copy(), problem.time_left.copy()
    chosen = np.full(len(problem.cost), UNPLACED, dtype=np.int64)
    whole = problem.time_left[problem.time_pool]
    for row in range(len(chosen)):
        fits = _fits(problem, row, memory, time)
        if fits.any():
            taken = 1.0 - time[problem.time_pool] / whole
            _take(problem, chosen, row, int(np.where(fits, rule(figures, row, taken), np.inf).argmin()), memory, time)
    return chosen


def bind(problem: AssignmentProblem, figures: Figures) -> Ints:
    """Each row where its name says, of the columns that it may use; UNPLACED where there is no room."""
    memory, time = problem.memory_left.copy(), problem.time_left.copy()
    chosen = np.full(len(problem.cost), UNPLACED, dtype=np.int64)
    for row in range(len(chosen)):
        able = np.flatnonzero(np.isfinite(problem.cost[row]))
        if len(able):
            column = int(able[figures.names[row] % len(able)])
            if _fits(problem, row, memory, time)[column]:
                _take(problem, chosen, row, column, memory, time)
    return chosen


def _fits(problem: AssignmentProblem, row: int, memory: Floats, time: Floats) -> Flags:
    able: Flags = np.isfinite(problem.cost[row]) & (problem.memory[row] <= memory[problem.memory_pool])
    able &= problem.busy[row] <= time[problem.time_pool]
    return able


def _take(problem: AssignmentProblem, chosen: Ints, row: int, column: int, memory: Floats, time: Floats) -> None:
    chosen[row] = column
    memory[problem.memory_pool[column]] -= problem.memory[row, column]
    time[problem.time_pool[column]] -= problem.busy[row, column]
