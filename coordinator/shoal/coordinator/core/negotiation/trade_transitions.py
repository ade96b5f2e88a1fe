"""Transitions of a trade that several phases share, and what they send and note."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace

from shoal.coordinator.core.negotiation.model import (
    Active,
    Awarding,
    DelegationNeed,
    IdleTrade,
    LeavingAgreement,
    LeavingStage,
    OriginAgreement,
    RecordDelivery,
    RegionAnswer,
    SendRelease,
    Soliciting,
    TradeNote,
    TradeStep,
    Withdrawing,
    WorkloadTrade,
)
from shoal.coordinator.core.negotiation.offer_selection import (
    DelegationTerms,
)
from shoal.coordinator.core.negotiation.trade_times import (
    ALLOWANCE_S,
    AWARD_EXPIRY_S,
    BACKOFF_LEAST_S,
    BACKOFF_MOST_S,
    BACKOFF_SPREAD,
    CALL_S,
    COOLDOWN_S,
    LEASE_MOST_S,
    NOTICE_S,
    RENEW_S,
    RETRY_S,
)
from shoal.types import stable_hash
from shoal.types.agreement import Release
from shoal.types.backoff import delay
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Answer, Decline, Offer
from shoal.types.units import (
    Elapsed,
    Seconds,
    show_joules,
    show_seconds,
    show_usd_per_hour,
)


def leave(trade: WorkloadTrade, agreement: OriginAgreement, now: Elapsed, code: Code, why: str) -> TradeStep:
    """Ends an agreement in good order: notice first, then make before break."""
    leaving = LeavingAgreement(agreement, LeavingStage.SERVING, code, False, Elapsed(now + NOTICE_S), now)
    after = replace(trade, phase=IdleTrade(now), leaving=(*trade.leaving, leaving))
    return TradeStep(
        after,
        (record_delivery(agreement, breached=False),),
        (TradeNote("noticed", agreement.id, agreement.region, code, why),),
    )


def begin_return(trade: WorkloadTrade, phase: Active, now: Elapsed, code: Code, why: str, *, live: bool) -> TradeStep:
    """live: a live move does it, and ends the agreement once the local replicas have proved as good."""
    if not live:
        return leave(trade, phase.agreement, now, code, why)
    return TradeStep(replace(trade, phase=replace(phase, returns=phase.returns or why)))


def breach(
    trade: WorkloadTrade, agreement: OriginAgreement, now: Elapsed, why: str, *, stays: Seconds | None
) -> TradeStep:
    """stays: how long it may serve on until something else does; None: the delegate has ended it already."""
    leaving = trade.leaving
    if stays is not None:
        stage = LeavingStage.SERVING if stays > 0 else LeavingStage.ENDING
        ends_at = Elapsed(now + (stays or LEASE_MOST_S + ALLOWANCE_S))
        leaving = (*leaving, LeavingAgreement(agreement, stage, Code.BREACHED, False, ends_at, now))
    after = replace(trade, phase=IdleTrade(now, Refusal(Code.BREACHED, why)), leaving=leaving)
    return TradeStep(
        after,
        (record_delivery(agreement, breached=True),),
        (TradeNote("breached", agreement.id, agreement.region, Code.BREACHED, why),),
    )


def withdraw(trade: WorkloadTrade, phase: Awarding, now: Elapsed, origin: str, code: Code) -> TradeStep:
    longest = Elapsed(now + AWARD_EXPIRY_S)
    after = Withdrawing(phase.offer, phase.award.agreement, longest, Elapsed(now + CALL_S), code, phase.awarded_at)
    return TradeStep(replace(trade, phase=after), (new_release(phase.offer, origin),))


def end_round(
    trade: WorkloadTrade,
    phase: Soliciting,
    now: Elapsed,
    refusal: Refusal,
    said: str,
    notes: tuple[TradeNote, ...] = (),
    answers: tuple[RegionAnswer, ...] = (),
) -> TradeStep:
    """A failed attempt at mere improvement has its cooldown but no pause, because the workload may become short."""
    better = phase.need is DelegationNeed.BETTER
    after = replace(trade, phase=IdleTrade(now, refusal)) if better else with_pause(trade, now, refusal)
    no_bid = TradeNote("no_bid", phase.solicitation, "", refusal.code, str(refusal))
    return TradeStep(replace(after, said=said, answers=answers), (), () if said == trade.said else (*notes, no_bid))


def with_pause(trade: WorkloadTrade, now: Elapsed, refusal: Refusal) -> WorkloadTrade:
    longest = 1.0 + BACKOFF_SPREAD
    pause_s = delay(
        str(trade.workload),
        trade.tries,
        base_s=BACKOFF_LEAST_S * longest,
        cap_s=BACKOFF_MOST_S * longest,
        jitter=2 * BACKOFF_SPREAD / longest,
    )
    return replace(trade, phase=IdleTrade(Elapsed(now + pause_s), refusal), tries=trade.tries + 1)


def leaving_agreement(trade: WorkloadTrade, agreement: str) -> LeavingAgreement | None:
    return next((each for each in trade.leaving if each.agreement.id == agreement), None)


def with_leaving_agreement(trade: WorkloadTrade, agreement: OriginAgreement) -> WorkloadTrade:
    leaving = tuple(
        replace(each, agreement=agreement) if each.agreement.id == agreement.id else each for each in trade.leaving
    )
    return replace(trade, leaving=leaving)


def held_offers(answers: Iterable[Answer]) -> list[Offer]:
    """Offers among the answers whose bidder holds room for them."""
    return [each for each in answers if isinstance(each, Offer) and each.hold_s > 0]


def is_taken(trade: WorkloadTrade, offer: Offer) -> bool:
    """True if the offer belongs to a bid that was awarded: the answer is a repeat."""
    match trade.phase:
        case Awarding(offer=mine) | Withdrawing(offer=mine):
            taken = mine.id == offer.id
        case Active(agreement=agreement):
            taken = agreement.offer.id == offer.id
        case IdleTrade() | Soliciting():
            taken = False
    return taken or any(each.agreement.offer.id == offer.id for each in trade.leaving)


def with_relaxation(terms: DelegationTerms, phase: Soliciting) -> DelegationTerms:
    """In round 2, the relaxation that was asked for replaces the policy's own values."""
    setting = next((each for each in terms.relax if phase.relaxed and each.change == phase.relaxed), None)
    return terms if setting is None else replace(terms, require=setting.require, limits=setting.limits)


def for_single_region(terms: DelegationTerms, to: str) -> DelegationTerms:
    """Terms of a workload that is sent to one region: neither the local placement nor other regions compete."""
    return replace(terms, own=None, delegation=replace(terms.delegation, to=(to,)))


def new_release(offer: Offer, origin: str) -> SendRelease:
    return SendRelease(offer.region, Release(offer.solicitation, offer.id, origin))


def record_delivery(agreement: OriginAgreement, *, breached: bool) -> RecordDelivery:
    return RecordDelivery(agreement.region, agreement.id, agreement.offer.latency_p95_s, breached)


def end_note(each: LeavingAgreement) -> TradeNote:
    return TradeNote("ended", each.agreement.id, each.agreement.region, each.code)


def answer_note(phase: Soliciting, answer: Answer, refusal: Refusal | None) -> TradeNote:
    why = f"  {refusal}" if refusal is not None else ""
    if isinstance(answer, Decline):
        return TradeNote(
            "declined", phase.solicitation, answer.region, answer.refusal.code, f"round {phase.round}{why}"
        )
    what = "countered" if answer.is_counter else "bid"
    return TradeNote(
        what,
        phase.solicitation,
        answer.region,
        refusal.code if refusal else "",
        f"round {phase.round}: {describe_offer(answer)}{why}",
    )


def describe_offer(offer: Offer) -> str:
    """An offer's terms in words."""
    figures = [f"p95 {show_seconds(offer.latency_p95_s)}", f"{offer.replicas} x {offer.precision}"]
    figures += [show_usd_per_hour(offer.cost)] if math.isfinite(offer.cost) else []
    figures += [show_joules(offer.joules)] if math.isfinite(offer.joules) else []
    figures += [f"needs {change}" for change in offer.changes]
    return ", ".join(figures)


def sooner(time: Elapsed, now: Elapsed) -> Elapsed:
    return Elapsed(min(time, now + RETRY_S))


def cooldown_end(trade: WorkloadTrade, now: Elapsed, fresh: str) -> Elapsed:
    return Elapsed(now + COOLDOWN_S * (1 + stable_hash.fraction(str(trade.workload), fresh) / 4))


def renewal_pause_s(lease_s: Seconds) -> Seconds:
    return Seconds(min(RENEW_S, lease_s / 3))


def make_digest(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:20]
