"""A disk that tells written from flushed.

What a power cut leaves: every flushed byte, and of the rest any prefix, the last write torn. Names are a directory
that must be flushed too: a file replaced by rename may come back under its old content until then.
"""

import asyncio
from typing import Final

from shoal.simulator.chance import Chance
from shoal.simulator.world import Process, World
from shoal.types.codes import Code, refuse

FLUSH_S: Final = 0.0005
"""Of a disk that nothing troubles."""


class _File:
    """written: what a reader sees. The first `kept` bytes of it survive a power cut, or, after the file was
    overwritten and not yet flushed, `before` may come back instead."""

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

    def flushed(self, written: bytearray, size: int) -> None:
        if self.written is written:  # else it was overwritten meanwhile, and the flush was of the old bytes
            self.kept = max(self.kept, size)
            self.before = None

    def cut(self, chance: Chance) -> bool:
        """Fall back to what the platter holds. Returns whether anything was lost."""
        before, whole = self.before, self.kept == len(self.written)
        if before is not None and chance.happens(0.5):
            self.written = bytearray(before)
        else:
            del self.written[chance.whole(self.kept, len(self.written)) :]
            if len(self.written) > self.kept and chance.happens(0.3):
                self.written[-1] ^= 0x55  # the last write is torn
        self.kept, self.before = len(self.written), None
        return before is not None or not whole


class Disk:
    """Files of one machine. Latency and room are the fault injector's to set."""

    def __init__(self, world: World, name: str, full_code: Code = Code.DISK_FULL) -> None:
        self._world = world
        self._chance = world.chance.stream(f"disk/{name}")
        self._full_code = full_code
        self.name = name
        self.flush_s = FLUSH_S
        self.full = False
        self._names: dict[str, _File] = {}
        self._kept_names: dict[str, _File] = {}

    def copy(self, other: "Disk") -> None:
        """All that `other` shows to a reader, flushed."""
        for name in other.names():
            self._names[name] = file = _File()
            file.written = bytearray(other.read(name) or b"")
            file.kept = len(file.written)
        self._kept_names = dict(self._names)

    def read(self, name: str) -> bytes | None:
        file = self._names.get(name)
        return None if file is None else bytes(file.written)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._names))

    def append(self, process: Process, name: str, data: bytes) -> None:
        """Raises ShoalError(DISK_FULL or the store's code) and writes nothing."""
        process.gate(f"write {name}")
        self._room(name)
        self._names.setdefault(name, _File()).written += data

    def overwrite(self, process: Process, name: str, data: bytes) -> None:
        """Truncate and write: what was there is gone at once, flushed or not."""
        process.gate(f"write {name}")
        self._room(name)
        self._names.setdefault(name, _File()).overwrite(data)

    def truncate(self, process: Process, name: str, size: int) -> None:
        """Cut the tail off; a power cut before the next flush may bring it back."""
        process.gate(f"truncate {name}")
        self._names[name].shorten(size)

    def rename(self, process: Process, old: str, new: str) -> None:
        process.gate(f"rename {old}")
        self._names[new] = self._names.pop(old)

    def remove(self, process: Process, name: str) -> None:
        process.gate(f"remove {name}")
        self._names.pop(name, None)

    async def flush(self, process: Process, name: str) -> None:
        """Returns when the bytes of `name` survive a power cut."""
        file = self._names[name]
        written, size = file.written, len(file.written)
        await self._wait(process, f"flush {name}")
        file.flushed(written, size)
        process.gate(f"after flush {name}")

    async def flush_names(self, process: Process) -> None:
        """Returns when created, renamed and removed names survive a power cut."""
        names = dict(self._names)
        await self._wait(process, "flush directory")
        self._kept_names = names
        process.gate("after flush directory")

    def power_cut(self) -> int:
        """Throw away what was not flushed, at chance in part. Returns how many files lost something."""
        lost = 0
        if self._names != self._kept_names and self._chance.happens(0.5):
            lost += 1
            self._names = dict(self._kept_names)
        files = {id(file): file for _, file in sorted(self._names.items())}
        lost += sum(file.cut(self._chance) for file in files.values())
        self._kept_names = dict(self._names)
        return lost

    async def _wait(self, process: Process, where: str) -> None:
        process.gate(where)
        await asyncio.sleep(self._chance.between(0.2, 1.8) * self.flush_s)
        process.check()

    def _room(self, name: str) -> None:
        if self.full:
            raise refuse(self._full_code, f"no room for {name}", "free space", "free some space; it recovers by itself")
