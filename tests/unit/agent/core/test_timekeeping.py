"""What time is believed, after jumps, reboots and wrong clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.agent_values import at
from shoal.agent.core.timekeeping import (
    ALLOWANCE_S,
    DRIFT,
    MACHINE,
    OPERATOR,
    ClockAnchor,
    SavedClock,
    clock_jump,
    initial_anchor,
    next_anchor,
    resume_elapsed,
    trusted_wall,
)
from shoal.types.units import Elapsed, Seconds, Wall

W = 1.8e9
YEAR, HOUR = 31_536_000.0, 3600.0
KEPT = SavedClock("boot-1", Seconds(500.0), at(2000), Wall(W))
jumps = st.one_of(st.floats(-1e9, -31.0), st.floats(31.0, 1e9))


def test_elapsed_time_goes_on_within_a_boot_and_over_reboots() -> None:
    assert resume_elapsed(None, "boot-1", Seconds(77.0)) == 0.0
    assert resume_elapsed(KEPT, "boot-1", Seconds(560.0)) == 2060.0, (
        "the agent was down for a minute, the machine was not"
    )
    assert resume_elapsed(KEPT, "boot-2", Seconds(40.0)) == 2040.0, "what the machine was off for is not known"
    assert resume_elapsed(KEPT, "boot-1", Seconds(100.0)) == 2100.0, "an image put back: a boot of its own"


@given(st.text(max_size=3), st.floats(0.0, 1e6), st.text(max_size=3), st.floats(0.0, 1e6))
def test_elapsed_time_never_goes_back(boot: str, ticks: float, then: str, later: float) -> None:
    kept = SavedClock(boot, Seconds(ticks), at(2000), Wall(W))
    assert resume_elapsed(kept, then, Seconds(later)) >= kept.elapsed


@pytest.mark.parametrize(
    ("boot", "now", "machine", "wall"),
    [
        ("boot-2", 2010.0, W + YEAR, W + YEAR),  # it was off for a year, or its clock is wrong: nobody can tell
        ("boot-2", 2010.0, 0.0, W + 10.0),  # 1970: a flat battery
        ("boot-2", 2010.0, W - YEAR, W + 10.0),
        ("boot-1", 2010.0, W + 12.0, W + 12.0),  # within the allowance
        ("boot-1", 2010.0, W + HOUR, W + 10.0),  # it jumped while the agent was down
        ("boot-1", 2010.0, W - HOUR, W + 10.0),
    ],
)
def test_the_first_time_of_a_run(boot: str, now: float, machine: float, wall: float) -> None:
    assert initial_anchor(KEPT, boot, Elapsed(now), Wall(machine), Wall(0.0)).wall == wall


def test_a_node_without_a_past_is_no_younger_than_its_certificate() -> None:
    assert initial_anchor(None, "boot-1", at(0), Wall(12.0), Wall(W)) == ClockAnchor(at(0), Wall(W))
    assert initial_anchor(None, "boot-1", at(0), Wall(W + 5), Wall(W)) == ClockAnchor(at(0), Wall(W + 5))


@given(st.floats(0.0, 1e8), jumps)
def test_a_jump_is_seen_and_not_believed(passed: float, difference: float) -> None:
    anchor, now = ClockAnchor(at(100), Wall(W)), Elapsed(100 + passed)
    machine = Wall(W + passed + difference)
    allowed = ALLOWANCE_S + DRIFT * passed
    if abs(difference) > allowed + 1e-3:
        assert clock_jump(anchor, machine, now) == pytest.approx(difference, abs=1e-3)
        assert trusted_wall(anchor, machine, now) == pytest.approx(W + passed, abs=1e-3)
    assert trusted_wall(anchor, machine, now) >= W
    assert abs(trusted_wall(anchor, machine, now) - (W + passed)) <= allowed + 1e-3


def test_small_steps_are_followed_and_do_not_add_up() -> None:
    anchor = ClockAnchor(at(0), Wall(W))
    assert trusted_wall(anchor, Wall(W + 20.0), at(0)) == W + 20.0
    assert trusted_wall(anchor, Wall(W + 10 + 29.0 * 10), at(10)) == W + 10.0, "ten of them are a jump"


@pytest.mark.parametrize(
    ("claims", "moved"),
    [
        ({"coordinator": W + HOUR}, None),  # one peer alone
        ({MACHINE: W + HOUR}, None),  # the clock that jumped alone
        ({"coordinator": W, MACHINE: W + HOUR}, None),  # they do not agree
        ({"coordinator": W + 1, MACHINE: W + 2}, None),  # nothing to correct
        ({"coordinator": W + HOUR + 3, MACHINE: W + HOUR}, W + HOUR),
        ({"coordinator": W - YEAR, MACHINE: W - YEAR + 3}, W - YEAR),
        ({"coordinator": W, "peer": W + HOUR, MACHINE: W + HOUR + 3}, W + HOUR),
        ({OPERATOR: W - HOUR}, W - HOUR),
    ],
)
def test_a_new_time_takes_two_sources_or_an_operator(claims: dict[str, float], moved: float | None) -> None:
    said = {source: ClockAnchor(at(100), Wall(wall)) for source, wall in claims.items()}
    found = next_anchor(said, ClockAnchor(at(0), Wall(W - 100.0)), at(100))
    assert (found.wall if found else None) == moved


def test_what_was_said_earlier_counts_with_the_time_since() -> None:
    claims = {"coordinator": ClockAnchor(at(100), Wall(W)), MACHINE: ClockAnchor(at(700), Wall(W + 600))}
    assert next_anchor(claims, ClockAnchor(at(0), Wall(5.0)), at(700)) == ClockAnchor(at(700), Wall(W + 600))
