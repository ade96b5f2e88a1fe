"""Where a device on PCI Express sits in its machine: its NUMA node, and its link to the host.

A link's speed and width are what both of its ends can do, not what they do now: a device that idles lowers both to save
power (NVIDIA, nvidia-smi(1), `pcie.link.gen.current`: "may be reduced when the GPU is not in use").

Sources: the kernel's `Documentation/ABI/testing/sysfs-bus-pci` and `drivers/pci/pci-sysfs.c` (`numa_node`, -1 where
there is none; `max_link_speed`, `16.0 GT/s PCIe`, in older kernels `16 GT/s`; `max_link_width`); PCI Express Base
Specification: 8b/10b at 2.5 and 5 GT/s, 128b/130b from 8 GT/s, and 236 bytes of packets in a flit of 256 at 64 GT/s.
"""

import re
from typing import Final

from shoal.agent.devices.machine import Machine, number
from shoal.types.device import DeviceLink

MAX_NUMA_NODE: Final = 1023
"""Linux has at most 1024 (`NODES_SHIFT`, at most 10)."""
_MAX_HOPS: Final = 8
"""Ends of links on the way from a device to the host's bridge: two for each switch, and one at each side."""
_TRANSFERS_PER_S: Final = (2.5e9, 5e9, 8e9, 16e9, 32e9, 64e9)
"""Of one lane, by generation from 1."""
_CODED: Final = (8 / 10, 8 / 10, 128 / 130, 128 / 130, 128 / 130, 236 / 256)
"""Share of the bits that are not encoding, by generation from 1."""
_LANES: Final = frozenset({1, 2, 4, 8, 12, 16, 32})
_SPEED: Final = re.compile(r"(\d{1,2}(?:\.\d)?) GT/s(?: PCIe)?", re.ASCII)
_ADDRESS: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def pci_folder(address: str) -> str:
    """The folder of sysfs that describes the device at this address (`0000:3b:00.0`); empty for anything else."""
    return f"/sys/bus/pci/devices/{address}" if _ADDRESS.fullmatch(address) else ""


def numa_node(machine: Machine, folder: str) -> int | None:
    """The NUMA node of the device in that folder of sysfs; None where it has none, or nobody says."""
    found = number(machine.text(f"{folder}/numa_node")) if folder else None
    return found if found is not None and 0 <= found <= MAX_NUMA_NODE else None


def host_links(machine: Machine, folder: str) -> tuple[DeviceLink, ...]:
    """The link of the device in that folder of sysfs: the slowest of those on its way to the host; empty: unknown."""
    ends: list[DeviceLink] = []
    for _ in range(_MAX_HOPS if folder else 0):
        speed = machine.text(f"{folder}/max_link_speed")
        if not speed:
            break  # no PCI Express: the bridge to the host
        ends += pcie_links(_generation(speed), number(machine.text(f"{folder}/max_link_width")), "sysfs")
        folder += "/.."
    return (min(ends, key=lambda end: end.bytes_per_s or 0.0),) if ends else ()


def pcie_links(generation: object, lanes: object, source: str) -> tuple[DeviceLink, ...]:
    """The link to the host, of so many lanes of this generation; empty where these can be none.

    generation: from 1. source: who says both. Bytes/s one way = transfers/s of a lane x lanes x share that is not
    encoding / 8: 4.0 x16 is 31.5 GB/s.
    """
    if not isinstance(generation, int) or not isinstance(lanes, int):
        return ()
    if not 1 <= generation <= len(_TRANSFERS_PER_S) or lanes not in _LANES:
        return ()
    bits_per_s = _TRANSFERS_PER_S[generation - 1] * lanes * _CODED[generation - 1]
    return (DeviceLink(f"PCIe {generation}.0 x{lanes}", bits_per_s / 8, source),)


def _generation(speed: str) -> int | None:
    found = _SPEED.fullmatch(speed.strip())
    transfers = float(found[1]) * 1e9 if found else 0.0
    return _TRANSFERS_PER_S.index(transfers) + 1 if transfers in _TRANSFERS_PER_S else None
