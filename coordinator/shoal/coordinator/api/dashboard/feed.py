"""The newest rows of every table, and what changed since a reader last looked. Pure.

A reader keeps only the number of the newest change that it has. So a slow reader skips states in between, and memory
does not grow with readers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

GONE_KEPT: Final = 4_000
"""Removed rows that are remembered: an event takes the place of an older one in two tables, so those of 2,000 events. A
reader that has not seen an older removal starts again."""

RowKey = tuple[str, str]
"""(table, key)."""
RowChange = tuple[RowKey, str | None]
"""The row as JSON; None: it is gone."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reader lacks."""

    # Every change up to this one is in it.
    version: int
    rows: Sequence[RowChange]
    # True: the reader has to forget the rows that it has.
    is_whole: bool


class Feed:
    def __init__(self) -> None:
        self.version = 0
        self._rows: dict[RowKey, tuple[int, str | None]] = {}
        """With the number of the last change, in the order of these numbers."""
        self._gone = 0
        self._floor = 0
        """The newest removal that is forgotten."""

    def __len__(self) -> int:
        """Rows that are there."""
        return len(self._rows) - self._gone

    def publish(self, changes: Iterable[RowChange]) -> bool:
        """True if any row is not what it was."""
        before = self.version
        for key, row in changes:
            known = self._rows.get(key)
            if (known[1] if known is not None else None) == row:
                continue
            self._gone += (row is None) - (known is not None and known[1] is None)
            self.version += 1
            self._rows.pop(key, None)
            self._rows[key] = (self.version, row)
        if self._gone > GONE_KEPT:
            self._forget_gone()
        return self.version != before

    def since(self, version: int, tables: frozenset[str]) -> Changes:
        """version: of the reader; 0: it has nothing."""
        is_whole = not self._floor <= version <= self.version or version == 0
        found: list[RowChange] = []
        for key, (changed, row) in reversed(self._rows.items()):
            if changed <= version and not is_whole:
                break
            if key[0] in tables and not (is_whole and row is None):
                found.append((key, row))
        found.reverse()
        return Changes(self.version, found, is_whole)

    def _forget_gone(self) -> None:
        self._floor = max(version for version, row in self._rows.values() if row is None)
        self._rows = {key: each for key, each in self._rows.items() if each[1] is not None}
        self._gone = 0
