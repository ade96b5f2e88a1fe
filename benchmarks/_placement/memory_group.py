"""A control group for one benchmark: this process and its children have less memory than the machine (versions 1, 2).

Version 2 needs a group in which nothing else runs, or root: `systemd-run --user --scope -p Delegate=yes COMMAND`.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shoal.types.codes import Code, refuse

_ROOT: Final = Path("/sys/fs/cgroup")
_LEAF: Final = "supervisor"
"""In version 2 only leaves have processes; the agent's pool knows this name (`worker.cgroups`)."""
_CONTROLLERS: Final = ("memory", "pids")
"""What the pool limits its workers by."""
_FILES: Final = {
    1: ("memory.usage_in_bytes", "memory.limit_in_bytes"),
    2: ("memory.current", "memory.max"),
}
"""By version: what is in use, and the most."""


class MemoryGroup:
    """The group that this process is in. Its `folder` is that of the memory controller."""

    def __init__(self, folder: Path, version: int) -> None:
        """version: 1 or 2."""
        self.folder = folder
        self.version = version
        # Version 1 counts by this descriptor, version 2 in a file.
        self._counter = _count_shortages(folder) if version == 1 else -1
        self._seen = 0

    def limit(self, more_bytes: int) -> None:
        """Allow so much beyond what is in use now. Raises OSError."""
        used, most = _FILES[self.version]
        wanted = str(int((self.folder / used).read_text()) + more_bytes)
        (self.folder / most).write_text(wanted)
        # Without swap, where the kernel counts it: memory that was swapped out would not have run out.
        swap, value = ("memory.swap.max", "0") if self.version == 2 else ("memory.memsw.limit_in_bytes", wanted)
        with suppress(OSError):
            (self.folder / swap).write_text(value)

    def take_shortages(self) -> int:
        """How often the kernel had to kill for memory in the group, since this was asked last."""
        if self.version == 1:
            try:
                return os.eventfd_read(self._counter)
            except BlockingIOError:
                return 0
        lines = (self.folder / "memory.events").read_text().splitlines()
        before, self._seen = self._seen, next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return self._seen - before

    def close(self) -> None:
        if self._counter >= 0:
            os.close(self._counter)


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """This process moves into a group of its own, and back at the end. Raises ShoalError(NOT_FOUND)."""
    version, origin = _own_group()
    folder = origin / f"shoal-memory-{secrets.token_hex(4)}"
    leaf, enabled = folder / _LEAF if version == 2 else folder, list[str]()
    try:
        try:
            leaf.mkdir(parents=True)
            _move_to(leaf)
            if version == 2:
                enabled = _enable(origin)
                _enable(folder)
            group = MemoryGroup(folder, version)
        except OSError as error:
            raise refuse(
                Code.NOT_FOUND,
                f"no control group for memory can be made in {origin}: {error.strerror or error}",
                "a group of this benchmark's own",
                "run it as root, or by `systemd-run --user --scope -p Delegate=yes`",
            ) from error
        try:
            yield group
        finally:
            group.close()
    finally:
        _leave(origin, leaf, enabled)


def _move_to(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def _enable(folder: Path) -> list[str]:
    """Which controllers were not enabled before for the groups below. Raises OSError."""
    switch = folder / "cgroup.subtree_control"
    missing = [name for name in _CONTROLLERS if name not in switch.read_text().split()]
    if missing:
        switch.write_text(" ".join(f"+{name}" for name in missing))
    return missing


def _leave(origin: Path, leaf: Path, enabled: Sequence[str]) -> None:
    """Back to `origin`. What still runs in the group keeps it, and nothing else does."""
    folders = (leaf, leaf.parent) if leaf.name == _LEAF else (leaf,)
    with suppress(OSError):
        if enabled:
            # Where a group has processes, none below it may be limited.
            for switch in (folders[-1] / "cgroup.subtree_control", origin / "cgroup.subtree_control"):
                switch.write_text(" ".join(f"-{name}" for name in enabled))
        _move_to(origin)
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _own_group() -> tuple[int, Path]:
    """The version, and the folder of the group that this process is in."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            folder = _ROOT / "memory" / path.strip("/")
            # In a container the mount may be the group itself.
            return 1, folder if folder.is_dir() else _ROOT / "memory"
    path = next((path for _, controllers, path in lines if not controllers), "/")
    folder = _ROOT / path.strip("/")
    return 2, folder if folder.is_dir() else _ROOT


def _count_shortages(folder: Path) -> int:
    """A descriptor that counts them (Linux, Documentation/admin-guide/cgroup-v1/memory.rst, 10). Raises OSError."""
    counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    with (folder / "memory.oom_control").open() as control:
        (folder / "cgroup.event_control").write_text(f"{counter} {control.fileno()}")
    return counter
