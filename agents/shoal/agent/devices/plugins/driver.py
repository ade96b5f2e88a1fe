"""The driver of every device that a plugin provider finds."""

import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from shoal.agent.devices.calls import FoundDevice
from shoal.agent.devices.cpu import NAME as CPU
from shoal.agent.devices.cpu import CpuDriver
from shoal.agent.devices.host import Host
from shoal.agent.devices.intel import IntelTelemetry
from shoal.agent.devices.plugins import openvino, other, qnn
from shoal.agent.devices.plugins.listing import ListedDevice, Listing, installed_packages
from shoal.agent.driver_port import DeviceAccess, DriverClock, DriverOptions
from shoal.agent.packing import unpack
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Device, Reading
from shoal.types.units import Bytes, Seconds, Watts

VENDORS: Final[Mapping[str, Callable[[ListedDevice, Host, DriverOptions], FoundDevice | None]]] = {
    openvino.PROVIDER: openvino.found_device,
    qnn.PROVIDER: qnn.found_device,
}
"""By provider: the device as the agent offers it. None where it offers none."""
SIMULATORS: Final = (qnn.SIMULATOR,)
LISTING: Final = (sys.executable, "-P", "-m", "shoal.agent.devices.plugins.listing")
LISTING_S: Final = 15.0
"""The longest that all plugins may take to load and to find their devices. Below `process.DISCOVER_S`."""


class PluginDriver:
    """Offers each pair of provider and hardware as a device. `listing` asks the plugins; it takes seconds, once."""

    def __init__(
        self,
        clock: DriverClock,
        options: DriverOptions,
        root: Path = Path("/"),
        listing: Callable[[], Listing] | None = None,
    ) -> None:
        """Raises ShoalError(FIELD_INVALID) for a simulator that there is not."""
        for name in options.simulate:
            if name not in SIMULATORS:
                raise refuse(
                    Code.FIELD_INVALID, f"no simulator {name!r:.80}", f"one of {', '.join(SIMULATORS)}", "see `devices`"
                )
        self._clock = clock
        self._options = options
        self._host = Host(root)
        self._processor = CpuDriver(clock, options, root)
        self._listing = listing or _listing
        self._intel = IntelTelemetry(clock)
        self._found: dict[str, FoundDevice] | None = None

    def discover(self) -> tuple[Device, ...]:
        """Raises ShoalError(DEVICE_UNREACHABLE) if the plugins do not answer."""
        if self._found is None:
            listing = self._listing()
            for package, why in listing.failed.items():
                print(f"{package} cannot be loaded: {why}", file=sys.stderr)
            self._found = {}
            for listed in listing.devices:
                found = VENDORS.get(listed.provider, other.found_device)(listed, self._host, self._options)
                if found is not None:
                    self._found[found.device.name] = found
            simulated = {each.device.attributes.get("simulator") for each in self._found.values()}
            if missing := sorted(set(self._options.simulate) - simulated):
                raise refuse(
                    Code.FIELD_INVALID,
                    f"no plugin here simulates {', '.join(missing)}",
                    "the vendor's plugin, on a machine for which it has a simulator",
                    "install the agent's extra `qnn` on x86-64, or leave --simulate out",
                )
        return tuple(each.device for each in self._found.values())

    def read(self, device: str) -> Reading:
        """Of a provider on the processor: what the processor reports, without its energy, which counts there. Of all
        others the runtime tells nothing but free memory, which is the host's where they have none of their own; of
        Intel's the kernel tells more."""
        found = self._find(device)
        if found.device.hardware == CPU:
            said = self._processor.read(CPU)
            free = Bytes(min(found.device.memory_bytes, said.free_bytes))
            return replace(said, device=device, free_bytes=free, power_w=Watts(math.nan), energy_j=math.nan)
        plugin = found.access.plugin
        hardware = plugin.hardware if plugin is not None and found.device.provider == openvino.PROVIDER else ""
        index = plugin.index if plugin is not None else 0
        return Reading(
            device=device,
            free_bytes=Bytes(min(found.device.memory_bytes, self._host.free_bytes())),
            utilisation=self._intel.npu_utilisation(index) if hardware == "NPU" else math.nan,
            temperature_c=math.nan,
            power_w=Watts(math.nan),
            energy_j=self._intel.graphics_joules(index) if hardware == "GPU" else math.nan,
            taken_at=self._clock.wall(),
        )

    def access(self, device: str) -> DeviceAccess:
        return self._find(device).access

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        return Seconds(0.0)

    def _find(self, device: str) -> FoundDevice:
        known = self._found or {}
        if device not in known:
            raise refuse(Code.DEVICE_LOST, f"no plugin's device {device!r:.80}", ", ".join(known) or "none", "")
        return known[device]


def _listing() -> Listing:
    """Raises ShoalError(DEVICE_UNREACHABLE)."""
    if not installed_packages():
        return Listing()
    try:
        ended = subprocess.run(LISTING, stdin=subprocess.DEVNULL, capture_output=True, timeout=LISTING_S, check=False)
        sys.stderr.buffer.write(ended.stderr[-4096:])
        return unpack(Listing, ended.stdout)
    except (OSError, subprocess.TimeoutExpired, ShoalError) as error:
        raise refuse(
            Code.DEVICE_UNREACHABLE, f"the plugins' listing: {error}"[:300], "their devices", "see the agent's log"
        ) from error
