"""A bid's life, as a table of (state, event, now) and as laws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.negotiation import award, notice, offer, renewal, solicitation
from shoal.coordinator.core.negotiation.hold import (
    AwardReceived,
    BidEffect,
    BidEvent,
    BidState,
    ClockTick,
    ClosedBid,
    GrantedBid,
    HeldBid,
    HoldTerms,
    LeaseAnswer,
    LedgerTransition,
    NoticeAcknowledged,
    OriginNotice,
    OwnNotice,
    Refuse,
    ReleaseReceived,
    RenewalReceived,
    StoppingBid,
    agreement_of,
    reservations_of,
    restore,
    step,
)
from shoal.coordinator.core.placement.model import Reservation, Slot
from shoal.types.codes import Code
from shoal.types.units import Bytes, Elapsed, Seconds, Wall

TERMS = HoldTerms(Seconds(10.0), Seconds(30.0), Seconds(5.0), Seconds(100.0))
ROOM = (Reservation("b-1", Slot("a", "cpu0"), Bytes(100), 0.1),)
AT = Wall(1.8e9)
HELD = HeldBid(solicitation(), offer(), ROOM, Elapsed(10.0))


def after(state: BidState, *events: tuple[float, BidEvent]) -> tuple[BidState, tuple[BidEffect, ...]]:
    effects: tuple[BidEffect, ...] = ()
    for now, event in events:
        state, effects = step(state, event, Elapsed(now), TERMS)
    return state, effects


def codes(effects: tuple[BidEffect, ...]) -> list[Code]:
    return [each.refusal.code for each in effects if isinstance(each, Refuse)]


def ledger_entries(effects: tuple[BidEffect, ...]) -> list[tuple[str, str]]:
    return [(each.what, each.code) for each in effects if isinstance(each, LedgerTransition)]


def leases(effects: tuple[BidEffect, ...]) -> list[float]:
    return [each.lease_s for each in effects if isinstance(each, LeaseAnswer)]


GRANTED, _ = after(HELD, (1.0, AwardReceived(award())))
STOPPING, _ = after(GRANTED, (2.0, OriginNotice(notice(20.0))))
OWN_NOTICE = OwnNotice("eu-west", Code.TRADE_DENIED, Seconds(20.0))


def test_an_award_in_time_makes_one_agreement_of_a_hold() -> None:
    state, effects = after(HELD, (9.9, AwardReceived(award())))
    assert isinstance(state, GrantedBid)
    assert state.until == pytest.approx(9.9 + 35.0)
    assert effects == (LedgerTransition("granted"), LeaseAnswer(Seconds(30.0)))
    assert [each.bid for each in reservations_of(state, Elapsed(9.9))] == ["g-1"], (
        "the room is the agreement's from now on"
    )


def test_an_agreement_keeps_the_time_at_which_it_was_granted() -> None:
    state, _ = after(HELD, (1.0, AwardReceived(award(), AT)), (2.0, AwardReceived(award(), Wall(AT + 1.0))))
    state, _ = after(state, (3.0, RenewalReceived(renewal(1))))
    assert isinstance(state, GrantedBid)
    assert (state.sequence, state.granted_at) == (1, AT)
    state = restore(after(state, (4.0, OWN_NOTICE))[0], Elapsed(1000.0), TERMS)
    assert isinstance(state, StoppingBid)
    assert state.granted.granted_at == AT


def test_an_agreement_keeps_that_its_origin_was_told_that_it_is_ready() -> None:
    first, ready, again = renewal(1), renewal(2), renewal(3)
    states = [GRANTED]
    for now, event in enumerate(
        (RenewalReceived(first), RenewalReceived(ready, is_ready=True), RenewalReceived(again))
    ):
        states.append(after(states[-1], (2.0 + now, event))[0])
    state, effects = after(states[2], (5.0, RenewalReceived(first, is_ready=True)))
    assert (state, codes(effects)) == (states[2], [Code.REPLAYED])
    repeated, _ = after(states[1], (3.0, RenewalReceived(first, is_ready=True)))
    stored = [*states, repeated, restore(states[3], Elapsed(1000.0), TERMS)]
    assert [agreement.has_served for each in stored if (agreement := agreement_of(each))] == [
        *(False, False, True, True),
        *(True, True),
    ]


@pytest.mark.parametrize("late", [10.0, 10.1, 1000.0])
def test_a_hold_that_is_over_takes_no_award_and_no_room(late: float) -> None:
    state, effects = after(HELD, (late, AwardReceived(award())))
    assert isinstance(state, ClosedBid)
    assert ledger_entries(effects) == [("expired", "HOLD_EXPIRED")]
    assert codes(effects) == [Code.HOLD_EXPIRED]
    assert reservations_of(HELD, Elapsed(late)) == () == reservations_of(state, Elapsed(late))
    again, effects = after(state, (late, AwardReceived(award())))
    assert (again, codes(effects), ledger_entries(effects)) == (state, [Code.HOLD_EXPIRED], [])


def test_the_same_award_again_gets_its_first_answer_with_what_is_left_of_the_lease() -> None:
    state, effects = after(GRANTED, (11.0, AwardReceived(award())))
    assert state == GRANTED
    assert effects == (LeaseAnswer(Seconds(20.0)),)


def test_the_same_award_under_notice_gets_no_lease_beyond_its_end() -> None:
    assert isinstance(STOPPING, StoppingBid)
    state, effects = after(STOPPING, (STOPPING.ends - 1.0, AwardReceived(award())))
    assert state == STOPPING
    assert effects == (LeaseAnswer(Seconds(1.0)),)


@pytest.mark.parametrize(
    "other",
    [
        award("g-2"),
        award(solicitation="s-2"),
        award(origin="us-west"),
        award(term_s=Seconds(1.0)),
        award(gateways=()),
    ],
)
def test_another_award_of_the_same_bid_is_refused(other: object) -> None:
    state, effects = after(GRANTED, (2.0, AwardReceived(other)))  # type: ignore[arg-type]
    assert (state, codes(effects)) == (GRANTED, [Code.REPLAYED])


@pytest.mark.parametrize("other", [award(solicitation="s-2"), award(origin="us-west")])
def test_an_award_of_what_was_not_solicited_is_refused(other: object) -> None:
    state, effects = after(HELD, (2.0, AwardReceived(other)))  # type: ignore[arg-type]
    assert (state, codes(effects)) == (HELD, [Code.REPLAYED])


def test_a_release_frees_at_once_whatever_came_of_it_and_an_award_after_it_is_refused() -> None:
    for state in (HELD, GRANTED, STOPPING):
        gone, effects = after(state, (3.0, ReleaseReceived()))
        assert isinstance(gone, ClosedBid)
        assert gone.code is Code.HOLD_RELEASED
        assert ledger_entries(effects) == [("released", "")]
        assert reservations_of(gone, Elapsed(3.0)) == ()
        again, effects = after(gone, (3.1, ReleaseReceived()), (3.2, AwardReceived(award())))
        assert again == gone
        assert codes(effects) == [Code.AGREEMENT_ENDED if gone.agreement else Code.HOLD_RELEASED]


def test_a_renewal_extends_once_and_only_forwards() -> None:
    state, effects = after(GRANTED, (20.0, RenewalReceived(renewal(1))))
    assert isinstance(state, GrantedBid)
    assert (state.until, effects) == (55.0, (LedgerTransition("renewed"), LeaseAnswer(Seconds(30.0))))
    same, effects = after(state, (25.0, RenewalReceived(renewal(1))))
    assert (same, effects) == (state, (LeaseAnswer(Seconds(25.0)),))
    for old in (renewal(1, "other"), renewal(0)):
        same, effects = after(state, (26.0, RenewalReceived(old)))
        assert (same, codes(effects)) == (state, [Code.REPLAYED])


def test_a_lease_that_is_over_ends_the_agreement() -> None:
    assert isinstance(after(GRANTED, (35.9, ClockTick()))[0], GrantedBid)
    gone, effects = after(GRANTED, (36.0, RenewalReceived(renewal(1))))
    assert isinstance(gone, ClosedBid)
    assert ledger_entries(effects) == [("breached", "BREACHED")]
    assert codes(effects) == [Code.AGREEMENT_ENDED]


def test_after_a_notice_it_serves_until_its_end_or_until_it_is_not_needed() -> None:
    state, effects = after(GRANTED, (2.0, OriginNotice(notice(20.0))))
    assert isinstance(state, StoppingBid)
    assert ledger_entries(effects) == [("noticed", "BETTER_ELSEWHERE")]
    assert agreement_of(state) == GRANTED
    assert after(state, (3.0, OriginNotice(notice(20.0))))[0] == state, "the same notice again moves nothing"
    gone, effects = after(state, (22.0, ClockTick()))
    assert isinstance(gone, ClosedBid)
    assert ledger_entries(effects) == [("ended", "BETTER_ELSEWHERE")]
    gone, effects = after(state, (5.0, OriginNotice(notice(0.0))))
    assert isinstance(gone, ClosedBid)
    assert ledger_entries(effects) == [("ended", "BETTER_ELSEWHERE")]
    gone, effects = after(GRANTED, (5.0, OriginNotice(notice(0.0))))
    assert isinstance(gone, ClosedBid)
    assert ledger_entries(effects) == [("ended", "BETTER_ELSEWHERE")]


def test_a_notice_does_not_outlive_the_lease_and_a_renewal_does_not_outlive_the_notice() -> None:
    long, _ = after(GRANTED, (2.0, OriginNotice(notice(500.0))))
    assert isinstance(after(long, (36.0, ClockTick()))[0], ClosedBid)
    renewed, effects = after(STOPPING, (12.0, RenewalReceived(renewal(1))))
    assert isinstance(renewed, StoppingBid)
    assert LeaseAnswer(Seconds(10.0)) in effects


def test_own_notice_is_told_until_it_is_heard() -> None:
    state, effects = after(GRANTED, (2.0, OWN_NOTICE))
    assert isinstance(state, StoppingBid)
    assert not state.told
    assert ledger_entries(effects) == [("noticed", "TRADE_DENIED")]
    told, _ = after(state, (2.5, NoticeAcknowledged()))
    assert told == replace(state, told=True)
    assert after(state, (2.5, OWN_NOTICE))[0] == state


def renew_until(state: BidState, begins: int, ends: int) -> BidState:
    for now in range(begins, ends, 10):
        state, _ = after(state, (now, RenewalReceived(renewal(now))))
    return state


def test_the_origins_notice_ends_it_within_two_minutes_however_far_ahead_it_says() -> None:
    far, _ = after(GRANTED, (2.0, OriginNotice(notice(1e9))))
    stored = replace(far, ends_s=Seconds(1e9)) if isinstance(far, StoppingBid) else far
    for state in (far, restore(stored, Elapsed(2.0), TERMS)):
        state = renew_until(state, 10, 122)
        assert isinstance(state, StoppingBid)
        assert isinstance(after(state, (122.0, ClockTick()))[0], ClosedBid)


def test_own_notice_ends_sooner_what_the_origin_ends_later_and_the_origin_is_told() -> None:
    far, _ = after(GRANTED, (2.0, OriginNotice(notice(100.0))))
    state, effects = after(far, (3.0, OWN_NOTICE))
    assert isinstance(state, StoppingBid)
    assert (state.by, state.code, state.ends, state.told) == ("eu-west", Code.TRADE_DENIED, 23.0, False)
    assert ledger_entries(effects) == [("noticed", "TRADE_DENIED")]
    assert after(STOPPING, (3.0, OWN_NOTICE))[0] == STOPPING, "the origin's ends sooner"


def test_the_origins_notice_of_a_later_end_leaves_it_to_be_told_of_the_sooner_one() -> None:
    own, _ = after(GRANTED, (2.0, OriginNotice(notice(100.0))), (3.0, OWN_NOTICE))
    repeated, _ = after(own, (4.0, OriginNotice(notice(98.0))))
    assert repeated == own
    for event in (OriginNotice(notice(18.9)), NoticeAcknowledged()):
        told, _ = after(own, (4.0, event))
        assert isinstance(own, StoppingBid)
        assert told == replace(own, told=True)
        assert after(told, (4.1, OriginNotice(notice(97.0))))[0] == told, "what it knows it does not forget"


def test_what_does_not_run_takes_neither_renewal_nor_notice() -> None:
    for event in (RenewalReceived(renewal(1)), OriginNotice(notice(5.0)), OWN_NOTICE):
        state, effects = after(HELD, (1.0, event))
        assert (state, codes(effects)) == (HELD, [Code.AGREEMENT_UNKNOWN])


def test_a_restart_ends_holds_and_gives_agreements_their_whole_lease() -> None:
    """Whatever the new process's clock says: it may begin anew."""
    held = restore(HELD, Elapsed(0.0), TERMS)
    assert reservations_of(held, Elapsed(0.0)) == ()
    assert ledger_entries(after(held, (0.0, ClockTick()))[1]) == [("expired", "HOLD_EXPIRED")]
    granted = restore(GRANTED, Elapsed(0.0), TERMS)
    assert isinstance(granted, GrantedBid)
    assert granted.until == 35.0
    stopping = restore(STOPPING, Elapsed(0.0), TERMS)
    assert isinstance(stopping, StoppingBid)
    assert (stopping.ends, stopping.granted.until) == (20.0, 35.0)


EVENTS = st.sampled_from(
    [
        AwardReceived(award()),
        AwardReceived(award("g-2")),
        ReleaseReceived(),
        RenewalReceived(renewal(1)),
        RenewalReceived(renewal(1, "other")),
        RenewalReceived(renewal(2)),
        OriginNotice(notice(0.0)),
        OriginNotice(notice(7.0)),
        OWN_NOTICE,
        NoticeAcknowledged(),
        ClockTick(),
    ]
)


@given(st.lists(st.tuples(st.floats(0, 12), EVENTS), max_size=25))
def test_laws_of_a_hold(story: list[tuple[float, BidEvent]]) -> None:
    state: BidState = HELD
    now = 0.0
    agreements = set[str]()
    wrote = list[str]()
    for passed, event in story:
        now += passed
        before = state
        state, effects = step(before, event, Elapsed(now), TERMS)
        wrote += [what for what, _ in ledger_entries(effects)]
        if (granted := agreement_of(state)) is not None:
            agreements.add(granted.award.agreement)
            assert now < granted.until, "nothing runs beyond its lease"
        if isinstance(before, HeldBid) and now >= before.until:
            assert isinstance(state, ClosedBid), "no grant after expiry"
        if isinstance(before, ClosedBid):
            assert state == before, "what is gone stays gone"
        if isinstance(state, HeldBid):
            assert now < state.until
        only_heard = isinstance(before, StoppingBid) and state == replace(before, told=True)
        assert bool(ledger_entries(effects)) == (state != before and not only_heard), (
            "every transition is in the ledger"
        )
        once, said = step(state, event, Elapsed(now), TERMS)
        assert once == state, "the same message again changes nothing"
        assert not ledger_entries(said)
        if isinstance(event, AwardReceived | RenewalReceived):
            assert leases(said) == pytest.approx(leases(effects))
        assert bool(reservations_of(state, Elapsed(now))) == (not isinstance(state, ClosedBid)), (
            "room is kept until it is gone, no longer"
        )
    assert len(agreements) <= 1, "at most one agreement comes of a hold"
    assert wrote.count("granted") <= 1
    assert sum(wrote.count(each) for each in ("expired", "released", "breached", "ended")) == isinstance(
        state, ClosedBid
    )
