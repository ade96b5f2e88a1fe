"""Devices and the nodes that carry them, and one reading of how they are now."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.types.units import Bytes, Seconds, Wall, Watts


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    NPU = "npu"


class EnergySource(StrEnum):
    """Where a joule's figure comes from; a sum of mixed sources is `estimated`."""

    MEASURED = "measured"
    PROFILE = "profile"
    ESTIMATED = "estimated"


class Role(StrEnum):
    """What an identity may be. The role sits in the certificate's URI name: shoal://REGION/ROLE/NAME."""

    AGENT = "agent"
    GATEWAY = "gateway"
    COORDINATOR = "coordinator"
    FEDERATION = "federation"
    OPERATOR = "operator"
    VIEWER = "viewer"
    TENANT = "tenant"
    BROKER = "broker"
    """Serves MQTT and may call nothing: what it carries is signed, so it is not trusted."""


class Power(StrEnum):
    """Whether a device can run something now."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WAKING = "waking"


@dataclass(frozen=True, slots=True)
class Rest:
    """What a device that can be put to sleep draws, and what waking takes.

    idle_w: awake, with nothing to do. wake_s: from the wish until it runs something, as long as one waits here; until
    then it draws what it draws at work. source: where the figures come from, and which of them are assumed.
    """

    idle_w: Watts
    asleep_w: Watts
    wake_s: Seconds
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One thing that runs models.

    name: unique on its node (`cpu0`, `gpu0`). provider: ONNX Runtime's name for it. attributes: facts for people and
    selectors (isa, caches, numa, cores, compute capability), never parsed by the core. emulated: the real model runs on
    the CPU, paced and metered by `profile`, whose source is `profile_source`; shown wherever the device is shown. rest:
    None where it cannot be put to sleep, or nobody can say what that saves; `attributes["sleep"]` may say why.
    """

    name: str
    kind: DeviceKind
    vendor: str
    model: str
    driver: str
    driver_version: str
    runtime_version: str
    provider: str
    memory_bytes: Bytes
    parallelism: int = 1
    attributes: Mapping[str, str] = field(default_factory=dict)
    emulated: bool = False
    profile: str = ""
    profile_source: str = ""
    time_scale: float = 1.0
    rest: Rest | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A device as it is now. NaN where the device does not tell; never 0 for unknown."""

    device: str
    free_bytes: Bytes
    utilisation: float
    temperature_c: float
    power_w: Watts
    energy_j: float
    """Joules counted by the device since its driver was loaded; NaN where there is no meter."""
    taken_at: Wall
    throttled: bool = False
    power: Power | None = None
    """None where it cannot be put to sleep."""
    slept_s: Seconds = Seconds(0.0)
    """How long it has slept since its driver was loaded."""
    saved_j: float = 0.0
    """What that saved: joules it would have drawn awake and idle, less what it drew asleep and, beyond idling, to wake.
    Below zero where it was woken too soon."""


@dataclass(frozen=True, slots=True)
class Node:
    """What an agent says it is, once a session."""

    name: str
    region: str
    role: Role
    labels: Mapping[str, str]
    agent_version: str
    os: str
    arch: str
    memory_bytes: Bytes
    memory_limit_bytes: Bytes
    """The cgroup's limit where there is one, else the machine's memory."""
    devices: tuple[Device, ...]
    grpc_address: str
    """host:port of the data plane, mTLS; where peers and gateways forward to."""
    rest_address: str
    token_address: str
    """host:port of the gRPC port for bearer tokens (server TLS only)."""
    metrics_address: str
    boot_id: str
    unconfined: tuple[str, ...] = ()
    """What workers of this node cannot be kept from, in words."""
