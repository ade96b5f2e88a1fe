"""The region's store in one SQLite file: WAL, synchronous=FULL, one writer thread.

Directory: `state.db` (and its WAL), `reserve`, `created`, `backups/`, and `state.db.corrupt-N` where a damaged file was
set aside. What it adds to a plain table:

- Every row carries a checksum, and the head row carries the sum of all of them. Opening the store therefore detects
  a row that changed, vanished or reappeared, and a WAL that SQLite would silently cut short.
- A damaged file is set aside, never deleted, and the newest verified copy takes its place; `recovery` says so.
  Without a copy the store refuses to open: it is never silently empty.
- `reserve` is disk space kept for deletes. When the disk is full every other write is refused (STORE_FULL), while
  deletes go on. Writes resume as soon as the reserve can be allocated again.
"""

import asyncio
import os
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from shoal.coordinator.ports import (
    Compacted,
    StaleRevision,
    StoreChange,
    StoreOptions,
    StoreRecord,
    StoreSetting,
    StoreSnapshot,
    Transaction,
)
from shoal.coordinator.store.single_node import SingleNodeElection
from shoal.coordinator.store.sqlite_file import (
    DAMAGED,
    SUM_BYTES,
    StoreHead,
    checksum_of,
    copies,
    damage_of_copy,
    head_of,
    open_database,
    put_head,
    sync,
    xor,
)
from shoal.types.codes import Code, Refusal, ShoalError, refuse

T = TypeVar("T")

RESERVE_BYTES: Final = 2 * 2**20
CHANGES_KEPT: Final = 10_000
COPIES_KEPT: Final = 3

_LAST: Final = "\U0010ffff"
_WATCH_BATCH: Final = 256
_GROUP: Final = 64
"""Most transactions that share one flush to the disk."""


@dataclass(slots=True, eq=False)
class _Commit:
    """A transaction that waits for the writer."""

    # What to write.
    transaction: Transaction
    # The revision, or the error that refused it; None while it waits.
    outcome: int | Exception | None = None


class SqliteStore:
    """ports.OpenStore. recovery: None, or why a copy had to be restored when this store was opened. stale: never set,
    because nobody else writes and every write gets an answer."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, thread: ThreadPoolExecutor, *,
                 recovery: Refusal | None, reserve_bytes: int, changes_kept: int) -> None:  # fmt: skip
        self.directory = directory
        self.recovery = recovery
        self.stale = asyncio.Event()
        self._connection = connection
        self._thread = thread
        self._reserve_bytes = reserve_bytes
        self._changes_kept = changes_kept
        self._committed = asyncio.Event()
        self._waiting: deque[_Commit] = deque()
        self._closed = False
        self._has_stale_frames = True
        """Whether the WAL may end in frames of a commit that failed: one of this store, or, at first, one that a power
        cut tore. SQLite lets the next commit overwrite only as many of them as it needs itself, and what is left of two
        such commits looks at a start like damage (`sqlite_file._damage_of_wal`)."""

    SETTINGS: Final[tuple[StoreSetting, ...]] = ()

    @classmethod
    async def from_options(cls, options: StoreOptions) -> "SqliteStore":
        return await cls.open(options.directory)

    @classmethod
    async def open(
        cls, directory: Path, *, reserve_bytes: int = RESERVE_BYTES, changes_kept: int = CHANGES_KEPT
    ) -> "SqliteStore":
        """Opens a verified store, or restores the newest verified copy.

        Raises ShoalError(STATE_CORRUPT) when it is damaged and there is no copy; STORE_UNAVAILABLE when another process
        has it open or the disk fails; STORE_FULL when there is no room to create it.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            connection, recovery = await asyncio.wrap_future(thread.submit(open_database, directory))
        except sqlite3.Error as cause:
            thread.shutdown(wait=False)
            raise _store_error(cause) from cause
        except ShoalError:
            thread.shutdown(wait=False)
            raise
        store = cls(
            directory, connection, thread, recovery=recovery, reserve_bytes=reserve_bytes, changes_kept=changes_kept
        )
        await store._run(store._ensure_reserve)
        return store

    async def read(self, key: str) -> StoreRecord | None:
        def query() -> StoreRecord | None:
            row = self._connection.execute("SELECT key, value, revision FROM kv WHERE key = ?", (key,)).fetchone()
            return None if row is None else StoreRecord(*row)

        return await self._run(query)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[StoreRecord, ...]:
        def query() -> tuple[StoreRecord, ...]:
            rows = self._connection.execute(
                "SELECT key, value, revision FROM kv WHERE key >= ? AND key > ? AND key < ? ORDER BY key LIMIT ?",
                (prefix, after, prefix + _LAST, limit or -1),
            )
            return tuple(StoreRecord(*row) for row in rows)

        return await self._run(query)

    async def commit(self, transaction: Transaction) -> int:
        """Transactions that wait at the same time share one flush; each is written whole or not at all."""
        commit = _Commit(transaction)
        self._waiting.append(commit)
        revision = await self._run(lambda: self._commit(commit))
        signal, self._committed = self._committed, asyncio.Event()
        signal.set()
        return revision

    async def watch(self, prefix: str, after: int) -> AsyncIterator[StoreChange]:
        position: int | None = None
        while True:
            signal = self._committed
            changes, position = await self._run(partial(self._changes, prefix, after, position))
            for change in changes:
                yield change
            if not changes:
                await signal.wait()

    def election(self, candidate: bytes) -> SingleNodeElection:
        return SingleNodeElection(candidate)

    async def backup(self) -> Path:
        """Makes a verified copy under `backups/` and deletes all but the last three. Raises ShoalError."""
        return await self._run(self._backup)

    async def snapshot(self) -> StoreSnapshot:
        """Checks every row's checksum and their sum. The writer waits only while the rows are read."""
        head, rows = await self._run(self._rows)
        return await asyncio.to_thread(_verify_snapshot, head, rows)

    async def close(self) -> None:
        """Leaves one file without a WAL. A second call does nothing."""

        def close() -> None:
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.close()

        if not self._closed:
            self._closed = True
            await asyncio.wrap_future(self._thread.submit(close))
            self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise refuse(Code.STORE_UNAVAILABLE, "the store is closed", "an open store", "start the coordinator")
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except sqlite3.Error as cause:
            raise _store_error(cause) from cause

    def _commit(self, commit: _Commit) -> int:
        """Writes the group that waits, unless an earlier group already included this commit."""
        while commit.outcome is None:
            group = [self._waiting.popleft() for _ in range(min(_GROUP, len(self._waiting)))]
            try:
                self._drop_stale_frames()
                self._write(group)
            except Exception:  # one commit's error may refuse the whole group: write them one by one
                for each in group:
                    self._write_one(each)
        if isinstance(commit.outcome, Exception):
            raise commit.outcome
        return commit.outcome

    def _write_one(self, commit: _Commit) -> None:
        try:
            self._write_or_delete(commit)
        except Exception as error:
            commit.outcome = error

    def _write_or_delete(self, commit: _Commit) -> None:
        try:
            self._drop_stale_frames()
            self._write([commit])
            return
        except sqlite3.Error as error:
            if commit.transaction.puts or not _is_full(error):
                raise
        (self.directory / "reserve").unlink(missing_ok=True)
        self._write([commit])  # stale frames stay for now: folding the WAL may take more room than the reserve had
        self._vacuum()

    def _write(self, group: Sequence[_Commit]) -> None:
        """Writes the group in one SQLite transaction. Raises sqlite3.Error, ShoalError(STORE_FULL); then none was
        written."""
        if any(each.transaction.puts for each in group) and not self._ensure_reserve():
            raise refuse(
                Code.STORE_FULL,
                "no disk space beyond the reserve kept for deletes",
                f"{self._reserve_bytes} bytes free at {self.directory.name}/",
                "free disk space, or delete documents; writes resume by themselves",
            )
        outcomes = list[int | Exception]()
        execute, had_stale_frames = self._connection.execute, self._has_stale_frames
        execute("BEGIN IMMEDIATE")
        try:
            for each in group:
                try:
                    outcomes.append(self._apply(each.transaction))
                except StaleRevision as stale:
                    outcomes.append(stale)
            self._has_stale_frames = True
            execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                execute("ROLLBACK")
            raise
        self._has_stale_frames = had_stale_frames
        for each, outcome in zip(group, outcomes, strict=True):
            each.outcome = outcome

    def _apply(self, transaction: Transaction) -> int:
        """The new revision. Raises StaleRevision before anything is changed."""
        execute = self._connection.execute
        for key, expected in transaction.expect.items():
            row = execute("SELECT revision FROM kv WHERE key = ?", (key,)).fetchone()
            if (row[0] if row else 0) != expected:
                raise StaleRevision(key)
        head = head_of(self._connection)
        revision, total = head.revision + 1, head.sum
        deletes = dict.fromkeys(key for key in transaction.deletes if key not in transaction.puts)
        for key in (*transaction.puts, *deletes):
            row = execute("SELECT checksum FROM kv WHERE key = ?", (key,)).fetchone()
            total = xor(total, row[0]) if row else total
        for key, value in transaction.puts.items():
            checksum = checksum_of(key, revision, value)
            total = xor(total, checksum)
            execute("INSERT OR REPLACE INTO kv VALUES (?, ?, ?, ?)", (key, value, revision, checksum))
            execute("INSERT INTO change VALUES (NULL, ?, ?, ?, ?)", (revision, key, value, checksum))
        for key in deletes:
            if execute("DELETE FROM kv WHERE key = ?", (key,)).rowcount:
                execute(
                    "INSERT INTO change VALUES (NULL, ?, ?, NULL, ?)",
                    (revision, key, checksum_of(key, revision, None)),
                )
        compacted = self._compact(head.compacted_revision)
        put_head(self._connection, StoreHead(revision, compacted, total))
        return revision

    def _compact(self, compacted: int) -> int:
        """Deletes changes beyond the retention, whole revisions at a time, and returns the newest deleted revision.
        Reads only the rows that it deletes: they are in order, and the only index is by sequence."""
        execute = self._connection.execute
        last = execute(
            "SELECT revision, sequence FROM change WHERE sequence = (SELECT max(sequence) FROM change) - ?",
            (self._changes_kept,),
        ).fetchone()
        if last is None:
            return compacted
        gone = execute(
            "SELECT sequence FROM change WHERE revision < ? AND sequence < ? ORDER BY sequence DESC LIMIT 1", last
        ).fetchone()
        if gone is not None:
            execute("DELETE FROM change WHERE sequence <= ?", gone)
        return int(last[0]) - 1

    def _changes(self, prefix: str, after: int, position: int | None) -> tuple[tuple[StoreChange, ...], int]:
        """Changes after `position` (None: after revision `after`), and the position that they reach."""
        execute = self._connection.execute
        head = head_of(self._connection)
        first, last = execute(
            "SELECT (SELECT min(sequence) FROM change), (SELECT max(sequence) FROM change)"
        ).fetchone()  # two queries, each on the index; as one query they would scan every row
        if first is None:
            return (), position or 0
        if position is None:
            seen = execute(
                "SELECT sequence FROM change WHERE revision <= ? ORDER BY sequence DESC LIMIT 1", (after,)
            ).fetchone()
            position = first - 1 if seen is None else seen[0]
            gone = after < head.compacted_revision
        else:
            gone = first > position + 1
        if gone:
            raise Compacted(head.revision)
        rows = execute(
            "SELECT sequence, key, value, revision FROM change WHERE sequence > ? AND key >= ? AND key < ?"
            " ORDER BY sequence LIMIT ?",
            (position, prefix, prefix + _LAST, _WATCH_BATCH),
        ).fetchall()
        reached = rows[-1][0] if len(rows) == _WATCH_BATCH else last
        return tuple(StoreChange(key, value, revision) for _, key, value, revision in rows), reached

    def _ensure_reserve(self) -> bool:
        """True if the reserve exists; allocates it again if there is room."""
        path = self.directory / "reserve"
        with suppress(FileNotFoundError):
            if path.stat().st_size == self._reserve_bytes:
                return True
        if self._allocate(path):
            return True
        self._vacuum()
        return self._allocate(path)

    def _allocate(self, path: Path) -> bool:
        try:
            with path.open("wb") as file:
                if self._reserve_bytes:
                    os.posix_fallocate(file.fileno(), 0, self._reserve_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            return False
        return True

    def _vacuum(self) -> None:
        """Returns the pages that deletes freed to the disk."""
        with suppress(sqlite3.Error):
            self._fold_wal()
            self._has_stale_frames = True
            self._connection.execute("PRAGMA incremental_vacuum").fetchall()
            self._fold_wal()

    def _drop_stale_frames(self) -> None:
        if self._has_stale_frames:
            self._fold_wal()

    def _fold_wal(self) -> None:
        """Flushes the acknowledged commits of the WAL into the file, then cuts the WAL to nothing. Raises
        sqlite3.Error."""
        (is_busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert not is_busy, "this connection holds the file exclusively"
        self._has_stale_frames = False

    def _rows(self) -> tuple[StoreHead, list[tuple[str, bytes, int, bytes]]]:
        rows = self._connection.execute("SELECT key, value, revision, checksum FROM kv ORDER BY key").fetchall()
        try:
            return head_of(self._connection), rows
        except ValueError as cause:
            raise _corrupt(str(cause)) from cause

    def _backup(self) -> Path:
        folder = self.directory / "backups"
        revision = head_of(self._connection).revision
        target, unverified = folder / f"state-{revision:020}.db", folder / "copy.db"
        if target.exists():
            return target
        try:
            folder.mkdir(exist_ok=True)
            unverified.unlink(missing_ok=True)
            with closing(sqlite3.connect(unverified)) as copy:
                self._connection.backup(copy)
            if (damage := damage_of_copy(unverified)) is not None:
                raise refuse(Code.STORE_CORRUPT, f"the copy just made: {damage}", "a verified copy", "check this disk")
            sync(unverified)
            unverified.rename(target)
            sync(folder)
        except OSError as cause:
            raise refuse(Code.STORE_UNAVAILABLE, str(cause.strerror), "room for a copy", "free disk space") from cause
        finally:
            unverified.unlink(missing_ok=True)
        for old in copies(self.directory)[COPIES_KEPT:]:
            old.unlink()
        return target


def _is_full(error: sqlite3.Error) -> bool:
    return error.sqlite_errorname == "SQLITE_FULL" or error.sqlite_errorname == "SQLITE_IOERR_WRITE"


def _store_error(error: sqlite3.Error) -> ShoalError:
    name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
    if name == "SQLITE_FULL":
        return refuse(
            Code.STORE_FULL, "the disk is full", "room for this write", "free disk space; writes resume by themselves"
        )
    if name == "SQLITE_BUSY":
        return refuse(
            Code.STORE_UNAVAILABLE,
            "another process has the store open",
            "one coordinator a directory",
            "stop the other one",
        )
    if name.startswith(DAMAGED):
        return _corrupt(str(error))
    return refuse(
        Code.STORE_UNAVAILABLE, f"{name}: {error}", "a disk that works", "check the disk of the data directory"
    )


def _corrupt(found: str) -> ShoalError:
    return refuse(Code.STORE_CORRUPT, found, "a sound database", "restart the coordinator: it restores a copy")


def _verify_snapshot(head: StoreHead, rows: Sequence[tuple[str, bytes, int, bytes]]) -> StoreSnapshot:
    total = bytes(SUM_BYTES)
    for key, value, revision, checksum in rows:
        if checksum != checksum_of(key, revision, value):
            raise _corrupt(f"checksum of {key}")
        total = xor(total, checksum)
    if total != head.sum:
        raise _corrupt("rows are missing")
    return StoreSnapshot(head.revision, tuple(StoreRecord(*row[:3]) for row in rows))
