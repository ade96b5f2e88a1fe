"""Devices, the nodes that they are on, and a device's current readings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shoal.types.codes import Code
from shoal.types.units import Bytes, Seconds, Wall, Watts


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    NPU = "npu"


class EnergySource(StrEnum):
    """Where an energy figure comes from. A sum of mixed sources is `estimated`."""

    MEASURED = "measured"
    PROFILE = "profile"
    ESTIMATED = "estimated"


ESTIMATED_RANGE: Final = (0.47, 1.79)
"""Low and high of an estimate of energy, in parts of it: of 621 cloud instances (23 processors) 90 % draw between 3.59
and 13.69 W for each busy virtual processor, and an estimate takes their median, 7.65 W (cloud-carbon-footprint/
ccf-coefficients b0032d9, Apache-2.0, columns PkgWatt and RAMWatt at 100 % over vCPU)."""


class Role(StrEnum):
    """What an identity may do. The role is part of the certificate's URI name: shoal://REGION/ROLE/NAME."""

    AGENT = "agent"
    GATEWAY = "gateway"
    COORDINATOR = "coordinator"
    FEDERATION = "federation"
    OPERATOR = "operator"
    VIEWER = "viewer"
    TENANT = "tenant"
    # Serves MQTT and may call nothing. The messages that it carries are signed, so it need not be trusted.
    BROKER = "broker"


class PowerState(StrEnum):
    """Whether a device can run something now."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WAKING = "waking"


@dataclass(frozen=True, slots=True)
class Rest:
    """Power draw of a device that can be put to sleep, and what waking it takes."""

    # Draw while awake with nothing to do.
    idle_w: Watts
    # Draw while asleep.
    asleep_w: Watts
    # From the request to wake until it can run something, in wall time as waited here. It draws active power meanwhile.
    wake_s: Seconds
    # Where the figures come from, and which of them are assumed.
    source: str


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """What bytes pass on their way from the host, or from another device of the node, to a device's own memory."""

    # What it is, for people: `PCIe 4.0 x16`.
    name: str
    # The most that it carries one way: its lanes at their full speed, less their encoding. What its protocol takes
    # comes on top, so no transfer is faster. None: unknown.
    bytes_per_s: float | None
    # Where that is from, for people: `NVML`, `sysfs`, `published: ..`.
    source: str
    # What is at its other end: a device of this node, or `nvswitch`. Empty: the host's memory.
    to: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that runs models."""

    # Unique on its node (`cpu0`, `gpu0`).
    name: str
    # CPU, GPU or NPU.
    kind: DeviceKind
    # Name of the maker.
    vendor: str
    # The vendor's name of the product.
    model: str
    # Driver that serves it: `linux`, `nvidia` or `emulated`.
    driver: str
    # A receipt is valid for this version alone.
    driver_version: str
    # Version of the runtime; a receipt is valid for this version alone.
    runtime_version: str
    # ONNX Runtime's name of its execution provider.
    provider: str
    # Total memory for models.
    memory_bytes: Bytes
    # Inferences that it can run at the same time.
    parallelism: int = 1
    # Facts for people and selectors (isa, caches, numa, cores, compute capability). The core never parses them.
    attributes: Mapping[str, str] = field(default_factory=dict)
    # True: its figures are those of `profile`, and the real model runs on the CPU, paced and metered by it. Shown
    # wherever the device is shown.
    emulated: bool = False
    # Name of the emulation profile; empty for a real device.
    profile: str = ""
    # Where the profile's figures come from; empty for a real device.
    profile_source: str = ""
    # Emulated: how many times the profile's latency an answer waits. 1 for a real device.
    time_scale: float = 1.0
    # None where it cannot be put to sleep, or where the saving is unknown; `attributes["sleep"]` may say why.
    rest: Rest | None = None
    # True: an emulated device whose answers come from its vendor's simulator of the chip. Its times are still those of
    # `profile`.
    simulated: bool = False
    # True: it takes no model in which a shape is open.
    fixed_shapes: bool = False
    # Precision in which its provider computes models in fp32, by an option of its own: then a node does not make it of
    # them, and answers are judged as those of that precision. Empty: it computes them in fp32.
    computes_fp32_in: str = ""
    # The device of this node whose hardware it is, where a further provider runs on that. Both share its memory,
    # processors and power. Empty: its own.
    hardware: str = ""
    # The device of this node in whose memory it works, which both then take from. Empty: it has its own.
    memory_in: str = ""
    # The device of this node whose meter of power counts its power too. Empty: none does.
    power_in: str = ""
    # The NUMA node of the host that it is attached to. None: unknown, or it is attached to none in particular.
    numa: int | None = None
    # Its links, one for each other end. Empty: unknown, or it works in the host's memory.
    links: tuple[DeviceLink, ...] = ()

    def arithmetic(self, precision: str) -> str:
        """Precision in which it computes models of this one."""
        return self.computes_fp32_in or precision if precision == "fp32" else precision

    @property
    def stand_in(self) -> str:
        """What stands in for real hardware: `simulated` (by the vendor's tools) or `emulated` (paced by published
        figures); empty: nothing does."""
        return "simulated" if self.simulated else "emulated" if self.emulated else ""

    @property
    def memory_root(self) -> str:
        """Name of the device whose memory it works in: its own, where that is so."""
        return self.memory_in or self.hardware or self.name

    @property
    def power_root(self) -> str:
        """Name of the device whose meter counts its power: its own, where that is so."""
        return self.power_in or self.hardware or self.name

    @property
    def host_bytes_per_s(self) -> float:
        """The most that its link to the host carries one way. NaN: unknown, or it works in the host's memory."""
        link = self.host_link
        known = link.bytes_per_s if link is not None else None
        return known if known is not None and known > 0 else math.nan

    @property
    def host_link(self) -> DeviceLink | None:
        return next((link for link in self.links if not link.to), None)


@dataclass(frozen=True, slots=True)
class Reading:
    """A device's state now. NaN means unknown; 0 never does."""

    # Name of the device on its node.
    device: str
    # Free memory.
    free_bytes: Bytes
    # Busy share, 0 to 1; NaN where the device does not report it.
    utilisation: float
    # Degrees Celsius; NaN where the device does not report it.
    temperature_c: float
    # Draw now; NaN where the device does not report it.
    power_w: Watts
    # Joules that the device counted since its driver was loaded; NaN without a meter.
    energy_j: float
    # When it was read, by the node's clock.
    taken_at: Wall
    # True: the device runs slower to stay within its heat or power limit.
    throttled: bool = False
    # None where it cannot be put to sleep.
    power: PowerState | None = None
    # Total time asleep since its driver was loaded.
    slept_s: Seconds = Seconds(0.0)
    # Joules saved by sleeping: the idle draw of that time, less what it drew asleep and, beyond idling, to wake.
    # Negative where it was woken too soon.
    saved_j: float = 0.0


@dataclass(frozen=True, slots=True)
class SilentDevice:
    """A device that does not answer its node, or whose driver does not. It is asked again by itself, each time that the
    node reports."""

    # Name of the device on its node.
    device: str
    # Why: DEVICE_UNREACHABLE where the driver does not answer, or what the driver said.
    code: Code
    # `code` in words.
    reason: str
    # When it did not answer for the first time, by the node's clock.
    since: Wall


@dataclass(frozen=True, slots=True)
class Node:
    """What an agent reports about itself once a session."""

    # Unique in its region, as in the node's certificate.
    name: str
    # Name of its region.
    region: str
    # Agent or gateway, as in the node's certificate.
    role: Role
    # Labels that selectors match, from enrolment and from the agent's configuration.
    labels: Mapping[str, str]
    # Version of the agent's distribution.
    agent_version: str
    # Operating system.
    os: str
    # Processor architecture.
    arch: str
    # Memory of the machine.
    memory_bytes: Bytes
    # The cgroup's limit where there is one, otherwise the machine's memory.
    memory_limit_bytes: Bytes
    # All devices that its drivers found.
    devices: tuple[Device, ...]
    # host:port of its data port, where clients send requests and other fronts forward to.
    data_address: str
    # host:port of the Prometheus page.
    metrics_address: str
    # Identifies the boot of the machine; another value means that it restarted.
    boot_id: str
    # What the node cannot confine its workers from, in words; empty: fully confined.
    unconfined: tuple[str, ...] = ()
    # X25519 public key by which other fronts check what this one forwards, hex; empty where it signs nothing.
    forward_key: str = ""
    # True: its agent subscribes to the routes that its front needs. False: it must be sent all that may enter there.
    subscribes: bool = False
