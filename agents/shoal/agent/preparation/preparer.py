"""`ports.ModelPreparer`: prepares models in programs of their own, one at a time, and keeps what they made.

What was made is a file of the model cache, named by its digest, which may be evicted like any other that is not pinned.
A small record beside the cache says which one answers which order: by model, samples, precision, tolerances, shapes,
the versions of what made it and, where it is compiled, the device and its options.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from shoal.agent.core.receipt import MAX_OPERATORS
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.packing import pack, unpack
from shoal.agent.ports import AgentClock, Log, PreparedModel
from shoal.agent.preparation.messages import LOG_FILE, MODEL_FILE, RESULT_FILE, PreparationOrder, PreparationResult
from shoal.agent.worker.process import PASSED_VARIABLES
from shoal.host.memory import limit_bytes
from shoal.host.private_files import write_private
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Device
from shoal.types.units import Bytes, Seconds, show_bytes

_MAKERS: Final = ("onnx", "onnxruntime")
"""Packages whose versions change what is made. What compiles, a device's driver tells."""
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
_MOST_NAME: Final = 80
_MOST_TAIL: Final = 2000
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
    # As in PreparedModel.
    compiled: bool = False
    # As in PreparedModel.
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Target:
    """The device that a model is compiled for."""

    # Provider that compiles, by the runtime's name.
    provider: str
    # Versions of the runtime and of what compiles.
    versions: str
    # What that needs to run on the device.
    access: DeviceAccess


class ProgramPreparer:
    """Keeps its records in `folder`. `files` keeps the models; `device` and `access` tell of a device of this node."""

    def __init__(
        self,
        folder: Path,
        files: KeptFiles,
        clock: AgentClock,
        log: Log,
        *,
        device: Callable[[str], Device | None] = lambda _: None,
        access: Callable[[str], DeviceAccess] = lambda _: DeviceAccess(),
    ) -> None:
        self._folder = folder
        self._files = files
        self._clock = clock
        self._log = log
        self._device = device
        self._access = access
        # Digest of a compiled model -> key of its order.
        self._compiled: dict[str, str] = {}
        # Keys of orders whose model could not be compiled, or not be loaded then.
        self._given_up: set[str] = set()
        # One at a time: each may take half of the machine's memory.
        self._turn = asyncio.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in folder.glob("work-*"):  # by a supervisor that was killed; the kernel ended its program
            shutil.rmtree(left, ignore_errors=True)

    def is_needed(self, asked: Assignment) -> bool:
        return asked.preparation is not None or self._target(asked) is not None

    def reject(self, prepared: PreparedModel) -> None:
        key = self._compiled.pop(prepared.digest, None)
        if key is not None:
            self._log.warning("compiled_model_rejected", digest=prepared.digest)
            self._give_up(key)
            (self._folder / f"{key}.json").unlink(missing_ok=True)

    async def prepare(
        self, asked: Assignment, model: str, samples: str, on_start: Callable[[], None]
    ) -> PreparedModel | None:
        target = self._target(asked)
        if asked.preparation is not None:
            return await self._prepare(asked, target, model, samples, on_start)
        if target is None:
            return None
        try:
            return await self._prepare(asked, target, model, "", on_start)
        except ShoalError as error:  # the load tells what is wrong with the model, if anything is
            self._log.warning("model_compile_failed", assignment=asked.id, code=error.code, error=str(error))
            self._give_up(_key(asked, target))
            return None

    def _give_up(self, key: str) -> None:
        if len(self._given_up) >= _MOST_RECORDS:
            self._given_up.pop()
        self._given_up.add(key)

    def _target(self, asked: Assignment) -> _Target | None:
        """None: the model is not compiled before its load."""
        device, access = self._device(asked.device), self._access(asked.device)
        if device is None or not access.compiler:
            return None
        target = _Target(device.provider, f"{device.runtime_version}, {access.compiler}", access)
        return target if _key(asked, target) not in self._given_up else None

    async def _prepare(
        self, asked: Assignment, target: _Target | None, model: str, samples: str, on_start: Callable[[], None]
    ) -> PreparedModel:
        """Raises ShoalError."""
        key = _key(asked, target)
        record = self._folder / f"{key}.json"
        if (kept := await self._find(record, key)) is not None:
            return kept
        async with self._turn:
            if (kept := await self._find(record, key)) is not None:
                return kept
            on_start()
            folder = self._folder / f"work-{secrets.token_hex(4)}"
            try:
                folder.mkdir(mode=0o700)
                began = self._clock.now()
                result = await self._run(_order(asked, target, model, samples, folder))
                if result.refusal is not None:
                    raise ShoalError(result.refusal)
                if result.not_compiled:
                    if asked.preparation is None:
                        raise refuse(Code.PREPARE_FAILED, result.not_compiled, "a compiled model", "")
                    self._log.warning("model_compile_failed", assignment=asked.id, error=result.not_compiled)
                took_s = Seconds(self._clock.now() - began)
                size = (folder / MODEL_FILE).stat().st_size
                digest, path = await self._files.keep(str(folder / MODEL_FILE))
            except OSError as cause:
                raise refuse(Code.DISK_FULL, f"{cause.strerror}", "a writable disk", "look at the disk") from cause
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            told = _Record(digest, size, result.note, took_s, result.compiled, result.operators)
            try:
                await asyncio.to_thread(self._save, record, told)
            except OSError as error:  # the model is here all the same; the next order like it prepares it again
                self._log.warning("preparation_not_recorded", digest=digest, error=str(error))
            self._log.info(
                "model_prepared",
                assignment=asked.id,
                digest=digest,
                duration_s=round(took_s, 3),
                note=result.note,
                compiled=result.compiled,
            )
            return self._made(path, told, key)

    def _made(self, path: str, told: _Record, key: str) -> PreparedModel:
        if told.compiled:
            if len(self._compiled) >= _MOST_RECORDS:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[told.digest] = key
        return PreparedModel(path, told.digest, told.note, Seconds(told.prepare_s), told.compiled, told.operators)

    async def _find(self, record: Path, key: str) -> PreparedModel | None:
        """What an earlier preparation made, if it is still here."""
        try:
            told = unpack(_Record, await asyncio.to_thread(record.read_bytes))
        except (OSError, ShoalError):
            return None
        path = await self._files.find(told.digest, Bytes(told.size))
        return self._made(path, told, key) if path is not None else None

    def _save(self, record: Path, told: _Record) -> None:
        known = sorted(self._folder.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for oldest in known[: max(0, len(known) + 1 - _MOST_RECORDS)]:
            oldest.unlink(missing_ok=True)
        write_private(record, pack(told))

    async def _run(self, order: PreparationOrder) -> PreparationResult:
        """Raises ShoalError(PREPARE_FAILED) if the program leaves no result."""
        folder = Path(order.folder)
        with (folder / LOG_FILE).open("wb") as log:
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
            self._log.warning("preparation_ended", message=await asyncio.to_thread(_tail, folder / LOG_FILE))
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


def _tail(path: Path) -> str:
    """The end of what the program wrote, with nothing that would break a line of the log."""
    try:
        with path.open("rb") as file:
            file.seek(-min(_MOST_TAIL, path.stat().st_size), os.SEEK_END)
            return file.read(_MOST_TAIL).decode(errors="replace")
    except OSError:
        return ""


def _read_result(path: Path) -> bytes:
    """Raises OSError. What the program left is no more to be trusted than the model that it read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(_MOST_RESULT)


def _clipped(result: PreparationResult) -> PreparationResult:
    """Its texts in the length that a report of this node may have."""
    why = result.refusal
    if why is not None:
        why = Refusal(why.code, why.found[:_MOST_TEXT], why.asked[:_MOST_TEXT], why.remedy[:_MOST_TEXT])
    return replace(
        result,
        note=result.note[:_MOST_TEXT],
        refusal=why,
        operators=tuple(each[:_MOST_NAME] for each in result.operators[:MAX_OPERATORS]),
        not_compiled=result.not_compiled[:_MOST_TEXT],
    )


def _key(asked: Assignment, target: _Target | None) -> str:
    """Raises ShoalError(PREPARE_UNAVAILABLE)."""
    shapes = sorted((name, list(shape)) for name, shape in asked.shapes.items())
    named: list[object] = [asked.model, asked.precision, shapes]
    if asked.preparation is not None:
        tolerances = [asdict(each) for each in asked.preparation.tolerances]
        named += [asked.samples, tolerances, _maker_versions()]
    if target is not None:
        options = target.access.options.get(asked.precision, target.access.options.get("", {}))
        named += [asked.device, target.provider, target.versions, sorted(options.items())]
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _maker_versions() -> list[str]:
    """Raises ShoalError(PREPARE_UNAVAILABLE)."""
    # With the first preparation: it brings readers of archives and mail, 1 MB, and most nodes prepare nothing.
    from importlib import metadata

    try:
        return [metadata.version(name) for name in _MAKERS]
    except metadata.PackageNotFoundError as error:
        raise refuse(
            Code.PREPARE_UNAVAILABLE, f"no package {error}", "the agent's extra `prepare`", "install it here"
        ) from error


def _order(asked: Assignment, target: _Target | None, model: str, samples: str, folder: Path) -> PreparationOrder:
    return PreparationOrder(
        model=model,
        model_digest=asked.model,
        makes=asked.precision if asked.preparation is not None else "",
        samples=samples,
        samples_digest=asked.samples if samples else "",
        precision=asked.precision,
        work=asked.work,
        tolerances=asked.preparation.tolerances if asked.preparation is not None else (),
        shapes=asked.shapes,
        folder=str(folder),
        memory_bytes=min(_BASE_BYTES + _BYTES_PER_MODEL_BYTE * asked.model_bytes, limit_bytes() // 2),
        file_bytes=_BASE_FILE_BYTES + 2 * asked.model_bytes,
        provider=target.provider if target is not None else "",
        access=target.access if target is not None else DeviceAccess(),
    )
