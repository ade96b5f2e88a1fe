"""Answers `shoal can-move`: can a workload move there, and at what price? Migrations check the same estimate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.migration.outcomes import missing_bytes, overlap_s
from shoal.coordinator.core.placement.model import Aim, Candidate, Inputs, Move, Slot, Trial, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.prediction.model import UNKNOWN, Interval
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.device import Device, DeviceLink, EnergySource
from shoal.types.migration import MigrationRule, Tolerance
from shoal.types.tolerance import with_defaults
from shoal.types.units import Bytes, UsdPerHour, show_seconds
from shoal.types.workload import Intent, WorkloadKey


class MoveAnswer(StrEnum):
    YES = "yes"
    YES_WITH = "yes-with"
    """It can, but something changes: `Estimate.needs` lists it."""
    NO = "no"


class MoveNeed(StrEnum):
    """What a move changes."""

    REBUILD = "rebuild"
    """Another runtime or provider compiles or optimises the model again, and its kernels differ."""
    PRECISION = "precision"
    """Another variant of the model, in another precision."""
    PREPARE = "prepare"
    """The node makes the model in that precision before it loads it."""


@dataclass(frozen=True, slots=True)
class PredictedFigures:
    """Predicted service of a replica."""

    # p95 latency at the worker, in seconds.
    latency_p95_s: Interval
    # Joules per inference.
    joules: Interval
    # How the joules are known.
    energy_source: EnergySource
    # USD/h of the device.
    cost: UsdPerHour


@dataclass(frozen=True, slots=True)
class Estimate:
    """One (device, model variant) that a workload might move to."""

    # Name of the node.
    node: str
    # Name of the device on it.
    device: str
    # What stands in for the device: `emulated` or `simulated`; empty: nothing.
    stand_in: str
    # Digest of the variant.
    model: str
    # Precision that it would run in.
    precision: str
    # The device's execution provider; empty: unknown.
    provider: str
    # Whether it can move there.
    answer: MoveAnswer
    # For YES_WITH: what changes, each with its description.
    needs: tuple[tuple[MoveNeed, str], ...]
    # For NO: the first constraint in the way; None otherwise.
    refusal: Refusal | None
    # For NO: the nearest change that would allow it; empty: none known.
    nearest: str
    # Bytes of the model that the node still has to fetch; 0 if it has it.
    fetch_bytes: Bytes
    # Seconds to load and warm up there.
    load_s: Interval
    # As in Prediction: the part of it that the device's link takes, at least. NaN: unknown.
    transfer_s: float
    # That link; None: unknown.
    link: DeviceLink | None
    # Figures of the replica that would move; None: none runs.
    now: PredictedFigures | None
    # Figures there; None: the device is unknown.
    then: PredictedFigures | None
    # USD for the new replica while both run: it loads, is verified, takes over in steps, and the old one drains, each
    # at the middle of its prediction, with what earlier moves took beyond that. NaN: a price or time is unknown. If
    # nothing runs: for loading alone.
    cost_of_both: float
    # How far its answers may differ from the current ones before a migration is refused; empty: nothing runs.
    drift: tuple[Tolerance, ...]


@dataclass(frozen=True, slots=True)
class MoveEstimates:
    """Every place that a workload might move to."""

    # Workload that was asked about.
    workload: WorkloadKey
    # Place of the replica that would move; None: none runs.
    source: Slot | None
    # One for each candidate place, best first; empty: nothing to place it on.
    estimates: tuple[Estimate, ...]

    @property
    def answer(self) -> MoveAnswer:
        return self.estimates[0].answer if self.estimates else MoveAnswer.NO

    @property
    def refusal(self) -> Refusal | None:
        """Why the answer is NO; None otherwise. Queries and moves give the same reason."""
        if self.answer is not MoveAnswer.NO:
            return None
        return self.estimates[0].refusal if self.estimates else _NOWHERE

    @property
    def there_already(self) -> Refusal | None:
        """That the workload has a replica at each of these places, which no waiting changes; None: it has not."""
        held = {
            (each.node, each.device): each.refusal
            for each in self.estimates
            if each.refusal is not None and each.refusal.code is Code.CONFLICT
        }
        is_everywhere = all((each.node, each.device) in held for each in self.estimates)
        return next(iter(held.values()), None) if is_everywhere else None


_NOWHERE: Final = Refusal(Code.NO_CANDIDATE, "nothing to place it on there", "a device that can run it")
_TRIAL: Final = "trial"
"""Id of the move that `_with_trial` tries out. Ids of real migrations begin with `m-`."""


def estimate_move(inputs: Inputs, key: WorkloadKey, aim: Aim, replica: str = "") -> MoveEstimates:
    """What moving a replica of this workload to `aim` would take; `Aim()`: to any place.

    replica: the assignment that moves; empty: the first one that is not there. The others stay. Placement itself
    decides: it gets the move as if it had begun, and its result is discarded. Raises ShoalError(WORKLOAD_UNKNOWN |
    NODE_UNKNOWN | NOT_FOUND), the last one for a node without that device.
    """
    check_aim(inputs.fleet, aim)
    plan = place(inputs, explain=(key,)).of(key)
    if plan is None:
        raise refuse(Code.WORKLOAD_UNKNOWN, f"no workload {key}", "an applied workload", "see `shoal get workloads`")
    there = [one for one in plan.candidates if aim.allows(one.node, one.device, one.variant)]
    there = _with_trial(inputs, key, aim, replica, there)
    source = _source(plan, there)
    intent = next(each for each in inputs.intents if each.key == key)
    estimates = [_estimate(inputs, intent, source, candidate) for candidate in there]
    order = (MoveAnswer.YES, MoveAnswer.YES_WITH, MoveAnswer.NO)
    ranked = tuple(sorted(estimates, key=lambda each: order.index(each.answer)))
    return MoveEstimates(key, Slot(source.node, source.device) if source is not None else None, ranked)


def check_aim(fleet: Fleet, aim: Aim) -> None:
    """Raises ShoalError(NODE_UNKNOWN | NOT_FOUND) if there is no such node, or no such device on it."""
    if aim == Aim():
        return
    state = fleet.nodes.get(aim.node)
    if state is None:
        raise refuse(
            Code.NODE_UNKNOWN, f"no node {aim.node!r:.80}", "NODE, NODE/DEVICE or REGION",
            "see `shoal get devices`, `shoal federation regions`",
        )  # fmt: skip
    if aim.device and state.device(aim.device) is None:
        raise refuse(
            Code.NOT_FOUND, f"{aim.node} has no device {aim.device!r:.80}", "one of its devices",
            f"see `shoal describe node {aim.node}`",
        )  # fmt: skip


def _with_trial(
    inputs: Inputs, key: WorkloadKey, aim: Aim, replica: str, there: Sequence[Candidate]
) -> list[Candidate]:  # fmt: skip
    """The candidates with the result of a trial move to them. Unchanged if none can be tried: nothing runs, or the
    limit of simultaneous moves is reached."""
    held = [
        (one.id, Slot(node, one.device), one.variant)
        for node, assignments in sorted(inputs.desired.items())
        for one in assignments
        if one.workload == key and not (one.draining or one.standby) and replica in ("", one.id)
    ]
    source = next((name for name, slot, model in held if not aim.allows(*slot, model)), None)
    if source is None:
        return list(there)
    trial = Move(_TRIAL, key, source, Refusal(Code.MOVE_HELD, "it would move"), aim=aim)
    settled = tuple(move for move in inputs.moves if move.target)
    found = place(replace(inputs, moves=(*settled, trial)), explain=False).of(key)
    if found is None:
        return list(there)
    goes = next((one for one in found.targets if one.migration == _TRIAL), None)
    if goes is not None:
        names = (goes.node, goes.device, goes.variant)
        return [
            replace(one, refusal=None, nearest="") if (one.node, one.device, one.variant) == names else one
            for one in there
        ]
    refusal = found.unplaced_moves.get(_TRIAL)
    if refusal is None:
        return list(there)
    return [one if one.refusal is not None or one.current else replace(one, refusal=refusal) for one in there]


def _source(plan: WorkloadPlan, there: Sequence[Candidate]) -> Candidate | None:
    slots = {(one.node, one.device) for one in there}
    current = [one for one in plan.candidates if one.current]
    return next((one for one in current if (one.node, one.device) not in slots), current[0] if current else None)


def _estimate(inputs: Inputs, intent: Intent, source: Candidate | None, candidate: Candidate) -> Estimate:
    rule = intent.migration
    refusal, nearest = candidate.refusal, candidate.nearest
    if refusal is None and candidate.current:
        where = f"{candidate.node}/{candidate.device}"
        refusal, nearest = Refusal(Code.CONFLICT, f"it runs on {where} already", "another device"), ""
    needs = _needs(inputs, intent, source, candidate) if refusal is None else ()
    answer = MoveAnswer.NO if refusal is not None else MoveAnswer.YES_WITH if needs else MoveAnswer.YES
    there, device = candidate.prediction, _device(inputs, candidate)
    transfer_s = there.transfer_s if there is not None else math.nan
    return Estimate(
        node=candidate.node,
        device=candidate.device,
        stand_in=candidate.stand_in,
        model=candidate.model,
        precision=candidate.precision,
        provider=device.provider if device is not None else "",
        answer=answer,
        needs=needs,
        refusal=refusal,
        nearest=nearest,
        fetch_bytes=missing_bytes(inputs, candidate.node, candidate.model),
        load_s=there.load_s if there is not None else UNKNOWN,
        transfer_s=transfer_s,
        link=device.host_link if device is not None and math.isfinite(transfer_s) else None,
        now=_figures(source),
        then=_figures(candidate),
        cost_of_both=candidate.cost_usd_per_h * _overlap_s(inputs, rule, source, candidate) / 3600,
        drift=_tolerances(inputs, rule, source, candidate) if source is not None else (),
    )


def _tolerances(inputs: Inputs, rule: MigrationRule, source: Candidate, candidate: Candidate) -> tuple[Tolerance, ...]:
    before, after = (inputs.fleet.arithmetic(each.node, each.device, each.precision) for each in (source, candidate))
    return with_defaults(rule.tolerances, before, after)


def _overlap_s(inputs: Inputs, rule: MigrationRule, source: Candidate | None, candidate: Candidate) -> float:
    """Seconds from the start of the new replica to the end of the old one; NaN if unknown."""
    there = candidate.prediction
    if there is None:
        return math.nan
    if source is None:
        return there.load_s.mid
    here_s = source.prediction.latency_p95_s.mid if source.prediction is not None else math.nan
    return overlap_s(inputs, rule, here_s, there, missing_bytes(inputs, candidate.node, candidate.model))


def _preparation(inputs: Inputs, intent: Intent, candidate: Candidate) -> str:
    """What the node makes of the model, by how many samples, and what that took when it was done there."""
    pack = intent.packs.get(candidate.model)
    made = f"{candidate.precision} of {pack.count} samples" if pack is not None else candidate.precision
    known = inputs.measured.get(Trial(candidate.variant, candidate.node, candidate.device))
    took = (
        show_seconds(known.prepare_s) + " there before" if known is not None and known.prepare_s else "never done there"
    )
    return f"{made}, {took}"


def _needs(
    inputs: Inputs, intent: Intent, source: Candidate | None, candidate: Candidate
) -> tuple[tuple[MoveNeed, str], ...]:
    found = list[tuple[MoveNeed, str]]()
    if candidate.is_prepared:
        found.append((MoveNeed.PREPARE, _preparation(inputs, intent, candidate)))
    if source is None:
        return tuple(found)
    here, there = _provider(inputs, source), _provider(inputs, candidate)
    if here != there:
        found.append((MoveNeed.REBUILD, f"{there} compiles it anew, {here} ran it"))
    if source.variant != candidate.variant and not candidate.is_prepared:
        found.append((MoveNeed.PRECISION, f"the {candidate.precision} variant, {source.precision} runs now"))
    return tuple(found)


def _provider(inputs: Inputs, candidate: Candidate) -> str:
    device = _device(inputs, candidate)
    return device.provider if device is not None else ""


def _device(inputs: Inputs, candidate: Candidate) -> Device | None:
    state = inputs.fleet.nodes.get(candidate.node)
    return state.device(candidate.device) if state is not None else None


def _figures(candidate: Candidate | None) -> PredictedFigures | None:
    if candidate is None or candidate.prediction is None:
        return None
    prediction = candidate.prediction
    cost = UsdPerHour(candidate.cost_usd_per_h)
    return PredictedFigures(prediction.latency_p95_s, prediction.joules, prediction.energy_source, cost)
