"""What a plan says of other regions: who runs a workload now, or what they would offer for it; nothing is held."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.catalog import Catalog
from shoal.coordinator.controllers.trades import Indicative, TradesController
from shoal.coordinator.core.negotiation.choice import Judged, own_figures
from shoal.coordinator.core.negotiation.model import Resting
from shoal.coordinator.core.placement.model import WorkloadPlan
from shoal.types.agreement import GUESTS
from shoal.types.codes import Code, Refusal
from shoal.types.workload import DelegationMode, Intent, WorkloadKey

NOT_JOINED: Final = Refusal(
    Code.FEDERATION_UNREACHABLE,
    "this region is in no federation",
    "one whose regions it may trade with",
    "join one: shoal federation join",
)


ASKED_MOST: Final = 32
"""Workloads of one plan for which bids are asked: those of the highest priority."""


@dataclass(frozen=True, slots=True)
class Bid:
    """judged: with the terms that it was judged by. way_s: there and back; NaN where it was not measured."""

    judged: Judged
    way_s: float
    trust: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """region, agreement: who runs the workload, or is to; empty where nobody else does. bids: best first. winner: who
    would be awarded; empty where home keeps it. relaxed: what had to give for that. refusal: why nobody else runs it.
    """

    mode: DelegationMode
    region: str = ""
    agreement: str = ""
    bids: tuple[Bid, ...] = ()
    winner: str = ""
    relaxed: str = ""
    refusal: Refusal | None = None


async def outlooks(
    trades: TradesController | None, catalog: Catalog, plans: Iterable[WorkloadPlan]
) -> Mapping[WorkloadKey, Outlook]:
    """By workload, for those whose policy delegates. plans: explained, of this catalog. trades: None in a region that
    trades with nobody. Takes as long as the slowest bidder is given."""
    intents = {intent.key: intent for intent in catalog.intents if intent.key.tenant != GUESTS}
    asked = [
        (intents[plan.workload], plan)
        for plan in plans
        if plan.workload in intents and intents[plan.workload].delegation.mode is not DelegationMode.NEVER
    ]
    found = await asyncio.gather(*(_outlook(trades, catalog, intent, plan) for intent, plan in asked[:ASKED_MOST]))
    return {intent.key: outlook for (intent, _), outlook in zip(asked, found, strict=False)}


async def _outlook(trades: TradesController | None, catalog: Catalog, intent: Intent, plan: WorkloadPlan) -> Outlook:
    mode = intent.delegation.mode
    if trades is None or not trades.may_trade:
        return Outlook(mode, refusal=NOT_JOINED)
    state = trades.trades.get(intent.key)
    delegated = trades.delegated.get(intent.key)
    if delegated is not None:
        return Outlook(mode, delegated.region, delegated.agreement)
    last = state.phase.refusal if state is not None and isinstance(state.phase, Resting) else None
    indicative = await trades.indicative(intent, catalog.profiles, own_figures(plan))
    if indicative is None:
        return Outlook(mode, refusal=last)
    choice = indicative.choice
    winner = choice.winner.region if choice.winner is not None else ""
    return Outlook(mode, bids=bids_of(indicative), winner=winner, relaxed=indicative.relaxed, refusal=choice.refusal)


def bids_of(indicative: Indicative) -> tuple[Bid, ...]:
    """Best first."""
    terms = indicative.terms
    return tuple(
        Bid(each, terms.way_s.get(each.answer.region, float("nan")), terms.trust.get(each.answer.region, 1.0))
        for each in indicative.choice.judged
    )
