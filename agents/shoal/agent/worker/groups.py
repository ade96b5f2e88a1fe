"""A control group for each worker: what the kernel lets it take, whatever the code inside does (versions 1 and 2).

The limit that a worker sets itself gives an error in the runtime and spares the process; code that took the worker over
can lift it, or map shared memory that it does not count. This one it cannot.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path("/sys/fs/cgroup")
MEMORY: Final[str] = "memory"
PIDS: Final[str] = "pids"
IDLE_BYTES: Final = 512 * 2**20
"""Of interpreter and runtime, beside what its models may take."""
WORKER: Final = "worker-"
"""What names of workers begin with."""
ABANDONED_S: Final = 120.0
"""Longer than any group waits for its worker."""
MOST_TASKS: Final = 1024
"""Threads and processes of one worker."""
_HUGE: Final = 2**60
"""How version 1 says that there is no limit."""
_OWN: Final = "supervisor"
"""Where the supervisor stands itself in version 2, where only leaves have processes (systemd's DelegateSubgroup)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Of one worker: its folder for each controller, which is one and the same in version 2."""

    folders: Mapping[str, Path]
    version: int

    def add(self, pid: int) -> None:
        """Raises OSError."""
        for folder in dict.fromkeys(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def limit_memory(self, models_bytes: int) -> None:
        """To what its models may take and what the process itself needs; 0: no limit. A limit that stands is raised and
        never lowered. Raises OSError."""
        folder = self.folders.get(MEMORY)
        if folder is None:
            return
        name, unlimited = ("memory.max", "max") if self.version == 2 else ("memory.limit_in_bytes", "-1")
        wanted, standing = IDLE_BYTES + models_bytes, (folder / name).read_text().strip()
        if not models_bytes:
            (folder / name).write_text(unlimited)
        elif standing == unlimited or not wanted <= int(standing) < _HUGE:
            (folder / name).write_text(str(wanted))

    def oom_kills(self) -> int | None:
        """Processes of it that the kernel killed for memory, its own or the machine's; None where nobody counts."""
        folder = self.folders.get(MEMORY)
        if folder is None:
            return None
        try:
            counted = (folder / ("memory.events" if self.version == 2 else "memory.oom_control")).read_text()
        except OSError:
            return None
        return next((int(line.split()[1]) for line in counted.splitlines() if line.startswith("oom_kill ")), None)

    def remove(self) -> None:
        """With whatever the worker left running."""
        for folder in dict.fromkeys(self.folders.values()):
            with suppress(OSError, ValueError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True, slots=True)
class Groups:
    """Where this process may make groups. lacking: what it may not limit, in words."""

    parents: Mapping[str, Path]
    version: int
    lacking: tuple[str, ...] = ()

    @classmethod
    def find(cls, root: Path = ROOT, own: str | None = None, pid: int | None = None) -> Self:
        """own: what /proc/self/cgroup says. In version 2 this process moves into a leaf of its group when it is alone
        there, since a group that has processes cannot limit those below."""
        text = own if own is not None else Path("/proc/self/cgroup").read_text()
        paths = dict(_line(line) for line in text.splitlines())
        if (root / "cgroup.controllers").exists():
            return cls._second(root / paths.get("", "/").lstrip("/"), pid or os.getpid())
        parents = {name: root / name / paths[name].lstrip("/") for name in (MEMORY, PIDS) if name in paths}
        # in a container its own group may be what is mounted
        parents = {name: path if path.exists() else root / name for name, path in parents.items()}
        usable = {name: path for name, path in parents.items() if path.is_dir() and os.access(path, os.W_OK)}
        return cls(usable, 1, tuple(_unlimited(name) for name in (MEMORY, PIDS) if name not in usable))

    @classmethod
    def _second(cls, own: Path, pid: int) -> Self:
        base = own.parent if own.name == _OWN else own
        try:
            offered = (base / "cgroup.controllers").read_text().split()
            wanted = [name for name in (MEMORY, PIDS) if name in offered]
            _switch_on(base, wanted, pid)
        except OSError as error:
            return cls({}, 2, (f"memory and processes by control group: {error.strerror or error}",))
        parents = dict.fromkeys(wanted, base)
        return cls(parents, 2, tuple(_unlimited(name) for name in (MEMORY, PIDS) if name not in wanted))

    def make(self, name: str) -> Group | None:
        """None where none can be made. Raises OSError."""
        if not self.parents:
            return None
        group = self.named(name)
        for folder in dict.fromkeys(group.folders.values()):
            folder.mkdir(exist_ok=True)
            _sweep(folder.parent, folder.stat().st_mtime - ABANDONED_S)
        if PIDS in group.folders:
            (group.folders[PIDS] / "pids.max").write_text(str(MOST_TASKS))
        return group

    def named(self, name: str) -> Group:
        """The group that `make` made under this name."""
        return Group({controller: parent / name for controller, parent in self.parents.items()}, self.version)


def _sweep(parent: Path, before: float) -> None:
    """Groups of workers that ended when no supervisor was there; the kernel keeps those that have processes."""
    for folder in parent.glob(f"{WORKER}*"):
        with suppress(OSError):
            if folder.stat().st_mtime < before:
                folder.rmdir()


def _switch_on(base: Path, wanted: list[str], pid: int) -> None:
    """Raises OSError."""
    switch = base / "cgroup.subtree_control"
    if set(wanted) <= set(switch.read_text().split()):
        return
    if (base / "cgroup.procs").read_text().split() == [str(pid)]:
        (base / _OWN).mkdir(exist_ok=True)
        (base / _OWN / "cgroup.procs").write_text(str(pid))
    switch.write_text(" ".join(f"+{name}" for name in wanted))


def _line(line: str) -> tuple[str, str]:
    """`4:memory:/a` -> (memory, /a); of version 2, `0::/a` -> (, /a)."""
    _, controller, path = line.split(":", 2)
    return controller, path


def _unlimited(controller: str) -> str:
    return f"{'memory' if controller == MEMORY else 'processes'} by control group: not this process's to limit"
