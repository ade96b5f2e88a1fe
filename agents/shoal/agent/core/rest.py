"""One device that can sleep: whether it can run something now, and what it has drawn and saved. Pure, by `now`.

Joules are the device's own, as all that an emulated device reports: a second here is 1 / time_scale of its seconds.
"""

from dataclasses import dataclass, replace
from typing import Final

from shoal.types.device import Power, Rest
from shoal.types.units import Elapsed, Seconds, Watts

_NEVER: Final = Elapsed(0.0)


@dataclass(frozen=True, slots=True)
class Resting:
    """counted_to: the figures below are up to then. awake_at: when a device that wakes will be awake. drawn_j: without
    what running something takes beyond idling. saved_j: as in Reading."""

    rest: Rest
    active_w: Watts
    time_scale: float
    counted_to: Elapsed
    power: Power = Power.AWAKE
    awake_at: Elapsed = _NEVER
    drawn_j: float = 0.0
    slept_s: Seconds = Seconds(0.0)
    saved_j: float = 0.0

    @property
    def watts(self) -> Watts:
        """Drawn now, with nothing running."""
        match self.power:
            case Power.AWAKE:
                return self.rest.idle_w
            case Power.ASLEEP:
                return self.rest.asleep_w
            case Power.WAKING:
                return self.active_w

    def at(self, now: Elapsed) -> "Resting":
        """Counted up to `now`, and awake by then where it wakes."""
        if self.power is Power.WAKING and now >= self.awake_at:
            return replace(self._counted(self.awake_at), power=Power.AWAKE)._counted(now)
        return self._counted(now)

    def asked(self, asleep: bool, now: Elapsed) -> "Resting":
        """To sleep, or to be awake. One that wakes wakes up first."""
        counted = self.at(now)
        match counted.power:
            case Power.AWAKE if asleep:
                return replace(counted, power=Power.ASLEEP)
            case Power.ASLEEP if not asleep:
                return replace(counted, power=Power.WAKING, awake_at=Elapsed(now + self.rest.wake_s)).at(now)
            case _:
                return counted

    def wakes_in(self, now: Elapsed) -> Seconds:
        """Until it can run something, if it is asked to now."""
        match self.at(now).power:
            case Power.AWAKE:
                return Seconds(0.0)
            case Power.ASLEEP:
                return self.rest.wake_s
            case Power.WAKING:
                return Seconds(self.awake_at - now)

    def _counted(self, now: Elapsed) -> "Resting":
        seconds = max(0.0, now - self.counted_to)
        own_s = seconds / self.time_scale
        return replace(
            self,
            counted_to=Elapsed(max(now, self.counted_to)),
            drawn_j=self.drawn_j + self.watts * own_s,
            slept_s=Seconds(self.slept_s + (seconds if self.power is Power.ASLEEP else 0.0)),
            saved_j=self.saved_j + (self.rest.idle_w - self.watts) * own_s,
        )
