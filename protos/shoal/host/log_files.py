"""The newest log lines of one machine's processes: files of bounded size, read as one log.

A process appends to a file of its own; a full file becomes `NAME.1` and replaces the earlier one. A reader's cursor is
the inode and offset of each file, so that it continues across a rotation and the server keeps no state for it.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

KEPT_BYTES: Final = 2**20
"""Size of one file; each process has two."""
LINE_BYTES: Final = 4_000
"""Limit of one line when it is read; the rest is cut. With what says so it is a text that a node may send
(`wire.nouns`)."""
ANSWER_BYTES: Final = 64 * 2**10
"""Most that is read of each file at once, and limit of the lines in an answer without a cursor."""
MAX_LINES: Final = 1_000
"""Of a page, as many as a node may send."""
CURSOR_BYTES: Final = 4 * 2**10
"""Limit of a cursor as text; a longer one is not from here."""


class RotatingLogFile:
    """Appends lines. The first line opens the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def write(self, text: str) -> None:
        """Raises OSError."""
        if self._descriptor < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = self._open()
        elif os.fstat(self._descriptor).st_size >= KEPT_BYTES:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            os.close(self._descriptor)
            self._descriptor = -1
            self._descriptor = self._open()
        os.write(self._descriptor, text.encode())

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


@dataclass(frozen=True, slots=True)
class LogPage:
    """Lines of all files in order of time."""

    lines: tuple[str, ...]
    # Cursor for the next call of `read`.
    after: str
    # True: more lines exist already.
    more: bool


Cursor = dict[int, int]
"""Bytes read of each file, by its inode."""


def read(files: Iterable[Path], after: str, lines: int) -> LogPage:
    """The lines after a cursor. Blocking.

    after: `LogPage.after` of an earlier page; where it is empty or invalid, the last `lines` are returned.
    """
    cursor = _parse_cursor(after)
    files = tuple(files)
    most_lines = MAX_LINES // max(1, len(files)) or 1
    ends: Cursor = {}
    found: list[tuple[str, int, str]] = []
    more = False
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            status = os.fstat(file.fileno())
            begin = max(0, status.st_size - ANSWER_BYTES) if cursor is None else cursor.get(status.st_ino, 0)
            if begin > status.st_size:
                begin = 0  # it was truncated
            file.seek(begin)
            data = file.read(ANSWER_BYTES)
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and len(data) == ANSWER_BYTES:
                whole = data  # a line longer than one answer
            parts = whole.splitlines(keepends=True)  # of bytes: text would be split at more than the ends of lines
            if cursor is not None:
                parts = parts[:most_lines]
                whole = b"".join(parts)
            ends[status.st_ino] = begin + len(whole)
            more = more or (cursor is not None and ends[status.st_ino] < status.st_size and bool(whole))
            texts = [each.rstrip(b"\r\n").decode("ascii", "backslashreplace").replace("\0", "\\0") for each in parts]
            if cursor is None and begin:
                texts = texts[1:]  # the first begins in the middle of a line
            found += [(_time_of(text), len(found) + number, _truncate(text)) for number, text in enumerate(texts)]
    ordered = [text for _, _, text in sorted(found)]
    if cursor is None:
        ordered = list(_newest(ordered, min(lines, MAX_LINES)))
    return LogPage(tuple(ordered), json.dumps(sorted(ends.items()), separators=(",", ":")), more)


def escape_line(text: str) -> str:
    """`text` as one printable line of limited length, whatever an untrusted sender put into it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)[:LINE_BYTES]


def _newest(texts: list[str], most: int) -> Iterator[str]:
    """The newest texts that fit into one answer."""
    size, count = 0, 0
    for text in islice(reversed(texts), most):
        size += len(text)
        if size > ANSWER_BYTES:
            break
        count += 1
    yield from texts[len(texts) - count :]


def _time_of(text: str) -> str:
    """The event's `timestamp` as written: ISO, UTC, so that the order of texts is the order of time."""
    _, _, rest = text.partition('"timestamp": "')
    return rest[:27]


def _truncate(text: str) -> str:
    return text if len(text) <= LINE_BYTES else f"{text[:LINE_BYTES]}.. of {len(text)} characters"


def _parse_cursor(text: str) -> Cursor | None:
    if not text or len(text) > CURSOR_BYTES:
        return None
    try:
        return {int(inode): max(0, int(offset)) for inode, offset in json.loads(text)}
    except (ValueError, TypeError):
        return None
