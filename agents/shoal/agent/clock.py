"""The agent's clock: the only module here that reads one."""

import asyncio
import time
from dataclasses import dataclass

from shoal.types.units import Elapsed, Seconds, Wall

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # time asleep counts too, where the system tells it


@dataclass(frozen=True, slots=True)
class Floor:
    """What an earlier run of this agent has already seen; time never reads less."""

    elapsed: Elapsed
    wall: Wall


class SystemClock:
    """Elapsed goes on from the persisted floor. A wall clock set back (a flat battery) reads the floor until it
    catches up."""

    def __init__(self, floor: Floor | None = None) -> None:
        self._floor = floor or Floor(Elapsed(0.0), Wall(0.0))
        self._started = time.clock_gettime(_CLOCK)

    def now(self) -> Elapsed:
        return Elapsed(self._floor.elapsed + time.clock_gettime(_CLOCK) - self._started)

    def wall(self) -> Wall:
        return Wall(max(time.time(), self._floor.wall))

    def floor(self) -> Floor:
        """What the next run must not go below."""
        return Floor(self.now(), self.wall())

    async def sleep(self, seconds: Seconds) -> None:
        await asyncio.sleep(seconds)
