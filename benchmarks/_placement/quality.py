"""How near to the optimum placement chooses: instances of published measurements, HiGHS as referee, other rules beside.

All are judged by the same objective on the same tables, which placement's own code makes. A choice's distance is the
geometric mean, over the services that it places, of their objective divided by that which the optimum gives them: 1.02
is 2 % worse. Placement itself decides through `place`, as a region does.
"""

import json
import math
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from _placement.exact import Optimum, solve
from _placement.instances import MATRIX, make_instance, read_processors
from _placement.rules import RULES, STATIC, Figures, bind, place_by

from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.allocations import initial_allocations
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.joint import JointProblem, JointRow, joint_problem
from shoal.coordinator.core.placement.local_search import UNPLACED, Ints
from shoal.coordinator.core.placement.model import Inputs
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.rank import predicted_values
from shoal.coordinator.core.placement.replicas import WorkloadReplicas
from shoal.coordinator.core.placement.solve import Solver

SHOAL: Final = "Shoal"
MEDIAN_MOST, WORST_MOST = 1.02, 1.05
"""Goals: distance from the optimum in the median and at worst."""


@dataclass(frozen=True, slots=True)
class Result:
    """One rule on one instance."""

    # The rule.
    rule: str
    # Services that it places.
    placed: int
    # Services that the optimum places.
    optimal: int
    # Distance from the optimum; NaN where it places none.
    distance: float
    # Seconds that the decision took.
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One instance."""

    # Number of services.
    services: int
    # Number of devices.
    devices: int
    # Whether HiGHS proved its optimum. Where it did not, distances are from its bound.
    is_proven: bool
    # Seconds that HiGHS took.
    exact_s: float
    # Each rule, Shoal first.
    results: tuple[Result, ...]


def measure(inputs: Inputs, limit_s: float) -> Measured:
    """All rules and the optimum of one instance. limit_s: seconds for HiGHS."""
    joint, figures = tables(inputs)
    began = time.perf_counter()
    optimum = solve(joint.problem, limit_s)
    exact_s = time.perf_counter() - began
    found = [(SHOAL, *_timed(lambda: _by_shoal(inputs, joint)))]
    found += [(name, *_timed(partial(place_by, rule, joint.problem, figures))) for name, rule in RULES.items()]
    found += [(STATIC, *_timed(lambda: bind(joint.problem, figures)))]
    for _, chosen, _ in found:
        _check(joint, chosen)
    results = tuple(_result(joint, optimum, *each) for each in found)
    return Measured(len(inputs.intents), len(inputs.fleet.nodes), optimum.is_proven, exact_s, results)


def tables(inputs: Inputs) -> tuple[JointProblem, Figures]:
    """The assignment problem of an empty region, rows in the order of services, and what rules look at."""
    scope = Scope(inputs)
    nothing = WorkloadReplicas((), ())
    free = initial_allocations(scope, ())
    solvers = [Solver(scope, intent, nothing, 0, free) for intent in inputs.intents]
    joint = joint_problem(scope, [JointRow(solver, solver.choose()[0], None) for solver in solvers], free)
    assert joint is not None
    index = {column: number for number, column in enumerate(joint.columns)}
    values = np.full((*joint.problem.cost.shape, len(score.TERMS)), np.inf)
    for row, solver in enumerate(solvers):
        variants = [model.variant for model in solver.intent.models]
        for option in solver.options:
            column = index[option.slot.node, option.slot.device, variants.index(option.model.variant)]
            values[row, column] = predicted_values(scope, option, solver.intent, 1)
    names = np.array([zlib.crc32(str(intent.key).encode()) for intent in inputs.intents], dtype=np.int64)
    latency, price, joules = (values[:, :, at] for at in range(3))
    return joint, Figures(latency, price, joules, joint.problem.cost, names)


def _by_shoal(inputs: Inputs, joint: JointProblem) -> Ints:
    plan = place(inputs, explain=False)
    index = {column: number for number, column in enumerate(joint.columns)}
    found = np.full(len(inputs.intents), UNPLACED, dtype=np.int64)
    for row, intent in enumerate(inputs.intents):
        variants = [model.variant for model in intent.models]
        for target in plan.targets[intent.key]:
            found[row] = index[target.node, target.device, variants.index(target.variant)]
    return found


def _timed(decide: Callable[[], Ints]) -> tuple[Ints, float]:
    began = time.perf_counter()
    chosen = decide()
    return chosen, time.perf_counter() - began


def _check(joint: JointProblem, chosen: Ints) -> None:
    """Nothing is oversold, and every service is where it may be."""
    problem = joint.problem
    rows = np.flatnonzero(chosen != UNPLACED)
    at = chosen[rows]
    assert np.isfinite(problem.cost[rows, at]).all()
    memory, busy = problem.memory_left.copy(), problem.time_left.copy()
    np.subtract.at(memory, problem.memory_pool[at], problem.memory[rows, at])
    np.subtract.at(busy, problem.time_pool[at], problem.busy[rows, at])
    assert (memory >= 0).all()
    assert (busy >= -1e-9).all()


def _result(joint: JointProblem, optimum: Optimum, rule: str, chosen: Ints, seconds: float) -> Result:
    both = np.flatnonzero((chosen != UNPLACED) & (optimum.chosen != UNPLACED))
    placed, optimal = int((chosen != UNPLACED).sum()), int((optimum.chosen != UNPLACED).sum())
    if not len(both):
        return Result(rule, placed, optimal, math.nan, seconds)
    cost = joint.problem.cost
    difference = float((cost[both, chosen[both]] - cost[both, optimum.chosen[both]]).sum())
    if not optimum.is_proven:  # the optimum may be as low as HiGHS' bound
        found = np.where(optimum.chosen == UNPLACED, 100.0, cost[np.arange(len(cost)), optimum.chosen]).sum()
        difference += max(0.0, float(found) - optimum.bound) * len(both) / len(cost)
    return Result(rule, placed, optimal, math.exp(difference / len(both)), seconds)


def main(data: Path | None, count: int, seed: int, limit_s: float) -> int:
    """Judges `count` instances of a seed, prints the table and the line of JSON. Returns 1 where a goal is missed.
    data: the measurements; None: those beside this file."""
    blocks = read_processors(data or MATRIX)
    instances = list[Measured]()
    for number in range(count):
        instances.append(measure(make_instance(blocks, number, seed), limit_s))
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {count}", end="", file=sys.stderr)
    figures = report(instances)
    shoal = [each.results[0] for each in instances]
    median, worst = statistics.median(each.distance for each in shoal), max(each.distance for each in shoal)
    short = sum(each.placed < each.optimal for each in shoal)
    unproven = sum(not each.is_proven for each in instances)
    exact = sorted(each.exact_s for each in instances)
    print(f"HiGHS: {statistics.median(exact):.2f} s in the median, {exact[-1]:.1f} s at most; {unproven} not proven")
    is_met = median <= MEDIAN_MOST and worst <= WORST_MOST and not short
    summary = {
        "instances": count, "median": round(median, 4), "worst": round(worst, 4), "places_fewer": short,
        "unproven": unproven, "goals_met": is_met, "rules": figures,
    }  # fmt: skip
    print(json.dumps(summary))
    return 0 if is_met else 1


def report(instances: Sequence[Measured]) -> dict[str, object]:
    """The table, and the figures of the last line."""
    print(f"{'rule':16} {'placed':>8} {'median':>8} {'p95':>8} {'worst':>8} {'ms p50':>8} {'ms worst':>9}")
    figures = dict[str, object]()
    for at, name in enumerate(each.rule for each in instances[0].results):
        rows = [each.results[at] for each in instances]
        distances = sorted(each.distance for each in rows if math.isfinite(each.distance))
        placed = sum(each.placed for each in rows) / sum(each.optimal for each in rows)
        times = sorted(each.seconds * 1e3 for each in rows)
        median, p95, worst = statistics.median(distances), distances[int(0.95 * (len(distances) - 1))], distances[-1]
        print(
            f"{name:16} {placed:8.2%} {median:8.4f} {p95:8.4f} {worst:8.4f} "
            f"{statistics.median(times):8.1f} {times[-1]:9.1f}"
        )
        figures[name] = {"placed": round(placed, 4), "median": round(median, 4), "worst": round(worst, 4)}
    return figures
