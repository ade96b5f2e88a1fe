"""The host's Mosquitto as a part of a local federation."""

import shutil
import subprocess
from pathlib import Path

from shoal.devstack.layout import RELAY_HOST, StackLayout, StackMember, ca_folder
from shoal.devstack.process_supervisor import program_path
from shoal.types.codes import Code, refuse

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def require() -> None:
    """Raises ShoalError(NOT_FOUND) if Mosquitto is not installed."""
    if shutil.which("mosquitto") is None and shutil.which("mosquitto", path=SBIN) is None:
        raise refuse(
            Code.NOT_FOUND,
            "Mosquitto is not on this machine",
            "its broker and dynamic-security plugin, 2.0 or newer",
            "install it (Debian, Ubuntu: apt-get install mosquitto), or leave out --link mqtt",
        )


def prepare(folder: Path, stack: StackLayout, member: StackMember) -> None:
    """Write the broker's configuration; the region's CA issues its certificate. Raises ShoalError."""
    command = [
        *program_path("shoal-coordinator"), "broker-config", "--region", stack.region,
        "--data-dir", str(ca_folder(folder, stack.coordinators)), "--out", str(folder / member.name),
        "--listen", member.addresses["mqtt"], "--host", RELAY_HOST,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise refuse(Code.INTERNAL, done.stderr.strip()[-400:], "the broker's configuration", "shoal dev status")
