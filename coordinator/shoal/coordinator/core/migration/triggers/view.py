"""The region as triggers look at it: replicas that serve and may be moved unasked, and where each of them could go."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration.expected import calibrated, expected
from shoal.coordinator.core.migration.model import Cause, Done, Expected, Migration, Place, Proposal
from shoal.coordinator.core.placement.books import busy_share, opened
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Aim, Inputs, Move, Slot, terms_of
from shoal.coordinator.core.placement.solve import Solver
from shoal.coordinator.core.placement.standing import Standing, current_of
from shoal.coordinator.core.workloads.model import Pending
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.units import Seconds
from shoal.types.workload import Intent, Limits, Requirements, WorkloadKey

LOOK_S: Final = Seconds(5.0)
OPTIONS_MOST: Final = 4000
"""Places that one signal has thought through in one look: in a large region every replica has its turn."""
BAND: Final = 0.1
"""What began by passing a threshold ends when it is this share of the threshold short of it."""
HOT_C: Final = 90.0
"""Common processors and accelerators slow themselves down between 90 and 105 degrees."""
_WHY: Final = Refusal(Code.CONFLICT, "it would move")


@dataclass(frozen=True, slots=True)
class Replica:
    """loaded: as it serves. calm: as it was measured when it warmed up, which compares with other places."""

    intent: Intent
    standing: Standing
    calm: Option

    @property
    def loaded(self) -> Option:
        return self.standing.option

    @property
    def place(self) -> Place:
        one = self.standing.assignment
        return Place(one.id, self.standing.node, one.device, one.model, one.precision)

    @property
    def slot(self) -> Slot:
        return self.standing.slot


class View:
    """One look. Nothing moves by itself to a device that is hot."""

    def __init__(
        self, inputs: Inputs, pending: Mapping[str, Pending], migrations: Mapping[str, Migration],
        only: WorkloadKey | None = None,
    ) -> None:  # fmt: skip
        """only: look at this workload alone, whether or not it may move unasked."""
        self._pending = pending
        self._came_by = {
            each.target.assignment: each
            for each in migrations.values()
            if isinstance(each.state, Done) and each.target is not None
        }
        self._hot = frozenset(
            Slot(name, reading.device)
            for name, state in inputs.fleet.nodes.items()
            for reading in state.readings.values()
            if heat(reading, HOT_C * (1.0 - BAND))
        )
        self.scope = Scope(inputs)
        self.leaving = frozenset(move.leaves or move.source for move in inputs.moves)
        """Replicas that go, or are about to."""
        self._solvers = dict[str, Solver]()
        current = {intent.key: current_of(self.scope, intent) for intent in inputs.intents}
        self._current = current
        self._opening = opened(self.scope, ((intent, current[intent.key]) for intent in inputs.intents))
        bound = {name for move in inputs.moves for name in (move.source, move.target)}
        crossing = {each.workload for each in migrations.values() if each.crosses and not each.is_over}
        self.replicas = tuple(
            Replica(intent, each, self._calm(intent, each))
            for intent in sorted(inputs.intents, key=lambda intent: intent.key)
            if (intent.migration.unasked if only is None else intent.key == only) and self._is_whole(intent)
            for each in current[intent.key].standing
            if each.assignment.id not in bound and intent.key not in crossing and self._may_move(intent, each)
        )
        self._looked = self.turns(self.replicas)

    @property
    def inputs(self) -> Inputs:
        return self.scope.inputs

    def looks_at(self, replica: Replica) -> bool:
        """Whether it has its turn to be compared with every other place."""
        return replica.place.assignment in self._looked

    def turns(self, replicas: Collection[Replica]) -> frozenset[str]:
        """Which of them, by assignment, are compared with every other place in this look."""
        ordered = sorted(each.place.assignment for each in replicas)
        most = max(1, OPTIONS_MOST // max(1, len(self.scope.devices)))
        if len(ordered) <= most:
            return frozenset(ordered)
        first = int(self.inputs.now / LOOK_S) * most
        return frozenset(ordered[(first + step) % len(ordered)] for step in range(most))

    @cached_property
    def busy(self) -> Mapping[Slot, float]:
        """Share of each device's time that declared traffic takes, of every replica as it was when it warmed up, but
        for those that leave."""
        busy = defaultdict[Slot, float](float)
        for kept in self.inputs.reserved:
            busy[kept.slot] += kept.busy
        for intent in self.inputs.intents:
            for each in self._current[intent.key].counted:
                if each.assignment.id not in self.leaving:
                    busy[each.slot] += self.share(intent, self._calm(intent, each))
        return busy

    def share(self, intent: Intent, option: Option) -> float:
        """Of a device's time, that one replica's declared traffic takes there."""
        return busy_share(self.scope, intent, option, intent.require.replicas)

    def shares(self, replica: Replica, trigger: str) -> tuple[float, ...]:
        """Shares of its threshold at which a condition holds: by the first in full, by another it only fades."""
        return (1.0, 1.0 - BAND) if pending_key(replica.place, trigger) in self._pending else (1.0,)

    def came_by(self, replica: Replica) -> Migration | None:
        """The move that brought it."""
        return self._came_by.get(replica.place.assignment)

    def places(self, replica: Replica, require: Requirements, limits: Limits) -> Iterator[Option]:
        """Where it could go."""
        found = self._solver(replica).places(require, limits)
        return (option for option in found if option.slot not in self._hot)

    def _solver(self, replica: Replica) -> Solver:
        """Made once: what is known of every place is the same, whatever is asked of it."""
        name, intent = replica.place.assignment, replica.intent
        if name not in self._solvers:
            move = Move("", intent.key, name, _WHY)
            most = len(self._current[intent.key].counted)
            stays = Solver(self.scope, intent, self._current[intent.key], most, self._opening, self._opening)
            self._solvers[name] = stays.moved(current_of(self.scope, intent, (move,)), (move,))
        return self._solvers[name]

    def forced(
        self, replica: Replica, cause: Cause, reason: str, require: Requirements, limits: Limits
    ) -> Proposal:  # fmt: skip
        """It shall leave, to the place of all that fit which its objective gains most by, or loses least. What would
        miss the same bounds if it is as far off its roofline as this place is does not fit."""
        intent, calm, scope = replica.intent, replica.calm, self.scope
        found = [
            (option, expected(scope, intent, replica.loaded, option, calm))
            for option in self.places(replica, require, limits)
            if not any(scope.figure_faults(calibrated(scope, intent, calm, option), intent, require, limits))
        ]
        if not found:
            refusal = Refusal(Code.NO_CANDIDATE, "no other place that fits has room for it", "one")
            return Proposal(intent.key, replica.place, Aim(), cause, reason, refusal=refusal)
        option, hoped = max(found, key=lambda each: (each[1].gain, each[0].names))
        return proposal(replica, option, hoped, cause, reason)

    def _calm(self, intent: Intent, standing: Standing) -> Option:
        known = standing.option
        return self.scope.option(intent, known.model, known.state, known.device)

    def _is_whole(self, intent: Intent) -> bool:
        """Replicas that are missing come first."""
        if intent.key in self.inputs.elsewhere or self.inputs.fleet.mass_silence is not None:
            return False
        return len(self._current[intent.key].standing) >= intent.require.replicas

    def _may_move(self, intent: Intent, standing: Standing) -> bool:
        state = standing.option.state
        heard = state.liveness is Liveness.READY and state.reported and state.front_ready
        confirmed = self.inputs.terms.get(standing.assignment.id) == terms_of(intent)
        return heard and standing.ready and confirmed


def heat(reading: Reading, limit_c: float) -> str:
    """How hot a device is, in words; empty where it is not."""
    if reading.throttled:
        return "slows itself down"
    return f"is at {reading.temperature_c:.0f} C" if reading.temperature_c >= limit_c else ""


def waiting(replica: Replica, cause: Cause, reason: str) -> Proposal:
    """It shall leave, but it is not its turn to have its places thought through."""
    return Proposal(replica.intent.key, replica.place, Aim(), cause, reason, waits=True)


def pending_key(source: Place, trigger: str) -> str:
    return f"{source.assignment} {trigger}"


def proposal(replica: Replica, target: Option, hoped: Expected, cause: Cause, reason: str) -> Proposal:
    aim = Aim(target.slot.node, target.slot.device, target.model.digest)
    return Proposal(replica.intent.key, replica.place, aim, cause, reason, hoped)
