"""Sleep state of one emulated device: whether it can run something now, and the energy it drew and saved.

Pure, with `now` passed in. Joules are in the device's own time, like all that an emulated device reports: one second
here is 1 / time_scale of its seconds.
"""

from dataclasses import dataclass, replace
from typing import Final

from shoal.types.device import PowerState, Rest
from shoal.types.units import Elapsed, Seconds, Watts

_NEVER: Final = Elapsed(0.0)


@dataclass(frozen=True, slots=True)
class DeviceSleepState:
    """Power state and energy counters of one device up to `counted_until`."""

    # Power draw awake and asleep, and the time to wake.
    spec: Rest
    # Watts drawn at work, and while it wakes.
    active_w: Watts
    # Seconds here for one second of the device.
    time_scale: float
    # Elapsed time up to which the counters below are complete.
    counted_until: Elapsed
    # Awake, asleep or waking.
    power: PowerState = PowerState.AWAKE
    # When a waking device is awake, elapsed clock; meaningless in other states.
    awake_at: Elapsed = _NEVER
    # Joules drawn so far, without what running a request takes above idling.
    drawn_j: float = 0.0
    # Seconds asleep so far, by the clock here.
    slept_s: Seconds = Seconds(0.0)
    # Joules saved against idling awake, as in Reading; below zero if it was woken too soon.
    saved_j: float = 0.0

    @property
    def watts(self) -> Watts:
        """Drawn now, with nothing running."""
        match self.power:
            case PowerState.AWAKE:
                return self.spec.idle_w
            case PowerState.ASLEEP:
                return self.spec.asleep_w
            case PowerState.WAKING:
                return self.active_w

    def advance(self, now: Elapsed) -> "DeviceSleepState":
        """Count up to `now`; a waking device is awake if its time has come."""
        if self.power is PowerState.WAKING and now >= self.awake_at:
            return replace(self._accrue(self.awake_at), power=PowerState.AWAKE)._accrue(now)
        return self._accrue(now)

    def with_sleep(self, asleep: bool, now: Elapsed) -> "DeviceSleepState":
        """Put the device to sleep, or wake it. A waking device finishes waking first."""
        counted = self.advance(now)
        match counted.power:
            case PowerState.AWAKE if asleep:
                return replace(counted, power=PowerState.ASLEEP)
            case PowerState.ASLEEP if not asleep:
                return replace(counted, power=PowerState.WAKING, awake_at=Elapsed(now + self.spec.wake_s)).advance(now)
            case _:
                return counted

    def wakes_in(self, now: Elapsed) -> Seconds:
        """Seconds until it can run something, if it is woken now."""
        match self.advance(now).power:
            case PowerState.AWAKE:
                return Seconds(0.0)
            case PowerState.ASLEEP:
                return self.spec.wake_s
            case PowerState.WAKING:
                return Seconds(self.awake_at - now)

    def _accrue(self, now: Elapsed) -> "DeviceSleepState":
        seconds = max(0.0, now - self.counted_until)
        own_s = seconds / self.time_scale
        return replace(
            self,
            counted_until=Elapsed(max(now, self.counted_until)),
            drawn_j=self.drawn_j + self.watts * own_s,
            slept_s=Seconds(self.slept_s + (seconds if self.power is PowerState.ASLEEP else 0.0)),
            saved_j=self.saved_j + (self.spec.idle_w - self.watts) * own_s,
        )
