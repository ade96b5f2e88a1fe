"""The delegation part of a plan: which region runs a workload now, or what other regions would offer for it. Nothing is
held.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.federation.origin import OriginController
from shoal.coordinator.controllers.federation.solicit import IndicativeResult
from shoal.coordinator.core.catalog.model import Catalog
from shoal.coordinator.core.negotiation.model import IdleTrade
from shoal.coordinator.core.negotiation.offer_selection import RankedAnswer, own_values
from shoal.coordinator.core.placement.model import WorkloadPlan
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Decline
from shoal.types.workload import DelegationMode, Intent, WorkloadKey

NOT_JOINED: Final = Refusal(
    Code.FEDERATION_UNREACHABLE,
    "this region is in no federation",
    "one whose regions it may trade with",
    "join one: shoal federation join",
)


PREVIEWS_MOST: Final = 32
"""Workloads of one plan for which bids are requested: those of the highest priority."""


@dataclass(frozen=True, slots=True)
class IndicativeBid:
    """An indicative bid, with the RTT and trust that it was ranked by."""

    # The answer, with the figures and the refusal that it was ranked by.
    assessment: RankedAnswer
    # RTT to the bidder's region; NaN if not measured.
    rtt_s: float
    # Trust in the bidder's region; 1 if unknown.
    trust: float


@dataclass(frozen=True, slots=True)
class DelegationPreview:
    """How a plan would delegate one workload."""

    # The policy's delegation mode.
    mode: DelegationMode
    # Region that runs the workload now; empty if none does.
    region: str = ""
    # The agreement with that region; empty if none.
    agreement: str = ""
    # Indicative bids, best first; empty if nobody was asked.
    bids: tuple[IndicativeBid, ...] = ()
    # Region that would be awarded; empty where the workload stays here.
    winner: str = ""
    # Which bound was relaxed for these bids; empty: none.
    relaxation: str = ""
    # Why no other region runs it; None where one does or would.
    refusal: Refusal | None = None


async def delegation_previews(
    trades: OriginController | None, catalog: Catalog, plans: Iterable[WorkloadPlan]
) -> Mapping[WorkloadKey, DelegationPreview]:
    """Previews by workload, for those whose policy delegates. plans: explained plans of this catalog. trades: None in a
    region that trades with nobody. Takes as long as the slowest bidder may take.
    """
    intents = {intent.key: intent for intent in catalog.intents if intent.key.tenant != GUEST_TENANT}
    asked = [
        (intents[plan.workload], plan)
        for plan in plans
        if plan.workload in intents and intents[plan.workload].delegation.mode is not DelegationMode.NEVER
    ]
    found = await asyncio.gather(*(_preview(trades, catalog, intent, plan) for intent, plan in asked[:PREVIEWS_MOST]))
    return {intent.key: outlook for (intent, _), outlook in zip(asked, found, strict=False)}


async def _preview(
    trades: OriginController | None, catalog: Catalog, intent: Intent, plan: WorkloadPlan
) -> DelegationPreview:
    mode = intent.delegation.mode
    if trades is None or not trades.may_trade:
        return DelegationPreview(mode, refusal=NOT_JOINED)
    state = trades.trades.get(intent.key)
    delegated = trades.delegations.get(intent.key)
    if delegated is not None:
        return DelegationPreview(mode, delegated.region, delegated.agreement)
    last = state.phase.refusal if state is not None and isinstance(state.phase, IdleTrade) else None
    indicative = await trades.preview_offers(intent, catalog.profiles, own_values(plan))
    if indicative is None:
        return DelegationPreview(mode, refusal=last)
    choice = indicative.selection
    winner = choice.winner.region if choice.winner is not None else ""
    return DelegationPreview(
        mode, bids=indicative_bids(indicative), winner=winner, relaxation=indicative.relaxation, refusal=choice.refusal
    )


def indicative_bids(indicative: IndicativeResult) -> tuple[IndicativeBid, ...]:
    """All ranked bids, best first; then the regions from which nothing came, as if they had declined."""
    terms = indicative.terms
    silent = [
        RankedAnswer(Decline("", 0, region, refusal), None, math.nan, refusal)
        for region, refusal in indicative.unheard.items()
    ]
    return tuple(
        IndicativeBid(each, terms.rtt_s.get(each.answer.region, math.nan), terms.trust.get(each.answer.region, 1.0))
        for each in (*indicative.selection.ranked, *silent)
    )
