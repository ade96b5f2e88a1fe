"""Which answer to a solicitation is best, against the best at home, under the workload's one objective."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.coordinator.core.negotiation.reputation import believed
from shoal.coordinator.core.negotiation.trust import may_delegate
from shoal.coordinator.core.placement.model import WorkloadPlan, terms_of
from shoal.coordinator.core.placement.rank import NAMES, gain
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Answer, Decline, Offer
from shoal.types.units import (
    DURATION,
    show_joules,
    show_quantity,
    show_seconds,
    show_usd_per_hour,
)
from shoal.types.workload import Delegation, DelegationMode, Intent, Limits, Relaxation, Requirements, Weights

Figures = tuple[float, float, float]
"""As `placement.rank.values`, of all replicas: (p95 s as clients see it, USD/h, J per inference); NaN where unknown."""


@dataclass(frozen=True, slots=True)
class Terms:
    """By what answers are judged. asked: hash of what the documents ask (`asked_of`).

    own: figures of the best at home; None: it has no place there. way_s: there and back by region, where measured: a
    region to which no way was measured keeps no bound on latency. trust: by region, 1 for who is not in it. barred:
    regions that gave wrong answers, each with the model's digest.
    """

    asked: str
    require: Requirements
    limits: Limits
    weights: Weights
    relax: tuple[Relaxation, ...]
    delegation: Delegation
    own: Figures | None = None
    way_s: Mapping[str, float] = field(default_factory=dict)
    trust: Mapping[str, float] = field(default_factory=dict)
    barred: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Judged:
    """figures: as believed; None of a decline. gain: over the best at home, NaN where there is none. refusal: why it is
    not chosen whatever the others are; None: it could be."""

    answer: Answer
    figures: Figures | None
    gain: float
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Choice:
    """judged: every answer, best first. winner: None where home is as good, or nothing fits. relaxation: then, the
    smallest step of the policy's `relax` that some counter-offer would meet. refusal: why there is no winner."""

    judged: tuple[Judged, ...]
    winner: Offer | None
    relaxation: Relaxation | None
    refusal: Refusal | None


def asked_of(intent: Intent) -> str:
    """What a workload's documents ask of another region, as a short hash: what runs there under others is replaced."""
    asked = terms_of(intent) + repr(intent.delegation)
    return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()


def terms_for(
    intent: Intent,
    own: Figures | None,
    way_s: Mapping[str, float],
    trust: Mapping[str, float],
    barred: frozenset[tuple[str, str]] = frozenset(),
) -> Terms:
    """As the workload's documents are now."""
    return Terms(
        asked=asked_of(intent),
        require=intent.require,
        limits=intent.limits,
        weights=intent.weights,
        relax=intent.relax,
        delegation=intent.delegation,
        own=own,
        way_s=way_s,
        trust=trust,
        barred=barred,
    )


def own_figures(plan: WorkloadPlan) -> Figures | None:
    """Of an explained plan: what the chosen candidates bring together; None where replicas are missing."""
    chosen = [each for each in plan.candidates if each.chosen]
    if plan.refusal is not None or not chosen:
        return None
    terms = [{term.name: term.value for term in each.terms} for each in chosen]
    latency, cost, energy = ([each.get(name, math.nan) for each in terms] for name in NAMES)
    return max(latency, key=_unknown_last), math.fsum(cost), math.fsum(energy) / len(energy)


def figures_of(offer: Offer, terms: Terms) -> Figures:
    """What an offer is taken for: the way counted, and the region believed as far as it deserves."""
    way = terms.way_s.get(offer.region, math.nan if terms.require.latency_p95_s is not None else 0.0)
    return way + believed(offer.latency_p95_s, terms.trust.get(offer.region, 1.0)), offer.cost, offer.joules


def choose(answers: Sequence[Answer], terms: Terms, *, since_s: float = 0.0, indicative: bool = False) -> Choice:
    """One answer of each region counts, its first. since_s: since they were asked for: a hold that is over is none.

    Among those that fit, the greatest gain over home, or where nothing fits there, over the worst value of each figure;
    ties fall by the hash of the bid's id. A figure that is unknown counts as the worst that anybody has. Home keeps the
    workload unless the gain reaches `margin`.
    """
    first = dict[str, Answer]()
    for answer in answers:
        first.setdefault(answer.region, answer)
    figures = {name: figures_of(each, terms) for name, each in first.items() if isinstance(each, Offer)}
    worst = _worst([*figures.values(), *([terms.own] if terms.own is not None else [])])
    reference = _filled(terms.own, worst) if terms.own is not None else worst
    rows = list[tuple[tuple[bool, float, str], Judged]]()
    for name, each in first.items():
        if isinstance(each, Decline):
            rows.append(((True, 0.0, _tie(name)), Judged(each, None, math.nan, each.refusal)))
            continue
        better = gain(_filled(figures[name], worst), reference, terms.weights)
        refusal = _excluded(each, terms, since_s, indicative=indicative)
        over_home = better if terms.own is not None else math.nan
        rows.append(((refusal is not None, -better, _tie(each.id)), Judged(each, figures[name], over_home, refusal)))
    judged = tuple(row for _, row in sorted(rows, key=lambda row: row[0]))
    fits = [each for each in judged if each.refusal is None and isinstance(each.answer, Offer)]
    best = fits[0] if fits else None
    if best is not None and isinstance(best.answer, Offer):
        kept = _home_keeps(best, terms)
        return Choice(judged, best.answer if kept is None else None, None, kept)
    if terms.own is not None:
        return Choice(judged, None, None, Refusal(Code.NO_BID, "no offer fits", "one that does"))
    step = _relaxation(first.values(), terms)
    found = "; ".join(f"{each.answer.region}: {each.refusal}" for each in judged if each.refusal is not None)
    refusal = Refusal(Code.NO_BID, found or "no region answered", "an offer that meets the policy, or `relax` it")
    return Choice(judged, None, step, refusal)


def gain_of_home(offer: Offer, terms: Terms) -> float:
    """By what share home betters an offer that was taken; NaN where it has no place at home."""
    return gain(terms.own, figures_of(offer, terms), terms.weights) if terms.own is not None else math.nan


def gain_of(offer: Offer, other: Offer, terms: Terms) -> float:
    """By what share an offer betters another."""
    return gain(figures_of(offer, terms), figures_of(other, terms), terms.weights)


def misses(offer: Offer, require: Requirements, limits: Limits, terms: Terms) -> Refusal | None:
    """The first thing asked that an offer does not meet, as it is believed; in the order of placement's constraints."""
    if (absurd := _absurd(offer)) is not None:
        return absurd
    latency, cost, joules = figures_of(offer, terms)
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
        return Refusal(Code.SLO_UNREACHABLE, found, f"p95 {show_quantity(bound, DURATION)}")
    for code, value, limit, show in (
        (Code.COST_OVER, cost, limits.cost, show_usd_per_hour),
        (Code.ENERGY_OVER, joules, limits.energy, show_joules),
        (Code.CARBON_OVER, offer.carbon, limits.carbon, _show_carbon),
    ):
        if limit is not None and not value <= limit:
            found = "unknown there" if math.isnan(value) else show(value)
            return Refusal(code, found, f"at most {show(limit)}")
    return None


def _absurd(offer: Offer) -> Refusal | None:
    """What no region can mean: it would be better than any that can. NaN is unknown."""
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


def _excluded(offer: Offer, terms: Terms, since_s: float, *, indicative: bool) -> Refusal | None:
    if not may_delegate(terms.delegation, offer.region):
        return Refusal(Code.TRADE_DENIED, f"region {offer.region}", f"one of {', '.join(terms.delegation.to)}")
    if (offer.region, offer.model) in terms.barred:
        return Refusal(
            Code.MOVE_BLOCKED, f"{offer.region} answered otherwise than home", "another region or model",
            "`shoal model clear` lets it be tried again",
        )  # fmt: skip
    if offer.is_counter:
        return misses(offer, terms.require, terms.limits, terms) or Refusal(
            Code.NO_BID, f"only with {', '.join(offer.changes)}", "all as asked"
        )
    if not indicative and offer.hold_s <= since_s:
        return Refusal(Code.HOLD_EXPIRED, f"held for {show_seconds(offer.hold_s)}", f"{show_seconds(since_s)} ago")
    return misses(offer, terms.require, terms.limits, terms)


def _home_keeps(best: Judged, terms: Terms) -> Refusal | None:
    """Why the workload stays although an offer fits."""
    if terms.own is None:
        return None
    if terms.delegation.mode is not DelegationMode.WHEN_BETTER:
        return Refusal(Code.NO_BID, "it has a place at home", f"delegate: {terms.delegation.mode}")
    if best.gain > 0 and best.gain >= terms.delegation.margin:
        return None
    return Refusal(Code.NO_BID, f"{best.gain:.1%} better than home at most", f"margin {terms.delegation.margin:.0%}")


def _relaxation(answers: Iterable[Answer], terms: Terms) -> Relaxation | None:
    """The first setting of `relax` that a counter-offer would meet (each holds all before it), or an offer would whose
    promise is not wholly believed."""
    offers = [each for each in answers if isinstance(each, Offer) and may_delegate(terms.delegation, each.region)]
    for step in terms.relax:
        if any(misses(each, step.require, step.limits, terms) is None for each in offers):
            return step
    return None


def _worst(figures: Iterable[Figures]) -> Figures:
    columns = list(zip(*figures, strict=True)) or [(math.nan,)] * 3
    latency, cost, joules = (max((each for each in column if math.isfinite(each)), default=math.nan)
                             for column in columns)  # fmt: skip
    return latency, cost, joules


def _filled(figures: Figures, worst: Figures) -> Figures:
    latency, cost, joules = (each if math.isfinite(each) else most for each, most in zip(figures, worst, strict=True))
    return latency, cost, joules


def _unknown_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _tie(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _show_carbon(value: float) -> str:
    return f"{value:.3g} gCO2/h"
