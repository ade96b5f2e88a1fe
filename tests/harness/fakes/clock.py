"""A clock that a test moves."""

from shoal.types.units import Elapsed, Seconds, Wall


class ManualClock:
    def __init__(self, now: float = 100.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def now(self) -> Elapsed:
        return Elapsed(self._now)

    def wall(self) -> Wall:
        return Wall(self._wall)

    async def sleep(self, seconds: Seconds) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._wall += seconds
