"""Calls to other regions that a trade's step asks for. Each is a task of its own, whose outcome returns as an event."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, TypeVar

from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.ledger import Ledger
from shoal.coordinator.controllers.federation.local_region import LocalRegion
from shoal.coordinator.controllers.federation.observations import ServiceObservations
from shoal.coordinator.controllers.federation.solicit import Solicitor
from shoal.coordinator.core.negotiation import trade, trade_times
from shoal.coordinator.core.negotiation.model import (
    AwardFailed,
    AwardGranted,
    Awarding,
    Compare,
    ComparisonDone,
    NoticeConfirmed,
    NoticeFailed,
    RecordDelivery,
    ReleaseConfirmed,
    ReleaseFailed,
    RenewalConfirmed,
    RenewalFailed,
    RoundAnswered,
    SendAward,
    SendNotice,
    SendRelease,
    SendRenewal,
    Solicit,
    TradeEffect,
    TradeEvent,
    WorkloadTrade,
)
from shoal.coordinator.ports import Clock, VerifiedMessage
from shoal.types.agreement import Award, Renewal
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.workload import WorkloadKey

T = TypeVar("T")

OUTCOME_UNKNOWN: Final = Refusal(Code.PEER_UNREACHABLE)
UNCERTAIN_CODES: Final = frozenset((Code.PEER_UNREACHABLE, Code.REGION_UNKNOWN))
"""A region that is no longer listed may come back, and what it did before still holds."""
ENDED_CODES: Final = frozenset(
    (
        Code.BID_UNKNOWN,
        Code.HOLD_EXPIRED,
        Code.HOLD_RELEASED,
        Code.AGREEMENT_UNKNOWN,
        Code.AGREEMENT_ENDED,
    )
)


class TradeCalls:
    """Performs the effects of trades that are committed."""

    def __init__(
        self,
        access: FederationAccess,
        ledger: Ledger,
        local_region: LocalRegion,
        solicitor: Solicitor,
        observations: ServiceObservations,
        *,
        clock: Clock,
        trade_of: Callable[[WorkloadKey], WorkloadTrade],
        on_outcome: Callable[[WorkloadKey, TradeEvent], Awaitable[None]],
    ) -> None:
        """trade_of: a workload's trade now. on_outcome: handles the event that is the outcome of a call."""
        self.tasks = set[asyncio.Task[None]]()
        """Calls in progress."""
        self._peers = access.peers
        self._ledger = ledger
        self._local_region = local_region
        self._solicitor = solicitor
        self._observations = observations
        self._clock = clock
        self._trade_of = trade_of
        self._on_outcome = on_outcome
        self._awards: dict[str, Award] = {}
        """Awards that have no outcome yet, as they were first sent."""

    def start(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(call)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def stop(self) -> None:
        """Cancels the calls in progress; after the next start their outcomes are requested again."""
        for task in self.tasks:
            task.cancel()

    async def perform(self, key: WorkloadKey, effect: TradeEffect) -> None:
        match effect:
            case Solicit():
                await self._solicit(key, effect)
            case SendAward():
                await self._award(key, effect)
            case SendRelease(region=region, release=release):
                over = await self._has_ended(self._peers.release(region, release))
                await self._on_outcome(key, ReleaseConfirmed(release.bid) if over else ReleaseFailed(release.bid))
            case SendNotice(region=region, notice=notice):
                over, name = await self._has_ended(self._peers.notify(region, notice)), notice.agreement
                await self._on_outcome(key, NoticeConfirmed(name, notice.ends_s) if over else NoticeFailed(name))
            case SendRenewal():
                await self._send_renewal(key, effect)
            case Compare():
                await self._compare(key, effect)
            case RecordDelivery():
                pass  # stored with the trade

    async def _solicit(self, key: WorkloadKey, effect: Solicit) -> None:
        heard, unheard = await self._solicitor.ask_round(key, effect)
        answers = tuple(each.content for each in heard)
        evidence = {each.signer: each.evidence for each in heard}
        terms, wall = self._solicitor.terms_of(key), self._clock.wall()
        answered = RoundAnswered(effect.solicitation, effect.round, answers, terms, evidence, unheard, wall)
        await self._on_outcome(key, answered)

    async def _compare(self, key: WorkloadKey, effect: Compare) -> None:
        found = await self._solicitor.compare(key, with_other_regions=effect.with_other_regions)
        if found is not None:
            terms, best = found
            await self._on_outcome(key, ComparisonDone(effect.agreement, terms, best, self._local_region.moves_live))

    async def _award(self, key: WorkloadKey, effect: SendAward) -> None:
        name = effect.award.agreement
        award = self._awards.setdefault(name, replace(effect.award, gateways=self._local_region.gateways()))
        asked_at = self._clock.now()
        outcome = await self._call(self._peers.award(effect.region, award))
        if isinstance(outcome, VerifiedMessage):
            await self._on_outcome(key, AwardGranted(outcome.content, asked_at, outcome.evidence))
        else:
            await self._on_outcome(key, AwardFailed(name, None if outcome is OUTCOME_UNKNOWN else outcome))
        if not isinstance(self._trade_of(key).phase, Awarding):
            self._awards.pop(name, None)

    async def _send_renewal(self, key: WorkloadKey, effect: SendRenewal) -> None:
        report = self._observations.report(effect.agreement, trade.offer_of(self._trade_of(key), effect.agreement))
        home, head = self._local_region, self._ledger.head
        renewal = Renewal(
            effect.agreement, effect.sequence, effect.nonce, report, home.gateways(), head, home.gateway_revocations()
        )
        outcome = await self._call(self._peers.renew(effect.region, renewal))
        if isinstance(outcome, VerifiedMessage):
            self._ledger.record_head(effect.region, outcome.content.ledger_head)
            await self._on_outcome(key, RenewalConfirmed(outcome.content, outcome.evidence))
        else:
            refusal = None if outcome is OUTCOME_UNKNOWN else outcome
            await self._on_outcome(key, RenewalFailed(effect.agreement, effect.nonce, refusal))

    async def _call(self, call: Coroutine[Any, Any, T]) -> T | Refusal:
        """The other region's answer, or its refusal. OUTCOME_UNKNOWN: the call may have taken effect, or not."""
        try:
            async with asyncio.timeout(trade_times.CALL_S):
                return await call
        except TimeoutError:
            return OUTCOME_UNKNOWN
        except ShoalError as error:
            return OUTCOME_UNKNOWN if error.code in UNCERTAIN_CODES else error.refusal

    async def _has_ended(self, call: Coroutine[Any, Any, None]) -> bool:
        """Whether the other region confirmed the end, or does not know the bid or agreement."""
        outcome = await self._call(call)
        return outcome is None or outcome.code in ENDED_CODES
