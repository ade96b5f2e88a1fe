"""Power cuts for real processes: what was written, what was flushed, and what a disk may hold afterwards.

A process runs with `disk.c` preloaded, which traces every change beneath one folder. `PowerCutDisk` replays the trace
and builds a folder as a power cut at any point may leave it. Flushed data is there; of the rest a random part is, in
any order, with writes torn at sectors. Names are durable once their folder was flushed; until then a prefix of the
folder's changes is. Needs a C compiler (Debian: gcc, libc6-dev).
"""

import errno
import os
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from harness.faults.preload import compile_library

SECTOR: Final = 512
_HEAD: Final = struct.Struct("<cqqq")


def compile_disk(folder: Path) -> Path:
    """The library to preload."""
    return compile_library("disk", folder)


def slow_disk_environment(library: Path, root: Path, settings: Path) -> dict[str, str]:
    """Environment of a program whose disk beneath `root` is slow while `settings` says so."""
    return {"LD_PRELOAD": str(library), "SHOAL_DISK_ROOT": str(root), "SHOAL_DISK_SLOW": str(settings)}


@contextmanager
def disk_latency(settings: Path, *, flush_s: float, write_s: float) -> Iterator[None]:
    """Every flush and every write takes so much longer, in all programs that were started by `slow_disk`."""
    beside = settings.with_suffix(".new")
    beside.write_text(f"{flush_s * 1e3:.0f} {write_s * 1e6:.0f}")
    beside.replace(settings)
    try:
        yield
    finally:
        settings.unlink()


def trace_environment(library: Path, root: Path, trace: Path | None = None) -> dict[str, str]:
    """Environment of a process whose files beneath `root` are traced. root: an absolute path without links."""
    watched = {**os.environ, "LD_PRELOAD": str(library), "SHOAL_DISK_ROOT": str(root)}
    return watched if trace is None else {**watched, "SHOAL_DISK_TRACE": str(trace)}


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of that size on `folder`. Fails without privileges: such a run covers nothing."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert mounted.returncode == 0, f"this row needs a small file system: {mounted.stderr}"
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill_disk(path: Path) -> None:
    """Write until the disk accepts not one more byte."""
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


@dataclass(frozen=True, slots=True)
class Operation:
    """kind: c(reate) w(rite) t(runcate) s(ync) r(ename) u(nlink) d(irectory). number: offset or size."""

    kind: str
    number: int
    path: str
    data: bytes


def operations(trace: bytes) -> Iterator[Operation]:
    at = 0
    while at < len(trace):
        kind, number, path_length, data_length = _HEAD.unpack_from(trace, at)
        at += _HEAD.size
        path = trace[at : at + path_length].decode()
        data = trace[at + path_length : at + path_length + data_length]
        at += path_length + data_length
        yield Operation(kind.decode(), number, path, data)


@dataclass(slots=True)
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Operation] = field(default_factory=list)


class PowerCutDisk:
    """Files beneath `root`, as flushed and as written since."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._name_changes: list[tuple[str, dict[str, _File | None]]] = []
        self._folders: set[str] = {self._root}

    def apply(self, operation: Operation) -> None:
        path = operation.path
        match operation.kind:
            case "c":
                self._change(path, {path: _File()})
            case "w" | "t":
                self._names[path].pending.append(operation)
            case "r":
                self._change(path, {path: None, operation.data.decode(): self._names[path]})
            case "u":
                self._change(path, {path: None})
            case "d":
                self._folders.add(path)
            case "s" if path in self._folders:
                self._flush_names(path)
            case "s":
                file = self._names.get(path)
                if file is not None:
                    file.durable = _after(file.durable, file.pending)
                    file.pending = []

    def cut_power(self, into: Path, rng: "SeededRng") -> None:
        """Build a folder as the disk may be found when power returns."""
        names = dict(self._durable_names)
        for _, change in self._name_changes[: rng.below(len(self._name_changes) + 1)]:
            _rename(names, change)
        for path in self._folders:
            (into / os.path.relpath(path, self._root)).mkdir(parents=True, exist_ok=True)
        for path, file in names.items():
            content = _after(file.durable, tuple(_surviving(file.pending, rng)))
            (into / os.path.relpath(path, self._root)).write_bytes(content)

    def _change(self, path: str, change: dict[str, _File | None]) -> None:
        _rename(self._names, change)
        self._name_changes.append((str(Path(path).parent), change))

    def _flush_names(self, folder: str) -> None:
        for where, change in self._name_changes:
            if where == folder:
                _rename(self._durable_names, change)
        self._name_changes = [each for each in self._name_changes if each[0] != folder]


class SeededRng:
    """Reproducible choices from a seed (a splitmix64 stream)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & 0xFFFFFFFFFFFFFFFF

    def below(self, limit: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (mixed ^ (mixed >> 31)) % limit


def _surviving(pending: Sequence[Operation], rng: SeededRng) -> Iterator[Operation]:
    """Nothing, everything, a prefix, or any subset of what was not flushed; a write may be torn at a sector."""
    how = rng.below(4)
    end = {0: 0, 1: len(pending), 2: rng.below(len(pending) + 1), 3: len(pending)}[how]
    for index, operation in enumerate(pending[:end]):
        if how == 3 and rng.below(2):
            continue
        if how >= 2 and operation.kind == "w" and (index == end - 1 or rng.below(8) == 0):
            sectors = rng.below(len(operation.data) // SECTOR + 1)
            yield Operation("w", operation.number, operation.path, operation.data[: sectors * SECTOR])
        else:
            yield operation


def _after(content: bytearray, pending: Sequence[Operation]) -> bytearray:
    result = bytearray(content)
    for operation in pending:
        if operation.kind == "t":
            del result[operation.number :]
            result.extend(bytes(operation.number - len(result)))
        elif operation.data:
            result.extend(bytes(max(0, operation.number - len(result))))
            result[operation.number : operation.number + len(operation.data)] = operation.data
    return result


def _rename(names: dict[str, _File], change: dict[str, _File | None]) -> None:
    for path, file in change.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file
