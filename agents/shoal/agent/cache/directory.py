"""`ports.ModelCache` in a folder: model bytes by digest, fetched resumably and verified while they are written.

`HEX` is a whole model, `HEX.part` an incomplete one, `HEX.corrupt` one that failed verification (kept until space is
needed). A whole model gets its name by a rename, after its SHA-256 matched and its bytes were flushed.
"""

import asyncio
import errno
import hashlib
import os
import re
import shutil
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from shoal.agent.cache.publishers import SignatureVerifier
from shoal.agent.ports import Log
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Bytes, show_bytes

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_FILE: Final = re.compile(r"([0-9a-f]{64})(\.part|\.corrupt)?")
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_BYTES: Final = 2**20


class Fetch(Protocol):
    """Source of model bytes."""

    def __call__(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]:
        """The model's bytes from `offset` on. Raises ShoalError(FETCH_FAILED | MODEL_UNKNOWN | ...)."""
        ...


class DirectoryCache:
    """One owner at a time. Disk work runs in threads, so that a slow disk does not hold up the link."""

    def __init__(
        self,
        folder: Path,
        fetch: Fetch,
        signatures: SignatureVerifier,
        log: Log,
        *,
        quota: Bytes,
        low_water: Bytes = Bytes(64 * 2**20),
    ) -> None:
        """`quota`: bytes of all files here. `low_water`: bytes that a fetch leaves free on the disk for the rest of the
        machine."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._fetch = fetch
        self._signatures = signatures
        self._admission_lock = asyncio.Lock()
        self._log = log
        self._quota = quota
        self._low_water = low_water
        self._pinned: frozenset[str] | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # By digest: bytes that are still to come, of those that were found to have room.
        self._promised: dict[str, int] = {}
        # One at a time looks for room, so that no two are promised the same.
        self._room_lock = asyncio.Lock()

    async def admit(self, asked: Assignment) -> None:
        async with self._admission_lock:
            await asyncio.to_thread(self._signatures.check, asked)

    async def ensure(self, digest: str, size: Bytes) -> str:
        name = _file_name(digest)
        async with self._locks[name]:
            whole = self._folder / name
            try:
                if await asyncio.to_thread(_is_complete, whole, size):
                    return str(whole)
                await asyncio.to_thread(whole.unlink, missing_ok=True)
                await self._download(digest, whole, size)
            except OSError as cause:
                if cause.errno in _NO_SPACE:
                    raise _disk_full_error(f"{show_bytes(size)} for {digest:.19}") from cause
                raise refuse(Code.FETCH_FAILED, f"{cause.strerror}", "a writable cache", "look at the disk") from cause
            return str(whole)

    async def keep(self, file: str) -> tuple[str, str]:
        made = Path(file)
        try:
            size, digest = await asyncio.to_thread(_digest_of, made)
            name = _file_name(digest)
            async with self._locks[name]:
                try:
                    await self._make_room(size, digest)
                    await asyncio.to_thread(_publish, made, self._folder / name)
                finally:
                    self._promised.pop(digest, None)
        except OSError as cause:
            if cause.errno in _NO_SPACE:
                raise _disk_full_error(f"a model that was prepared, {made.name}") from cause
            raise refuse(Code.FETCH_FAILED, f"{cause.strerror}", "a writable cache", "look at the disk") from cause
        return digest, str(self._folder / name)

    async def find(self, digest: str, size: Bytes) -> str | None:
        whole = self._folder / _file_name(digest)
        return str(whole) if await asyncio.to_thread(_is_complete, whole, size) else None

    async def discard(self, digest: str) -> bool:
        whole = self._folder / _file_name(digest)
        try:
            async with self._locks[whole.name]:  # it may have been fetched again meanwhile
                if not await asyncio.to_thread(_is_corrupt, whole, digest):
                    return False
                await asyncio.to_thread(whole.replace, whole.with_name(f"{whole.name}.corrupt"))
        except OSError as cause:
            raise refuse(Code.FETCH_FAILED, f"{cause.strerror}", "a writable cache", "look at the disk") from cause
        self._log.warning("model_corrupt", code=Code.MODEL_DIGEST, digest=digest)
        return True

    async def collect(self, pinned: frozenset[str]) -> tuple[str, ...]:
        self._pinned = frozenset(_file_name(digest) for digest in pinned)
        try:
            return await asyncio.to_thread(self._evict, 0)
        except OSError as error:
            self._log.error("model_eviction_failed", error=str(error))
            return ()

    async def _download(self, digest: str, whole: Path, size: Bytes) -> None:
        part = whole.with_name(f"{whole.name}.part")
        have, sha = await asyncio.to_thread(_read_partial, part, size)
        try:
            await self._make_room(size - have, digest)
            file = await asyncio.to_thread(part.open, "ab")
            try:
                if have < size:
                    async with aclosing(self._fetch(digest, have)) as chunks:
                        async for chunk in chunks:
                            have += len(chunk)
                            if have > size:
                                break
                            await asyncio.to_thread(_append, file, sha, chunk)
                            self._promised[digest] = size - have
                await asyncio.to_thread(_flush, file)
            finally:
                await asyncio.to_thread(file.close)
        finally:
            self._promised.pop(digest, None)
        if have < size:
            raise refuse(
                Code.FETCH_FAILED, f"{have} of {size} bytes came", "the whole model", "it is resumed by itself"
            )
        if have > size or f"sha256:{sha.hexdigest()}" != digest:
            await asyncio.to_thread(part.unlink)
            raise refuse(Code.MODEL_DIGEST, "other bytes than the digest says", digest, "push the model again")
        await asyncio.to_thread(_publish, part, whole)
        self._log.info("model_fetched", digest=digest, bytes=size)

    async def _make_room(self, needed: int, digest: str) -> None:
        """Promises so many bytes to this digest. Raises DISK_FULL if evicting everything that may be evicted is not
        enough."""
        async with self._room_lock:
            self._promised[digest] = needed
            promised = sum(self._promised.values())
            await asyncio.to_thread(self._check_room, promised, f"{show_bytes(needed)} for {digest:.19}")

    def _check_room(self, promised: int, asked: str) -> None:
        """promised: bytes, those that are asked for among them."""
        self._evict(promised)
        total = sum(size for _, size, _ in self._files())
        if total + promised > self._quota:
            raise _disk_full_error(f"{asked} in a cache of {show_bytes(self._quota)} that holds {show_bytes(total)}")
        free = shutil.disk_usage(self._folder).free
        if promised + self._low_water > free:
            raise _disk_full_error(f"{asked} with {show_bytes(free)} free")

    def _evict(self, needed: int) -> tuple[str, ...]:
        """Evict files, least recently used first, until `needed` more bytes fit quota and disk.

        Evicts nothing before the first `collect`, because until then the pinned digests are unknown.
        """
        if self._pinned is None:
            return ()
        files = sorted(self._files())
        excess = max(
            sum(size for _, size, _ in files) + needed - self._quota,
            needed + self._low_water - shutil.disk_usage(self._folder).free,
        )
        evicted: list[str] = []
        for _, size, path in files:
            if excess <= 0:
                break
            name = path.name.removesuffix(".part")
            if name in self._pinned or f"sha256:{name}" in self._promised:
                continue
            path.unlink(missing_ok=True)
            excess -= size
            evicted.append(f"sha256:{path.stem}")
        return tuple(evicted)

    def _files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of every file of the cache."""
        found = []
        for path in self._folder.iterdir():
            if _FILE.fullmatch(path.name):
                with suppress(FileNotFoundError):  # a fetch that ended meanwhile has renamed its file
                    stat = path.stat()
                    found.append((stat.st_mtime, stat.st_size, path))
        return found


def _file_name(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise refuse(Code.MODEL_UNKNOWN, f"{digest!r:.80}", "sha256:HEX", "assign a model by its digest")
    return match[1]


def _is_complete(whole: Path, size: Bytes) -> bool:
    """Whether all bytes are there. Also marks them as used. The worker hashes the very bytes that it loads."""
    try:
        if whole.stat().st_size != size:
            return False
    except FileNotFoundError:
        return False
    with suppress(OSError):  # a disk that fails writes still holds the bytes
        os.utime(whole)
    return True


def _read_partial(part: Path, size: Bytes) -> "tuple[int, hashlib._Hash]":
    """Bytes that an earlier fetch left, and their hash so far."""
    sha = hashlib.sha256()
    have = 0
    try:
        with part.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                sha.update(chunk)
                have += len(chunk)
    except FileNotFoundError:
        return 0, sha
    if have > size:
        part.unlink()
        return 0, hashlib.sha256()
    return have, sha


def _digest_of(made: Path) -> tuple[int, str]:
    """(bytes, digest) of a file, which is on disk when this returns."""
    with os.fdopen(os.open(made, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, f"sha256:{digest}"


def _is_corrupt(whole: Path, digest: str) -> bool:
    """False also where there is no file. Raises OSError where it cannot be read."""
    try:
        with os.fdopen(os.open(whole, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" != digest
    except FileNotFoundError:
        return False


def _append(file: BinaryIO, sha: "hashlib._Hash", chunk: bytes) -> None:
    file.write(chunk)
    sha.update(chunk)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(part: Path, whole: Path) -> None:
    part.replace(whole)
    descriptor = os.open(whole.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_full_error(asked: str) -> ShoalError:
    return refuse(
        Code.DISK_FULL, "no room in the model cache", asked, "free space, raise --cache-quota, or unassign a model"
    )
