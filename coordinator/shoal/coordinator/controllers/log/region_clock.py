"""Elapsed time of a region: it goes on where the coordinator before left it, whatever the machine's own clock says."""

from dataclasses import dataclass
from typing import Final

from shoal.coordinator.ports import Clock
from shoal.types.units import Elapsed, Seconds, Wall

CLOCK: Final = "clock"
"""Store key of the floor."""
FLOOR_INTERVAL_S: Final = Seconds(60.0)
"""Longest time between two writes of the floor by a region that writes nothing else: what a restart may take off."""


@dataclass(frozen=True, slots=True)
class ClockFloor:
    """How far the region's elapsed time had come. It is part of every commit, so no stored time was read after it."""

    # The region's elapsed time when this was written.
    now: Elapsed


class RegionClock:
    """ports.Clock of one region. Time in which no coordinator leads does not count, because nobody watched."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = 0.0
        self._resumed = False

    def resume(self, floor: Elapsed) -> None:
        """Goes on at `floor`. Later calls, of a follower that reads what the leader wrote since, only go forward."""
        missing = floor - self.now()
        if missing > 0 or not self._resumed:
            self._offset += missing
        self._resumed = True

    def now(self) -> Elapsed:
        return Elapsed(self._clock.now() + self._offset)

    def wall(self) -> Wall:
        return self._clock.wall()

    async def sleep(self, seconds: Seconds) -> None:
        await self._clock.sleep(seconds)
