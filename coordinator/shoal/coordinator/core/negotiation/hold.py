"""The delegate's side of one bid: from the room that it holds to its agreement, until nothing is owed.

A hold becomes at most one agreement. The delegate counts a lease from its own answer and adds an allowance. The
origin counts from its request, so the origin always ends first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from shoal.coordinator.core.negotiation import trade_times
from shoal.coordinator.core.negotiation.message_rules import duration_that_counts, gateways_that_call
from shoal.coordinator.core.placement.model import Reservation
from shoal.types.agreement import Award, GatewayRef, Notice, Renewal
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Offer, Solicitation
from shoal.types.units import UNKNOWN_TIME, Elapsed, Seconds, Wall


@dataclass(frozen=True, slots=True)
class HoldTerms:
    """Durations of holds and leases, in seconds."""

    # How long a bid holds its room.
    hold_s: Seconds = Seconds(10.0)
    # Length of a lease, from a grant or a renewal.
    lease_s: Seconds = Seconds(30.0)
    # How much later than the other side this one ends.
    allowance_s: Seconds = Seconds(5.0)
    # How long a closed bid is remembered, so that repeated messages get their answer.
    kept_s: Seconds = Seconds(300.0)


DEFAULTS: Final = HoldTerms()
NOTICE_MOST_S: Final = Seconds(trade_times.NOTICE_S + trade_times.LEASE_MOST_S)
"""A longer notice of the origin counts as this long, as the origin counts the delegate's: no origin asks for more."""


# -- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldBid:
    """Room is held for an offer, until `until`."""

    # The solicitation that it answers.
    asked: Solicitation
    # The offer, as sent.
    offer: Offer
    # Room that it holds.
    reserved: tuple[Reservation, ...]
    # End of the hold.
    until: Elapsed
    # Discriminator of the stored form.
    kind: Literal["held"] = "held"


@dataclass(frozen=True, slots=True)
class GrantedBid:
    """The region runs the workload under an agreement."""

    # The solicitation that it answers.
    asked: Solicitation
    # The offer that was awarded.
    offer: Offer
    # The award, to recognise a repeat.
    award: Award
    # The offer's room, kept until it has a replica.
    reserved: tuple[Reservation, ...]
    # The origin's gateways, which may send requests.
    gateways: tuple[GatewayRef, ...]
    # Number of the newest renewal; 0 before the first.
    sequence: int
    # Nonce of the newest renewal; empty before the first.
    nonce: str
    # End of the lease, with the allowance.
    until: Elapsed
    # Certificate serials of those gateways that are refused.
    revoked: tuple[str, ...] = ()
    # When the award was granted. 0: not known, because an older version wrote the bid, at first or after a rollback.
    granted_at: Wall = UNKNOWN_TIME
    # True once the origin was told that it is ready. None: not known, because an older version wrote the bid.
    has_served: bool | None = None
    # Discriminator of the stored form.
    kind: Literal["granted"] = "granted"


@dataclass(frozen=True, slots=True)
class StoppingBid:
    """Notice was given: it serves until `ends`, and its lease still needs renewals until then."""

    # The agreement, with its newest renewal.
    granted: GrantedBid
    # Region that gave notice.
    by: str
    # Reason of the notice.
    code: Code
    # Time from the notice to the end, in seconds.
    ends_s: Seconds
    # End of the service.
    ends: Elapsed
    # The other side knows that it ends by then.
    told: bool
    # Discriminator of the stored form.
    kind: Literal["stopping"] = "stopping"


@dataclass(frozen=True, slots=True)
class ClosedBid:
    """Nothing is owed any longer."""

    # The offer that was made.
    offer: Offer
    # Id of the agreement; empty: it had none.
    agreement: str
    # Reason of the end.
    code: Code
    # How long it is remembered.
    until: Elapsed
    # Discriminator of the stored form.
    kind: Literal["gone"] = "gone"


BidState = HeldBid | GrantedBid | StoppingBid | ClosedBid


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwardReceived:
    award: Award
    # When it came; 0: not known.
    at: Wall = UNKNOWN_TIME


@dataclass(frozen=True, slots=True)
class ReleaseReceived:
    """The origin does not want the bid, or takes back its award."""


@dataclass(frozen=True, slots=True)
class RenewalReceived:
    renewal: Renewal
    # Whether the answer says that the service is ready.
    is_ready: bool = False


@dataclass(frozen=True, slots=True)
class OriginNotice:
    """The origin gave notice."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class OwnNotice:
    """This region gives notice."""

    # Name of this region.
    by: str
    # Reason of the notice.
    code: Code
    # Time to the end, in seconds.
    ends_s: Seconds


@dataclass(frozen=True, slots=True)
class NoticeAcknowledged:
    """The origin knows of this region's notice."""


@dataclass(frozen=True, slots=True)
class ClockTick:
    """Only time has passed."""


BidEvent = AwardReceived | ReleaseReceived | RenewalReceived | OriginNotice | OwnNotice | NoticeAcknowledged | ClockTick


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """Accepted: the origin may rely on this much of the lease."""

    lease_s: Seconds


@dataclass(frozen=True, slots=True)
class Refuse:
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class LedgerTransition:
    """A transition for the ledger (`types.chain`)."""

    # Kind of the transition.
    what: str
    # Why; empty: no reason given.
    code: str = ""


BidEffect = LeaseAnswer | Refuse | LedgerTransition


def step(
    state: BidState, event: BidEvent, now: Elapsed, terms: HoldTerms = DEFAULTS
) -> tuple[BidState, tuple[BidEffect, ...]]:
    """The state after an event. Deadlines are checked first: an expired bid accepts nothing. No effects: nothing to
    answer."""
    match state:
        case HeldBid():
            if now >= state.until:
                return _end(ClosedBid(state.offer, "", Code.HOLD_EXPIRED, _memory_end(now, terms)), "expired", event)
            return _step_held(state, event, now, terms)
        case GrantedBid():
            if now >= state.until:
                gone = ClosedBid(state.offer, state.award.agreement, Code.BREACHED, _memory_end(now, terms))
                return _end(gone, "breached", event)
            return _step_granted(state, event, now, terms)
        case StoppingBid():
            if now >= min(state.granted.until, state.ends):
                gone = ClosedBid(
                    state.granted.offer, state.granted.award.agreement, state.code, _memory_end(now, terms)
                )
                return _end(gone, "ended", event)
            return _step_stopping(state, event, now, terms)
        case ClosedBid():
            return state, _effects_when_closed(state, event)


def restore(state: BidState, now: Elapsed, terms: HoldTerms = DEFAULTS) -> BidState:
    """The state as a new process continues it. It cannot know how much time has passed: a mere hold is over, and an
    agreement gets its whole lease again."""
    match state:
        case HeldBid():
            return replace(state, until=now)
        case GrantedBid():
            return replace(state, until=_lease_end(now, terms))
        case StoppingBid():
            granted = replace(state.granted, until=_lease_end(now, terms))
            ends_s = duration_that_counts(state.ends_s, NOTICE_MOST_S)  # an older version stored what the origin said
            return replace(state, granted=granted, ends_s=ends_s, ends=Elapsed(now + ends_s))
        case ClosedBid():
            return replace(state, until=_memory_end(now, terms))


def with_unwritten_renewals(stored: BidState, known: BidState) -> BidState:
    """The stored state with the renewals that were answered since but not written."""
    mine, theirs = agreement_of(stored), agreement_of(known)
    if mine is None or theirs is None or mine.award != theirs.award or mine.sequence >= theirs.sequence:
        return stored
    granted = replace(
        mine,
        sequence=theirs.sequence,
        nonce=theirs.nonce,
        gateways=theirs.gateways,
        revoked=theirs.revoked,
        until=theirs.until,
    )
    return replace(stored, granted=granted) if isinstance(stored, StoppingBid) else granted


def offer_of(state: BidState) -> Offer:
    return state.granted.offer if isinstance(state, StoppingBid) else state.offer


def agreement_name(state: BidState) -> str:
    """Id of its agreement; empty: it has none."""
    granted = agreement_of(state)
    return granted.award.agreement if granted is not None else state.agreement if isinstance(state, ClosedBid) else ""


def agreement_of(state: BidState) -> GrantedBid | None:
    """The agreement under which this region runs a workload, whether or not notice was given; None: it has none."""
    match state:
        case GrantedBid():
            return state
        case StoppingBid():
            return state.granted
        case HeldBid() | ClosedBid():
            return None


def reservations_of(state: BidState, now: Elapsed) -> tuple[Reservation, ...]:
    """Room that the bid takes. An expired hold takes none, even if its end is not written yet."""
    match state:
        case HeldBid():
            return state.reserved if now < state.until else ()
        case GrantedBid():
            return state.reserved
        case StoppingBid():
            return state.granted.reserved
        case ClosedBid():
            return ()


def _step_held(
    state: HeldBid, event: BidEvent, now: Elapsed, terms: HoldTerms
) -> tuple[BidState, tuple[BidEffect, ...]]:
    match event:
        case AwardReceived(award, at):
            if (refusal := _award_mismatch(award, state.offer, state.asked)) is not None:
                return state, (Refuse(refusal),)
            granted = GrantedBid(
                asked=state.asked,
                offer=state.offer,
                award=award,
                reserved=tuple(replace(each, bid=award.agreement) for each in state.reserved),
                gateways=gateways_that_call(award.gateways),
                sequence=0,
                nonce="",
                until=_lease_end(now, terms),
                granted_at=at,
                has_served=False,
            )
            return granted, (LedgerTransition("granted"), LeaseAnswer(terms.lease_s))
        case ReleaseReceived():
            return ClosedBid(state.offer, "", Code.HOLD_RELEASED, _memory_end(now, terms)), (
                LedgerTransition("released"),
            )
        case RenewalReceived() | OriginNotice() | OwnNotice():
            return state, (Refuse(Refusal(Code.AGREEMENT_UNKNOWN, "a bid that was not awarded", "an agreement")),)
        case NoticeAcknowledged() | ClockTick():
            return state, ()


def _step_granted(
    state: GrantedBid, event: BidEvent, now: Elapsed, terms: HoldTerms
) -> tuple[BidState, tuple[BidEffect, ...]]:
    match event:
        case AwardReceived(award):
            return state, (_repeat_grant(state, award, now, terms),)
        case ReleaseReceived():
            gone = ClosedBid(state.offer, state.award.agreement, Code.HOLD_RELEASED, _memory_end(now, terms))
            return gone, (LedgerTransition("released"),)
        case RenewalReceived(renewal, is_ready):
            return _extend_lease(state, renewal, is_ready, now, terms)
        case OriginNotice(notice):
            if notice.ends_s <= 0:
                gone = ClosedBid(state.offer, state.award.agreement, notice.code, _memory_end(now, terms))
                return gone, (LedgerTransition("ended", notice.code),)
            ends_s = Seconds(min(notice.ends_s, NOTICE_MOST_S))
            stopping = StoppingBid(state, notice.by, notice.code, ends_s, Elapsed(now + ends_s), told=True)
            return stopping, (LedgerTransition("noticed", notice.code),)
        case OwnNotice():
            return _give_notice(state, event, now), (LedgerTransition("noticed", event.code),)
        case NoticeAcknowledged() | ClockTick():
            return state, ()


def _step_stopping(
    state: StoppingBid, event: BidEvent, now: Elapsed, terms: HoldTerms
) -> tuple[BidState, tuple[BidEffect, ...]]:
    granted = state.granted
    match event:
        case AwardReceived(award):
            return state, _until_notice_ends(state, (_repeat_grant(granted, award, now, terms),), now)
        case ReleaseReceived():
            gone = ClosedBid(granted.offer, granted.award.agreement, Code.HOLD_RELEASED, _memory_end(now, terms))
            return gone, (LedgerTransition("released"),)
        case RenewalReceived(renewal):
            after, effects = _extend_lease(granted, renewal, False, now, terms)
            return replace(state, granted=after), _until_notice_ends(state, effects, now)
        case OriginNotice(notice):
            if notice.ends_s <= 0:
                gone = ClosedBid(granted.offer, granted.award.agreement, state.code, _memory_end(now, terms))
                return gone, (LedgerTransition("ended", state.code),)
            return replace(state, told=state.told or now + notice.ends_s <= state.ends), ()
        case NoticeAcknowledged():
            return replace(state, told=True), ()
        case OwnNotice(ends_s=ends_s) if now + ends_s < state.ends:
            return _give_notice(granted, event, now), (LedgerTransition("noticed", event.code),)
        case OwnNotice() | ClockTick():
            return state, ()


def _give_notice(granted: GrantedBid, notice: OwnNotice, now: Elapsed) -> StoppingBid:
    """The origin is to be told of it, also where it gave notice before."""
    ends = Elapsed(now + notice.ends_s)
    return StoppingBid(granted, notice.by, notice.code, notice.ends_s, ends, told=False)


def _until_notice_ends(state: StoppingBid, effects: Iterable[BidEffect], now: Elapsed) -> tuple[BidEffect, ...]:
    """No answer grants a lease beyond the end of the notice."""
    left = Seconds(state.ends - now)
    return tuple(LeaseAnswer(min(each.lease_s, left)) if isinstance(each, LeaseAnswer) else each for each in effects)


def _extend_lease(
    state: GrantedBid, renewal: Renewal, is_ready: bool, now: Elapsed, terms: HoldTerms
) -> tuple[GrantedBid, tuple[BidEffect, ...]]:
    has_served = True if is_ready else state.has_served
    if (renewal.sequence, renewal.nonce) == (state.sequence, state.nonce):
        return replace(state, has_served=has_served), (LeaseAnswer(_lease_left_s(state, now, terms)),)
    if renewal.sequence <= state.sequence:
        found = f"renewal {renewal.sequence} after {state.sequence}"
        return state, (Refuse(Refusal(Code.REPLAYED, found, "a renewal of its own", "renew anew")),)
    after = replace(
        state,
        sequence=renewal.sequence,
        nonce=renewal.nonce,
        gateways=gateways_that_call(renewal.gateways),
        revoked=renewal.revoked,
        until=_lease_end(now, terms),
        has_served=has_served,
    )
    return after, (LedgerTransition("renewed"), LeaseAnswer(terms.lease_s))


def _award_mismatch(award: Award, offer: Offer, asked: Solicitation) -> Refusal | None:
    """Why an award does not fit the bid that it names; None: it fits."""
    if (award.solicitation, award.origin, award.workload) == (offer.solicitation, offer.origin, asked.workload):
        return None
    return Refusal(Code.REPLAYED, f"bid {award.bid} under another solicitation", "the award of what was solicited")


def _repeat_grant(state: GrantedBid, award: Award, now: Elapsed, terms: HoldTerms) -> LeaseAnswer | Refuse:
    """The same award gets the rest of the lease; anything that differs is refused."""
    if award == state.award:
        return LeaseAnswer(_lease_left_s(state, now, terms))
    return Refuse(Refusal(Code.REPLAYED, f"bid {award.bid} was awarded as {state.award.agreement}", "the same award"))


def _effects_when_closed(state: ClosedBid, event: BidEvent) -> tuple[BidEffect, ...]:
    match event:
        case AwardReceived():
            code = Code.AGREEMENT_ENDED if state.agreement else state.code
            return (Refuse(Refusal(code, f"bid {state.offer.id}", "one that is held", "solicit anew")),)
        case RenewalReceived():
            found = f"agreement {state.agreement or 'of no award'}: {state.code}"
            return (Refuse(Refusal(Code.AGREEMENT_ENDED, found, "one that runs", "solicit anew")),)
        case ReleaseReceived() | OriginNotice() | OwnNotice() | NoticeAcknowledged() | ClockTick():
            return ()


def _end(gone: ClosedBid, what: str, event: BidEvent) -> tuple[BidState, tuple[BidEffect, ...]]:
    return gone, (LedgerTransition(what, gone.code), *_effects_when_closed(gone, event))


def _lease_left_s(state: GrantedBid, now: Elapsed, terms: HoldTerms) -> Seconds:
    return Seconds(max(0.0, state.until - terms.allowance_s - now))


def _lease_end(now: Elapsed, terms: HoldTerms) -> Elapsed:
    return Elapsed(now + terms.lease_s + terms.allowance_s)


def _memory_end(now: Elapsed, terms: HoldTerms) -> Elapsed:
    return Elapsed(now + terms.kept_s)
