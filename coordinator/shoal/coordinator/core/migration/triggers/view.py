"""The region as triggers see it: serving replicas that may move automatically, and where each could go."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration.model import (
    Cause,
    DoneState,
    ExpectedOutcome,
    Migration,
    MoveProposal,
    ReplicaPlace,
    replica_place,
)
from shoal.coordinator.core.migration.outcomes import calibrate, expected_outcome
from shoal.coordinator.core.migration.triggers.turns import TurnsTaken, Waiting, take_turns
from shoal.coordinator.core.placement.allocations import (
    NO_ALLOCATIONS,
    Allocations,
    busy_share,
    initial_allocations,
)
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Aim, Inputs, Move, Slot, terms_of
from shoal.coordinator.core.placement.replicas import CurrentReplica, replicas_of
from shoal.coordinator.core.placement.solve import Solver
from shoal.coordinator.core.workloads.model import PendingMove
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.units import Seconds
from shoal.types.workload import Intent, Limits, Requirements, WorkloadKey

Turns = Mapping[str, TurnsTaken]
"""By trigger. They are not stored: after a restart they begin anew."""
NO_TURNS: Final[Turns] = {}
SCAN_S: Final = Seconds(5.0)
OPTIONS_MOST: Final = 4000
"""Places that one trigger evaluates in one scan; in a large region replicas take turns."""
HYSTERESIS: Final = 0.1
"""A condition that began by passing a threshold ends this share of the threshold below it."""
HOT_C: Final = 90.0
"""Common processors and accelerators throttle between 90 and 105 degrees Celsius."""
_COMPARISON: Final = "comparison"
"""Turns that triggers share which compare a replica whether or not anything is wrong with its place."""
_WHY: Final = Refusal(Code.CONFLICT, "it would move")


@dataclass(frozen=True, slots=True)
class MovableReplica:
    """A serving replica that may move."""

    # Its workload, with the weights and rates in effect now.
    intent: Intent
    # The replica with its live figures.
    current: CurrentReplica
    # Its figures from warm-up, for comparison with other places.
    baseline: Option

    @property
    def live_option(self) -> Option:
        return self.current.option

    @property
    def place(self) -> ReplicaPlace:
        return replica_place(self.current.node, self.current.assignment, self.current.option.device.stand_in)

    @property
    def slot(self) -> Slot:
        return self.current.slot


class TriggerView:
    """The view of one scan. No automatic move goes to a hot device."""

    def __init__(
        self, inputs: Inputs, pending: Mapping[str, PendingMove], migrations: Mapping[str, Migration],
        standing: Allocations = NO_ALLOCATIONS, turns: Turns = NO_TURNS, only: WorkloadKey | None = None,
    ) -> None:  # fmt: skip
        """inputs: of all workloads, or of those in `KeptDecisions.automatic_part`. standing: what the others take.
        turns: taken before this scan. only: view this workload alone, whether or not it may move automatically."""
        self._pending = pending
        self._only = only
        self._turns = turns
        self.turns_after = dict[str, TurnsTaken]()
        """By trigger, the turns taken with those of this scan."""
        self._arrivals = {
            each.target.assignment: each
            for each in migrations.values()
            if isinstance(each.state, DoneState) and each.target is not None
        }
        self.scope = Scope(inputs, standing.occupants)
        # Replicas that are leaving, or about to.
        self.leaving = frozenset(move.leaving or move.source for move in inputs.moves)
        self._solvers = dict[str, Solver]()
        self._busy = dict[Slot, float]()
        current = {intent.key: replicas_of(self.scope, intent) for intent in inputs.intents}
        self.current = current
        self._initial_allocations = initial_allocations(
            self.scope, ((intent, current[intent.key]) for intent in inputs.intents), standing
        )
        bound = {name for move in inputs.moves for name in (move.source, move.target)}
        cross_region = {each.workload for each in migrations.values() if each.is_cross_region and not each.is_over}
        self.replicas = tuple(
            MovableReplica(intent, each, self._baseline(intent, each))
            for intent in sorted(inputs.intents, key=lambda intent: intent.key)
            if (intent.migration.automatic if only is None else intent.key == only) and self._has_all_replicas(intent)
            for each in current[intent.key].active
            if each.assignment.id not in bound and intent.key not in cross_region and self._may_move(intent, each)
        )
        self._in_turn = self.turns(_COMPARISON, self.replicas)

    @property
    def inputs(self) -> Inputs:
        return self.scope.inputs

    def has_turn(self, replica: MovableReplica) -> bool:
        """True if the replica is compared with every other place in this scan."""
        return replica.place.assignment in self._in_turn

    def turns(self, trigger: str, replicas: Collection[MovableReplica]) -> frozenset[str]:
        """Assignments of those that are compared with every other place in this scan, by this trigger."""
        devices = sum(len(state.node.devices) for state in self.inputs.fleet.nodes.values())
        most = max(1, OPTIONS_MOST // max(1, devices))
        waiting = [Waiting(each.intent.key.tenant, each.place.assignment) for each in replicas]
        found, after = take_turns(self._turns.get(trigger, {}), waiting, most)
        tenants = {each.intent.key.tenant for each in self.replicas}
        self.turns_after[trigger] = {tenant: turn for tenant, turn in after.items() if tenant in tenants}
        return found

    def busy_on(self, slot: Slot) -> float:
        """Share of a device's time that declared traffic takes, by the replicas' warm-up baselines, without those that
        are leaving. Ask for devices with a replica that has a peak alone: of others not all replicas are viewed."""
        if slot not in self._busy:
            reserved = sum(each.busy for each in self.inputs.reserved if each.slot == slot)
            here = (self.device_share(intent, self._baseline(intent, each)) for intent, each in self._on_slot[slot])
            self._busy[slot] = reserved + sum(here)
        return self._busy[slot]

    @cached_property
    def _on_slot(self) -> Mapping[Slot, Sequence[tuple[Intent, CurrentReplica]]]:
        """By device, the viewed replicas that are not leaving."""
        found = defaultdict[Slot, list[tuple[Intent, CurrentReplica]]](list)
        for intent in self.inputs.intents:
            for each in self.current[intent.key].healthy:
                if each.assignment.id not in self.leaving:
                    found[each.slot].append((intent, each))
        return found

    def device_share(self, intent: Intent, option: Option) -> float:
        """Share of a device's time that one replica's declared traffic takes."""
        return busy_share(self.scope, intent, option, intent.require.replicas)

    def threshold_shares(self, replica: MovableReplica, trigger: str) -> tuple[float, ...]:
        """Shares of the threshold to test: a condition holds at the full one. If it held before, it only fades at
        the lower one."""
        return (1.0, 1.0 - HYSTERESIS) if pending_key(replica.place, trigger) in self._pending else (1.0,)

    def arrival_move(self, replica: MovableReplica) -> Migration | None:
        """The move that brought the replica; None: none did."""
        return self._arrivals.get(replica.place.assignment)

    def places(self, replica: MovableReplica, require: Requirements, limits: Limits) -> Iterator[Option]:
        """Places that it could go to."""
        found = self._solver(replica).places(require, limits)
        return (option for option in found if not _is_hot(option))

    def _solver(self, replica: MovableReplica) -> Solver:
        """Created once per replica: what is known of every place does not depend on the query."""
        name, intent = replica.place.assignment, replica.intent
        if name not in self._solvers:
            move = Move("", intent.key, name, _WHY)
            most = len(self.current[intent.key].healthy)
            stays = Solver(
                self.scope,
                intent,
                self.current[intent.key],
                most,
                self._initial_allocations,
            )
            self._solvers[name] = stays.with_moves(replicas_of(self.scope, intent, (move,)), (move,))
        return self._solvers[name]

    def serving(self, key: WorkloadKey, assignment: str) -> MovableReplica | None:
        """A replica that serves, whether or not its policy lets it move; None: it does not, or is not viewed."""
        intent = next(each for each in self.inputs.intents if each.key == key)
        found = next((each for each in self.current[key].active if each.assignment.id == assignment), None)
        if found is None or (self._only is not None and self._only != key) or not self._may_move(intent, found):
            return None
        return MovableReplica(intent, found, self._baseline(intent, found))

    def forced_proposal(
        self, replica: MovableReplica, cause: Cause, reason: str, require: Requirements, limits: Limits,
        leaves: Slot | None = None,
    ) -> MoveProposal:  # fmt: skip
        """A move to the fitting place with the greatest gain, or the least loss. A place does not fit if it would
        miss the same bounds once its prediction is corrected by this place's error. leaves: a device that it must not
        stay on, whatever its model."""
        intent, baseline, scope = replica.intent, replica.baseline, self.scope
        found = [
            (option, expected_outcome(scope, intent, replica.live_option, option, baseline))
            for option in self.places(replica, require, limits)
            if option.slot != leaves
            and not any(scope.figure_faults(calibrate(scope, baseline, option), intent, require, limits))
        ]
        if not found:
            refusal = Refusal(Code.NO_CANDIDATE, "no other place that fits has room for it", "one")
            return MoveProposal(intent.key, replica.place, Aim(), cause, reason, refusal=refusal)
        option, expected = max(found, key=lambda each: (-scope.preference(each[0], intent), each[1].gain, each[0].key))
        return new_proposal(replica, option, expected, cause, reason)

    def _baseline(self, intent: Intent, standing: CurrentReplica) -> Option:
        known = standing.option
        return self.scope.option(intent, known.model, known.state, known.device)

    def _has_all_replicas(self, intent: Intent) -> bool:
        """False while replicas are missing: placing them comes first."""
        if intent.key in self.inputs.elsewhere or self.inputs.fleet.mass_silence is not None:
            return False
        return len(self.current[intent.key].active) >= intent.require.replicas

    def _may_move(self, intent: Intent, standing: CurrentReplica) -> bool:
        state = standing.option.state
        heard = state.liveness is Liveness.READY and state.has_full_status and state.front_ready
        confirmed = self.inputs.terms.get(standing.assignment.id) == terms_of(intent)
        return heard and standing.ready and confirmed


def _is_hot(option: Option) -> bool:
    reading = option.state.readings.get(option.slot.device)
    return reading is not None and bool(heat_reason(reading, HOT_C * (1.0 - HYSTERESIS)))


def heat_reason(reading: Reading, limit_c: float) -> str:
    """How hot a device is, in words; empty: it is not."""
    if reading.throttled:
        return "slows itself down"
    return f"is at {reading.temperature_c:.0f} C" if reading.temperature_c >= limit_c else ""


def deferred_proposal(replica: MovableReplica, cause: Cause, reason: str) -> MoveProposal:
    """A replica that has to leave, but whose places are searched in a later scan."""
    return MoveProposal(replica.intent.key, replica.place, Aim(), cause, reason, is_deferred=True)


def pending_key(source: ReplicaPlace, trigger: str) -> str:
    return f"{source.assignment} {trigger}"


def new_proposal(
    replica: MovableReplica, target: Option, expected: ExpectedOutcome, cause: Cause, reason: str
) -> MoveProposal:
    aim = Aim(target.slot.node, target.slot.device, target.model.variant)
    return MoveProposal(replica.intent.key, replica.place, aim, cause, reason, expected)
