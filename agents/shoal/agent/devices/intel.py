"""What Intel's NPUs and graphics report of themselves, for devices that OpenVINO's plugin finds. From documents, not
run on such hardware.

Sources: the kernel's driver of the NPU, ivpu (`npu_busy_time_us`: microseconds in which it ran jobs, since boot;
`npu_memory_utilization`: bytes that it holds of the host's memory); the kernel's ABI, sysfs-driver-intel-i915-hwmon
(`energy1_input`, microjoules, of graphics with memory of their own).
"""

import math
from typing import Final

from shoal.agent.devices.machine import LiveMachine, Machine, number, scaled_number
from shoal.agent.driver_port import DriverClock
from shoal.types.units import Elapsed

_GRAPHICS_ENERGY: Final = "/sys/class/drm/card[0-9]*/device/hwmon/hwmon*/energy1_input"
_VENDOR: Final = 0x8086


class IntelTelemetry:
    """`machine` answers in the place of this one, in tests and in recordings."""

    def __init__(self, clock: DriverClock, machine: Machine | None = None) -> None:
        self._clock = clock
        self._machine = machine or LiveMachine()
        # By NPU: when it was read last, and its busy microseconds then.
        self._busy: dict[int, tuple[Elapsed, int]] = {}

    def npu_utilisation(self, index: int) -> float:
        """Busy share of the NPU since it was read last; NaN at first, and where it does not say."""
        now, busy = self._clock.now(), f"/sys/class/accel/accel{index}/device/npu_busy_time_us"
        us = number(self._machine.text(busy))
        before = self._busy.pop(index, None)
        if us is None or us < 0:
            return math.nan
        self._busy[index] = now, us
        if before is None or now <= before[0] or us < before[1]:
            return math.nan
        return min(1.0, (us - before[1]) * 1e-6 / (now - before[0]))

    def graphics_joules(self, index: int) -> float:
        """Joules of the graphics since boot; NaN where they do not count."""
        counters = [path for path in self._machine.paths(_GRAPHICS_ENERGY) if self._is_intel(path)]
        if index >= len(counters):
            return math.nan
        joules = scaled_number(self._machine.text(counters[index]), 1e-6)
        return joules if joules >= 0 else math.nan

    def _is_intel(self, counter: str) -> bool:
        return number(self._machine.text(f"{counter.partition('/hwmon/')[0]}/vendor"), 16) == _VENDOR
