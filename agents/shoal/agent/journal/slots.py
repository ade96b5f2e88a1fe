"""One value on disk that neither a power cut nor a full disk nor a flipped bit can take away unseen.

Two slots are written in turn, each with a sequence number and a SHA-256: the older one is replaced (write, flush,
rename, flush of the directory) while the newer stands, so that there is always a verified copy. What does not verify is
set aside, never deleted.
"""

import contextlib
import hashlib
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAGIC: Final = b"SHOALJ1\n"
_HEAD: Final = struct.Struct(">8sQQ32s")
"""magic, sequence, payload bytes, SHA-256 over the head before it and the payload."""


@dataclass(frozen=True, slots=True)
class _Copy:
    slot: Path
    sequence: int
    content: bytes


class Slots:
    """Blocking; one owner at a time."""

    def __init__(self, folder: Path, name: str, set_aside: Callable[[Path], None]) -> None:
        """set_aside: told where a copy that did not verify has gone."""
        self._folder = folder
        self._slots = _paths(folder, name)
        self._set_aside = set_aside

    def load(self) -> bytes | None:
        """The newest verified content; None where there never was any, or none verifies.

        On disk when it returns: who wrote it may have been killed before its name was flushed, and what was acted on
        must not be older after a power cut. A disk that refuses even that is read all the same."""
        newest = self._newest()
        if newest is None:
            return None
        with contextlib.suppress(OSError):
            flush_folder(self._folder)
        return newest.content

    def save(self, content: bytes) -> None:
        """On disk when it returns; the last content stands when it raises OSError."""
        newest = self._newest()
        slot = next(slot for slot in self._slots if newest is None or slot != newest.slot)
        sequence = newest.sequence + 1 if newest else 1
        replace_file(slot, _seal(sequence, content))

    def _newest(self) -> _Copy | None:
        copies = [copy for slot in self._slots if (copy := self._read(slot)) is not None]
        return max(copies, key=lambda copy: copy.sequence, default=None)

    def _read(self, slot: Path) -> _Copy | None:
        try:
            data = slot.read_bytes()
        except FileNotFoundError:
            return None
        copy = _open(slot, data)
        if copy is None:
            self._set_aside(_put_aside(slot))
        return copy


def peek(folder: Path, name: str) -> bytes | None:
    """The newest verified content, for one who is not the owner; nothing is moved."""
    copies = (_open(slot, slot.read_bytes()) for slot in _paths(folder, name) if slot.exists())
    newest = max((copy for copy in copies if copy is not None), key=lambda copy: copy.sequence, default=None)
    return newest.content if newest else None


def unverified(folder: Path, name: str) -> tuple[Path, ...]:
    """Copies that are there and do not verify; nothing is moved."""
    there = (slot for slot in _paths(folder, name) if slot.exists())
    return tuple(slot for slot in there if _open(slot, slot.read_bytes()) is None)


def replace_file(path: Path, content: bytes) -> None:
    """`path` holds all of `content` on disk, or what it held before."""
    beside = path.with_name(f"{path.name}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beside.replace(path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.a", folder / f"{name}.b"


def _seal(sequence: int, content: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, sequence, len(content), _digest(sequence, content)) + content


def _open(slot: Path, data: bytes) -> _Copy | None:
    if len(data) < _HEAD.size:
        return None
    magic, sequence, size, digest = _HEAD.unpack_from(data)
    content = data[_HEAD.size :]
    if magic != _MAGIC or size != len(content) or digest != _digest(sequence, content):
        return None
    return _Copy(slot, sequence, content)


def _digest(sequence: int, content: bytes) -> bytes:
    return hashlib.sha256(struct.pack(">8sQQ", _MAGIC, sequence, len(content)) + content).digest()


def _put_aside(slot: Path) -> Path:
    taken = (re.fullmatch(rf"{re.escape(slot.name)}\.corrupt-(\d+)", each.name) for each in slot.parent.iterdir())
    number = max((int(match[1]) for match in taken if match), default=0) + 1
    aside = slot.with_name(f"{slot.name}.corrupt-{number}")
    return slot.replace(aside)
