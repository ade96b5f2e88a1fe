"""Backups as they are streamed: to an operator, and to whoever keeps them on a schedule."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.views import VERSION
from shoal.coordinator.controllers.finish import finish
from shoal.coordinator.ports import Blobs, Clock, Snapshot
from shoal.types.codes import Code, refuse
from shoal.v1 import operator_pb2
from shoal.wire.backup import Keyring, Manifest, Writer
from shoal.wire.identity import identity_of_context
from shoal.wire.limits import CHUNK_BYTES

WAITING: Final = 4
_DONE: Final = object()


class Source(Protocol):
    """Of ports.OpenStore."""

    async def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True, slots=True)
class Models:
    """Where models lie, and which ones are whose state names them."""

    blobs: Blobs
    named: Callable[[], Iterable[str]]


class Backups:
    """Of one coordinator, one at a time, for which others wait. keyring: reads the CA's files; secret: what they are
    sealed with, without which they are left out."""

    def __init__(
        self,
        role: str,
        name: str,
        store_name: str,
        store: Source,
        clock: Clock,
        keyring: Callable[[], Keyring],
        secret: bytes,
        models: Models | None = None,
    ) -> None:
        self.role = role
        self.name = name
        self._store_name = store_name
        self._store = store
        self._clock = clock
        self._keyring = keyring
        self._secret = secret
        self._models = models
        self._making = asyncio.Lock()
        self._asked = 0

    async def stream(self, *, models: bool) -> AsyncIterator[bytes]:
        """The file, in pieces of at most CHUNK_BYTES. models: with their bytes. Raises ShoalError(OVERLOADED) where too
        many wait, and as store and blobs do."""
        if self._asked > WAITING:
            raise refuse(Code.OVERLOADED, f"{self._asked} backups are asked for", "one at a time", "try again later")
        self._asked += 1
        try:
            async with self._making:
                async for piece in self._pieces(models):
                    for start in range(0, len(piece), CHUNK_BYTES):
                        yield piece[start : start + CHUNK_BYTES]
        finally:
            self._asked -= 1

    async def _pieces(self, models: bool) -> AsyncIterator[bytes]:
        snapshot = await self._store.snapshot()
        sizes = await self._sizes() if models and self._models is not None else {}
        writer = Writer(
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
        while (part := await finish(asyncio.to_thread(next, parts, _DONE))) is not _DONE:
            assert isinstance(part, bytes)
            yield part
        if self._secret:
            keyring = await finish(asyncio.to_thread(self._keyring))
            yield await finish(asyncio.to_thread(writer.keys, keyring, self._secret))
        for digest, size in sizes.items():
            assert self._models is not None
            yield writer.model_head(digest)
            async for chunk in self._models.blobs.read(digest, 0):
                yield chunk
            yield writer.padding(size)
        yield writer.tail()

    async def _sizes(self) -> dict[str, int]:
        """Of those that are here: a follower's, or a model that another coordinator has, is nobody's loss."""
        assert self._models is not None
        found = {digest: await self._models.blobs.stat(digest) for digest in sorted(set(self._models.named()))}
        return {digest: size for digest, size in found.items() if size is not None}


async def backup(
    backups: Backups, audit: AuditTrail, request: operator_pb2.BackupRequest, context: Any
) -> AsyncIterator[operator_pb2.BackupChunk]:
    """Of the operator API."""
    await audit.note(identity_of_context(context).uri, "Backup", backups.name, "with models" if request.models else "")
    async for data in backups.stream(models=request.models):
        yield operator_pb2.BackupChunk(data=data)
