"""Who did not run does not judge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.host.watchdog import Watchdog
from shoal.types.units import Seconds

PERIOD_S, LIMIT_S = Seconds(0.1), Seconds(2.0)
START = Watchdog(LIMIT_S, PERIOD_S, 100.0)

gaps = st.lists(st.floats(0.0, 3600.0), max_size=100)


def tick_all(watching: Watchdog, *gaps_s: float) -> Watchdog:
    now = watching.ticked_at
    for gap_s in gaps_s:
        now += gap_s
        watching = watching.on_tick(now)
    return watching


def test_a_silent_peer_is_stuck_after_its_limit_and_not_before() -> None:
    assert not tick_all(START, *[PERIOD_S] * 19).is_expired
    assert tick_all(START, *[PERIOD_S] * 20).is_expired


def test_a_stopped_observer_counts_one_period_however_long_it_was_stopped() -> None:
    stopped = tick_all(START, 3600.0)
    assert stopped.silent_s == PERIOD_S
    assert not tick_all(stopped, *[PERIOD_S] * 18).is_expired
    assert tick_all(stopped, *[PERIOD_S] * 19).is_expired, "it watches on from there"


def test_a_sign_of_life_begins_the_silence_again() -> None:
    nearly = tick_all(START, *[PERIOD_S] * 19)
    again = nearly.on_sign(nearly.ticked_at)
    assert not tick_all(again, *[PERIOD_S] * 19).is_expired
    assert tick_all(again, *[PERIOD_S] * 20).is_expired


@given(gaps)
def test_silence_is_never_longer_than_time_nor_than_the_ticks_that_were_asked_for(asked: list[float]) -> None:
    found = tick_all(START, *asked)
    assert found.silent_s <= sum(asked) + 1e-6
    assert found.silent_s <= len(asked) * PERIOD_S + 1e-6


@given(gaps, gaps)
def test_silence_only_grows(first: list[float], then: list[float]) -> None:
    early = tick_all(START, *first)
    assert tick_all(early, *then).silent_s >= early.silent_s


def test_a_clock_that_goes_back_counts_nothing() -> None:
    assert START.on_tick(50.0).silent_s == 0.0


def test_f50_what_a_peer_waits_for_a_processor_is_not_its_silence() -> None:
    watching, now = START, START.ticked_at
    for _ in range(100):
        now += PERIOD_S
        watching = watching.on_tick(now, starved_s=PERIOD_S)
    assert watching.silent_s < PERIOD_S
    for _ in range(20):
        assert not watching.is_expired
        now += PERIOD_S
        watching = watching.on_tick(now, starved_s=PERIOD_S / 2)
    assert watching.is_expired, "half of the time it ran, and said nothing"


def test_f50_a_peer_that_is_busy_and_starved_expires_by_the_time_in_which_it_ran() -> None:
    """It hangs in a loop on a machine that has five times as much to do."""
    watching, now, ticks = START, START.ticked_at, 0
    while not watching.is_expired:
        now, ticks = now + PERIOD_S, ticks + 1
        watching = watching.on_tick(now, starved_s=0.8 * PERIOD_S)
        assert ticks < 1000
    assert ticks * 0.2 * PERIOD_S == pytest.approx(START.limit_s)
