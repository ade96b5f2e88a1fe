"""Device drivers by entry point (group `shoal.devices`), including third-party ones."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from shoal.agent.devices.installation import CPU_DRIVER
from shoal.agent.devices.plugins.listing import installed_packages
from shoal.agent.driver_port import DriverOptions

SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "amd": ("/dev/kfd", "/sys/module/amdgpu"),
    "ascend": ("/dev/davinci_manager",),
    "jetson": ("/proc/device-tree/compatible",),
    "nvidia": ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg"),
}
"""Our drivers of hardware that a machine may lack: files of which one is there wherever the vendor's own driver is
loaded (`/dev/dxg`: Windows' subsystem for Linux)."""


def installed_drivers(*, cpu: bool = True) -> Mapping[str, str]:
    """Name -> `module:class`, in the order of names. `cpu` False leaves out the CPU's."""
    found = {each.name: each.value for each in entry_points(group="shoal.devices") if cpu or each.name != CPU_DRIVER}
    return dict(sorted(found.items()))


def present_drivers(options: DriverOptions, *, cpu: bool, root: Path = Path("/")) -> Mapping[str, str]:
    """Those of the installed drivers that may find a device on this machine. A driver is a process, and half a dozen
    that find nothing would take a small board seconds at each start. Of others' drivers nothing is known: all may."""

    def may_find(name: str) -> bool:
        match name:
            case "emulated":
                return bool(options.emulate)
            case "plugins":
                return bool(options.simulate or installed_packages())
            case _:
                signs = SIGNS.get(name)
                return signs is None or any((root / sign.lstrip("/")).exists() for sign in signs)

    return {name: factory for name, factory in installed_drivers(cpu=cpu).items() if may_find(name)}
