"""What one front lets in of a tenant with limits."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.routing import AdmissionRefusal
from shoal.agent.core.tenant_limits import BURST_S, TenantGate, TenantLimits
from shoal.types.codes import Code
from shoal.types.tenant import TenantLimit, TenantUse
from shoal.types.units import Elapsed, PerSecond, Seconds

SHOP = "shop"


def limits(now: float = 0.0, **of_shop: float | None) -> TenantLimits:
    found = TenantLimits()
    found.configure([limit(**of_shop)], Elapsed(now))
    return found


def limit(rate: float | None = None, concurrency: float | None = None) -> TenantLimit:
    return TenantLimit(
        SHOP, None if rate is None else PerSecond(rate), None if concurrency is None else int(concurrency)
    )


def enter(gates: TenantLimits, now: float) -> TenantGate | AdmissionRefusal | None:
    return gates.enter(SHOP, Elapsed(now))


def test_a_tenant_without_limits_passes_and_is_not_counted() -> None:
    gates = TenantLimits()
    gates.configure([TenantLimit("heavy", weight=2.0)], Elapsed(0.0))
    assert gates.enter("heavy", Elapsed(1.0)) is None
    assert enter(gates, 1.0) is None
    assert gates.uses() == ()


def test_the_rate_lets_in_as_many_as_have_come_due_and_says_when_the_next_may() -> None:
    gates = limits(rate=4.0)
    assert isinstance(enter(gates, 0.25), TenantGate)
    refused = enter(gates, 0.375)
    assert isinstance(refused, AdmissionRefusal)
    assert refused.refusal.code is Code.TENANT_RATE
    assert SHOP in refused.refusal.found
    assert refused.retry_after_s == pytest.approx(0.125)
    assert isinstance(enter(gates, 0.5), TenantGate)
    assert gates.uses() == (TenantUse(SHOP, admitted=2, over_rate=1, inside=2),)


def test_a_burst_is_a_second_of_the_rate_and_at_least_one_request() -> None:
    for rate, burst in ((5.0, 5), (0.5, 1)):
        gates = limits(rate=rate)
        entered = [enter(gates, 1000.0) for _ in range(10)]
        assert sum(isinstance(each, TenantGate) for each in entered) == burst


def test_a_front_that_starts_has_nothing_saved() -> None:
    assert isinstance(enter(limits(now=50.0, rate=100.0), 50.0), AdmissionRefusal)


def test_a_share_of_zero_refuses_all() -> None:
    refused = enter(limits(rate=0.0), 1e6)
    assert isinstance(refused, AdmissionRefusal)
    assert refused.retry_after_s == 1.0
    refused = enter(limits(concurrency=0), 1e6)
    assert isinstance(refused, AdmissionRefusal)
    assert refused.refusal.code is Code.TENANT_CONCURRENCY


def test_concurrency_counts_what_is_inside_and_learns_when_to_retry() -> None:
    gates = limits(concurrency=2)
    first, second = enter(gates, 0.0), enter(gates, 0.0)
    assert isinstance(first, TenantGate)
    assert isinstance(second, TenantGate)
    refused = enter(gates, 0.0)
    assert isinstance(refused, AdmissionRefusal)
    assert refused.refusal.code is Code.TENANT_CONCURRENCY
    first.leave(Seconds(0.4))
    assert isinstance(enter(gates, 0.4), TenantGate)
    refused = enter(gates, 0.4)
    assert isinstance(refused, AdmissionRefusal)
    assert refused.retry_after_s == pytest.approx(0.4 / 2), "one of two ends in half the time of one"


def test_a_request_refused_for_concurrency_costs_no_rate() -> None:
    gates = limits(rate=2.0, concurrency=1)
    assert isinstance(enter(gates, 1.0), TenantGate)
    assert isinstance(enter(gates, 1.0), AdmissionRefusal)
    gates.configure([limit(rate=2.0)], Elapsed(1.0))
    assert isinstance(enter(gates, 1.0), TenantGate), "the second of the burst is still there"


def test_looking_takes_nothing() -> None:
    gates = limits(rate=1.0)
    assert all(gates.check(SHOP, Elapsed(1.0)) is None for _ in range(5))
    assert isinstance(enter(gates, 1.0), TenantGate)
    assert gates.check(SHOP, Elapsed(1.0)) is not None


def test_a_new_limit_keeps_what_is_inside_and_the_counts() -> None:
    gates = limits(concurrency=5)
    inside = enter(gates, 0.0)
    gates.configure([limit(concurrency=1)], Elapsed(1.0))
    assert isinstance(enter(gates, 1.0), AdmissionRefusal)
    assert isinstance(inside, TenantGate)
    inside.leave(Seconds(1.0))
    assert isinstance(enter(gates, 1.0), TenantGate)


def test_what_entered_under_a_limit_that_is_gone_leaves_by_its_own_gate() -> None:
    gates = limits(concurrency=1)
    old = enter(gates, 0.0)
    gates.configure([], Elapsed(1.0))
    gates.configure([limit(concurrency=1)], Elapsed(2.0))
    new = enter(gates, 2.0)
    assert isinstance(old, TenantGate)
    assert isinstance(new, TenantGate)
    old.leave(Seconds(2.0))
    assert isinstance(enter(gates, 2.0), AdmissionRefusal), "the new one is still inside"


steps = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),  # time that passes
        st.sampled_from(["ask", "ask", "ask", "share", "restart"]),
        st.floats(0.0, 50.0),  # the new share
    ),
    max_size=60,
)


@given(steps)
def test_no_history_of_shares_and_restarts_lets_in_more_than_the_rate_and_one_burst(
    history: Sequence[tuple[float, str, float]],
) -> None:
    """In every window: the integral of the rate, and at most one burst of the highest share."""
    now, rate = 0.0, 10.0
    gates = limits(rate=rate)
    # Of every moment: the most that may have entered until then, and what did.
    due, entered, highest = [0.0], [0], rate
    for passed, what, share in history:
        now += passed
        due.append(due[-1] + passed * rate)
        entered.append(entered[-1])
        match what:
            case "share":
                rate = share
                gates.configure([limit(rate=rate)], Elapsed(now))
            case "restart":
                gates = limits(now=now, rate=rate)
            case _:
                for _ in range(20):
                    entered[-1] += isinstance(enter(gates, now), TenantGate)
        highest = max(highest, rate)
    burst = max(1.0, highest * BURST_S)
    for begin in range(len(due)):
        for end in range(begin, len(due)):
            assert entered[end] - entered[begin] <= due[end] - due[begin] + burst + 1e-6
