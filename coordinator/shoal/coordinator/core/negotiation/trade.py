"""The origin's side of a trade: one state machine per workload, from its need to the end of an agreement.

At most one award per workload is open: awarded, being withdrawn, or an agreement that neither side has ended. An
agreement under notice serves on beside its successor (`leaving`), so that traffic moves before it stops.

Each phase names the events that it waits for; `_step_leaving` has what is the same in all of them.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TypeAlias

from shoal.coordinator.core.negotiation.model import (
    Active,
    AwardFailed,
    AwardGranted,
    Awarding,
    Compare,
    ComparisonDone,
    DelegateNotice,
    DelegationDemand,
    DelegationNeed,
    IdleTrade,
    LeavingAgreement,
    LeavingStage,
    NoticeConfirmed,
    NoticeFailed,
    OriginAgreement,
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
    Soliciting,
    TradeEffect,
    TradeEvent,
    TradeNote,
    TradePhase,
    TradeStep,
    Withdrawing,
    WorkloadTrade,
)
from shoal.coordinator.core.negotiation.offer_selection import (
    DelegationTerms,
    OfferSelection,
    choose,
    gain_of,
    gain_of_local,
)
from shoal.types import stable_hash
from shoal.types.agreement import Award, Grant, Notice, Release, Renewed, ServiceReport, ServiceState
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
from shoal.types.workload import DelegationMode

ANSWER_S: Final = Seconds(1.0)
"""Time that bidders get for an answer."""
ANSWER_GRACE_S: Final = Seconds(3.0)
"""Time after `ANSWER_S` from which on a round without a result counts as unanswered."""
CALL_S: Final = Seconds(2.0)
"""A call to another region is repeated if there was no result for this long."""
RETRY_S: Final = Seconds(0.25)
"""The same, for a call that is known to have failed."""
HOLD_MOST_S: Final = Seconds(60.0)
LEASE_MOST_S: Final = Seconds(60.0)
"""Longer holds and leases count as this long; the delegate grants no longer ones."""
ALLOWANCE_S: Final = Seconds(5.0)
"""The delegate's, after the end of its lease."""
AWARD_EXPIRY_S: Final = Seconds(HOLD_MOST_S + LEASE_MOST_S + 2 * ALLOWANCE_S)
"""An award that was last sent this long ago, and never renewed, holds nothing."""
RENEW_S: Final = Seconds(1.5)
"""Time between renewals, or a third of the lease if shorter: renewals also detect that a region is lost."""
SILENT_S: Final = Seconds(4.0)
"""A delegate that answered no renewal for this long is not relied on: the local region prepares to serve, if it can."""
LOST_S: Final = Seconds(3.0)
"""A delegate that was silent for this long, and whose gateways fail too, is lost. Silence alone may be that of its
coordinator only, while its replicas serve on."""
SEQUENCE_STEP: Final = 1000
"""After a restart, renewals are numbered from the next multiple of this, so that a number can be used without
storing it."""
CONFIRM_S: Final = Seconds(2.0)
"""After a restart, an agreement's routes stay for this long; its delegate must have answered by then."""
NOTICE_S: Final = Seconds(60.0)
ROUTE_PROPAGATION_S: Final = Seconds(2.0)
"""Time between leaving the routes and the end of an agreement: routes take this long to reach every gateway."""
POLL_LEAST_S: Final = Seconds(0.1)
"""First interval between renewals while the delegate starts; it grows with the delegate's age."""
START_S: Final = Seconds(60.0)
"""A delegate that does not serve after this plus three times the load time of its bid is in breach."""
SHORT_S: Final = Seconds(30.0)
"""So is one that serves less than agreed for this long."""
LOCAL_STABLE_S: Final = Seconds(60.0)
"""A workload that was delegated for lack of a local place comes back when there has been one for this long."""
SWITCH_GAIN_LEAST: Final = 0.10
"""At the end of its term, an agreement yields to another region's offer that is better by this share, or by the
margin if greater."""
COOLDOWN_S: Final = Seconds(60.0)
"""Time between two attempts to improve a running workload; jitter adds up to a quarter."""
BACKOFF_LEAST_S: Final = Seconds(1.0)
BACKOFF_MOST_S: Final = Seconds(60.0)
"""After a round in which no offer fits, the pause doubles from BACKOFF_LEAST_S up to this."""
BACKOFF_SPREAD: Final = 0.25
"""Jitter of that pause: it is up to this share shorter or longer."""

ALL_FAILING: Final = "no request is answered there, though it says that it serves"

_ANY: Final = Elapsed(0.0)
_AGREEMENT_GONE: Final = (Code.AGREEMENT_UNKNOWN, Code.AGREEMENT_ENDED)
_Result: TypeAlias = (
    RoundAnswered
    | AwardGranted
    | AwardFailed
    | ReleaseConfirmed
    | ReleaseFailed
    | RenewalConfirmed
    | RenewalFailed
    | DelegateNotice
    | NoticeConfirmed
    | NoticeFailed
    | ComparisonDone
)
"""Every event but the demand: what others answered or told."""


def step(
    trade: WorkloadTrade, event: TradeEvent, now: Elapsed, fresh: str, *, origin: str, term_s: Seconds
) -> TradeStep:
    """Advances one workload's trade: deadlines, the event, then deadlines again.

    fresh: a name never used before ([a-z0-9-], at most 40 characters). origin: this region. term_s: the term to ask
    for.
    """
    done = _apply_deadlines(trade, now, fresh, origin)
    done = done.plus(_step(done.trade, event, now, fresh, origin, term_s))
    return done.plus(_apply_deadlines(done.trade, now, fresh, origin))


def restore(trade: WorkloadTrade, now: Elapsed) -> WorkloadTrade:
    """The trade that an earlier process left. The length of the outage is unknown, so solicited bids and awards are not
    relied on, and agreements have to be confirmed."""

    def unconfirm(deal: OriginAgreement) -> OriginAgreement:
        return replace(
            deal,
            lease_until=Elapsed(now + CONFIRM_S),
            over_at=Elapsed(now + deal.lease_s),
            sequence=(deal.sequence // SEQUENCE_STEP + 1) * SEQUENCE_STEP,
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
        case Awarding(offer=offer, award=award):
            phase = Withdrawing(offer, award.agreement, Elapsed(now + AWARD_EXPIRY_S), now, Code.PEER_UNREACHABLE)
        case Withdrawing():
            phase = replace(trade.phase, until=Elapsed(now + AWARD_EXPIRY_S), retry_at=now)
        case Active():
            active = trade.phase
            phase = replace(active, deal=unconfirm(active.deal), home_since=None)
    leaving = tuple(replace(each, deal=unconfirm(each.deal), next_at=now) for each in trade.leaving)
    return replace(trade, phase=phase, leaving=leaving)


def durable(trade: WorkloadTrade) -> WorkloadTrade:
    """The trade without the values that `restore` does not rely on. If this is unchanged, nothing has to be stored."""

    def without_times(deal: OriginAgreement) -> OriginAgreement:
        return replace(
            deal,
            lease_until=_ANY,
            over_at=_ANY,
            sequence=deal.sequence // SEQUENCE_STEP,
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
            phase = replace(phase, deal=without_times(phase.deal), home_since=None)
    leaving = tuple(replace(each, deal=without_times(each.deal), told=False, next_at=_ANY) for each in trade.leaving)
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
        case Active(deal=deal):
            times += [deal.renew_at, deal.over_at, phase.term_at]
            times += [trade.better_at] if need is DelegationNeed.BETTER else []
            if deal.service is ServiceState.STARTING:
                times.append(Elapsed(deal.since + START_S + 3 * deal.offer.load_s))
            if deal.service is ServiceState.SHORT:
                times.append(Elapsed(deal.since + SHORT_S))
            if need is DelegationNeed.CONTENT and phase.home_since is not None:
                times.append(Elapsed(phase.home_since + LOCAL_STABLE_S))
    return min(times, default=Elapsed(math.inf))


def _leaving_times(each: LeavingAgreement) -> tuple[Elapsed, ...]:
    serving = (each.deal.renew_at, each.deal.over_at) if each.stage is LeavingStage.SERVING else ()
    told = () if each.told and each.stage is not LeavingStage.SETTLING else (each.next_at,)
    return (each.ends_at, *serving, *told)


def open_award(trade: WorkloadTrade) -> str:
    """The agreement that was awarded and not ended, of which there is at most one; empty: none."""
    match trade.phase:
        case IdleTrade() | Soliciting():
            return ""
        case Awarding(award=award):
            return award.agreement
        case Withdrawing(agreement=agreement):
            return agreement
        case Active(deal=deal):
            return deal.agreement


def active_deal(trade: WorkloadTrade) -> OriginAgreement | None:
    """The agreement that lasts: neither side has given notice."""
    match trade.phase:
        case Active(deal=deal):
            return deal
        case IdleTrade() | Soliciting() | Awarding() | Withdrawing():
            return None


def _open_deals(trade: WorkloadTrade) -> tuple[OriginAgreement, ...]:
    """Agreements that are not over, the lasting one first."""
    deal = active_deal(trade)
    return (*(() if deal is None else (deal,)), *(each.deal for each in trade.leaving))


def is_relied_on(trade: WorkloadTrade, now: Elapsed) -> bool:
    """True if no local replica is wanted: another region runs it or is to, and answers."""
    deal = active_deal(trade)
    return deal is not None and now - deal.heard_at < SILENT_S


def serving_agreements(trade: WorkloadTrade, now: Elapsed) -> tuple[OriginAgreement, ...]:
    """Agreements whose delegates may receive requests now, the lasting one first."""
    ending = {each.deal.agreement for each in trade.leaving if each.stage is not LeavingStage.SERVING}
    return tuple(
        deal
        for deal in _open_deals(trade)
        if deal.agreement not in ending and deal.is_serving and now < deal.lease_until
    )


def agreement_of(trade: WorkloadTrade, agreement: str) -> OriginAgreement | None:
    """The agreement of this id, if it is not over."""
    return next((deal for deal in _open_deals(trade) if deal.agreement == agreement), None)


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
    return _end_round(trade, phase, now, refusal, "nobody")


def _apply_deadlines_awarding(trade: WorkloadTrade, phase: Awarding, now: Elapsed, origin: str) -> TradeStep:
    if now >= phase.until:
        return _withdraw(trade, phase, now, origin, Code.HOLD_EXPIRED)
    if now < phase.retry_at:
        return TradeStep(trade)
    again = replace(trade, phase=replace(phase, retry_at=Elapsed(now + CALL_S)))
    return TradeStep(again, (SendAward(phase.offer.region, phase.award),))


def _apply_deadlines_withdrawing(trade: WorkloadTrade, phase: Withdrawing, now: Elapsed, origin: str) -> TradeStep:
    if now >= phase.until:
        expired = TradeNote("expired", phase.agreement, phase.offer.region, phase.code)
        return TradeStep(_with_pause(trade, now, Refusal(phase.code)), (), (expired,))
    if now < phase.retry_at:
        return TradeStep(trade)
    again = replace(trade, phase=replace(phase, retry_at=Elapsed(now + CALL_S)))
    return TradeStep(again, (_new_release(phase.offer, origin),))


def _apply_deadlines_active(trade: WorkloadTrade, phase: Active, now: Elapsed, fresh: str) -> TradeStep:
    deal = phase.deal
    if now >= deal.over_at:
        return _breach(trade, deal, now, f"not renewed for {show_seconds(now - deal.asked_at)}", stays=Seconds(0.0))
    if deal.service is ServiceState.STARTING and now - deal.since >= START_S + 3 * deal.offer.load_s:
        return _breach(trade, deal, now, f"does not serve after {show_seconds(now - deal.since)}", stays=Seconds(0.0))
    if deal.service is ServiceState.SHORT and now - deal.since >= SHORT_S:
        return _breach(trade, deal, now, f"serves short for {show_seconds(now - deal.since)}", stays=NOTICE_S)
    if now >= deal.renew_at:
        deal, effect = _renew(deal, now, fresh)
        return TradeStep(replace(trade, phase=replace(phase, deal=deal)), (effect,))
    return TradeStep(trade)


def _apply_deadlines_leaving(
    each: LeavingAgreement, now: Elapsed, fresh: str, origin: str
) -> tuple[LeavingAgreement | None, tuple[TradeEffect, ...], tuple[TradeNote, ...]]:
    deal = each.deal
    if now >= each.ends_at or (each.stage is LeavingStage.SERVING and now >= deal.over_at):
        return None, (), (_end_note(each),)
    if each.stage is LeavingStage.SETTLING and now >= each.next_at:
        each = replace(each, stage=LeavingStage.ENDING, told=False, next_at=now)
    effects: tuple[TradeEffect, ...] = ()
    if each.stage is not LeavingStage.SETTLING and not each.told and now >= each.next_at:
        ends_s = Seconds(each.ends_at - now if each.stage is LeavingStage.SERVING else 0.0)
        notice = Notice(deal.agreement, origin, each.code, ends_s)
        effects, each = (SendNotice(deal.region, notice),), replace(each, next_at=Elapsed(now + CALL_S))
    if each.stage is LeavingStage.SERVING and now >= deal.renew_at:
        deal, renewal = _renew(deal, now, fresh)
        effects, each = (*effects, renewal), replace(each, deal=deal)
    return each, effects, ()


def _renew(deal: OriginAgreement, now: Elapsed, fresh: str) -> tuple[OriginAgreement, SendRenewal]:
    nonce = _digest(fresh, deal.agreement, str(deal.sequence + 1))
    again_at = Elapsed(now + min(CALL_S, deal.lease_s / 2))
    after = replace(deal, sequence=deal.sequence + 1, nonce=nonce, asked_at=now, renew_at=again_at)
    return after, SendRenewal(deal.region, deal.agreement, after.sequence, nonce)


# -- events ----------------------------------------------------------------------------------------------------------


def _step(trade: WorkloadTrade, event: TradeEvent, now: Elapsed, fresh: str, origin: str, term_s: Seconds) -> TradeStep:
    if isinstance(event, DelegationDemand):  # the one event that every phase waits for
        return _on_delegation_demand(trade, event, now, fresh, term_s)
    match trade.phase:
        case IdleTrade():
            return _step_leaving(trade, event, now, origin)
        case Soliciting() as phase:
            return _step_soliciting(trade, phase, event, now, origin, term_s)
        case Awarding() as phase:
            return _step_awarding(trade, phase, event, now, origin, term_s)
        case Withdrawing() as phase:
            return _step_withdrawing(trade, phase, event, now, origin)
        case Active() as phase:
            return _step_active(trade, phase, event, now, origin)


def _step_soliciting(
    trade: WorkloadTrade, phase: Soliciting, event: _Result, now: Elapsed, origin: str, term_s: Seconds
) -> TradeStep:
    match event:
        case RoundAnswered(solicitation=phase.solicitation, round=phase.round):
            return _on_answers(trade, phase, event, now, origin, term_s)
        case _:
            return _step_leaving(trade, event, now, origin)


def _step_awarding(
    trade: WorkloadTrade, phase: Awarding, event: _Result, now: Elapsed, origin: str, term_s: Seconds
) -> TradeStep:
    match event:
        case AwardGranted(grant=Grant(agreement=phase.award.agreement)):
            return _on_granted(trade, phase, event, now, term_s)
        case AwardFailed(agreement=phase.award.agreement, refusal=None):
            return TradeStep(replace(trade, phase=replace(phase, retry_at=_sooner(phase.retry_at, now))))
        case AwardFailed(agreement=phase.award.agreement, refusal=Refusal() as refusal):
            released = TradeNote("released", event.agreement, phase.offer.region, refusal.code, str(refusal))
            return TradeStep(_with_pause(trade, now, refusal), (), (released,))
        case _:
            return _step_leaving(trade, event, now, origin)


def _step_withdrawing(trade: WorkloadTrade, phase: Withdrawing, event: _Result, now: Elapsed, origin: str) -> TradeStep:
    match event:
        case ReleaseConfirmed(bid=phase.offer.id):
            released = TradeNote("released", phase.agreement, phase.offer.region, phase.code)
            return TradeStep(_with_pause(trade, now, Refusal(phase.code)), (), (released,))
        case ReleaseFailed(bid=phase.offer.id):
            return TradeStep(replace(trade, phase=replace(phase, retry_at=_sooner(phase.retry_at, now))))
        case _:
            return _step_leaving(trade, event, now, origin)


def _step_active(trade: WorkloadTrade, phase: Active, event: _Result, now: Elapsed, origin: str) -> TradeStep:
    deal = phase.deal
    match event:
        case RenewalConfirmed(renewal=Renewed(agreement=deal.agreement) as renewed):
            return _on_renewal_confirmed(trade, phase, renewed, now)
        case RenewalFailed(agreement=deal.agreement):
            if (said := event.refusal) is not None and said.code in _AGREEMENT_GONE:
                return _breach(trade, deal, now, str(said), stays=None)
            return TradeStep(replace(trade, phase=replace(phase, deal=_renew_sooner(deal, event.nonce, now))))
        case DelegateNotice(notice=Notice(agreement=deal.agreement) as notice):
            return _on_delegate_notice(trade, phase, notice, event.evidence, now)
        case ComparisonDone(agreement=deal.agreement) if event.terms.request_hash == phase.asked:
            return _on_comparison(trade, phase, event, now)
        case _:
            return _step_leaving(trade, event, now, origin)


def _step_leaving(trade: WorkloadTrade, event: _Result, now: Elapsed, origin: str) -> TradeStep:
    """What the phase does not wait for: results that come again or too late, and agreements under notice."""
    leaving = trade.leaving
    match event:
        case RoundAnswered(answers=answers):
            late = tuple(_new_release(each, origin) for each in _held(answers) if not _is_taken(trade, each))
            return TradeStep(trade, late)
        case RenewalConfirmed(renewal=renewed):
            mine = _leaving_agreement(trade, renewed.agreement)
            if mine is None or not _answers_newest(mine.deal, renewed):
                return TradeStep(trade)
            deal = _with_renewal(mine.deal, renewed, now)
            return TradeStep(_with_leaving_deal(trade, deal), (), _service_notes(mine.deal, deal))
        case RenewalFailed(agreement=agreement, refusal=Refusal(code=code)) if code in _AGREEMENT_GONE:
            gone = tuple(each for each in leaving if each.deal.agreement == agreement)
            kept = tuple(each for each in leaving if each.deal.agreement != agreement)
            return TradeStep(replace(trade, leaving=kept), (), tuple(_end_note(each) for each in gone))
        case RenewalFailed(agreement=agreement, nonce=nonce):
            mine = _leaving_agreement(trade, agreement)
            return TradeStep(trade if mine is None else _with_leaving_deal(trade, _renew_sooner(mine.deal, nonce, now)))
        case DelegateNotice(notice=notice):
            ends_at = _notice_end(notice, now)
            leaving = tuple(
                replace(each, ends_at=Elapsed(min(each.ends_at, ends_at)))
                if each.deal.agreement == notice.agreement
                else each
                for each in leaving
            )
            return TradeStep(replace(trade, leaving=leaving))
        case NoticeConfirmed():
            return _on_notice_confirmed(trade, event)
        case NoticeFailed(agreement=agreement):
            leaving = tuple(
                replace(each, next_at=_sooner(each.next_at, now))
                if each.deal.agreement == agreement and each.stage is not LeavingStage.SETTLING
                else each
                for each in leaving
            )
            return TradeStep(replace(trade, leaving=leaving))
        case AwardGranted() | AwardFailed() | ReleaseConfirmed() | ReleaseFailed() | ComparisonDone():
            return TradeStep(trade)


def _on_delegation_demand(
    trade: WorkloadTrade, wish: DelegationDemand, now: Elapsed, fresh: str, term_s: Seconds
) -> TradeStep:
    changed = wish.request_hash != trade.asked and wish.need is not DelegationNeed.NOTHING
    if changed:
        trade = replace(trade, asked=wish.request_hash, tries=0, said="")
    done = _apply_demand(trade, wish, now, fresh, term_s, changed=changed)
    done = done.plus(_breach_failing(done.trade, wish))
    return replace(done, trade=_unroute_leaving(done.trade, wish, now))


def _apply_demand(
    trade: WorkloadTrade, wish: DelegationDemand, now: Elapsed, fresh: str, term_s: Seconds, *, changed: bool
) -> TradeStep:
    """changed: other documents ask now, so that a pause is over."""
    match trade.phase:
        case IdleTrade() as phase:
            if changed and phase.until > now:
                phase = replace(phase, until=now)
                trade = replace(trade, phase=phase)
            return _apply_demand_to_idle(trade, phase, wish, now, fresh)
        case Soliciting() | Awarding() | Withdrawing():
            return TradeStep(trade)  # its result is judged by the need at that time
        case Active() as phase:
            return _apply_demand_to_active(trade, phase, wish, now, fresh, term_s)


def _apply_demand_to_idle(
    trade: WorkloadTrade, phase: IdleTrade, wish: DelegationDemand, now: Elapsed, fresh: str
) -> TradeStep:
    due = now >= phase.until and (
        wish.need in (DelegationNeed.SHORT, DelegationNeed.MOVED)
        or (wish.need is DelegationNeed.BETTER and now >= trade.better_at)
    )
    if not due:
        return TradeStep(trade)
    until = Elapsed(now + ANSWER_S + ANSWER_GRACE_S)
    asking = Soliciting(fresh, 1, wish.request_hash, "", wish.need, now, until, wish.to)
    after = replace(trade, phase=asking, better_at=_cooldown_end(trade, now, fresh))
    solicited = TradeNote("solicited", fresh, "", "", wish.need)
    solicit = Solicit(fresh, 1, wish.request_hash, None, wish.to)
    return TradeStep(after, (solicit,), () if trade.said else (solicited,))


def _apply_demand_to_active(
    trade: WorkloadTrade, phase: Active, wish: DelegationDemand, now: Elapsed, fresh: str, term_s: Seconds
) -> TradeStep:
    if wish.need is DelegationNeed.NOTHING:
        return _leave(trade, phase.deal, now, Code.AGREEMENT_ENDED, "it is not to be delegated any more")
    if wish.request_hash != phase.asked:
        return _leave(trade, phase.deal, now, Code.AGREEMENT_ENDED, "its documents changed")
    if wish.is_failing and now - phase.deal.heard_at >= LOST_S:
        left = Seconds(max(0.0, phase.deal.over_at - now))
        return _breach(trade, phase.deal, now, "neither it nor its gateways answer", stays=left)
    if wish.failing_agreement == phase.deal.agreement and phase.deal.is_serving:
        return _breach(trade, phase.deal, now, ALL_FAILING, stays=Seconds(max(0.0, phase.deal.over_at - now)))
    if wish.need is DelegationNeed.HOME or (wish.need is DelegationNeed.MOVED and wish.to != phase.deal.region):
        return _leave(trade, phase.deal, now, Code.AGREEMENT_ENDED, "it moves")
    if wish.need in (DelegationNeed.MOVED, DelegationNeed.HELD):
        held = replace(phase, home_since=None, stays=phase.stays or wish.is_permanent)
        return TradeStep(replace(trade, phase=held))
    since = None if wish.need is DelegationNeed.SHORT else phase.home_since if phase.home_since is not None else now
    phase = replace(phase, home_since=since, returns="" if wish.need is DelegationNeed.SHORT else phase.returns)
    if wish.need is DelegationNeed.CONTENT and since is not None and now - since >= LOCAL_STABLE_S:
        return _begin_return(
            trade, phase, now, Code.AGREEMENT_ENDED, "home has a place for it again", live=wish.by_live_move
        )
    if now >= phase.term_at and term_s > 0:
        after = replace(
            trade, phase=replace(phase, term_at=Elapsed(now + term_s)), better_at=_cooldown_end(trade, now, fresh)
        )
        return TradeStep(after, (Compare(phase.deal.agreement, with_other_regions=True),))
    trade = replace(trade, phase=phase)
    if wish.need is DelegationNeed.BETTER and now >= trade.better_at:
        after = replace(trade, better_at=_cooldown_end(trade, now, fresh))
        return TradeStep(after, (Compare(phase.deal.agreement, with_other_regions=False),))
    return TradeStep(trade)


def _breach_failing(trade: WorkloadTrade, wish: DelegationDemand) -> TradeStep:
    """Marks agreements under notice that answer no request as breached, so that the local region does not wait for
    them."""
    broken = [
        each
        for each in trade.leaving
        if each.deal.agreement == wish.failing_agreement and each.code is not Code.BREACHED and each.deal.is_serving
    ]
    leaving = tuple(replace(each, code=Code.BREACHED) if each in broken else each for each in trade.leaving)
    notes = tuple(
        TradeNote("breached", each.deal.agreement, each.deal.region, Code.BREACHED, ALL_FAILING) for each in broken
    )
    return TradeStep(
        replace(trade, leaving=leaving), tuple(_record_delivery(each.deal, breached=True) for each in broken), notes
    )


def _unroute_leaving(trade: WorkloadTrade, wish: DelegationDemand, now: Elapsed) -> WorkloadTrade:
    """Takes leaving agreements out of the routes once something else serves, or nothing is to serve."""
    deal = active_deal(trade)
    replaced = wish.is_served_locally or (deal is not None and deal.is_serving and now < deal.lease_until)
    if not replaced:
        return trade
    leaving = tuple(
        replace(each, stage=LeavingStage.SETTLING, next_at=Elapsed(now + ROUTE_PROPAGATION_S))
        if each.stage is LeavingStage.SERVING
        else each
        for each in trade.leaving
    )
    return replace(trade, leaving=leaving)


def _on_answers(
    trade: WorkloadTrade, phase: Soliciting, event: RoundAnswered, now: Elapsed, origin: str, term_s: Seconds
) -> TradeStep:
    offers = _held(event.answers)
    if event.terms is None or event.terms.request_hash != phase.asked:
        gone = Refusal(Code.NO_BID, "its documents changed meanwhile", "bids for what they ask now")
        after = replace(trade, phase=IdleTrade(now, gone))
        return TradeStep(after, tuple(_new_release(each, origin) for each in offers))
    terms = event.terms if phase.need is not DelegationNeed.MOVED else _for_single_region(event.terms, phase.to)
    choice = choose(event.answers, _with_relaxation(terms, phase), since_s=now - phase.asked_at)
    notes = tuple(_answer_note(phase, row.answer, row.refusal) for row in choice.ranked)
    losers = [each for each in offers if choice.winner is None or each.id != choice.winner.id]
    releases = tuple(_new_release(each, origin) for each in losers)
    if choice.winner is None:
        return TradeStep(trade, releases).plus(_without_winner(trade, phase, choice, notes, now))
    winner = choice.winner
    agreement = "g-" + _digest(origin, phase.solicitation, winner.id)
    award = Award(agreement, phase.solicitation, winner.id, origin, trade.workload, term_s, ())
    until = Elapsed(phase.asked_at + min(winner.hold_s, HOLD_MOST_S))
    after = replace(trade, phase=Awarding(winner, award, phase.asked, until, Elapsed(now + CALL_S)), said="")
    evidence = event.evidence.get(winner.region, b"")
    awarded = TradeNote("awarded", agreement, winner.region, "", describe_offer(winner), evidence)
    return TradeStep(after, (SendAward(winner.region, award), *releases), (*notes, awarded))


def _without_winner(
    trade: WorkloadTrade, phase: Soliciting, choice: OfferSelection, notes: tuple[TradeNote, ...], now: Elapsed
) -> TradeStep:
    """Starts a second round with a relaxation, or ends the round. Equal results are not logged again."""
    step = choice.relaxation
    if step is not None and phase.round == 1:
        asking = replace(
            phase, round=2, relaxed=step.change, asked_at=now, until=Elapsed(now + ANSWER_S + ANSWER_GRACE_S)
        )
        solicited = TradeNote("solicited", phase.solicitation, "", "", f"round 2, relaxed: {step.change}")
        asked = (Solicit(phase.solicitation, 2, phase.asked, step, phase.to),)
        return TradeStep(replace(trade, phase=asking), asked, () if trade.said else (*notes, solicited))
    said = _digest(*sorted(f"{row.answer.region} {row.refusal.code if row.refusal else ''}" for row in choice.ranked))
    return _end_round(trade, phase, now, choice.refusal or Refusal(Code.NO_BID), said, notes)


def _on_granted(trade: WorkloadTrade, phase: Awarding, event: AwardGranted, now: Elapsed, term_s: Seconds) -> TradeStep:
    grant = event.grant
    lease_s = Seconds(min(grant.lease_s, LEASE_MOST_S))
    until = Elapsed(event.asked_at + lease_s)
    deal = OriginAgreement(
        agreement=grant.agreement,
        offer=phase.offer,
        gateways=grant.gateways,
        lease_s=lease_s,
        lease_until=until,
        over_at=until,
        sequence=0,
        nonce="",
        asked_at=event.asked_at,
        heard_at=event.asked_at,
        renew_at=now,
        service=ServiceState.STARTING,
        since=now,
    )
    after = replace(trade, phase=Active(deal, phase.asked, Elapsed(now + term_s)), tries=0)
    granted = TradeNote("granted", grant.agreement, deal.region, "", f"lease {show_seconds(lease_s)}", event.evidence)
    return TradeStep(after, (), (granted,))


def _on_renewal_confirmed(trade: WorkloadTrade, phase: Active, renewed: Renewed, now: Elapsed) -> TradeStep:
    before = phase.deal
    if not _answers_newest(before, renewed):
        return TradeStep(trade)
    deal = _with_renewal(before, renewed, now)
    phase = replace(phase, deal=deal)
    done = TradeStep(replace(trade, phase=phase), (), _service_notes(before, deal))
    if renewed.service is not ServiceState.STOPPING:
        return done
    # Its notice was lost.
    notice = Notice(deal.agreement, deal.region, Code.AGREEMENT_ENDED, Seconds(max(0.0, deal.over_at - now)))
    return done.plus(_on_delegate_notice(done.trade, phase, notice, b"", now))


def _answers_newest(deal: OriginAgreement, renewed: Renewed) -> bool:
    """Only the answer to the newest renewal counts."""
    return bool(deal.nonce) and deal.nonce == renewed.nonce


def _with_renewal(deal: OriginAgreement, renewed: Renewed, now: Elapsed) -> OriginAgreement:
    lease_s = Seconds(min(renewed.lease_s, LEASE_MOST_S))
    until = Elapsed(max(deal.asked_at + lease_s, deal.lease_until))
    renew_at = max(now, deal.asked_at + _renewal_pause_s(lease_s))
    if renewed.service is ServiceState.STARTING:
        renew_at = min(renew_at, now + max(POLL_LEAST_S, (now - deal.since) / 2))
    return replace(
        deal,
        gateways=renewed.gateways,
        revoked=renewed.revoked,
        lease_s=lease_s if lease_s > 0 else deal.lease_s,
        lease_until=until,
        over_at=until,
        heard_at=deal.asked_at,
        renew_at=Elapsed(renew_at),
        service=renewed.service,
        since=now if renewed.service is not deal.service else deal.since,
        joules=_joules_per_inference(renewed.report) or deal.joules,
    )


def _service_notes(before: OriginAgreement, after: OriginAgreement) -> tuple[TradeNote, ...]:
    if after.service is before.service:
        return ()
    return (TradeNote("renewed", after.agreement, after.region, "", after.service),)


def _renew_sooner(deal: OriginAgreement, nonce: str, now: Elapsed) -> OriginAgreement:
    """After a renewal that failed; unchanged if it was not the newest."""
    if nonce != deal.nonce:
        return deal
    return replace(deal, renew_at=Elapsed(min(deal.renew_at, now + min(RETRY_S, deal.lease_s / 12))))


def _joules_per_inference(report: ServiceReport) -> float | None:
    """Joules per inference to two digits, because every change of the value causes a new step."""
    served = report.requests - report.errors
    each = report.joules / served if served > 0 else 0.0
    return float(f"{each:.2g}") if math.isfinite(each) and each > 0 else None


def _on_delegate_notice(
    trade: WorkloadTrade, phase: Active, notice: Notice, evidence: bytes, now: Elapsed
) -> TradeStep:
    """It serves until the notice ends, or until something else serves."""
    noted = TradeNote(
        "noticed", notice.agreement, notice.by, notice.code, f"in {show_seconds(notice.ends_s)}", evidence
    )
    leaving = LeavingAgreement(phase.deal, LeavingStage.SERVING, notice.code, True, _notice_end(notice, now), now)
    after = replace(_with_pause(trade, now, Refusal(notice.code)), leaving=(*trade.leaving, leaving))
    return TradeStep(after, (_record_delivery(phase.deal, breached=False),), (noted,))


def _notice_end(notice: Notice, now: Elapsed) -> Elapsed:
    return Elapsed(now + min(notice.ends_s, LEASE_MOST_S + NOTICE_S))


def _on_notice_confirmed(trade: WorkloadTrade, event: NoticeConfirmed) -> TradeStep:
    kept, notes = list[LeavingAgreement](), list[TradeNote]()
    for each in trade.leaving:
        if each.deal.agreement != event.agreement:
            kept.append(each)
        elif each.stage is LeavingStage.ENDING and event.ends_s <= 0:
            notes.append(_end_note(each))
        else:
            kept.append(replace(each, told=each.told or each.stage is LeavingStage.SERVING))
    return TradeStep(replace(trade, leaving=tuple(kept)), (), tuple(notes))


def _on_comparison(trade: WorkloadTrade, phase: Active, event: ComparisonDone, now: Elapsed) -> TradeStep:
    offer, terms = phase.deal.offer, event.terms
    gain = gain_of_local(offer, terms)
    if terms.delegation.mode is DelegationMode.WHEN_BETTER and gain > 0 and gain >= terms.delegation.margin:
        return _begin_return(
            trade, phase, now, Code.BETTER_ELSEWHERE, f"home is {gain:.1%} better", live=event.by_live_move
        )
    if event.best is not None and event.best.region != offer.region:
        better = gain_of(event.best, offer, terms)
        if better >= max(SWITCH_GAIN_LEAST, terms.delegation.margin):
            after = replace(trade, better_at=now)
            found = f"{event.best.region} is {better:.1%} better"
            return _leave(after, phase.deal, now, Code.BETTER_ELSEWHERE, found)
    return TradeStep(trade)


# -- transitions -----------------------------------------------------------------------------------------------------


def _leave(trade: WorkloadTrade, deal: OriginAgreement, now: Elapsed, code: Code, why: str) -> TradeStep:
    """Ends an agreement in good order: notice first, then make before break."""
    leaving = LeavingAgreement(deal, LeavingStage.SERVING, code, False, Elapsed(now + NOTICE_S), now)
    after = replace(trade, phase=IdleTrade(now), leaving=(*trade.leaving, leaving))
    return TradeStep(
        after,
        (_record_delivery(deal, breached=False),),
        (TradeNote("noticed", deal.agreement, deal.region, code, why),),
    )


def _begin_return(trade: WorkloadTrade, phase: Active, now: Elapsed, code: Code, why: str, *, live: bool) -> TradeStep:
    """live: a live move does it, and ends the agreement once the local replicas have proved as good."""
    if not live:
        return _leave(trade, phase.deal, now, code, why)
    return TradeStep(replace(trade, phase=replace(phase, returns=phase.returns or why)))


def _breach(trade: WorkloadTrade, deal: OriginAgreement, now: Elapsed, why: str, *, stays: Seconds | None) -> TradeStep:
    """stays: how long it may serve on until something else does; None: the delegate has ended it already."""
    leaving = trade.leaving
    if stays is not None:
        stage = LeavingStage.SERVING if stays > 0 else LeavingStage.ENDING
        ends_at = Elapsed(now + (stays or LEASE_MOST_S + ALLOWANCE_S))
        leaving = (*leaving, LeavingAgreement(deal, stage, Code.BREACHED, False, ends_at, now))
    after = replace(trade, phase=IdleTrade(now, Refusal(Code.BREACHED, why)), leaving=leaving)
    return TradeStep(
        after,
        (_record_delivery(deal, breached=True),),
        (TradeNote("breached", deal.agreement, deal.region, Code.BREACHED, why),),
    )


def _withdraw(trade: WorkloadTrade, phase: Awarding, now: Elapsed, origin: str, code: Code) -> TradeStep:
    longest = Elapsed(now + AWARD_EXPIRY_S)
    after = Withdrawing(phase.offer, phase.award.agreement, longest, Elapsed(now + CALL_S), code)
    return TradeStep(replace(trade, phase=after), (_new_release(phase.offer, origin),))


def _end_round(
    trade: WorkloadTrade,
    phase: Soliciting,
    now: Elapsed,
    refusal: Refusal,
    said: str,
    notes: tuple[TradeNote, ...] = (),
) -> TradeStep:
    """A failed attempt at mere improvement has its cooldown but no pause, because the workload may become short."""
    better = phase.need is DelegationNeed.BETTER
    after = replace(trade, phase=IdleTrade(now, refusal)) if better else _with_pause(trade, now, refusal)
    no_bid = TradeNote("no_bid", phase.solicitation, "", refusal.code, str(refusal))
    return TradeStep(replace(after, said=said), (), () if said == trade.said else (*notes, no_bid))


def _with_pause(trade: WorkloadTrade, now: Elapsed, refusal: Refusal) -> WorkloadTrade:
    longest = 1.0 + BACKOFF_SPREAD
    pause_s = delay(
        str(trade.workload),
        trade.tries,
        base_s=BACKOFF_LEAST_S * longest,
        cap_s=BACKOFF_MOST_S * longest,
        jitter=2 * BACKOFF_SPREAD / longest,
    )
    return replace(trade, phase=IdleTrade(Elapsed(now + pause_s), refusal), tries=trade.tries + 1)


def _leaving_agreement(trade: WorkloadTrade, agreement: str) -> LeavingAgreement | None:
    return next((each for each in trade.leaving if each.deal.agreement == agreement), None)


def _with_leaving_deal(trade: WorkloadTrade, deal: OriginAgreement) -> WorkloadTrade:
    leaving = tuple(
        replace(each, deal=deal) if each.deal.agreement == deal.agreement else each for each in trade.leaving
    )
    return replace(trade, leaving=leaving)


def _held(answers: Iterable[Answer]) -> list[Offer]:
    """Offers among the answers whose bidder holds room for them."""
    return [each for each in answers if isinstance(each, Offer) and each.hold_s > 0]


def _is_taken(trade: WorkloadTrade, offer: Offer) -> bool:
    """True if the offer belongs to a bid that was awarded: the answer is a repeat."""
    match trade.phase:
        case Awarding(offer=mine) | Withdrawing(offer=mine):
            taken = mine.id == offer.id
        case Active(deal=deal):
            taken = deal.offer.id == offer.id
        case IdleTrade() | Soliciting():
            taken = False
    return taken or any(each.deal.offer.id == offer.id for each in trade.leaving)


def _with_relaxation(terms: DelegationTerms, phase: Soliciting) -> DelegationTerms:
    """In round 2, the relaxation that was asked for replaces the policy's own values."""
    setting = next((each for each in terms.relax if phase.relaxed and each.change == phase.relaxed), None)
    return terms if setting is None else replace(terms, require=setting.require, limits=setting.limits)


def _for_single_region(terms: DelegationTerms, to: str) -> DelegationTerms:
    """Terms of a workload that is sent to one region: neither the local placement nor other regions compete."""
    return replace(terms, own=None, delegation=replace(terms.delegation, to=(to,)))


def _new_release(offer: Offer, origin: str) -> SendRelease:
    return SendRelease(offer.region, Release(offer.solicitation, offer.id, origin))


def _record_delivery(deal: OriginAgreement, *, breached: bool) -> RecordDelivery:
    return RecordDelivery(deal.region, deal.agreement, deal.offer.latency_p95_s, breached)


def _end_note(each: LeavingAgreement) -> TradeNote:
    return TradeNote("ended", each.deal.agreement, each.deal.region, each.code)


def _answer_note(phase: Soliciting, answer: Answer, refusal: Refusal | None) -> TradeNote:
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


def _sooner(time: Elapsed, now: Elapsed) -> Elapsed:
    return Elapsed(min(time, now + RETRY_S))


def _cooldown_end(trade: WorkloadTrade, now: Elapsed, fresh: str) -> Elapsed:
    return Elapsed(now + COOLDOWN_S * (1 + stable_hash.fraction(str(trade.workload), fresh) / 4))


def _renewal_pause_s(lease_s: Seconds) -> Seconds:
    return Seconds(min(RENEW_S, lease_s / 3))


def _digest(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:20]
