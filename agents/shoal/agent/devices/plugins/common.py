"""What all vendors' modules say of a device in the same way."""

from collections.abc import Mapping

from shoal.agent.devices.plugins.listing import ListedDevice
from shoal.agent.devices.runtime import runtime_version
from shoal.agent.driver_port import ProviderPlugin
from shoal.types.device import Device, DeviceKind
from shoal.types.units import Bytes


def device_of(
    listed: ListedDevice,
    *,
    name: str,
    model: str,
    memory_bytes: int,
    parallelism: int = 1,
    vendor: str = "",
    attributes: Mapping[str, str] | None = None,
) -> Device:
    """The device, named by the agent; the receipts of an earlier version of runtime or plugin are not its own."""
    package = listed.package.replace("_", "-")
    known = {"plugin": f"{package} {listed.version}", **listed.about, **(attributes or {})}
    return Device(
        name=name,
        kind=DeviceKind(listed.hardware.lower()),
        vendor=vendor or listed.vendor or "unknown",
        model=model,
        driver=package,
        driver_version=listed.version,
        runtime_version=f"{runtime_version()}, {package} {listed.version}",
        provider=listed.provider,
        memory_bytes=Bytes(memory_bytes),
        parallelism=parallelism,
        attributes=known,
    )


def plugin_of(listed: ListedDevice) -> ProviderPlugin:
    return ProviderPlugin(listed.library, listed.hardware, listed.index)
