"""When moves that nobody asked for may begin: windows of the week, by the clock on the wall in their zone.

A window is one stretch of time on each of its days. A time that the clock skips (summer time begins) counts as the
moment of the skip; a time that comes twice (it ends) counts as its first.
"""

from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from shoal.types.migration import Window
from shoal.types.units import Wall

_AHEAD_DAYS: Final = 22
"""A window of one day in the week that a skip of the clock swallowed whole opens two weeks later at the latest."""


def open_at(windows: Sequence[Window], wall: Wall) -> bool:
    """Whether one of them is open. Without any it always is."""
    return not windows or any(opens <= wall < closes for one in windows for opens, closes in _around(one, wall, 0))


def next_open(windows: Sequence[Window], wall: Wall) -> Wall:
    """The first time from `wall` on at which one of them is open: `wall` itself where one is."""
    if open_at(windows, wall):
        return wall
    return min(opens for one in windows for opens, _ in _around(one, wall, _AHEAD_DAYS) if opens > wall)


def _around(window: Window, wall: Wall, ahead: int) -> Iterator[tuple[Wall, Wall]]:
    """From when to when it is open: on the day of `wall`, from the day before, and on `ahead` days after."""
    zone = ZoneInfo(window.zone)
    today = datetime.fromtimestamp(wall, zone).date()
    over = timedelta(days=1 if window.closes <= window.opens else 0)
    for day in (today + timedelta(days=step) for step in range(-1, ahead + 1)):
        if day.weekday() in window.days:
            opens, closes = _moment(day, window.opens, zone), _moment(day + over, window.closes, zone)
            if opens < closes:
                yield opens, closes


def _moment(day: date, minutes: int, zone: ZoneInfo) -> Wall:
    """When the clock first shows that time on that day, or has gone past it."""
    shown = datetime.combine(day, time.min) + timedelta(minutes=minutes)
    moment = shown.replace(tzinfo=zone).timestamp()
    if datetime.fromtimestamp(moment, zone).replace(tzinfo=None) == shown:
        return Wall(moment)
    early, late = shown.replace(tzinfo=zone, fold=1).timestamp(), moment  # skipped: the skip lies between these
    before = datetime.fromtimestamp(early, zone).utcoffset()
    while late - early > 1:
        middle = (early + late) // 2
        if datetime.fromtimestamp(middle, zone).utcoffset() == before:
            early = middle
        else:
            late = middle
    return Wall(late)
