"""Windows of the week: what a clock on the wall says, also over midnight and where the clock is put forward or back."""

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.coordinator.core.migration.windows import is_open_at, next_open
from shoal.types.migration import DAY_MINUTES, MigrationWindow
from shoal.types.units import Wall

PARIS = "Europe/Paris"
NIGHTS = MigrationWindow((0, 1, 2, 3, 4), 20 * 60, 6 * 60, PARIS)
DAY_S = 86_400

zones = st.sampled_from([PARIS, "UTC", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia"])
windows = st.builds(
    MigrationWindow,
    st.sets(st.integers(0, 6), min_size=1).map(lambda days: tuple(sorted(days))),
    st.integers(0, DAY_MINUTES - 1),
    st.integers(0, DAY_MINUTES),
    zones,
).filter(lambda one: one.opens != one.closes)
walls = st.integers(1_300_000_000, 2_000_000_000).map(Wall)


def at(text: str, zone: str = PARIS, fold: int = 0) -> Wall:
    return Wall(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp())


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("2026-11-20T19:59:59", False),  # a Friday
        ("2026-11-20T20:00", True),
        ("2026-11-21T00:00", True),
        ("2026-11-21T05:59:59", True),  # Saturday morning belongs to Friday's night
        ("2026-11-21T06:00", False),
        ("2026-11-21T20:00", False),
        ("2026-11-23T03:00", False),  # Monday morning would belong to Sunday's
        ("2026-11-23T20:00", True),
    ],
)
def test_a_night_belongs_to_the_day_it_begins_on(text: str, *, is_open: bool) -> None:
    assert is_open_at([NIGHTS], at(text)) is is_open


def test_the_next_opening_is_found_over_the_weekend() -> None:
    assert next_open([NIGHTS], at("2026-11-21T06:00")) == at("2026-11-23T20:00")


def test_a_time_that_the_clock_skips_counts_as_the_moment_of_the_skip() -> None:
    skip = at("2027-03-28T03:00")  # 02:00 becomes 03:00, a Sunday
    assert next_open([MigrationWindow((6,), 150, 300, PARIS)], Wall(skip - 3000)) == skip
    swallowed = MigrationWindow((6,), 130, 170, PARIS)
    assert next_open([swallowed], Wall(skip - 3000)) == at("2027-04-04T02:10")
    until = MigrationWindow((6,), 60, 150, PARIS)
    assert is_open_at([until], Wall(skip - 1))
    assert not is_open_at([until], skip)


def test_a_time_that_comes_twice_counts_as_its_first() -> None:
    first, second = at("2026-10-25T02:30"), at("2026-10-25T02:30", fold=1)
    assert second - first == 3600
    assert is_open_at([MigrationWindow((6,), 150, 300, PARIS)], first)
    until = MigrationWindow((6,), 0, 150, PARIS)
    assert is_open_at([until], Wall(first - 1))
    assert not is_open_at([until], first)
    assert not is_open_at([until], Wall(second - 1))


def test_a_whole_day_is_as_long_as_the_clock_makes_it() -> None:
    days = [MigrationWindow((6,), 0, DAY_MINUTES, PARIS)]
    for text, hours in (("2026-10-25", 25), ("2027-03-28", 23), ("2026-11-22", 24)):
        begins = at(f"{text}T00:00")
        assert is_open_at(days, begins)
        assert is_open_at(days, Wall(begins + hours * 3600 - 1))
        assert not is_open_at(days, Wall(begins - 1))
        assert not is_open_at(days, Wall(begins + hours * 3600))


@given(walls)
def test_without_windows_it_is_always_open(wall: Wall) -> None:
    assert is_open_at((), wall)
    assert next_open((), wall) == wall


@given(windows, walls)
def test_where_no_clock_is_changed_it_is_what_the_wall_shows(one: MigrationWindow, wall: Wall) -> None:
    zone = ZoneInfo(one.zone)
    around = [datetime.fromtimestamp(wall + step * DAY_S, zone) for step in (-2, -1, 0, 1, 2)]
    assume(len({each.utcoffset() for each in around}) == 1)
    shown = around[2]
    minute = 60 * shown.hour + shown.minute
    today, yesterday = shown.weekday() in one.days, (shown - timedelta(days=1)).weekday() in one.days
    if one.opens < one.closes:
        asked = today and one.opens <= minute < one.closes
    else:
        asked = (today and minute >= one.opens) or (yesterday and minute < one.closes)
    assert is_open_at([one], wall) is asked


@given(st.lists(windows, max_size=3), st.lists(windows, max_size=3), walls)
def test_several_are_open_where_any_is(some: list[MigrationWindow], more: list[MigrationWindow], wall: Wall) -> None:
    assume(some and more)
    assert is_open_at(some + more, wall) is (is_open_at(some, wall) or is_open_at(more, wall))


@given(st.lists(windows, min_size=1, max_size=3), walls, st.floats(0, 1, exclude_max=True))
def test_the_next_opening_is_open_and_nothing_before_it_is(
    given_: list[MigrationWindow], wall: Wall, share: float
) -> None:
    opens = next_open(given_, wall)
    assert opens >= wall
    assert is_open_at(given_, opens)
    between = Wall(wall + share * (opens - wall))
    assert next_open(given_, between) == (between if is_open_at(given_, between) else opens)
    assert between == opens or not is_open_at(given_, between)
