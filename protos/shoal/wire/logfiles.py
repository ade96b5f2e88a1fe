"""The newest lines of the processes of one machine: files that stay small, and reading them as one log.

A process appends to a file of its own; when that is full it becomes `NAME.1`, in place of an earlier one. A reader
keeps its place as inode and offset of each, so that it reads on across a rotation, and nobody has to remember it.
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
"""Of one file; there are two of each process."""
LINE_BYTES: Final = 8 * 2**10
"""Of one line as it is read; more is cut."""
ANSWER_BYTES: Final = 64 * 2**10
"""Of lines that are read at once, and half as much again of each file at the most."""
LINES_MOST: Final = 1_000
PLACE_BYTES: Final = 4 * 2**10
"""Of a reader's place as text: what is longer was not made here."""


class Kept:
    """Appends lines; opens its file with the first one."""

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
class Page:
    """Lines in order of time; where the next reading goes on; whether there is more already."""

    lines: tuple[str, ...]
    after: str
    more: bool


Place = dict[int, int]
"""Bytes that were read of each file, by its inode."""


def read(files: Iterable[Path], after: str, lines: int) -> Page:
    """after: of an earlier page; empty, or of no use: the last `lines`. Blocking."""
    place = _place_of(after)
    ends: Place = {}
    found: list[tuple[str, int, str]] = []
    more = False
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            status = os.fstat(file.fileno())
            begin = max(0, status.st_size - ANSWER_BYTES) if place is None else place.get(status.st_ino, 0)
            if begin > status.st_size:
                begin = 0  # it was cut
            file.seek(begin)
            data = file.read(ANSWER_BYTES)
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and len(data) == ANSWER_BYTES:
                whole = data  # a line without an end
            ends[status.st_ino] = begin + len(whole)
            more = more or (place is not None and ends[status.st_ino] < status.st_size and bool(whole))
            texts = whole.decode("ascii", "backslashreplace").splitlines()
            if place is None and begin:
                texts = texts[1:]  # begins in the middle of one
            found += [(_time_of(text), len(found) + number, _cut(text)) for number, text in enumerate(texts)]
    ordered = [text for _, _, text in sorted(found)]
    if place is None:
        ordered = list(_newest(ordered, min(lines, LINES_MOST)))
    return Page(tuple(ordered), json.dumps(sorted(ends.items()), separators=(",", ":")), more)


def readable(text: str) -> str:
    """One line, whatever a stranger calls one."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)[:LINE_BYTES]


def _newest(texts: list[str], most: int) -> Iterator[str]:
    """As many as one answer holds."""
    size, count = 0, 0
    for text in islice(reversed(texts), most):
        size += len(text)
        if size > ANSWER_BYTES:
            break
        count += 1
    yield from texts[len(texts) - count :]


def _time_of(text: str) -> str:
    """As it is written: `timestamp` of every event is ISO, UTC."""
    _, _, rest = text.partition('"timestamp": "')
    return rest[:27]


def _cut(text: str) -> str:
    return text if len(text) <= LINE_BYTES else f"{text[:LINE_BYTES]}.. of {len(text)} characters"


def _place_of(text: str) -> Place | None:
    if not text or len(text) > PLACE_BYTES:
        return None
    try:
        return {int(inode): max(0, int(offset)) for inode, offset in json.loads(text)}
    except (ValueError, TypeError):
        return None
