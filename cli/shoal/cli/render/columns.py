"""Fits a table to a terminal: long cells shorten, then columns leave by rank. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.cells import cell_len, set_cell_size

GAP: Final = 2
"""Spaces between two columns."""
LEAST: Final = 8
"""Characters that a column keeps when even those that stay do not fit."""
ELLIPSIS: Final = "\N{HORIZONTAL ELLIPSIS}"
_WORTH: Final = 12
"""Characters beyond its short form from which on a cut cell tells more than that form."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of one row in one column."""

    # All of it; never markup.
    text: str
    # Stands for the text where that has no room, such as a reason's code; empty: the text is cut.
    short: str = ""
    # The short form says as much to a person, such as an age instead of a time: nothing is missed.
    is_whole: bool = False
    # End of the text that stays when it is cut, such as ` (emulated)`.
    tail: str = ""
    # A style of rich, such as `green`.
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and what happens to what is under it where the terminal is narrow."""

    # The heading.
    name: str
    # The highest leaves first; 0 stays.
    rank: int = 0
    # Characters to which cells without a short form may be cut before a column leaves; 0: they are not.
    least: int = 0
    # Numbers stand on the right.
    right: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """What of a table is shown."""

    # Index of each column that is shown -> its width in characters, in order.
    widths: dict[int, int]
    # Whether a text that is shown was shortened.
    is_cut: bool
    # Names of the columns that left.
    hidden: tuple[str, ...] = field(default=())


def fit(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> Fitted:
    """Choose columns and their widths. width: characters of the terminal; None: everything is shown."""
    natural = [
        max(cell_len(column.name), *(cell_len(row[index].text) for row in rows), 0)
        for index, column in enumerate(columns)
    ]
    if width is None or _total(natural) <= width:
        return Fitted(dict(enumerate(natural)), is_cut=False)
    least = [_least(column, [row[index] for row in rows]) for index, column in enumerate(columns)]
    kept = list(range(len(columns)))
    hidden = set[int]()
    # Columns that say nothing leave first, and nobody misses them.
    empty = {index for index in kept if all(row[index].text in ("", "-") for row in rows)}
    leaving = sorted(
        (index for index, column in enumerate(columns) if column.rank),
        key=lambda index: (index in empty, columns[index].rank, index),
    )
    while leaving and _total([least[index] for index in kept]) > width:
        index = leaving.pop()
        kept.remove(index)
        hidden.add(index)
    widths = {index: least[index] for index in kept}
    while _total(widths.values()) > width and max(widths.values()) > LEAST:
        widest = max(widths, key=lambda index: widths[index])
        widths[widest] -= 1
    room = width - _total(widths.values())
    for index in sorted(kept, key=lambda index: (columns[index].rank, index)):
        more = max(0, min(room, natural[index] - widths[index]))
        widths[index] += more
        room -= more
    is_cut = any(_loses(row[index], widths[index]) for row in rows for index in kept)
    return Fitted(widths, is_cut, tuple(columns[index].name for index in sorted(hidden - empty)))


def shorten(cell: Cell, width: int) -> str:
    """The cell's text, at most `width` characters of it."""
    if cell_len(cell.text) <= width:
        return cell.text
    if cell.short and (cell.is_whole or width < cell_len(cell.short) + _WORTH):
        return cell.short if cell_len(cell.short) <= width else _cut(cell.short, width, "")
    return _cut(cell.text, width, cell.tail)


def pad(text: str, width: int, *, right: bool) -> str:
    """`text` with spaces up to `width` characters."""
    spaces = " " * (width - cell_len(text))
    return spaces + text if right else text + spaces


def _loses(cell: Cell, width: int) -> bool:
    """Whether what `shorten` leaves says less than the cell."""
    return cell_len(cell.text) > width and not (cell.is_whole and cell_len(cell.short) <= width)


def _cut(text: str, width: int, tail: str) -> str:
    if cell_len(tail) + 2 > width:
        tail = ""
    return set_cell_size(text, width - cell_len(tail) - 1).rstrip() + ELLIPSIS + tail


def _least(column: Column, cells: Sequence[Cell]) -> int:
    """Characters that the column needs when its cells are as short as they get."""
    return max(cell_len(column.name), *(_shortest(column, cell) for cell in cells), 0)


def _shortest(column: Column, cell: Cell) -> int:
    whole = cell_len(cell.text)
    if cell.short:
        return min(whole, cell_len(cell.short))
    return min(whole, column.least + cell_len(cell.tail)) if column.least else whole


def _total(widths: Collection[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)
