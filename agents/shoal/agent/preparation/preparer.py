"""`ports.ModelPreparer`: prepares models in programs of their own, one at a time, and keeps what they made.

What was made is a file of the model cache, named by its digest, which may be evicted like any other that is not pinned.
A small record beside the cache says which one answers which order: by model, samples, precision, tolerances, shapes and
the versions of what made it.
"""

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Protocol

from shoal.agent.packing import pack, unpack
from shoal.agent.ports import AgentClock, Log, PreparedModel
from shoal.agent.preparation.messages import MODEL_FILE, RESULT_FILE, PreparationOrder, PreparationResult
from shoal.agent.worker.process import PASSED_VARIABLES
from shoal.host.memory import limit_bytes
from shoal.host.private_files import write_private
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Bytes, Seconds, show_bytes

_MAKERS: Final = ("onnx", "onnxruntime")
"""Packages whose versions change what is made."""
_BASE_BYTES: Final = 2**30
_BASE_FILE_BYTES: Final = 64 * 2**20
_BYTES_PER_MODEL_BYTE: Final = 32
"""Address space that a preparation may fill: a gigabyte, and this many times the model, but at most half of what the
machine has. Measured resident, on PP-OCR's models at their own sizes: 570 MB for 10.8 MB, 127 MB for 0.6 MB."""
_MOST_RECORDS: Final = 256
_MOST_FILES: Final = 4
"""Files of the largest size that a preparation may hold at once: the simplified model, the one that calibrates, the
prepared one, and the quantiser's own."""
_MOST_RESULT: Final = 64 * 1024
_MOST_TEXT: Final = 500
_LOOK_EVERY_S: Final = 1.0
"""How often its files are counted."""


class KeptFiles(Protocol):
    """The part of the model cache that a preparation needs."""

    async def keep(self, file: str) -> tuple[str, str]:
        """Take over a file that this node made, which is never fetched. Returns its digest and its path from now on.

        Raises ShoalError(DISK_FULL | FETCH_FAILED).
        """
        ...

    async def find(self, digest: str, size: Bytes) -> str | None:
        """Path of these bytes if they are here, which then count as used; None if not."""
        ...


@dataclass(frozen=True, slots=True)
class _Record:
    """What one order came to."""

    # Digest of the prepared model.
    digest: str
    # Its size in bytes.
    size: int
    # As in PreparedModel.
    note: str
    # As in PreparedModel.
    prepare_s: float


class ProgramPreparer:
    """Keeps its records in `folder`. `files` keeps the models."""

    def __init__(self, folder: Path, files: KeptFiles, clock: AgentClock, log: Log) -> None:
        self._folder = folder
        self._files = files
        self._clock = clock
        self._log = log
        # One at a time: each may take half of the machine's memory.
        self._turn = asyncio.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in folder.glob("work-*"):  # by a supervisor that was killed; the kernel ended its program
            shutil.rmtree(left, ignore_errors=True)

    async def prepare(self, asked: Assignment, model: str, samples: str, on_start: Callable[[], None]) -> PreparedModel:
        record = self._folder / f"{_key(asked)}.json"
        if (kept := await self._find(record)) is not None:
            return kept
        async with self._turn:
            if (kept := await self._find(record)) is not None:
                return kept
            on_start()
            folder = self._folder / f"work-{secrets.token_hex(4)}"
            folder.mkdir(mode=0o700)
            try:
                began = self._clock.now()
                result = await self._run(_order(asked, model, samples, folder))
                if result.refusal is not None:
                    raise ShoalError(result.refusal)
                took_s = Seconds(self._clock.now() - began)
                size = (folder / MODEL_FILE).stat().st_size
                digest, path = await self._files.keep(str(folder / MODEL_FILE))
            except OSError as cause:
                raise refuse(Code.DISK_FULL, f"{cause.strerror}", "a writable disk", "look at the disk") from cause
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            told = _Record(digest, size, result.note, took_s)
            await asyncio.to_thread(self._save, record, told)
            self._log.info(
                "model_prepared", assignment=asked.id, digest=digest, duration_s=round(took_s, 3), note=result.note
            )
            return PreparedModel(path, digest, result.note, took_s)

    async def _find(self, record: Path) -> PreparedModel | None:
        """What an earlier preparation made, if it is still here."""
        try:
            told = unpack(_Record, await asyncio.to_thread(record.read_bytes))
        except (OSError, ShoalError):
            return None
        path = await self._files.find(told.digest, Bytes(told.size))
        return PreparedModel(path, told.digest, told.note, Seconds(told.prepare_s)) if path is not None else None

    def _save(self, record: Path, told: _Record) -> None:
        known = sorted(self._folder.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for oldest in known[: max(0, len(known) + 1 - _MOST_RECORDS)]:
            oldest.unlink(missing_ok=True)
        write_private(record, pack(told))

    async def _run(self, order: PreparationOrder) -> PreparationResult:
        """Raises ShoalError(PREPARE_FAILED) if the program leaves no result."""
        folder = Path(order.folder)
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "shoal.agent.preparation.main"),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={key: os.environ[key] for key in PASSED_VARIABLES if key in os.environ} | {"TMPDIR": order.folder},
                cwd="/",
                process_group=0,
            )
        try:
            await self._follow(process, order)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        try:
            return _clipped(unpack(PreparationResult, await asyncio.to_thread(_read_result, folder / RESULT_FILE)))
        except (OSError, ShoalError) as error:
            status = process.returncode or 0
            ended = f"the preparation ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            raise refuse(Code.PREPARE_FAILED, ended, "a prepared model", "a smaller or simpler model") from error

    async def _follow(self, process: asyncio.subprocess.Process, order: PreparationOrder) -> None:
        """Until it ends. Raises ShoalError(DISK_FULL) where its files take more than they may: the limit that the
        program has is one of each file."""
        assert process.stdin is not None
        with suppress(ConnectionError):  # it ended before it had read its order
            process.stdin.write(pack(order))
            await process.stdin.drain()
        process.stdin.close()
        while process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await process.wait()
            held = await asyncio.to_thread(_bytes_below, Path(order.folder))
            if held > _MOST_FILES * order.file_bytes:
                found = f"a preparation that writes {show_bytes(held)}"
                asked = f"at most {show_bytes(_MOST_FILES * order.file_bytes)}"
                raise refuse(Code.DISK_FULL, found, asked, "a smaller or simpler model")


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def _read_result(path: Path) -> bytes:
    """Raises OSError. What the program left is no more to be trusted than the model that it read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(_MOST_RESULT)


def _clipped(result: PreparationResult) -> PreparationResult:
    """Its texts in the length that a report of this node may have."""
    why = result.refusal
    if why is not None:
        why = Refusal(why.code, why.found[:_MOST_TEXT], why.asked[:_MOST_TEXT], why.remedy[:_MOST_TEXT])
    return PreparationResult(result.note[:_MOST_TEXT], why)


def _key(asked: Assignment) -> str:
    """Raises ShoalError(PREPARE_UNAVAILABLE)."""
    assert asked.preparation is not None
    try:
        versions = [metadata.version(name) for name in _MAKERS]
    except metadata.PackageNotFoundError as error:
        raise refuse(
            Code.PREPARE_UNAVAILABLE, f"no package {error}", "the agent's extra `prepare`", "install it here"
        ) from error
    shapes = sorted((name, list(shape)) for name, shape in asked.shapes.items())
    tolerances = [asdict(each) for each in asked.preparation.tolerances]
    named = json.dumps([asked.model, asked.samples, asked.precision, tolerances, shapes, versions], sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()


def _order(asked: Assignment, model: str, samples: str, folder: Path) -> PreparationOrder:
    assert asked.preparation is not None
    return PreparationOrder(
        model=model,
        model_digest=asked.model,
        samples=samples,
        samples_digest=asked.samples,
        precision=asked.precision,
        tolerances=asked.preparation.tolerances,
        shapes=asked.shapes,
        folder=str(folder),
        memory_bytes=min(_BASE_BYTES + _BYTES_PER_MODEL_BYTE * asked.model_bytes, limit_bytes() // 2),
        file_bytes=_BASE_FILE_BYTES + 2 * asked.model_bytes,
    )
