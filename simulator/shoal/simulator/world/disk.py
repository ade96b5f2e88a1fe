"""A disk that distinguishes written from flushed bytes.

A power cut keeps every flushed byte, and of the rest any prefix, with the last write torn. Names live in a directory
that must be flushed as well: until then a file replaced by rename may return with its old content.
"""

import asyncio
from typing import Final

from shoal.simulator.world.rng import Rng
from shoal.simulator.world.world import SimProcess, SimWorld
from shoal.types.codes import Code, refuse

FLUSH_S: Final = 0.0005
"""Of a disk without faults."""


class _File:
    """One file. `written` is what a reader sees, and its first `kept` bytes survive a power cut. If the file was
    overwritten and not flushed since, `before` may return instead."""

    __slots__ = ("before", "kept", "written")

    def __init__(self) -> None:
        self.written = bytearray()
        self.kept = 0
        self.before: bytes | None = None

    def overwrite(self, data: bytes) -> None:
        if self.before is None:
            self.before = bytes(self.written[: self.kept])
        self.written = bytearray(data)
        self.kept = 0

    def shorten(self, size: int) -> None:
        if self.before is None:
            self.before = bytes(self.written[: self.kept])
        self.written = self.written[:size]
        self.kept = min(self.kept, size)

    def mark_flushed(self, written: bytearray, size: int) -> None:
        if self.written is written:  # otherwise it was overwritten meanwhile, and the old bytes were flushed
            self.kept = max(self.kept, size)
            self.before = None

    def lose_unflushed(self, rng: Rng) -> bool:
        """Fall back to what survives a power cut. Returns whether anything was lost."""
        before, whole = self.before, self.kept == len(self.written)
        if before is not None and rng.happens(0.5):
            self.written = bytearray(before)
        else:
            del self.written[rng.randint(self.kept, len(self.written)) :]
            if len(self.written) > self.kept and rng.happens(0.3):
                self.written[-1] ^= 0x55  # the last write is torn
        self.kept, self.before = len(self.written), None
        return before is not None or not whole


class SimDisk:
    """Files of one machine. Fault injection sets latency and free space."""

    def __init__(self, world: SimWorld, name: str, full_code: Code = Code.DISK_FULL) -> None:
        self._world = world
        self._rng = world.rng.stream(f"disk/{name}")
        self._full_code = full_code
        self.name = name
        self.flush_s = FLUSH_S
        self.full = False
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}

    def copy(self, other: "SimDisk") -> None:
        """Take over all that a reader of `other` sees, flushed."""
        for name in other.names():
            self._names[name] = file = _File()
            file.written = bytearray(other.read(name) or b"")
            file.kept = len(file.written)
        self._durable_names = dict(self._names)

    def read(self, name: str) -> bytes | None:
        file = self._names.get(name)
        return None if file is None else bytes(file.written)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._names))

    def append(self, process: SimProcess, name: str, data: bytes) -> None:
        """Raises ShoalError(DISK_FULL or the store's code) and writes nothing."""
        process.gate(f"write {name}")
        self._check_room(name)
        self._names.setdefault(name, _File()).written += data

    def overwrite(self, process: SimProcess, name: str, data: bytes) -> None:
        """Truncate and write: the old content is gone at once for readers, flushed or not."""
        process.gate(f"write {name}")
        self._check_room(name)
        self._names.setdefault(name, _File()).overwrite(data)

    def truncate(self, process: SimProcess, name: str, size: int) -> None:
        """Cut off the tail; a power cut before the next flush may restore it."""
        process.gate(f"truncate {name}")
        self._names[name].shorten(size)

    def rename(self, process: SimProcess, old: str, new: str) -> None:
        process.gate(f"rename {old}")
        self._names[new] = self._names.pop(old)

    def remove(self, process: SimProcess, name: str) -> None:
        process.gate(f"remove {name}")
        self._names.pop(name, None)

    async def flush(self, process: SimProcess, name: str) -> None:
        """Returns when the bytes of `name` survive a power cut."""
        file = self._names[name]
        written, size = file.written, len(file.written)
        await self._wait(process, f"flush {name}")
        file.mark_flushed(written, size)
        process.gate(f"after flush {name}")

    async def flush_names(self, process: SimProcess) -> None:
        """Returns when created, renamed and removed names survive a power cut."""
        names = dict(self._names)
        await self._wait(process, "flush directory")
        self._durable_names = names
        process.gate("after flush directory")

    def power_cut(self) -> int:
        """Discard what was not flushed; a random part of it may survive. Returns how many files lost something."""
        lost = 0
        if self._names != self._durable_names and self._rng.happens(0.5):
            lost += 1
            self._names = dict(self._durable_names)
        files = {id(file): file for _, file in sorted(self._names.items())}
        lost += sum(file.lose_unflushed(self._rng) for file in files.values())
        self._durable_names = dict(self._names)
        return lost

    async def _wait(self, process: SimProcess, where: str) -> None:
        process.gate(where)
        await asyncio.sleep(self._rng.uniform(0.2, 1.8) * self.flush_s)
        process.check()

    def _check_room(self, name: str) -> None:
        if self.full:
            raise refuse(self._full_code, f"no room for {name}", "free space", "free some space; it recovers by itself")
