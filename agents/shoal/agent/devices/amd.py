"""AMD's GPUs through the files of the kernel's driver, amdgpu, for ONNX Runtime's MIGraphX provider. From documents,
not run on such hardware.

The provider comes with AMD's build of ONNX Runtime (`onnxruntime-migraphx`); with another one a load is refused, and
says so.

Sources: the kernel's documentation, gpu/amdgpu: driver-misc (`mem_info_vram_total`, `mem_info_vram_used`, `unique_id`,
`product_name`), thermal (`hwmon`: `temp1_input` in thousandths of a degree; `power1_average` and `power1_input` in
microwatts, which "on APUs includes the CPU"; `in1_input`, the voltage of the northbridge, "APUs only";
`gpu_busy_percent`), process isolation (`current_compute_partition`); ROCm, GPU isolation techniques
(`ROCR_VISIBLE_DEVICES`, an index or `GPU-` and the unique id).
"""

import math
import re
from typing import Final

from shoal.agent.devices.cpu import NAME as CPU
from shoal.agent.devices.machine import LiveMachine, Machine, label, number, scaled_number
from shoal.agent.devices.runtime import runtime_version
from shoal.agent.devices.topology import host_links, numa_node
from shoal.agent.driver_port import DeviceAccess, DriverClock, DriverOptions
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, Reading
from shoal.types.units import Bytes, Seconds, Watts

PROVIDER: Final = "MIGraphXExecutionProvider"
_VENDOR: Final = 0x1002
_CARD: Final = re.compile(r"/sys/class/drm/card\d+/device")
_FACTS: Final = {
    "unique_id": "unique_id",
    "partition": "current_compute_partition",
}
"""Attributes of the device, by the file that holds each."""


class AmdDriver:
    """`machine` answers in the place of this one, in tests and in recordings."""

    def __init__(self, clock: DriverClock, options: DriverOptions, machine: Machine | None = None) -> None:
        self._clock = clock
        self._machine = machine or LiveMachine()
        self._folders: dict[str, str] = {}

    def discover(self) -> tuple[Device, ...]:
        """One device for each card with memory of its own or set aside for it."""
        devices: list[Device] = []
        for folder in self._machine.paths("/sys/class/drm/card[0-9]*/device"):
            if not _CARD.fullmatch(folder) or number(self._text(folder, "vendor"), 16) != _VENDOR:
                continue
            memory = number(self._text(folder, "mem_info_vram_total"))
            if not memory or memory < 0:
                continue
            name = f"amd-gpu{len(devices)}"
            self._folders[name] = folder
            devices.append(self._device(name, folder, memory))
        return tuple(devices)

    def read(self, device: str) -> Reading:
        folder = self._folders.get(device, "")
        total, used = (number(self._text(folder, f"mem_info_vram_{name}")) for name in ("total", "used"))
        if not folder or not total or used is None:
            raise refuse(Code.DEVICE_LOST, f"amdgpu does not answer for {device!r:.80}", "a device", "see dmesg")
        busy = scaled_number(self._text(folder, "gpu_busy_percent"), 0.01)
        watts = self._sensor(folder, "power1_average", 1e-6)
        return Reading(
            device=device,
            free_bytes=Bytes(max(0, min(total, total - used))),
            utilisation=busy if 0 <= busy <= 1 else math.nan,
            temperature_c=self._sensor(folder, "temp1_input", 1e-3),
            power_w=Watts(self._sensor(folder, "power1_input", 1e-6) if math.isnan(watts) else watts),
            energy_j=math.nan,
            taken_at=self._clock.wall(),
        )

    def access(self, device: str) -> DeviceAccess:
        folder = self._folders.get(device)
        if folder is None:
            return DeviceAccess()
        nodes = self._machine.paths(f"{folder}/drm/renderD*")
        files = ("/dev/kfd", *(f"/dev/dri/{node.rpartition('/')[2]}" for node in nodes))
        identity = self._text(folder, "unique_id").strip()
        visible = f"GPU-{identity}" if re.fullmatch(r"[0-9a-f]{1,16}", identity) else device.removeprefix("amd-gpu")
        return DeviceAccess({"ROCR_VISIBLE_DEVICES": visible}, files)

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        return Seconds(0.0)

    def _device(self, name: str, folder: str, memory: int) -> Device:
        facts = {fact: label(self._text(folder, file)) for fact, file in _FACTS.items()}
        facts["sleep"] = "no: its driver lowers its clocks by itself, and takes no such order"
        product = label(self._text(folder, "product_name"))
        in_processor = bool(self._machine.paths(f"{folder}/hwmon/hwmon*/in1_input"))
        return Device(
            name=name,
            kind=DeviceKind.GPU,
            vendor="AMD",
            model=product or f"PCI device {label(self._text(folder, 'device')) or 'unknown'}",
            driver="amdgpu",
            driver_version=label(self._machine.text("/proc/sys/kernel/osrelease")),
            runtime_version=runtime_version(),
            provider=PROVIDER,
            memory_bytes=Bytes(memory),
            attributes={fact: value for fact, value in facts.items() if value},
            power_in=CPU if in_processor else "",
            numa=numa_node(self._machine, folder),
            # In a processor its memory is set aside of the host's, whatever its port says of lanes.
            links=() if in_processor else host_links(self._machine, folder),
        )

    def _text(self, folder: str, file: str) -> str:
        return self._machine.text(f"{folder}/{file}")

    def _sensor(self, folder: str, file: str, factor: float) -> float:
        """The first sensor of that name; NaN if there is none, or if it is below 0."""
        for path in self._machine.paths(f"{folder}/hwmon/hwmon*/{file}"):
            value = scaled_number(self._machine.text(path), factor)
            return value if value >= 0 else math.nan
        return math.nan
