"""When automatic moves may begin: weekly windows in wall-clock time of their zone.

A window is one period on each of its days. A local time that does not exist (summer time begins) counts as the
moment of the change; a local time that occurs twice (summer time ends) counts as its first occurrence.
"""

from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from shoal.types.migration import MigrationWindow
from shoal.types.units import Wall

_AHEAD_DAYS: Final = 22
"""A window on one weekday that falls wholly into a skipped hour opens two weeks later at the latest."""


def is_open_at(windows: Sequence[MigrationWindow], wall: Wall) -> bool:
    """True if one of the windows is open, or there are none."""
    return not windows or any(opens <= wall < closes for one in windows for opens, closes in _openings(one, wall, 0))


def next_open(windows: Sequence[MigrationWindow], wall: Wall) -> Wall:
    """The first time from `wall` on at which a window is open; `wall` itself if one is."""
    if is_open_at(windows, wall):
        return wall
    return min(opens for one in windows for opens, _ in _openings(one, wall, _AHEAD_DAYS) if opens > wall)


def _openings(window: MigrationWindow, wall: Wall, ahead: int) -> Iterator[tuple[Wall, Wall]]:
    """The window's (opening, closing) times on the day of `wall`, the day before, and `ahead` days after."""
    zone = ZoneInfo(window.zone)
    today = datetime.fromtimestamp(wall, zone).date()
    over = timedelta(days=1 if window.closes <= window.opens else 0)
    for day in (today + timedelta(days=step) for step in range(-1, ahead + 1)):
        if day.weekday() in window.days:
            opens, closes = _moment(day, window.opens, zone), _moment(day + over, window.closes, zone)
            if opens < closes:
                yield opens, closes


def _moment(day: date, minutes: int, zone: ZoneInfo) -> Wall:
    """When local clocks first show that time on that day, or have skipped it."""
    shown = datetime.combine(day, time.min) + timedelta(minutes=minutes)
    moment = shown.replace(tzinfo=zone).timestamp()
    if datetime.fromtimestamp(moment, zone).replace(tzinfo=None) == shown:
        return Wall(moment)
    # The time was skipped: the change lies between these two.
    early, late = shown.replace(tzinfo=zone, fold=1).timestamp(), moment
    before = datetime.fromtimestamp(early, zone).utcoffset()
    while late - early > 1:
        middle = (early + late) // 2
        if datetime.fromtimestamp(middle, zone).utcoffset() == before:
            early = middle
        else:
            late = middle
    return Wall(late)
