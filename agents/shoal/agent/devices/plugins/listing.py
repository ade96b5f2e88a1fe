"""Which devices the installed plugin providers find: `python -m shoal.agent.devices.plugins.listing` prints one line.

In a process of its own that ends, because the runtime takes 50 MB that a driver would hold for as long as it runs.
"""

import os
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any, Final

from shoal.agent.packing import pack

PACKAGES: Final = ("onnxruntime_ep_", "onnxruntime_qnn")
"""How the packages of plugins begin (ONNX Runtime, docs/execution-providers/plugin-ep-libraries/packaging; Qualcomm's
is older than that rule). Each has `get_library_path` and `get_ep_name`."""


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One pair of provider and hardware, as the runtime lists it (`get_ep_devices`)."""

    # ONNX Runtime's name of the provider.
    provider: str
    # Name of the package.
    package: str
    # Version of the package.
    version: str
    # Path of the library.
    library: str
    # Kind of the hardware: `CPU`, `GPU` or `NPU`.
    hardware: str
    # Which one of that kind and provider: 0 is the first.
    index: int
    # The maker of the hardware.
    vendor: str
    # Its maker's PCI id; 0: unknown.
    vendor_id: int
    # Its own PCI id; 0: unknown.
    device_id: int
    # What the provider, and the runtime, tell of it.
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Listing:
    """What all installed plugins answered."""

    devices: tuple[ListedDevice, ...] = ()
    # By package: why it could not be loaded.
    failed: Mapping[str, str] = field(default_factory=dict)


def installed_packages() -> tuple[str, ...]:
    """Packages of plugins in this environment. Imports none of them."""
    return tuple(sorted(each.name for each in pkgutil.iter_modules() if each.name.startswith(PACKAGES)))


def list_devices() -> Listing:
    """Register every installed plugin, and ask the runtime for its devices."""
    import onnxruntime as ort

    found: list[ListedDevice] = []
    failed: dict[str, str] = {}
    for name in installed_packages():
        try:
            package = import_module(name)
            library, provider = str(package.get_library_path()), str(package.get_ep_name())
            ort.register_execution_provider_library(provider, library)
            version = metadata.version(name.replace("_", "-"))
        except Exception as error:  # one broken plugin hides no other
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        counted: dict[str, int] = {}
        for each in ort.get_ep_devices():
            if each.ep_name == provider:
                kind = each.device.type.name
                index = counted[kind] = counted.get(kind, -1) + 1
                found.append(_listed(each, provider, name, version, library, index))
    return Listing(tuple(found), failed)


def _listed(each: Any, provider: str, package: str, version: str, library: str, index: int) -> ListedDevice:
    about = {**dict(each.device.metadata), **dict(each.ep_metadata)}
    about.pop("library_path", None)  # it is of no use elsewhere
    return ListedDevice(
        provider=provider,
        package=package,
        version=version,
        library=library,
        hardware=each.device.type.name,
        index=index,
        vendor=each.device.vendor,
        vendor_id=each.device.vendor_id,
        device_id=each.device.device_id,
        about={str(key)[:100]: str(value)[:300] for key, value in list(about.items())[:32]},
    )


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a vendor's library prints must not mix with the answer
    answers.write(pack(list_devices()) + b"\n")
    answers.flush()
    sys.stdout.flush()
    os._exit(0)  # a vendor's library may crash as it is unloaded
