"""Scheduled backups in a folder of their own: written, read back, and the oldest deleted."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from shoal.artifacts.backup import Backup, Keyring, read_secret
from shoal.coordinator import metrics
from shoal.coordinator.api.backup import BackupModels, Backups
from shoal.coordinator.main.options import CoordinatorConfig
from shoal.coordinator.ports import Clock, Meter, OpenStore
from shoal.coordinator.uncancelled import run_to_completion
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.metric import MetricReadings
from shoal.types.units import Seconds, Wall

RETRY_S: Final = Seconds(60.0)
"""Seconds after a failed backup."""

log: Final = structlog.get_logger("shoal.coordinator")


def keyring_of(folder: Path) -> Callable[[], Keyring]:
    """Returns a function that reads the files of a CA's folder, except those that were never completed."""

    def read() -> Keyring:
        files = [each for each in folder.rglob("*") if each.is_file() and not each.name.startswith(".")]
        return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(files)}

    return read


def backups_of(
    config: CoordinatorConfig, role: str, store: OpenStore, clock: Clock, models: BackupModels | None = None
) -> Backups:
    """Raises ShoalError(FIELD_INVALID) if the secret's file cannot be used."""
    secret = read_secret(config.backup_key_file) if config.backup_key_file is not None else b""
    keyring = keyring_of(config.shared_dir / "ca")
    return Backups(role, config.region, config.store, store, clock, keyring, secret, models)


def schedule_of(config: CoordinatorConfig, backups: Backups, clock: Clock, meter: Meter) -> "BackupSchedule | None":
    if config.archive_dir is None:
        return None
    return BackupSchedule(config.archive_dir, config.archive_every_s, config.archive_keep, backups, clock, meter)


def backup_readings(schedule: "BackupSchedule | None") -> MetricReadings:
    """Unix time of the newest backup, 0 before the first; empty without a schedule."""
    return {} if schedule is None else {metrics.BACKUP_MADE: {(): schedule.made_at}}


class BackupSchedule:
    """made_at: Unix time of the newest backup that exists; 0 without one."""

    def __init__(self, folder: Path, every_s: float, keep: int, backups: Backups, clock: Clock, meter: Meter) -> None:
        self.made_at = Wall(0.0)
        self._folder = folder
        self._every_s = every_s
        self._keep = keep
        self._backups = backups
        self._clock = clock
        self._meter = meter

    async def run(self) -> None:
        """Runs forever. Failures are counted and retried."""
        self.made_at = await asyncio.to_thread(self._newest)
        while True:
            await self._clock.sleep(Seconds(max(0.0, self.made_at + self._every_s - self._clock.wall())))
            try:
                made = await self.make()
                log.info("backup_written", file=made.path.name, revision=made.manifest.revision)
            except ShoalError as error:
                self._meter.count(metrics.BACKUPS_FAILED, code=error.code)
                log.error("backup_failed", code=error.code, error=str(error))
                await self._clock.sleep(RETRY_S)

    async def make(self) -> Backup:
        """Makes a backup now, reads it back whole, then deletes those beyond `keep`. Raises ShoalError."""
        stamp = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y%m%dT%H%M%SZ")
        path = self._folder / f"{self._prefix}{stamp}.tar"
        unfinished = self._folder / f".{self._prefix}unfinished"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            await self._write(unfinished)
            made = await run_to_completion(asyncio.to_thread(Backup.open, unfinished))
            unfinished.rename(path)
            _sync(self._folder)
            for old in self._all()[: -self._keep]:
                old.unlink()
        except OSError as cause:
            raise refuse(
                Code.DISK_FULL,
                f"{self._folder}: {cause.strerror}",
                "a folder with room for backups",
                "free disk space, or choose another --archive-dir",
            ) from cause
        finally:
            with suppress(OSError):  # the failure is reported already
                unfinished.unlink(missing_ok=True)
        self.made_at = made.manifest.made_at
        return Backup(path, made.manifest, made.digests)

    @property
    def _prefix(self) -> str:
        return f"{self._backups.role}-{self._backups.name}-"

    async def _write(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            async for data in self._backups.stream(models=False):
                await run_to_completion(asyncio.to_thread(file.write, data))
            file.flush()
            await run_to_completion(asyncio.to_thread(os.fsync, file.fileno()))

    def _all(self) -> list[Path]:
        """Oldest first, because a name contains its time."""
        return sorted(self._folder.glob(f"{self._prefix}*.tar"))

    def _newest(self) -> Wall:
        for path in reversed(self._all()):
            try:
                return Backup.open(path).manifest.made_at
            except ShoalError as error:
                log.error("backup_damaged", file=path.name, code=error.code, error=str(error))
        return Wall(0.0)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
