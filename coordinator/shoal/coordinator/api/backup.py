"""Streams backups to operators and to the backup schedule."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from shoal.artifacts.backup import BackupWriter, Keyring, Manifest
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.views import VERSION
from shoal.coordinator.ports import Blobs, Clock, StoreSnapshot
from shoal.coordinator.uncancelled import run_to_completion
from shoal.types.codes import Code, refuse
from shoal.v1 import operator_pb2
from shoal.wire.certificates import identity_of_context
from shoal.wire.limits import CHUNK_BYTES

MAX_WAITING: Final = 4
_DONE: Final = object()


class SnapshotSource(Protocol):
    """The part of ports.OpenStore that a backup needs."""

    async def snapshot(self) -> StoreSnapshot: ...


@dataclass(frozen=True, slots=True)
class BackupModels:
    """The models of a backup."""

    # Where the models are stored.
    blobs: Blobs
    # Returns the digests of the models that the state refers to.
    digests: Callable[[], Iterable[str]]


class Backups:
    """Backups of one coordinator, one at a time; other requests wait. keyring: reads the CA's files. secret: seals
    them; if empty, backups contain no CA files."""

    def __init__(
        self,
        role: str,
        name: str,
        store_name: str,
        store: SnapshotSource,
        clock: Clock,
        keyring: Callable[[], Keyring],
        secret: bytes,
        models: BackupModels | None = None,
    ) -> None:
        self.role = role
        self.name = name
        self._store_name = store_name
        self._store = store
        self._clock = clock
        self._keyring = keyring
        self._secret = secret
        self._models = models
        self._lock = asyncio.Lock()
        self._request_count = 0

    async def stream(self, *, models: bool) -> AsyncIterator[bytes]:
        """The backup file, in pieces of at most CHUNK_BYTES. models: include their bytes. Raises ShoalError(OVERLOADED)
        if too many requests wait, and whatever the store and blobs raise."""
        if self._request_count > MAX_WAITING:
            raise refuse(
                Code.OVERLOADED, f"{self._request_count} backups are asked for", "one at a time", "try again later"
            )
        self._request_count += 1
        try:
            async with self._lock:
                async for piece in self._pieces(models):
                    for start in range(0, len(piece), CHUNK_BYTES):
                        yield piece[start : start + CHUNK_BYTES]
        finally:
            self._request_count -= 1

    async def _pieces(self, models: bool) -> AsyncIterator[bytes]:
        snapshot = await self._store.snapshot()
        sizes = await self._sizes() if models and self._models is not None else {}
        writer = BackupWriter(
            Manifest(
                self.role,
                self.name,
                self._store_name,
                snapshot.revision,
                self._clock.wall(),
                VERSION,
                len(snapshot.records),
                sizes,
                keys=bool(self._secret),
            )
        )
        yield writer.head()
        parts = writer.records((record.key, record.value) for record in snapshot.records)
        while (part := await run_to_completion(asyncio.to_thread(next, parts, _DONE))) is not _DONE:
            assert isinstance(part, bytes)
            yield part
        if self._secret:
            keyring = await run_to_completion(asyncio.to_thread(self._keyring))
            yield await run_to_completion(asyncio.to_thread(writer.keys, keyring, self._secret))
        for digest, size in sizes.items():
            assert self._models is not None
            yield writer.model_head(digest)
            async for chunk in self._models.blobs.read(digest, 0):
                yield chunk
            yield writer.padding(size)
        yield writer.tail()

    async def _sizes(self) -> dict[str, int]:
        """Sizes of the models that are stored here. Others, which a follower or another coordinator has, are
        skipped."""
        assert self._models is not None
        found = {digest: await self._models.blobs.stat(digest) for digest in sorted(set(self._models.digests()))}
        return {digest: size for digest, size in found.items() if size is not None}


async def stream_backup(
    backups: Backups, audit: AuditTrail, request: operator_pb2.BackupRequest, context: Any
) -> AsyncIterator[operator_pb2.BackupChunk]:
    """Backup of the operator API."""
    await audit.note(identity_of_context(context).uri, "Backup", backups.name, "with models" if request.models else "")
    async for data in backups.stream(models=request.models):
        yield operator_pb2.BackupChunk(data=data)
