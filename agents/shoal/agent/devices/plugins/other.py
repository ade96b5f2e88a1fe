"""Devices of plugins that no vendor's module knows: what the runtime tells of them, and no more."""

from dataclasses import replace

from shoal.agent.devices.calls import FoundDevice
from shoal.agent.devices.cpu import NAME as CPU
from shoal.agent.devices.host import Host
from shoal.agent.devices.plugins.common import device_of, plugin_of
from shoal.agent.devices.plugins.listing import ListedDevice
from shoal.agent.driver_port import DeviceAccess, DriverOptions


def found_device(listed: ListedDevice, host: Host, options: DriverOptions) -> FoundDevice | None:
    """The device, with the host's memory. None for one that says it has memory of its own, because nobody says how
    much, and for one that only compiles."""
    if listed.about.get("Discrete") == "1" or listed.about.get("is_virtual") == "1":
        return None
    kind = listed.hardware.lower()
    base = CPU if kind == "cpu" else f"{kind}{listed.index}"
    short = listed.provider.removesuffix("ExecutionProvider").lower()
    device = device_of(
        listed,
        name=f"{base}-{short}",
        model=listed.about.get("Description", f"{listed.vendor} {listed.hardware}"),
        memory_bytes=host.limit_bytes(),
    )
    of_cpu = kind == "cpu"
    device = replace(device, hardware=CPU if of_cpu else "", memory_in="" if of_cpu else CPU)
    return FoundDevice(device, DeviceAccess(plugin=plugin_of(listed)))
