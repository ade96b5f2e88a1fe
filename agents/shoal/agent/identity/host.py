"""Facts about this machine, read once per start."""

import platform
import socket
from pathlib import Path

import psutil

from shoal.types.units import Bytes

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory() -> Bytes:
    return Bytes(psutil.virtual_memory().total)


def memory_limit() -> Bytes:
    """The cgroup's limit if there is one, otherwise the machine's memory."""
    for path in _CGROUP_LIMITS:
        try:
            found = int(Path(path).read_text())
        except (OSError, ValueError):
            continue  # this cgroup version is absent, or the limit is `max`
        return Bytes(min(found, memory()))
    return memory()


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
