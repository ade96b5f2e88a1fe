"""`ports.AgentJournal` in a folder: the desired set and the receipts, with disk space reserved for the next desired
set."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple, Unpack

from google.protobuf.message import DecodeError

from shoal.agent.journal.slots import Slots
from shoal.agent.ports import Log
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.receipt import SignedReceipt
from shoal.v1 import link_pb2
from shoal.wire import nouns
from shoal.wire.limits import LINK_BYTES

RESERVE_BYTES: Final = 2 * LINK_BYTES
SLOTS: Final = ("desired", "receipts", "clock")
"""Everything that is kept in slots in the journal's folder."""
_MIN_RESERVE: Final = 64 * 2**10
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileJournal:
    """`desired`, `receipts` and a reserve file in one folder (mode 0700)."""

    def __init__(self, folder: Path, log: Log, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log = log
        self._desired = Slots(folder, "desired", self._on_corrupt)
        self._receipts = Slots(folder, "receipts", self._on_corrupt)
        self._reserve = folder / "reserve"
        self._reserve_bytes = reserve_bytes
        self._lock = asyncio.Lock()
        self._allocate_reserve()

    async def load(self) -> DesiredSet | None:
        return await self._with_lock(self._load)

    async def save(self, desired: DesiredSet) -> None:
        await self._with_lock(self._save, nouns.encode(desired))

    async def load_receipts(self) -> tuple[SignedReceipt, ...]:
        return await self._with_lock(self._load_receipts)

    async def save_receipts(self, receipts: tuple[SignedReceipt, ...]) -> None:
        message = link_pb2.Receipts(receipts=[nouns.to_wire(each) for each in receipts])
        await self._with_lock(self._save_receipts, message.SerializeToString())

    async def _with_lock(self, work: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments) -> Result:
        """Runs in a thread, because a slow disk must not hold up the link. One at a time, so that no save overtakes
        another."""
        async with self._lock:
            return await asyncio.to_thread(work, *arguments)

    def _load(self) -> DesiredSet | None:
        content = self._desired.load()
        if content is None:
            return None
        try:
            return nouns.decode(DesiredSet, content)
        except ShoalError as error:  # a newer version of this program wrote it
            self._log.error(
                "state_unreadable",
                code=Code.STATE_CORRUPT,
                error=str(error),
                remedy="the coordinator sends the newest set; cut off, run the version that wrote it",
            )
            return None

    def _save(self, content: bytes) -> None:
        try:
            self._desired.save(content)
        except OSError as cause:
            if cause.errno not in _NO_SPACE:
                raise _disk_error(cause) from cause
            self._save_into_reserve(content)
        self._allocate_reserve()

    def _save_into_reserve(self, content: bytes) -> None:
        """The disk is full: save the desired set in the space that the reserve file held."""
        self._log.warning("disk_full", code=Code.DISK_FULL, remedy="free space in the agent's state directory")
        self._reserve.unlink(missing_ok=True)
        try:
            self._desired.save(content)
        except OSError as cause:
            raise _disk_error(cause) from cause

    def _load_receipts(self) -> tuple[SignedReceipt, ...]:
        content = self._receipts.load()
        if content is None:
            return ()
        try:
            message = link_pb2.Receipts.FromString(content)
            return tuple(nouns.from_wire(SignedReceipt, each) for each in message.receipts)
        except (ShoalError, DecodeError) as error:
            self._log.warning(
                "state_unreadable",
                code=Code.STATE_CORRUPT,
                error=str(error),
                remedy="a newer version wrote the receipts; the devices are probed again",
            )
            return ()

    def _save_receipts(self, content: bytes) -> None:
        try:
            self._receipts.save(content)
        except OSError as cause:
            raise _disk_error(cause) from cause

    def _allocate_reserve(self) -> None:
        """Reserve as much as the disk allows. Without a reserve, a save on a full disk fails, and what runs keeps
        running."""
        size = self._reserve_bytes
        while size >= _MIN_RESERVE and not self._allocate(size):
            size //= 2

    def _allocate(self, size: int) -> bool:
        try:
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError:
            self._reserve.unlink(missing_ok=True)
            return False
        return True

    def _on_corrupt(self, aside: Path) -> None:
        self._log.error(
            "state_corrupt",
            code=Code.STATE_CORRUPT,
            file=aside.name,
            remedy="look at the disk; the coordinator sends the newest set again",
        )


def _disk_error(cause: OSError) -> ShoalError:
    if cause.errno in _NO_SPACE:
        return refuse(
            Code.DISK_FULL, "no space for the agent's state", "room for one desired set", "free space on its disk"
        )
    return refuse(Code.STORE_UNAVAILABLE, f"{cause.strerror}", "a writable state directory", "look at the disk")
