"""The region as triggers look at it: replicas that serve and may be moved unasked, and where each of them could go."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration.expected import calibrated, expected
from shoal.coordinator.core.migration.model import Cause, Done, Expected, Migration, Place, Proposal
from shoal.coordinator.core.placement.books import opened
from shoal.coordinator.core.placement.feasible import Option, Scope
from shoal.coordinator.core.placement.model import Aim, Inputs, Move, Slot, Trial, terms_of
from shoal.coordinator.core.placement.solve import Solver
from shoal.coordinator.core.placement.standing import Standing, current_of
from shoal.coordinator.core.workloads.model import Pending
from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.units import Seconds
from shoal.types.workload import Intent, Limits, Requirements, WorkloadKey

LOOK_S: Final = Seconds(5.0)
OPTIONS_MOST: Final = 4000
"""Places of a model that are thought through in one look: in a large region every workload has its turn."""
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
        self._done = [each for each in migrations.values() if isinstance(each.state, Done)]
        hot = {
            Slot(name, reading.device): Refusal(Code.DEVICE_HOT, f"{name}/{reading.device} {found}", "a cooler device")
            for name, state in inputs.fleet.nodes.items()
            for reading in state.readings.values()
            if (found := heat(reading, HOT_C * (1.0 - BAND)))
        }
        barred = {
            (intent.key, Trial(model.digest, *slot)): refusal
            for slot, refusal in hot.items()
            for intent in inputs.intents
            for model in intent.models
        }
        self.scope = Scope(replace(inputs, blocked={**barred, **inputs.blocked}))
        current = {intent.key: current_of(self.scope, intent) for intent in inputs.intents}
        self._current = current
        self._opening = opened(self.scope, ((intent, current[intent.key]) for intent in inputs.intents))
        bound = {name for move in inputs.moves for name in (move.source, move.target)}
        self.replicas = tuple(
            Replica(intent, each, self.scope.option(intent, each.option.model, each.option.state, each.option.device))
            for intent in sorted(inputs.intents, key=lambda intent: intent.key)
            if (intent.migration.unasked if only is None else intent.key == only) and self._is_whole(intent)
            for each in current[intent.key].standing
            if each.assignment.id not in bound and self._may_move(intent, each)
        )
        self._looked = _looked([each.intent.key for each in self.replicas], len(self.scope.devices), inputs.now)

    @property
    def inputs(self) -> Inputs:
        return self.scope.inputs

    def looks_at(self, replica: Replica) -> bool:
        """Whether it has its turn to be compared with every other place."""
        return replica.intent.key in self._looked

    def shares(self, replica: Replica, trigger: str) -> tuple[float, ...]:
        """Shares of its threshold at which a condition holds: by the first in full, by another it only fades."""
        return (1.0, 1.0 - BAND) if pending_key(replica.place, trigger) in self._pending else (1.0,)

    def came_by(self, replica: Replica) -> Migration | None:
        """The move that brought it."""
        name = replica.standing.assignment.id
        return next((each for each in self._done if each.target is not None and each.target.assignment == name), None)

    def places(self, replica: Replica, require: Requirements, limits: Limits) -> Iterable[Option]:
        """Where it could go."""
        intent = replica.intent
        move = Move("", intent.key, replica.standing.assignment.id, _WHY)
        most = len(self._current[intent.key].counted)
        solver = Solver(self.scope, intent, self._current[intent.key], most, self._opening, self._opening)
        return solver.moved(current_of(self.scope, intent, (move,)), (move,)).places(require, limits)

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


def pending_key(source: Place, trigger: str) -> str:
    return f"{source.assignment} {trigger}"


def proposal(replica: Replica, target: Option, hoped: Expected, cause: Cause, reason: str) -> Proposal:
    aim = Aim(target.slot.node, target.slot.device, target.model.digest)
    return Proposal(replica.intent.key, replica.place, aim, cause, reason, hoped)


def _looked(keys: Sequence[WorkloadKey], devices: int, now: float) -> frozenset[WorkloadKey]:
    """Whose turn it is."""
    ordered = sorted(set(keys))
    most = max(1, OPTIONS_MOST // max(1, devices))
    if len(ordered) <= most:
        return frozenset(ordered)
    first = int(now / LOOK_S) * most
    return frozenset(ordered[(first + step) % len(ordered)] for step in range(most))
