"""What no region means is refused before it is an event, so that every deadline of a trade and of a bid is a number."""

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders import negotiation as delegate
from harness.builders.offers import offer, terms
from shoal.coordinator import codec
from shoal.coordinator.core.negotiation import hold, trade
from shoal.coordinator.core.negotiation.message_rules import (
    CALLERS_MOST,
    GATEWAYS_MOST,
    REVOKED_MOST,
    gateways_that_call,
    gateways_to_call,
    message_refusal,
)
from shoal.coordinator.core.negotiation.model import (
    Active,
    AwardGranted,
    Awarding,
    DelegateNotice,
    DelegationDemand,
    DelegationNeed,
    LeavingStage,
    RenewalConfirmed,
    RoundAnswered,
    TradeEvent,
    WorkloadTrade,
)
from shoal.coordinator.core.negotiation.peering import merge_peers
from shoal.coordinator.core.placement.model import Reservation, Slot
from shoal.types.agreement import GatewayRef, Grant, Notice, Renewed, ServiceReport, ServiceState
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code
from shoal.types.device import EnergySource
from shoal.types.offer import Offer, Solicitation
from shoal.types.units import Bytes, Elapsed, Joules, Seconds
from shoal.types.workload import WorkloadKey

REPORT = ServiceReport(0, 0, Seconds(0.0), Joules(0.0), EnergySource.ESTIMATED, 0.0)
KEY = WorkloadKey("default", "detect")
SHORT = DelegationDemand(DelegationNeed.SHORT, "asked")
DURATIONS = st.sampled_from([math.nan, -1e300, -1.0, -1e-9, 0.0, 1e-9, 1.0, 10.0, 30.0, 1e9, 1e300])


def advance(state: WorkloadTrade, event: TradeEvent, now: float) -> WorkloadTrade:
    return trade.step(state, event, Elapsed(now), "t-1", origin="home", term_s=Seconds(1800.0)).trade


def grant(state: WorkloadTrade, lease_s: float) -> Grant:
    assert isinstance(state.phase, Awarding)
    return Grant(state.phase.award.agreement, "bid-a", "a", Seconds(lease_s), ())


def renewal_answer(state: WorkloadTrade, lease_s: float) -> Renewed:
    agreement = trade.live_agreements(state)[0]
    return Renewed(agreement.id, agreement.nonce, Seconds(lease_s), ServiceState.READY, REPORT, (), "")


def notice(state: WorkloadTrade, ends_s: float) -> Notice:
    return Notice(trade.live_agreements(state)[0].id, "a", Code.NODE_CORDONED, Seconds(ends_s))


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_a_duration_that_is_none_is_refused_and_zero_is_not(wrong: float) -> None:
    said = Grant("g-1", "bid-a", "a", Seconds(wrong), ())
    answer = Renewed("g-1", "n", Seconds(wrong), ServiceState.READY, REPORT, (), "")
    told = Notice("g-1", "a", Code.NODE_CORDONED, Seconds(wrong))
    award = replace(delegate.award(), term_s=Seconds(wrong))
    for message in (replace(offer("a"), hold_s=Seconds(wrong)), said, answer, told, award):
        refusal = message_refusal(message)
        assert refusal is not None, message
        assert refusal.code is Code.MESSAGE_INVALID
    for message in (
        replace(offer("a"), hold_s=Seconds(0.0)),
        replace(said, lease_s=Seconds(0.0)),
        replace(told, ends_s=Seconds(0.0)),
    ):
        assert message_refusal(message) is None


def answer_to_a_renewal(**changes: Any) -> Renewed:
    return replace(Renewed("g-1", "n", Seconds(30.0), ServiceState.READY, REPORT, (), ""), **changes)


def test_a_head_of_a_ledger_or_a_serial_number_that_is_none_is_refused() -> None:
    """The federation would refuse whoever advertises such a head as another region's."""
    said = answer_to_a_renewal(ledger_head="0f" * 32, revoked=tuple(map(str, range(REVOKED_MOST))))
    assert message_refusal(said) is None
    cases: list[dict[str, Any]] = [
        {"ledger_head": "head"}, {"revoked": ("0x1",)}, {"revoked": ("1",) * (REVOKED_MOST + 1)}
    ]  # fmt: skip
    for wrong in cases:
        for message in (replace(said, **wrong), delegate.renewal(1, **wrong)):
            refusal = message_refusal(message)
            assert refusal is not None, wrong
            assert refusal.code is Code.MESSAGE_INVALID


def many(count: int) -> tuple[GatewayRef, ...]:
    return tuple(GatewayRef(f"g{number}", f"10.0.{number // 256}.{number % 256}:8001") for number in range(count))


def test_more_gateways_than_a_region_has_are_left_out() -> None:
    assert gateways_to_call(many(16_384)) == many(GATEWAYS_MOST)
    assert gateways_that_call(many(16_384)) == many(CALLERS_MOST)
    wrong = (GatewayRef("g0", "nowhere"), GatewayRef("G 1", "10.0.0.1:8001"), GatewayRef("g2", "[fe80::1%eth0]:8001"))
    assert gateways_to_call((*wrong, *many(1))) == many(1)
    assert [each.name for each in gateways_that_call(wrong)] == ["g0", "g2"]


def test_a_trade_and_a_bid_keep_no_more_of_them() -> None:
    state = advance(advance(WorkloadTrade(KEY), SHORT, 0.0), RoundAnswered("t-1", 1, (offer("a"),), terms()), 0.1)
    state = advance(state, AwardGranted(replace(grant(state, 30.0), gateways=many(1000)), Elapsed(0.2)), 0.3)
    assert trade.live_agreements(state)[0].gateways == many(GATEWAYS_MOST)
    state = advance(state, RenewalConfirmed(replace(renewal_answer(state, 30.0), gateways=many(999)[1:])), 0.4)
    assert trade.live_agreements(state)[0].gateways == many(GATEWAYS_MOST + 1)[1:]
    bid: hold.BidState = hold.HeldBid(delegate.solicitation(), delegate.offer(), (), Elapsed(10.0))
    asked = hold.RenewalReceived(delegate.renewal(1, gateways=many(1000)))
    for told in (hold.AwardReceived(delegate.award(gateways=many(1000))), asked):
        bid, _ = hold.step(bid, told, Elapsed(1.0))
        assert isinstance(bid, hold.GrantedBid)
        assert bid.gateways == many(CALLERS_MOST)


def test_what_a_region_says_in_many_agreements_is_no_more_than_in_one() -> None:
    parts = [
        PeerTrust("evil", ("CA",), tuple(f"g{part}-{number}" for number in range(200)), (f"a-{part}",), (f"{part}",))
        for part in range(1000)
    ]
    (merged,) = merge_peers(parts)
    assert (len(merged.gateways), len(merged.revoked)) == (CALLERS_MOST, REVOKED_MOST)
    assert len(merged.agreements) == len(parts)


def numbers_of(value: Any) -> list[float]:
    """All numbers in a trade or a bid, without the figures of offers and solicitations, where NaN means unknown."""
    if isinstance(value, Offer | Solicitation):
        return []
    if isinstance(value, tuple):
        return [number for each in value for number in numbers_of(each)]
    if is_dataclass(value):
        return [number for each in fields(value) for number in numbers_of(getattr(value, each.name))]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_a_notice_that_an_older_version_stored_and_is_no_time_ends_the_bid_at_the_next_start(wrong: float) -> None:
    bid = hold.HeldBid(delegate.solicitation(), delegate.offer(), (), Elapsed(10.0))
    told = hold.AwardReceived(delegate.award()), hold.OriginNotice(delegate.notice(20.0))
    stopping: hold.BidState = bid
    for event in told:
        stopping, _ = hold.step(stopping, event, Elapsed(1.0))
    assert isinstance(stopping, hold.StoppingBid)
    stored = codec.dump(replace(stopping, ends_s=Seconds(wrong), ends=Elapsed(1.0 + wrong)))
    state = hold.restore(codec.load(hold.StoppingBid, stored), Elapsed(5.0))
    assert isinstance(state, hold.StoppingBid)
    assert (state.ends_s, state.ends) == (0.0, 5.0)
    over, effects = hold.step(state, hold.RenewalReceived(delegate.renewal(1)), Elapsed(5.0))
    assert isinstance(over, hold.ClosedBid)
    assert isinstance(effects[0], hold.LedgerTransition)
    assert effects[0].what == "ended"


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_a_lease_or_an_end_that_an_older_version_stored_and_is_no_time_is_over_at_the_next_start(wrong: float) -> None:
    state = advance(advance(WorkloadTrade(KEY), SHORT, 0.0), RoundAnswered("t-1", 1, (offer("a"),), terms()), 0.1)
    state = advance(state, AwardGranted(grant(state, 30.0), Elapsed(0.2)), 0.3)
    state = advance(state, RenewalConfirmed(renewal_answer(state, 30.0)), 0.4)
    assert isinstance(state.phase, Active)
    lease = replace(state.phase.agreement, lease_s=Seconds(wrong), lease_until=Elapsed(wrong), over_at=Elapsed(wrong))
    active = restart(replace(state, phase=replace(state.phase, agreement=lease)), 5.0)
    breached = advance(active, SHORT, 5.0)
    assert breached.active_agreement is None
    assert [(each.code, each.stage) for each in breached.leaving] == [(Code.BREACHED, LeavingStage.ENDING)]
    (leaving,) = advance(state, DelegateNotice(notice(state, 20.0)), 0.5).leaving
    for old in (replace(leaving, ends_at=Elapsed(wrong)), replace(leaving, agreement=lease)):
        noticed = restart(WorkloadTrade(KEY, leaving=(old,)), 5.0)
        assert not trade.is_awarded(advance(noticed, SHORT, 5.0))


def restart(state: WorkloadTrade, now: float) -> WorkloadTrade:
    """As a process goes on with what one before it stored."""
    state = trade.restore(codec.load(WorkloadTrade, codec.dump(state)), Elapsed(now))
    assert not any(map(math.isnan, numbers_of(state))), state
    assert not math.isnan(trade.wake_at(state, DelegationNeed.SHORT))
    return state


@given(DURATIONS, DURATIONS, st.lists(st.tuples(st.sampled_from(["renewed", "notice"]), DURATIONS), max_size=4))
def test_no_time_of_a_trade_is_nan(hold_s: float, load_s: float, told: list[tuple[str, float]]) -> None:
    state, now = WorkloadTrade(KEY), 0.0

    def tell(event: TradeEvent, message: object = None) -> None:
        nonlocal state, now
        now += 0.5
        if message is None or message_refusal(message) is None:
            state = advance(state, event, now)
            assert not any(map(math.isnan, numbers_of(state))), state
            assert not math.isnan(trade.wake_at(state, DelegationNeed.SHORT))

    tell(SHORT)
    bid = replace(offer("a", hold_s=Seconds(hold_s)), load_s=Seconds(load_s))
    tell(RoundAnswered("t-1", 1, (bid,), terms()), bid)
    if not isinstance(state.phase, Awarding):
        return
    for kind, seconds in (("grant", 30.0), *told):
        if kind == "grant":
            answer = grant(state, seconds)
            tell(AwardGranted(answer, Elapsed(now)), answer)
        elif trade.live_agreements(state):
            tell(SHORT)
            if kind == "renewed" and trade.live_agreements(state):
                again = renewal_answer(state, seconds)
                tell(RenewalConfirmed(again), again)
            elif trade.live_agreements(state):
                end = notice(state, seconds)
                tell(DelegateNotice(end), end)
        tell(SHORT)


@given(DURATIONS, DURATIONS)
def test_no_time_of_a_bid_is_nan(term_s: float, ends_s: float) -> None:
    room = (Reservation("b-1", Slot("a", "cpu0"), Bytes(100), 0.1),)
    state: hold.BidState = hold.HeldBid(delegate.solicitation(), delegate.offer(), room, Elapsed(10.0))
    award = replace(delegate.award(), term_s=Seconds(term_s))
    end = delegate.notice(ends_s)
    for message, event in ((award, hold.AwardReceived(award)), (end, hold.OriginNotice(end))):
        if message_refusal(message) is None:
            state, _ = hold.step(state, event, Elapsed(1.0))
            assert not any(map(math.isnan, numbers_of(state))), state
