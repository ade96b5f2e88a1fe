"""Tables and lines for people, JSON and YAML for programs.

On a terminal tables fit its width, and lines are wrapped between words, under their own indent. A pipe gets everything
in one line each. NO_COLOR is honoured by rich.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from shoal.cli.render.columns import GAP, Cell, Column, fit, pad, shorten
from shoal.host.refusal_text import parts_of, printable
from shoal.types.codes import Refusal


class _Console(Console):
    """`rich` ends the process with status 1 where the reader of a pipe has gone: for us that is a no."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


console = _Console(highlight=False, soft_wrap=True)
_stderr_console = _Console(highlight=False, soft_wrap=True, stderr=True)
_display: Final = ContextVar[Console | None]("display", default=None)
"""What draws on the terminal now, see `notes_above`."""
_CUT: Final = "some texts are cut"
_LABEL_STYLES: Final = {"found:": "red", "wanted:": "cyan", "try:": "green"}

clean = printable


def emit(data: Any, output: str) -> None:
    """JSON or YAML on stdout."""
    if output == "yaml":
        import yaml  # seldom used, and as slow to import as the rest of this module

        print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
    else:
        print(json.dumps(data, indent=1, ensure_ascii=False))


def table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[str | Cell]], *, wide: bool = False, hint: str = ""
) -> None:
    """Print columns. Cells are untrusted text and never markup.

    columns: a plain name stays before those on its right leave. wide: show everything, whatever the terminal's width.
    hint: where to read what a narrow terminal leaves out, such as `shoal explain WORKLOAD`.
    """
    text, left_out = table_text(columns, rows, console.width if console.is_terminal and not wide else None)
    console.print(text)
    if left_out:
        note(f"{left_out} (all: -o wide{f'; {hint}' if hint and _CUT in left_out else ''})")


def table_text(
    columns: Sequence[str | Column], rows: Iterable[Sequence[str | Cell]], width: int | None
) -> tuple[Text, str]:
    """(the table in at most `width` characters a line, what of it is left out)"""
    headings = [Column(each, rank=index) if isinstance(each, str) else each for index, each in enumerate(columns)]
    cells = [[_clean_cell(cell) for cell in row] for row in rows]
    if not cells:
        return Text("nothing to show"), ""
    fitted = fit(headings, cells, width)
    lines = [[(Cell(headings[index].name, style="bold"), index) for index in fitted.widths]]
    lines += [[(row[index], index) for index in fitted.widths] for row in cells]
    texts = []
    for each in lines:
        text = Text()
        for cell, index in each:
            words = pad(shorten(cell, fitted.widths[index]), fitted.widths[index], right=headings[index].right)
            text.append(words, cell.style or None)
            text.append(" " * GAP)
        text.rstrip()
        texts.append(text)
    left_out = [f"not shown: {', '.join(fitted.hidden)}"] if fitted.hidden else []
    left_out += [_CUT] if fitted.is_cut else []
    return Text("\n").join(texts), "; ".join(left_out)


def show_refusal(refusal: Refusal, *, place: str = "", stderr: bool = True) -> None:
    """What was found, wanted and can be tried, with the code at the end: a line each on a terminal, one line in a pipe.

    place: where it was found, such as file:line:column.
    """
    on = _stderr_console if stderr else console
    if not on.is_terminal:
        print(clean(f"{place}: {refusal}" if place else str(refusal)), file=sys.stderr if stderr else sys.stdout)
        return
    if place:
        on.print(Text(clean(place), style="bold"))
    for label, words in parts_of(refusal, on.width):
        on.print(Text(label, style=_LABEL_STYLES.get(label.strip(), "")) + Text(words))


def line(text: str, style: str = "") -> None:
    console.print(Text(_wrap(clean(text), console), style=style))


def note(text: str) -> None:
    """Print a note beside the answer, on stderr."""
    on = (_display.get() if _stderr_console.is_terminal else None) or _stderr_console
    on.print(Text(_wrap(clean(text), on), style="dim"))


@contextmanager
def notes_above(display: Console) -> Iterator[None]:
    """While `display` draws the same lines of the terminal again and again: notes stand above those. Written past it,
    they would end in the middle of them."""
    before = _display.set(display)
    try:
        yield
    finally:
        _display.reset(before)


def note_outage(why: Refusal | None) -> None:
    """Say that the region does not answer, and is asked again, or that it answers again (None)."""
    note("the region answers again" if why is None else f"{why.found} ({why.code}); the region is asked again")


def progress(output: str) -> Callable[[str], None]:
    """Prints progress: on stderr if the output is for programs."""
    return note if output in ("json", "yaml") else line


def _clean_cell(cell: str | Cell) -> Cell:
    if isinstance(cell, str):
        return Cell(clean(cell))
    return replace(cell, text=clean(cell.text), short=clean(cell.short), tail=clean(cell.tail))


def _wrap(text: str, on: Console) -> str:
    """On a terminal, break between words; what follows stands two characters further in than the text begins."""
    if not on.is_terminal or len(text) <= on.width:
        return text
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.fill(
        text, on.width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True,
    )  # fmt: skip
