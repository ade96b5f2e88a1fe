"""Qualcomm's NPUs (Hexagon Tensor Processor) through QNN (`onnxruntime-qnn`), and the vendor's simulator of them.

On x86-64 the package holds a simulator: the compiler, the operators and the arithmetic are those of the chip, the times
are not. It is a device only where the agent is told so (`--simulate htp`), and is paced and metered by published
figures of the chip that it simulates (`htp.json`, by `agents/derive_profiles`). The chip itself: from documents.

Sources: ONNX Runtime, docs/execution-providers/QNN-ExecutionProvider (`backend_path`, `htp_performance_mode`,
`enable_htp_fp16_precision`, `soc_model`, `htp_arch`; "only supports models with fixed shapes"); Qualcomm AI Engine
Direct, supported Snapdragon devices: SM8650 is soc model 57, Hexagon V75.
"""

import json
import platform
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

from shoal.agent.devices.calls import FoundDevice
from shoal.agent.devices.cpu import NAME as CPU
from shoal.agent.devices.host import Host
from shoal.agent.devices.plugins.common import device_of, plugin_of
from shoal.agent.devices.plugins.listing import ListedDevice
from shoal.agent.devices.published import pace_of, source_of
from shoal.agent.driver_port import DeviceAccess, DriverOptions
from shoal.types.device import Device, DeviceKind
from shoal.types.units import Bytes

PROVIDER: Final = "QNNExecutionProvider"
SIMULATOR: Final = "htp"
_FP32_IN: Final = "fp16"
"""A float model runs in fp16 there, by `enable_htp_fp16_precision`: the processor has no fp32."""
_FILES: Final = ("/dev/fastrpc-cdsp", "/dev/fastrpc-cdsp-secure", "/dev/dma_heap/system")


def found_device(listed: ListedDevice, host: Host, options: DriverOptions) -> FoundDevice | None:
    """The NPU; on x86-64 the simulator, if the agent offers it. None for the processor and graphics of a Snapdragon,
    which other providers run better."""
    backend = Path(listed.library).parent / "libQnnHtp.so"
    if listed.hardware == "NPU":
        name, memory = f"npu{listed.index}", host.limit_bytes()
        device = device_of(listed, name=name, vendor="Qualcomm", model="Hexagon", memory_bytes=memory)
        access = _access(listed, backend, {"htp_performance_mode": "burst"})
        return FoundDevice(replace(device, fixed_shapes=True, computes_fp32_in=_FP32_IN, memory_in=CPU), access)
    if listed.hardware != "CPU" or platform.machine() != "x86_64" or SIMULATOR not in options.simulate:
        return None
    profile: dict[str, Any] = json.loads((resources.files("shoal.agent.devices.plugins") / "htp.json").read_text())
    chip = {"soc_model": profile["soc_model"], "htp_arch": profile["htp_arch"]}
    access = replace(_access(listed, backend, chip), pace=pace_of(profile, Bytes(host.limit_bytes()), simulated=True))
    return FoundDevice(_simulated(listed, profile, host), access)


def _simulated(listed: ListedDevice, profile: dict[str, Any], host: Host) -> Device:
    device = device_of(
        listed,
        name=profile["name"],
        vendor="Qualcomm",
        model=f"{profile['model']}, simulated",
        memory_bytes=host.limit_bytes(),
        attributes={"simulator": SIMULATOR, "licence": profile["licence"]},
    )
    return replace(
        device,
        kind=DeviceKind.NPU,
        fixed_shapes=True,
        computes_fp32_in=_FP32_IN,
        memory_in=CPU,
        emulated=True,
        simulated=True,
        profile=profile["name"],
        profile_source=source_of(profile),
    )


def _access(listed: ListedDevice, backend: Path, more: dict[str, str]) -> DeviceAccess:
    options = {"backend_path": str(backend), **more}
    fp16 = {**options, "enable_htp_fp16_precision": "1"}
    # By itself the provider leaves quantising a model's inputs and outputs to the processor.
    int8 = {**options, "offload_graph_io_quantization": "0"}
    files = tuple(path for path in _FILES if Path(path).exists())
    return DeviceAccess(
        files=files,
        plugin=plugin_of(listed),
        options={"": options, "fp32": fp16, "fp16": fp16, "int8": int8},
        compiler=f"{listed.package} {listed.version}",
    )
