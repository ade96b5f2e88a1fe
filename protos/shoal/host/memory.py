"""How much memory this process may use and uses, as Linux reports it."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
_PAGE: Final = resource.getpagesize()
_STATM_BYTES: Final = 256
"""More than its seven numbers take."""
_UNLIMITED: Final = 2**60
"""Control groups of version 1 express `no limit` by a number near 2**63."""


def limit_bytes(root: Path = ROOT) -> int:
    """The smallest of: the machine's memory, the limits of this process's control group and of all above it (version 1
    and 2), and its own RLIMIT_AS and RLIMIT_DATA."""
    limits = [machine_bytes(root), *_cgroup_limits(root)]
    for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def resident_bytes() -> int:
    """Anonymous memory of this process in RAM, which its control group accounts for. 0 where /proc is missing."""
    try:
        handle = os.open("/proc/self/statm", os.O_RDONLY)  # a fifth of what a text file takes, often a second
        try:
            _, resident, shared, *_ = os.read(handle, _STATM_BYTES).split()
        finally:
            os.close(handle)
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE


_MALLINFO2: Final = [
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
]


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Names of `mallopt` (malloc.h of glibc)."""
_BLOCK_BYTES: Final = 128 * 1024
"""Blocks of so much are mapped apart; what glibc starts with (mallopt(3), M_MMAP_THRESHOLD)."""
_MOST_KEPT_BYTES: Final = 32 * 2**20
"""The most that glibc accepts, and what it would have come to by itself."""


def heap_bytes() -> int | None:
    """Memory that this process has allocated and not freed, from its C library. Unlike resident memory, it falls at
    once when something is freed. None where the library does not report it (other than glibc 2.33 or later)."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _Mallinfo2
    found = ask()
    return int(found.uordblks) + int(found.hblkhd)


def keep_freed(kept_bytes: int) -> None:
    """Has the C library keep memory that was freed for what is allocated next, up to `kept_bytes` (32 MiB at most) at
    the end of the heap, until `trim` (glibc). By itself it returns blocks of 128 KiB and more to the system at once,
    and a message of 1 MiB then costs 256 page faults for each of its copies."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, kept_bytes)
        libc.mallopt(_M_MMAP_THRESHOLD, kept_bytes)


@contextmanager
def return_at_once() -> Iterator[None]:
    """Has the C library return blocks of 128 KiB and more to the system as soon as they are freed, and after that all
    that is free (glibc). By itself it does so only until a larger block was freed: then it takes blocks of up to 32 MiB
    from its heap, where they stay. What copies large blocks several times, as the load of a model does, would keep most
    copies resident: with this, the peak of a ResNet with 43 MB of weights fell from 206 to 165 MiB, and a load takes up
    to half as much processor time again."""
    keep_freed(_BLOCK_BYTES)
    try:
        yield
    finally:
        keep_freed(_MOST_KEPT_BYTES)
        trim()


def trim() -> None:
    """Returns memory to the system that the C library keeps after it was freed, where possible (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def machine_bytes(root: Path = ROOT) -> int:
    """Memory of the machine."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return _UNLIMITED


def _cgroup_limits(root: Path) -> list[int]:
    """In a container the path is often the host's, and the mount itself is the group. So the mount's own limit always
    counts."""
    found = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base = root / "sys/fs/cgroup" / controllers
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            group = base / path.strip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # not there, or `max`
                    found.append(int((folder / name).read_text()))
                if folder == base:
                    break
    return [limit for limit in found if limit < _UNLIMITED]
