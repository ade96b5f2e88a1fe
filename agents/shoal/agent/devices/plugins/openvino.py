"""Intel's processors, graphics and NPUs through OpenVINO (`onnxruntime-ep-openvino`).

Tried on processors of Intel alone; graphics and NPUs are from documents. The plugin lists no processor of another
maker, though it would run there.

Sources: ONNX Runtime, docs/execution-providers/OpenVINO-ExecutionProvider (`load_config`, `num_of_threads`); OpenVINO,
Precision Control (`INFERENCE_PRECISION_HINT`: without it the plugin takes bf16 or f16 where the device has it, which
changes answers by some 1e-2); NPU Device (models with dynamic shapes are not supported); Intel SDM volume 3, 16.10.1:
the RAPL domain of a package is all of its die, graphics among it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from shoal.agent.devices.calls import FoundDevice
from shoal.agent.devices.cpu import NAME as CPU
from shoal.agent.devices.host import Host
from shoal.agent.devices.plugins.common import device_of, plugin_of
from shoal.agent.devices.plugins.listing import ListedDevice
from shoal.agent.devices.rapl import RAPL
from shoal.agent.driver_port import DeviceAccess, DriverOptions, EnergyCounter

PROVIDER: Final = "OpenVINOExecutionProvider"
_HINTS: Final = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
"""A model's precision, as OpenVINO names it. Integers are computed as the graph says, and the rest of it in f32."""
_FILES: Final = {"GPU": ("/dev/dri",), "NPU": ("/dev/accel",)}


def found_device(listed: ListedDevice, host: Host, options: DriverOptions) -> FoundDevice | None:
    """The device. One of the processor shares it with the runtime's own provider."""
    processor = host.processor()
    of_cpu = listed.hardware == "CPU"
    device = device_of(
        listed,
        name=f"{CPU}-openvino" if of_cpu else f"{listed.hardware.lower()}{listed.index}",
        vendor=processor.vendor if of_cpu else "Intel",
        model=processor.model if of_cpu else listed.about.get("FULL_DEVICE_NAME", f"Intel {listed.hardware}"),
        memory_bytes=host.limit_bytes(),
        parallelism=host.usable_cores() if of_cpu else 1,
    )
    device = replace(
        device,
        hardware=CPU if of_cpu else "",
        memory_in="" if of_cpu else CPU,
        power_in=CPU if _is_in_processor(listed) else "",
        fixed_shapes=listed.hardware == "NPU",
    )
    counters = tuple(map(str, host.energy_counters())) if of_cpu else ()
    access = DeviceAccess(
        files=tuple(str(path) for folder in _FILES.get(listed.hardware, ()) for path in sorted(Path(folder).glob("*"))),
        energy=EnergyCounter(RAPL, counters, of_processors=True) if counters else None,
        plugin=plugin_of(listed),
        options={"": _options(listed.hardware, "f32"), **{p: _options(listed.hardware, h) for p, h in _HINTS.items()}},
    )
    return FoundDevice(device, access)


def _is_in_processor(listed: ListedDevice) -> bool:
    """Whether the counter of the processor's package counts it. Of graphics the runtime says whether they are a card of
    their own; NPUs are all in processors."""
    return listed.hardware == "NPU" or (listed.hardware == "GPU" and listed.about.get("Discrete") == "0")


def _options(hardware: str, hint: str) -> dict[str, str]:
    config = json.dumps({hardware: {"INFERENCE_PRECISION_HINT": hint}})
    threads = {"num_of_threads": "$threads"} if hardware == "CPU" else {}
    return {"load_config": config, **threads}
