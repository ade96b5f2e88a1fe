"""The agent's clock. No other module of the agent reads the system clocks."""

import asyncio
import time
from collections.abc import Callable

from shoal.agent.core import timekeeping
from shoal.agent.core.timekeeping import MACHINE, ClockAnchor, SavedClock
from shoal.types.units import Elapsed, Seconds, Wall

_REFRESH_EVERY_S = 0.25
# CLOCK_BOOTTIME also counts suspended time; not every system has it
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """Elapsed time continues from the previous run. `core.timekeeping` decides how far the wall clock is trusted."""

    def __init__(self, saved: SavedClock | None = None, *, boot: str = "", earliest: Wall | None = None) -> None:
        """`earliest`: no date before this can be true. None: any date can."""
        self._boot = boot
        started = _ticks()
        self._offset = timekeeping.resume_elapsed(saved, boot, started) - started
        self._anchor = timekeeping.initial_anchor(saved, boot, self.now(), _machine_wall(), earliest or Wall(0.0))
        self._claims: dict[str, ClockAnchor] = {}

    def now(self) -> Elapsed:
        return Elapsed(self._offset + _ticks())

    def ticks(self, at: Elapsed) -> Elapsed:
        """`at` on the machine's own scale, which all processes on this machine share (`FollowerClock.now`)."""
        return Elapsed(at - self._offset)

    def wall(self) -> Wall:
        return timekeeping.trusted_wall(self._anchor, _machine_wall(), self.now())

    def clock_jump(self) -> Seconds | None:
        """Offset of the machine's clock from the trusted time. None while it is within the allowance."""
        return timekeeping.clock_jump(self._anchor, _machine_wall(), self.now())

    def add_claim(self, source: str, wall: Wall) -> bool:
        """Record that `source` claims it is now `wall`. True if this, with the claims of others, moves the trusted
        time."""
        now = self.now()
        self._claims |= {source: ClockAnchor(now, wall), MACHINE: ClockAnchor(now, _machine_wall())}
        moved = timekeeping.next_anchor(self._claims, self._anchor, now)
        if moved is None:
            return False
        self._anchor, self._claims = moved, {}
        return True

    def machine_wall(self) -> Wall:
        """The machine's wall clock, trusted or not."""
        return _machine_wall()

    def to_saved_clock(self, last_contact: Elapsed | None, cutoff_wall: Wall | None) -> SavedClock:
        """What the next run needs. `last_contact` and `cutoff_wall` are as in SavedClock."""
        ticks = _ticks()
        return SavedClock(self._boot, ticks, Elapsed(self._offset + ticks), self.wall(), last_contact, cutoff_wall)

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)


class FollowerClock:
    """Clock of a process beside the supervisor: it follows the clock that the supervisor saves."""

    def __init__(self, read: Callable[[], SavedClock | None], boot: str) -> None:
        """`read` returns the newest saved clock: the same object as long as nothing changed."""
        self._read = read
        self._boot = boot
        self._saved: SavedClock | None = None
        self._refreshed_at = -_REFRESH_EVERY_S
        self._clock = SystemClock()
        self._refresh()

    def now(self) -> Elapsed:
        """On this process's own scale, which must not jump when another saved clock is followed."""
        return Elapsed(time.clock_gettime(_CLOCK))  # as `_ticks`, whose call takes longer: each request asks four times

    def wall(self) -> Wall:
        self._refresh()
        return self._clock.wall()

    def validity_wall(self) -> Wall:
        """The time at which certificates and tokens are checked.

        During a partition this is the time of the cut: a certificate that was valid then could not be renewed since.
        """
        wall = self.wall()
        cut = self._saved.cutoff_wall if self._saved is not None else None
        return wall if cut is None else min(wall, cut)

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)

    def _refresh(self) -> None:
        ticks = _ticks()
        if ticks - self._refreshed_at < _REFRESH_EVERY_S:
            return
        self._refreshed_at = ticks
        saved = self._read()
        if saved is not self._saved and saved is not None:
            self._saved = saved
            self._clock = SystemClock(saved, boot=self._boot)


def _ticks() -> Seconds:
    """Seconds since the machine booted."""
    return Seconds(time.clock_gettime(_CLOCK))


def _machine_wall() -> Wall:
    return Wall(time.time())
