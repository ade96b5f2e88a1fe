"""Who may trade with whom."""

import fnmatch
import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.negotiation.trust import matches_any, may_delegate, may_trade
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


@given(st.text("ab-*", max_size=8), NAMES)
def test_a_star_stands_for_any_part_of_a_name(pattern: str, name: str) -> None:
    assert matches_any((pattern,), name) is fnmatchcase(name, pattern)


def test_patterns_that_other_regions_send_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(re, "compile", None)
    monkeypatch.setattr(fnmatch, "_compile_pattern", None)
    assert matches_any(("a*b", "eu-*-x"), "eu-1-x")
    assert not matches_any(("e?", "[e]u"), "eu")
