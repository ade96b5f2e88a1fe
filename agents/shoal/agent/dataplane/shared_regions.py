"""The registered regions of shared memory of one front, as open files. `core.shared_memory` decides.

A file is opened once, when it is registered, and neither mapped nor opened again: it is read and written by descriptor
and position. So a file that its owner shrinks gives fewer bytes, where a mapping would end the process (SIGBUS).
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from shoal.agent.core.shared_memory import RegionTable, SharedMemoryGrant, SharedRegion, file_of, shm_refusal
from shoal.types.codes import Refusal, ShoalError

FOLDER: Final = Path("/dev/shm")
"""Where Linux keeps what `shm_open` names (shm_overview(7))."""
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Neither a link is followed, nor does a pipe keep the front waiting."""


class OpenRegion:
    """A region with its open file, until it is removed and nothing uses it."""

    __slots__ = ("_descriptor", "_on_closed", "_users", "region")

    def __init__(self, region: SharedRegion, descriptor: int, on_closed: Callable[[], None]) -> None:
        self.region = region
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._users = 1

    def hold(self) -> None:
        """Keep the file open until `release`."""
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            os.close(self._descriptor)
            self._on_closed()

    def read(self, into: memoryview, position: int) -> None:
        """Fill `into` from a position in the file. Raises ShoalError(SHM_DENIED) where the file has fewer bytes."""
        try:
            count = os.preadv(self._descriptor, [into], position)
        except OSError as error:
            raise self._failure(error) from error
        if count != len(into):
            raise self._shrunk()

    def write(self, content: memoryview, position: int) -> None:
        """Write to a position in the file. Raises ShoalError(SHM_DENIED) where the file has no room."""
        try:
            if os.fstat(self._descriptor).st_size < position + len(content):  # a write would make it longer
                raise self._shrunk()
            while content:
                count = os.pwrite(self._descriptor, content, position)
                content, position = content[count:], position + count
        except OSError as error:
            raise self._failure(error) from error

    def _shrunk(self) -> ShoalError:
        found = f"shared memory region {self.region.name!r:.80}, whose file has become shorter"
        return ShoalError(shm_refusal(found, "the size that was registered", "unregister it, and register it again"))

    def _failure(self, error: OSError) -> ShoalError:
        found = f"shared memory region {self.region.name!r:.80}: {error.strerror}"
        return ShoalError(
            shm_refusal(found, "a file that can be read and written", "see the file's owner, and its limits")
        )


class SharedRegions:
    """The regions of one front. Without grants nobody can register any."""

    def __init__(self, grants: tuple[SharedMemoryGrant, ...] = (), folder: Path = FOLDER) -> None:
        self._grants = grants
        self._folder = folder
        self._table: RegionTable[OpenRegion] = RegionTable()

    def is_allowed(self, tenant: str) -> bool:
        return any(each.tenant == tenant for each in self._grants)

    def register(self, tenant: str, region: SharedRegion) -> None:
        """Raises ShoalError(SHM_DENIED | CONFLICT | INVALID_ARGUMENT)."""
        file = file_of(region.key, tenant, self._grants)
        if isinstance(file, Refusal):
            raise ShoalError(file)
        refusal = self._table.check_new(tenant, region.name)
        if refusal is not None:
            raise ShoalError(refusal)
        descriptor = self._open(file)
        try:
            refusal = region.check(_file_bytes(descriptor, region.key))
            if refusal is not None:
                raise ShoalError(refusal)
        except BaseException:
            os.close(descriptor)
            raise
        self._table.add(tenant, region.name, OpenRegion(region, descriptor, lambda: self._table.release(tenant)))

    def unregister(self, tenant: str, name: str = "") -> None:
        """Remove one region, or all of the tenant. Requests that use it go on. What does not exist is not missed."""
        for each in self._table.remove(tenant, name):
            each.release()

    def find(self, tenant: str, name: str) -> OpenRegion:
        """Raises ShoalError(NOT_FOUND)."""
        found = self._table.find(tenant, name)
        if isinstance(found, Refusal):
            raise ShoalError(found)
        return found

    def of(self, tenant: str) -> tuple[SharedRegion, ...]:
        return tuple(each.region for each in self._table.of(tenant).values())

    def _open(self, file: str) -> int:
        """Raises ShoalError(SHM_DENIED)."""
        try:
            folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return os.open(file, _FLAGS, dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            found = f"key {file!r:.80}: {error.strerror}"
            asked = "a file in /dev/shm that the front's user may read and write"
            raise ShoalError(shm_refusal(found, asked, "create it on the front's machine, under its user")) from error


def _file_bytes(descriptor: int, key: str) -> int:
    """The file's size. Raises ShoalError(SHM_DENIED) unless it is a regular file with one name: a second name could
    have been given it by somebody who may not read it."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise ShoalError(shm_refusal(f"key {key!r:.80}", "a regular file without links", "create another"))
    return found.st_size
