"""The agent's clock: the only module here that reads one."""

import asyncio
import time
from collections.abc import Callable

from shoal.agent.core import timekeeping
from shoal.agent.core.timekeeping import MACHINE, Anchor, Kept
from shoal.types.units import Elapsed, Seconds, Wall

_LOOK_EVERY_S = 0.25
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # time asleep counts too, where the system tells it


class SystemClock:
    """Elapsed time goes on from an earlier run's. The wall clock is believed as `core.timekeeping` says."""

    def __init__(self, kept: Kept | None = None, *, boot: str = "", least: Wall | None = None) -> None:
        """least: no date before it can be true."""
        self._boot = boot
        started = _ticks()
        self._offset = timekeeping.resume(kept, boot, started) - started
        self._anchor = timekeeping.first(kept, boot, self.now(), _machine(), least or Wall(0.0))
        self._claims: dict[str, Anchor] = {}

    def now(self) -> Elapsed:
        return Elapsed(self._offset + _ticks())

    def ticks(self, at: Elapsed) -> Elapsed:
        """`at` on the machine's own scale, which every process here reads alike (`FollowedClock.now`)."""
        return Elapsed(at - self._offset)

    def wall(self) -> Wall:
        return timekeeping.believed(self._anchor, _machine(), self.now())

    def jumped(self) -> Seconds | None:
        """How far the machine's clock is from the time that is believed, where that is beyond the allowance."""
        return timekeeping.jump(self._anchor, _machine(), self.now())

    def told(self, source: str, wall: Wall) -> bool:
        """Somebody says that it is `wall` now. True when that, with what others said, moves the time believed."""
        now = self.now()
        self._claims |= {source: Anchor(now, wall), MACHINE: Anchor(now, _machine())}
        moved = timekeeping.told(self._claims, self._anchor, now)
        if moved is None:
            return False
        self._anchor, self._claims = moved, {}
        return True

    def machine(self) -> Wall:
        """What the machine's clock says, believed or not."""
        return _machine()

    def kept(self, heard: Elapsed | None, cut_wall: Wall | None) -> Kept:
        """What the next run must know; heard and cut_wall as there."""
        ticks = _ticks()
        return Kept(self._boot, ticks, Elapsed(self._offset + ticks), self.wall(), heard, cut_wall)

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)


class FollowedClock:
    """The clock of a process beside the one that keeps time: it believes what was kept last."""

    def __init__(self, read: Callable[[], Kept | None], boot: str) -> None:
        """read: the newest, the same object while nothing changed."""
        self._read = read
        self._boot = boot
        self._followed: Kept | None = None
        self._looked_at = -_LOOK_EVERY_S
        self._clock = SystemClock()
        self._follow()

    def now(self) -> Elapsed:
        """On a scale of its own: it must not jump when another record is followed."""
        return Elapsed(_ticks())

    def wall(self) -> Wall:
        self._follow()
        return self._clock.wall()

    def dates_at(self) -> Wall:
        """When certificates and tokens are judged. On an island that is the moment of the cut: what was valid then
        could not be renewed since."""
        wall = self.wall()
        cut = self._followed.cut_wall if self._followed is not None else None
        return wall if cut is None else min(wall, cut)

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)

    def _follow(self) -> None:
        ticks = _ticks()
        if ticks - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = ticks
        kept = self._read()
        if kept is not self._followed and kept is not None:
            self._followed = kept
            self._clock = SystemClock(kept, boot=self._boot)


def _ticks() -> Seconds:
    """Since the machine's boot."""
    return Seconds(time.clock_gettime(_CLOCK))


def _machine() -> Wall:
    return Wall(time.time())
