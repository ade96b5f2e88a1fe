"""A capability receipt: what a device was measured to do, signed by its node.

The agent fills it; prediction and placement read it. Rates that were not measured are NaN, never 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.types.device import EnergySource
from shoal.types.units import Bytes, Seconds, Wall, Watts

MAX_SPREAD: Final = 10.0
"""A wider spread shows what else the machine was doing, not what the device can do."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured through the runtime with one request in flight. NaN: not measured."""

    # FLOP/s of matrix products by precision (`fp32`, `fp16`, `int8`, `fp64`), without those that the provider does not
    # run.
    matmul_flops: Mapping[str, float]
    # FLOP/s of convolutions by precision, without those that the provider does not run.
    conv_flops: Mapping[str, float]
    # Bytes per second (read and written) of elementwise operators.
    elementwise_bytes: float
    # Bytes per second (read and written) of copies.
    copy_bytes: float
    # Time of a graph with one trivial operator.
    launch_s: Seconds
    # Added time of each further trivial operator.
    node_s: Seconds
    # Bytes of a model made ready per second.
    load_bytes: float
    # Draw without a request.
    idle_w: Watts
    # Draw while it runs requests.
    active_w: Watts
    # Where the watts come from.
    energy_source: EnergySource


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator of ONNX's own domains, named as in a profile, that some provider of the runtime computes."""

    operator: str
    # Pairs of the first and last version of the operator's definition. A last of 0 means the first alone: it is unknown
    # whether the kernel also computes a later definition.
    versions: tuple[int, ...]

    def computes(self, version: int) -> bool:
        """Whether one of the pairs covers this version of the definition. Source: ONNX Runtime,
        core/framework/kernel_registry.cc, VerifyKernelDef."""
        pairs = zip(self.versions[::2], self.versions[1::2], strict=False)
        return any(version == first or first <= version <= last for first, last in pairs)


@dataclass(frozen=True, slots=True)
class RuntimeSupport:
    """What a runtime can load, as it reports itself."""

    # The newest IR version.
    ir_version: int
    # Newest opset of each domain, named as in a profile (`ai.onnx`).
    opsets: Mapping[str, int]
    # Kernels of ONNX's own operators; empty: the runtime does not report them.
    kernels: tuple[Kernel, ...] = ()
    # Precisions that the node can make of a model in fp32 for the device.
    prepares: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """One device of one node, measured once. Valid for (device, driver_version, runtime_version): a change of any voids
    it."""

    # Node that measured and signs.
    node: str
    # Name of the device on the node.
    device: str
    # ONNX Runtime's name of the execution provider.
    provider: str
    # Version of the device's driver during the probe.
    driver_version: str
    # Version of the runtime during the probe.
    runtime_version: str
    # Precisions that the provider runs.
    precisions: tuple[str, ...]
    # ONNX operator types that the provider was seen to take, at a probe or a load. One that is missing is unknown: a
    # model tells more of itself than of its operators. Empty for the CPU provider, which takes all of the runtime's.
    operators: tuple[str, ...]
    # Measured rates.
    rates: Rates
    # Total memory of the device.
    memory_bytes: Bytes
    # Relative half-width over the probe's repetitions, from which every predicted interval is computed.
    spread: float
    # When the probe ran, by the node's clock.
    measured_at: Wall
    # How long the probe took.
    probe_s: Seconds
    # True: the figures are a profile's, not this machine's.
    emulated: bool
    # `probe` where this device was measured, otherwise the profile's name and row.
    source: str
    # The whole system whose watts and joules the rates state, measured at its mains; empty: they are the device's own.
    system: str = ""
    # What this node's own runtime loads, also where the device is emulated; None from an older agent.
    runtime: RuntimeSupport | None = None
    # Memory of the device that the provider takes in a worker for itself, once, whatever models it has: its libraries,
    # a device's context. 0: unknown, from an older agent or of an emulated device that is no simulator.
    provider_bytes: Bytes = Bytes(0)
    # The same of the host's memory; equal where the device's memory is the host's.
    provider_host_bytes: Bytes = Bytes(0)


@dataclass(frozen=True, slots=True)
class SignedReceipt:
    """A receipt with its signature."""

    receipt: Receipt
    # Canonical wire bytes of the receipt.
    content: bytes
    # The node key's signature over region, node and `content`.
    signature: bytes
