"""A device's sleep and what it draws, by time alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.device_sleep import DeviceSleepState
from shoal.types.device import PowerState, Rest
from shoal.types.units import Elapsed, Seconds, Watts

REST = Rest(idle_w=Watts(100), asleep_w=Watts(10), wake_s=Seconds(5), source="of this test")
WORK_W = Watts(600)


def device(time_scale: float = 1.0) -> DeviceSleepState:
    return DeviceSleepState(REST, WORK_W, time_scale, Elapsed(0))


def test_awake_it_idles_and_saves_nothing() -> None:
    later = device().advance(Elapsed(20))
    assert (later.power, later.drawn_j, later.slept_s, later.saved_j) == (PowerState.AWAKE, 2000.0, 0.0, 0.0)


def test_sleeping_pays_once_it_has_lasted_longer_than_waking_takes_back() -> None:
    asleep = device().with_sleep(True, Elapsed(10)).advance(Elapsed(70))
    assert (asleep.power, asleep.slept_s, asleep.saved_j) == (PowerState.ASLEEP, 60.0, 90.0 * 60)
    waking = asleep.with_sleep(False, Elapsed(70))
    assert (waking.power, waking.wakes_in(Elapsed(71)), waking.watts) == (PowerState.WAKING, 4.0, WORK_W)
    awake = waking.advance(Elapsed(100))
    # five seconds at 600 W instead of 100 W are what it takes back
    assert (awake.power, awake.saved_j) == (PowerState.AWAKE, 90.0 * 60 - 500 * 5)
    assert awake.drawn_j == 100 * 10 + 10 * 60 + 600 * 5 + 100 * 25
    assert awake.wakes_in(Elapsed(100)) == 0.0


def test_one_that_wakes_wakes_up_before_it_sleeps_again() -> None:
    waking = device().with_sleep(True, Elapsed(0)).with_sleep(False, Elapsed(50))
    assert waking.with_sleep(True, Elapsed(52)).power is PowerState.WAKING
    assert waking.with_sleep(True, Elapsed(56)).power is PowerState.ASLEEP
    assert waking.with_sleep(False, Elapsed(52)) == waking.advance(Elapsed(52))


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=20),
    st.sampled_from([1.0, 50.0]),
)
def test_what_is_drawn_and_what_is_saved_is_what_idling_would_have_drawn(
    wishes: list[tuple[float, bool]], time_scale: float
) -> None:
    found, now = device(time_scale), 0.0
    for seconds, asleep in wishes:
        now += seconds
        found = found.with_sleep(asleep, Elapsed(now))
        assert found.with_sleep(asleep, Elapsed(now)) == found
    assert found.drawn_j + found.saved_j == pytest.approx(REST.idle_w * now / time_scale)
    assert found.slept_s <= now
