"""What is installed of the agent on this machine: its version, and its drivers that may find a device.

Reading packages' metadata imports the library's readers of archives and mail, 1 MB. So a program does it
(`find_installation.py`), which ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.agent.driver_port import DriverOptions
from shoal.agent.programs import StartedProgram

PROGRAM: Final = "shoal.agent.devices.find_installation"
LIMIT_S: Final = 20.0
"""The longest that it may take. It takes 0.1 s on two cores of a server."""
CPU_DRIVER: Final = "cpu"


@dataclass(frozen=True, slots=True)
class DriverSearch:
    """Which drivers are asked for."""

    options: DriverOptions
    # False: not the processor's.
    cpu: bool


@dataclass(frozen=True, slots=True)
class Installation:
    """What is installed."""

    # Version of the agent's package.
    version: str
    # `module:class` by name of the driver.
    drivers: Mapping[str, str]


def start_search(search: DriverSearch) -> StartedProgram[Installation]:
    """Wait for it at most LIMIT_S. Raises ShoalError(INTERNAL)."""
    return StartedProgram(PROGRAM, search, Installation)
