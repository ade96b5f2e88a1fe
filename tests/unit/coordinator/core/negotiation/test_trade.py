"""The origin's machine: tables, and laws under loss, repetition, delay and restarts."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.offers import counter, decline, offer, term_values, terms
from shoal.coordinator import codec
from shoal.coordinator.core.negotiation import trade, trade_times
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
    LeavingStage,
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
    Soliciting,
    TradeEffect,
    TradeEvent,
    TradeStep,
    Withdrawing,
    WorkloadTrade,
)
from shoal.coordinator.core.negotiation.trade_events import ANSWER_TEXT_MOST, ANSWERS_KEPT
from shoal.types.agreement import Grant, Notice, Renewed, ServiceReport, ServiceState
from shoal.types.codes import Code, Refusal
from shoal.types.device import EnergySource
from shoal.types.units import Elapsed, Joules, Seconds, UsdPerHour, Wall
from shoal.types.workload import DelegationMode, Limits, WorkloadKey

KEY = WorkloadKey("default", "detect")
REPORT = ServiceReport(0, 0, Seconds(0.0), Joules(0.0), EnergySource.ESTIMATED, 0.0)
SHORT = DelegationDemand(DelegationNeed.SHORT, "asked")


def step_trade(state: WorkloadTrade, event: TradeEvent, now: float, fresh: str = "t-1") -> TradeStep:
    return trade.step(state, event, Elapsed(now), fresh, origin="home", term_s=Seconds(1800.0))


def soliciting() -> WorkloadTrade:
    return step_trade(WorkloadTrade(KEY), SHORT, 0.0).trade


def awarding() -> WorkloadTrade:
    return step_trade(soliciting(), RoundAnswered("t-1", 1, (offer("a"), offer("b", 0.05)), terms()), 0.5).trade


def open_agreement(state: WorkloadTrade) -> str:
    """The agreement that was awarded and not ended, of which there is at most one; empty: none."""
    match state.phase:
        case IdleTrade() | Soliciting():
            return ""
        case Awarding(award=award):
            return award.agreement
        case Withdrawing(agreement=agreement):
            return agreement
        case Active(agreement=active):
            return active.id


def active(lease_s: float = 30.0, service: ServiceState = ServiceState.READY) -> WorkloadTrade:
    state = awarding()
    name = open_agreement(state)
    state = step_trade(state, AwardGranted(Grant(name, "bid-a", "a", Seconds(lease_s), ()), Elapsed(0.5)), 0.6).trade
    assert isinstance(state.phase, Active)
    return step_trade(state, renewal_of(state, service, lease_s), 0.7).trade


def renewal_of(
    state: WorkloadTrade, service: ServiceState = ServiceState.READY, lease_s: float = 30.0
) -> RenewalConfirmed:
    agreement = trade.agreement_of(state, open_agreement(state))
    assert agreement is not None
    return RenewalConfirmed(Renewed(agreement.id, agreement.nonce, Seconds(lease_s), service, REPORT, (), ""))


def renew_throughout(state: WorkloadTrade, demand: DelegationDemand, begins: int, ends: int) -> WorkloadTrade:
    """Renewed all the time."""
    for now in range(begins, ends):
        state = step_trade(state, demand, now).trade
        state = step_trade(state, renewal_of(state), now + 0.1).trade
    return state


def kinds(stepped: TradeStep) -> list[str]:
    return [type(each).__name__ for each in stepped.effects]


def notes(stepped: TradeStep) -> list[str]:
    return [each.what for each in stepped.notes]


def test_what_has_no_place_at_home_is_solicited_at_once() -> None:
    stepped = step_trade(WorkloadTrade(KEY), SHORT, 5.0)
    assert stepped.effects == (Solicit("t-1", 1, "asked", None),)
    assert notes(stepped) == ["solicited"]


def test_what_is_sent_to_one_region_asks_that_alone_and_home_is_no_rival() -> None:
    sent = DelegationDemand(DelegationNeed.MOVED, "asked", to="b")
    stepped = step_trade(WorkloadTrade(KEY), sent, 0.0)
    assert stepped.effects == (Solicit("t-1", 1, "asked", None, "b"),)
    own = replace(terms(), own=term_values(latency=0.001, cost=0.0, energy=0.0))
    awarded = step_trade(stepped.trade, RoundAnswered("t-1", 1, (offer("a"), offer("b", 0.05)), own), 0.5)
    assert isinstance(awarded.trade.phase, Awarding)
    assert awarded.trade.phase.offer.region == "b"


def test_what_was_moved_stays_until_it_is_moved_home() -> None:
    state = renew_throughout(
        active(), DelegationDemand(DelegationNeed.MOVED, "asked", to="a", is_permanent=True), 1, 80
    )
    assert isinstance(state.phase, Active)
    assert (state.phase.stays, state.phase.home_since) == (True, None)
    left = step_trade(state, DelegationDemand(DelegationNeed.HOME, "asked"), 80.2)
    assert notes(left) == ["noticed"]
    assert [each.agreement.region for each in left.trade.leaving] == ["a"]


def test_what_is_to_come_home_live_stays_until_that_is_done() -> None:
    state = renew_throughout(active(), DelegationDemand(DelegationNeed.CONTENT, "asked", by_live_move=True), 1, 70)
    assert isinstance(state.phase, Active)
    assert state.phase.returns
    assert trade.is_relied_on(state, Elapsed(70.0))
    short = step_trade(state, SHORT, 70.2).trade
    assert isinstance(short.phase, Active)
    assert short.phase.returns == "", "home has no place any more"


def test_an_agreement_keeps_the_time_at_which_it_was_awarded() -> None:
    at = Wall(1.8e9)
    answers = (offer("a"), offer("b", 0.05))
    awarded = step_trade(soliciting(), RoundAnswered("t-1", 1, answers, terms(), at=at), 0.5).trade
    late = step_trade(awarded, SHORT, 100.0).trade
    for state in (late, trade.restore(awarded, Elapsed(-500.0))):
        assert isinstance(state.phase, Withdrawing)
        assert state.phase.awarded_at == at
    grant = Grant(open_agreement(awarded), "bid-a", "a", Seconds(30.0), ())
    granted = step_trade(awarded, AwardGranted(grant, Elapsed(0.5)), 0.6).trade
    state = trade.restore(renew_throughout(granted, SHORT, 1, 5), Elapsed(-500.0))
    assert isinstance(state.phase, Active)
    assert state.phase.agreement.awarded_at == at
    (leaving,) = step_trade(state, DelegationDemand(DelegationNeed.NOTHING, ""), -499.0).trade.leaving
    assert leaving.agreement.awarded_at == at


@pytest.mark.parametrize("need", [DelegationNeed.NOTHING, DelegationNeed.CONTENT])
def test_what_may_not_move_is_not_solicited(need: DelegationNeed) -> None:
    assert step_trade(WorkloadTrade(KEY), DelegationDemand(need, "asked"), 5.0).effects == ()


def test_the_best_is_awarded_and_the_other_holds_are_released() -> None:
    stepped = step_trade(soliciting(), RoundAnswered("t-1", 1, (offer("a"), offer("b", 0.05)), terms()), 0.5)
    assert kinds(stepped) == ["SendAward", "SendRelease"]
    assert notes(stepped) == ["bid", "bid", "awarded"]
    assert isinstance(stepped.effects[1], SendRelease)
    assert stepped.effects[1].release.bid == "bid-b"


def test_answers_of_an_earlier_trade_are_released_and_change_nothing() -> None:
    state = awarding()
    late = step_trade(state, RoundAnswered("t-0", 1, (offer("c", solicitation="t-0"),), terms()), 1.0)
    assert late.trade == state
    assert kinds(late) == ["SendRelease"]


def test_the_same_answers_again_do_not_release_the_bid_that_was_awarded() -> None:
    again = step_trade(awarding(), RoundAnswered("t-1", 1, (offer("a"), offer("b", 0.05)), terms()), 1.0)
    assert [each.release.bid for each in again.effects if isinstance(each, SendRelease)] == ["bid-b"]


def test_counters_lead_to_a_second_round_with_the_smallest_step_that_helps() -> None:
    asked = terms(0.03, relax=(0.04, 0.06))
    stepped = step_trade(soliciting(), RoundAnswered("t-1", 1, (counter("a", 0.045),), asked), 0.5)
    assert stepped.effects == (Solicit("t-1", 2, "asked", asked.relax[1]),)
    assert notes(stepped) == ["countered", "solicited"]
    second = offer("a", 0.045, round=2)
    final = step_trade(stepped.trade, RoundAnswered("t-1", 2, (second,), asked), 1.0)
    assert kinds(final) == ["SendAward"]
    assert notes(final) == ["bid", "awarded"]


def test_there_is_no_third_round() -> None:
    asked = terms(0.03, relax=(0.04, 0.06))
    second = step_trade(soliciting(), RoundAnswered("t-1", 1, (counter("a", 0.035),), asked), 0.5).trade
    stepped = step_trade(second, RoundAnswered("t-1", 2, (counter("a", 0.055),), asked), 1.0)
    assert stepped.effects == ()
    assert isinstance(stepped.trade.phase, IdleTrade)
    assert notes(stepped)[-1] == "no_bid"


def test_what_came_of_asking_each_region_is_kept_until_one_is_awarded() -> None:
    bound = terms(limits=Limits(cost=UsdPerHour(0.5)))
    silent = {"c": Refusal(Code.PEER_UNREACHABLE, "no answer")}
    heard = (offer("a", cost=1.0), decline("b"))
    ended = step_trade(soliciting(), RoundAnswered("t-1", 1, heard, bound, unheard=silent), 0.5).trade
    assert [(each.region, each.refusal.code) for each in ended.answers] == [
        ("a", Code.COST_OVER), ("b", decline("b").refusal.code), ("c", Code.PEER_UNREACHABLE),
    ]  # fmt: skip
    assert ended.answers[0].refusal.found == "1 USD/h"
    assert codec.load(WorkloadTrade, codec.dump(ended)) == ended
    assert trade.restore(ended, Elapsed(1.0)).answers == ended.answers
    wordy = {f"r{n}": Refusal(Code.NO_BID, "x" * 10_000) for n in range(100)}
    cut = step_trade(soliciting(), RoundAnswered("t-1", 1, heard, bound, unheard=wordy), 0.5).trade.answers
    assert len(cut) == ANSWERS_KEPT
    assert {len(each.refusal.found) for each in cut[2:]} == {ANSWER_TEXT_MOST}
    again = step_trade(ended, SHORT, 1000.0, "t-2").trade
    assert isinstance(again.phase, Soliciting)
    assert again.answers == ended.answers, "while they are asked again"
    cheap = offer("a", cost=0.1, id="bid-2", solicitation="t-2")
    awarded = step_trade(again, RoundAnswered("t-2", 1, (cheap,), bound), 1000.5).trade
    assert isinstance(awarded.phase, Awarding)
    assert awarded.answers == ()


def test_documents_that_changed_meanwhile_begin_anew() -> None:
    stepped = step_trade(soliciting(), RoundAnswered("t-1", 1, (offer("a"),), terms(asked="other")), 0.5)
    assert kinds(stepped) == ["SendRelease"]
    assert isinstance(stepped.trade.phase, IdleTrade)
    assert kinds(step_trade(stepped.trade, DelegationDemand(DelegationNeed.SHORT, "other"), 0.6, "t-2")) == ["Solicit"]


def test_rounds_in_vain_are_ever_rarer_and_a_changed_document_is_tried_at_once() -> None:
    state, now, pauses = WorkloadTrade(KEY), 0.0, list[float]()
    for count in range(9):
        state = step_trade(state, SHORT, now, f"t-{count}").trade
        state = step_trade(state, RoundAnswered(f"t-{count}", 1, (), terms()), now).trade
        assert isinstance(state.phase, IdleTrade)
        pauses.append(state.phase.until - now)
        now = state.phase.until
    assert pauses[0] < 1.5
    assert 45.0 <= pauses[-1] <= 75.0
    assert step_trade(state, SHORT, now - 1.0).effects == ()
    assert kinds(step_trade(state, DelegationDemand(DelegationNeed.SHORT, "other"), now - 1.0)) == ["Solicit"]


def test_an_award_is_repeated_as_it_was_until_it_is_answered() -> None:
    state = awarding()
    assert step_trade(state, SHORT, 1.0).effects == ()
    again = step_trade(state, SHORT, 2.5)
    assert isinstance(state.phase, Awarding)
    assert again.effects == (SendAward("a", state.phase.award),)
    failed = step_trade(state, AwardFailed(open_agreement(state), None), 1.0).trade
    assert kinds(step_trade(failed, SHORT, 1.3)) == ["SendAward"]


def test_a_hold_is_not_awarded_after_its_end() -> None:
    stepped = step_trade(awarding(), SHORT, 10.0)
    assert kinds(stepped) == ["SendRelease"]
    assert isinstance(stepped.trade.phase, Withdrawing)


def test_nothing_new_begins_until_a_withdrawn_award_is_acknowledged_or_over() -> None:
    state = step_trade(awarding(), SHORT, 10.0).trade
    assert kinds(step_trade(state, SHORT, 11.0)) == []
    assert kinds(step_trade(state, ReleaseFailed("bid-a"), 11.0)) == []
    assert kinds(step_trade(step_trade(state, ReleaseFailed("bid-a"), 11.0).trade, SHORT, 11.5)) == ["SendRelease"]
    late = AwardGranted(Grant(open_agreement(state), "bid-a", "a", Seconds(30.0), ()), Elapsed(9.0))
    assert step_trade(state, late, 11.0).trade == state
    for done in (
        step_trade(state, ReleaseConfirmed("bid-a"), 12.0),
        step_trade(state, SHORT, 10.0 + trade_times.AWARD_EXPIRY_S),
    ):
        assert isinstance(done.trade.phase, IdleTrade)


def test_a_refused_award_ends_the_trade() -> None:
    state = awarding()
    stepped = step_trade(state, AwardFailed(open_agreement(state), Refusal(Code.HOLD_EXPIRED)), 1.0)
    assert isinstance(stepped.trade.phase, IdleTrade)
    assert notes(stepped) == ["released"]


def test_an_agreement_is_renewed_in_time_and_only_the_newest_nonce_extends_it() -> None:
    state = active()
    assert isinstance(state.phase, Active)
    first = state.phase.agreement
    assert trade.serving_agreements(state, Elapsed(1.0)) == (first,)
    due = step_trade(state, SHORT, 3.0)
    assert kinds(due) == ["SendRenewal"]
    old = step_trade(due.trade, renewal_of(state), 3.1).trade
    assert old == due.trade
    new = step_trade(due.trade, renewal_of(due.trade), 3.1).trade
    assert isinstance(new.phase, Active)
    assert new.phase.agreement.lease_until == 33.0


def test_a_delegate_that_is_not_ready_is_asked_often() -> None:
    state = active(service=ServiceState.STARTING)
    assert trade.serving_agreements(state, Elapsed(0.8)) == ()
    assert kinds(step_trade(state, SHORT, 0.85)) == ["SendRenewal"]
    assert kinds(step_trade(active(), SHORT, 0.85)) == []


@pytest.mark.parametrize("before", [ServiceState.READY, ServiceState.SHORT])
def test_what_served_once_is_short_not_starting(before: ServiceState) -> None:
    """An older version's coordinator says so after a restart, while its nodes serve on."""
    state = step_trade(active(service=before), SHORT, 3.0).trade
    state = step_trade(state, renewal_of(state, ServiceState.STARTING), 3.1).trade
    assert [each.service for each in trade.serving_agreements(state, Elapsed(3.2))] == [ServiceState.SHORT]
    for now in range(4, 40):
        state = step_trade(state, SHORT, now).trade
        if not isinstance(state.phase, Active):
            break
        state = step_trade(state, renewal_of(state, ServiceState.STARTING), now + 0.1).trade
    assert not isinstance(state.phase, Active), "it has its time, as any that is short"


def test_a_delegate_that_falls_silent_is_not_relied_upon_and_in_breach_at_the_leases_end() -> None:
    state = active()
    assert trade.is_relied_on(state, Elapsed(4.0))
    assert not trade.is_relied_on(state, Elapsed(5.0))
    stepped = step_trade(state, DelegationDemand(DelegationNeed.CONTENT, "asked"), 30.7)
    assert isinstance(stepped.trade.phase, IdleTrade)
    assert notes(stepped) == ["breached"]
    assert RecordDelivery("a", open_agreement(state), Seconds(0.02), True) in stepped.effects
    assert [each.notice.ends_s for each in stepped.effects if isinstance(each, SendNotice)] == [0.0]
    assert trade.serving_agreements(stepped.trade, Elapsed(30.7)) == ()


def test_a_breach_may_be_followed_by_another_trade_at_once() -> None:
    assert "Solicit" in kinds(step_trade(active(), SHORT, 30.7, "t-2"))


@pytest.mark.parametrize("code", [Code.AGREEMENT_UNKNOWN, Code.AGREEMENT_ENDED])
def test_an_agreement_that_its_delegate_does_not_know_is_in_breach(code: Code) -> None:
    state = active()
    stepped = step_trade(state, RenewalFailed(open_agreement(state), "", Refusal(code)), 2.0)
    assert notes(stepped) == ["breached"]
    assert stepped.trade.leaving == ()


def test_a_delegate_that_never_serves_is_in_breach() -> None:
    state = active(service=ServiceState.STARTING)
    for now in range(1, 62):
        state = step_trade(state, SHORT, now).trade
        state = step_trade(state, renewal_of(state, ServiceState.STARTING), now + 0.1).trade
    assert isinstance(state.phase, Active)
    assert notes(step_trade(state, SHORT, 62.2)) == ["breached", "solicited"]


@pytest.mark.parametrize(
    ("service", "breached"),
    [
        (ServiceState.STARTING, False),  # it has said so, and has START_S for it
        (ServiceState.READY, True),
        (ServiceState.SHORT, True),
    ],
)
def test_a_delegate_that_serves_and_answers_no_request_is_in_breach(service: ServiceState, *, breached: bool) -> None:
    state = active(service=service)
    demand = DelegationDemand(DelegationNeed.CONTENT, "asked", failing_agreement=open_agreement(state))
    assert ("breached" in notes(step_trade(state, demand, 1.0))) is breached


@pytest.mark.parametrize("service", [ServiceState.READY, ServiceState.SHORT])
def test_an_agreement_under_notice_that_answers_no_request_is_in_breach_once(service: ServiceState) -> None:
    state = active(service=service)
    name = open_agreement(state)
    state = step_trade(state, DelegateNotice(Notice(name, "a", Code.NODE_CORDONED, Seconds(60.0))), 1.0).trade
    demand = DelegationDemand(DelegationNeed.CONTENT, "asked", failing_agreement=name)
    first = step_trade(state, demand, 1.1)
    assert notes(first) == ["breached"]
    assert notes(step_trade(first.trade, demand, 1.2)) == []


def test_a_noticed_agreement_serves_until_its_replacement_does() -> None:
    state = active()
    old = open_agreement(state)
    noticed = step_trade(state, DelegateNotice(Notice(old, "a", Code.NODE_CORDONED, Seconds(20.0))), 1.0)
    assert notes(noticed) == ["noticed"]
    assert [agreement.id for agreement in trade.serving_agreements(noticed.trade, Elapsed(1.5))] == [old]
    waiting = step_trade(noticed.trade, DelegationDemand(DelegationNeed.CONTENT, "asked"), 2.0).trade
    assert waiting.leaving[0].stage is LeavingStage.SERVING
    served = step_trade(waiting, DelegationDemand(DelegationNeed.CONTENT, "asked", is_served_locally=True), 3.0).trade
    assert trade.serving_agreements(served, Elapsed(3.0)) == ()
    ending = step_trade(
        served,
        DelegationDemand(DelegationNeed.CONTENT, "asked", is_served_locally=True),
        3.0 + trade_times.ROUTE_PROPAGATION_S,
    )
    assert [each.notice.ends_s for each in ending.effects if isinstance(each, SendNotice)] == [0.0]
    over = step_trade(ending.trade, NoticeConfirmed(old, Seconds(0.0)), 6.0)
    assert notes(over) == ["ended"]
    assert over.trade.is_over


def test_a_noticed_agreement_that_nothing_replaces_serves_to_its_end() -> None:
    state = active()
    old = open_agreement(state)
    state = step_trade(state, DelegateNotice(Notice(old, "a", Code.NODE_CORDONED, Seconds(20.0))), 1.0).trade
    assert (
        trade.serving_agreements(
            step_trade(state, DelegationDemand(DelegationNeed.CONTENT, "asked"), 20.9).trade, Elapsed(20.9)
        )
        != ()
    )
    assert notes(step_trade(state, DelegationDemand(DelegationNeed.CONTENT, "asked"), 21.0)) == ["ended"]


def test_a_lost_notice_shows_in_the_renewal() -> None:
    state = step_trade(active(), SHORT, 3.0).trade
    assert notes(step_trade(state, renewal_of(state, ServiceState.STOPPING), 3.1)) == ["renewed", "noticed"]


def test_what_may_not_be_delegated_any_more_leaves_the_routes_when_home_serves() -> None:
    stepped = step_trade(active(), DelegationDemand(DelegationNeed.NOTHING, ""), 2.0)
    assert notes(stepped) == ["noticed"]
    waiting = step_trade(stepped.trade, DelegationDemand(DelegationNeed.NOTHING, ""), 3.0).trade
    assert trade.serving_agreements(waiting, Elapsed(3.0)) != ()
    assert (
        trade.serving_agreements(
            step_trade(waiting, DelegationDemand(DelegationNeed.NOTHING, "", is_served_locally=True), 4.0).trade,
            Elapsed(4.0),
        )
        == ()
    )


def test_what_is_deleted_is_given_up_by_notice() -> None:
    state = active()
    stepped = step_trade(state, DelegationDemand(DelegationNeed.NOTHING, "", is_served_locally=True), 2.0)
    assert notes(stepped) == ["noticed"]
    assert stepped.trade.leaving[0].stage is LeavingStage.SETTLING
    later = step_trade(
        stepped.trade,
        DelegationDemand(DelegationNeed.NOTHING, "", is_served_locally=True),
        2.0 + trade_times.ROUTE_PROPAGATION_S,
    )
    assert kinds(later) == ["SendNotice"]
    assert kinds(step_trade(later.trade, NoticeFailed(open_agreement(state)), 5.0)) == []
    assert (
        kinds(
            step_trade(step_trade(later.trade, NoticeFailed(open_agreement(state)), 5.0).trade, SHORT, 5.5, "t-9")
        ).count("SendNotice")
        <= 1
    )


def test_other_documents_are_traded_anew_while_the_old_serve() -> None:
    stepped = step_trade(active(), DelegationDemand(DelegationNeed.SHORT, "other"), 2.0)
    assert notes(stepped)[0] == "noticed"
    assert trade.serving_agreements(stepped.trade, Elapsed(2.0)) != ()
    assert "Solicit" in kinds(step_trade(stepped.trade, DelegationDemand(DelegationNeed.SHORT, "other"), 2.2, "t-2"))


def test_home_takes_it_back_when_it_has_had_a_place_for_long_enough() -> None:
    at_home = DelegationDemand(DelegationNeed.CONTENT, "asked")
    state = renew_throughout(renew_throughout(active(), at_home, 2, 30), SHORT, 30, 40)
    state = renew_throughout(state, at_home, 40, 100)
    assert isinstance(state.phase, Active)
    assert notes(step_trade(state, at_home, 40.0 + trade_times.LOCAL_STABLE_S)) == ["noticed"]


def better(gain_at_home: float) -> ComparisonDone:
    own = term_values(latency=0.03, cost=1.0 - gain_at_home)
    return ComparisonDone("", terms(mode=DelegationMode.WHEN_BETTER, margin=0.2, own=own))


def test_home_takes_it_back_when_it_is_better_by_the_margin() -> None:
    state = renew_throughout(active(), SHORT, 1, 100)
    due = step_trade(state, DelegationDemand(DelegationNeed.BETTER, "asked"), 100.0)
    assert Compare(open_agreement(state), with_other_regions=False) in due.effects
    for gain, left in ((0.1, []), (0.9, ["noticed"])):
        assert notes(step_trade(due.trade, replace(better(gain), agreement=open_agreement(state)), 100.1)) == left


def test_what_is_merely_to_be_better_is_tried_once_in_its_cooldown() -> None:
    asked = DelegationDemand(DelegationNeed.BETTER, "asked")
    state = step_trade(WorkloadTrade(KEY), asked, 0.0).trade
    state = step_trade(state, RoundAnswered("t-1", 1, (), terms()), 0.1).trade
    assert step_trade(state, asked, trade_times.COOLDOWN_S - 1.0).effects == ()
    assert kinds(step_trade(state, asked, trade_times.COOLDOWN_S * 1.25, "t-2")) == ["Solicit"]
    assert kinds(step_trade(state, SHORT, 0.2, "t-2")) == ["Solicit"], "what fell short does not wait for it"


@pytest.mark.parametrize(
    ("before", "after"),
    [(soliciting(), IdleTrade), (awarding(), Withdrawing), (active(), Active), (WorkloadTrade(KEY), IdleTrade)],
)
def test_a_restart_relies_on_nothing_that_may_be_over(before: WorkloadTrade, after: type) -> None:
    state = trade.restore(before, Elapsed(-500.0))
    assert isinstance(state.phase, after)
    agreement = trade.agreement_of(state, open_agreement(state))
    if agreement is not None:
        assert trade.serving_agreements(state, Elapsed(-499.0))
        assert not trade.serving_agreements(state, Elapsed(-500.0 + trade_times.CONFIRM_S))
        again = step_trade(state, SHORT, -500.0)
        assert [each.sequence for each in again.effects if isinstance(each, SendRenewal)] == [
            trade_times.SEQUENCE_STEP + 1
        ]


def test_renewals_leave_nothing_to_store() -> None:
    before = active()
    after = step_trade(before, SHORT, 3.0).trade
    after = step_trade(after, renewal_of(after), 3.2).trade
    assert after != before
    assert trade.durable(after) == trade.durable(before)


def test_the_same_answers_in_vain_are_told_once() -> None:
    state, now, told_of = WorkloadTrade(KEY), 0.0, list[list[str]]()
    for count in range(4):
        first = step_trade(state, SHORT, now, f"t-{count}")
        answers = (counter("a", 0.5),) if count < 3 else ()
        last = step_trade(first.trade, RoundAnswered(f"t-{count}", 1, answers, terms(0.03)), now)
        told_of.append(notes(first) + notes(last))
        state = last.trade
        assert isinstance(state.phase, IdleTrade)
        now = state.phase.until
    assert told_of == [["solicited", "countered", "no_bid"], [], [], ["no_bid"]]


def test_what_has_a_place_and_never_traded_leaves_nothing_to_store() -> None:
    after = step_trade(
        WorkloadTrade(KEY), DelegationDemand(DelegationNeed.CONTENT, "asked", is_served_locally=True), 5.0
    ).trade
    assert trade.durable(after) == trade.durable(WorkloadTrade(KEY))


# -- laws --------------------------------------------------------------------------------------------------------------


@dataclass
class Wire:
    """A delegate of two regions and a wire that loses, repeats and delays: it judges what the origin sends.

    resolved: awards that bind nobody any more, as far as the origin could know."""

    now: float = 0.0
    # Seconds that the origin's clock did not count, because no process of it ran.
    unwatched_s: float = 0.0
    state: WorkloadTrade = WorkloadTrade(KEY)  # noqa: RUF009
    stored: tuple[WorkloadTrade, float] = (WorkloadTrade(KEY), 0.0)
    fresh: int = 0
    asked_at: dict[str, float] = field(default_factory=dict)
    under_way: list[TradeEffect] = field(default_factory=list)
    heard: list[TradeEvent] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    resolved: set[str] = field(default_factory=set)
    granted: dict[str, float] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    betters: list[float] = field(default_factory=list)

    def tell(self, event: TradeEvent) -> None:
        self.fresh += 1
        before = self.state
        stepped = step_trade(self.state, event, self.now - self.unwatched_s, f"t-{self.fresh}")
        self.state = stepped.trade
        if stepped.notes or trade.durable(before) != trade.durable(self.state):
            self.stored = (self.state, self.now - self.unwatched_s)
        for note in stepped.notes:
            if note.what in ("released", "expired", "noticed", "breached", "ended"):
                self.resolved.add(note.agreement)
            if note.what == "noticed" and note.code == Code.BETTER_ELSEWHERE:
                self.betters.append(self.now)
        for effect in stepped.effects:
            self.check_effect(effect)
            self.under_way.append(effect)

    def check_effect(self, effect: TradeEffect) -> None:
        if isinstance(effect, Solicit):
            self.asked_at[f"{effect.solicitation}/{effect.round}"] = self.now
        if isinstance(effect, SendAward):
            award = effect.award
            asked = max(at for name, at in self.asked_at.items() if name.startswith(f"{award.solicitation}/"))
            assert self.now < asked + 10.0, "a hold was awarded after its end"
            for other, at in self.sent.items():
                settled = other in self.resolved or self.now >= at + trade_times.AWARD_EXPIRY_S
                assert other == award.agreement or settled, "two awards of a workload are open"
            self.sent[award.agreement] = self.now

    def answer(self, effect: TradeEffect) -> TradeEvent | None:
        """What the regions make of a message that comes now."""
        match effect:
            case Solicit():
                bids = tuple(
                    offer(name, id=f"{effect.solicitation}-{effect.round}-{name}", solicitation=effect.solicitation,
                          round=effect.round) for name in "ab"
                )  # fmt: skip
                return RoundAnswered(effect.solicitation, effect.round, bids, terms())
            case SendAward(award=award):
                if award.bid in self.released:
                    return AwardFailed(award.agreement, Refusal(Code.HOLD_RELEASED))
                self.granted[award.agreement] = self.now
                grant = Grant(award.agreement, award.bid, "a", Seconds(12.0), ())
                return AwardGranted(grant, Elapsed(self.now - self.unwatched_s))
            case SendRelease(release=release):
                self.released.add(release.bid)
                return ReleaseConfirmed(release.bid)
            case SendRenewal():
                known = effect.agreement in self.granted
                if not known or self.now > self.granted[effect.agreement] + 17.0:
                    return RenewalFailed(effect.agreement, effect.nonce, Refusal(Code.AGREEMENT_UNKNOWN))
                self.granted[effect.agreement] = self.now
                service = ServiceState.READY
                return RenewalConfirmed(Renewed(effect.agreement, effect.nonce, Seconds(12.0), service, REPORT, (), ""))
            case SendNotice(notice=notice):
                self.granted.pop(notice.agreement, None)
                return NoticeConfirmed(notice.agreement, notice.ends_s)
            case Compare(agreement=agreement):
                return replace(better(0.9), agreement=agreement)
            case RecordDelivery():
                return None


WISHES = st.sampled_from(
    [
        SHORT,
        DelegationDemand(DelegationNeed.CONTENT, "asked"),
        DelegationDemand(DelegationNeed.BETTER, "asked", is_served_locally=True),
        DelegationDemand(DelegationNeed.NOTHING, "", is_served_locally=True),
        DelegationDemand(DelegationNeed.SHORT, "other"),
    ]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wish"), WISHES),
        st.tuples(st.just("pass"), st.sampled_from([0.05, 0.25, 1.0, 3.0, 11.0, 40.0, 130.0])),
        st.tuples(st.just("arrive"), st.integers(0, 50)),
        st.tuples(st.just("answer"), st.integers(0, 50)),
        st.tuples(st.just("lose"), st.integers(0, 50)),
        st.tuples(st.just("restart"), st.sampled_from([0.0, 5.0, 60.0])),
        st.tuples(st.just("notice"), st.sampled_from([0.0, 5.0])),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_laws_hold_under_loss_repetition_delay_and_restarts(steps: list[tuple[str, object]]) -> None:
    """At most one award of a workload is open, no hold is awarded after its end (`Wire.judge`), a message that came
    changes nothing when it comes again, nothing comes home for the better twice within the cooldown, and every trade
    comes to rest when nobody wants anything and all messages arrive."""
    wire = Wire()
    wire.tell(SHORT)
    for what, value in steps:
        match what, value:
            case "wish", DelegationDemand():
                wire.tell(value)
            case "pass", float():
                wire.now += value
            case "arrive", int() if wire.under_way:
                event = wire.answer(wire.under_way[value % len(wire.under_way)])
                wire.heard += [event] if event is not None else []
            case "answer", int() if wire.heard:
                event = wire.heard[value % len(wire.heard)]
                wire.tell(event)
                once = wire.state
                wire.tell(event)
                assert wire.state == once, "a message that came twice changed something"
            case "lose", int() if wire.under_way:
                wire.under_way.pop(value % len(wire.under_way))
            case "restart", float():
                state, at = wire.stored
                wire.now += value
                wire.unwatched_s = wire.now - at  # the region's time goes on where it was when this was stored
                wire.state = trade.restore(state, Elapsed(at))
            case "notice", float() if open_agreement(wire.state):
                notice = Notice(open_agreement(wire.state), "a", Code.NODE_CORDONED, Seconds(value))
                wire.tell(DelegateNotice(notice))
            case _:
                pass
    assert all(
        later - earlier >= trade_times.COOLDOWN_S
        for earlier, later in zip(wire.betters, wire.betters[1:], strict=False)
    )
    wire.tell(DelegationDemand(DelegationNeed.NOTHING, "", is_served_locally=True))
    wire.under_way.clear()
    for _ in range(120):
        if wire.state.is_over and not wire.under_way:
            break
        wire.now += 2.0
        wire.tell(DelegationDemand(DelegationNeed.NOTHING, "", is_served_locally=True))
        for effect in [*wire.under_way]:
            wire.under_way.remove(effect)
            event = wire.answer(effect)
            if event is not None:
                wire.tell(event)
    assert wire.state.is_over
