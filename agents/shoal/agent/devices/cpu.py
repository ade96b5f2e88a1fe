"""The host's processor, through ONNX Runtime's own provider or, where that is installed, OpenVINO's."""

import math
from pathlib import Path

from shoal.agent.devices.host import Host
from shoal.agent.devices.runtime import cpu_provider, runtime_version
from shoal.agent.ports import Clock, DriverOptions, Pace
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, Reading
from shoal.types.units import Bytes, Elapsed, Seconds, Watts

NAME = "cpu0"


class CpuDriver:
    """One device for all sockets: the runtime spreads over them. parallelism: processors this process may use."""

    def __init__(self, clock: Clock, options: DriverOptions, root: Path = Path("/")) -> None:
        self._clock = clock
        self._host = Host(root)
        self._ticks = self._host.busy_and_total()
        self._throttles = self._host.throttle_count()
        self._counters = self._host.energy_counters()
        self._ranges = [_number(counter.with_name("max_energy_range_uj")) for counter in self._counters]
        self._counted = [_number(counter) for counter in self._counters]
        self._energy_j = 0.0
        self._read_at = clock.now()

    def discover(self) -> tuple[Device, ...]:
        processor = self._host.processor()
        attributes = {
            "isa": " ".join(processor.isa),
            "caches": ", ".join(processor.caches),
            "numa_nodes": str(processor.numa_nodes),
            "cores": str(processor.cores),
            "threads": str(processor.threads),
            "energy_counters": " ".join(map(str, self._counters)),
            "sleep": "no: the agent itself runs on it",
        }
        device = Device(
            name=NAME,
            kind=DeviceKind.CPU,
            vendor=processor.vendor,
            model=processor.model,
            driver="linux",
            driver_version=processor.kernel,
            runtime_version=runtime_version(),
            provider=cpu_provider(),
            memory_bytes=Bytes(self._host.limit_bytes()),
            parallelism=self._host.usable_cores(),
            attributes={name: value for name, value in attributes.items() if value},
        )
        return (device,)

    def read(self, device: str) -> Reading:
        """Utilisation, power and throttling are those since the last reading; NaN on the first, or where unknown."""
        if device != NAME:
            raise refuse(Code.DEVICE_LOST, f"no processor {device!r:.80}", NAME, "")
        now = self._clock.now()
        ticks, last = self._host.busy_and_total(), self._ticks
        throttles, before = self._host.throttle_count(), self._throttles
        self._ticks, self._throttles = ticks, throttles
        passed = ticks[1] - last[1]
        return Reading(
            device=device,
            free_bytes=Bytes(self._host.free_bytes()),
            utilisation=(ticks[0] - last[0]) / passed if passed > 0 else math.nan,
            temperature_c=self._host.temperature_c(),
            power_w=Watts(self._count_energy(now)),
            energy_j=self._energy_j if self._counters else math.nan,
            taken_at=self._clock.wall(),
            throttled=throttles > before,
        )

    def pace(self, device: str) -> Pace | None:
        return None

    def rest(self, device: str, asleep: bool) -> Seconds:
        return Seconds(0.0)

    def _count_energy(self, now: Elapsed) -> float:
        """Adds what the packages used since the last call; their mean watts over that time."""
        seconds, self._read_at = now - self._read_at, now
        used = 0
        for index, counter in enumerate(self._counters):
            value = _number(counter)
            step = value - self._counted[index]
            used += step if step >= 0 else step + self._ranges[index]
            self._counted[index] = value
        self._energy_j += used / 1e6
        return used / 1e6 / seconds if self._counters and seconds > 0 else math.nan


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
