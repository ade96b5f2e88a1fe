"""The optimum of an assignment problem, by HiGHS: the referee of what placement chooses."""

from dataclasses import dataclass
from typing import Final

import highspy
import numpy as np

from shoal.coordinator.core.placement.local_search import UNPLACED, AssignmentProblem, Ints

UNPLACED_PENALTY: Final = 100.0
"""Of a row without a place, as the logarithm of an objective: no place here is e^100 times worse than another."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """What HiGHS found."""

    # The column of each row; UNPLACED where it has none.
    chosen: Ints
    # No choice has a smaller sum: HiGHS' bound, with UNPLACED_PENALTY for each row without a place.
    bound: float
    # Whether it proved that nothing is better, within the gap that was asked.
    is_proven: bool


def solve(problem: AssignmentProblem, seconds: float, gap: float = 1e-6) -> Optimum:
    """Mixed-integer program: one binary variable for each row and column, one constraint for each row, memory and
    hardware."""
    rows, columns = np.nonzero(np.isfinite(problem.cost))
    cost = problem.cost[rows, columns]
    variables, count = len(rows), problem.cost.shape[0]
    model = highspy.HighsLp()
    model.num_col_ = variables + count
    model.col_cost_ = np.concatenate([cost, np.full(count, UNPLACED_PENALTY)])
    model.col_lower_ = np.zeros(model.num_col_)
    model.col_upper_ = np.ones(model.num_col_)
    model.integrality_ = [highspy.HighsVarType.kInteger] * model.num_col_
    memories, times = len(problem.memory_left), len(problem.time_left)
    model.num_row_ = count + memories + times
    model.row_lower_ = np.concatenate([np.ones(count), np.full(memories + times, -highspy.kHighsInf)])
    # Memory in MiB, so that the coefficients are of one size.
    model.row_upper_ = np.concatenate([np.ones(count), problem.memory_left / 2**20, problem.time_left])
    starts, index, value = [0], list[int](), list[float]()
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        index += [row, count + int(problem.memory_pool[column]), count + memories + int(problem.time_pool[column])]
        value += [1.0, float(problem.memory[row, column]) / 2**20, float(problem.busy[row, column])]
        starts.append(len(index))
    for row in range(count):
        index.append(row)
        value.append(1.0)
        starts.append(len(index))
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = starts, index, value
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", seconds)
    solver.setOptionValue("mip_rel_gap", gap)
    solver.passModel(model)
    solver.run()
    found = np.array(solver.getSolution().col_value[:variables]) > 0.5
    chosen = np.full(count, UNPLACED, dtype=np.int64)
    chosen[rows[found]] = columns[found]
    is_proven = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Optimum(chosen, float(solver.getInfo().mip_dual_bound), is_proven)
