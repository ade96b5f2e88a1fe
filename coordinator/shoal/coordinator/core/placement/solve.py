"""Chooses a workload's replicas for one set of requirements and limits."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.allocations import Allocations, busy_share, wants_standby
from shoal.coordinator.core.placement.columns import (
    DeviceColumns,
    Excluded,
    KnownOption,
    ModelFigures,
    Nowhere,
    is_uniform,
)
from shoal.coordinator.core.placement.contention import ContentionCheck, Pick, is_on_other_node
from shoal.coordinator.core.placement.domains import Domain, domain_of, taken_domains
from shoal.coordinator.core.placement.feasible import (
    HARD_CONSTRAINTS,
    Constraint,
    Option,
    PlacementFault,
    Scope,
    node_fault,
)
from shoal.coordinator.core.placement.model import Move, Slot, terms_of
from shoal.coordinator.core.placement.rank import (
    PREFERENCE,
    WORST,
    TermValues,
    gain,
    objectives,
    predicted_values,
    tie_breaks_of,
    weighed_values,
)
from shoal.coordinator.core.placement.replicas import CurrentReplica, FailedReplica, WorkloadReplicas, may_retry
from shoal.coordinator.core.placement.tenant_cost import NO_COST, TenantCost
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device
from shoal.types.units import Bytes
from shoal.types.workload import Intent, Limits, ModelRef, Requirements, Spread

OptionKey = tuple[str, str, str]
"""Node, device and model variant."""

BROKEN_MOST = 3
"""Replicas of one workload that may be broken before it is tried nowhere else, so that one bad model does not fail on
every node of a fleet."""


@dataclass(frozen=True, slots=True)
class Level:
    """The solution for one set of requirements and limits."""

    # The requirements.
    require: Requirements
    # The limits.
    limits: Limits
    # Replicas for requests that are wanted.
    wanted: int
    # Replicas for requests that were chosen.
    picks: tuple[Pick, ...]
    # Ids of current replicas beyond their tenant's quota.
    evicted: tuple[str, ...]
    # Capacity that is taken, this workload's replicas included.
    allocations: Allocations
    # The standby; None: none was asked for or found.
    standby: Pick | None = None
    # Why there is no standby although one is asked for; else None.
    no_standby: Refusal | None = None

    @property
    def is_full(self) -> bool:
        return len(self.picks) >= self.wanted


class Occupancy(NamedTuple):
    """Where a replica is, and the memory that it takes there."""

    # Id of the replica.
    assignment: str
    slot: Slot
    memory_bytes: Bytes


class CandidateTable:
    """Every (device, model) of the region for one workload, and what excludes each by itself. Nothing in it depends on
    what else is placed, so that several solvers of the workload share it."""

    def __init__(self) -> None:
        self.options: tuple[Option, ...] | None = None
        """None: nothing asked for them yet."""
        self.faults = dict[tuple[Requirements, Limits], Sequence[tuple[PlacementFault, ...]]]()


class Solver:
    """Places one workload against the allocations of all others."""

    def __init__(
        self,
        scope: Scope,
        intent: Intent,
        replicas: WorkloadReplicas,
        cap: int,
        allocations: Allocations,
        baseline: Callable[[], Allocations] | None = None,
        *,
        elsewhere: bool = False,
        pending_moves: Sequence[Move] = (),
        preferred: Sequence[OptionKey] = (),
        table: CandidateTable | None = None,
        columns: DeviceColumns | None = None,
    ) -> None:
        """cap: current replicas that the quota lets stay. allocations: with everything that was decided before this
        workload. baseline: without those decisions, and as if their workloads had no replicas; None: nothing was
        decided. elsewhere: only a
        standby is wanted here. pending_moves: moves that look for a place, each where it aims; their sources do not
        count as current replicas. preferred: keys of the options for its new replicas, one each, where they fit. table:
        of another solver of the same workload and replicas. columns: the devices as arrays, with what these allocations
        take of them; the workload's own nodes are touched."""
        self._preferred = preferred
        self._columns = None if elsewhere or pending_moves or wants_standby(intent) else columns
        self.table = CandidateTable() if table is None else table
        self.pending_moves = pending_moves
        self.scope = scope
        self.intent = intent
        self.elsewhere = elsewhere
        self.active = replicas.active
        self.standbys = replicas.standbys
        self.failed = replicas.failed
        self.cap = cap
        self.replicas = replicas
        self.given = allocations
        """With its current replicas."""
        # Nothing that a solver holds refers to it, so that what it looked at is freed with it, without a search.
        self._baseline = cache(partial(_without_own, baseline or (lambda: allocations), scope, intent, replicas))
        self._levels = dict[tuple[Requirements, Limits], Level]()
        self._exclusions = dict[tuple[Requirements, Limits], tuple[tuple[PlacementFault, ...], ...]]()
        self._orders = dict[tuple[Requirements, Limits], list[Option]]()

    @property
    def healthy(self) -> tuple[CurrentReplica, ...]:
        return (*self.active, *self.standbys)

    @cached_property
    def allocations(self) -> Allocations:
        """Without its current replicas."""
        return self.given.with_undecided(self.scope, self.intent, self.replicas, -1)

    @property
    def baseline(self) -> Allocations:
        """The same, without what was decided before."""
        return self._baseline()

    @cached_property
    def _contention(self) -> ContentionCheck:
        return ContentionCheck(self.scope, self.intent, self.allocations, self._baseline)

    @property
    def cost(self) -> TenantCost:
        """Of its current replicas that count."""
        found = NO_COST
        for each in self.healthy:
            found = found.plus(TenantCost.of(each.option.cost))
        return found

    @cached_property
    def terms(self) -> str:
        return terms_of(self.intent)

    @cached_property
    def broken_replicas(self) -> tuple[FailedReplica, ...]:
        inputs = self.scope.inputs
        return tuple(
            each
            for each in self.failed
            if each.assignment.id in inputs.broken_assignments and not may_retry(inputs, self.intent, each)
        )

    def with_moves(
        self, replicas: WorkloadReplicas, pending_moves: Sequence[Move], leaving: Occupancy | None = None
    ) -> "Solver":
        """A solver of the same workload with these of its moves under way. replicas: as they then are. leaving: a
        replica that is unloaded before its replacement is loaded."""
        allocations, baseline = (
            each.with_undecided(self.scope, self.intent, replicas, 1) for each in (self.allocations, self.baseline)
        )
        if leaving is not None:
            allocations, baseline = (
                each.with_freed_memory(leaving.slot, leaving.memory_bytes) for each in (allocations, baseline)
            )
        return Solver(
            self.scope,
            self.intent,
            replicas,
            self.cap,
            allocations,
            lambda: baseline,
            elsewhere=self.elsewhere,
            pending_moves=pending_moves,
        )

    @property
    def options(self) -> tuple[Option, ...]:
        """Every (device, model) of the region. Where a current replica runs, the option uses that replica's
        measurements."""
        if self.table.options is None:
            self._look_at_all(self.intent.require, self.intent.limits)
        assert self.table.options is not None
        return self.table.options

    def faults(self, require: Requirements, limits: Limits) -> Sequence[tuple[PlacementFault, ...]]:
        """Per option, what excludes it whatever else is placed."""
        if (require, limits) not in self.table.faults:
            self._look_at_all(require, limits)
        return self.table.faults[require, limits]

    def _look_at_all(self, require: Requirements, limits: Limits) -> None:
        """Adds the faults of these requirements to the table, and the options if nothing asked for them yet."""
        columns, is_new, table = self._uniform_columns(require, limits), not (self.healthy or self.failed), self.table
        if columns is not None and is_new and not columns.may_sleep:
            rows = [*columns.candidates(self.scope, self.intent, require, limits)]
            table.options = tuple(option for option, _ in rows) if table.options is None else table.options
            table.faults[require, limits] = [found for _, found in rows]
            return
        table.options = self._make_options() if table.options is None else table.options
        table.faults[require, limits] = [
            self.scope.faults(option, self.intent, require, limits) for option in table.options
        ]

    @property
    def own_options(self) -> tuple[Option, ...]:
        """Those where its replicas run or failed: what is so there is not so on all devices alike."""
        found = [
            (model, *place)
            for model in self.intent.models
            if model.digest in self.scope.inputs.profiles
            for slot in sorted({Slot(node, device) for node, device, _ in (*self._held, *self._failures)})
            if (place := self.scope.find(slot)) is not None
        ]
        return tuple(self._option(*each) for each in found)

    def _make_options(self) -> tuple[Option, ...]:
        return tuple(
            self._option(model, state, device)
            for model in self.intent.models
            if model.digest in self.scope.inputs.profiles
            for state, device in self.scope.devices
        )

    def _option(self, model: ModelRef, state: NodeState, device: Device) -> Option:
        key = (state.name, device.name, model.variant)
        failed = self._failures.get(key)
        return self._held.get(key) or self.scope.option(self.intent, model, state, device, earlier_failure=failed)

    @cached_property
    def _held(self) -> Mapping[OptionKey, Option]:
        """Where current replicas run."""
        return {(each.slot.node, each.slot.device, each.assignment.variant): each.option for each in self.healthy}

    @cached_property
    def _failures(self) -> Mapping[OptionKey, Refusal]:
        """Where replicas failed, and why."""
        return {
            (each.node, each.assignment.device, each.assignment.variant): each.refusal for each in self.broken_replicas
        }

    def steady_level(self) -> Level | None:
        """The level where nothing has to be decided: all wanted replicas exist and are confirmed under the current
        terms. None where something has to be decided."""
        require = self.intent.require
        wanted = self._replica_count(require)
        if len(self.active) != wanted or len(self.standbys) != wants_standby(self.intent):
            return None
        if self.cap != len(self.healthy):
            return None
        if not all(self.is_confirmed(each) and self._still_meets(each, require) for each in self.healthy):
            return None
        picks = [Pick(each.option, each) for each in self.active]
        if require.spread != Spread.NONE and len(taken_domains(picks, require.spread)) < len(picks):
            return None  # a failed replica came back beside its replacement
        standby = next((Pick(each.option, each) for each in self.standbys), None)
        if standby is not None and not is_on_other_node(standby.option, picks):
            return None
        if self.failed or self.intent.key in self.scope.inputs.awarded:
            allocations = self.allocations
            for each in self.healthy:
                allocations = allocations.with_kept_replica(self.scope, self.intent, each)
        else:
            allocations = self.given  # what it has is all that it takes
        return Level(require, self.intent.limits, wanted, tuple(picks), (), allocations, standby)

    def choose(self) -> tuple[Level, tuple[str, ...]]:
        """The level of the policy's own setting, else of its `relax` steps in order: the first that places all
        replicas, else the one that places most. With the steps that it takes, as typed."""
        intent = self.intent
        levels = [self.solve(intent.require, intent.limits)]
        for step in intent.relax:
            if levels[-1].is_full:
                break
            levels.append(self.solve(step.require, step.limits))
        index = max(range(len(levels)), key=lambda index: (levels[index].is_full, len(levels[index].picks), -index))
        return levels[index], tuple(step.change for step in intent.relax[:index])

    def solve(self, require: Requirements, limits: Limits) -> Level:
        """Picks replicas one by one, the best first. The result is cached, because the reason why a move waits is read
        from it later.

        A confirmed current replica stays. One whose documents changed yields to a place that is better by its policy's
        gain. A standby takes over before a new replica is created.
        """
        known = self._levels.get((require, limits))
        if known is None:
            known = self._levels[require, limits] = self._solve(require, limits)
        return known

    def _solve(self, require: Requirements, limits: Limits) -> Level:
        intent = self.intent
        wanted = self._replica_count(require)
        if wanted and self._is_known_nowhere(require, limits):
            return Level(require, limits, wanted, (), (), self.allocations)
        # Confirmed replicas have to meet the hard constraints only; the others are checked like new ones.
        staying = [each for each in self.active if self.is_confirmed(each) and self._still_meets(each, require)]
        yielding = [
            each for each in self.active if not self.is_confirmed(each) and self._may_stay(each, require, limits)
        ]
        standbys = [each for each in self.standbys if self._may_stay(each, require, limits)]
        current = {each.option.key: each.option for each in (*staying, *yielding, *standbys)}
        places = {option.key: place for place, option in enumerate(self._ranked([*current.values()], require))}
        for each in (staying, yielding, standbys):
            each.sort(key=lambda one: (not one.ready_in_role, places[one.option.key], one.assignment.id))
            self._put_back(each, require)
        picks, taken = list[Pick](), set[Domain]()
        allocations = self.allocations
        while len(picks) < wanted:
            if self._is_capped(picks) and any(
                each.option.domain(require.spread) not in taken for each in (*staying, *yielding)
            ):
                break  # the quota forces a current replica out, so nothing new may take its place
            existing = self._first(staying, picks, taken, require)
            best, move = None, None
            if existing is None:
                move = self._next_move(picks)
                best = self._best(picks, taken, require, limits, allocations, move)
                existing = self._first(yielding, picks, taken, require)
                if existing is None and move is None:
                    existing = self._first(standbys, picks, taken, require)
                elif existing is not None and best is not None and self._is_better(best, existing, require):
                    existing = None
            if existing is not None:
                next(each for each in (staying, yielding, standbys) if existing in each).remove(existing)
                picks.append(Pick(existing.option, existing))
                allocations = self._allocate(picks[-1], allocations, require)
            elif best is not None:
                picks.append(Pick(best, None, move))
                allocations = self._allocate(picks[-1], allocations, require)
            else:
                break
            taken |= taken_domains(picks[-1:], require.spread)
        full = len(picks) >= wanted
        standby, short = None, None
        if wants_standby(intent):
            # Standbys that no longer meet every bound stay eligible, because a late answer is better than none.
            late = (
                each
                for each in self.standbys
                if each not in standbys and all(each is not one.existing for one in picks)
            )
            left = (*standbys, *late, *staying, *yielding)
            standby, short = self._pick_standby(left, picks, require, limits, allocations)
        if standby is not None:
            allocations = self._allocate(standby, allocations, require)
        beyond = (*staying, *yielding) if not full and self._is_capped(picks) else ()
        evicted = tuple(each.assignment.id for each in beyond)
        return Level(require, limits, wanted, tuple(picks), evicted, allocations, standby, short)

    def places(self, require: Requirements, limits: Limits) -> Iterator[Option]:
        """Where one more replica could run beside the current ones, whatever its score, for moves. Places where a
        replica of the workload is or was are left out."""
        if self.has_given_up:
            return
        picks = [Pick(each.option, each) for each in self.active]
        allocations = self.allocations
        for pick in picks:
            allocations = self._allocate(pick, allocations, require)
        domains = taken_domains(picks, require.spread)
        taken = {each.option.key for each in self.healthy}
        taken |= {(each.node, each.assignment.device, each.assignment.variant) for each in self.failed}
        for option in self.options:
            if option.key in taken or self.scope.faults(option, self.intent, require, limits):
                continue
            if not self._contention.faults(option, domains, require, allocations):
                yield option

    def exclusions(self, level: Level) -> tuple[tuple[PlacementFault, ...], ...]:
        """Per option, what excludes it; empty for those that were picked or merely ranked lower.

        Once all replicas are placed, other options are judged without them: they are then no reason for exclusion.
        Computed when it is asked for, because a decision alone needs it of few options.
        """
        key = level.require, level.limits
        if key not in self._exclusions:
            picks = list(level.picks)
            picked = {pick.option.key for pick in (*picks, *((level.standby,) if level.standby is not None else ()))}
            allocations = self.allocations if level.is_full else level.allocations
            # Once all replicas are placed, the spread relative to them is no reason. Nor is it where each domain gets
            # one: who has its replica lacks none.
            has_own = level.is_full or bool(self.intent.per)
            taken = set[Domain]() if has_own else taken_domains(picks, level.require.spread)
            self._exclusions[key] = tuple(
                ()
                if option.key in picked
                else found or self._contention.faults(option, taken, level.require, allocations)
                for option, found in zip(self.options, self.faults(*key), strict=True)
            )
        return self._exclusions[key]

    def known_nowhere(self, require: Requirements, limits: Limits) -> Nowhere | None:
        """Why no device can take it, if that is known of a workload that asks for the same; None: it is not."""
        columns = self._columns_of_all(require, limits)
        return columns.nowhere(self.scope, self.intent, require, limits) if columns is not None else None

    def _is_known_nowhere(self, require: Requirements, limits: Limits) -> bool:
        """Whether no search is needed, because no device can take it. Of what columns say some is checked in each step
        that asks them, also where it searches for nothing; and for one request whether that is still so."""
        if self._columns is None or self.known_nowhere(require, limits) is None:
            return False
        if not self._columns.is_audited:
            self._columns.audit(self.scope, self.allocations, require.where)
        self._columns.audit_nowhere(self.scope, self.intent, require, limits)
        return not self._columns.refuted

    def excluded_everywhere(self, level: Level) -> Sequence[Excluded] | None:
        """What excludes each device whatever else is placed, for all that ask for the same; None: something else
        excludes some, or that is not known without a look at each."""
        columns = self._columns_of_all(level.require, level.limits)
        if columns is None:
            return None
        return columns.list_excluded(self.scope, self.intent, level.require, level.limits)

    def remember_nowhere(self, level: Level, found: Nowhere) -> None:
        """For workloads that ask for the same, of a level of which all are excluded everywhere."""
        columns = self._columns_of_all(level.require, level.limits)
        if columns is not None:
            columns.remember_nowhere(self.scope, self.intent, level.require, level.limits, found)

    def _columns_of_all(self, require: Requirements, limits: Limits) -> DeviceColumns | None:
        """The columns, if all that excludes places is the same for each workload that asks for the same."""
        is_alike = not (self.healthy or self.failed or self.intent.per or self.intent.key.tenant == GUEST_TENANT)
        columns = self._uniform_columns(require, limits) if is_alike else None
        return None if columns is None or columns.may_sleep else columns

    def best_first(self, require: Requirements, limits: Limits) -> Sequence[Option]:
        """The options that are feasible by themselves, best first."""
        if (require, limits) not in self._orders:
            rows = zip(self.options, self.faults(require, limits), strict=True)
            self._orders[require, limits] = self._ranked([option for option, found in rows if not found], require)
        return self._orders[require, limits]

    def lacks_room(self, option: Option, level: Level, allocations: Allocations) -> bool:
        """Whether a replica does not fit there beside these allocations, its tenant's quota included."""
        return bool(self._contention.capacity_faults(option, level.require, allocations))

    def faults_of_one_more(self, level: Level) -> list[tuple[PlacementFault, ...]]:
        """What keeps one more replica from each place that the level has chosen."""
        taken = taken_domains(level.picks, level.require.spread)
        return [self._contention.faults(each.option, taken, level.require, level.allocations) for each in level.picks]

    def awaiting_node(self, level: Level) -> tuple[str, ...]:
        """Ids of replicas that stay assigned to a lost node, although no replica is wanted in its domain: they serve
        there once it is back. Only of workloads that have one for each node or label."""
        if not self.intent.per:
            return ()
        taken, nodes = taken_domains(level.picks, level.require.spread), self.scope.inputs.fleet.nodes
        return tuple(
            each.assignment.id
            for each in self.failed
            if each.refusal.code is Code.NODE_LOST
            and (state := nodes.get(each.node)) is not None
            and domain_of(level.require.spread, state, each.assignment.device) not in taken
        )

    def is_confirmed(self, replica: CurrentReplica | FailedReplica) -> bool:
        """Whether this replica was chosen or confirmed under exactly the current terms."""
        return self.scope.inputs.terms.get(replica.assignment.id) == self.terms

    @property
    def has_given_up(self) -> bool:
        """Whether it failed on so many devices under the current terms that no other is tried."""
        return sum(self.is_confirmed(each) for each in self.broken_replicas) >= BROKEN_MOST

    def _replica_count(self, require: Requirements) -> int:
        """Number of replicas for requests."""
        return 0 if self.elsewhere else require.replicas

    def _allocate(self, pick: Pick, allocations: Allocations, require: Requirements) -> Allocations:
        """Adds a pick to the allocations: a current replica keeps what it has, a new one takes what is predicted."""
        if pick.existing is not None:
            return allocations.with_kept_replica(self.scope, self.intent, pick.existing)
        busy = busy_share(self.scope, self.intent, pick.option, require.replicas)
        return allocations.with_new_replica(self.intent.key.tenant, pick.option, busy)

    # -- standby -----------------------------------------------------------------------------------------------------

    def _pick_standby(
        self,
        left: Sequence[CurrentReplica],
        picks: Sequence[Pick],
        require: Requirements,
        limits: Limits,
        allocations: Allocations,
    ) -> tuple[Pick | None, Refusal | None]:
        """One more replica, on a node without any of the others: a current one, else a new one once all others are
        placed.

        A place that only misses the latency bound is used if there is no other, because a late answer is better than
        none.
        """
        capped = self._is_capped(picks)
        # One on a cordoned node would not count as a standby in the next step (`replicas_of`).
        able_to_stand_by = [each for each in left if not each.option.state.cordoned]
        apart = [each for each in able_to_stand_by if not capped and is_on_other_node(each.option, picks)]
        stays = [each for each in apart if self._still_meets(each, require)]
        # Stable: the better one first among equals.
        stays.sort(key=lambda each: (not each.may_be_ready_in_role, not each.assignment.standby))
        fits = next((each for each in stays if self.is_confirmed(each) or self._may_stay(each, require, limits)), None)
        if fits is not None or len(picks) < self._replica_count(require):
            kept = fits or next(iter(stays), None)
            return (Pick(kept.option, kept) if kept is not None else None), None
        if self.has_given_up:
            return None, _standby_refusal(Counter(each.refusal.code for each in self.broken_replicas))
        if capped and left:
            return None, _standby_refusal(Counter([Code.QUOTA]))
        waiting = {each.option.key for each in left}
        bars = [
            [
                *(found.refusal.code for found in faults if found.constraint is not Constraint.LATENCY),
                *(() if is_on_other_node(option, picks) else (Code.SPREAD_CONFLICT,)),
                *(found.refusal.code for found in self._contention.capacity_faults(option, require, allocations)),
                *((Code.WAITING_FOR_REPLACEMENT,) if option.key in waiting else ()),
            ]
            for option, faults in zip(self.options, self.faults(require, limits), strict=True)
        ]
        able = {option.key: option for option, found in zip(self.options, bars, strict=True) if not found}
        best = next((option for option in self.best_first(require, limits) if option.key in able), None)
        if best is None and stays:
            return Pick(stays[0].option, stays[0]), None
        if best is None:
            late = {key: self.scope.latency_s(option, self.intent, require.replicas) for key, option in able.items()}
            best = min(able.values(), key=lambda option: (late[option.key], option.key), default=None)
        if best is None:
            return None, _standby_refusal(Counter(found[0] for found in bars))
        return Pick(best, None), None

    # -- current replicas that may stay ------------------------------------------------------------------------------

    def _still_meets(self, replica: CurrentReplica, require: Requirements) -> bool:
        """Whether a confirmed replica still meets HARD_CONSTRAINTS, the only ones that it can fail while its documents
        are unchanged."""
        return not any(
            fault.constraint in HARD_CONSTRAINTS for fault in self.scope.document_faults(replica.option, require)
        )

    def _may_stay(self, replica: CurrentReplica, require: Requirements, limits: Limits) -> bool:
        """Whether a replica still fits after its documents changed. Everything is checked again except the node's
        state, because the replica is nothing new there."""
        found = self.scope.faults(replica.option, self.intent, require, limits, is_running=True)
        return all(fault.constraint is Constraint.NODE for fault in found)

    def _put_back(self, ordered: list[CurrentReplica], require: Requirements) -> None:
        """Puts replicas that the last plan left out, because they were gone, behind those that are there in their
        place. To take over again is a move: it comes before one of these only where that gains what a move has to.

        ordered: those of one role that are ready in it first, so that surplus ones that are not go first; of these the
        better ones first."""
        left_out = self.scope.inputs.left_out
        ahead = [each for each in ordered if each.assignment.id not in left_out]
        behind = list[CurrentReplica]()  # the last one first
        for back in reversed([each for each in ordered if each.assignment.id in left_out]):
            while ahead and self._takes_over_again(back, ahead[-1], require):
                behind.append(ahead.pop())
            behind.append(back)
        ordered[:] = [*ahead, *reversed(behind)]

    def _takes_over_again(self, back: CurrentReplica, there: CurrentReplica, require: Requirements) -> bool:
        """back: one that was gone. there: what is in its place."""
        if back.ready_in_role != there.may_be_ready_in_role:
            return back.ready_in_role
        found = self.gain(back.option, there, require)
        return found > 0 and found >= self.intent.migration.gain and node_fault(back.option.state) is None

    def _is_better(self, best: Option, replica: CurrentReplica, require: Requirements) -> bool:
        return self.gain(best, replica, require) >= self.intent.migration.gain

    def gain(self, best: Option, replica: CurrentReplica, require: Requirements) -> float:
        """The share by which a place is better than a replica's own, under the workload's weights. One that the
        workload prefers is wholly better."""
        here, there = (self.scope.preference(each, self.intent) for each in (replica.option, best))
        if here != there:
            return 1.0 if there < here else 1.0 - WORST
        new, old = (self.values(option, require) for option in (best, replica.option))
        return gain(new, old, self.intent.weights)

    def values(self, option: Option, require: Requirements) -> TermValues:
        """Values predicted for a replica of this workload on a candidate, beside what was decided before."""
        return predicted_values(self.scope, self._counted(option), self.intent, require.replicas)

    def objectives(self, options: Sequence[Option], figures: Sequence[TermValues]) -> NDArray[np.float64]:
        """The logarithm of the objective of each option, lower is better; those that the workload prefers come before
        all others. figures: their values."""
        found = objectives(figures, self.intent.weights)
        if not self.intent.prefer:
            return found
        return found + PREFERENCE * np.array([self.scope.preference(each, self.intent) for each in options])

    def _counted(self, option: Option) -> Option:
        """An option whose device is awake if something was decided to be on it."""
        if not self.scope.may_sleep(option.device):
            return option
        return replace(option, wakes=not self.allocations.occupants.get(option.slot))

    def _first(
        self, current: Sequence[CurrentReplica], picks: Sequence[Pick], taken: Set[Domain], require: Requirements
    ) -> CurrentReplica | None:
        """The first current replica that the spread allows beside the picks; None once the quota's cap is reached."""
        if self._is_capped(picks):
            return None
        return next((each for each in current if each.option.domain(require.spread) not in taken), None)

    def _is_capped(self, picks: Sequence[Pick]) -> bool:
        """Whether the picks already keep as many current replicas as the quota allows."""
        return sum(pick.existing is not None for pick in picks) >= self.cap

    # -- new replicas ------------------------------------------------------------------------------------------------

    def _ranked(self, options: Sequence[Option], require: Requirements) -> list[Option]:
        """The same options, best first; equals in an order that depends on the seed and on names alone."""
        if len(options) < 2:
            return [*options]
        figures = [self._figures(option, require) for option in options]
        scores = self.objectives(options, figures).tolist()
        by_score = dict[float, list[Option]]()
        for option, value in zip(options, scores, strict=True):
            by_score.setdefault(value, []).append(option)
        return [option for value in sorted(by_score) for option in self._in_order(by_score[value])]

    def _in_order(self, equals: Sequence[Option]) -> Sequence[Option]:
        if len(equals) < 2:
            return equals
        order = tie_breaks_of(self.scope.inputs.seed, str(self.intent.key), (each.key for each in equals))
        return [equals[at] for at in sorted(range(len(equals)), key=order.__getitem__)]

    def _figures(self, option: Option, require: Requirements) -> TermValues:
        """What the objective weighs of a candidate."""
        return weighed_values(self.scope, self._counted(option), self.intent, require.replicas)

    def figures(self, require: Requirements, limits: Limits, devices: Sequence[Slot]) -> Sequence[ModelFigures] | None:
        """What each of the workload's models finds on these devices, in their order; None where that is not known
        without a look at each. Where its own replicas run or failed, it is another."""
        columns = self._uniform_columns(require, limits)
        if columns is None or columns.may_sleep:
            return None
        rows = columns.rows_of(devices)
        found = columns.figures(self.scope, self.intent, require, limits)
        return [each.of_rows(rows) for each in found]

    def _places(self, require: Requirements, limits: Limits) -> Iterator[Option]:
        """As `best_first`, without those that have no room beside what was decided before, where that is known
        without a look at each."""
        columns = self._uniform_columns(require, limits)
        if columns is not None:
            columns.audit(self.scope, self.allocations, require.where)
        if columns is None or columns.refuted:
            yield from self.best_first(require, limits)
            return
        known = self._known_options(self._held.values(), require, limits)
        for model, state, device, alike in columns.places(
            self.scope, self.intent, require, limits, self.allocations, known
        ):
            if alike is not None and self._is_like_others(model, state, device):
                option = replace(alike, state=state, device=device, receipt=state.receipts.get(device.name))
                faults = self.scope.faults_of_place(option, None)  # the columns say whether the selector admits it
            else:
                option = self._option(model, state, device)
                faults = self.scope.faults(option, self.intent, require, limits)
            if not faults:
                yield option

    def _is_like_others(self, model: ModelRef, state: NodeState, device: Device) -> bool:
        """Whether a place is to the workload what any device of its kind is: no replica of it runs or failed there, and
        what else is there keeps no device awake."""
        key = (state.name, device.name, model.variant)
        return not (key in self._held or key in self._failures or self.scope.may_sleep(device))

    def _known_options(self, options: Iterable[Option], require: Requirements, limits: Limits) -> Sequence[KnownOption]:
        """Those of these options that are feasible by themselves."""
        return [
            KnownOption(option, objectives([self._figures(option, require)], self.intent.weights)[0])
            for option in options
            if not self.scope.faults(option, self.intent, require, limits)
        ]

    def are_best(
        self, level: Level, chosen: Sequence[Option], allocations: Allocations, nodes: Collection[str]
    ) -> bool:
        """Whether no place is better for a new replica than each of these, which the level has chosen: neither one with
        room beside these allocations, nor one on these nodes, whatever is taken there. False too where that is not
        known without a look at each device."""
        require, limits = level.require, level.limits
        columns = self._uniform_columns(require, limits)
        if columns is None or columns.may_sleep:
            return False
        known = self._known_options(self.own_options, require, limits)
        return columns.are_best(self.scope, self.intent, require, limits, allocations, known, chosen, nodes)

    def _uniform_columns(self, require: Requirements, limits: Limits) -> DeviceColumns | None:
        """The columns, if they say what these requirements need to know."""
        if self._columns is None or self._columns.refuted:
            return None
        return self._columns if is_uniform(self.scope, self.intent, require, limits) else None

    def _next_move(self, picks: Sequence[Pick]) -> Move | None:
        found = sum(pick.move is not None for pick in picks)
        return self.pending_moves[found] if found < len(self.pending_moves) else None

    def _best(
        self,
        picks: list[Pick],
        taken: Set[Domain],
        require: Requirements,
        limits: Limits,
        allocations: Allocations,
        move: Move | None,
    ) -> Option | None:
        """The best place for a new replica, or for `move` where it aims; None where there is none.

        Places of current replicas that are not picked yet are left out. For a move so are the places of failed
        replicas, because its source is one of them and it has to leave that place.
        """
        if self.has_given_up:
            return None
        left = {
            (each.node, each.assignment.device, each.assignment.variant) for each in self.failed if move is not None
        }
        kept = {pick.existing.assignment.id for pick in picks if pick.existing is not None}
        waiting = {each.option.key for each in self.healthy if each.assignment.id not in kept}
        allocations = allocations.with_usage_of(self.intent.key.tenant, self._may_follow(picks, kept, require))
        for option in chain(self._preferred_place(picks, require, limits), self._places(require, limits)):
            if move is not None and (option.key in left or not move.aim.allows(*option.key)):
                continue
            if option.domain(require.spread) in taken or option.key in waiting:
                continue
            if not self._contention.faults(option, taken, require, allocations):
                return option
        return None

    def _preferred_place(self, picks: Sequence[Pick], require: Requirements, limits: Limits) -> Sequence[Option]:
        """What a new replica tries first, if it is feasible by itself."""
        news = sum(pick.existing is None for pick in picks)
        if news >= len(self._preferred):
            return ()
        node, device, variant = self._preferred[news]
        model = next((each for each in self.intent.models if each.variant == variant), None)
        found = self.scope.find(Slot(node, device))
        if model is None or found is None or model.digest not in self.scope.inputs.profiles:
            return ()
        option = self._option(model, *found)
        return () if self.scope.faults(option, self.intent, require, limits) else (option,)

    def _may_follow(
        self, picks: Sequence[Pick], kept: Collection[str], require: Requirements
    ) -> tuple[CurrentReplica, ...]:
        """Current replicas that may still be picked after the next one, the dearest: they are then kept whatever the
        quota says, so a new one must leave it to them."""
        most = self._replica_count(require) - len(picks) - 1 + wants_standby(self.intent)
        left = [each for each in self.healthy if each.assignment.id not in kept]
        left.sort(key=lambda each: (-TenantCost.of(each.option.cost).usd_per_h, -each.assignment.memory_bytes))
        return tuple(left[: max(0, min(most, self.cap - len(kept)))])


def _without_own(
    given: Callable[[], Allocations], scope: Scope, intent: Intent, replicas: WorkloadReplicas
) -> Allocations:
    """Without the workload's current replicas."""
    return given().with_undecided(scope, intent, replicas, -1)


def _standby_refusal(census: Counter[Code]) -> Refusal:
    found = ", ".join(f"{code} x {count}" for code, count in sorted(census.items()))
    asked = "a node without an active replica, and room there"
    return Refusal(Code.STANDBY_SHORT, found, asked, "add a node, or free memory")
