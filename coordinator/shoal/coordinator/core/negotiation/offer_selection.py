"""Selects the best answer to a solicitation, compared with the best local placement, by the workload's objective."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.coordinator.core.negotiation.reputation import believed_latency_s
from shoal.coordinator.core.negotiation.trust import may_delegate
from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.model import WorkloadPlan, terms_of
from shoal.coordinator.core.placement.rank import TermValues, gain, objective, served_values
from shoal.coordinator.core.placement.tenant_cost import TenantCost
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Answer, Decline, Offer
from shoal.types.stable_hash import digest
from shoal.types.units import (
    DURATION,
    Seconds,
    UsdPerHour,
    show_carbon,
    show_joules,
    show_quantity,
    show_seconds,
    show_usd_per_hour,
)
from shoal.types.workload import DelegationMode, DelegationRule, Intent, Limits, Relaxation, Requirements, Weights


@dataclass(frozen=True, slots=True)
class DelegationTerms:
    """What answers are judged by."""

    # Hash of what the documents ask (`request_hash`).
    request_hash: str
    # The policy's requirements, without relaxation.
    require: Requirements
    # The policy's limits, without relaxation.
    limits: Limits
    # Weights of the objective.
    weights: Weights
    # The policy's relaxations, smallest first.
    relax: tuple[Relaxation, ...]
    # To which regions the policy delegates, and when.
    delegation: DelegationRule
    # Values of all replicas of the best local placement together; None: there is none.
    own: TermValues | None = None
    # RTT in seconds by region, where measured. An offer of a region without an RTT meets no latency bound.
    rtt_s: Mapping[str, float] = field(default_factory=dict)
    # Trust in each region, in (0, 1]; 1 if absent.
    trust: Mapping[str, float] = field(default_factory=dict)
    # What is left of the tenant's budget; None: it has none.
    budget: UsdPerHour | None = None
    # (region, model digest) pairs that gave wrong answers and get no award.
    exclusions: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class RankedAnswer:
    """One region's answer as judged."""

    # Offer, counter-offer or decline.
    answer: Answer
    # The offer with the latency that its clients are believed to see; None for a decline.
    believed: Offer | None
    # Gain over the best local placement; NaN if there is none.
    gain: float
    # Why it is not chosen, whatever the others are; None: it could be.
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class OfferSelection:
    """Result of one round."""

    # Every answer, best first.
    ranked: tuple[RankedAnswer, ...]
    # None: the local placement is as good, or nothing fits.
    winner: Offer | None
    # With neither a winner nor a local placement: the smallest relaxation that some offer would meet; None otherwise,
    # or if there is none.
    relaxation: Relaxation | None
    # Why there is no winner; None: there is one.
    refusal: Refusal | None


def request_hash(intent: Intent) -> str:
    """Short hash of what a workload's documents ask of another region. A workload that runs there under another hash
    is replaced."""
    asked = terms_of(intent) + repr(intent.delegation)
    return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()


def terms_for(
    intent: Intent,
    own: TermValues | None,
    rtt_s: Mapping[str, float],
    trust: Mapping[str, float],
    exclusions: frozenset[tuple[str, str]] = frozenset(),
    budget: UsdPerHour | None = None,
) -> DelegationTerms:
    """Terms by the workload's current documents. budget: what is left of its tenant's."""
    return DelegationTerms(
        request_hash=request_hash(intent),
        require=intent.require,
        limits=intent.limits,
        weights=intent.weights,
        relax=intent.relax,
        delegation=intent.delegation,
        own=own,
        rtt_s=rtt_s,
        trust=trust,
        budget=budget,
        exclusions=exclusions,
    )


def own_values(plan: WorkloadPlan) -> TermValues | None:
    """Values of the chosen candidates of an explained plan together; None if replicas are missing."""
    chosen = [each for each in plan.candidates if each.chosen]
    if plan.refusal is not None or not chosen:
        return None
    known = [{term.name: term.value for term in each.terms} for each in chosen]
    return tuple(term.combine([each.get(term.name, math.nan) for each in known]) for term in score.TERMS)


def believed_offer(offer: Offer, terms: DelegationTerms) -> Offer:
    """An offer as it counts: the RTT added, and its latency scaled by trust in the region."""
    rtt_s = terms.rtt_s.get(offer.region, math.nan if terms.require.latency_p95_s is not None else 0.0)
    latency_s = rtt_s + believed_latency_s(offer.latency_p95_s, terms.trust.get(offer.region, 1.0))
    return replace(offer, latency_p95_s=Seconds(latency_s))


def believed_values(offer: Offer, terms: DelegationTerms) -> TermValues:
    return served_values(believed_offer(offer, terms))


def choose(
    answers: Sequence[Answer], terms: DelegationTerms, *, since_s: float = 0.0, indicative: bool = False
) -> OfferSelection:
    """Ranks the answers; only the first of each region counts. since_s: time since the solicitation; a shorter hold has
    expired.

    Among the offers that fit, the best objective wins. The hash of the bid's id breaks ties. An unknown figure counts
    as worse than any known one. The local region keeps the workload unless the gain over it reaches `margin`.
    """
    first = dict[str, Answer]()
    for answer in answers:
        first.setdefault(answer.region, answer)
    believed = {name: believed_offer(each, terms) for name, each in first.items() if isinstance(each, Offer)}
    values = {name: served_values(each) for name, each in believed.items()}
    rows = list[tuple[tuple[bool, float, bytes], RankedAnswer]]()
    for name, each in first.items():
        if isinstance(each, Decline):
            rows.append(((True, 0.0, digest(name)), RankedAnswer(each, None, math.nan, each.refusal)))
            continue
        better = gain(values[name], terms.own, terms.weights) if terms.own is not None else math.nan
        refusal = _exclusion(each, terms, since_s, indicative=indicative)
        rows.append(
            (
                (refusal is not None, objective(values[name], terms.weights), digest(each.id)),
                RankedAnswer(each, believed[name], better, refusal),
            )
        )
    judged = tuple(row for _, row in sorted(rows, key=lambda row: row[0]))
    fits = [each for each in judged if each.refusal is None and isinstance(each.answer, Offer)]
    best = fits[0] if fits else None
    if best is not None and isinstance(best.answer, Offer):
        kept = _reason_to_keep_local(best, terms)
        return OfferSelection(judged, best.answer if kept is None else None, None, kept)
    if terms.own is not None:
        return OfferSelection(judged, None, None, Refusal(Code.NO_BID, "no offer fits", "one that does"))
    step = _relaxation(first.values(), terms)
    found = "; ".join(f"{each.answer.region}: {each.refusal}" for each in judged if each.refusal is not None)
    refusal = Refusal(Code.NO_BID, found or "no region answered", "an offer that meets the policy, or `relax` it")
    return OfferSelection(judged, None, step, refusal)


def gain_of_local(offer: Offer, terms: DelegationTerms) -> float:
    """Relative gain of the local placement over an awarded offer; NaN without a local placement."""
    return gain(terms.own, believed_values(offer, terms), terms.weights) if terms.own is not None else math.nan


def gain_of(offer: Offer, other: Offer, terms: DelegationTerms) -> float:
    """Relative gain of one offer over another."""
    return gain(believed_values(offer, terms), believed_values(other, terms), terms.weights)


def unmet_requirement(offer: Offer, require: Requirements, limits: Limits, terms: DelegationTerms) -> Refusal | None:
    """The first requirement that an offer does not meet, by its believed figures and in the order of placement's
    constraints; None: it meets all."""
    if (absurd := _implausible_value(offer)) is not None:
        return absurd
    latency = believed_offer(offer, terms).latency_p95_s
    if not require.may_be_in(offer.region, offer.residency):
        found = f"{offer.region} lies in {offer.residency or offer.region}"
        return Refusal(Code.RESIDENCY, found, ", ".join(require.residency))
    if require.precisions and offer.precision not in require.precisions:
        return Refusal(Code.PRECISION_DENIED, offer.precision, f"one of {', '.join(require.precisions)}")
    if offer.replicas < require.replicas:
        return Refusal(Code.REPLICAS_SHORT, f"{offer.replicas} replicas", f"{require.replicas}")
    bound = require.latency_p95_s
    if bound is not None and not latency <= bound:
        found = "the way there is not measured yet" if math.isnan(latency) else f"p95 {show_seconds(latency)}"
        return Refusal(Code.SLO_UNREACHABLE, found, f"p95 of at most {show_quantity(bound, DURATION)}")
    for code, value, limit, show in (
        (Code.COST_OVER, offer.cost, limits.cost, show_usd_per_hour),
        (Code.ENERGY_OVER, offer.joules, limits.energy, show_joules),
        (Code.CARBON_OVER, offer.carbon, limits.carbon, show_carbon),
    ):
        if limit is not None and not value <= limit:
            found = "unknown there" if math.isnan(value) else show(value)
            return Refusal(code, found, f"at most {show(limit)}")
    if terms.budget is not None and TenantCost.of(offer.cost).exceeds(terms.budget):
        found = show_usd_per_hour(offer.cost) if math.isfinite(offer.cost) else "unknown there"
        return Refusal(Code.QUOTA, found, f"{show_usd_per_hour(terms.budget)}, which is left of the tenant's budget")
    return None


def _implausible_value(offer: Offer) -> Refusal | None:
    """A negative figure, which no region can mean but which would win every comparison; None: there is none. NaN
    means unknown."""
    for name, value in (
        ("a p95 in s", offer.latency_p95_s),
        ("a price in USD/h", offer.cost),
        ("energy in J", offer.joules),
        ("carbon in g/h", offer.carbon),
        ("a load in s", offer.load_s),
    ):
        if value < 0:
            return Refusal(Code.MESSAGE_INVALID, f"{name} of {value:g}", "0 or more")
    return None


def _exclusion(offer: Offer, terms: DelegationTerms, since_s: float, *, indicative: bool) -> Refusal | None:
    if not may_delegate(terms.delegation, offer.region):
        return Refusal(Code.TRADE_DENIED, f"region {offer.region}", f"one of {', '.join(terms.delegation.to)}")
    if (offer.region, offer.model) in terms.exclusions:
        return Refusal(
            Code.MOVE_BLOCKED, f"{offer.region} answered otherwise than home", "another region or model",
            "`shoal model clear` lets it be tried again",
        )  # fmt: skip
    if offer.is_counter:
        return unmet_requirement(offer, terms.require, terms.limits, terms) or Refusal(
            Code.NO_BID, f"only with {', '.join(offer.changes)}", "all as asked"
        )
    if not indicative and offer.hold_s <= since_s:
        return Refusal(Code.HOLD_EXPIRED, f"held for {show_seconds(offer.hold_s)}", f"{show_seconds(since_s)} ago")
    return unmet_requirement(offer, terms.require, terms.limits, terms)


def _reason_to_keep_local(best: RankedAnswer, terms: DelegationTerms) -> Refusal | None:
    """Why the workload stays although an offer fits; None: it leaves."""
    if terms.own is None:
        return None
    if terms.delegation.mode is not DelegationMode.WHEN_BETTER:
        return Refusal(Code.NO_BID, "it has a place at home", f"delegate: {terms.delegation.mode}")
    if best.gain > 0 and best.gain >= terms.delegation.margin:
        return None
    return Refusal(Code.NO_BID, f"{best.gain:.1%} better than home at most", f"margin {terms.delegation.margin:.0%}")


def _relaxation(answers: Iterable[Answer], terms: DelegationTerms) -> Relaxation | None:
    """The first entry of `relax` that some offer would meet (each includes the ones before). That is a
    counter-offer, or an offer whose promise is not fully believed."""
    offers = [each for each in answers if isinstance(each, Offer) and may_delegate(terms.delegation, each.region)]
    for step in terms.relax:
        if any(unmet_requirement(each, step.require, step.limits, terms) is None for each in offers):
            return step
    return None
