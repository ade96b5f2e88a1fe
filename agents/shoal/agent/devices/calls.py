"""Calls from the supervisor to the process of a driver, and their answers: one line of JSON each."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.agent.driver_port import DeviceAccess
from shoal.types.codes import Refusal
from shoal.types.device import Device, Reading
from shoal.types.units import Seconds

MAX_LINE: Final = 2**20
"""Bytes of one answer. 64 devices with all that is told of them take some 100 KiB."""


class DriverMethod(StrEnum):
    DISCOVER = "discover"
    READ = "read"
    SET_SLEEP = "set_sleep"


@dataclass(frozen=True, slots=True)
class DriverCall:
    """One call of a method of `DeviceDriver`."""

    method: DriverMethod
    device: str = ""
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device that the driver found, with what a worker needs to run on it."""

    device: Device
    access: DeviceAccess


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """What the call returned, or why the driver refused it."""

    found: tuple[FoundDevice, ...] = ()
    reading: Reading | None = None
    seconds: Seconds = Seconds(0.0)
    refusal: Refusal | None = None
