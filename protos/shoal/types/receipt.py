"""A capability receipt: what a device was measured to do, signed by its node.

Filled by the agent, read by prediction and placement. Rates that were not measured are NaN, never 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.types.device import EnergySource
from shoal.types.units import Bytes, Seconds, Wall, Watts

MAX_SPREAD: Final = 10.0
"""A wider one says what else the machine did meanwhile, not what the device can do."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured through the runtime with one request in flight.

    matmul_flops, conv_flops: FLOP/s by precision (`fp32`, `fp16`, `int8`, `fp64`), without those that the provider does
    not run. elementwise_bytes, copy_bytes: bytes moved (read + written) a second. launch_s: seconds for a graph of one
    trivial operator. node_s: added seconds for each further trivial operator. load_bytes: model bytes made ready a
    second.
    """

    matmul_flops: Mapping[str, float]
    conv_flops: Mapping[str, float]
    elementwise_bytes: float
    copy_bytes: float
    launch_s: Seconds
    node_s: Seconds
    load_bytes: float
    idle_w: Watts
    active_w: Watts
    energy_source: EnergySource


@dataclass(frozen=True, slots=True)
class Receipt:
    """One device of one node, measured once.

    Valid for (device, driver_version, runtime_version); a change of any voids it. operators: ONNX operator types that
    the provider was seen to run; empty means the runtime's whole set (the CPU provider). `spread` is the relative
    half-width over the probe's repetitions, the base of every predicted interval.
    """

    node: str
    device: str
    provider: str
    driver_version: str
    runtime_version: str
    precisions: tuple[str, ...]
    operators: tuple[str, ...]
    rates: Rates
    memory_bytes: Bytes
    spread: float
    measured_at: Wall
    probe_s: Seconds
    emulated: bool
    source: str
    """`probe` where this device was measured; else the profile's name and row."""


@dataclass(frozen=True, slots=True)
class SignedReceipt:
    """The receipt's canonical wire bytes and the node key's signature over region, node and those bytes."""

    receipt: Receipt
    content: bytes
    signature: bytes
