"""The graphics of NVIDIA's Jetson boards (Tegra), for ONNX Runtime's CUDA provider. From documents: not run on such a
board.

It works in the board's memory. NVML, where it is there at all, tells neither memory nor load of it, so its driver
offers no such device. The provider comes with NVIDIA's build of ONNX Runtime for JetPack; with another one a load is
refused, and says so.

Sources: the kernel's documentation, hwmon/ina3221 (`inN_label`, `inN_input` in millivolts, `currN_input` in
milliamperes), driver-api/thermal (`type`, `temp` in thousandths of a degree), devfreq; NVIDIA, Jetson Linux Developer
Guide r36, platform power and performance (rails of the power monitors, thermal zone `gpu-thermal`); the load of the
graphics, in thousandths, in the file `load` beside its devfreq, as NVIDIA's tegrastats reads it.
"""

import math
import re
from dataclasses import replace
from typing import Final

from shoal.agent.devices import cuda
from shoal.agent.devices.cpu import NAME as CPU
from shoal.agent.devices.machine import LiveMachine, Machine, label, number, scaled_number
from shoal.agent.devices.runtime import runtime_version
from shoal.agent.driver_port import DeviceAccess, DriverClock, DriverOptions
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, Reading
from shoal.types.units import Bytes, Seconds, Watts

NAME: Final = "jetson-gpu0"
_GRAPHICS: Final = frozenset({"gpu", "gv11b", "gp10b", "ga10b", "gb10b"})
"""Names of the graphics in device trees."""
_RELEASE: Final = re.compile(r"# R(\d+) \(release\), REVISION: ([\d.]+)")
_MEMINFO: Final = re.compile(r"^(MemTotal|MemAvailable): +(\d{1,15}) kB$", re.MULTILINE)
_RAILS: Final = frozenset({"GPU", "VDD_GPU"})
"""Of the graphics alone. Orin's `VDD_GPU_SOC` and `VDD_CPU_GPU_CV` measure others with it, and count for none."""
_ZONES: Final = frozenset({"gpu-thermal", "gpu-therm"})
_FILES: Final = ("/dev/nvmap", "/dev/nvhost-*", "/dev/nvgpu/igpu0/*", "/dev/nvsciipc")


class JetsonDriver:
    """`machine` answers in the place of this one, in tests and in recordings."""

    def __init__(self, clock: DriverClock, options: DriverOptions, machine: Machine | None = None) -> None:
        self._clock = clock
        self._machine = machine or LiveMachine()
        # Folder of its devfreq; empty: there is no such device.
        self._folder = ""

    def discover(self) -> tuple[Device, ...]:
        if "nvidia,tegra" not in self._machine.text("/proc/device-tree/compatible"):
            return ()
        memory = self._memory().get("MemTotal", 0)
        for folder in self._machine.paths("/sys/class/devfreq/*"):
            if label(self._text(folder, "device/of_node/name")).rstrip("\0") in _GRAPHICS and memory > 0:
                self._folder = folder
                return (self._device(memory),)
        return ()

    def read(self, device: str) -> Reading:
        memory = self._memory()
        if device != NAME or not self._folder or not {"MemTotal", "MemAvailable"} <= memory.keys():
            raise refuse(Code.DEVICE_LOST, f"no graphics {device!r:.80}", "a Jetson's", "see dmesg")
        load = scaled_number(self._text(self._folder, "device/load"), 1e-3)
        return Reading(
            device=device,
            free_bytes=Bytes(min(memory["MemTotal"], memory["MemAvailable"])),
            utilisation=load if 0 <= load <= 1 else math.nan,
            temperature_c=self._temperature(),
            power_w=self._watts(),
            energy_j=math.nan,
            taken_at=self._clock.wall(),
        )

    def access(self, device: str) -> DeviceAccess:
        if device != NAME or not self._folder:
            return DeviceAccess()
        return replace(cuda.ACCESS, files=tuple(path for pattern in _FILES for path in self._machine.paths(pattern)))

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        return Seconds(0.0)

    def _device(self, memory: int) -> Device:
        release = _RELEASE.match(self._machine.text("/etc/nv_tegra_release"))
        return Device(
            name=NAME,
            kind=DeviceKind.GPU,
            vendor="NVIDIA",
            model=label(self._machine.text("/proc/device-tree/model").rstrip("\0")) or "Jetson",
            driver="nvgpu",
            driver_version=f"L4T {release[1]}.{release[2]}" if release else "unknown",
            runtime_version=runtime_version(),
            provider=cuda.PROVIDER,
            memory_bytes=Bytes(memory),
            attributes={"sleep": "no: its driver gates it by itself, and takes no such order"},
            memory_in=CPU,
        )

    def _memory(self) -> dict[str, int]:
        """Bytes."""
        return {name: int(size) * 1024 for name, size in _MEMINFO.findall(self._machine.text("/proc/meminfo"))}

    def _temperature(self) -> float:
        for zone in self._machine.paths("/sys/class/thermal/thermal_zone*"):
            if self._text(zone, "type").strip().lower() in _ZONES:
                celsius = scaled_number(self._text(zone, "temp"), 1e-3)
                return celsius if celsius >= 0 else math.nan  # off, it has none
        return math.nan

    def _watts(self) -> Watts:
        """Of the rail that feeds the graphics and nothing else; NaN on a board without one."""
        for path in self._machine.paths("/sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*/in[1-3]_label"):
            if self._machine.text(path).strip() in _RAILS:
                folder, channel = path.rpartition("/")[0], path[-len("1_label")]
                millivolts = number(self._text(folder, f"in{channel}_input"))
                milliamperes = number(self._text(folder, f"curr{channel}_input"))
                if millivolts is not None and milliamperes is not None and min(millivolts, milliamperes) >= 0:
                    return Watts(millivolts * milliamperes * 1e-6)
        return Watts(math.nan)

    def _text(self, folder: str, file: str) -> str:
        return self._machine.text(f"{folder}/{file}")
