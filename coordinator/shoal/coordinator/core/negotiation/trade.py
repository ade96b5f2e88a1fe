"""The origin's side of a trade: one state machine per workload, from its need to the end of an agreement.

At most one award per workload is open: awarded, being withdrawn, or an agreement that neither side has ended. An
agreement under notice serves on beside its successor (`leaving`), so that traffic moves before it stops.

Here are its deadlines and what others read of it; its events are in `trade_events`.
"""

import math
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.negotiation.message_rules import duration_that_counts
from shoal.coordinator.core.negotiation.model import (
    Active,
    Awarding,
    DelegationNeed,
    IdleTrade,
    LeavingAgreement,
    LeavingStage,
    OriginAgreement,
    SendAward,
    SendNotice,
    SendRenewal,
    Soliciting,
    TradeEffect,
    TradeEvent,
    TradeNote,
    TradePhase,
    TradeStep,
    Withdrawing,
    WorkloadTrade,
)
from shoal.coordinator.core.negotiation.trade_events import (
    step_event,
)
from shoal.coordinator.core.negotiation.trade_times import (
    ANSWER_S,
    AWARD_EXPIRY_S,
    CALL_S,
    CONFIRM_S,
    LEASE_MOST_S,
    LOCAL_STABLE_S,
    NOTICE_S,
    SEQUENCE_STEP,
    SHORT_S,
    SILENT_S,
    START_S,
)
from shoal.coordinator.core.negotiation.trade_transitions import (
    breach,
    end_note,
    end_round,
    make_digest,
    new_release,
    with_pause,
    withdraw,
)
from shoal.types.agreement import Notice, ServiceState
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Offer
from shoal.types.units import (
    Elapsed,
    Seconds,
    UsdPerHour,
    show_seconds,
)

_ANY: Final = Elapsed(0.0)


def step(
    trade: WorkloadTrade, event: TradeEvent, now: Elapsed, fresh: str, *, origin: str, term_s: Seconds
) -> TradeStep:
    """Advances one workload's trade: deadlines, the event, then deadlines again.

    fresh: a name never used before ([a-z0-9-], at most 40 characters). origin: this region. term_s: the term to ask
    for.
    """
    done = _apply_deadlines(trade, now, fresh, origin)
    done = done.plus(step_event(done.trade, event, now, fresh, origin, term_s))
    return done.plus(_apply_deadlines(done.trade, now, fresh, origin))


def restore(trade: WorkloadTrade, now: Elapsed) -> WorkloadTrade:
    """The trade that an earlier process left. The length of the outage is unknown, so solicited bids and awards are not
    relied on, and agreements have to be confirmed."""

    def unconfirm(agreement: OriginAgreement) -> OriginAgreement:
        lease_s = duration_that_counts(agreement.lease_s, LEASE_MOST_S)  # an older version stored any that was said
        return replace(
            agreement,
            lease_s=lease_s,
            lease_until=Elapsed(now + CONFIRM_S),
            over_at=Elapsed(now + lease_s),
            sequence=(agreement.sequence // SEQUENCE_STEP + 1) * SEQUENCE_STEP,
            nonce="",
            asked_at=now,
            heard_at=now,
            renew_at=now,
            since=now,
        )

    phase: TradePhase
    match trade.phase:
        case IdleTrade():
            phase = trade.phase
        case Soliciting():
            phase = IdleTrade(now)
        case Awarding(offer=offer, award=award, awarded_at=awarded_at):
            until = Elapsed(now + AWARD_EXPIRY_S)
            phase = Withdrawing(offer, award.agreement, until, now, Code.PEER_UNREACHABLE, awarded_at)
        case Withdrawing():
            phase = replace(trade.phase, until=Elapsed(now + AWARD_EXPIRY_S), retry_at=now)
        case Active():
            active = trade.phase
            phase = replace(active, agreement=unconfirm(active.agreement), home_since=None)
    leaving = tuple(
        replace(
            each,
            agreement=unconfirm(each.agreement),
            ends_at=each.ends_at if each.ends_at >= now else now,  # over, also where a notice was of NaN
            next_at=now,
        )
        for each in trade.leaving
    )
    return replace(trade, phase=phase, leaving=leaving)


def durable(trade: WorkloadTrade) -> WorkloadTrade:
    """The trade without the values that `restore` does not rely on. If this is unchanged, nothing has to be stored."""

    def without_times(agreement: OriginAgreement) -> OriginAgreement:
        return replace(
            agreement,
            lease_until=_ANY,
            over_at=_ANY,
            sequence=agreement.sequence // SEQUENCE_STEP,
            nonce="",
            asked_at=_ANY,
            heard_at=_ANY,
            renew_at=_ANY,
            since=_ANY,
            joules=None,
        )

    phase = trade.phase
    match phase:
        case IdleTrade() | Soliciting():
            pass
        case Awarding() | Withdrawing():
            phase = replace(phase, retry_at=_ANY)
        case Active():
            phase = replace(phase, agreement=without_times(phase.agreement), home_since=None)
    leaving = tuple(
        replace(each, agreement=without_times(each.agreement), told=False, next_at=_ANY) for each in trade.leaving
    )
    idle = trade.is_over and not trade.tries
    return replace(trade, phase=phase, leaving=leaving, asked="" if idle else trade.asked, said="")


def wake_at(trade: WorkloadTrade, need: DelegationNeed) -> Elapsed:
    """When time alone changes something while the need stays the same; inf: never."""
    times = [time for each in trade.leaving for time in _leaving_times(each)]
    phase = trade.phase
    match phase:
        case IdleTrade(until=until):
            times += [until] if need in (DelegationNeed.SHORT, DelegationNeed.MOVED) else []
            times += [max(until, trade.better_at)] if need is DelegationNeed.BETTER else []
        case Soliciting(until=until):
            times.append(until)
        case Awarding(until=until, retry_at=retry_at) | Withdrawing(until=until, retry_at=retry_at):
            times += [until, retry_at]
        case Active(agreement=agreement):
            times += [agreement.renew_at, agreement.over_at, phase.term_at]
            times += [trade.better_at] if need is DelegationNeed.BETTER else []
            if agreement.service is ServiceState.STARTING:
                times.append(Elapsed(agreement.since + _start_most_s(agreement.offer)))
            if agreement.service is ServiceState.SHORT:
                times.append(Elapsed(agreement.since + SHORT_S))
            if need is DelegationNeed.CONTENT and phase.home_since is not None:
                times.append(Elapsed(phase.home_since + LOCAL_STABLE_S))
    return min(times, default=Elapsed(math.inf))


def _leaving_times(each: LeavingAgreement) -> tuple[Elapsed, ...]:
    serving = (each.agreement.renew_at, each.agreement.over_at) if each.stage is LeavingStage.SERVING else ()
    told = () if each.told and each.stage is not LeavingStage.SETTLING else (each.next_at,)
    return (each.ends_at, *serving, *told)


def is_relied_on(trade: WorkloadTrade, now: Elapsed) -> bool:
    """True if no local replica is wanted: another region runs it or is to, and answers."""
    agreement = trade.active_agreement
    return agreement is not None and now - agreement.heard_at < SILENT_S


def serving_agreements(trade: WorkloadTrade, now: Elapsed) -> tuple[OriginAgreement, ...]:
    """Agreements whose delegates may receive requests now, the lasting one first."""
    ending = {each.agreement.id for each in trade.leaving if each.stage is not LeavingStage.SERVING}
    return tuple(
        agreement
        for agreement in trade.agreements
        if agreement.id not in ending and agreement.is_serving and now < agreement.lease_until
    )


def agreement_of(trade: WorkloadTrade, agreement: str) -> OriginAgreement | None:
    """The agreement of this id, if it is not over."""
    return next((each for each in trade.agreements if each.id == agreement), None)


def offer_of(trade: WorkloadTrade, agreement: str) -> Offer | None:
    """The offer behind an agreement that is awarded and not over."""
    if isinstance(trade.phase, Awarding) and trade.phase.award.agreement == agreement:
        return trade.phase.offer
    found = agreement_of(trade, agreement)
    return found.offer if found is not None else None


def is_awarded(trade: WorkloadTrade) -> bool:
    """True from an award until it and every agreement are over, also while the outcome of the award is unknown."""
    return bool(_awarded_offers(trade))


def price_of(trade: WorkloadTrade) -> UsdPerHour | None:
    """USD/h of what is awarded. Of an agreement and its successor the dearer one counts. None: an offer named no price,
    or nothing is awarded."""
    prices = [offer.cost for offer in _awarded_offers(trade)]
    return max(prices, default=None) if all(math.isfinite(price) for price in prices) else None


def _awarded_offers(trade: WorkloadTrade) -> tuple[Offer, ...]:
    phase = trade.phase
    pending = (phase.offer,) if isinstance(phase, Awarding | Withdrawing) else ()
    return (*pending, *(agreement.offer for agreement in trade.agreements))


def live_agreements(trade: WorkloadTrade) -> tuple[OriginAgreement, ...]:
    """Agreements under which requests may still be in flight."""
    agreement = trade.active_agreement
    leaving = [each.agreement for each in trade.leaving if each.code is not Code.BREACHED or each.agreement.is_serving]
    return (*(() if agreement is None else (agreement,)), *leaving)


def _start_most_s(offer: Offer) -> float:
    """How long a delegate may take until it serves. A load time may be NaN, where it is unknown."""
    return START_S + 3 * (offer.load_s if offer.load_s > 0 else 0.0)


# -- time ------------------------------------------------------------------------------------------------------------


def _apply_deadlines(trade: WorkloadTrade, now: Elapsed, fresh: str, origin: str) -> TradeStep:
    """Everything that is due by time alone."""
    match trade.phase:
        case IdleTrade():
            done = TradeStep(trade)
        case Soliciting() as phase:
            done = _apply_deadlines_soliciting(trade, phase, now)
        case Awarding() as phase:
            done = _apply_deadlines_awarding(trade, phase, now, origin)
        case Withdrawing() as phase:
            done = _apply_deadlines_withdrawing(trade, phase, now, origin)
        case Active() as phase:
            done = _apply_deadlines_active(trade, phase, now, fresh)
    kept = list[LeavingAgreement]()
    for each in done.trade.leaving:
        left, effects, notes = _apply_deadlines_leaving(each, now, fresh, origin)
        done = TradeStep(done.trade, (*done.effects, *effects), (*done.notes, *notes))
        kept += [left] if left is not None else []
    return replace(done, trade=replace(done.trade, leaving=tuple(kept)))


def _apply_deadlines_soliciting(trade: WorkloadTrade, phase: Soliciting, now: Elapsed) -> TradeStep:
    if now < phase.until:
        return TradeStep(trade)
    refusal = Refusal(Code.NO_BID, "no region answered in time", f"answers within {show_seconds(ANSWER_S)}")
    return end_round(trade, phase, now, refusal, "nobody")


def _apply_deadlines_awarding(trade: WorkloadTrade, phase: Awarding, now: Elapsed, origin: str) -> TradeStep:
    if now >= phase.until:
        return withdraw(trade, phase, now, origin, Code.HOLD_EXPIRED)
    if now < phase.retry_at:
        return TradeStep(trade)
    again = replace(trade, phase=replace(phase, retry_at=Elapsed(now + CALL_S)))
    return TradeStep(again, (SendAward(phase.offer.region, phase.award),))


def _apply_deadlines_withdrawing(trade: WorkloadTrade, phase: Withdrawing, now: Elapsed, origin: str) -> TradeStep:
    if now >= phase.until:
        expired = TradeNote("expired", phase.agreement, phase.offer.region, phase.code)
        return TradeStep(with_pause(trade, now, Refusal(phase.code)), (), (expired,))
    if now < phase.retry_at:
        return TradeStep(trade)
    again = replace(trade, phase=replace(phase, retry_at=Elapsed(now + CALL_S)))
    return TradeStep(again, (new_release(phase.offer, origin),))


def _apply_deadlines_active(trade: WorkloadTrade, phase: Active, now: Elapsed, fresh: str) -> TradeStep:
    agreement = phase.agreement
    if now >= agreement.over_at:
        return breach(
            trade, agreement, now, f"not renewed for {show_seconds(now - agreement.asked_at)}", stays=Seconds(0.0)
        )
    if agreement.service is ServiceState.STARTING and now - agreement.since >= _start_most_s(agreement.offer):
        return breach(
            trade, agreement, now, f"does not serve after {show_seconds(now - agreement.since)}", stays=Seconds(0.0)
        )
    if agreement.service is ServiceState.SHORT and now - agreement.since >= SHORT_S:
        return breach(trade, agreement, now, f"serves short for {show_seconds(now - agreement.since)}", stays=NOTICE_S)
    if now >= agreement.renew_at:
        agreement, effect = _next_renewal(agreement, now, fresh)
        return TradeStep(replace(trade, phase=replace(phase, agreement=agreement)), (effect,))
    return TradeStep(trade)


def _apply_deadlines_leaving(
    each: LeavingAgreement, now: Elapsed, fresh: str, origin: str
) -> tuple[LeavingAgreement | None, tuple[TradeEffect, ...], tuple[TradeNote, ...]]:
    agreement = each.agreement
    if now >= each.ends_at or (each.stage is LeavingStage.SERVING and now >= agreement.over_at):
        return None, (), (end_note(each),)
    if each.stage is LeavingStage.SETTLING and now >= each.next_at:
        each = replace(each, stage=LeavingStage.ENDING, told=False, next_at=now)
    effects: tuple[TradeEffect, ...] = ()
    if each.stage is not LeavingStage.SETTLING and not each.told and now >= each.next_at:
        ends_s = Seconds(each.ends_at - now if each.stage is LeavingStage.SERVING else 0.0)
        notice = Notice(agreement.id, origin, each.code, ends_s)
        effects, each = (SendNotice(agreement.region, notice),), replace(each, next_at=Elapsed(now + CALL_S))
    if each.stage is LeavingStage.SERVING and now >= agreement.renew_at:
        agreement, renewal = _next_renewal(agreement, now, fresh)
        effects, each = (*effects, renewal), replace(each, agreement=agreement)
    return each, effects, ()


def _next_renewal(agreement: OriginAgreement, now: Elapsed, fresh: str) -> tuple[OriginAgreement, SendRenewal]:
    nonce = make_digest(fresh, agreement.id, str(agreement.sequence + 1))
    again_at = Elapsed(now + min(CALL_S, agreement.lease_s / 2))
    after = replace(agreement, sequence=agreement.sequence + 1, nonce=nonce, asked_at=now, renew_at=again_at)
    return after, SendRenewal(agreement.region, agreement.id, after.sequence, nonce)
