"""A device driver that misbehaves on command: it hangs, is slow, lies, crashes, or loses its device.

It is a driver like any other, of a distribution of its own (`install` writes it). Its device runs models on the CPU.
What it does wrong it reads from a file at each call.
"""

import json
import math
import os
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from shoal.agent.driver_port import DeviceAccess, DriverClock, DriverOptions
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, Reading, Rest
from shoal.types.units import Bytes, Seconds, Watts

NAME: Final = "faulty"
DEVICE: Final = "npu9"
MEMORY: Final = Bytes(2**31)
WAKE_S: Final = Seconds(0.2)
FAULT_FILE: Final = "SHOAL_TEST_DRIVER_FAULT"
"""Variable of the environment with the path of the file: a JSON object of a method's name and a fault."""


class DriverFault(StrEnum):
    HANG = "hang"
    SLOW = "slow"
    ABORT = "abort"
    EXIT = "exit"
    RAISE = "raise"
    GARBAGE = "garbage"
    HUGE = "huge"
    ABSURD = "absurd"
    OTHER = "other"
    VANISH = "vanish"
    FIGURE = "figure"
    """One that it may leave out cannot be true."""


def command(path: Path, method: str = "", fault: DriverFault | None = None) -> None:
    """From now on, `method` of the driver does that. Without a fault it is sound."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({method: fault} if fault is not None else {}))
    new.replace(path)


def install(folder: Path) -> str:
    """Write the distribution. Returns what belongs into PYTHONPATH for an agent to have this driver."""
    info = folder / "shoal_faulty_driver-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shoal-faulty-driver\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[shoal.devices]\n{NAME} = {__name__}:FaultyDriver\n")
    tests = Path(__file__).parents[2]
    return f"{folder}:{tests}"


class FaultyDriver:
    def __init__(self, clock: DriverClock, options: DriverOptions) -> None:
        self._clock = clock

    def discover(self) -> tuple[Device, ...]:
        fault = self._misbehave("discover")
        device = Device(
            name=DEVICE,
            kind=DeviceKind.NPU,
            vendor="x" * (2**21 if fault is DriverFault.HUGE else 4),
            model="made for tests",
            driver=NAME,
            driver_version="1",
            runtime_version="1",
            provider="CPUExecutionProvider",
            memory_bytes=Bytes(-1) if fault is DriverFault.ABSURD else MEMORY,
            rest=Rest(Watts(2.0), Watts(0.1), WAKE_S, "made for tests"),
        )
        return (device, device) if fault is DriverFault.OTHER else (device,)

    def read(self, device: str) -> Reading:
        fault = self._misbehave("read")
        if fault is DriverFault.VANISH:
            raise refuse(Code.DEVICE_LOST, f"{device} is gone", "a device")
        return Reading(
            device="npu0" if fault is DriverFault.OTHER else device,
            free_bytes=Bytes(2**62) if fault is DriverFault.ABSURD else MEMORY,
            utilisation=7.0 if fault is DriverFault.FIGURE else 0.5,
            temperature_c=math.nan,
            power_w=Watts(3.0),
            energy_j=math.nan,
            taken_at=self._clock.wall(),
        )

    def access(self, device: str) -> DeviceAccess:
        return DeviceAccess()

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        self._misbehave("set_sleep")
        return WAKE_S if asleep else Seconds(0.0)

    def _misbehave(self, method: str) -> DriverFault | None:
        fault = _commanded(method)
        match fault:
            case DriverFault.HANG:
                while _commanded(method) is DriverFault.HANG:
                    time.sleep(0.01)  # noqa: TID251 - this is the fault
            case DriverFault.SLOW:
                time.sleep(0.5)  # noqa: TID251 - this is the fault
            case DriverFault.ABORT:
                os.abort()
            case DriverFault.EXIT:
                os._exit(3)
            case DriverFault.RAISE:
                raise RuntimeError("a bug of this driver")
            case DriverFault.GARBAGE:
                os.write(_answers_descriptor(), b"not an answer\n")
            case _:
                pass
        return fault


def _commanded(method: str) -> DriverFault | None:
    said: dict[str, Any] = json.loads(Path(os.environ[FAULT_FILE]).read_text())
    return DriverFault(said[method]) if method in said else None


def _answers_descriptor() -> int:
    """The pipe for answers, beside standard input, output and error."""
    for number in range(3, 16):
        with suppress(OSError):
            if str(Path(f"/proc/self/fd/{number}").readlink()).startswith("pipe:"):
                return number
    raise RuntimeError("no pipe")
