"""What this region answers when another asks whether it could run a workload: placement asked "what if", and its terms.

An answer shows classes of capacity and figures, never a node: reasons are codes, and a counter-offer that would have to
name one is declined.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.fleet.commitments import total_bytes
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.negotiation.trust import denied, may_trade
from shoal.coordinator.core.placement.model import (
    Candidate,
    Inputs,
    RegionFacts,
    Reservation,
    Slot,
    WorkloadPlan,
)
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.solve import UTILISATION_MOST
from shoal.types.agreement import GUESTS
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Answer, Decline, Offer, Solicitation
from shoal.types.profile import ModelProfile
from shoal.types.units import GramsPerHour, Joules, PerSecond, Seconds, UsdPerHour
from shoal.types.workload import Intent, ModelRef, PartitionRule, Trade, Traffic, WorkloadKey

GUEST_PRIORITY: Final = -1
"""Below what any document can say: who lives here is placed first. What stands already is never preempted."""
REPLICAS_MOST: Final = 100
BATCH_MOST: Final = 65_536
MODELS_MOST: Final = 16
LARGE: Final = 1e18
"""No FLOPs of one inference, no bytes and no requests a second come near."""


@dataclass(frozen=True, slots=True)
class Bid:
    """reserved: what an offer holds; empty where it holds nothing."""

    answer: Answer
    reserved: tuple[Reservation, ...] = ()


def answer(
    asked: Solicitation,
    inputs: Inputs,
    trades: Sequence[Trade],
    *,
    bid: str,
    used: Iterable[Reservation],
    cached: Collection[str],
    hold_s: Seconds,
    held: Iterable[Reservation] = (),
    standing: float = 1.0,
) -> Bid:
    """Offer, counter-offer or decline.

    inputs: the region as it is, with all that is reserved. bid: what an offer shall be called. used: what this
    counterpart's open bids and agreements take of the region. cached: digests whose bytes are here. hold_s: how long
    an offer holds its room. held: what of `used` was not awarded; standing (`standing.value`): what part of its share
    the counterpart may so hold.
    """
    region = inputs.region
    if (refusal := denied(trades, asked.origin, asked.workload.tenant)) is not None:
        return _declined(asked, inputs, refusal)
    trade = may_trade(trades, asked.origin, asked.workload.tenant)
    if trade is None or asked.origin == region.name:
        return _declined(asked, inputs, Refusal(Code.TRADE_DENIED, f"{region.name} asks itself", "another region"))
    if (absurd := _absurd(asked)) is not None:
        return _declined(asked, inputs, absurd)
    if (outside := outside_of(asked, region)) is not None:
        return _declined(asked, inputs, outside)
    intent = _guest(asked, bid, tuple(ModelRef(each.digest, each.digest, "") for each in asked.models))
    plan = _what_if(intent, asked, inputs)
    if plan.refusal is None:
        offer, reserved = _offer(asked, plan, inputs, bid, cached), _reservations(plan, bid)
        if asked.indicative:
            return Bid(offer)
        over = _over_share(trade.hold_share, asked, (*used, *reserved), inputs.fleet)
        if over is None and standing < 1.0:
            over = _over_share(trade.hold_share * standing, asked, (*held, *reserved), inputs.fleet, standing)
        if over is not None:
            return _declined(asked, inputs, over)
        return Bid(replace(offer, hold_s=hold_s), reserved)
    proposal = plan.proposal
    if proposal is None or not _tellable(intent, proposal.require.where, proposal.require.signed_by):
        return _declined(asked, inputs, _reason(plan))
    relaxed = _what_if(replace(intent, require=proposal.require, limits=proposal.limits), asked, inputs)
    if relaxed.refusal is not None:
        return _declined(asked, inputs, _reason(plan))
    return Bid(replace(_offer(asked, relaxed, inputs, bid, cached), changes=(proposal.change,)))


def guest(asked: Solicitation, offer: Offer, agreement: str) -> Intent:
    """What the region runs once its offer was awarded: the very model that it offered."""
    return _guest(asked, agreement, (ModelRef(offer.model, offer.model, offer.precision),))


def way_s(asked: Solicitation, region: str) -> Seconds:
    """There and back between the origin and this region, as the origin measured it."""
    return Seconds(asked.way_s.get(region, 0.0))


def outside_of(asked: Solicitation, region: RegionFacts) -> Refusal | None:
    """Why the data of this workload may not come here."""
    if asked.require.may_be_in(region.name, region.residency):
        return None
    lies = region.residency or "nowhere that it declares"
    return Refusal(Code.RESIDENCY, f"{region.name} lies in {lies}", ", ".join(asked.require.residency))


def _guest(asked: Solicitation, name: str, models: tuple[ModelRef, ...]) -> Intent:
    """Never delegated on. Its one traffic origin is the way from its home, whose length goes under its own name."""
    rate, peak = (math.fsum(values) for values in ([t.rate for t in asked.traffic], [t.peak for t in asked.traffic]))
    return Intent(
        key=WorkloadKey(GUESTS, name),
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
    )


def _what_if(intent: Intent, asked: Solicitation, inputs: Inputs) -> WorkloadPlan:
    """Its profile of a model that is known here counts, not the asker's."""
    profiles = {each.digest: each for each in asked.models} | dict(inputs.profiles)
    rtt_s = {**inputs.rtt_s, intent.key.name: way_s(asked, inputs.region.name)}
    world = replace(inputs, intents=(*inputs.intents, intent), profiles=profiles, rtt_s=rtt_s)
    plan = place(world, explain={intent.key}).of(intent.key)
    assert plan is not None
    return plan


def _offer(asked: Solicitation, plan: WorkloadPlan, inputs: Inputs, bid: str, cached: Collection[str]) -> Offer:
    chosen = _chosen(plan)
    first = chosen[0]
    predictions = [each.prediction for each in chosen if each.prediction is not None]
    away = way_s(asked, inputs.region.name) if asked.require.latency_from_origin else 0.0
    return Offer(
        id=bid,
        solicitation=asked.id,
        round=asked.round,
        origin=asked.origin,
        region=inputs.region.name,
        model=first.model,
        precision=first.precision,
        replicas=plan.placed,
        latency_p95_s=Seconds(max(_latency_s(each) for each in chosen) - away),
        cost=UsdPerHour(math.fsum(each.cost_usd_per_h for each in chosen)),
        joules=Joules(math.fsum(each.joules.mid for each in predictions) / len(chosen)),
        energy_source=predictions[0].energy_source,
        carbon=GramsPerHour(math.fsum(each.carbon_g_per_h for each in chosen)),
        load_s=Seconds(max(each.load_s.mid for each in predictions)),
        cached=first.model in cached,
        emulated=any(each.emulated for each in chosen),
        residency=inputs.region.residency or inputs.region.name,
        hold_s=Seconds(0.0),
    )


def _chosen(plan: WorkloadPlan) -> list[Candidate]:
    """The candidate of each target."""
    known = {(each.node, each.device, each.model): each for each in plan.candidates if each.chosen}
    return [known[target.node, target.device, target.model] for target in plan.targets]


def _latency_s(candidate: Candidate) -> float:
    return next(term.value for term in candidate.terms if term.name == "latency")


def _reservations(plan: WorkloadPlan, bid: str) -> tuple[Reservation, ...]:
    return tuple(
        Reservation(bid, Slot(target.node, target.device), target.memory_bytes, target.busy) for target in plan.targets
    )


def _over_share(
    share: float, asked: Solicitation, used: Sequence[Reservation], fleet: Fleet, standing: float = 1.0
) -> Refusal | None:
    """Whether one counterpart would hold more than its share of the region's memory, or of its devices' time."""
    devices = [(device, state) for state in fleet.nodes.values() for device in state.node.devices]
    memory = sum(total_bytes(device, state) for device, state in devices)
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


def _tellable(intent: Intent, where: str, signed_by: tuple[str, ...]) -> bool:
    """What the nearest change lets through is told by figures alone: an expression or a key would name things here."""
    return (where, signed_by) == (intent.require.where, intent.require.signed_by)


def _reason(plan: WorkloadPlan) -> Refusal:
    """Without what it was found on."""
    assert plan.refusal is not None
    return Refusal(plan.refusal.code, f"{plan.placed} of {plan.wanted} replicas would fit", f"{plan.wanted} replicas")


def _declined(asked: Solicitation, inputs: Inputs, refusal: Refusal) -> Bid:
    return Bid(Decline(asked.id, asked.round, inputs.region.name, refusal))


def _absurd(asked: Solicitation) -> Refusal | None:
    """What cannot be meant: a negative size would make room where there is none."""
    require, weights = asked.require, asked.weights
    amounts = [
        *(figure for profile in asked.models for figure in _figures(profile)),
        *(rate for traffic in asked.traffic for rate in (traffic.rate, traffic.peak)),
        *(weights.latency, weights.cost, weights.energy),
        *asked.way_s.values(),
    ]
    sound = (
        1 <= require.replicas <= REPLICAS_MOST
        and 1 <= asked.max_batch <= BATCH_MOST
        and 1 <= len(asked.models) <= MODELS_MOST
        and asked.round >= 1
        and all(0 <= amount <= LARGE for amount in amounts)
    )
    if sound:
        return None
    return Refusal(Code.MESSAGE_INVALID, "a solicitation with absurd figures", "figures that can be meant")


def _figures(profile: ModelProfile) -> Iterable[float]:
    yield from (profile.size_bytes, profile.weight_bytes, profile.activation_bytes)
    for cost in profile.costs:
        yield from (cost.nodes, cost.flops, cost.bytes)
