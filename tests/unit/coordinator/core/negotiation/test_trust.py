"""Who may trade with whom."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.negotiation.trust import may_delegate, may_trade
from shoal.types.workload import DelegationMode, DelegationRule, TradeRule

NAMES = st.text("ab-1", min_size=1, max_size=6)
EU = TradeRule("eu-*", ("shop",), 0.1)
ANY = TradeRule("*", ("*",), 0.3)


def test_the_first_entry_that_fits_both_counts() -> None:
    assert may_trade((EU, ANY), "eu-west", "shop") is EU
    assert may_trade((EU, ANY), "eu-west", "bank") is ANY
    assert may_trade((ANY, EU), "eu-west", "shop") is ANY


def test_who_is_not_named_is_not_traded_with() -> None:
    assert may_trade((), "eu-west", "shop") is None
    assert may_trade((EU,), "us-1", "shop") is None
    assert may_trade((EU,), "eu-west", "bank") is None
    assert may_trade((EU,), "my-eu-west", "shop") is None


def test_delegation_goes_where_it_may() -> None:
    to_eu = DelegationRule(DelegationMode.WHEN_BETTER, to=("eu-*", "us-1"))
    assert [may_delegate(to_eu, region) for region in ("eu-west", "us-1", "us-12")] == [True, True, False]
    assert not may_delegate(DelegationRule(DelegationMode.NEVER), "eu-west")


@given(NAMES, NAMES)
def test_a_name_without_star_is_only_itself(pattern: str, name: str) -> None:
    assert (may_trade((TradeRule(pattern),), name, "t") is not None) == (pattern == name)
