"""Improves the places of several new replicas together, after they were chosen one after the other.

This is a generalised assignment problem: each row (a new replica) takes one column (a model on a device), and columns
share memory and time of devices. The sum of the rows' objectives, as logarithms, is made smaller by three changes: a
row goes elsewhere; two rows exchange devices; a row takes the place of another, which goes elsewhere. The best changes
are made until none is left or the rounds are spent. Nothing is timed or drawn, so the same problem has one answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

UNPLACED: Final = -1
UNPLACED_COST: Final = 1e9
"""What a row without a place costs: more than any place, even one of which every figure is unknown."""
ROUNDS_MOST: Final = 64
"""Rounds of one search; each makes all changes that do not touch each other."""
CELLS_MOST: Final = 1_000_000
"""Largest number of rows times columns, and of rows times rows, that is searched: 8 MB for each table."""
GAIN_LEAST: Final = 1e-9
"""A smaller difference of two sums may be rounding."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Change = tuple[tuple[int, int], ...]
"""Rows and the columns that they take."""


@dataclass(frozen=True)
class AssignmentProblem:
    """Rows to be placed in columns. Tables have the shape (rows, columns)."""

    # Logarithm of the objective; inf where the row cannot go.
    cost: Floats
    # Bytes that the row takes there.
    memory: Floats
    # Share of the device's time that it takes there.
    busy: Floats
    # Index of the memory that each column takes from.
    memory_pool: Ints
    # Bytes that each memory has left for all rows.
    memory_left: Floats
    # Index of the hardware whose time each column takes.
    time_pool: Ints
    # Share of its time that each hardware has left for all rows.
    time_left: Floats
    # Index of the node of each column. Columns of one node may share pools; those of two nodes never do.
    node: Ints
    # What two rows of one group must not both take, by row and column: index of a domain, by the spread rule.
    apart: Ints
    # Index of the workload of each row.
    group: Ints

    @property
    def is_searchable(self) -> bool:
        """Whether there is something to improve, within `CELLS_MOST`. More than 1,000 rows never are, however few the
        columns: rows times rows count too."""
        rows, columns = self.cost.shape
        return rows > 1 and columns > 0 and bool(rows * max(rows, columns) <= CELLS_MOST)

    @cached_property
    def columns_of_node(self) -> Ints:
        """The columns of each node, filled up with the first of them."""
        order, counts = np.argsort(self.node, kind="stable"), np.bincount(self.node)
        first, number = (np.cumsum(counts) - counts)[:, None], np.arange(int(counts.max()))
        found: Ints = order[first + np.where(number < counts[:, None], number, 0)]
        return found

    @cached_property
    def siblings(self) -> Sequence[Ints]:
        """By row, the other rows of its group."""
        by_group = {int(each): np.flatnonzero(self.group == each) for each in np.unique(self.group)}
        return [by_group[int(group)][by_group[int(group)] != row] for row, group in enumerate(self.group)]

    @cached_property
    def has_siblings(self) -> Flags:
        return np.array([len(each) > 0 for each in self.siblings], dtype=np.bool_)

    def total(self, chosen: Ints) -> float:
        """Sum of the objectives of a choice: the column of each row, or UNPLACED."""
        return float(self.costs(chosen).sum())

    def costs(self, chosen: Ints) -> Floats:
        """The objective of each row."""
        return np.where(chosen == UNPLACED, UNPLACED_COST, self.cost[np.arange(len(chosen)), chosen])


def improve(problem: AssignmentProblem, start: Ints, rounds: int = ROUNDS_MOST) -> Ints:
    """A choice whose total is at most that of `start`, which is feasible."""
    chosen = start.copy()
    with np.errstate(invalid="ignore"):  # an unknown value costs infinitely much; from there to there gains nothing
        while rounds > 0 and _improve_once(problem, chosen):
            rounds -= 1
    return chosen


def _improve_once(problem: AssignmentProblem, chosen: Ints) -> bool:
    """Applies changes that touch different nodes; False if none is better."""
    touched, is_better = set[int](), False
    for change in _changes(problem, chosen):
        nodes = {int(problem.node[at]) for row, column in change for at in (column, int(chosen[row])) if at >= 0}
        if touched.isdisjoint(nodes) and _obeys_spread(problem, chosen, dict(change)):
            for row, column in change:
                chosen[row] = column
            touched |= nodes
            is_better = True
    return is_better


def _changes(problem: AssignmentProblem, chosen: Ints) -> Iterator[Change]:
    """Changes that fit and make the total smaller, by how much they do. Each counts as if it were the only one."""
    rows, now = np.arange(len(chosen)), problem.costs(chosen)
    placed = chosen != UNPLACED
    room, time = _left(problem, chosen)
    # Elsewhere: on a node where the row is not.
    fits = (problem.memory <= room[problem.memory_pool]) & _has_time(problem.busy, time[problem.time_pool])
    fits &= ~(placed[:, None] & (problem.node[None, :] == problem.node[chosen][:, None]))
    for row in np.flatnonzero(problem.has_siblings).tolist():
        taken_by = [chosen[each] for each in problem.siblings[row] if chosen[each] != UNPLACED]
        fits[row] &= ~np.isin(problem.apart[row], problem.apart[row, taken_by])
    elsewhere = np.where(fits, problem.cost, np.inf)
    target = elsewhere.argmin(axis=1)
    moved = elsewhere[rows, target] - now
    # In the place of another row: `entered[a, b]` is what row a costs on the node of b, once b has left it.
    held = np.flatnonzero(placed)
    columns = problem.columns_of_node[problem.node[chosen[held]]]  # (held, columns of a node)
    at = chosen[held]
    freed_memory = (problem.memory_pool[columns] == problem.memory_pool[at][:, None]) * problem.memory[held, at][
        :, None
    ]
    freed_time = (problem.time_pool[columns] == problem.time_pool[at][:, None]) * problem.busy[held, at][:, None]
    fits = problem.memory[:, columns] <= room[problem.memory_pool[columns]] + freed_memory
    fits &= _has_time(problem.busy[:, columns], time[problem.time_pool[columns]] + freed_time)
    costs = np.where(fits, problem.cost[:, columns], np.inf)  # (rows, held, columns of a node)
    best = costs.argmin(axis=2)
    entered = np.take_along_axis(costs, best[:, :, None], axis=2)[:, :, 0]
    column = columns[np.arange(len(held))[None, :], best]
    # On its own node a row may change its column; with another row of that node it exchanges nothing.
    same = placed[:, None] & (problem.node[chosen][:, None] == problem.node[at][None, :])
    own = np.zeros_like(same)
    own[held, np.arange(len(held))] = True
    recast = np.where(own, entered - now[:, None], np.inf).min(axis=1, initial=np.inf)
    entered = np.where(same, np.inf, entered)
    taken = entered - now[:, None] + moved[held][None, :]
    exchanged = np.full_like(taken, np.inf)
    gains = entered[held] - now[held][:, None]
    exchanged[held] = np.triu(gains + gains.T, 1) + np.tril(np.full_like(gains, np.inf))
    found = [
        *((float(moved[row]), 0, int(row), 0) for row in np.flatnonzero(moved < -GAIN_LEAST)),
        *((float(recast[row]), 1, int(row), 0) for row in np.flatnonzero(recast < -GAIN_LEAST)),
        *((float(taken[a, b]), 2, int(a), int(b)) for a, b in np.argwhere(taken < -GAIN_LEAST)),
        *((float(exchanged[a, b]), 3, int(a), int(b)) for a, b in np.argwhere(exchanged < -GAIN_LEAST)),
    ]
    place = {int(row): index for index, row in enumerate(held)}
    for _, kind, a, b in sorted(found):
        match kind:
            case 0:
                yield ((a, int(target[a])),)
            case 1:
                yield ((a, int(column[a, place[a]])),)
            case 2:
                yield (a, int(column[a, b])), (int(held[b]), int(target[held[b]]))
            case _:
                yield (a, int(column[a, b])), (int(held[b]), int(column[held[b], place[a]]))


def _left(problem: AssignmentProblem, chosen: Ints) -> tuple[Floats, Floats]:
    """Bytes and time that a choice leaves of each memory and of each hardware."""
    held = np.flatnonzero(chosen != UNPLACED)
    at = chosen[held]
    room, time = problem.memory_left.copy(), problem.time_left.copy()
    np.subtract.at(room, problem.memory_pool[at], problem.memory[held, at])
    np.subtract.at(time, problem.time_pool[at], problem.busy[held, at])
    return room, time


def _has_time(busy: Floats, left: Floats) -> Flags:
    """A row without declared traffic takes no time, whatever is left."""
    fits: Flags = (busy <= 0) | (busy <= left)
    return fits


def _obeys_spread(problem: AssignmentProblem, chosen: Ints, change: dict[int, int]) -> bool:
    """Whether the rows of each group stay apart after the change."""
    for row, column in change.items():
        for sibling in problem.siblings[row]:
            at = change.get(int(sibling), int(chosen[sibling]))
            if at != UNPLACED and problem.apart[row, column] == problem.apart[row, at]:
                return False
    return True
