"""Can a workload move there, and at what price? What `shoal can-move` answers, and what a migration is held against."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.migration.expected import both_s, missing_bytes
from shoal.coordinator.core.migration.tolerance import completed
from shoal.coordinator.core.placement.model import Aim, Candidate, Inputs, Slot, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.prediction.model import Interval
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.device import EnergySource
from shoal.types.migration import MigrationRule, Tolerance
from shoal.types.units import Bytes, UsdPerHour
from shoal.types.workload import WorkloadKey

UNKNOWN = Interval(math.nan, math.nan, math.nan)


class Answer(StrEnum):
    YES = "yes"
    YES_WITH = "yes-with"
    """It can, and something of it changes: `Estimate.needs` says what."""
    NO = "no"


class Need(StrEnum):
    """What changes on the way."""

    REBUILD = "rebuild"
    """Another runtime or provider prepares the model anew: compiled or optimised there, and its kernels differ."""
    PRECISION = "precision"
    """Another variant of the model, in another precision."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A replica's service. latency_p95_s: at the worker, seconds. joules: per inference. cost: USD/h of the device."""

    latency_p95_s: Interval
    joules: Interval
    energy_source: EnergySource
    cost: UsdPerHour


@dataclass(frozen=True, slots=True)
class Estimate:
    """One (device, model variant) that a workload might move to.

    needs: of YES_WITH, with what it is in words. refusal, nearest: of NO: the first constraint in the way, and what
    one would change to be rid of it. fetch_bytes: what its node lacks of the model, 0 where it holds it. load_s:
    loading and warming up there. now: of the replica that would move, None where none runs. then: None where nothing
    is known of the device. cost_of_both: USD for the new one while both run: it loads, is compared, takes over
    step by step, and the old one drains (as long as it may), each at the middle of its prediction; NaN where a price or
    a time is unknown; where nothing runs, for loading. drift: how far its answers may be from those of now before a
    migration is refused; empty where nothing runs.
    """

    node: str
    device: str
    emulated: bool
    model: str
    precision: str
    provider: str
    answer: Answer
    needs: tuple[tuple[Need, str], ...]
    refusal: Refusal | None
    nearest: str
    fetch_bytes: Bytes
    load_s: Interval
    now: Figures | None
    then: Figures | None
    cost_of_both: float
    drift: tuple[Tolerance, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """source: where the replica that would move is; None where none runs. estimates: the best first."""

    workload: WorkloadKey
    source: Slot | None
    estimates: tuple[Estimate, ...]

    @property
    def answer(self) -> Answer:
        return self.estimates[0].answer if self.estimates else Answer.NO


def outlook(inputs: Inputs, key: WorkloadKey, aim: Aim) -> Outlook:
    """What moving a replica of this workload there would take.

    The replica that moves is the first that is not there; the others stay. Raises ShoalError(WORKLOAD_UNKNOWN |
    NODE_UNKNOWN | NOT_FOUND): a node without that device.
    """
    aimed_at(inputs.fleet, aim)
    plan = place(inputs, explain=(key,)).of(key)
    if plan is None:
        raise refuse(Code.WORKLOAD_UNKNOWN, str(key), "an applied workload", "see `shoal get workloads`")
    there = [one for one in plan.candidates if aim.allows(one.node, one.device, one.model)]
    source = _source(plan, there)
    rule = next(intent.migration for intent in inputs.intents if intent.key == key)
    estimates = [_estimate(inputs, rule, source, candidate) for candidate in there]
    order = (Answer.YES, Answer.YES_WITH, Answer.NO)
    ranked = tuple(sorted(estimates, key=lambda each: order.index(each.answer)))
    return Outlook(key, Slot(source.node, source.device) if source is not None else None, ranked)


def aimed_at(fleet: Fleet, aim: Aim) -> None:
    """Raises ShoalError(NODE_UNKNOWN | NOT_FOUND) where there is no such node, or no such device on it."""
    state = fleet.nodes.get(aim.node)
    if state is None:
        raise refuse(Code.NODE_UNKNOWN, f"node {aim.node!r:.80}", "an enrolled node", "see `shoal get nodes`")
    if aim.device and state.device(aim.device) is None:
        raise refuse(
            Code.NOT_FOUND, f"{aim.node} has no device {aim.device!r:.80}", "one of its devices",
            f"see `shoal describe node {aim.node}`",
        )  # fmt: skip


def _source(plan: WorkloadPlan, there: Sequence[Candidate]) -> Candidate | None:
    slots = {(one.node, one.device) for one in there}
    current = [one for one in plan.candidates if one.current]
    return next((one for one in current if (one.node, one.device) not in slots), current[0] if current else None)


def _estimate(inputs: Inputs, rule: MigrationRule, source: Candidate | None, candidate: Candidate) -> Estimate:
    refusal, nearest = candidate.refusal, candidate.nearest
    if refusal is None and candidate.current:
        where = f"{candidate.node}/{candidate.device}"
        refusal, nearest = Refusal(Code.CONFLICT, f"it runs on {where} already", "another device"), ""
    needs = _needs(inputs, source, candidate) if source is not None and refusal is None else ()
    answer = Answer.NO if refusal is not None else Answer.YES_WITH if needs else Answer.YES
    load_s = candidate.prediction.load_s if candidate.prediction is not None else UNKNOWN
    return Estimate(
        node=candidate.node,
        device=candidate.device,
        emulated=candidate.emulated,
        model=candidate.model,
        precision=candidate.precision,
        provider=_provider(inputs, candidate),
        answer=answer,
        needs=needs,
        refusal=refusal,
        nearest=nearest,
        fetch_bytes=missing_bytes(inputs, candidate.node, candidate.model),
        load_s=load_s,
        now=_figures(source),
        then=_figures(candidate),
        cost_of_both=candidate.cost_usd_per_h * _both_s(inputs, rule, source, candidate) / 3600,
        drift=completed(rule.tolerances, source.precision, candidate.precision) if source is not None else (),
    )


def _both_s(inputs: Inputs, rule: MigrationRule, source: Candidate | None, candidate: Candidate) -> float:
    """Seconds from the new replica's first to the old one's last."""
    there = candidate.prediction
    if there is None:
        return math.nan
    if source is None:
        return there.load_s.mid
    here_s = source.prediction.latency_p95_s.mid if source.prediction is not None else math.nan
    return both_s(inputs.fleet, rule, here_s, there)


def _needs(inputs: Inputs, source: Candidate, candidate: Candidate) -> tuple[tuple[Need, str], ...]:
    found = list[tuple[Need, str]]()
    here, there = _provider(inputs, source), _provider(inputs, candidate)
    if here != there:
        found.append((Need.REBUILD, f"{there} prepares it anew, {here} ran it"))
    if source.model != candidate.model:
        found.append((Need.PRECISION, f"the {candidate.precision} variant, {source.precision} runs now"))
    return tuple(found)


def _provider(inputs: Inputs, candidate: Candidate) -> str:
    state = inputs.fleet.nodes.get(candidate.node)
    device = state.device(candidate.device) if state is not None else None
    return device.provider if device is not None else ""


def _figures(candidate: Candidate | None) -> Figures | None:
    if candidate is None or candidate.prediction is None:
        return None
    prediction = candidate.prediction
    cost = UsdPerHour(candidate.cost_usd_per_h)
    return Figures(prediction.latency_p95_s, prediction.joules, prediction.energy_source, cost)
