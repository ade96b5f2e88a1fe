"""The host's CPU, through ONNX Runtime's own provider."""

import math
from pathlib import Path

from shoal.agent.devices.host import Host
from shoal.agent.devices.rapl import RAPL, RaplCounter
from shoal.agent.devices.runtime import runtime_version
from shoal.agent.driver_port import DeviceAccess, DriverClock, DriverOptions, EnergyCounter
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, Reading
from shoal.types.units import Bytes, Elapsed, Seconds, Watts

NAME = "cpu0"


class CpuDriver:
    """One device for all sockets, because the runtime spreads over them. Its parallelism is the number of usable
    processors."""

    def __init__(self, clock: DriverClock, options: DriverOptions, root: Path = Path("/")) -> None:
        self._clock = clock
        self._host = Host(root)
        # What the region knows as its memory, for as long as this driver runs.
        self._memory_bytes = self._host.limit_bytes()
        self._ticks = self._host.busy_and_total()
        self._throttles = self._host.throttle_count()
        self._counters = tuple(map(str, self._host.energy_counters()))
        self._counter = RaplCounter(*self._counters, now=clock.now) if self._counters else None
        self._energy_j = 0.0 if self._counters else math.nan
        self._read_at = clock.now()

    def discover(self) -> tuple[Device, ...]:
        processor = self._host.processor()
        attributes = {
            "isa": " ".join(processor.isa),
            "caches": ", ".join(processor.caches),
            "numa_nodes": str(processor.numa_nodes),
            "cores": str(processor.cores),
            "threads": str(processor.threads),
            "energy_counters": " ".join(self._counters),
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
            provider="CPUExecutionProvider",
            memory_bytes=Bytes(self._memory_bytes),
            parallelism=self._host.usable_cores(),
            attributes={name: value for name, value in attributes.items() if value},
        )
        return (device,)

    def read(self, device: str) -> Reading:
        """Utilisation, power and throttling since the last reading. NaN on the first one, or if unknown.

        Free memory is at most what `discover` told: a limit may be raised meanwhile. So is utilisation at most 1: time
        of waiting for a disk may be taken back (proc(5), iowait).
        """
        if device != NAME:
            raise refuse(Code.DEVICE_LOST, f"no processor {device!r:.80}", NAME, "")
        now = self._clock.now()
        ticks, last = self._host.busy_and_total(), self._ticks
        throttles, before = self._host.throttle_count(), self._throttles
        self._ticks, self._throttles = ticks, throttles
        passed = ticks[1] - last[1]
        return Reading(
            device=device,
            free_bytes=Bytes(min(self._memory_bytes, self._host.free_bytes())),
            utilisation=min(1.0, max(0.0, (ticks[0] - last[0]) / passed)) if passed > 0 else math.nan,
            temperature_c=self._host.temperature_c(),
            power_w=Watts(self._update_energy(now)),
            energy_j=self._energy_j,
            taken_at=self._clock.wall(),
            throttled=throttles > before,
        )

    def access(self, device: str) -> DeviceAccess:
        counted = EnergyCounter(RAPL, self._counters, of_processors=True) if self._counters else None
        return DeviceAccess(energy=counted)

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        return Seconds(0.0)

    def _update_energy(self, now: Elapsed) -> float:
        """Add the energy used since the last call. Returns the mean watts over that time."""
        seconds, self._read_at = now - self._read_at, now
        last_j, self._energy_j = self._energy_j, self._counter() if self._counter is not None else math.nan
        return (self._energy_j - last_j) / seconds if seconds > 0 else math.nan
