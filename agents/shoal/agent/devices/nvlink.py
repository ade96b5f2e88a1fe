"""NVIDIA's links between GPUs, through NVML. From documents.

Sources: NVML API reference, NvLink methods, and `nvmlDeviceGetFieldValues` with NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
(90), "common NVLink speed in MBps for active links", one way: `nvidia-smi nvlink -s` shows it as GB/s of each link.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from shoal.types.device import DeviceLink

SWITCH: Final = "nvswitch"
"""As `DeviceLink.to`: each GPU on it reaches every other one over all its links."""
_MOST_LINKS: Final = 18
"""NVML_NVLINK_MAX_LINKS."""
_SPEED_FIELD: Final = 90
_UNSIGNED_INT: Final = 1
_TO_SWITCH: Final = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH."""


def nvlinks(
    call: Callable[..., Any], handle: Any, device_at: Callable[[Any], str], others: Mapping[str, str]
) -> tuple[DeviceLink, ...]:
    """A link for each other end, with all lanes between the two.

    call: what calls a function of NVML, None where it does not answer. device_at: the address of a PCI structure.
    others: the node's devices by address; a GPU that is none of them is left out.
    """
    ends = Counter[str]()
    for link in range(_MOST_LINKS):
        if call("nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        if call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _TO_SWITCH:
            ends[SWITCH] += 1
        else:
            ends[others.get(device_at(call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)), "")] += 1
    del ends[""]
    speed = _bytes_per_s(call("nvmlDeviceGetFieldValues", handle, [_SPEED_FIELD])) if ends else None
    return tuple(
        DeviceLink(f"NVLink x{count}", speed * count if speed is not None else None, "NVML", to)
        for to, count in sorted(ends.items())
    )


def _bytes_per_s(values: Any) -> float | None:
    """Of one link; None where NVML does not say."""
    for value in values or ():
        if (value.nvmlReturn, value.valueType) == (0, _UNSIGNED_INT) and 0 < value.value.uiVal < 2**31:
            return float(value.value.uiVal) * 1e6
    return None
