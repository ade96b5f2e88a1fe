"""NVIDIA devices, through NVML (`nvidia-ml-py`, an extra): whole ones, or their MIG instances where they are divided.

Every figure that a device does not give (NOT_SUPPORTED on many) is NaN; a device that fell off the bus is DEVICE_LOST.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from shoal.agent.devices.runtime import runtime_version
from shoal.agent.ports import Clock, DriverOptions, Pace
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, Reading
from shoal.types.units import Bytes, Seconds, Watts

_SLOWDOWNS: Final = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Reasons that slow a device below what was asked: power cap, hardware, software heat, hardware heat, power brake."""
_TEMPERATURE_GPU: Final = 0


class CudaDriver:
    """nvml: the `pynvml` module, or a recording of one; None to import it, and find no devices where it is missing."""

    def __init__(self, clock: Clock, options: DriverOptions, nvml: Any = None) -> None:
        self._clock = clock
        self._nvml = _load() if nvml is None else _started(nvml)
        self._handles: dict[str, Any] = {}
        self._parents: dict[str, Any] = {}

    def discover(self) -> tuple[Device, ...]:
        if self._nvml is None:
            return ()
        devices: list[Device] = []
        for index in range(self._ask("nvmlDeviceGetCount") or 0):
            whole = self._ask("nvmlDeviceGetHandleByIndex", index)
            if whole is None:
                continue
            parts = self._instances(whole)
            for part, handle in enumerate(parts or [whole]):
                name = f"gpu{index}-mig{part}" if parts else f"gpu{index}"
                self._handles[name], self._parents[name] = handle, whole
                devices.append(self._device(name, handle, whole, divided=bool(parts)))
        return tuple(devices)

    def read(self, device: str) -> Reading:
        """Of a MIG instance: its own memory, and heat, power and energy of the whole device, which alone has meters."""
        handle, whole = self._handles.get(device), self._parents.get(device)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle) if handle is not None else None
        if memory is None:
            raise refuse(
                Code.DEVICE_LOST, f"NVML does not answer for {device!r:.80}", "a device", "see dmesg for Xid errors"
            )
        use = self._ask("nvmlDeviceGetUtilizationRates", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", whole) or 0
        return Reading(
            device=device,
            free_bytes=Bytes(memory.free),
            utilisation=use.gpu / 100 if use is not None else math.nan,
            temperature_c=_float(self._ask("nvmlDeviceGetTemperature", whole, _TEMPERATURE_GPU)),
            power_w=Watts(_float(self._ask("nvmlDeviceGetPowerUsage", whole)) / 1000),
            energy_j=_float(self._ask("nvmlDeviceGetTotalEnergyConsumption", whole)) / 1000,
            taken_at=self._clock.wall(),
            throttled=bool(reasons & _SLOWDOWNS),
        )

    def pace(self, device: str) -> Pace | None:
        return None

    def rest(self, device: str, asleep: bool) -> Seconds:
        return Seconds(0.0)

    def _instances(self, whole: Any) -> list[Any]:
        mode = self._ask("nvmlDeviceGetMigMode", whole)
        if not mode or not mode[0]:
            return []
        count = self._ask("nvmlDeviceGetMaxMigDeviceCount", whole) or 0
        found = (self._ask("nvmlDeviceGetMigDeviceHandleByIndex", whole, index) for index in range(count))
        return [handle for handle in found if handle is not None]

    def _device(self, name: str, handle: Any, whole: Any, *, divided: bool) -> Device:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", whole)
        limit_mw = self._ask("nvmlDeviceGetEnforcedPowerLimit", whole)
        attributes = {
            "uuid": self._ask("nvmlDeviceGetUUID", handle),
            "compute_capability": ".".join(map(str, capability)) if capability else None,
            "power_limit_w": f"{limit_mw / 1000:.0f}" if limit_mw else None,
            "mig": "instance" if divided else None,
            "sleep": "no: its driver lowers its clocks by itself, and takes no such order",
        }
        return Device(
            name=name,
            kind=DeviceKind.GPU,
            vendor="NVIDIA",
            model=str(self._ask("nvmlDeviceGetName", handle) or self._ask("nvmlDeviceGetName", whole) or "unknown"),
            driver="nvidia",
            driver_version=str(self._ask("nvmlSystemGetDriverVersion") or ""),
            runtime_version=runtime_version(),
            provider="CUDAExecutionProvider",
            memory_bytes=Bytes(memory.total if memory is not None else 0),
            attributes={key: str(value) for key, value in attributes.items() if value},
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        """The answer, or None where this device or driver has none."""
        call: Callable[..., Any] | None = getattr(self._nvml, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None


def _load() -> Any:
    try:
        import pynvml  # an extra, on machines with such a device only
    except ImportError:
        return None
    return _started(pynvml)


def _started(nvml: Any) -> Any:
    """None where there is no driver or no permission to use it."""
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        return None
    return nvml


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)
