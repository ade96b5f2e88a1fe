"""What this machine is, once a start."""

import platform
import socket
from pathlib import Path

import psutil

from shoal.types.units import Bytes

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory() -> Bytes:
    return Bytes(psutil.virtual_memory().total)


def memory_limit() -> Bytes:
    """The cgroup's limit where there is one, else the machine's memory."""
    for path in _CGROUP_LIMITS:
        try:
            found = int(Path(path).read_text())
        except (OSError, ValueError):
            continue  # no such version of cgroups, or `max`
        return Bytes(min(found, memory()))
    return memory()


def boot_id() -> str:
    """Changes with each start of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def system() -> tuple[str, str]:
    """(operating system, architecture), as `linux`, `x86_64`."""
    return platform.system().lower(), platform.machine().lower()


def advertised(host: str) -> str:
    """The address that peers dial for a listener on `host`."""
    return socket.getfqdn() if host in ("0.0.0.0", "::", "") else host
