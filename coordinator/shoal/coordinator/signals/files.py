"""Feeds that are files in one folder; documents can name no other file of this machine."""

import asyncio
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall

MAX_FEED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FileText:
    """Text of a feed's file, with what tells whether it has changed."""

    # The decoded content.
    text: str
    # Changes whenever the file is written or replaced.
    version: tuple[int, ...]
    # The file's modification time on disk.
    written_at: Wall


class FeedFiles:
    """folder: of the feeds; whoever writes them creates it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def read(self, name: str, known: FileText | None) -> FileText:
        """Returns `known` itself if the file is unchanged. name: a path inside the folder.

        Raises ShoalError(SOURCE_DENIED | SOURCE_UNREACHABLE).
        """
        return await asyncio.to_thread(self._read, name, known)

    def _read(self, name: str, known: FileText | None) -> FileText:
        try:
            folder = self._folder.resolve()
            path = (folder / name).resolve()
            if not path.is_relative_to(folder):
                raise self._denial(f"{name:.120} lies outside {folder}")
            # O_NONBLOCK: do not wait for a pipe's writer; the check below refuses anything that is not a plain file.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise self._denial(f"{name:.120} is no plain file")
                version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
                if known is not None and known.version == version:
                    return known
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    data = file.read(MAX_FEED_BYTES + 1)
            finally:
                os.close(descriptor)
        except (OSError, RuntimeError) as cause:  # RuntimeError: a cycle of links
            why = cause.strerror if isinstance(cause, OSError) else "links without end"
            raise unreachable_error(f"{name:.120} in {self._folder}: {why}") from cause
        return FileText(decode_feed(data, name), version, Wall(found.st_mtime))

    def _denial(self, found: str) -> ShoalError:
        return refuse(Code.SOURCE_DENIED, found, f"a file in {self._folder}", "put the feed there, or a constant here")


def decode_feed(data: bytes, name: str) -> str:
    """Raises ShoalError(SIGNAL_INVALID) if the data is too large or not text."""
    if len(data) > MAX_FEED_BYTES:
        raise refuse(
            Code.SIGNAL_INVALID, f"{name:.120} is too large", f"at most {MAX_FEED_BYTES} bytes", "shorten the feed"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise refuse(Code.SIGNAL_INVALID, f"{name:.120} is no text", "UTF-8", "write it as text") from cause


def unreachable_error(found: str) -> ShoalError:
    return refuse(Code.SOURCE_UNREACHABLE, found, "a feed that can be read", "mend it, or correct the Region's source")
