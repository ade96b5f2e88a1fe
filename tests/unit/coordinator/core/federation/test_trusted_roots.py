"""Which CAs of its federation a region trusts: bounded, never none, never older ones than it has."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.federation.rules import ROOT_BYTES_MOST, ROOTS_MOST
from shoal.coordinator.core.federation.trusted_roots import AHEAD_MOST_S, check_roots, newer_roots, outdated_roots
from shoal.types.codes import Code
from shoal.types.offer import FederationRoots
from shoal.types.units import Wall

NOW = Wall(1_800_000_000.0)


def test_a_clock_that_is_a_little_ahead_is_no_reason_to_refuse() -> None:
    assert check_roots(FederationRoots(("CA",), Wall(NOW + AHEAD_MOST_S)), NOW) is None


@pytest.mark.parametrize(
    "told",
    [
        FederationRoots((), Wall(1.0)),
        FederationRoots(tuple(f"CA {n}" for n in range(ROOTS_MOST + 1)), Wall(1.0)),
        FederationRoots(("C" * (ROOT_BYTES_MOST + 1),), Wall(1.0)),
        FederationRoots(("CA", "CA"), Wall(1.0)),
        FederationRoots(("CA",), Wall(-1.0)),
        FederationRoots(("CA",), Wall(math.nan)),
        FederationRoots(("CA",), Wall(NOW + AHEAD_MOST_S + 1.0)),
        FederationRoots(("CA",), Wall(1e300)),
        FederationRoots(("CA",), Wall(math.inf)),
    ],
    ids=["none", "many", "large", "twice", "before time", "no time", "ahead", "for ever", "without end"],
)
def test_a21_roots_that_cannot_be_a_federations(told: FederationRoots) -> None:
    refusal = check_roots(told, NOW)
    assert refusal is not None
    assert refusal.code is Code.FIELD_INVALID
    assert refusal.remedy


BUNDLES = st.builds(
    FederationRoots,
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=ROOTS_MOST, unique=True).map(tuple),
    st.integers(0, 9).map(lambda since: Wall(float(since))),
)


@given(st.lists(BUNDLES, min_size=1, max_size=9))
def test_whatever_replicas_tell_in_whatever_order_the_newest_stays(told: list[FederationRoots]) -> None:
    held = FederationRoots(("joined with",), Wall(0.0))
    for each in told:
        assert check_roots(each, NOW) is None
        held = newer_roots(held, each)
        assert held.pems, "it never trusts nobody"
    newest = max(each.since for each in told)
    assert held == [each for each in told if each.since == newest][-1]


def test_a_replica_that_has_yet_to_read_the_stage_changes_nothing() -> None:
    both = FederationRoots(("old", "next"), Wall(5.0))
    assert newer_roots(both, FederationRoots(("old",), Wall(0.0))) == both
    retired: Any = FederationRoots(("next",), Wall(9.0))
    assert newer_roots(newer_roots(both, retired), both) == retired


def test_older_roots_are_refused_only_where_they_are_others() -> None:
    held = FederationRoots(("new", "old"), Wall(5.0))
    refusal = outdated_roots(held, FederationRoots(("old",), Wall(4.0)))
    assert refusal is not None
    assert refusal.code is Code.FIELD_INVALID
    assert outdated_roots(held, FederationRoots(("old", "new"), Wall(4.0))) is None, "a clock that was set back"
    assert outdated_roots(held, FederationRoots(("third",), Wall(5.0))) is None
