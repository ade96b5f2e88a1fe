"""The origin's side of a trade: one state machine per workload, from its need to the end of an agreement.

At most one award per workload is open: awarded, being withdrawn, or an agreement that neither side has ended. An
agreement under notice serves on beside its successor (`leaving`), so that traffic moves before it stops.

Elapsed times are valid within one process only; `restore` converts those that a restart finds.
"""

import hashlib
import math
from dataclasses import replace
from typing import Final

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
from shoal.types.agreement import Award, Notice, Release, Renewed, ServiceReport, ServiceState
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


def is_relied_on(trade: WorkloadTrade, now: Elapsed) -> bool:
    """True if no local replica is wanted: another region runs it or is to, and answers."""
    return isinstance(trade.phase, Active) and now - trade.phase.deal.heard_at < SILENT_S


def serving_agreements(trade: WorkloadTrade, now: Elapsed) -> tuple[OriginAgreement, ...]:
    """Agreements whose delegates may receive requests now, the lasting one first."""
    deals = [trade.phase.deal] if isinstance(trade.phase, Active) else []
    deals += [each.deal for each in trade.leaving if each.stage is LeavingStage.SERVING]
    return tuple(deal for deal in deals if deal.is_serving and now < deal.lease_until)


def agreement_of(trade: WorkloadTrade, agreement: str) -> OriginAgreement | None:
    """The agreement of this id, if it is not over."""
    deals = [trade.phase.deal] if isinstance(trade.phase, Active) else []
    deals += [each.deal for each in trade.leaving]
    return next((deal for deal in deals if deal.agreement == agreement), None)


# -- time ------------------------------------------------------------------------------------------------------------


def _apply_deadlines(trade: WorkloadTrade, now: Elapsed, fresh: str, origin: str) -> TradeStep:
    """Everything that is due by time alone."""
    done = TradeStep(trade)
    phase = trade.phase
    if isinstance(phase, Soliciting) and now >= phase.until:
        refusal = Refusal(Code.NO_BID, "no region answered in time", f"answers within {show_seconds(ANSWER_S)}")
        done = done.plus(_end_round(trade, phase, now, refusal, "nobody"))
    elif isinstance(phase, Awarding) and now >= phase.until:
        done = done.plus(_withdraw(trade, phase, now, origin, Code.HOLD_EXPIRED))
    elif isinstance(phase, Awarding) and now >= phase.retry_at:
        again = replace(trade, phase=replace(phase, retry_at=Elapsed(now + CALL_S)))
        done = done.plus(TradeStep(again, (SendAward(phase.offer.region, phase.award),)))
    elif isinstance(phase, Withdrawing) and now >= phase.until:
        expired = TradeNote("expired", phase.agreement, phase.offer.region, phase.code)
        done = done.plus(TradeStep(_with_pause(trade, now, Refusal(phase.code)), (), (expired,)))
    elif isinstance(phase, Withdrawing) and now >= phase.retry_at:
        again = replace(trade, phase=replace(phase, retry_at=Elapsed(now + CALL_S)))
        done = done.plus(TradeStep(again, (_new_release(phase.offer, origin),)))
    elif isinstance(phase, Active):
        done = done.plus(_apply_deadlines_active(trade, phase, now, fresh, origin))
    kept = list[LeavingAgreement]()
    for each in done.trade.leaving:
        left, effects, notes = _apply_deadlines_leaving(each, now, fresh, origin)
        done = TradeStep(done.trade, (*done.effects, *effects), (*done.notes, *notes))
        kept += [left] if left is not None else []
    return replace(done, trade=replace(done.trade, leaving=tuple(kept)))


def _apply_deadlines_active(trade: WorkloadTrade, phase: Active, now: Elapsed, fresh: str, origin: str) -> TradeStep:
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
    match event:
        case DelegationDemand():
            return _on_delegation_demand(trade, event, now, fresh, term_s)
        case RoundAnswered():
            return _on_answers(trade, event, now, origin, term_s)
        case AwardGranted():
            return _on_granted(trade, event, now, term_s)
        case AwardFailed():
            return _on_award_failed(trade, event, now)
        case ReleaseConfirmed(bid=bid):
            return _on_release_confirmed(trade, bid, now)
        case ReleaseFailed(bid=bid):
            phase = trade.phase
            if isinstance(phase, Withdrawing) and phase.offer.id == bid:
                return TradeStep(replace(trade, phase=replace(phase, retry_at=_sooner(phase.retry_at, now))))
            return TradeStep(trade)
        case RenewalConfirmed(renewal=renewed):
            return _on_renewal_confirmed(trade, renewed, now)
        case RenewalFailed():
            return _on_renewal_failed(trade, event, now)
        case DelegateNotice(notice=notice):
            return _on_delegate_notice(trade, notice, event.evidence, now)
        case NoticeConfirmed():
            return _on_notice_confirmed(trade, event)
        case NoticeFailed(agreement=agreement):
            leaving = tuple(
                replace(each, next_at=_sooner(each.next_at, now))
                if each.deal.agreement == agreement and each.stage is not LeavingStage.SETTLING
                else each
                for each in trade.leaving
            )
            return TradeStep(replace(trade, leaving=leaving))
        case ComparisonDone():
            return _on_comparison(trade, event, now)


def _on_delegation_demand(
    trade: WorkloadTrade, wish: DelegationDemand, now: Elapsed, fresh: str, term_s: Seconds
) -> TradeStep:
    changed = wish.request_hash != trade.asked and wish.need is not DelegationNeed.NOTHING
    if changed:
        trade = replace(trade, asked=wish.request_hash, tries=0, said="")
        if isinstance(trade.phase, IdleTrade) and trade.phase.until > now:
            trade = replace(trade, phase=replace(trade.phase, until=now))
    done = _apply_demand(trade, wish, now, fresh, term_s)
    done = done.plus(_breach_failing(done.trade, wish))
    return replace(done, trade=_unroute_leaving(done.trade, wish, now))


def _apply_demand(trade: WorkloadTrade, wish: DelegationDemand, now: Elapsed, fresh: str, term_s: Seconds) -> TradeStep:
    phase = trade.phase
    match phase:
        case IdleTrade():
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
        case Soliciting() | Awarding() | Withdrawing():
            return TradeStep(trade)  # its result is judged by the need at that time
        case Active():
            return _apply_demand_to_active(trade, phase, wish, now, fresh, term_s)


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
    phase = trade.phase
    replaced = wish.is_served_locally or (
        isinstance(phase, Active) and phase.deal.is_serving and now < phase.deal.lease_until
    )
    if not replaced:
        return trade
    leaving = tuple(
        replace(each, stage=LeavingStage.SETTLING, next_at=Elapsed(now + ROUTE_PROPAGATION_S))
        if each.stage is LeavingStage.SERVING
        else each
        for each in trade.leaving
    )
    return replace(trade, leaving=leaving)


def _on_answers(trade: WorkloadTrade, event: RoundAnswered, now: Elapsed, origin: str, term_s: Seconds) -> TradeStep:
    phase = trade.phase
    offers = [each for each in event.answers if isinstance(each, Offer) and each.hold_s > 0]
    asked = isinstance(phase, Soliciting) and (phase.solicitation, phase.round) == (event.solicitation, event.round)
    if not isinstance(phase, Soliciting) or not asked:
        return TradeStep(trade, tuple(_new_release(each, origin) for each in offers if not _is_taken(trade, each)))
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


def _on_granted(trade: WorkloadTrade, event: AwardGranted, now: Elapsed, term_s: Seconds) -> TradeStep:
    phase, grant = trade.phase, event.grant
    if not isinstance(phase, Awarding) or phase.award.agreement != grant.agreement:
        return TradeStep(trade)  # a repeated or late answer; a late one is being withdrawn
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


def _on_award_failed(trade: WorkloadTrade, event: AwardFailed, now: Elapsed) -> TradeStep:
    phase = trade.phase
    if not isinstance(phase, Awarding) or phase.award.agreement != event.agreement:
        return TradeStep(trade)
    if event.refusal is None:
        return TradeStep(replace(trade, phase=replace(phase, retry_at=_sooner(phase.retry_at, now))))
    released = TradeNote("released", event.agreement, phase.offer.region, event.refusal.code, str(event.refusal))
    return TradeStep(_with_pause(trade, now, event.refusal), (), (released,))


def _on_release_confirmed(trade: WorkloadTrade, bid: str, now: Elapsed) -> TradeStep:
    phase = trade.phase
    if not isinstance(phase, Withdrawing) or phase.offer.id != bid:
        return TradeStep(trade)
    released = TradeNote("released", phase.agreement, phase.offer.region, phase.code)
    return TradeStep(_with_pause(trade, now, Refusal(phase.code)), (), (released,))


def _on_renewal_confirmed(trade: WorkloadTrade, renewed: Renewed, now: Elapsed) -> TradeStep:
    """Only the answer to the newest renewal counts."""
    deal = agreement_of(trade, renewed.agreement)
    if deal is None or not deal.nonce or deal.nonce != renewed.nonce:
        return TradeStep(trade)
    lease_s = Seconds(min(renewed.lease_s, LEASE_MOST_S))
    until = Elapsed(max(deal.asked_at + lease_s, deal.lease_until))
    renew_at = max(now, deal.asked_at + _renewal_pause_s(lease_s))
    if renewed.service is ServiceState.STARTING:
        renew_at = min(renew_at, now + max(POLL_LEAST_S, (now - deal.since) / 2))
    other = renewed.service is not deal.service
    after = replace(
        deal,
        gateways=renewed.gateways,
        revoked=renewed.revoked,
        lease_s=lease_s if lease_s > 0 else deal.lease_s,
        lease_until=until,
        over_at=until,
        heard_at=deal.asked_at,
        renew_at=Elapsed(renew_at),
        service=renewed.service,
        since=now if other else deal.since,
        joules=_joules_per_inference(renewed.report) or deal.joules,
    )
    notes = (TradeNote("renewed", deal.agreement, deal.region, "", renewed.service),) if other else ()
    done = TradeStep(_with_agreement(trade, after), (), notes)
    stays = isinstance(trade.phase, Active) and trade.phase.deal.agreement == deal.agreement
    if renewed.service is ServiceState.STOPPING and stays:  # its notice was lost
        notice = Notice(deal.agreement, deal.region, Code.AGREEMENT_ENDED, Seconds(max(0.0, until - now)))
        return done.plus(_on_delegate_notice(done.trade, notice, b"", now))
    return done


def _joules_per_inference(report: ServiceReport) -> float | None:
    """Joules per inference to two digits, because every change of the value causes a new step."""
    served = report.requests - report.errors
    each = report.joules / served if served > 0 else 0.0
    return float(f"{each:.2g}") if math.isfinite(each) and each > 0 else None


def _on_renewal_failed(trade: WorkloadTrade, event: RenewalFailed, now: Elapsed) -> TradeStep:
    deal = agreement_of(trade, event.agreement)
    if deal is None:
        return TradeStep(trade)
    if event.refusal is not None and event.refusal.code in (Code.AGREEMENT_UNKNOWN, Code.AGREEMENT_ENDED):
        if isinstance(trade.phase, Active) and trade.phase.deal.agreement == event.agreement:
            return _breach(trade, deal, now, str(event.refusal), stays=None)
        gone = tuple(each for each in trade.leaving if each.deal.agreement == event.agreement)
        kept = tuple(each for each in trade.leaving if each.deal.agreement != event.agreement)
        return TradeStep(replace(trade, leaving=kept), (), tuple(_end_note(each) for each in gone))
    if event.nonce != deal.nonce:
        return TradeStep(trade)
    sooner = Elapsed(min(deal.renew_at, now + min(RETRY_S, deal.lease_s / 12)))
    return TradeStep(_with_agreement(trade, replace(deal, renew_at=sooner)))


def _on_delegate_notice(trade: WorkloadTrade, notice: Notice, evidence: bytes, now: Elapsed) -> TradeStep:
    """It serves until the notice ends, or until something else serves."""
    ends_at = Elapsed(now + min(notice.ends_s, LEASE_MOST_S + NOTICE_S))
    phase = trade.phase
    if isinstance(phase, Active) and phase.deal.agreement == notice.agreement:
        noted = TradeNote(
            "noticed", notice.agreement, notice.by, notice.code, f"in {show_seconds(notice.ends_s)}", evidence
        )
        leaving = LeavingAgreement(phase.deal, LeavingStage.SERVING, notice.code, True, ends_at, now)
        after = replace(_with_pause(trade, now, Refusal(notice.code)), leaving=(*trade.leaving, leaving))
        return TradeStep(after, (_record_delivery(phase.deal, breached=False),), (noted,))
    leaving_now = tuple(
        replace(each, ends_at=Elapsed(min(each.ends_at, ends_at))) if each.deal.agreement == notice.agreement else each
        for each in trade.leaving
    )
    return TradeStep(replace(trade, leaving=leaving_now))


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


def _on_comparison(trade: WorkloadTrade, event: ComparisonDone, now: Elapsed) -> TradeStep:
    phase = trade.phase
    if (
        not isinstance(phase, Active)
        or phase.deal.agreement != event.agreement
        or event.terms.request_hash != phase.asked
    ):
        return TradeStep(trade)
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


def _with_agreement(trade: WorkloadTrade, deal: OriginAgreement) -> WorkloadTrade:
    phase = trade.phase
    if isinstance(phase, Active) and phase.deal.agreement == deal.agreement:
        return replace(trade, phase=replace(phase, deal=deal))
    leaving = tuple(
        replace(each, deal=deal) if each.deal.agreement == deal.agreement else each for each in trade.leaving
    )
    return replace(trade, leaving=leaving)


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
