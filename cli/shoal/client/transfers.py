"""Files to and from a region: models, sample packs, backups."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from shoal.artifacts.backup import Backup
from shoal.client.connection import LeaderConnection
from shoal.types.codes import Code, refuse
from shoal.types.migration import PACK_BYTES
from shoal.types.units import show_bytes
from shoal.v1 import artifacts_pb2, operator_pb2
from shoal.wire.limits import CHUNK_BYTES, MODEL_BYTES

PUSH_TIMEOUT_S: Final = 600.0
BACKUP_TIMEOUT_S: Final = 3600.0

Progress = Callable[[int, int], None]
"""(bytes done, bytes in total)"""


def send_file(
    connection: LeaderConnection, method: str, path: Path, name: str, progress: Progress | None, signature: bytes,
    samples_of: str = "", shapes: Mapping[str, Sequence[int]] | None = None,
) -> artifacts_pb2.PushReply:  # fmt: skip
    """Send a file in chunks. method: `Push` or `Inspect`. samples_of: the model that a sample pack is for. shapes: of
    inputs, to count at. Raises ShoalError."""
    digest, size = digest_of(path, PACK_BYTES if samples_of else MODEL_BYTES)

    def chunks() -> Iterable[artifacts_pb2.PushChunk]:
        head = artifacts_pb2.PushHead(name=name, size=size, digest=digest, signature=signature, samples_of=samples_of)
        for tensor, dims in (shapes or {}).items():
            head.reference_shapes[tensor].dims.extend(dims)
        yield artifacts_pb2.PushChunk(head=head)
        done = 0
        with path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                yield artifacts_pb2.PushChunk(data=data)
                done += len(data)
                if progress is not None:
                    progress(done, size)

    def call() -> artifacts_pb2.PushReply:
        return getattr(connection.artifacts, method)(chunks(), timeout=PUSH_TIMEOUT_S)  # type: ignore[no-any-return]

    return connection.call_leader(call, is_repeatable=True)


def receive_backup(
    connection: LeaderConnection, request: operator_pb2.BackupRequest, path: Path, progress: Callable[[int], None]
) -> Backup:
    """Write a backup to a new file that only its owner can read, and verify it. Raises ShoalError(CONFLICT | DISK_FULL
    | ...)."""
    if path.exists():
        raise refuse(Code.CONFLICT, f"{path} is there", "a new file", "choose another name")
    if not path.parent.is_dir():
        raise refuse(
            Code.CONFLICT, f"no folder {path.parent}", "a folder that is there", "make it, or choose another name"
        )
    unfinished = path.with_name(f".{path.name}.unfinished")

    def call() -> None:
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for chunk in connection.operator.Backup(request, timeout=BACKUP_TIMEOUT_S):
                file.write(chunk.data)
                progress(file.tell())
            file.flush()
            os.fsync(file.fileno())

    try:
        connection.call_leader(call, is_repeatable=True)
        whole = Backup.open(unfinished)
        unfinished.rename(path)
    except OSError as cause:
        found = f"{path}: {cause.strerror}"
        raise refuse(Code.DISK_FULL, found, "a folder with room for a backup", "choose another") from cause
    finally:
        unfinished.unlink(missing_ok=True)
    return replace(whole, path=path)


def digest_of(path: Path, most: int = MODEL_BYTES) -> tuple[str, int]:
    """(`sha256:<hex>`, bytes) of a file that a region would accept; the size is checked before reading. Raises
    ShoalError(SOURCE_UNREACHABLE | MODEL_TOO_LARGE)."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                found, limit = f"{path}: {show_bytes(size)}", f"at most {show_bytes(most)} in one file"
                raise refuse(
                    Code.MODEL_TOO_LARGE, found, limit, "a smaller file: quantise the model, take fewer samples"
                )
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return f"sha256:{digest}", file.tell()
    except OSError as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{path}: {cause.strerror}", "a model file that can be read", "correct the path"
        ) from cause
