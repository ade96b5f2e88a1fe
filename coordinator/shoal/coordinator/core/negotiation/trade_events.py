"""What each phase of a trade makes of an event.

Each phase names the events that it waits for; `_step_leaving` has what is the same in all of them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final, TypeAlias

from shoal.coordinator.core.negotiation.message_rules import gateways_to_call
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
    RegionAnswer,
    ReleaseConfirmed,
    ReleaseFailed,
    RenewalConfirmed,
    RenewalFailed,
    RoundAnswered,
    SendAward,
    Solicit,
    Soliciting,
    TradeEvent,
    TradeNote,
    TradeStep,
    Withdrawing,
    WorkloadTrade,
)
from shoal.coordinator.core.negotiation.offer_selection import (
    OfferSelection,
    choose,
    gain_of,
    gain_of_local,
)
from shoal.coordinator.core.negotiation.trade_times import (
    ANSWER_GRACE_S,
    ANSWER_S,
    CALL_S,
    HOLD_MOST_S,
    LEASE_MOST_S,
    LOCAL_STABLE_S,
    LOST_S,
    NOTICE_S,
    POLL_LEAST_S,
    RETRY_S,
    ROUTE_PROPAGATION_S,
    SWITCH_GAIN_LEAST,
)
from shoal.coordinator.core.negotiation.trade_transitions import (
    answer_note,
    begin_return,
    breach,
    cooldown_end,
    describe_offer,
    end_note,
    end_round,
    for_single_region,
    held_offers,
    is_taken,
    leave,
    leaving_agreement,
    make_digest,
    new_release,
    record_delivery,
    renewal_pause_s,
    sooner,
    with_leaving_agreement,
    with_pause,
    with_relaxation,
)
from shoal.types.agreement import Award, Grant, Notice, Renewed, ServiceReport, ServiceState
from shoal.types.codes import Code, Refusal
from shoal.types.units import (
    Elapsed,
    Seconds,
    show_seconds,
)
from shoal.types.workload import DelegationMode

ANSWERS_KEPT: Final = 32
"""Regions of which a workload without a place says what they answered."""
ANSWER_TEXT_MOST: Final = 200
"""Characters that are kept of each part of such an answer."""
_ALL_FAILING: Final = "no request is answered there, though it says that it serves"

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


def step_event(
    trade: WorkloadTrade, event: TradeEvent, now: Elapsed, fresh: str, origin: str, term_s: Seconds
) -> TradeStep:
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
            return TradeStep(replace(trade, phase=replace(phase, retry_at=sooner(phase.retry_at, now))))
        case AwardFailed(agreement=phase.award.agreement, refusal=Refusal() as refusal):
            released = TradeNote("released", event.agreement, phase.offer.region, refusal.code, str(refusal))
            return TradeStep(with_pause(trade, now, refusal), (), (released,))
        case _:
            return _step_leaving(trade, event, now, origin)


def _step_withdrawing(trade: WorkloadTrade, phase: Withdrawing, event: _Result, now: Elapsed, origin: str) -> TradeStep:
    match event:
        case ReleaseConfirmed(bid=phase.offer.id):
            released = TradeNote("released", phase.agreement, phase.offer.region, phase.code)
            return TradeStep(with_pause(trade, now, Refusal(phase.code)), (), (released,))
        case ReleaseFailed(bid=phase.offer.id):
            return TradeStep(replace(trade, phase=replace(phase, retry_at=sooner(phase.retry_at, now))))
        case _:
            return _step_leaving(trade, event, now, origin)


def _step_active(trade: WorkloadTrade, phase: Active, event: _Result, now: Elapsed, origin: str) -> TradeStep:
    agreement = phase.agreement
    match event:
        case RenewalConfirmed(renewal=Renewed(agreement=agreement.id) as renewed):
            return _on_renewal_confirmed(trade, phase, renewed, now)
        case RenewalFailed(agreement=agreement.id):
            if (said := event.refusal) is not None and said.code in _AGREEMENT_GONE:
                return breach(trade, agreement, now, str(said), stays=None)
            return TradeStep(replace(trade, phase=replace(phase, agreement=_renew_sooner(agreement, event.nonce, now))))
        case DelegateNotice(notice=Notice(agreement=agreement.id) as notice):
            return _on_delegate_notice(trade, phase, notice, event.evidence, now)
        case ComparisonDone(agreement=agreement.id) if event.terms.request_hash == phase.asked:
            return _on_comparison(trade, phase, event, now)
        case _:
            return _step_leaving(trade, event, now, origin)


def _step_leaving(trade: WorkloadTrade, event: _Result, now: Elapsed, origin: str) -> TradeStep:
    """What the phase does not wait for: results that come again or too late, and agreements under notice."""
    leaving = trade.leaving
    match event:
        case RoundAnswered(answers=answers):
            late = tuple(new_release(each, origin) for each in held_offers(answers) if not is_taken(trade, each))
            return TradeStep(trade, late)
        case RenewalConfirmed(renewal=renewed):
            mine = leaving_agreement(trade, renewed.agreement)
            if mine is None or not _answers_newest(mine.agreement, renewed):
                return TradeStep(trade)
            extended = _with_extended_lease(mine.agreement, renewed, now)
            return TradeStep(with_leaving_agreement(trade, extended), (), _service_notes(mine.agreement, extended))
        case RenewalFailed(agreement=agreement, refusal=Refusal(code=code)) if code in _AGREEMENT_GONE:
            gone = tuple(each for each in leaving if each.agreement.id == agreement)
            kept = tuple(each for each in leaving if each.agreement.id != agreement)
            return TradeStep(replace(trade, leaving=kept), (), tuple(end_note(each) for each in gone))
        case RenewalFailed(agreement=agreement, nonce=nonce):
            mine = leaving_agreement(trade, agreement)
            if mine is None:
                return TradeStep(trade)
            return TradeStep(with_leaving_agreement(trade, _renew_sooner(mine.agreement, nonce, now)))
        case DelegateNotice(notice=notice):
            ends_at = _notice_end(notice, now)
            leaving = tuple(
                replace(each, ends_at=Elapsed(min(each.ends_at, ends_at)))
                if each.agreement.id == notice.agreement
                else each
                for each in leaving
            )
            return TradeStep(replace(trade, leaving=leaving))
        case NoticeConfirmed():
            return _on_notice_confirmed(trade, event)
        case NoticeFailed(agreement=agreement):
            leaving = tuple(
                replace(each, next_at=sooner(each.next_at, now))
                if each.agreement.id == agreement and each.stage is not LeavingStage.SETTLING
                else each
                for each in leaving
            )
            return TradeStep(replace(trade, leaving=leaving))
        case AwardGranted() | AwardFailed() | ReleaseConfirmed() | ReleaseFailed() | ComparisonDone():
            return TradeStep(trade)


def _on_delegation_demand(
    trade: WorkloadTrade, demand: DelegationDemand, now: Elapsed, fresh: str, term_s: Seconds
) -> TradeStep:
    changed = demand.request_hash != trade.asked and demand.need is not DelegationNeed.NOTHING
    if changed:
        trade = replace(trade, asked=demand.request_hash, tries=0, said="")
    done = _apply_demand(trade, demand, now, fresh, term_s, changed=changed)
    done = done.plus(_breach_failing(done.trade, demand))
    return replace(done, trade=_unroute_leaving(done.trade, demand, now))


def _apply_demand(
    trade: WorkloadTrade, demand: DelegationDemand, now: Elapsed, fresh: str, term_s: Seconds, *, changed: bool
) -> TradeStep:
    """changed: other documents ask now, so that a pause is over."""
    match trade.phase:
        case IdleTrade() as phase:
            if changed and phase.until > now:
                phase = replace(phase, until=now)
                trade = replace(trade, phase=phase)
            return _apply_demand_to_idle(trade, phase, demand, now, fresh)
        case Soliciting() | Awarding() | Withdrawing():
            return TradeStep(trade)  # its result is judged by the need at that time
        case Active() as phase:
            return _apply_demand_to_active(trade, phase, demand, now, fresh, term_s)


def _apply_demand_to_idle(
    trade: WorkloadTrade, phase: IdleTrade, demand: DelegationDemand, now: Elapsed, fresh: str
) -> TradeStep:
    due = now >= phase.until and (
        demand.need in (DelegationNeed.SHORT, DelegationNeed.MOVED)
        or (demand.need is DelegationNeed.BETTER and now >= trade.better_at)
    )
    if not due:
        return TradeStep(trade)
    until = Elapsed(now + ANSWER_S + ANSWER_GRACE_S)
    asking = Soliciting(fresh, 1, demand.request_hash, "", demand.need, now, until, demand.to)
    after = replace(trade, phase=asking, better_at=cooldown_end(trade, now, fresh))
    solicited = TradeNote("solicited", fresh, "", "", demand.need)
    solicit = Solicit(fresh, 1, demand.request_hash, None, demand.to)
    return TradeStep(after, (solicit,), () if trade.said else (solicited,))


def _apply_demand_to_active(
    trade: WorkloadTrade, phase: Active, demand: DelegationDemand, now: Elapsed, fresh: str, term_s: Seconds
) -> TradeStep:
    if demand.need is DelegationNeed.NOTHING:
        return leave(trade, phase.agreement, now, Code.AGREEMENT_ENDED, "it is not to be delegated any more")
    if demand.request_hash != phase.asked:
        return leave(trade, phase.agreement, now, Code.AGREEMENT_ENDED, "its documents changed")
    if demand.is_failing and now - phase.agreement.heard_at >= LOST_S:
        left = Seconds(max(0.0, phase.agreement.over_at - now))
        return breach(trade, phase.agreement, now, "neither it nor its gateways answer", stays=left)
    if demand.failing_agreement == phase.agreement.id and phase.agreement.is_serving:
        return breach(trade, phase.agreement, now, _ALL_FAILING, stays=Seconds(max(0.0, phase.agreement.over_at - now)))
    if demand.need is DelegationNeed.HOME or (
        demand.need is DelegationNeed.MOVED and demand.to != phase.agreement.region
    ):
        return leave(trade, phase.agreement, now, Code.AGREEMENT_ENDED, "it moves")
    if demand.need in (DelegationNeed.MOVED, DelegationNeed.HELD):
        held = replace(phase, home_since=None, stays=phase.stays or demand.is_permanent)
        return TradeStep(replace(trade, phase=held))
    since = None if demand.need is DelegationNeed.SHORT else phase.home_since if phase.home_since is not None else now
    phase = replace(phase, home_since=since, returns="" if demand.need is DelegationNeed.SHORT else phase.returns)
    if demand.need is DelegationNeed.CONTENT and since is not None and now - since >= LOCAL_STABLE_S:
        return begin_return(
            trade, phase, now, Code.AGREEMENT_ENDED, "home has a place for it again", live=demand.by_live_move
        )
    if now >= phase.term_at and term_s > 0:
        after = replace(
            trade, phase=replace(phase, term_at=Elapsed(now + term_s)), better_at=cooldown_end(trade, now, fresh)
        )
        return TradeStep(after, (Compare(phase.agreement.id, with_other_regions=True),))
    trade = replace(trade, phase=phase)
    if demand.need is DelegationNeed.BETTER and now >= trade.better_at:
        after = replace(trade, better_at=cooldown_end(trade, now, fresh))
        return TradeStep(after, (Compare(phase.agreement.id, with_other_regions=False),))
    return TradeStep(trade)


def _breach_failing(trade: WorkloadTrade, demand: DelegationDemand) -> TradeStep:
    """Marks agreements under notice that answer no request as breached, so that the local region does not wait for
    them."""
    broken = [
        each
        for each in trade.leaving
        if each.agreement.id == demand.failing_agreement
        and each.code is not Code.BREACHED
        and each.agreement.is_serving
    ]
    leaving = tuple(replace(each, code=Code.BREACHED) if each in broken else each for each in trade.leaving)
    notes = tuple(
        TradeNote("breached", each.agreement.id, each.agreement.region, Code.BREACHED, _ALL_FAILING) for each in broken
    )
    return TradeStep(
        replace(trade, leaving=leaving), tuple(record_delivery(each.agreement, breached=True) for each in broken), notes
    )


def _unroute_leaving(trade: WorkloadTrade, demand: DelegationDemand, now: Elapsed) -> WorkloadTrade:
    """Takes leaving agreements out of the routes once something else serves, or nothing is to serve."""
    agreement = trade.active_agreement
    replaced = demand.is_served_locally or (
        agreement is not None and agreement.is_serving and now < agreement.lease_until
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


def _on_answers(
    trade: WorkloadTrade, phase: Soliciting, event: RoundAnswered, now: Elapsed, origin: str, term_s: Seconds
) -> TradeStep:
    offers = held_offers(event.answers)
    if event.terms is None or event.terms.request_hash != phase.asked:
        gone = Refusal(Code.NO_BID, "its documents changed meanwhile", "bids for what they ask now")
        after = replace(trade, phase=IdleTrade(now, gone))
        return TradeStep(after, tuple(new_release(each, origin) for each in offers))
    terms = event.terms if phase.need is not DelegationNeed.MOVED else for_single_region(event.terms, phase.to)
    choice = choose(event.answers, with_relaxation(terms, phase), since_s=now - phase.asked_at)
    notes = tuple(answer_note(phase, row.answer, row.refusal) for row in choice.ranked)
    losers = [each for each in offers if choice.winner is None or each.id != choice.winner.id]
    releases = tuple(new_release(each, origin) for each in losers)
    if choice.winner is None:
        return TradeStep(trade, releases).plus(_without_winner(trade, phase, choice, event.unheard, notes, now))
    winner = choice.winner
    agreement = "g-" + make_digest(origin, phase.solicitation, winner.id)
    award = Award(agreement, phase.solicitation, winner.id, origin, trade.workload, term_s, ())
    until = Elapsed(phase.asked_at + min(winner.hold_s, HOLD_MOST_S))
    awarding = Awarding(winner, award, phase.asked, until, Elapsed(now + CALL_S), event.at)
    after = replace(trade, phase=awarding, said="", answers=())
    evidence = event.evidence.get(winner.region, b"")
    awarded = TradeNote("awarded", agreement, winner.region, "", describe_offer(winner), evidence)
    return TradeStep(after, (SendAward(winner.region, award), *releases), (*notes, awarded))


def _without_winner(
    trade: WorkloadTrade, phase: Soliciting, choice: OfferSelection, unheard: Mapping[str, Refusal],
    notes: tuple[TradeNote, ...], now: Elapsed,
) -> TradeStep:  # fmt: skip
    """Starts a second round with a relaxation, or ends the round. Equal results are not logged again."""
    step = choice.relaxation
    if step is not None and phase.round == 1:
        asking = replace(
            phase, round=2, relaxed=step.change, asked_at=now, until=Elapsed(now + ANSWER_S + ANSWER_GRACE_S)
        )
        solicited = TradeNote("solicited", phase.solicitation, "", "", f"round 2, relaxed: {step.change}")
        asked = (Solicit(phase.solicitation, 2, phase.asked, step, phase.to),)
        return TradeStep(replace(trade, phase=asking), asked, () if trade.said else (*notes, solicited))
    said = make_digest(
        *sorted(f"{row.answer.region} {row.refusal.code if row.refusal else ''}" for row in choice.ranked)
    )
    refusal = choice.refusal or Refusal(Code.NO_BID)
    answers = [*((row.answer.region, row.refusal or refusal) for row in choice.ranked), *unheard.items()]
    return end_round(trade, phase, now, refusal, said, notes, _brief_answers(answers))


def _brief_answers(answers: Iterable[tuple[str, Refusal]]) -> tuple[RegionAnswer, ...]:
    """As they are stored: what others wrote may be long."""

    def brief(text: str) -> str:
        return text[:ANSWER_TEXT_MOST]

    return tuple(
        RegionAnswer(region, Refusal(why.code, brief(why.found), brief(why.asked), brief(why.remedy)))
        for region, why in islice(answers, ANSWERS_KEPT)
    )


def _on_granted(trade: WorkloadTrade, phase: Awarding, event: AwardGranted, now: Elapsed, term_s: Seconds) -> TradeStep:
    grant = event.grant
    lease_s = Seconds(min(grant.lease_s, LEASE_MOST_S))
    until = Elapsed(event.asked_at + lease_s)
    agreement = OriginAgreement(
        id=grant.agreement,
        offer=phase.offer,
        gateways=gateways_to_call(grant.gateways),
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
        awarded_at=phase.awarded_at,
    )
    after = replace(trade, phase=Active(agreement, phase.asked, Elapsed(now + term_s)), tries=0)
    granted = TradeNote(
        "granted", grant.agreement, agreement.region, "", f"lease {show_seconds(lease_s)}", event.evidence
    )
    return TradeStep(after, (), (granted,))


def _on_renewal_confirmed(trade: WorkloadTrade, phase: Active, renewed: Renewed, now: Elapsed) -> TradeStep:
    before = phase.agreement
    if not _answers_newest(before, renewed):
        return TradeStep(trade)
    agreement = _with_extended_lease(before, renewed, now)
    phase = replace(phase, agreement=agreement)
    done = TradeStep(replace(trade, phase=phase), (), _service_notes(before, agreement))
    if renewed.service is not ServiceState.STOPPING:
        return done
    # Its notice was lost.
    notice = Notice(agreement.id, agreement.region, Code.AGREEMENT_ENDED, Seconds(max(0.0, agreement.over_at - now)))
    return done.plus(_on_delegate_notice(done.trade, phase, notice, b"", now))


def _answers_newest(agreement: OriginAgreement, renewed: Renewed) -> bool:
    """Only the answer to the newest renewal counts."""
    return bool(agreement.nonce) and agreement.nonce == renewed.nonce


def _with_extended_lease(agreement: OriginAgreement, renewed: Renewed, now: Elapsed) -> OriginAgreement:
    lease_s = Seconds(min(renewed.lease_s, LEASE_MOST_S))
    until = Elapsed(max(agreement.asked_at + lease_s, agreement.lease_until))
    renew_at = max(now, agreement.asked_at + renewal_pause_s(lease_s))
    # What served once is short, not starting: a delegate of an older version forgets over a restart that it served.
    has_stopped = agreement.is_serving and renewed.service is ServiceState.STARTING
    service = ServiceState.SHORT if has_stopped else renewed.service
    if service is ServiceState.STARTING:
        renew_at = min(renew_at, now + max(POLL_LEAST_S, (now - agreement.since) / 2))
    return replace(
        agreement,
        gateways=gateways_to_call(renewed.gateways),
        revoked=renewed.revoked,
        lease_s=lease_s if lease_s > 0 else agreement.lease_s,
        lease_until=until,
        over_at=until,
        heard_at=agreement.asked_at,
        renew_at=Elapsed(renew_at),
        service=service,
        since=now if service is not agreement.service else agreement.since,
        joules=_joules_per_inference(renewed.report) or agreement.joules,
    )


def _service_notes(before: OriginAgreement, after: OriginAgreement) -> tuple[TradeNote, ...]:
    if after.service is before.service:
        return ()
    return (TradeNote("renewed", after.id, after.region, "", after.service),)


def _renew_sooner(agreement: OriginAgreement, nonce: str, now: Elapsed) -> OriginAgreement:
    """After a renewal that failed; unchanged if it was not the newest."""
    if nonce != agreement.nonce:
        return agreement
    return replace(agreement, renew_at=Elapsed(min(agreement.renew_at, now + min(RETRY_S, agreement.lease_s / 12))))


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
    leaving = LeavingAgreement(phase.agreement, LeavingStage.SERVING, notice.code, True, _notice_end(notice, now), now)
    after = replace(with_pause(trade, now, Refusal(notice.code)), leaving=(*trade.leaving, leaving))
    return TradeStep(after, (record_delivery(phase.agreement, breached=False),), (noted,))


def _notice_end(notice: Notice, now: Elapsed) -> Elapsed:
    return Elapsed(now + min(notice.ends_s, LEASE_MOST_S + NOTICE_S))


def _on_notice_confirmed(trade: WorkloadTrade, event: NoticeConfirmed) -> TradeStep:
    kept, notes = list[LeavingAgreement](), list[TradeNote]()
    for each in trade.leaving:
        if each.agreement.id != event.agreement:
            kept.append(each)
        elif each.stage is LeavingStage.ENDING and event.ends_s <= 0:
            notes.append(end_note(each))
        else:
            kept.append(replace(each, told=each.told or each.stage is LeavingStage.SERVING))
    return TradeStep(replace(trade, leaving=tuple(kept)), (), tuple(notes))


def _on_comparison(trade: WorkloadTrade, phase: Active, event: ComparisonDone, now: Elapsed) -> TradeStep:
    offer, terms = phase.agreement.offer, event.terms
    gain = gain_of_local(offer, terms)
    if terms.delegation.mode is DelegationMode.WHEN_BETTER and gain > 0 and gain >= terms.delegation.margin:
        return begin_return(
            trade, phase, now, Code.BETTER_ELSEWHERE, f"home is {gain:.1%} better", live=event.by_live_move
        )
    if event.best is not None and event.best.region != offer.region:
        better = gain_of(event.best, offer, terms)
        if better >= max(SWITCH_GAIN_LEAST, terms.delegation.margin):
            after = replace(trade, better_at=now)
            found = f"{event.best.region} is {better:.1%} better"
            return leave(after, phase.agreement, now, Code.BETTER_ELSEWHERE, found)
    return TradeStep(trade)
