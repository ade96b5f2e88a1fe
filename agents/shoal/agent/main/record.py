"""`shoal-agent record`: what a driver asked of this machine, and what it was answered, as a file.

The contract suite replays such files, so that a driver is tested on hardware that the tests do not have. Look through
one before you give it away: it names what the machine is made of, with serial numbers.
"""

import json
import pkgutil
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Final

from shoal.agent.clock import SystemClock
from shoal.agent.devices.machine import LiveMachine, RecordingMachine
from shoal.agent.driver_port import DriverOptions
from shoal.types.codes import Code, ShoalError, refuse

_READINGS: Final = 2
"""Some figures are of the time between two."""


def record(name: str, to: Path) -> int:
    """Exit status 1 where the driver finds no device; the file is written all the same, because a machine that has none
    is a case too. Raises ShoalError(NOT_FOUND | FIELD_INVALID)."""
    found = {each.name: each.value for each in entry_points(group="shoal.devices")}
    if name not in found:
        raise refuse(
            Code.NOT_FOUND, f"no driver {name!r:.80}", f"one of {', '.join(sorted(found))}", "see docs/devices.md"
        )
    clock, machine = SystemClock(), RecordingMachine(LiveMachine())
    try:
        driver = pkgutil.resolve_name(found[name])(clock, DriverOptions(), machine=machine)
    except TypeError as error:
        remedy = "one of those whose class takes `machine`: amd, ascend, nvidia"
        raise refuse(
            Code.FIELD_INVALID, f"{name} asks the machine by itself", "a driver that can be recorded", remedy
        ) from error
    devices = driver.discover()
    for device in devices:
        driver.access(device.name)
        for _ in range(_READINGS):
            try:
                driver.read(device.name)
            except ShoalError as error:
                print(f"{device.name}: {error.refusal}", file=sys.stderr)
    models = ", ".join(each.model for each in devices)
    about = f"shoal-agent {version('shoal-orchestrator-agent')}, {len(devices)} devices: {models}"
    content = {"driver": name, "origin": "recorded", "about": about, "answers": machine.answers}
    to.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"{len(machine.answers)} answers in {to}: {about}")
    return 0 if devices else 1
