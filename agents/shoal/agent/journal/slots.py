"""One value on disk, safe against power cuts and full disks; a flipped bit does not go unnoticed.

Two slots are written in turn, each with a sequence number and a SHA-256. The older one is replaced (write, flush,
rename, flush of the folder) while the newer one stays, so that there is always a verified copy. A copy that does not
verify is moved aside, never deleted.
"""

import contextlib
import errno
import hashlib
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAGIC: Final = b"SHOALJ1\n"
_BAD_SECTOR: Final = (errno.EIO, errno.EUCLEAN)
"""Errors of a read that say that the copy is lost. After others the next read may succeed."""
_HEAD: Final = struct.Struct(">8sQQ32s")
"""magic, sequence, payload bytes, SHA-256 over the preceding fields and the payload."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One verified copy: its file, its sequence number, and its content."""

    slot: Path
    sequence: int
    content: bytes


class Slots:
    """Blocking. One owner at a time."""

    def __init__(self, folder: Path, name: str, on_corrupt: Callable[[Path], None]) -> None:
        """`on_corrupt` gets the path of a copy that did not verify, which it was moved to where the disk allowed it."""
        self._folder = folder
        self._slots = _slot_paths(folder, name)
        self._on_corrupt = on_corrupt

    def load(self) -> bytes | None:
        """The newest verified content. None if there never was any, or no copy verifies.

        The content is durable when this returns, because its writer may have been killed before the name was flushed.
        Without that, the state after a power cut could be older than what the agent acted on. If the disk refuses the
        flush, the content is returned all the same.
        """
        newest = self._newest()
        if newest is None:
            return None
        with contextlib.suppress(OSError):
            flush_folder(self._folder)
        return newest.content

    def save(self, content: bytes) -> None:
        """The content is durable when this returns. If it raises OSError, the previous content stays."""
        newest = self._newest()
        slot = next(slot for slot in self._slots if newest is None or slot != newest.slot)
        sequence = newest.sequence + 1 if newest else 1
        replace_file(slot, _encode(sequence, content))

    def _newest(self) -> _Copy | None:
        copies = [copy for slot in self._slots if (copy := self._read(slot)) is not None]
        return max(copies, key=lambda copy: copy.sequence, default=None)

    def _read(self, slot: Path) -> _Copy | None:
        try:
            data = slot.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _BAD_SECTOR:
                raise
            self._on_corrupt(slot)
            return None
        copy = _decode(slot, data)
        if copy is None:
            self._on_corrupt(_move_aside(slot))
        return copy


def peek(folder: Path, name: str) -> bytes | None:
    """The newest verified content, for a reader that is not the owner. Moves nothing."""
    copies = (_decode(slot, slot.read_bytes()) for slot in _slot_paths(folder, name) if slot.exists())
    newest = max((copy for copy in copies if copy is not None), key=lambda copy: copy.sequence, default=None)
    return newest.content if newest else None


def corrupt_copies(folder: Path, name: str) -> tuple[Path, ...]:
    """Copies that exist and do not verify. Moves nothing."""
    there = (slot for slot in _slot_paths(folder, name) if slot.exists())
    return tuple(slot for slot in there if _decode(slot, slot.read_bytes()) is None)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of `path` durably. After a failure `path` holds its previous content."""
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


def _slot_paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.a", folder / f"{name}.b"


def _encode(sequence: int, content: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, sequence, len(content), _digest(sequence, content)) + content


def _decode(slot: Path, data: bytes) -> _Copy | None:
    if len(data) < _HEAD.size:
        return None
    magic, sequence, size, digest = _HEAD.unpack_from(data)
    content = data[_HEAD.size :]
    if magic != _MAGIC or size != len(content) or digest != _digest(sequence, content):
        return None
    return _Copy(slot, sequence, content)


def _digest(sequence: int, content: bytes) -> bytes:
    return hashlib.sha256(struct.pack(">8sQQ", _MAGIC, sequence, len(content)) + content).digest()


def _move_aside(slot: Path) -> Path:
    taken = (re.fullmatch(rf"{re.escape(slot.name)}\.corrupt-(\d+)", each.name) for each in slot.parent.iterdir())
    number = max((int(match[1]) for match in taken if match), default=0) + 1
    aside = slot.with_name(f"{slot.name}.corrupt-{number}")
    try:
        return slot.replace(aside)
    except OSError:  # a failing disk may take no more writes
        return slot
