"""One bid of this region, from the room that it holds to the agreement that comes of it, until nothing is owed.

A hold becomes at most one agreement. The lease of an agreement is counted here from this region's answer, with an
allowance, so that the other side, which counts from when it asked, always ends first.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from shoal.coordinator.core.placement.model import Reservation
from shoal.types.agreement import Award, GatewayRef, Notice, Renewal
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Offer, Solicitation
from shoal.types.units import Elapsed, Seconds


@dataclass(frozen=True, slots=True)
class Terms:
    """hold_s: how long a bid holds its room. lease_s: what a grant or a renewal is good for. allowance_s: how much
    later than the other side this one ends. kept_s: how long an end is remembered, so that repeats get their answer."""

    hold_s: Seconds = Seconds(10.0)
    lease_s: Seconds = Seconds(30.0)
    allowance_s: Seconds = Seconds(5.0)
    kept_s: Seconds = Seconds(300.0)


DEFAULTS: Final = Terms()


# -- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """Room is kept for an offer."""

    asked: Solicitation
    offer: Offer
    reserved: tuple[Reservation, ...]
    until: Elapsed
    kind: Literal["held"] = "held"


@dataclass(frozen=True, slots=True)
class Granted:
    """The region runs the workload. reserved: the offer's room, kept until it has a replica. gateways: of the origin,
    which may call; revoked: serials of theirs that may not. sequence, nonce: of the newest renewal, 0 and empty before
    the first."""

    asked: Solicitation
    offer: Offer
    award: Award
    reserved: tuple[Reservation, ...]
    gateways: tuple[GatewayRef, ...]
    sequence: int
    nonce: str
    until: Elapsed
    revoked: tuple[str, ...] = ()
    kind: Literal["granted"] = "granted"


@dataclass(frozen=True, slots=True)
class Stopping:
    """Notice was given: it is served until `ends`, and its lease still needs renewing till then. by: who gave it. told:
    the other side knows."""

    granted: Granted
    by: str
    code: Code
    ends_s: Seconds
    ends: Elapsed
    told: bool
    kind: Literal["stopping"] = "stopping"


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing is owed any more. agreement: empty where none came of it. until: it is remembered."""

    offer: Offer
    agreement: str
    code: Code
    until: Elapsed
    kind: Literal["gone"] = "gone"


State = Held | Granted | Stopping | Gone


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Awarded:
    award: Award


@dataclass(frozen=True, slots=True)
class Released:
    """The origin does not want it, or does not stand by its award."""


@dataclass(frozen=True, slots=True)
class Renewed:
    renewal: Renewal


@dataclass(frozen=True, slots=True)
class Noticed:
    """By the origin."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """This region gives notice. by: its name."""

    by: str
    code: Code
    ends_s: Seconds


@dataclass(frozen=True, slots=True)
class Told:
    """The origin has heard this region's notice."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time."""


Event = Awarded | Released | Renewed | Noticed | Withdrawn | Told | Tick


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """It is as asked: the origin may count on so much of the lease."""

    lease_s: Seconds


@dataclass(frozen=True, slots=True)
class Refuse:
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Enter:
    """A transition for the ledger (`types.chain`)."""

    what: str
    code: str = ""


Effect = Answer | Refuse | Enter


def step(state: State, event: Event, now: Elapsed, terms: Terms = DEFAULTS) -> tuple[State, tuple[Effect, ...]]:
    """What becomes of it. Time is looked at first: what is over takes nothing any more. No effects: nothing to say."""
    match state:
        case Held():
            if now >= state.until:
                return _ended(Gone(state.offer, "", Code.HOLD_EXPIRED, _kept(now, terms)), "expired", event)
            return _held(state, event, now, terms)
        case Granted():
            if now >= state.until:
                gone = Gone(state.offer, state.award.agreement, Code.BREACHED, _kept(now, terms))
                return _ended(gone, "breached", event)
            return _granted(state, event, now, terms)
        case Stopping():
            if now >= min(state.granted.until, state.ends):
                gone = Gone(state.granted.offer, state.granted.award.agreement, state.code, _kept(now, terms))
                return _ended(gone, "ended", event)
            return _stopping(state, event, now, terms)
        case Gone():
            return state, _afterwards(state, event)


def restarted(state: State, now: Elapsed, terms: Terms = DEFAULTS) -> State:
    """As another process goes on: it cannot know how much time has passed. What was only held is over; who counts on an
    agreement has its whole lease again."""
    match state:
        case Held():
            return replace(state, until=now)
        case Granted():
            return replace(state, until=_lease_end(now, terms))
        case Stopping():
            granted = replace(state.granted, until=_lease_end(now, terms))
            return replace(state, granted=granted, ends=Elapsed(now + state.ends_s))
        case Gone():
            return replace(state, until=_kept(now, terms))


def caught_up(stored: State, known: State) -> State:
    """What the store holds, with the renewals that were answered since and not written."""
    mine, theirs = agreed(stored), agreed(known)
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
    return replace(stored, granted=granted) if isinstance(stored, Stopping) else granted


def offer_of(state: State) -> Offer:
    return state.granted.offer if isinstance(state, Stopping) else state.offer


def name_of(state: State) -> str:
    """The agreement that came of it; empty where none did."""
    granted = agreed(state)
    return granted.award.agreement if granted is not None else state.agreement if isinstance(state, Gone) else ""


def agreed(state: State) -> Granted | None:
    """The agreement under which this region runs something, notice given or not."""
    match state:
        case Granted():
            return state
        case Stopping():
            return state.granted
        case Held() | Gone():
            return None


def room(state: State, now: Elapsed) -> tuple[Reservation, ...]:
    """What it takes of the region; a hold that is over takes nothing, whether or not that is written yet."""
    match state:
        case Held():
            return state.reserved if now < state.until else ()
        case Granted():
            return state.reserved
        case Stopping():
            return state.granted.reserved
        case Gone():
            return ()


def _held(state: Held, event: Event, now: Elapsed, terms: Terms) -> tuple[State, tuple[Effect, ...]]:
    match event:
        case Awarded(award):
            if (refusal := _other(award, state.offer, state.asked)) is not None:
                return state, (Refuse(refusal),)
            granted = Granted(
                asked=state.asked,
                offer=state.offer,
                award=award,
                reserved=tuple(replace(each, bid=award.agreement) for each in state.reserved),
                gateways=award.gateways,
                sequence=0,
                nonce="",
                until=_lease_end(now, terms),
            )
            return granted, (Enter("granted"), Answer(terms.lease_s))
        case Released():
            return Gone(state.offer, "", Code.HOLD_RELEASED, _kept(now, terms)), (Enter("released"),)
        case Renewed() | Noticed() | Withdrawn():
            return state, (Refuse(Refusal(Code.AGREEMENT_UNKNOWN, "a bid that was not awarded", "an agreement")),)
        case Told() | Tick():
            return state, ()


def _granted(state: Granted, event: Event, now: Elapsed, terms: Terms) -> tuple[State, tuple[Effect, ...]]:
    match event:
        case Awarded(award):
            return state, (_again(state, award, now, terms),)
        case Released():
            gone = Gone(state.offer, state.award.agreement, Code.HOLD_RELEASED, _kept(now, terms))
            return gone, (Enter("released"),)
        case Renewed(renewal):
            return _renewed(state, renewal, now, terms)
        case Noticed(notice):
            if notice.ends_s <= 0:
                gone = Gone(state.offer, state.award.agreement, notice.code, _kept(now, terms))
                return gone, (Enter("ended", notice.code),)
            ends = Elapsed(now + notice.ends_s)
            stopping = Stopping(state, notice.by, notice.code, notice.ends_s, ends, told=True)
            return stopping, (Enter("noticed", notice.code),)
        case Withdrawn(by, code, ends_s):
            stopping = Stopping(state, by, code, ends_s, Elapsed(now + ends_s), told=False)
            return stopping, (Enter("noticed", code),)
        case Told() | Tick():
            return state, ()


def _stopping(state: Stopping, event: Event, now: Elapsed, terms: Terms) -> tuple[State, tuple[Effect, ...]]:
    granted = state.granted
    match event:
        case Awarded(award):
            return state, (_again(granted, award, now, terms),)
        case Released():
            gone = Gone(granted.offer, granted.award.agreement, Code.HOLD_RELEASED, _kept(now, terms))
            return gone, (Enter("released"),)
        case Renewed(renewal):
            after, effects = _renewed(granted, renewal, now, terms)
            left = Seconds(state.ends - now)
            capped = tuple(Answer(min(each.lease_s, left)) if isinstance(each, Answer) else each for each in effects)
            return replace(state, granted=after), capped
        case Noticed(notice):
            if notice.ends_s <= 0:
                gone = Gone(granted.offer, granted.award.agreement, state.code, _kept(now, terms))
                return gone, (Enter("ended", state.code),)
            return replace(state, told=True), ()
        case Told():
            return replace(state, told=True), ()
        case Withdrawn() | Tick():
            return state, ()


def _renewed(state: Granted, renewal: Renewal, now: Elapsed, terms: Terms) -> tuple[Granted, tuple[Effect, ...]]:
    if (renewal.sequence, renewal.nonce) == (state.sequence, state.nonce):
        return state, (Answer(_left(state, now, terms)),)
    if renewal.sequence <= state.sequence:
        found = f"renewal {renewal.sequence} after {state.sequence}"
        return state, (Refuse(Refusal(Code.REPLAYED, found, "a renewal of its own", "renew anew")),)
    after = replace(
        state,
        sequence=renewal.sequence,
        nonce=renewal.nonce,
        gateways=renewal.gateways,
        revoked=renewal.revoked,
        until=_lease_end(now, terms),
    )
    return after, (Enter("renewed"), Answer(terms.lease_s))


def _other(award: Award, offer: Offer, asked: Solicitation) -> Refusal | None:
    """Why an award does not fit the bid that it names."""
    if (award.solicitation, award.origin, award.workload) == (offer.solicitation, offer.origin, asked.workload):
        return None
    return Refusal(Code.REPLAYED, f"bid {award.bid} under another solicitation", "the award of what was solicited")


def _again(state: Granted, award: Award, now: Elapsed, terms: Terms) -> Answer | Refuse:
    """The same award gets its first answer, with what is left of the lease."""
    if award == state.award:
        return Answer(_left(state, now, terms))
    return Refuse(Refusal(Code.REPLAYED, f"bid {award.bid} was awarded as {state.award.agreement}", "the same award"))


def _afterwards(state: Gone, event: Event) -> tuple[Effect, ...]:
    match event:
        case Awarded():
            code = Code.AGREEMENT_ENDED if state.agreement else state.code
            return (Refuse(Refusal(code, f"bid {state.offer.id}", "one that is held", "solicit anew")),)
        case Renewed():
            found = f"agreement {state.agreement or 'of no award'}: {state.code}"
            return (Refuse(Refusal(Code.AGREEMENT_ENDED, found, "one that runs", "solicit anew")),)
        case Released() | Noticed() | Withdrawn() | Told() | Tick():
            return ()


def _ended(gone: Gone, what: str, event: Event) -> tuple[State, tuple[Effect, ...]]:
    return gone, (Enter(what, gone.code), *_afterwards(gone, event))


def _left(state: Granted, now: Elapsed, terms: Terms) -> Seconds:
    return Seconds(max(0.0, state.until - terms.allowance_s - now))


def _lease_end(now: Elapsed, terms: Terms) -> Elapsed:
    return Elapsed(now + terms.lease_s + terms.allowance_s)


def _kept(now: Elapsed, terms: Terms) -> Elapsed:
    return Elapsed(now + terms.kept_s)
