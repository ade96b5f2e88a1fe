"""Answers another region's solicitation: a placement trial under the solicited terms, and the terms of the offer.

An answer shows classes of capacity and figures, never a node: reasons are codes, and a counter-offer that would have
to name a node is declined.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.fleet.commitments import total_bytes
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.graph.kernels import intensity_of
from shoal.coordinator.core.negotiation.trust import may_trade, trade_refusal
from shoal.coordinator.core.placement.contention import UTILISATION_MOST
from shoal.coordinator.core.placement.model import (
    Candidate,
    Inputs,
    RegionFacts,
    Reservation,
    Slot,
    WorkloadPlan,
)
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.score import carbon, energy, latency
from shoal.coordinator.core.placement.score.term import ObjectiveTerm
from shoal.policies.cel import Expression
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.offer import Answer, Decline, Offer, Solicitation
from shoal.types.profile import CHANNEL_BLOCKS, KERNEL_KINDS, RUN_BATCHES, ModelProfile
from shoal.types.units import GramsPerHour, Joules, PerSecond, Seconds, UsdPerHour
from shoal.types.workload import Intent, ModelRef, PartitionRule, TradeRule, Traffic, WorkloadKey

GUEST_PRIORITY: Final = -1
"""Below any priority that a document can state: local workloads are placed first. Running replicas are never
preempted."""
REPLICAS_MOST: Final = 100
BATCH_MOST: Final = 65_536
MODELS_MOST: Final = 16
LARGE: Final = 1e18
"""Above any real FLOPs of one inference, bytes, or requests a second."""
COSTS_MOST: Final = 1024
"""Operator types of one model. ONNX defines some 200, and a model may name others."""
KERNELS_MOST: Final = len(KERNEL_KINDS) * (2 * abs(intensity_of(1.0, LARGE)) + 1)
"""A profile has one entry for each kind and intensity."""


@dataclass(frozen=True, slots=True)
class BidAnswer:
    """The answer, and what it holds."""

    # Offer, counter-offer or decline.
    answer: Answer
    # Room that an offer holds; empty: it holds nothing.
    reservations: tuple[Reservation, ...] = ()


def answer_solicitation(
    solicitation: Solicitation,
    inputs: Inputs,
    trades: Sequence[TradeRule],
    *,
    bid: str,
    used: Iterable[Reservation],
    cached: Collection[str],
    hold_s: Seconds,
    unawarded: Iterable[Reservation] = (),
    standing: float = 1.0,
) -> BidAnswer:
    """Offer, counter-offer or decline.

    inputs: the region with all that is reserved. bid: id for the offer. used: what this counterpart's open bids and
    agreements take of the region. cached: digests whose bytes are here. hold_s: how long an offer holds its room.
    unawarded: the part of `used` that was not awarded. standing (`standing.value`): the part of its share that the
    counterpart may hold without an award.
    """
    region = inputs.region
    if (refusal := trade_refusal(trades, solicitation.origin, solicitation.workload.tenant)) is not None:
        return _decline(solicitation, inputs, refusal)
    trade = may_trade(trades, solicitation.origin, solicitation.workload.tenant)
    if trade is None or solicitation.origin == region.name:
        return _decline(
            solicitation, inputs, Refusal(Code.TRADE_DENIED, f"{region.name} asks itself", "another region")
        )
    if (absurd := _implausible_figures(solicitation)) is not None:
        return _decline(solicitation, inputs, absurd)
    if (outside := residency_refusal(solicitation, region)) is not None:
        return _decline(solicitation, inputs, outside)
    if (unreadable := _expression_refusal(solicitation.require.where)) is not None:
        return _decline(solicitation, inputs, unreadable)
    intent = _intent_for_guest(
        solicitation, bid, tuple(ModelRef(each.digest, each.digest, "") for each in solicitation.models)
    )
    plan = _what_if(intent, solicitation, inputs)
    if plan.refusal is None:
        offer, reserved = _offer(solicitation, plan, inputs, bid, cached), _reservations(plan, bid)
        if solicitation.indicative:
            return BidAnswer(offer)
        over = _share_refusal(trade.hold_share, solicitation, (*used, *reserved), inputs.fleet)
        if over is None and standing < 1.0:
            over = _share_refusal(
                trade.hold_share * standing, solicitation, (*unawarded, *reserved), inputs.fleet, standing
            )
        if over is not None:
            return _decline(solicitation, inputs, over)
        return BidAnswer(replace(offer, hold_s=hold_s), reserved)
    proposal = plan.proposal
    if proposal is None or not _is_disclosable(intent, proposal.require.where, proposal.require.signed_by):
        return _decline(solicitation, inputs, _reason(plan))
    relaxed = _what_if(replace(intent, require=proposal.require, limits=proposal.limits), solicitation, inputs)
    if relaxed.refusal is not None:
        return _decline(solicitation, inputs, _reason(plan))
    return BidAnswer(replace(_offer(solicitation, relaxed, inputs, bid, cached), changes=(proposal.change,)))


def guest_intent(asked: Solicitation, offer: Offer, agreement: str) -> Intent:
    """The workload that the region runs once its offer was awarded, with exactly the model that it offered."""
    return _intent_for_guest(asked, agreement, (ModelRef(offer.model, offer.model, offer.precision),))


def origin_rtt_s(asked: Solicitation, region: str) -> Seconds:
    """RTT between the origin and this region in seconds, as the origin measured it."""
    return Seconds(asked.way_s.get(region, 0.0))


def residency_refusal(asked: Solicitation, region: RegionFacts) -> Refusal | None:
    """Why the data of this workload may not come here; None: it may."""
    if asked.require.may_be_in(region.name, region.residency):
        return None
    lies = region.residency or "nowhere that it declares"
    return Refusal(Code.RESIDENCY, f"{region.name} lies in {lies}", ", ".join(asked.require.residency))


def _intent_for_guest(asked: Solicitation, name: str, models: tuple[ModelRef, ...]) -> Intent:
    """A guest is never delegated again. Its only traffic origin is its own region, whose RTT is listed under the
    guest's name."""
    rate, peak = (math.fsum(values) for values in ([t.rate for t in asked.traffic], [t.peak for t in asked.traffic]))
    return Intent(
        key=WorkloadKey(GUEST_TENANT, name),
        revision=1,
        labels={},
        policy=f"guest of {asked.origin}",
        models=models,
        require=asked.require,
        limits=asked.limits,
        weights=asked.weights,
        relax=(),
        traffic=(Traffic(name, PerSecond(rate), PerSecond(peak)),),
        partition=PartitionRule(),
        priority=GUEST_PRIORITY,
        shared_worker=False,
        max_batch=asked.max_batch,
        batch_delay_s=asked.batch_delay_s,
        batch_padding=asked.batch_padding,
    )


def _what_if(intent: Intent, asked: Solicitation, inputs: Inputs) -> WorkloadPlan:
    """Places the guest on trial. For a model known here, this region's profile counts, not the one in the
    solicitation."""
    profiles = {each.digest: each for each in asked.models} | dict(inputs.profiles)
    rtt_s = {**inputs.rtt_s, intent.key.name: origin_rtt_s(asked, inputs.region.name)}
    world = replace(inputs, intents=(*inputs.intents, intent), profiles=profiles, rtt_s=rtt_s)
    plan = place(world, explain={intent.key}).of(intent.key)
    assert plan is not None
    return plan


def _offer(asked: Solicitation, plan: WorkloadPlan, inputs: Inputs, bid: str, cached: Collection[str]) -> Offer:
    chosen = _chosen_candidates(plan)
    first = chosen[0]
    predictions = [each.prediction for each in chosen if each.prediction is not None]
    away = origin_rtt_s(asked, inputs.region.name) if asked.require.latency_from_origin else 0.0
    return Offer(
        id=bid,
        solicitation=asked.id,
        round=asked.round,
        origin=asked.origin,
        region=inputs.region.name,
        model=first.model,
        precision=first.precision,
        replicas=plan.placed,
        latency_p95_s=Seconds(_combined(chosen, latency.TERM) - away),
        cost=UsdPerHour(math.fsum(each.cost_usd_per_h for each in chosen)),
        joules=Joules(_combined(chosen, energy.TERM)),
        energy_source=predictions[0].energy_source,
        carbon=GramsPerHour(_combined(chosen, carbon.TERM)),
        load_s=Seconds(max(each.load_s.mid for each in predictions)),
        cached=first.model in cached,
        stand_in=next((each.stand_in for each in chosen if each.stand_in), ""),
        residency=inputs.region.residency or inputs.region.name,
        hold_s=Seconds(0.0),
    )


def _chosen_candidates(plan: WorkloadPlan) -> list[Candidate]:
    """The candidate of each target."""
    known = {(each.node, each.device, each.variant): each for each in plan.candidates if each.chosen}
    return [known[target.node, target.device, target.variant] for target in plan.targets]


def _combined(candidates: Sequence[Candidate], term: ObjectiveTerm) -> float:
    """A term's value of all these replicas together."""
    return term.combine([each.value for one in candidates for each in one.terms if each.name == term.name])


def _reservations(plan: WorkloadPlan, bid: str) -> tuple[Reservation, ...]:
    return tuple(
        Reservation(bid, Slot(target.node, target.device), target.memory_bytes, target.busy) for target in plan.targets
    )


def _share_refusal(
    share: float, asked: Solicitation, used: Sequence[Reservation], fleet: Fleet, standing: float = 1.0
) -> Refusal | None:
    """Why one counterpart would hold more than its share of the region's memory or of its devices' time; None: it
    would not."""
    devices = [
        (device, state) for state in fleet.nodes.values() for device in state.node.devices if not device.hardware
    ]
    memories = dict[tuple[str, str], int]()
    for device, state in devices:
        own = state.name, device.memory_root
        memories[own] = max(memories.get(own, 0), total_bytes(device, state))
    memory = sum(memories.values())
    time = UTILISATION_MOST * len(devices)
    taken = max(
        sum(each.memory_bytes for each in used) / memory if memory else math.inf,
        math.fsum(each.busy for each in used) / time if time else math.inf,
    )
    if taken <= share:
        return None
    found = f"{asked.origin} would hold {taken:.1%} of the region"
    if standing == 1.0:
        return Refusal(Code.HOLD_SHARE, found, f"at most {share:.1%}", "release what is not needed")
    limit = f"at most {share:.1%} before an award: what it held came to nothing (standing {standing:.2f})"
    return Refusal(
        Code.HOLD_SHARE, found, limit, "award what is held, or release it at once; it is forgotten in minutes"
    )


def _is_disclosable(intent: Intent, where: str, signed_by: tuple[str, ...]) -> bool:
    """True if the nearest change consists of figures only: an expression or a key would name things of this region."""
    return (where, signed_by) == (intent.require.where, intent.require.signed_by)


def _reason(plan: WorkloadPlan) -> Refusal:
    """The plan's refusal without the places that it is about."""
    assert plan.refusal is not None
    return Refusal(plan.refusal.code, f"{plan.placed} of {plan.wanted} replicas would fit", f"{plan.wanted} replicas")


def _decline(asked: Solicitation, inputs: Inputs, refusal: Refusal) -> BidAnswer:
    return BidAnswer(Decline(asked.id, asked.round, inputs.region.name, refusal))


def _implausible_figures(asked: Solicitation) -> Refusal | None:
    """Refuses figures that cannot be meant: a negative size would create room where there is none."""
    absurd = Refusal(Code.MESSAGE_INVALID, "a solicitation with absurd figures", "figures that can be meant")
    if len(asked.models) > MODELS_MOST or any(map(_is_longer_than_ours, asked.models)):
        return absurd
    require = asked.require
    amounts = [
        *(figure for profile in asked.models for figure in _figures(profile)),
        *(rate for traffic in asked.traffic for rate in (traffic.rate, traffic.peak)),
        *asked.weights.values(),
        *asked.way_s.values(),
        asked.batch_delay_s,
    ]
    sound = (
        1 <= require.replicas <= REPLICAS_MOST
        and 1 <= asked.max_batch <= BATCH_MOST
        and asked.models
        and asked.round >= 1
        and all(0 <= amount <= LARGE for amount in amounts)
    )
    return None if sound else absurd


def _expression_refusal(where: str) -> Refusal | None:
    """Why it is no expression, which another region may not have checked. Placement would compile it for each device,
    because a failure is not kept; a valid one compiles once."""
    if not where:
        return None
    try:
        Expression.compile(where)
    except ShoalError as error:
        return error.refusal
    return None


def _is_longer_than_ours(profile: ModelProfile) -> bool:
    """Whether it lists more than any profile that a region computes: each further entry costs whoever predicts by
    it."""
    return (
        len(profile.costs) > COSTS_MOST
        or len(profile.kernels) > KERNELS_MOST
        or len(profile.batch_run_bytes) > len(RUN_BATCHES)
        or any(len(each.padding_flops) > len(CHANNEL_BLOCKS) for each in profile.kernels)
    )


def _figures(profile: ModelProfile) -> Iterable[float]:
    yield from (profile.size_bytes, profile.weight_bytes, profile.activation_bytes, profile.largest_weight_bytes)
    yield from (profile.run_bytes, profile.copied_bytes, profile.run_growth_bytes, profile.largest_convolution_bytes)
    yield from (profile.layout_copies, profile.layout_bytes, profile.inner_packed_bytes, profile.folded_bytes)
    yield from profile.batch_run_bytes
    for cost in profile.costs:
        yield from (cost.nodes, cost.flops, cost.bytes)
    for kernel in profile.kernels:
        yield from (kernel.launches, kernel.flops, kernel.bytes, kernel.weight_bytes)
        yield from kernel.padding_flops
