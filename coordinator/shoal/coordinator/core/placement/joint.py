"""Decides the new replicas of several workloads of one priority together.

Each workload was solved by itself, one after the other. What `local_search` finds better for all of them is tried as
the places that each workload prefers: the solver checks it like any other choice, so nothing else can oversell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from shoal.coordinator.core.fleet.commitments import admissible_bytes
from shoal.coordinator.core.placement.allocations import Allocations, busy_share, memory_requirement
from shoal.coordinator.core.placement.contention import UTILISATION_MOST
from shoal.coordinator.core.placement.domains import domain_of
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.local_search import (
    UNPLACED,
    AssignmentProblem,
    Floats,
    Ints,
    improve,
)
from shoal.coordinator.core.placement.model import Slot
from shoal.coordinator.core.placement.solve import Level, OptionKey, Solver
from shoal.types.workload import Spread, WorkloadKey

TRIED_MOST: Final = 12_500
"""New replicas times devices. To predict and check one on the other takes about 50 us of a core (`shoal bench
placement`), twice that with the search, and no other part of the region runs meanwhile. It admits 200 on 60."""


@dataclass(frozen=True)
class JointProblem:
    """The new replicas of several workloads as an assignment problem."""

    # The arrays.
    problem: AssignmentProblem
    # By column, the option of each workload that has one there: node, device and the position of the model.
    columns: Sequence[tuple[str, str, int]]
    # The workload of each row.
    rows: Sequence[Solver]
    # The choice that was made one after the other.
    start: Ints

    def places_of(self, chosen: Ints) -> Mapping[WorkloadKey, tuple[OptionKey, ...]]:
        """The places of a choice by workload, in the order of rows."""
        found = dict[WorkloadKey, tuple[OptionKey, ...]]()
        for solver, column in zip(self.rows, chosen.tolist(), strict=True):
            if column != UNPLACED:
                node, device, position = self.columns[column]
                key = (node, device, solver.intent.models[position].variant)
                found[solver.intent.key] = (*found.get(solver.intent.key, ()), key)
        return found


def better_places(
    scope: Scope, solvers: Sequence[Solver], after: Allocations
) -> Mapping[WorkloadKey, tuple[OptionKey, ...]]:
    """Places for the new replicas of these workloads that are better in sum; empty where none were found. after: the
    allocations with all of them."""
    rows = [row for solver in solvers for row in _rows(solver)]
    if len(rows) < 2 or _have_best(rows, after):
        return {}  # alone, each has the best
    joint = joint_problem(scope, rows, after)
    if joint is None or not joint.problem.is_searchable:
        return {}
    chosen = improve(joint.problem, joint.start)
    return {} if np.array_equal(chosen, joint.start) else joint.places_of(chosen)


def is_worth_trying(rows: int, devices: int) -> bool:
    """Whether so many new replicas are more than one, and few enough to be decided twice in the region's loop."""
    return rows > 1 and rows * devices <= TRIED_MOST


class JointRow(NamedTuple):
    """One replica to be placed."""

    # Of its workload.
    solver: Solver
    # What its workload asks, and which replicas it keeps.
    level: Level
    # Where it is; None: it has no place.
    new: Option | None


def _have_best(rows: Sequence[JointRow], after: Allocations) -> bool:
    """Whether no row would have a better place if the others had none, as far as that is known without a look at each
    device: then no other choice is better in sum."""
    places = [row.new for row in rows if row.new is not None]
    if len(places) < len(rows):
        return False
    nodes = {place.slot.node for place in places}
    for _, group in groupby(zip(rows, places, strict=True), key=lambda each: id(each[0].solver)):
        (row, place), *others = group
        if not row.solver.are_best(row.level, [place, *(other for _, other in others)], after, nodes):
            return False
    return True


def joint_problem(scope: Scope, rows: Sequence[JointRow], after: Allocations) -> JointProblem | None:
    """The problem of these rows. after: allocations that include the rows which have a place. None where there is
    nothing to place."""
    if not rows or not scope.devices:
        return None
    models = max(len(solver.intent.models) for solver, _, _ in rows)
    columns = [(state.name, device.name, at) for state, device in scope.devices for at in range(models)]
    index = {column: number for number, column in enumerate(columns)}
    nodes = _numbers([node for node, _, _ in columns])
    domains = dict[str, Ints]()
    shape = len(rows), len(columns)
    cost, memory, busy = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    apart, start = np.zeros(shape, dtype=np.int64), np.full(len(rows), UNPLACED, dtype=np.int64)
    known = dict[WorkloadKey, tuple[Floats, Floats, Floats]]()
    for row, (solver, level, new) in enumerate(rows):
        key, spread = solver.intent.key, level.require.spread
        if key not in known:
            known[key] = _tables(solver, level, index)
        cost[row], memory[row], busy[row] = known[key]
        if spread not in domains:
            domains[spread] = _domains(scope, spread, models)
        apart[row] = domains[spread]
        for pick in level.picks:
            if pick.existing is not None and spread != Spread.NONE:
                taken = apart[row, index[pick.option.slot.node, pick.option.slot.device, 0]]
                cost[row, apart[row] == taken] = np.inf
        if new is not None:
            start[row] = index[_column(solver, new)]
    groups = [
        f"{solver.intent.key}" if level.require.spread != Spread.NONE else f"{solver.intent.key} {row}"
        for row, (solver, level, _) in enumerate(rows)
    ]
    memory_pool, memory_left = _memory_pools(scope, models, after)
    time_pool, time_left = _time_pools(scope, models, after)
    problem = AssignmentProblem(
        cost, memory, busy, memory_pool, memory_left, time_pool, time_left, nodes, apart, _numbers(groups)
    )
    placed = np.flatnonzero(start != UNPLACED)
    at = start[placed]
    np.add.at(memory_left, memory_pool[at], memory[placed, at])
    np.add.at(time_left, time_pool[at], busy[placed, at])
    return JointProblem(problem, columns, [solver for solver, _, _ in rows], start)


def _rows(solver: Solver) -> Sequence[JointRow]:
    """The places of a workload's new replicas; None for each that it lacks, where it may still get one."""
    level, _ = solver.choose()
    if not level.picks and solver.known_nowhere(level.require, level.limits) is not None:
        return ()
    if any(pick.move is not None for pick in level.picks) or level.standby is not None or level.evicted:
        return ()  # moves aim, and a standby is chosen beside all others
    new = [pick.option for pick in level.picks if pick.existing is None]
    lacks = 0 if solver.has_given_up else level.wanted - len(level.picks)
    return [JointRow(solver, level, each) for each in (*new, *[None] * lacks)]


def _column(solver: Solver, option: Option) -> tuple[str, str, int]:
    position = [model.variant for model in solver.intent.models].index(option.model.variant)
    return option.slot.node, option.slot.device, position


def _tables(solver: Solver, level: Level, index: Mapping[tuple[str, str, int], int]) -> tuple[Floats, Floats, Floats]:
    """Objective, memory and time of one workload by column; an objective of inf where it may not run.

    A new replica may run beside one that the level keeps, but not where another current one is: as `Solver` has it."""
    cost, memory, busy = np.full(len(index), np.inf), np.zeros(len(index)), np.zeros(len(index))
    kept = {pick.existing.assignment.id for pick in level.picks if pick.existing is not None}
    waiting = {each.option.key for each in solver.healthy if each.assignment.id not in kept}
    devices = [Slot(state.name, device.name) for state, device in solver.scope.devices]
    figures = solver.figures(level.require, level.limits, devices)
    if figures is not None:
        for each in figures:
            at = np.flatnonzero(each.feasible) * (len(index) // len(devices)) + solver.intent.models.index(each.model)
            cost[at], memory[at], busy[at] = (column[each.feasible] for column in (each.awake, each.memory, each.busy))
        options: Sequence[Option] = [each for each in solver.own_options if _column(solver, each) in index]
        faults = [solver.scope.faults(option, solver.intent, level.require, level.limits) for option in options]
        cost[[index[_column(solver, option)] for option in options]] = np.inf
    else:
        faults = [*solver.faults(level.require, level.limits)]
        options = solver.options
    fits = [option for option, found in zip(options, faults, strict=True) if not found and option.key not in waiting]
    if fits:
        columns = [index[_column(solver, option)] for option in fits]
        cost[columns] = solver.objectives(fits, [solver.values(option, level.require) for option in fits])
        memory[columns] = [memory_requirement(option) for option in fits]
        busy[columns] = [busy_share(solver.scope, solver.intent, option, level.require.replicas) for option in fits]
    return cost, memory, busy


def _domains(scope: Scope, spread: str, models: int) -> Ints:
    """The domain of each column."""
    names = ["/".join(domain_of(spread, state, device.name)) for state, device in scope.devices]
    return np.repeat(_numbers(names), models)


def _memory_pools(scope: Scope, models: int, after: Allocations) -> tuple[Ints, Floats]:
    """The memory of each column, and what each memory has left: the least that one of its devices admits."""
    pool = _numbers([f"{state.name}/{device.memory_root}" for state, device in scope.devices])
    left = np.full(int(pool.max()) + 1, np.inf)
    for number, (state, device) in zip(pool.tolist(), scope.devices, strict=True):
        left[number] = min(left[number], admissible_bytes(device, state, after.memory_of(state, device)))
    return np.repeat(pool, models), left


def _time_pools(scope: Scope, models: int, after: Allocations) -> tuple[Ints, Floats]:
    """The hardware of each column, and the share of its time that each has left."""
    pool = _numbers([f"{state.name}/{device.hardware or device.name}" for state, device in scope.devices])
    left = np.full(int(pool.max()) + 1, UTILISATION_MOST)
    for number, (state, device) in zip(pool.tolist(), scope.devices, strict=True):
        left[number] = min(left[number], UTILISATION_MOST - after.time_of(state, device))
    return np.repeat(pool, models), left


def _numbers(names: Sequence[str]) -> Ints:
    """The same number for the same name, from 0 on."""
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([known[name] for name in names], dtype=np.int64)
