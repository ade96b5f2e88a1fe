"""Facts about this machine, read once per start."""

import platform
import socket
from pathlib import Path


def boot_id() -> str:
    """Changes at each boot of the machine. Empty if the system does not provide it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def os_and_architecture() -> tuple[str, str]:
    """(operating system, architecture), like `linux`, `x86_64`."""
    return platform.system().lower(), platform.machine().lower()


def advertise_host(host: str) -> str:
    """The address that peers dial for a listener on `host`."""
    return socket.getfqdn() if host in ("0.0.0.0", "::", "") else host
