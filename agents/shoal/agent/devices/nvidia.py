"""NVIDIA devices through NVML (`nvidia-ml-py`, an extra): whole devices, or the MIG instances of a partitioned one.

A figure that a device does not report (NOT_SUPPORTED on many) is NaN. A device that fell off the bus is DEVICE_LOST.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from shoal.agent.devices import cuda
from shoal.agent.devices.machine import LiveMachine, Machine, label
from shoal.agent.devices.nvlink import nvlinks
from shoal.agent.devices.runtime import runtime_version
from shoal.agent.devices.topology import numa_node, pci_folder, pcie_links
from shoal.agent.driver_port import DeviceAccess, DriverClock, DriverOptions, EnergyCounter, MemoryCounter
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, DeviceLink, Reading
from shoal.types.units import Bytes, Seconds, Watts

_SLOWDOWNS: Final = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Reasons that slow a device below its requested clocks: power cap, hardware, software thermal, hardware thermal, power
brake."""
_TEMPERATURE_GPU: Final = 0


class NvidiaDriver:
    """`machine` answers in the place of this one, in tests and in recordings. Without `pynvml` there are no devices."""

    def __init__(self, clock: DriverClock, options: DriverOptions, machine: Machine | None = None) -> None:
        self._clock = clock
        self._machine = machine or LiveMachine()
        self._nvml = _open_nvml(self._machine)
        self._handles: dict[str, Any] = {}
        self._parents: dict[str, Any] = {}

    def discover(self) -> tuple[Device, ...]:
        if self._nvml is None:
            return ()
        devices: list[Device] = []
        found = ((index, self._call("nvmlDeviceGetHandleByIndex", index)) for index in range(self._count()))
        wholes = {index: handle for index, handle in found if handle is not None}
        addresses = {index: _address(self._call("nvmlDeviceGetPciInfo", whole)) for index, whole in wholes.items()}
        others = {address: f"gpu{index}" for index, address in addresses.items() if address}
        for index, whole in wholes.items():
            parts = self._mig_instances(whole)
            # A divided device has no links to others (NVIDIA, MIG User Guide, application considerations).
            peers = () if parts else nvlinks(self._call, whole, _address, others)
            for part, handle in enumerate(parts or [whole]):
                name = f"gpu{index}-mig{part}" if parts else f"gpu{index}"
                self._handles[name], self._parents[name] = handle, whole
                memory = self._call("nvmlDeviceGetMemoryInfo", handle)
                if memory is not None and memory.total > 0:  # else nothing could be placed on it
                    device = self._device(name, handle, whole, memory.total, divided=bool(parts))
                    # The whole device has one meter, which each instance reports.
                    power_in = f"gpu{index}-mig0" if part else ""
                    devices.append(
                        replace(
                            device,
                            power_in=power_in,
                            numa=numa_node(self._machine, pci_folder(addresses[index])),
                            links=(*self._host_links(whole), *peers),
                        )
                    )
        return tuple(devices)

    def read(self, device: str) -> Reading:
        """A MIG instance reports its own memory. Temperature, power and energy are the whole device's, which alone has
        sensors."""
        handle, whole = self._handles.get(device), self._parents.get(device)
        memory = self._call("nvmlDeviceGetMemoryInfo", handle) if handle is not None else None
        if memory is None:
            raise refuse(
                Code.DEVICE_LOST, f"NVML does not answer for {device!r:.80}", "a device", "see dmesg for Xid errors"
            )
        use = self._call("nvmlDeviceGetUtilizationRates", handle)
        reasons = self._call("nvmlDeviceGetCurrentClocksThrottleReasons", whole) or 0
        return Reading(
            device=device,
            free_bytes=Bytes(memory.free),
            utilisation=use.gpu / 100 if use is not None else math.nan,
            temperature_c=_float(self._call("nvmlDeviceGetTemperature", whole, _TEMPERATURE_GPU)),
            power_w=Watts(_float(self._call("nvmlDeviceGetPowerUsage", whole)) / 1000),
            energy_j=_float(self._call("nvmlDeviceGetTotalEnergyConsumption", whole)) / 1000,
            taken_at=self._clock.wall(),
            throttled=bool(reasons & _SLOWDOWNS),
        )

    def access(self, device: str) -> DeviceAccess:
        """The runtime sees only this device, or MIG instance, as its device 0. CUDA reads the variable when the first
        session of a process opens it.

        Source: CUDA C++ Programming Guide, environment variables, CUDA_VISIBLE_DEVICES.
        """
        files = tuple(map(str, sorted(Path("/dev").glob("nvidia*"))))
        handle = self._handles.get(device)
        uuid = self._call("nvmlDeviceGetUUID", handle) if handle is not None else None
        if not uuid:
            return replace(cuda.ACCESS, files=files, memory="cuda")
        module, named = "shoal.agent.devices.nvidia", (str(uuid),)
        energy = EnergyCounter(f"{module}:open_energy_counter", named, of_processors=False)
        memory = MemoryCounter(f"{module}:open_memory_counter", named)
        return replace(
            cuda.ACCESS,
            environment={"CUDA_VISIBLE_DEVICES": str(uuid)},
            files=files,
            memory="cuda",
            energy=energy,
            memory_counter=memory,
        )

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        return Seconds(0.0)

    def _count(self) -> int:
        return self._call("nvmlDeviceGetCount") or 0

    def _host_links(self, whole: Any) -> tuple[DeviceLink, ...]:
        """The most "possible with this device and system". One that is beside its processor has a wider link, of which
        NVML tells no speed.

        Source: NVML API, nvmlDeviceGetMaxPcieLink*, nvmlDeviceGetC2cModeInfoV.
        """
        beside = self._call("nvmlDeviceGetC2cModeInfoV", whole)
        if beside is not None and beside.isC2cEnabled:
            return ()
        generation = self._call("nvmlDeviceGetMaxPcieLinkGeneration", whole)
        return pcie_links(generation, self._call("nvmlDeviceGetMaxPcieLinkWidth", whole), "NVML")

    def _mig_instances(self, whole: Any) -> list[Any]:
        mode = self._call("nvmlDeviceGetMigMode", whole)
        if not mode or not mode[0]:
            return []
        count = self._call("nvmlDeviceGetMaxMigDeviceCount", whole) or 0
        found = (self._call("nvmlDeviceGetMigDeviceHandleByIndex", whole, index) for index in range(count))
        return [handle for handle in found if handle is not None]

    def _device(self, name: str, handle: Any, whole: Any, memory: int, *, divided: bool) -> Device:
        capability = self._call("nvmlDeviceGetCudaComputeCapability", whole)
        limit_mw = self._call("nvmlDeviceGetEnforcedPowerLimit", whole)
        ecc = self._call("nvmlDeviceGetEccMode", whole)
        attributes = {
            "uuid": self._call("nvmlDeviceGetUUID", handle),
            "compute_capability": ".".join(map(str, capability)) if capability else None,
            "power_limit_w": f"{limit_mw / 1000:.0f}" if limit_mw else None,
            "mig": "instance" if divided else None,
            "pci": _address(self._call("nvmlDeviceGetPciInfo", whole)),
            "ecc": "on" if ecc and ecc[0] else None,
            "sleep": "no: its driver lowers its clocks by itself, and takes no such order",
        }
        return Device(
            name=name,
            kind=DeviceKind.GPU,
            vendor="NVIDIA",
            model=label(self._call("nvmlDeviceGetName", handle) or self._call("nvmlDeviceGetName", whole) or "unknown"),
            driver="nvidia",
            driver_version=label(self._call("nvmlSystemGetDriverVersion") or ""),
            runtime_version=runtime_version(),
            provider=cuda.PROVIDER,
            memory_bytes=Bytes(memory),
            attributes={key: label(value) for key, value in attributes.items() if value},
        )

    def _call(self, function: str, *arguments: Any) -> Any:
        """The result, or None if this device or driver has none."""
        call: Callable[..., Any] | None = getattr(self._nvml, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None


def _address(pci: Any) -> str:
    """As sysfs writes it: domains have four digits there. Empty: unknown."""
    return label(getattr(pci, "busId", "")).lower()[-12:]


def open_energy_counter(uuid: str) -> Callable[[], float]:
    """Joules that the device has used so far; NaN while it does not answer. Raises OSError if it, or its library, does
    not count them."""
    nvml, energy_mj = _open_call(uuid, "nvmlDeviceGetTotalEnergyConsumption")

    def count() -> float:
        try:
            return float(energy_mj()) / 1000
        except nvml.NVMLError:
            return math.nan

    return count


def open_memory_counter(uuid: str) -> Callable[[], int | None]:
    """Bytes of the device's memory that this process holds, its context among them; None where NVML lists no such
    process, as in a container with process ids of its own, or no figure of it. Raises OSError if it lists none at all.

    Source: NVML API, nvmlDeviceGetComputeRunningProcesses (`usedGpuMemory`).
    """
    nvml, processes = _open_call(uuid, "nvmlDeviceGetComputeRunningProcesses")

    def count() -> int | None:
        try:
            own = [each.usedGpuMemory for each in processes() if each.pid == os.getpid()]
        except nvml.NVMLError:
            return None
        return sum(own) if own and None not in own else None

    return count


def _open_call(uuid: str, function: str) -> tuple[Any, Callable[[], Any]]:
    """NVML, and what calls that function of it for the device. Raises OSError if that does not answer."""
    nvml = _open_nvml(LiveMachine())
    if nvml is None:
        raise OSError("NVML is not there")
    try:
        call = partial(getattr(nvml, function), nvml.nvmlDeviceGetHandleByUUID(uuid))
        call()
    except (AttributeError, nvml.NVMLError) as error:
        raise OSError(f"{function} does not answer for {uuid}") from error
    return nvml, call


def _open_nvml(machine: Machine) -> Any:
    """The library, an optional dependency. None without it, without the driver, or without the right to use it."""
    nvml = machine.library("pynvml")
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except (AttributeError, nvml.NVMLError, OSError):
        return None
    return nvml


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)
