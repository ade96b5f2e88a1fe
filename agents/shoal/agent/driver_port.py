"""The port of device drivers: what one family of devices tells of itself.

Apart from `shoal.agent.ports`, so that the process of a driver imports nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.agent.emulation import PublishedFigure
from shoal.types.device import Device, Reading
from shoal.types.receipt import Rates
from shoal.types.units import Bytes, Elapsed, Seconds, Wall, Watts


class DriverClock(Protocol):
    """The times that a driver reads."""

    def now(self) -> Elapsed: ...
    def wall(self) -> Wall: ...


class DeviceDriver(Protocol):
    """One family of devices (entry point group `shoal.devices`). It runs in a process of its own, `devices.serve`, and
    imports no runtime."""

    def discover(self) -> tuple[Device, ...]:
        """Devices present now. Empty if the family's library or hardware is missing; absence never raises."""
        ...

    def read(self, device: str) -> Reading:
        """Raises ShoalError(DEVICE_LOST)."""
        ...

    def access(self, device: str) -> "DeviceAccess":
        """What a worker needs to run on this device. The pool and the workers know no family of devices."""
        ...

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        """Put a device to sleep, or wake it. Idempotent.

        Returns the seconds until the device can run work: for a device asleep, its wake-up time. A device that cannot
        sleep (`Device.rest` is None) ignores the call and returns 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Configuration passed to drivers."""

    # One emulated device per entry: `PROFILE`, or `PROFILE=SIZE` to override its memory size.
    emulate: tuple[str, ...] = ()
    # Factor on the time of every answer of an emulated device. 1: the profile's own time.
    time_scale: float = 1.0
    # Factor on the profile's wake-up time of an emulated device.
    wake_scale: float = 1.0
    # JSON file with the current state of emulated devices (`devices/emulated_state.py`). None: all are healthy.
    emulated_state_file: Path | None = None
    # Vendors' simulators to offer as devices (`devices/plugins`), for instance `htp`.
    simulate: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """How a worker opens a device's counter of joules."""

    # `module:function`. With `arguments` it returns what returns joules so far, which only grow; NaN where it does not
    # tell now. Raises OSError where the counter cannot be read.
    opener: str
    # For the function: paths, or a name of the device.
    arguments: tuple[str, ...]
    # True: it counts the host's processors, and a worker has its share of their time. False: it counts this device, and
    # a worker has the share of the time in which its runs are busy.
    of_processors: bool


@dataclass(frozen=True, slots=True)
class MemoryCounter:
    """How a worker learns what it holds of a device's own memory."""

    # `module:function`. With `arguments` it returns what returns the bytes that this process holds now; None where the
    # device does not know the process. Raises OSError where it counts none.
    opener: str
    # For the function: a name of the device.
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProviderPlugin:
    """An execution provider that the runtime loads from a library, and the hardware that it is to run on."""

    # Path of the library (ONNX Runtime, `register_execution_provider_library`).
    library: str
    # Kind of the hardware, as the runtime names it: `CPU`, `GPU` or `NPU`.
    hardware: str
    # Which one of that kind, in the order in which the runtime lists those of the provider.
    index: int = 0


@dataclass(frozen=True, slots=True)
class EmulatedPace:
    """How an emulated device behaves.

    One inference takes as long as was published of the model, or of its nearest relative (`shoal.agent.emulation`). The
    caller waits `time_scale` times that for the answer. For the answer of a simulator it waits as long as that
    computes.
    """

    # Name of the profile, as in `profiles/NAME.json`.
    profile: str
    # Where `figures` and `rates` are from, as text.
    source: str
    # What paces it.
    figures: tuple[PublishedFigure, ...]
    # The part of every inference that does not grow with its FLOPs, in seconds.
    launch_s: Seconds
    # What its capability receipt says: FLOP/s, bytes/s and seconds, fitted to other results than `figures`. Their
    # `load_bytes` is NaN.
    rates: Rates
    # Factor between device time and the time that a caller waits here.
    time_scale: float
    # Memory of the device: the profile's, or the size in `DriverOptions.emulate`.
    memory_bytes: Bytes
    # Power while a run is in progress, in watts, of models whose figure tells no joules. NaN: nobody says.
    active_w: Watts
    # Power while awake and idle, in watts. NaN if the profile has no figure.
    idle_w: Watts
    # The system whose mains power the watts are. Empty: they are the device's own.
    system: str = ""
    # True: a simulator of the vendor computes, and nothing is learnt from the time that it takes.
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class DeviceAccess:
    """What a worker needs to run on one device, besides the runtime's provider."""

    # Variables of the environment to set before the runtime opens the device, for instance to see no other one.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Device files that the worker's sandbox lets it read and write.
    files: tuple[str, ...] = ()
    # The runtime's name for memory of the device, in which a probe keeps its tensors.
    memory: str = "cpu"
    # None: it counts no energy, which is then estimated.
    energy: EnergyCounter | None = None
    # None: its memory is the host's, or nobody tells a process's share of it; a model is then measured by the resident
    # memory of its worker.
    memory_counter: MemoryCounter | None = None
    # How to pace and meter an emulated device. None for real hardware.
    pace: EmulatedPace | None = None
    # Where the device's provider comes from. None: it is built into the runtime.
    plugin: ProviderPlugin | None = None
    # Options of the provider by a model's precision; with `` those of all others. `$threads` in a value stands for the
    # threads of one run.
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # What compiles models for this device, with its version: their compiled form (ONNX Runtime's EPContext) is made
    # once and kept for the next load. Empty: none is kept.
    compiler: str = ""
    # Writable memory of the host, in bytes, that the provider maps in a worker's process for itself, beside what models
    # take. A worker's limit is as much higher, once, however many models share it. 0: hardly any.
    host_bytes: Bytes = Bytes(0)


class DriverFactory(Protocol):
    """Type of an entry point in group `shoal.devices`. Raises ShoalError(FIELD_INVALID) for options it cannot meet."""

    def __call__(self, clock: DriverClock, options: DriverOptions) -> DeviceDriver: ...
