"""The modelled devices of a machine, and what each model does on them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shoal.agent.driver_port import DeviceAccess
from shoal.simulator.world.world import SimProcess
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, EnergySource, Reading, Rest
from shoal.types.receipt import Rates, Receipt
from shoal.types.units import Bytes, Seconds, Wall, Watts

if TYPE_CHECKING:
    from shoal.simulator.parts.machine import SimMachine

USUAL_W: Final = 15.0
USUAL_RUNNERS: Final = 8


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one model does on a worker."""

    # Mean seconds of a load.
    load_s: float = 0.3
    # Mean seconds of a request.
    serve_s: float = 0.02
    # Chance, 0 to 1, that a load crashes the worker.
    crash_at_load: float = 0.0
    # Chance, 0 to 1, that a request crashes the worker.
    crash_at_request: float = 0.0
    # How the contents of requests begin that always crash the worker.
    poison: bytes = b"poison"
    # Names of devices on which its answers differ from everywhere else.
    wrong: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Chip:
    """A modelled device."""

    device: Device
    # FLOP/s, of matmul and conv alike.
    flops: float
    # Watts at work; a third of it when idle.
    active_w: Watts = Watts(USUAL_W)

    def receipt(self, node: str, device: Device, measured_at: Wall, probe_s: Seconds) -> Receipt:
        """The receipt that probing would give. device: as its node knows it now."""
        return Receipt(
            node=node,
            device=device.name,
            provider=device.provider,
            driver_version=device.driver_version,
            runtime_version=device.runtime_version,
            precisions=("fp32",),
            operators=(),
            rates=Rates(
                matmul_flops={"fp32": self.flops},
                conv_flops={"fp32": self.flops},
                elementwise_bytes=1e10,
                copy_bytes=1e10,
                launch_s=Seconds(5e-5),
                node_s=Seconds(2e-6),
                load_bytes=1e9,
                idle_w=Watts(self.active_w / 3),
                active_w=self.active_w,
                energy_source=EnergySource.PROFILE,
            ),
            memory_bytes=device.memory_bytes,
            spread=0.1,
            measured_at=measured_at,
            probe_s=probe_s,
            emulated=True,
            source="simulator",
        )


def chip(
    name: str,
    flops: float,
    memory: int,
    wake_s: float | None = None,
    *,
    active_w: float = USUAL_W,
    runners: int = USUAL_RUNNERS,
) -> Chip:
    """A modelled CPU. wake_s: seconds to wake it; None: it cannot sleep. runners: requests that a worker runs at a
    time."""
    rest = None if wake_s is None else Rest(Watts(10.0), Watts(1.0), Seconds(wake_s), "simulator")
    device = Device(
        name=name,
        kind=DeviceKind.CPU,
        vendor="sim",
        model="modelled",
        driver="modelled",
        driver_version="1",
        runtime_version="1",
        provider="CPUExecutionProvider",
        memory_bytes=Bytes(memory),
        parallelism=runners,
        emulated=True,
        profile="simulator",
        profile_source=__name__,
        rest=rest,
    )
    return Chip(device, flops, Watts(active_w))


class SimDeviceDriver:
    """Implements the Driver port over the machine's chips."""

    def __init__(self, process: SimProcess, machine: "SimMachine") -> None:
        self._process = process
        self._machine = machine

    def discover(self) -> tuple[Device, ...]:
        """All devices on the bus, whether or not they answer now."""
        self._process.check()
        return tuple(each.device for each in self._machine.chips.values())

    def read(self, device: str) -> Reading:
        self._process.check()
        machine = self._machine
        if device in machine.lost_devices or device not in machine.chips:
            raise refuse(Code.DEVICE_LOST, f"{device} does not answer", "a device", "check its driver")
        total = machine.chips[device].device.memory_bytes
        reading = Reading(
            device=device,
            free_bytes=Bytes(max(0, total - machine.used_bytes(device))),
            utilisation=0.1,
            temperature_c=45.0,
            power_w=Watts(10.0),
            energy_j=machine.world.now() * 10.0,
            taken_at=machine.clock.wall(),
            power=machine.power(device) if machine.chips[device].device.rest is not None else None,
        )
        return machine.alter_reading(reading)

    def access(self, device: str) -> DeviceAccess:
        return DeviceAccess()

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        self._process.check()
        return Seconds(self._machine.set_sleep(device, asleep))
