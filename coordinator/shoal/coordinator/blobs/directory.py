"""Models by digest in one directory of this machine.

`ROOT/<hex>` is a complete, verified model; `ROOT/incoming/` holds incomplete ones and is emptied at start. A model
becomes visible by one rename after its bytes and its name are on disk, so a crash leaves either all of it or nothing.
Links of any kind are refused: a name that leads elsewhere, or a file with a second name, is not read. (ONNX Runtime
follows hard links where `onnx` refuses them; this check relies on neither.)
"""

import asyncio
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from shoal.coordinator.blobs.thread import run_thread_to_completion
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Bytes, show_bytes
from shoal.wire.limits import CHUNK_BYTES

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DirectoryBlobs:
    """`ports.Blobs` on a local file system. File work runs in threads; nothing here blocks the event loop."""

    def __init__(self, root: Path | str, max_bytes: Bytes, *, spare_bytes: Bytes = Bytes(64 * 2**20)) -> None:
        """max_bytes: of one model. spare_bytes: free space that a write leaves for the store on the same file
        system."""
        self._root = Path(root)
        self._incoming = self._root / "incoming"
        self._max_bytes = max_bytes
        self._spare_bytes = spare_bytes
        self._promised_bytes = 0
        """What the writes under way declared and have not written yet."""
        self._promising = threading.Lock()
        """Held while `_promised_bytes` changes, in the threads of all writes."""
        self._incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._incoming.iterdir():
            left.unlink()

    async def digests(self) -> tuple[str, ...]:
        """Digests of all that are complete. Raises OSError."""
        names = await asyncio.to_thread(os.listdir, self._root)
        return tuple(digest for digest in (f"sha256:{name}" for name in names) if _DIGEST.fullmatch(digest))

    async def stat(self, digest: str) -> Bytes | None:
        """Size of the model; None if it is not here. Raises ShoalError(MODEL_DIGEST) for an invalid digest."""
        path = self._path(digest)
        return await asyncio.to_thread(_size, path)

    async def read(self, digest: str, offset: int) -> AsyncIterator[bytes]:
        """Bytes from `offset` on, in chunks of CHUNK_BYTES, from one descriptor: a model that is deleted or replaced
        meanwhile is still read to its end. The reader verifies the digest.

        Raises ShoalError(MODEL_UNKNOWN | MODEL_DIGEST | MODEL_PATH | INVALID_ARGUMENT | INTERNAL).
        """
        if offset < 0:
            raise refuse(Code.INVALID_ARGUMENT, f"offset {offset}", "an offset of at least 0", "ask again from 0")
        model = OpenFile()
        try:
            await run_thread_to_completion(model.open, self._path(digest))
            while chunk := await run_thread_to_completion(os.pread, model.descriptor, CHUNK_BYTES, offset):
                offset += len(chunk)
                yield chunk
        finally:
            model.close()

    def path(self, digest: str) -> str:
        """Of the complete file, which need not be there. Raises ShoalError(MODEL_DIGEST) for an invalid digest."""
        return str(self._path(digest))

    async def write(self, chunks: AsyncIterator[bytes], *, size: Bytes, digest: str) -> str:
        """The path of the complete, verified, durable file. New bytes replace an existing copy.

        size: as declared; excess bytes are refused as they arrive. A failure leaves nothing behind. Raises
        ShoalError(MODEL_TOO_LARGE | MODEL_DIGEST | DISK_FULL).
        """
        path = self._path(digest)
        if not 0 < size <= self._max_bytes:
            raise refuse(
                Code.MODEL_TOO_LARGE,
                f"{size} bytes declared",
                f"1 byte to {show_bytes(self._max_bytes)}",
                "a model in one protobuf file ends below 2 GiB: quantise it",
            )
        arriving = OpenFile()
        try:
            await run_thread_to_completion(self._create, arriving, size)
            found, written = hashlib.sha256(), 0
            async for chunk in chunks:
                written += len(chunk)
                if written > size:
                    raise refuse(
                        Code.MODEL_TOO_LARGE,
                        f"more than the {size} bytes that were declared",
                        f"{size} bytes",
                        "declare the file's true size",
                    )
                await run_thread_to_completion(self._append, arriving, chunk, found)
            if f"sha256:{found.hexdigest()}" != digest:
                raise refuse(
                    Code.MODEL_DIGEST,
                    f"{written} of {size} bytes, sha256:{found.hexdigest()}",
                    digest,
                    "push again; if it stays, the file changed after its digest was taken",
                )
            await run_thread_to_completion(self._publish, arriving, path)
        except OSError as failed:
            raise _disk_error(failed, size) from failed
        finally:
            await run_thread_to_completion(self._forget, arriving)
        return str(path)

    async def delete(self, digest: str, is_unrecorded: Callable[[], Awaitable[bool]]) -> None:
        """Deletes the model unless `is_unrecorded` says no, or another file took its place before the answer. No model
        is no error. Readers that have it open continue."""
        path = self._path(digest)
        seen = await asyncio.to_thread(_identity, path)
        if seen is not None and await is_unrecorded():
            await asyncio.to_thread(_unlink_same, path, seen)

    def _path(self, digest: str) -> Path:
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise refuse(
                Code.MODEL_DIGEST, f"{digest!r:.80}", "sha256: and 64 lower-case hex digits", "give the model's digest"
            )
        return self._root / match.group(1)

    def _create(self, arriving: "OpenFile", size: int) -> None:
        """Creates an empty file to write into, if the file system has room for `size` bytes beside the other writes."""
        with self._promising:
            free, promised = shutil.disk_usage(self._incoming).free, self._promised_bytes
            if free < promised + size + self._spare_bytes:
                raise OSError(
                    errno.ENOSPC, f"{show_bytes(free)} free, {show_bytes(promised)} of them promised to others"
                )
            self._promised_bytes += size
            arriving.promised_bytes = size
        arriving.descriptor, name = tempfile.mkstemp(dir=self._incoming)  # 0600, O_EXCL
        arriving.path = Path(name)

    def _append(self, arriving: "OpenFile", chunk: bytes, digest: "hashlib._Hash") -> None:
        digest.update(chunk)
        view = memoryview(chunk)
        while view:
            view = view[os.write(arriving.descriptor, view) :]
        self._release(arriving, len(chunk))

    def _release(self, arriving: "OpenFile", size: int) -> None:
        with self._promising:
            self._promised_bytes -= size
            arriving.promised_bytes -= size

    def _forget(self, arriving: "OpenFile") -> None:
        """Gives back the room that a write did not take, and deletes what is left of one that failed. In this order: a
        disk that errs as a file is closed or deleted must not keep room from later writes."""
        self._release(arriving, arriving.promised_bytes)
        try:
            arriving.close()
        finally:
            if arriving.path is not None:
                arriving.path.unlink(missing_ok=True)

    def _publish(self, arriving: "OpenFile", path: Path) -> None:
        """Flushes the bytes, renames the file and flushes the directory, in this order."""
        assert arriving.path is not None
        os.fchmod(arriving.descriptor, stat.S_IRUSR)
        os.fsync(arriving.descriptor)
        arriving.path.rename(path)
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class OpenFile:
    """A descriptor that a thread opens. path: file to remove once it is closed. promised_bytes: what is still to be
    written to it."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.path: Path | None = None
        self.promised_bytes = 0

    def open(self, path: Path) -> None:
        self.descriptor = open_model(path)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def open_model(path: Path) -> int:
    """A read-only descriptor of this very file: regular, with one name, its last path component no link.

    Opening does not wait, as it would for a FIFO without a writer. Raises ShoalError(MODEL_UNKNOWN | MODEL_PATH |
    INTERNAL).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError as failed:
        raise refuse(Code.MODEL_UNKNOWN, path.name, "a stored model", "see `shoal model ls`") from failed
    except (OSError, ValueError) as failed:
        if isinstance(failed, OSError) and failed.errno in _NO_DESCRIPTOR:
            asked = "a descriptor to read the model with"
            raise refuse(Code.INTERNAL, f"{failed.strerror}", asked, "try again") from failed
        raise _path_error(path, str(failed)) from failed
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        kind = "a file with several names" if stat.S_ISREG(found.st_mode) else "not a regular file"
        raise _path_error(path, kind)
    return descriptor


def _path_error(path: Path, found: str) -> ShoalError:
    return refuse(
        Code.MODEL_PATH, f"{path.name!r:.100}: {found}", "a regular file without links", "give the file itself"
    )


def _size(path: Path) -> Bytes | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return Bytes(found.st_size) if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else None


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Differs between a file and the one that replaces it, though inodes are used again. None: there is no file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _unlink_same(path: Path, seen: tuple[int, int, int]) -> None:
    if _identity(path) == seen:
        path.unlink(missing_ok=True)


def _disk_error(failed: OSError, size: int) -> ShoalError:
    if failed.errno in _FULL:
        return refuse(
            Code.DISK_FULL,
            f"{failed.strerror or failed}",
            f"{show_bytes(size)} for a model",
            "remove unused models (`shoal model rm`) or enlarge the coordinator's disk",
        )
    return refuse(
        Code.INTERNAL,
        failed.strerror or "the disk failed",
        "a writable model directory",
        "look at the coordinator's disk",
    )
