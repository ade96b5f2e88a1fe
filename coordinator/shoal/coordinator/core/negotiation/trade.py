"""The origin's side of a trade: one machine for each workload, from what it needs to an agreement's end.

At most one award of a workload is open: awarded, being withdrawn, or an agreement that nobody has ended. One that was
noticed serves on beside its successor (`leaving`), so that traffic moves before it stops.

Elapsed times mean something within one process only: what a restart finds goes through `restarted`.
"""

import hashlib
import math
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.negotiation.choice import Choice, Terms, choose, gain_of, gain_of_home
from shoal.coordinator.core.negotiation.model import (
    Account,
    Active,
    Answered,
    AwardFailed,
    Awarding,
    Compare,
    Compared,
    Deal,
    Effect,
    Event,
    Granted,
    Leaving,
    Need,
    Noted,
    NoticedBy,
    NoticeFailed,
    NoticeTaken,
    Phase,
    Released,
    ReleaseFailed,
    RenewalFailed,
    RenewedBy,
    Resting,
    SendAward,
    SendNotice,
    SendRelease,
    SendRenewal,
    Solicit,
    Soliciting,
    Stage,
    Stepped,
    Trade,
    Wish,
    Withdrawing,
)
from shoal.types.agreement import Award, Notice, Release, Renewed, Service, ServiceReport
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
"""What bidders are given for an answer."""
PATIENCE_S: Final = Seconds(3.0)
"""Beyond `ANSWER_S`, until a round without any outcome counts as unanswered."""
CALL_S: Final = Seconds(2.0)
"""A call to another region is repeated when nothing was heard of it for so long."""
RETRY_S: Final = Seconds(0.25)
"""Likewise, when it is known to have failed."""
HOLD_MOST_S: Final = Seconds(60.0)
LEASE_MOST_S: Final = Seconds(60.0)
"""What is held or granted for longer counts as this long; the delegate's side grants no more."""
ALLOWANCE_S: Final = Seconds(5.0)
"""The delegate's, beyond its lease."""
LONGEST_S: Final = Seconds(HOLD_MOST_S + LEASE_MOST_S + 2 * ALLOWANCE_S)
"""An award that was sent for the last time so long ago, and never renewed, holds nothing any more."""
RENEW_S: Final = Seconds(1.5)
"""Between renewals, or a third of the lease where that is less: they are also what tells that a region is lost."""
SILENT_S: Final = Seconds(4.0)
"""A delegate that answered no renewal for so long is not relied upon: home makes ready, if it can."""
LOST_S: Final = Seconds(3.0)
"""A delegate that was silent for so long, and whose gateways fail as well, is lost: silence alone may be of its
coordinator, and what it runs may serve on."""
SEQUENCES: Final = 1000
"""Renewals are numbered on from the next multiple of this after a restart: a number need not be stored to be used."""
CONFIRM_S: Final = Seconds(2.0)
"""After a restart an agreement's routes stay for this long; by then its delegate must have answered."""
NOTICE_S: Final = Seconds(60.0)
SETTLE_S: Final = Seconds(2.0)
"""Between leaving the routes and the end of an agreement: the time that routes take to reach every gateway."""
POLL_LEAST_S: Final = Seconds(0.1)
"""First pause between renewals while the delegate is getting ready; they grow with its age."""
START_S: Final = Seconds(60.0)
"""A delegate that does not serve after this, and three times the load time of its bid, is in breach."""
SHORT_S: Final = Seconds(30.0)
"""Likewise one that serves short of what was agreed for so long."""
HOME_STABLE_S: Final = Seconds(60.0)
"""A workload that was delegated because home had no place comes back when home has had one for so long."""
MOVE_LEAST: Final = 0.10
"""At the end of its term an agreement yields to another region's offer that is better by this share, or the margin."""
COOLDOWN_S: Final = Seconds(60.0)
"""Between two attempts to better what runs; jittered upwards by a quarter."""
REST_LEAST_S: Final = Seconds(1.0)
REST_MOST_S: Final = Seconds(60.0)
"""Pauses after a round that nobody could meet double from the one to the other."""

UNMET: Final = "no request is answered there, though it says that it serves"

_ANY: Final = Elapsed(0.0)
_SERVES: Final = (Service.READY, Service.STOPPING)
"""What a delegate says that could be sent requests."""


def step(trade: Trade, event: Event, now: Elapsed, fresh: str, *, origin: str, term_s: Seconds) -> Stepped:
    """fresh: a name never used before ([a-z0-9-], at most 40 characters). origin: this region. term_s: asked for."""
    done = _timed(trade, now, fresh, origin)
    done = done.plus(_step(done.trade, event, now, fresh, origin, term_s))
    return done.plus(_timed(done.trade, now, fresh, origin))


def restarted(trade: Trade, at: Elapsed, now: Elapsed) -> Trade:
    """What an earlier process left at its elapsed time `at`. How long nobody watched is not known: so bids that were
    asked for or awarded are not relied upon, and agreements have to show that they are still held."""

    def moved(time: Elapsed) -> Elapsed:
        return Elapsed(time + now - at)

    def unproven(deal: Deal) -> Deal:
        return replace(
            deal,
            lease_until=Elapsed(now + CONFIRM_S),
            over_at=Elapsed(now + deal.lease_s),
            sequence=(deal.sequence // SEQUENCES + 1) * SEQUENCES,
            nonce="",
            asked_at=now,
            heard_at=now,
            renew_at=now,
            since=now,
        )

    phase: Phase
    match trade.phase:
        case Resting():
            phase = replace(trade.phase, until=moved(trade.phase.until))
        case Soliciting():
            phase = Resting(now)
        case Awarding(offer=offer, award=award):
            phase = Withdrawing(offer, award.agreement, Elapsed(now + LONGEST_S), now, Code.PEER_UNREACHABLE)
        case Withdrawing():
            phase = replace(trade.phase, until=Elapsed(now + LONGEST_S), retry_at=now)
        case Active():
            active = trade.phase
            phase = replace(active, deal=unproven(active.deal), home_since=None, term_at=moved(active.term_at))
    leaving = tuple(
        replace(each, deal=unproven(each.deal), ends_at=moved(each.ends_at), next_at=now) for each in trade.leaving
    )
    return replace(trade, phase=phase, leaving=leaving, better_at=moved(trade.better_at))


def durable(trade: Trade) -> Trade:
    """A trade without what `restarted` does not rely on: when this is as it was, nothing need be stored."""

    def plain(deal: Deal) -> Deal:
        return replace(
            deal,
            lease_until=_ANY,
            over_at=_ANY,
            sequence=deal.sequence // SEQUENCES,
            nonce="",
            asked_at=_ANY,
            heard_at=_ANY,
            renew_at=_ANY,
            since=_ANY,
            joules=None,
        )

    phase = trade.phase
    match phase:
        case Resting() | Soliciting():
            pass
        case Awarding() | Withdrawing():
            phase = replace(phase, retry_at=_ANY)
        case Active():
            phase = replace(phase, deal=plain(phase.deal), home_since=None)
    leaving = tuple(replace(each, deal=plain(each.deal), told=False, next_at=_ANY) for each in trade.leaving)
    idle = trade.is_over and not trade.tries
    return replace(trade, phase=phase, leaving=leaving, asked="" if idle else trade.asked, said="")


def wake_at(trade: Trade, need: Need) -> Elapsed:
    """When time alone changes something, while the wish stays as it is; inf: never."""
    times = [time for each in trade.leaving for time in _leaving_times(each)]
    phase = trade.phase
    match phase:
        case Resting(until=until):
            times += [until] if need in (Need.SHORT, Need.MOVED) else []
            times += [max(until, trade.better_at)] if need is Need.BETTER else []
        case Soliciting(until=until):
            times.append(until)
        case Awarding(until=until, retry_at=retry_at) | Withdrawing(until=until, retry_at=retry_at):
            times += [until, retry_at]
        case Active(deal=deal):
            times += [deal.renew_at, deal.over_at, phase.term_at]
            times += [trade.better_at] if need is Need.BETTER else []
            if deal.service is Service.STARTING:
                times.append(Elapsed(deal.since + START_S + 3 * deal.offer.load_s))
            if deal.service is Service.SHORT:
                times.append(Elapsed(deal.since + SHORT_S))
            if need is Need.CONTENT and phase.home_since is not None:
                times.append(Elapsed(phase.home_since + HOME_STABLE_S))
    return min(times, default=Elapsed(math.inf))


def _leaving_times(each: Leaving) -> tuple[Elapsed, ...]:
    serving = (each.deal.renew_at, each.deal.over_at) if each.stage is Stage.SERVING else ()
    told = () if each.told and each.stage is not Stage.SETTLING else (each.next_at,)
    return (each.ends_at, *serving, *told)


def open_award(trade: Trade) -> str:
    """The agreement that was awarded and not ended; empty where there is none. Never more than one."""
    match trade.phase:
        case Resting() | Soliciting():
            return ""
        case Awarding(award=award):
            return award.agreement
        case Withdrawing(agreement=agreement):
            return agreement
        case Active(deal=deal):
            return deal.agreement


def is_relied_on(trade: Trade, now: Elapsed) -> bool:
    """Nothing is wanted at home: another region runs it, or is to, and answers."""
    return isinstance(trade.phase, Active) and now - trade.phase.deal.heard_at < SILENT_S


def serving(trade: Trade, now: Elapsed) -> tuple[Deal, ...]:
    """Agreements whose delegates may be sent requests now: the one that shall stay first."""
    deals = [trade.phase.deal] if isinstance(trade.phase, Active) else []
    deals += [each.deal for each in trade.leaving if each.stage is Stage.SERVING]
    return tuple(deal for deal in deals if deal.serves and now < deal.lease_until)


def deal_of(trade: Trade, agreement: str) -> Deal | None:
    """What is known of an agreement that is not over."""
    deals = [trade.phase.deal] if isinstance(trade.phase, Active) else []
    deals += [each.deal for each in trade.leaving]
    return next((deal for deal in deals if deal.agreement == agreement), None)


# -- time ------------------------------------------------------------------------------------------------------------


def _timed(trade: Trade, now: Elapsed, fresh: str, origin: str) -> Stepped:
    """What is due by the clock alone."""
    done = Stepped(trade)
    phase = trade.phase
    if isinstance(phase, Soliciting) and now >= phase.until:
        refusal = Refusal(Code.NO_BID, "no region answered in time", f"answers within {show_seconds(ANSWER_S)}")
        done = done.plus(_rest(trade, phase, now, refusal, "nobody"))
    elif isinstance(phase, Awarding) and now >= phase.until:
        done = done.plus(_withdraw(trade, phase, now, origin, Code.HOLD_EXPIRED))
    elif isinstance(phase, Awarding) and now >= phase.retry_at:
        again = replace(trade, phase=replace(phase, retry_at=Elapsed(now + CALL_S)))
        done = done.plus(Stepped(again, (SendAward(phase.offer.region, phase.award),)))
    elif isinstance(phase, Withdrawing) and now >= phase.until:
        expired = Noted("expired", phase.agreement, phase.offer.region, phase.code)
        done = done.plus(Stepped(_resting(trade, now, Refusal(phase.code)), (), (expired,)))
    elif isinstance(phase, Withdrawing) and now >= phase.retry_at:
        again = replace(trade, phase=replace(phase, retry_at=Elapsed(now + CALL_S)))
        done = done.plus(Stepped(again, (_release(phase.offer, origin),)))
    elif isinstance(phase, Active):
        done = done.plus(_timed_active(trade, phase, now, fresh, origin))
    kept = list[Leaving]()
    for each in done.trade.leaving:
        left, effects, notes = _timed_leaving(each, now, fresh, origin)
        done = Stepped(done.trade, (*done.effects, *effects), (*done.notes, *notes))
        kept += [left] if left is not None else []
    return replace(done, trade=replace(done.trade, leaving=tuple(kept)))


def _timed_active(trade: Trade, phase: Active, now: Elapsed, fresh: str, origin: str) -> Stepped:
    deal = phase.deal
    if now >= deal.over_at:
        return _breach(trade, deal, now, f"not renewed for {show_seconds(now - deal.asked_at)}", stays=Seconds(0.0))
    if deal.service is Service.STARTING and now - deal.since >= START_S + 3 * deal.offer.load_s:
        return _breach(trade, deal, now, f"does not serve after {show_seconds(now - deal.since)}", stays=Seconds(0.0))
    if deal.service is Service.SHORT and now - deal.since >= SHORT_S:
        return _breach(trade, deal, now, f"serves short for {show_seconds(now - deal.since)}", stays=NOTICE_S)
    if now >= deal.renew_at:
        deal, effect = _renewing(deal, now, fresh)
        return Stepped(replace(trade, phase=replace(phase, deal=deal)), (effect,))
    return Stepped(trade)


def _timed_leaving(
    each: Leaving, now: Elapsed, fresh: str, origin: str
) -> tuple[Leaving | None, tuple[Effect, ...], tuple[Noted, ...]]:
    deal = each.deal
    if now >= each.ends_at or (each.stage is Stage.SERVING and now >= deal.over_at):
        return None, (), (_ended(each),)
    if each.stage is Stage.SETTLING and now >= each.next_at:
        each = replace(each, stage=Stage.ENDING, told=False, next_at=now)
    effects: tuple[Effect, ...] = ()
    if each.stage is not Stage.SETTLING and not each.told and now >= each.next_at:
        ends_s = Seconds(each.ends_at - now if each.stage is Stage.SERVING else 0.0)
        notice = Notice(deal.agreement, origin, each.code, ends_s)
        effects, each = (SendNotice(deal.region, notice),), replace(each, next_at=Elapsed(now + CALL_S))
    if each.stage is Stage.SERVING and now >= deal.renew_at:
        deal, renewal = _renewing(deal, now, fresh)
        effects, each = (*effects, renewal), replace(each, deal=deal)
    return each, effects, ()


def _renewing(deal: Deal, now: Elapsed, fresh: str) -> tuple[Deal, SendRenewal]:
    nonce = _name(fresh, deal.agreement, str(deal.sequence + 1))
    again_at = Elapsed(now + min(CALL_S, deal.lease_s / 2))
    after = replace(deal, sequence=deal.sequence + 1, nonce=nonce, asked_at=now, renew_at=again_at)
    return after, SendRenewal(deal.region, deal.agreement, after.sequence, nonce)


# -- events ----------------------------------------------------------------------------------------------------------


def _step(trade: Trade, event: Event, now: Elapsed, fresh: str, origin: str, term_s: Seconds) -> Stepped:
    match event:
        case Wish():
            return _wished(trade, event, now, fresh, term_s)
        case Answered():
            return _answered(trade, event, now, origin, term_s)
        case Granted():
            return _granted(trade, event, now, term_s)
        case AwardFailed():
            return _award_failed(trade, event, now)
        case Released(bid=bid):
            return _released(trade, bid, now)
        case ReleaseFailed(bid=bid):
            phase = trade.phase
            if isinstance(phase, Withdrawing) and phase.offer.id == bid:
                return Stepped(replace(trade, phase=replace(phase, retry_at=_sooner(phase.retry_at, now))))
            return Stepped(trade)
        case RenewedBy(renewed=renewed):
            return _renewed(trade, renewed, now)
        case RenewalFailed():
            return _renewal_failed(trade, event, now)
        case NoticedBy(notice=notice):
            return _noticed(trade, notice, event.evidence, now)
        case NoticeTaken():
            return _notice_taken(trade, event)
        case NoticeFailed(agreement=agreement):
            leaving = tuple(
                replace(each, next_at=_sooner(each.next_at, now))
                if each.deal.agreement == agreement and each.stage is not Stage.SETTLING
                else each
                for each in trade.leaving
            )
            return Stepped(replace(trade, leaving=leaving))
        case Compared():
            return _compared(trade, event, now)


def _wished(trade: Trade, wish: Wish, now: Elapsed, fresh: str, term_s: Seconds) -> Stepped:
    changed = wish.asked != trade.asked and wish.need is not Need.NOTHING
    if changed:
        trade = replace(trade, asked=wish.asked, tries=0, said="")
        if isinstance(trade.phase, Resting) and trade.phase.until > now:
            trade = replace(trade, phase=replace(trade.phase, until=now))
    done = _wished_phase(trade, wish, now, fresh, term_s)
    done = done.plus(_unmet(done.trade, wish))
    return replace(done, trade=_make_way(done.trade, wish, now))


def _wished_phase(trade: Trade, wish: Wish, now: Elapsed, fresh: str, term_s: Seconds) -> Stepped:
    phase = trade.phase
    match phase:
        case Resting():
            due = now >= phase.until and (
                wish.need in (Need.SHORT, Need.MOVED) or (wish.need is Need.BETTER and now >= trade.better_at)
            )
            if not due:
                return Stepped(trade)
            until = Elapsed(now + ANSWER_S + PATIENCE_S)
            asking = Soliciting(fresh, 1, wish.asked, "", wish.need, now, until, wish.to)
            after = replace(trade, phase=asking, better_at=_cooled(trade, now, fresh))
            solicited = Noted("solicited", fresh, "", "", wish.need)
            solicit = Solicit(fresh, 1, wish.asked, None, wish.to)
            return Stepped(after, (solicit,), () if trade.said else (solicited,))
        case Soliciting() | Awarding() | Withdrawing():
            return Stepped(trade)  # the answers, or the grant, are judged by how things stand then
        case Active():
            return _wished_active(trade, phase, wish, now, fresh, term_s)


def _wished_active(trade: Trade, phase: Active, wish: Wish, now: Elapsed, fresh: str, term_s: Seconds) -> Stepped:
    if wish.need is Need.NOTHING:
        return _leave(trade, phase.deal, now, Code.AGREEMENT_ENDED, "it is not to be delegated any more")
    if wish.asked != phase.asked:
        return _leave(trade, phase.deal, now, Code.AGREEMENT_ENDED, "its documents changed")
    if wish.fails and now - phase.deal.heard_at >= LOST_S:
        left = Seconds(max(0.0, phase.deal.over_at - now))
        return _breach(trade, phase.deal, now, "neither it nor its gateways answer", stays=left)
    if wish.unmet == phase.deal.agreement and phase.deal.service is Service.READY:
        return _breach(trade, phase.deal, now, UNMET, stays=Seconds(max(0.0, phase.deal.over_at - now)))
    if wish.need is Need.HOME or (wish.need is Need.MOVED and wish.to != phase.deal.region):
        return _leave(trade, phase.deal, now, Code.AGREEMENT_ENDED, "it moves")
    if wish.need in (Need.MOVED, Need.HELD):
        held = replace(phase, home_since=None, stays=phase.stays or wish.stays)
        return Stepped(replace(trade, phase=held))
    since = None if wish.need is Need.SHORT else phase.home_since if phase.home_since is not None else now
    phase = replace(phase, home_since=since, returns="" if wish.need is Need.SHORT else phase.returns)
    if wish.need is Need.CONTENT and since is not None and now - since >= HOME_STABLE_S:
        return _return(trade, phase, now, Code.AGREEMENT_ENDED, "home has a place for it again", live=wish.live)
    if now >= phase.term_at and term_s > 0:
        after = replace(
            trade, phase=replace(phase, term_at=Elapsed(now + term_s)), better_at=_cooled(trade, now, fresh)
        )
        return Stepped(after, (Compare(phase.deal.agreement, abroad=True),))
    trade = replace(trade, phase=phase)
    if wish.need is Need.BETTER and now >= trade.better_at:
        after = replace(trade, better_at=_cooled(trade, now, fresh))
        return Stepped(after, (Compare(phase.deal.agreement, abroad=False),))
    return Stepped(trade)


def _unmet(trade: Trade, wish: Wish) -> Stepped:
    """What ends in good order, and answers nobody any more: home waits for nothing of it."""
    broken = [
        each
        for each in trade.leaving
        if each.deal.agreement == wish.unmet and each.code is not Code.BREACHED and each.deal.service in _SERVES
    ]
    leaving = tuple(replace(each, code=Code.BREACHED) if each in broken else each for each in trade.leaving)
    notes = tuple(Noted("breached", each.deal.agreement, each.deal.region, Code.BREACHED, UNMET) for each in broken)
    return Stepped(replace(trade, leaving=leaving), tuple(_account(each.deal, breached=True) for each in broken), notes)


def _make_way(trade: Trade, wish: Wish, now: Elapsed) -> Trade:
    """What is leaving goes out of the routes once something else serves, or nothing can or shall."""
    phase = trade.phase
    replaced = wish.home_serves or (isinstance(phase, Active) and phase.deal.serves and now < phase.deal.lease_until)
    if not replaced:
        return trade
    leaving = tuple(
        replace(each, stage=Stage.SETTLING, next_at=Elapsed(now + SETTLE_S)) if each.stage is Stage.SERVING else each
        for each in trade.leaving
    )
    return replace(trade, leaving=leaving)


def _answered(trade: Trade, event: Answered, now: Elapsed, origin: str, term_s: Seconds) -> Stepped:
    phase = trade.phase
    offers = [each for each in event.answers if isinstance(each, Offer) and each.hold_s > 0]
    asked = isinstance(phase, Soliciting) and (phase.solicitation, phase.round) == (event.solicitation, event.round)
    if not isinstance(phase, Soliciting) or not asked:
        return Stepped(trade, tuple(_release(each, origin) for each in offers if not _is_taken(trade, each)))
    if event.terms is None or event.terms.asked != phase.asked:
        gone = Refusal(Code.NO_BID, "its documents changed meanwhile", "bids for what they ask now")
        after = replace(trade, phase=Resting(now, gone))
        return Stepped(after, tuple(_release(each, origin) for each in offers))
    terms = event.terms if phase.need is not Need.MOVED else _sent(event.terms, phase.to)
    choice = choose(event.answers, _relaxed(terms, phase), since_s=now - phase.asked_at)
    notes = tuple(_told(phase, row.answer, row.refusal) for row in choice.judged)
    losers = [each for each in offers if choice.winner is None or each.id != choice.winner.id]
    releases = tuple(_release(each, origin) for each in losers)
    if choice.winner is None:
        return Stepped(trade, releases).plus(_without_winner(trade, phase, choice, notes, now))
    winner = choice.winner
    agreement = "g-" + _name(origin, phase.solicitation, winner.id)
    award = Award(agreement, phase.solicitation, winner.id, origin, trade.workload, term_s, ())
    until = Elapsed(phase.asked_at + min(winner.hold_s, HOLD_MOST_S))
    after = replace(trade, phase=Awarding(winner, award, phase.asked, until, Elapsed(now + CALL_S)), said="")
    evidence = event.evidence.get(winner.region, b"")
    awarded = Noted("awarded", agreement, winner.region, "", shown(winner), evidence)
    return Stepped(after, (SendAward(winner.region, award), *releases), (*notes, awarded))


def _without_winner(trade: Trade, phase: Soliciting, choice: Choice, notes: tuple[Noted, ...], now: Elapsed) -> Stepped:
    """Another round with what may give, or rest. What was said before is not told again."""
    step = choice.relaxation
    if step is not None and phase.round == 1:
        asking = replace(phase, round=2, relaxed=step.change, asked_at=now, until=Elapsed(now + ANSWER_S + PATIENCE_S))
        solicited = Noted("solicited", phase.solicitation, "", "", f"round 2, relaxed: {step.change}")
        asked = (Solicit(phase.solicitation, 2, phase.asked, step, phase.to),)
        return Stepped(replace(trade, phase=asking), asked, () if trade.said else (*notes, solicited))
    said = _name(*sorted(f"{row.answer.region} {row.refusal.code if row.refusal else ''}" for row in choice.judged))
    return _rest(trade, phase, now, choice.refusal or Refusal(Code.NO_BID), said, notes)


def _granted(trade: Trade, event: Granted, now: Elapsed, term_s: Seconds) -> Stepped:
    phase, grant = trade.phase, event.grant
    if not isinstance(phase, Awarding) or phase.award.agreement != grant.agreement:
        return Stepped(trade)  # an answer that came twice, or too late: then it is being withdrawn
    lease_s = Seconds(min(grant.lease_s, LEASE_MOST_S))
    until = Elapsed(event.asked_at + lease_s)
    deal = Deal(
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
        service=Service.STARTING,
        since=now,
    )
    after = replace(trade, phase=Active(deal, phase.asked, Elapsed(now + term_s)), tries=0)
    granted = Noted("granted", grant.agreement, deal.region, "", f"lease {show_seconds(lease_s)}", event.evidence)
    return Stepped(after, (), (granted,))


def _award_failed(trade: Trade, event: AwardFailed, now: Elapsed) -> Stepped:
    phase = trade.phase
    if not isinstance(phase, Awarding) or phase.award.agreement != event.agreement:
        return Stepped(trade)
    if event.refusal is None:
        return Stepped(replace(trade, phase=replace(phase, retry_at=_sooner(phase.retry_at, now))))
    released = Noted("released", event.agreement, phase.offer.region, event.refusal.code, str(event.refusal))
    return Stepped(_resting(trade, now, event.refusal), (), (released,))


def _released(trade: Trade, bid: str, now: Elapsed) -> Stepped:
    phase = trade.phase
    if not isinstance(phase, Withdrawing) or phase.offer.id != bid:
        return Stepped(trade)
    released = Noted("released", phase.agreement, phase.offer.region, phase.code)
    return Stepped(_resting(trade, now, Refusal(phase.code)), (), (released,))


def _renewed(trade: Trade, renewed: Renewed, now: Elapsed) -> Stepped:
    """Only the answer to the newest renewal counts."""
    deal = deal_of(trade, renewed.agreement)
    if deal is None or not deal.nonce or deal.nonce != renewed.nonce:
        return Stepped(trade)
    lease_s = Seconds(min(renewed.lease_s, LEASE_MOST_S))
    until = Elapsed(max(deal.asked_at + lease_s, deal.lease_until))
    renew_at = max(now, deal.asked_at + _pause(lease_s))
    if renewed.service is Service.STARTING:
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
        joules=_metered(renewed.report) or deal.joules,
    )
    notes = (Noted("renewed", deal.agreement, deal.region, "", renewed.service),) if other else ()
    done = Stepped(_with(trade, after), (), notes)
    stays = isinstance(trade.phase, Active) and trade.phase.deal.agreement == deal.agreement
    if renewed.service is Service.STOPPING and stays:  # its notice was lost
        notice = Notice(deal.agreement, deal.region, Code.AGREEMENT_ENDED, Seconds(max(0.0, until - now)))
        return done.plus(_noticed(done.trade, notice, b"", now))
    return done


def _metered(report: ServiceReport) -> float | None:
    """Joules of an inference. Two digits: whatever reads it looks again when it is another."""
    served = report.requests - report.errors
    each = report.joules / served if served > 0 else 0.0
    return float(f"{each:.2g}") if math.isfinite(each) and each > 0 else None


def _renewal_failed(trade: Trade, event: RenewalFailed, now: Elapsed) -> Stepped:
    deal = deal_of(trade, event.agreement)
    if deal is None:
        return Stepped(trade)
    if event.refusal is not None and event.refusal.code in (Code.AGREEMENT_UNKNOWN, Code.AGREEMENT_ENDED):
        if isinstance(trade.phase, Active) and trade.phase.deal.agreement == event.agreement:
            return _breach(trade, deal, now, str(event.refusal), stays=None)
        gone = tuple(each for each in trade.leaving if each.deal.agreement == event.agreement)
        kept = tuple(each for each in trade.leaving if each.deal.agreement != event.agreement)
        return Stepped(replace(trade, leaving=kept), (), tuple(_ended(each) for each in gone))
    if event.nonce != deal.nonce:
        return Stepped(trade)
    sooner = Elapsed(min(deal.renew_at, now + min(RETRY_S, deal.lease_s / 12)))
    return Stepped(_with(trade, replace(deal, renew_at=sooner)))


def _noticed(trade: Trade, notice: Notice, evidence: bytes, now: Elapsed) -> Stepped:
    """The delegate's. It serves until then, or until something else does."""
    ends_at = Elapsed(now + min(notice.ends_s, LEASE_MOST_S + NOTICE_S))
    phase = trade.phase
    if isinstance(phase, Active) and phase.deal.agreement == notice.agreement:
        noted = Noted(
            "noticed", notice.agreement, notice.by, notice.code, f"in {show_seconds(notice.ends_s)}", evidence
        )
        leaving = Leaving(phase.deal, Stage.SERVING, notice.code, True, ends_at, now)
        after = replace(_resting(trade, now, Refusal(notice.code)), leaving=(*trade.leaving, leaving))
        return Stepped(after, (_account(phase.deal, breached=False),), (noted,))
    leaving_now = tuple(
        replace(each, ends_at=Elapsed(min(each.ends_at, ends_at))) if each.deal.agreement == notice.agreement else each
        for each in trade.leaving
    )
    return Stepped(replace(trade, leaving=leaving_now))


def _notice_taken(trade: Trade, event: NoticeTaken) -> Stepped:
    kept, notes = list[Leaving](), list[Noted]()
    for each in trade.leaving:
        if each.deal.agreement != event.agreement:
            kept.append(each)
        elif each.stage is Stage.ENDING and event.ends_s <= 0:
            notes.append(_ended(each))
        else:
            kept.append(replace(each, told=each.told or each.stage is Stage.SERVING))
    return Stepped(replace(trade, leaving=tuple(kept)), (), tuple(notes))


def _compared(trade: Trade, event: Compared, now: Elapsed) -> Stepped:
    phase = trade.phase
    if not isinstance(phase, Active) or phase.deal.agreement != event.agreement or event.terms.asked != phase.asked:
        return Stepped(trade)
    offer, terms = phase.deal.offer, event.terms
    gain = gain_of_home(offer, terms)
    if terms.delegation.mode is DelegationMode.WHEN_BETTER and gain > 0 and gain >= terms.delegation.margin:
        return _return(trade, phase, now, Code.BETTER_ELSEWHERE, f"home is {gain:.1%} better", live=event.live)
    if event.best is not None and event.best.region != offer.region:
        better = gain_of(event.best, offer, terms)
        if better >= max(MOVE_LEAST, terms.delegation.margin):
            after = replace(trade, better_at=now)
            found = f"{event.best.region} is {better:.1%} better"
            return _leave(after, phase.deal, now, Code.BETTER_ELSEWHERE, found)
    return Stepped(trade)


# -- what comes of it ------------------------------------------------------------------------------------------------


def _leave(trade: Trade, deal: Deal, now: Elapsed, code: Code, why: str) -> Stepped:
    """In good order: notice, then make before break."""
    leaving = Leaving(deal, Stage.SERVING, code, False, Elapsed(now + NOTICE_S), now)
    after = replace(trade, phase=Resting(now), leaving=(*trade.leaving, leaving))
    return Stepped(
        after, (_account(deal, breached=False),), (Noted("noticed", deal.agreement, deal.region, code, why),)
    )


def _return(trade: Trade, phase: Active, now: Elapsed, code: Code, why: str, *, live: bool) -> Stepped:
    """live: a move does it, and leaves when home has shown to be as good."""
    if not live:
        return _leave(trade, phase.deal, now, code, why)
    return Stepped(replace(trade, phase=replace(phase, returns=phase.returns or why)))


def _breach(trade: Trade, deal: Deal, now: Elapsed, why: str, *, stays: Seconds | None) -> Stepped:
    """stays: how long it may serve on until something else does; None: the delegate has ended it already."""
    leaving = trade.leaving
    if stays is not None:
        stage = Stage.SERVING if stays > 0 else Stage.ENDING
        ends_at = Elapsed(now + (stays or LEASE_MOST_S + ALLOWANCE_S))
        leaving = (*leaving, Leaving(deal, stage, Code.BREACHED, False, ends_at, now))
    after = replace(trade, phase=Resting(now, Refusal(Code.BREACHED, why)), leaving=leaving)
    return Stepped(
        after, (_account(deal, breached=True),), (Noted("breached", deal.agreement, deal.region, Code.BREACHED, why),)
    )


def _withdraw(trade: Trade, phase: Awarding, now: Elapsed, origin: str, code: Code) -> Stepped:
    longest = Elapsed(now + LONGEST_S)
    after = Withdrawing(phase.offer, phase.award.agreement, longest, Elapsed(now + CALL_S), code)
    return Stepped(replace(trade, phase=after), (_release(phase.offer, origin),))


def _rest(
    trade: Trade, phase: Soliciting, now: Elapsed, refusal: Refusal, said: str, notes: tuple[Noted, ...] = ()
) -> Stepped:
    """What was only to be bettered has its cooldown, and no pause besides: it may come to be short."""
    better = phase.need is Need.BETTER
    after = replace(trade, phase=Resting(now, refusal)) if better else _resting(trade, now, refusal)
    no_bid = Noted("no_bid", phase.solicitation, "", refusal.code, str(refusal))
    return Stepped(replace(after, said=said), (), () if said == trade.said else (*notes, no_bid))


def _resting(trade: Trade, now: Elapsed, refusal: Refusal) -> Trade:
    pause = min(REST_MOST_S, REST_LEAST_S * 2.0 ** min(trade.tries, 16))
    until = Elapsed(now + pause * (0.75 + _chance(str(trade.workload), str(trade.tries)) / 2))
    return replace(trade, phase=Resting(until, refusal), tries=trade.tries + 1)


def _with(trade: Trade, deal: Deal) -> Trade:
    phase = trade.phase
    if isinstance(phase, Active) and phase.deal.agreement == deal.agreement:
        return replace(trade, phase=replace(phase, deal=deal))
    leaving = tuple(
        replace(each, deal=deal) if each.deal.agreement == deal.agreement else each for each in trade.leaving
    )
    return replace(trade, leaving=leaving)


def _is_taken(trade: Trade, offer: Offer) -> bool:
    """An answer that came again, of the bid that was awarded."""
    match trade.phase:
        case Awarding(offer=mine) | Withdrawing(offer=mine):
            taken = mine.id == offer.id
        case Active(deal=deal):
            taken = deal.offer.id == offer.id
        case Resting() | Soliciting():
            taken = False
    return taken or any(each.deal.offer.id == offer.id for each in trade.leaving)


def _relaxed(terms: Terms, phase: Soliciting) -> Terms:
    """In round 2 the setting that was asked for replaces the policy's own."""
    setting = next((each for each in terms.relax if phase.relaxed and each.change == phase.relaxed), None)
    return terms if setting is None else replace(terms, require=setting.require, limits=setting.limits)


def _sent(terms: Terms, to: str) -> Terms:
    """Of a workload that somebody sends to one region: home is no rival, and no other region."""
    return replace(terms, own=None, delegation=replace(terms.delegation, to=(to,)))


def _release(offer: Offer, origin: str) -> SendRelease:
    return SendRelease(offer.region, Release(offer.solicitation, offer.id, origin))


def _account(deal: Deal, *, breached: bool) -> Account:
    return Account(deal.region, deal.agreement, deal.offer.latency_p95_s, breached)


def _ended(each: Leaving) -> Noted:
    return Noted("ended", each.deal.agreement, each.deal.region, each.code)


def _told(phase: Soliciting, answer: Answer, refusal: Refusal | None) -> Noted:
    why = f"  {refusal}" if refusal is not None else ""
    if isinstance(answer, Decline):
        return Noted("declined", phase.solicitation, answer.region, answer.refusal.code, f"round {phase.round}{why}")
    what = "countered" if answer.is_counter else "bid"
    return Noted(
        what,
        phase.solicitation,
        answer.region,
        refusal.code if refusal else "",
        f"round {phase.round}: {shown(answer)}{why}",
    )


def shown(offer: Offer) -> str:
    """An offer's terms, for people."""
    figures = [f"p95 {show_seconds(offer.latency_p95_s)}", f"{offer.replicas} x {offer.precision}"]
    figures += [show_usd_per_hour(offer.cost)] if math.isfinite(offer.cost) else []
    figures += [show_joules(offer.joules)] if math.isfinite(offer.joules) else []
    figures += [f"needs {change}" for change in offer.changes]
    return ", ".join(figures)


def _sooner(time: Elapsed, now: Elapsed) -> Elapsed:
    return Elapsed(min(time, now + RETRY_S))


def _cooled(trade: Trade, now: Elapsed, fresh: str) -> Elapsed:
    return Elapsed(now + COOLDOWN_S * (1 + _chance(str(trade.workload), fresh) / 4))


def _pause(lease_s: Seconds) -> Seconds:
    return Seconds(min(RENEW_S, lease_s / 3))


def _chance(*names: str) -> float:
    """0 to 1, by the names alone."""
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()) / 2.0**64


def _name(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:20]
