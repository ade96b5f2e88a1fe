"""Feeds that are files in one folder, which is all that a document can name of this machine."""

import asyncio
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall

MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FileText:
    """version: differs whenever the file was written or replaced. written_at: its time of change on disk."""

    text: str
    version: tuple[int, ...]
    written_at: Wall


class FeedFiles:
    """folder: where feeds lie; made by whoever writes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def read(self, name: str, known: FileText | None) -> FileText:
        """`known` itself where the file is still that. name: a path inside the folder.

        Raises ShoalError(SOURCE_DENIED | SOURCE_UNREACHABLE)."""
        return await asyncio.to_thread(self._read, name, known)

    def _read(self, name: str, known: FileText | None) -> FileText:
        try:
            folder = self._folder.resolve()
            path = (folder / name).resolve()
            if not path.is_relative_to(folder):
                raise self._denied(f"{name:.120} lies outside {folder}")
            # Not to wait for a pipe's writer; what is no plain file is refused below.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise self._denied(f"{name:.120} is no plain file")
                version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
                if known is not None and known.version == version:
                    return known
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    data = file.read(MOST_BYTES + 1)
            finally:
                os.close(descriptor)
        except (OSError, RuntimeError) as cause:  # a RuntimeError: links that lead to each other
            why = cause.strerror if isinstance(cause, OSError) else "links without end"
            raise unreachable(f"{name:.120} in {self._folder}: {why}") from cause
        return FileText(decoded(data, name), version, Wall(found.st_mtime))

    def _denied(self, found: str) -> ShoalError:
        return refuse(Code.SOURCE_DENIED, found, f"a file in {self._folder}", "put the feed there, or a constant here")


def decoded(data: bytes, name: str) -> str:
    """Raises ShoalError(SIGNAL_INVALID) of what is too large or no text."""
    if len(data) > MOST_BYTES:
        raise refuse(
            Code.SIGNAL_INVALID, f"{name:.120} is too large", f"at most {MOST_BYTES} bytes", "shorten the feed"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise refuse(Code.SIGNAL_INVALID, f"{name:.120} is no text", "UTF-8", "write it as text") from cause


def unreachable(found: str) -> ShoalError:
    return refuse(Code.SOURCE_UNREACHABLE, found, "a feed that can be read", "mend it, or correct the Region's source")
