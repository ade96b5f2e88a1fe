"""The file under the SQLite store: created atomically, verified at open, set aside when damaged, restored from a
copy."""

import hashlib
import os
import shutil
import sqlite3
import struct
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.types.codes import Code, Refusal, refuse

FORMAT: Final = 1
DAMAGED: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
SUM_BYTES: Final = 16
CHECKPOINT_PAGES: Final = 256
"""Pages in the WAL at which it is folded into the file, so that a start has little to verify."""

_SCHEMA: Final = """
CREATE TABLE kv (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,
                 checksum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE change (sequence INTEGER PRIMARY KEY, revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
                     checksum BLOB NOT NULL);
CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 1), format INTEGER NOT NULL, revision INTEGER NOT NULL,
                   compacted INTEGER NOT NULL, sum BLOB NOT NULL, checksum BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class StoreHead:
    """The row that describes the whole store."""

    # Revision of the last commit.
    revision: int
    # Changes up to this revision are deleted.
    compacted_revision: int
    # XOR of the checksums of all rows in `kv`.
    sum: bytes

    @property
    def checksum(self) -> bytes:
        return checksum_of("", self.revision, struct.pack(">qq", FORMAT, self.compacted_revision) + self.sum)


def open_database(directory: Path) -> tuple[sqlite3.Connection, Refusal | None]:
    directory.mkdir(parents=True, exist_ok=True)
    path, created = directory / "state.db", directory / "created"
    (directory / "backups" / "copy.db").unlink(missing_ok=True)
    if not created.exists() and not path.exists():
        _create(directory)
    if path.exists():
        damage = _damage_of_wal(path) if path.stat().st_size else "empty"
        if damage is None:
            connection, damage = _connect_verified(path)
            if connection is not None:
                _mark(created)
                return connection, _rollback_refusal(directory, head_of(connection).revision)
        aside = _set_aside(path, "corrupt")
        found = f"{path.name} was damaged ({damage}) and is now {aside.name}"
    else:
        found = f"{path.name} is gone"
    for copy in copies(directory):
        if (bad := damage_of_copy(copy)) is not None:
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


def create_from_copy(copy: Path, directory: Path) -> int:
    """Creates a store in a new folder from a copy, and returns the copy's revision.

    Raises ShoalError(STORE_CORRUPT), OSError.
    """
    if (damage := damage_of_copy(copy)) is not None:
        raise refuse(Code.STORE_CORRUPT, f"{copy.name}: {damage}", "a sound copy of a store", "see store/backups/")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    _restore(copy, directory / "state.db")
    with closing(sqlite3.connect(directory / "state.db")) as connection:
        return head_of(connection).revision


def put_in_place(fresh: Path, directory: Path, revision: int) -> Path | None:
    """Makes the closed file `fresh` the store of `directory`, and returns where the previous store's file is now; None
    if there was none.

    revision: where the new store's history branches off the previous one's. No process may have the previous store
    open. Raises OSError, sqlite3.Error.
    """
    path, aside = directory / "state.db", None
    if path.exists():
        try:
            _connect(path).close()  # alone, which folds its WAL into the file
        except sqlite3.DatabaseError as error:
            if not _blames_the_file(error):
                raise
        aside = _set_aside(path, "replaced")
    _set_newer_aside(directory, revision)
    fresh.rename(path)
    sync(directory)
    _mark(directory / "created")
    return aside


def _rollback_refusal(directory: Path, revision: int) -> Refusal | None:
    """A store is never older than a copy of it, unless an old file was put in its place."""
    newer = _set_newer_aside(directory, revision)
    if not newer:
        return None
    return Refusal(
        Code.STORE_CORRUPT,
        f"the store stands at revision {revision}, and {newer[0].name} is a later copy of it",
        "the state that was acknowledged",
        f"to go back to that copy: `shoal-coordinator restore --replace --from {newer[0].parent.name}/{newer[0].name}`",
    )


def _set_newer_aside(directory: Path, revision: int) -> list[Path]:
    """Renames copies that are newer than the store, and returns them, newest first. They are not copies of this store
    and must not be restored when it is damaged."""
    newer = [copy for copy in copies(directory) if int(copy.stem.removeprefix("state-")) > revision]
    aside = [copy.rename(copy.with_name(copy.name.replace("state-", "newer-"))) for copy in newer]
    if aside:
        sync(aside[0].parent)
    return aside


def _connect_verified(path: Path) -> tuple[sqlite3.Connection, None] | tuple[None, str]:
    """The connection, or the damage found. Raises sqlite3.Error for an error that is not the file's fault."""
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
    return name.startswith(DAMAGED) or name in ("SQLITE_ERROR", "SQLITE_READONLY", "SQLITE_IOERR_SHORT_READ")


def _connect(path: Path) -> sqlite3.Connection:
    """Opens the file exclusively: a second coordinator on the same directory is refused, and the WAL needs no shared
    memory."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # Deleting must need less space than it frees, so pages are freed without overwriting them with zeros first.
        connection.execute("PRAGMA secure_delete = FAST").fetchone()
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("COMMIT")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _create(directory: Path) -> None:
    """Creates the store under another name first, so that a power cut leaves no half-made store."""
    unfinished = directory / "state.db.new"
    for leftover in directory.glob("state.db.new*"):
        leftover.unlink()
    with closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.executescript(_SCHEMA)
        put_head(connection, StoreHead(0, 0, bytes(SUM_BYTES)))
    sync(unfinished)
    unfinished.rename(directory / "state.db")
    sync(directory)


def _mark(created: Path) -> None:
    if not created.exists():
        created.touch()
        sync(created.parent)


def _set_aside(path: Path, why: str) -> Path:
    aside = next(name for number in count(1) if not (name := path.with_name(f"{path.name}.{why}-{number}")).exists())
    wal = path.with_name(f"{path.name}-wal")
    if wal.exists():
        wal.rename(aside.with_name(f"{aside.name}-wal"))
    path.rename(aside)
    sync(path.parent)
    return aside


def _restore(copy: Path, path: Path) -> None:
    unfinished = path.with_name("state.db.new")
    unfinished.write_bytes(copy.read_bytes())
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)


def copies(directory: Path) -> list[Path]:
    return sorted((directory / "backups").glob("state-*.db"), reverse=True)


def damage_of_copy(path: Path) -> str | None:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)) as connection:
            return _damage(connection)
    except sqlite3.Error as error:
        return str(error)


def _damage(connection: sqlite3.Connection) -> str | None:
    """What is wrong with an open database, by SQLite's own check, then every checksum and their sum. None: nothing."""
    try:
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            return str(verdict)
        head, total = head_of(connection), bytes(SUM_BYTES)
        for key, value, revision, checksum in connection.execute("SELECT key, value, revision, checksum FROM kv"):
            if checksum != checksum_of(key, revision, value) or revision > head.revision:
                return f"checksum of {key}"
            total = xor(total, checksum)
        if total != head.sum:
            return "rows are missing"
        for key, value, revision, checksum in connection.execute("SELECT key, value, revision, checksum FROM change"):
            if checksum != checksum_of(key, revision, value):
                return f"checksum of a change of {key}"
    except (ValueError, TypeError, sqlite3.Error) as error:
        if isinstance(error, sqlite3.Error) and not _blames_the_file(error):
            raise
        return str(error)
    return None


def _damage_of_wal(path: Path) -> str | None:
    """The damage that SQLite would hide: its recovery ends silently at the first bad frame and loses acknowledged
    commits after it.

    A power cut may tear the last commit, which was never acknowledged. Two commits at or after a bad frame of the same
    generation are damage, because the store begins another generation rather than write over what a failed commit left.
    Format: https://www.sqlite.org/fileformat2.html#walformat.
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
            sound = False  # a frame of an earlier generation: the end, unless frames of this one follow
            continue
        if sound:
            state = _wal_checksum(order, state, data[offset : offset + 8])
            state = _wal_checksum(order, state, data[offset + 24 : offset + 24 + page])
            sound = struct.pack(">II", *state) == frame_check
        if not sound and size:
            commits_after += 1
    return f"{commits_after} commits behind a damaged frame of the WAL" if commits_after > 1 else None


def _wal_checksum(order: str, state: tuple[int, int], data: bytes) -> tuple[int, int]:
    """The WAL's running checksum, s1 += x + s2; s2 += y + s1 over pairs of words, as one sum. It is linear, so a pair
    that is k pairs from the end counts by the k-th power of [[1, 1], [1, 2]] (modulo 2^32)."""
    words = np.frombuffer(data, dtype=f"{order}u4").astype(np.uint32)
    x, y = words[0::2], words[1::2]
    a, b, c = _powers(len(x))
    one, two = np.uint32(state[0]), np.uint32(state[1])
    u, v = x, x + y
    with np.errstate(over="ignore"):
        first = a[-1] * one + b[-1] * two + np.sum(a[:-1][::-1] * u + b[:-1][::-1] * v, dtype=np.uint32)
        second = b[-1] * one + c[-1] * two + np.sum(b[:-1][::-1] * u + c[:-1][::-1] * v, dtype=np.uint32)
    return int(first), int(second)


@cache
def _powers(length: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """a, b, c of shape [length + 1]: [[a, b], [b, c]] are the powers 0.. of [[1, 1], [1, 2]], modulo 2^32."""
    rows = [(1, 0, 1)]
    for _ in range(length):
        a, b, c = rows[-1]
        rows.append(((a + b) & 0xFFFFFFFF, (b + c) & 0xFFFFFFFF, (b + 2 * c) & 0xFFFFFFFF))
    a_, b_, c_ = np.array(rows, dtype=np.uint32).T
    return a_, b_, c_


def head_of(connection: sqlite3.Connection) -> StoreHead:
    """Raises ValueError if the row does not match its checksum."""
    row = connection.execute("SELECT format, revision, compacted, sum, checksum FROM head").fetchone()
    if row is None or row[0] != FORMAT:
        raise ValueError("head: missing, or of another format")
    head = StoreHead(*row[1:4])
    if head.checksum != row[4]:
        raise ValueError("checksum of head")
    return head


def put_head(connection: sqlite3.Connection, head: StoreHead) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO head VALUES (1, ?, ?, ?, ?, ?)",
        (FORMAT, head.revision, head.compacted_revision, head.sum, head.checksum),
    )


def checksum_of(key: str, revision: int, value: bytes | None) -> bytes:
    name = key.encode()
    parts = (struct.pack(">qq", revision, len(name)), name, b"\0" if value is None else b"\1" + value)
    return hashlib.blake2b(b"".join(parts), digest_size=SUM_BYTES).digest()


def xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
