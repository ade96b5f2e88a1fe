"""Solicitations: what this region asks others to bid for, how it reaches them, and which answers count."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator import metrics
from shoal.coordinator.controllers.federation.access import FEDERATION_S, FederationAccess
from shoal.coordinator.controllers.federation.intents import IntentIndex
from shoal.coordinator.controllers.federation.local_region import LocalRegion
from shoal.coordinator.controllers.federation.reputation import ReputationRepository
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.core.federation.shortlist import silence_reasons
from shoal.coordinator.core.negotiation import trade_times
from shoal.coordinator.core.negotiation.model import Solicit
from shoal.coordinator.core.negotiation.offer_selection import DelegationTerms, OfferSelection, choose, terms_for
from shoal.coordinator.core.negotiation.trust import matches_any
from shoal.coordinator.core.placement.model import without_standby
from shoal.coordinator.core.placement.rank import TermValues
from shoal.coordinator.core.workloads.schedule import demand_of
from shoal.coordinator.ports import VerifiedMessage
from shoal.types.codes import Refusal, ShoalError
from shoal.types.offer import Answer, Offer, Solicitation
from shoal.types.profile import ModelProfile
from shoal.types.workload import DelegationMode, Intent, Relaxation, WorkloadKey

DIRECT_ASKS_MOST: Final = 16
"""Regions solicited directly at most, while the federation is unreachable."""


@dataclass(frozen=True, slots=True)
class IndicativeResult:
    """The selection among indicative offers, and the terms that it was made by."""

    # All answers ranked, and the winner.
    selection: OfferSelection
    # What the answers were ranked by.
    terms: DelegationTerms
    # In the second round, which bound was relaxed; empty in the first.
    relaxation: str
    # By region that the policy would delegate to, why nothing came from it.
    unheard: Mapping[str, Refusal]


class Solicitor:
    """Asks for bids, binding and indicative."""

    def __init__(
        self,
        context: ControllerContext,
        access: FederationAccess,
        local_region: LocalRegion,
        intents: IntentIndex,
        reputation: ReputationRepository,
    ) -> None:
        self._region = context.name
        self._ids = context.ids
        self._meter = context.meter
        self._access = access
        self._local_region = local_region
        self._intents = intents
        self._reputation = reputation

    async def preview_offers(
        self, intent: Intent, profiles: Mapping[str, ModelProfile], own: TermValues | None
    ) -> IndicativeResult:
        """What others would offer for a proposed workload, in both rounds; nothing is held."""
        name, terms = self._ids.name("t"), self._terms(intent, own)
        asked = self._solicitation(intent, profiles, name, 1, None, indicative=True)
        choice = await self._choose_indicative(asked, terms)
        step = choice.relaxation
        if step is not None:
            terms = replace(terms, require=step.require, limits=step.limits)
            asked = self._solicitation(intent, profiles, name, 2, step, indicative=True)
            choice = await self._choose_indicative(asked, terms)
        answered = {each.answer.region for each in choice.ranked}
        silent = silence_reasons(asked, self._access.members, answered)
        return IndicativeResult(choice, terms, step.change if step is not None else "", silent)

    async def ask_round(
        self, key: WorkloadKey, effect: Solicit
    ) -> tuple[tuple[VerifiedMessage[Answer], ...], Mapping[str, Refusal]]:
        """The answers to one round, and why nothing came from other regions, by name; both empty where the documents
        have changed since it was decided."""
        intent = self._intents.get(key)
        if intent is None or self._intents.request_hash(intent) != effect.request_hash:
            return (), {}
        profiles = self._local_region.profiles()
        asked = self._solicitation(intent, profiles, effect.solicitation, effect.round, effect.relaxation)
        asked = replace(asked, to=(effect.to,)) if effect.to else asked
        heard = await self._ask(asked)
        return heard, silence_reasons(asked, self._access.members, {each.signer for each in heard})

    async def compare(
        self, key: WorkloadKey, *, with_other_regions: bool
    ) -> tuple[DelegationTerms, Offer | None] | None:
        """The terms now, and with other regions the best of their indicative offers. None where the workload must not
        be delegated.
        """
        intent, terms = self._intents.get(key), self.terms_of(key)
        if intent is None or terms is None:
            return None
        if not with_other_regions:
            return terms, None
        profiles = self._local_region.profiles()
        asked = self._solicitation(intent, profiles, self._ids.name("t"), 1, None, indicative=True)
        return terms, (await self._choose_indicative(asked, replace(terms, own=None))).winner

    def terms_of(self, key: WorkloadKey) -> DelegationTerms | None:
        """The terms to rank offers by now; None where the workload must not be delegated."""
        intent = self._intents.get(key)
        if intent is None or intent.delegation.mode is DelegationMode.NEVER:
            return None
        return self._terms(intent, self._local_region.figures(key))

    def _terms(self, intent: Intent, own: TermValues | None) -> DelegationTerms:
        exclusions, budget = self._local_region.exclusions(intent.key), self._local_region.budget_left(intent.key)
        return terms_for(intent, own, self._access.rtt(), self._reputation.trust, exclusions, budget)

    async def _choose_indicative(self, asked: Solicitation, terms: DelegationTerms) -> OfferSelection:
        return choose([each.content for each in await self._ask(asked)], terms, indicative=True)

    def _solicitation(
        self,
        intent: Intent,
        profiles: Mapping[str, ModelProfile],
        name: str,
        number: int,
        step: Relaxation | None,
        *,
        indicative: bool = False,
    ) -> Solicitation:
        """The solicitation for one round. It asks for no standby: the standby stays in this region, where it does not
        fail together with the other region.
        """
        return Solicitation(
            id=name,
            round=number,
            origin=self._region,
            workload=intent.key,
            models=tuple(profiles[model.digest] for model in intent.models if model.digest in profiles),
            require=without_standby(step.require if step is not None else intent.require),
            limits=step.limits if step is not None else intent.limits,
            weights=intent.weights,
            traffic=demand_of(intent.traffic),
            max_batch=intent.max_batch,
            batch_delay_s=intent.batch_delay_s,
            batch_padding=intent.batch_padding,
            term_s=intent.delegation.term_s,
            answer_s=trade_times.ANSWER_S,
            indicative=indicative,
            to=intent.delegation.to,
            way_s=dict(self._access.rtt()),
        )

    async def _ask(self, asked: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        """Asks through the federation; if that is unreachable, asks each known region directly."""
        heard: tuple[VerifiedMessage[Answer], ...] | None = None
        if self._access.federation is not None:
            try:
                async with asyncio.timeout(FEDERATION_S):
                    heard = await self._access.federation.solicit(asked)
            except (TimeoutError, ShoalError):
                self._meter.count(metrics.SOLICITATIONS_DIRECT)
        if heard is None:
            heard = await self._ask_directly(asked)
        return tuple(each for each in heard if self._is_valid_answer(each, asked))

    async def _ask_directly(self, asked: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        rtt = self._access.rtt()
        regions = [
            each.region
            for each in sorted(self._access.members, key=lambda each: (rtt.get(each.region, math.inf), each.region))
            if each.region != self._region and matches_any(asked.to, each.region)
        ]

        async def ask(region: str) -> VerifiedMessage[Answer] | None:
            try:
                async with asyncio.timeout(asked.answer_s):
                    return await self._access.peers.request_bid(region, asked)
            except (TimeoutError, ShoalError):
                return None

        found = await asyncio.gather(*(ask(region) for region in regions[:DIRECT_ASKS_MOST]))
        return tuple(each for each in found if each is not None)

    def _is_valid_answer(self, heard: VerifiedMessage[Answer], asked: Solicitation) -> bool:
        """Whether the answer is by its signer and to this solicitation. Others are left out and counted."""
        answer = heard.content
        fits = (answer.region, answer.solicitation, answer.round) == (heard.signer, asked.id, asked.round)
        if fits and isinstance(answer, Offer):
            models = {model.digest for model in asked.models}
            fits = answer.origin == self._region and answer.model in models and answer.region != self._region
        if not fits:
            self._meter.count(metrics.ANSWERS_INVALID)
        return fits
