"""A cgroup per worker: limits that hold whatever the code inside does (cgroup versions 1 and 2).

The limit that a worker sets itself gives an error in the runtime and spares the process. Code that took the worker over
can lift that limit, or map shared memory, which it does not count. It cannot lift this one.
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
"""Memory of interpreter and runtime, beside what the models may use."""
WORKER_PREFIX: Final = "worker-"
"""Prefix of worker names."""
STALE_S: Final = 120.0
"""Longer than any cgroup waits for its worker."""
MAX_TASKS: Final = 1024
"""Maximum threads and processes of one worker (`pids.max`)."""
_V1_UNLIMITED: Final = 2**60
"""Version 1 files hold more than this if there is no limit."""
_SUPERVISOR_LEAF: Final = "supervisor"
"""cgroup of the supervisor itself in version 2, where only leaves may have processes (systemd's DelegateSubgroup)."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of one worker."""

    # Its folder by controller; the same folder for each in version 2.
    folders: Mapping[str, Path]
    # 1 or 2.
    version: int

    def add(self, pid: int) -> None:
        """Raises OSError."""
        for folder in dict.fromkeys(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def limit_memory(self, models_bytes: int) -> None:
        """Allow what its models may use plus what the process itself needs; 0: no limit.

        Raises an existing limit and never lowers it. Raises OSError.
        """
        folder = self.folders.get(MEMORY)
        if folder is None:
            return
        name, unlimited = ("memory.max", "max") if self.version == 2 else ("memory.limit_in_bytes", "-1")
        wanted, current = IDLE_BYTES + models_bytes, (folder / name).read_text().strip()
        if not models_bytes:
            (folder / name).write_text(unlimited)
        elif current == unlimited or not wanted <= int(current) < _V1_UNLIMITED:
            (folder / name).write_text(str(wanted))

    def oom_kills(self) -> int | None:
        """Processes of the cgroup that the OOM killer killed, for its own limit or the machine's. None if nothing
        counts them."""
        folder = self.folders.get(MEMORY)
        if folder is None:
            return None
        try:
            counted = (folder / ("memory.events" if self.version == 2 else "memory.oom_control")).read_text()
        except OSError:
            return None
        return next((int(line.split()[1]) for line in counted.splitlines() if line.startswith("oom_kill ")), None)

    def remove(self) -> None:
        """Remove the cgroup, and kill what the worker left running in it."""
        for folder in dict.fromkeys(self.folders.values()):
            with suppress(OSError, ValueError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where this process may create cgroups."""

    # Parent folder by controller. Empty: it may create none.
    parents: Mapping[str, Path]
    # 1 or 2.
    version: int
    # What this process cannot limit, as text.
    unsupported_limits: tuple[str, ...] = ()

    @classmethod
    def detect(cls, root: Path = ROOT, own: str | None = None, pid: int | None = None) -> Self:
        """Find the cgroups that this process may use. `own` is the content of /proc/self/cgroup.

        In version 2 a cgroup that has processes cannot limit those below. So this process moves into a leaf of its
        cgroup if it is alone there.
        """
        text = own if own is not None else Path("/proc/self/cgroup").read_text()
        paths = dict(_parse_line(line) for line in text.splitlines())
        if (root / "cgroup.controllers").exists():
            return cls._detect_v2(root / paths.get("", "/").lstrip("/"), pid or os.getpid())
        parents = {name: root / name / paths[name].lstrip("/") for name in (MEMORY, PIDS) if name in paths}
        # in a container, the mount may be the process's own cgroup
        parents = {name: path if path.exists() else root / name for name, path in parents.items()}
        usable = {name: path for name, path in parents.items() if path.is_dir() and os.access(path, os.W_OK)}
        return cls(usable, 1, tuple(_unsupported_limit(name) for name in (MEMORY, PIDS) if name not in usable))

    @classmethod
    def _detect_v2(cls, own: Path, pid: int) -> Self:
        base = own.parent if own.name == _SUPERVISOR_LEAF else own
        try:
            offered = (base / "cgroup.controllers").read_text().split()
            wanted = [name for name in (MEMORY, PIDS) if name in offered]
            _enable_controllers(base, wanted, pid)
        except OSError as error:
            return cls({}, 2, (f"memory and processes by control group: {error.strerror or error}",))
        parents = dict.fromkeys(wanted, base)
        return cls(parents, 2, tuple(_unsupported_limit(name) for name in (MEMORY, PIDS) if name not in wanted))

    def make(self, name: str) -> Cgroup | None:
        """None if none can be created. Raises OSError."""
        if not self.parents:
            return None
        group = self.get(name)
        for folder in dict.fromkeys(group.folders.values()):
            folder.mkdir(exist_ok=True)
            _remove_stale(folder.parent, folder.stat().st_mtime - STALE_S)
        if PIDS in group.folders:
            (group.folders[PIDS] / "pids.max").write_text(str(MAX_TASKS))
        return group

    def get(self, name: str) -> Cgroup:
        """The cgroup that `make` created under this name."""
        return Cgroup({controller: parent / name for controller, parent in self.parents.items()}, self.version)


def _remove_stale(parent: Path, before: float) -> None:
    """Remove cgroups of workers that ended without a supervisor. The kernel keeps those that have processes."""
    for folder in parent.glob(f"{WORKER_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_mtime < before:
                folder.rmdir()


def _enable_controllers(base: Path, wanted: list[str], pid: int) -> None:
    """Raises OSError."""
    switch = base / "cgroup.subtree_control"
    if set(wanted) <= set(switch.read_text().split()):
        return
    if (base / "cgroup.procs").read_text().split() == [str(pid)]:
        (base / _SUPERVISOR_LEAF).mkdir(exist_ok=True)
        (base / _SUPERVISOR_LEAF / "cgroup.procs").write_text(str(pid))
    switch.write_text(" ".join(f"+{name}" for name in wanted))


def _parse_line(line: str) -> tuple[str, str]:
    """`4:memory:/a` gives (memory, /a). Version 2: `0::/a` gives (, /a)."""
    _, controller, path = line.split(":", 2)
    return controller, path


def _unsupported_limit(controller: str) -> str:
    return f"{'memory' if controller == MEMORY else 'processes'} by control group: not this process's to limit"
