"""The region's truth in one SQLite file: WAL, synchronous=FULL, one writer thread.

Directory: `state.db` (and its WAL), `reserve`, `created`, `backups/`, and `state.db.corrupt-N` where a damaged file was
set aside. What makes it more than a table:

- Every row carries a checksum, and the head row carries the sum of all of them: a row that changed, vanished or came
  back from the dead is found at open, and so is a WAL that SQLite would silently cut short.
- A damaged file is set aside, never deleted, and the newest verified copy takes its place; `recovery` says so. Without
  a copy the store refuses to open: it is never silently empty.
- `reserve` is disk space kept for deletes: when the disk is full a write is refused whole (STORE_FULL), and deleting
  goes on. Writes resume as soon as the reserve can be made again.
"""

import asyncio
import hashlib
import os
import sqlite3
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

from shoal.coordinator.ports import Change, Compacted, Record, StaleRevision, Transaction
from shoal.types.codes import Code, Refusal, ShoalError, refuse

T = TypeVar("T")

FORMAT: Final = 1
RESERVE_BYTES: Final = 2 * 2**20
CHANGES_KEPT: Final = 10_000
COPIES_KEPT: Final = 3

_SCHEMA: Final = """
CREATE TABLE kv (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,
                 checksum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE change (sequence INTEGER PRIMARY KEY, revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
                     checksum BLOB NOT NULL);
CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 1), format INTEGER NOT NULL, revision INTEGER NOT NULL,
                   compacted INTEGER NOT NULL, sum BLOB NOT NULL, checksum BLOB NOT NULL);
"""
_LAST: Final = "\U0010ffff"
_SUM_BYTES: Final = 16
_DAMAGED: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_WATCH_BATCH: Final = 256


@dataclass(frozen=True, slots=True)
class _Head:
    """revision: of the last commit. compacted: changes up to this revision are gone. sum: XOR of kv's checksums."""

    revision: int
    compacted: int
    sum: bytes

    @property
    def checksum(self) -> bytes:
        return _checksum("", self.revision, struct.pack(">qq", FORMAT, self.compacted) + self.sum)


class SqliteStore:
    """ports.Store. recovery: None, or why a copy had to be restored when this store was opened."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, thread: ThreadPoolExecutor, *,
                 recovery: Refusal | None, reserve_bytes: int, changes_kept: int) -> None:  # fmt: skip
        self.directory = directory
        self.recovery = recovery
        self._connection = connection
        self._thread = thread
        self._reserve_bytes = reserve_bytes
        self._changes_kept = changes_kept
        self._committed = asyncio.Event()

    @classmethod
    async def open(
        cls, directory: Path, *, reserve_bytes: int = RESERVE_BYTES, changes_kept: int = CHANGES_KEPT
    ) -> "SqliteStore":
        """Verified, or restored from the newest verified copy.

        Raises ShoalError(STATE_CORRUPT) when it is damaged and there is no copy, ShoalError(STORE_UNAVAILABLE) when
        another process has it open or the disk fails, ShoalError(STORE_FULL) when there is no room to create it.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            connection, recovery = await asyncio.wrap_future(thread.submit(_open, directory))
        except sqlite3.Error as cause:
            thread.shutdown(wait=False)
            raise _refused(cause) from cause
        except ShoalError:
            thread.shutdown(wait=False)
            raise
        store = cls(
            directory, connection, thread, recovery=recovery, reserve_bytes=reserve_bytes, changes_kept=changes_kept
        )
        await store._run(store._reserve)
        return store

    async def read(self, key: str) -> Record | None:
        def query() -> Record | None:
            row = self._connection.execute("SELECT key, value, revision FROM kv WHERE key = ?", (key,)).fetchone()
            return None if row is None else Record(*row)

        return await self._run(query)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        def query() -> tuple[Record, ...]:
            rows = self._connection.execute(
                "SELECT key, value, revision FROM kv WHERE key >= ? AND key > ? AND key < ? ORDER BY key LIMIT ?",
                (prefix, after, prefix + _LAST, limit or -1),
            )
            return tuple(Record(*row) for row in rows)

        return await self._run(query)

    async def commit(self, transaction: Transaction) -> int:
        revision = await self._run(lambda: self._commit(transaction))
        signal, self._committed = self._committed, asyncio.Event()
        signal.set()
        return revision

    async def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        position: int | None = None
        while True:
            signal = self._committed
            changes, position = await self._run(partial(self._changes, prefix, after, position))
            for change in changes:
                yield change
            if not changes:
                await signal.wait()

    async def backup(self) -> Path:
        """A verified copy under `backups/`; the oldest beyond the last three go. Raises ShoalError."""
        return await self._run(self._backup)

    async def close(self) -> None:
        """Leaves one file without a WAL behind."""

        def close() -> None:
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.close()

        await self._run(close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except sqlite3.Error as cause:
            raise _refused(cause) from cause
        except RuntimeError as cause:
            raise refuse(
                Code.STORE_UNAVAILABLE, "the store is closed", "an open store", "start the coordinator"
            ) from cause

    def _commit(self, transaction: Transaction) -> int:
        if transaction.puts and not self._reserve():
            raise refuse(
                Code.STORE_FULL,
                "no disk space beyond the reserve kept for deletes",
                f"{self._reserve_bytes} bytes free at {self.directory.name}/",
                "free disk space, or delete documents; writes resume by themselves",
            )
        try:
            return self._write(transaction)
        except sqlite3.Error as error:
            if transaction.puts or not _is_full(error):
                raise
        (self.directory / "reserve").unlink(missing_ok=True)
        revision = self._write(transaction)
        self._give_back()
        return revision

    def _write(self, transaction: Transaction) -> int:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            for key, expected in transaction.expect.items():
                row = execute("SELECT revision FROM kv WHERE key = ?", (key,)).fetchone()
                if (row[0] if row else 0) != expected:
                    raise StaleRevision(key)
            head = _head(self._connection)
            revision, total = head.revision + 1, head.sum
            deletes = dict.fromkeys(key for key in transaction.deletes if key not in transaction.puts)
            for key in (*transaction.puts, *deletes):
                row = execute("SELECT checksum FROM kv WHERE key = ?", (key,)).fetchone()
                total = _xor(total, row[0]) if row else total
            for key, value in transaction.puts.items():
                checksum = _checksum(key, revision, value)
                total = _xor(total, checksum)
                execute("INSERT OR REPLACE INTO kv VALUES (?, ?, ?, ?)", (key, value, revision, checksum))
                execute("INSERT INTO change VALUES (NULL, ?, ?, ?, ?)", (revision, key, value, checksum))
            for key in deletes:
                if execute("DELETE FROM kv WHERE key = ?", (key,)).rowcount:
                    execute(
                        "INSERT INTO change VALUES (NULL, ?, ?, NULL, ?)",
                        (revision, key, _checksum(key, revision, None)),
                    )
            compacted = self._compact(head.compacted)
            _put_head(self._connection, _Head(revision, compacted, total))
            execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                execute("ROLLBACK")
            raise
        return revision

    def _compact(self, compacted: int) -> int:
        """Forgets changes beyond the retention, whole revisions at a time; the newest revision that is gone."""
        row = self._connection.execute(
            "SELECT revision - 1 FROM change WHERE sequence = (SELECT max(sequence) FROM change) - ?",
            (self._changes_kept,),
        ).fetchone()
        if row is None:
            return compacted
        self._connection.execute("DELETE FROM change WHERE revision <= ?", row)
        return int(row[0])

    def _changes(self, prefix: str, after: int, position: int | None) -> tuple[tuple[Change, ...], int]:
        """Changes behind `position` (None: behind revision `after`), and the position that they reach."""
        head = _head(self._connection)
        first, last, seen = self._connection.execute(
            "SELECT min(sequence), max(sequence), max(sequence) FILTER (WHERE revision <= ?) FROM change", (after,)
        ).fetchone()
        if first is None:
            return (), position or 0
        if position is None:
            position = first - 1 if seen is None else seen
            gone = after < head.compacted
        else:
            gone = first > position + 1
        if gone:
            raise Compacted(head.revision)
        rows = self._connection.execute(
            "SELECT sequence, key, value, revision FROM change WHERE sequence > ? AND key >= ? AND key < ?"
            " ORDER BY sequence LIMIT ?",
            (position, prefix, prefix + _LAST, _WATCH_BATCH),
        ).fetchall()
        reached = rows[-1][0] if len(rows) == _WATCH_BATCH else last
        return tuple(Change(key, value, revision) for _, key, value, revision in rows), reached

    def _reserve(self) -> bool:
        """Whether the reserve stands; made again when there is room."""
        path = self.directory / "reserve"
        with suppress(FileNotFoundError):
            if path.stat().st_size == self._reserve_bytes:
                return True
        if self._allocate(path):
            return True
        self._give_back()
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

    def _give_back(self) -> None:
        """Pages that deletes freed go back to the disk."""
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.execute("PRAGMA incremental_vacuum").fetchall()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _backup(self) -> Path:
        folder = self.directory / "backups"
        revision = _head(self._connection).revision
        target, unverified = folder / f"state-{revision:020}.db", folder / "copy.db"
        if target.exists():
            return target
        try:
            folder.mkdir(exist_ok=True)
            unverified.unlink(missing_ok=True)
            with closing(sqlite3.connect(unverified)) as copy:
                self._connection.backup(copy)
            if (damage := _damage_of_copy(unverified)) is not None:
                raise refuse(Code.STORE_CORRUPT, f"the copy just made: {damage}", "a verified copy", "check this disk")
            _sync(unverified)
            unverified.rename(target)
            _sync(folder)
        except OSError as cause:
            raise refuse(Code.STORE_UNAVAILABLE, str(cause.strerror), "room for a copy", "free disk space") from cause
        finally:
            unverified.unlink(missing_ok=True)
        for old in _copies(self.directory)[COPIES_KEPT:]:
            old.unlink()
        return target


def _open(directory: Path) -> tuple[sqlite3.Connection, Refusal | None]:
    directory.mkdir(parents=True, exist_ok=True)
    path, created = directory / "state.db", directory / "created"
    (directory / "backups" / "copy.db").unlink(missing_ok=True)
    if not created.exists() and not path.exists():
        _create(directory)
    if path.exists():
        damage = _damage_of_wal(path)
        if damage is None:
            connection, damage = _connect_sound(path)
            if connection is not None:
                _mark(created)
                return connection, None
        aside = _set_aside(path)
        found = f"{path.name} was damaged ({damage}) and is now {aside.name}"
    else:
        found = f"{path.name} is gone"
    for copy in _copies(directory):
        if (bad := _damage_of_copy(copy)) is not None:
            found += f"; copy {copy.name} is damaged too ({bad})"
            continue
        _restore(copy, path)
        return _connect(path), Refusal(
            Code.STORE_CORRUPT,
            found,
            f"restored {copy.name}: what was written after that copy is lost",
            "compare what agents run with `shoal get placements`, apply your documents again",
        )
    raise refuse(
        Code.STATE_CORRUPT,
        f"{found}; there is no usable copy in {directory.name}/backups/",
        "a verified copy of the state",
        f"put one at backups/ and start again; to start empty on purpose, remove {directory.name}/created",
    )


def _connect_sound(path: Path) -> tuple[sqlite3.Connection, None] | tuple[None, str]:
    """The connection, or the damage found. Raises sqlite3.Error when it is not the file's fault."""
    connection = None
    try:
        connection = _connect(path)
        damage = _damage(connection)
    except sqlite3.DatabaseError as error:
        if not _blames_the_file(error):
            raise
        damage = str(error)
    if connection is not None:
        if damage is None:
            return connection, None
        connection.close()
    return None, damage or "unreadable"


def _blames_the_file(error: sqlite3.Error) -> bool:
    name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
    return name.startswith(_DAMAGED) or name in ("SQLITE_ERROR", "SQLITE_READONLY", "SQLITE_IOERR_SHORT_READ")


def _connect(path: Path) -> sqlite3.Connection:
    """Exclusive: a second coordinator on the same directory is refused, and the WAL needs no shared memory."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("COMMIT")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _create(directory: Path) -> None:
    """Under another name first: a power cut in between leaves no half-made store."""
    unfinished = directory / "state.db.new"
    for leftover in directory.glob("state.db.new*"):
        leftover.unlink()
    with closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.executescript(_SCHEMA)
        _put_head(connection, _Head(0, 0, bytes(_SUM_BYTES)))
    _sync(unfinished)
    unfinished.rename(directory / "state.db")
    _sync(directory)


def _mark(created: Path) -> None:
    if not created.exists():
        created.touch()
        _sync(created.parent)


def _set_aside(path: Path) -> Path:
    aside = next(name for number in count(1) if not (name := path.with_name(f"{path.name}.corrupt-{number}")).exists())
    wal = path.with_name(f"{path.name}-wal")
    if wal.exists():
        wal.rename(aside.with_name(f"{aside.name}-wal"))
    path.rename(aside)
    _sync(path.parent)
    return aside


def _restore(copy: Path, path: Path) -> None:
    unfinished = path.with_name("state.db.new")
    unfinished.write_bytes(copy.read_bytes())
    _sync(unfinished)
    unfinished.rename(path)
    _sync(path.parent)


def _copies(directory: Path) -> list[Path]:
    return sorted((directory / "backups").glob("state-*.db"), reverse=True)


def _damage_of_copy(path: Path) -> str | None:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)) as connection:
            return _damage(connection)
    except sqlite3.Error as error:
        return str(error)


def _damage(connection: sqlite3.Connection) -> str | None:
    """What is wrong with an open database: SQLite's own check, then every checksum and their sum."""
    try:
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            return str(verdict)
        head, total = _head(connection), bytes(_SUM_BYTES)
        for key, value, revision, checksum in connection.execute("SELECT key, value, revision, checksum FROM kv"):
            if checksum != _checksum(key, revision, value) or revision > head.revision:
                return f"checksum of {key}"
            total = _xor(total, checksum)
        if total != head.sum:
            return "rows are missing"
        for key, value, revision, checksum in connection.execute("SELECT key, value, revision, checksum FROM change"):
            if checksum != _checksum(key, revision, value):
                return f"checksum of a change of {key}"
    except (ValueError, TypeError, sqlite3.Error) as error:
        if isinstance(error, sqlite3.Error) and not _blames_the_file(error):
            raise
        return str(error)
    return None


def _damage_of_wal(path: Path) -> str | None:
    """SQLite ends recovery at the first bad frame and says nothing: acknowledged commits behind it would be lost.

    A power cut may tear the last commit, which nobody was promised; two commits at or after a bad frame of the same
    generation are damage. Format: https://www.sqlite.org/fileformat2.html#walformat.
    """
    wal = path.with_name(f"{path.name}-wal")
    data = wal.read_bytes() if wal.exists() else b""
    if not data.strip(b"\0") or len(data) < 32:
        return None
    magic, _, page, _, salt, check = struct.unpack(">IIII8s8s", data[:32])
    order = {0x377F0682: "<", 0x377F0683: ">"}.get(magic)
    if order is None:
        return "the WAL's header"
    state = _wal_checksum(order, (0, 0), data[:24])
    if struct.pack(">II", *state) != check or page < 512:
        return "the WAL's header"
    sound, commits_after = True, 0
    for offset in range(32, len(data) - 24 - page + 1, 24 + page):
        size, frame_salt, frame_check = struct.unpack(">4xI8s8s", data[offset : offset + 24])
        if frame_salt != salt:
            sound = False  # a frame of an earlier generation: the end, unless ours go on behind it
            continue
        if sound:
            state = _wal_checksum(order, state, data[offset : offset + 8])
            state = _wal_checksum(order, state, data[offset + 24 : offset + 24 + page])
            sound = struct.pack(">II", *state) == frame_check
        if not sound and size:
            commits_after += 1
    return f"{commits_after} commits behind a damaged frame of the WAL" if commits_after > 1 else None


def _wal_checksum(order: str, state: tuple[int, int], data: bytes) -> tuple[int, int]:
    first, second = state
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return first, second


def _head(connection: sqlite3.Connection) -> _Head:
    """Raises ValueError when the row is not what was written."""
    row = connection.execute("SELECT format, revision, compacted, sum, checksum FROM head").fetchone()
    if row is None or row[0] != FORMAT:
        raise ValueError("head: missing, or of another format")
    head = _Head(*row[1:4])
    if head.checksum != row[4]:
        raise ValueError("checksum of head")
    return head


def _put_head(connection: sqlite3.Connection, head: _Head) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO head VALUES (1, ?, ?, ?, ?, ?)",
        (FORMAT, head.revision, head.compacted, head.sum, head.checksum),
    )


def _checksum(key: str, revision: int, value: bytes | None) -> bytes:
    name = key.encode()
    parts: Iterable[bytes] = (struct.pack(">qq", revision, len(name)), name, b"\0" if value is None else b"\1" + value)
    return hashlib.blake2b(b"".join(parts), digest_size=_SUM_BYTES).digest()


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def _is_full(error: sqlite3.Error) -> bool:
    return error.sqlite_errorname == "SQLITE_FULL" or error.sqlite_errorname == "SQLITE_IOERR_WRITE"


def _refused(error: sqlite3.Error) -> ShoalError:
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
    if name.startswith(_DAMAGED):
        return refuse(Code.STORE_CORRUPT, str(error), "a sound database", "restart the coordinator: it restores a copy")
    return refuse(
        Code.STORE_UNAVAILABLE, f"{name}: {error}", "a disk that works", "check the disk of the data directory"
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
