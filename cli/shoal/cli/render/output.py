"""Tables for people, JSON and YAML for programs. NO_COLOR and pipes are honoured by rich."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, soft_wrap=True)
_stderr_console = Console(highlight=False, soft_wrap=True, stderr=True)


def emit(data: Any, output: str) -> None:
    """JSON or YAML on stdout."""
    if output == "yaml":
        print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
    else:
        print(json.dumps(data, indent=1, ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Plain columns. Cells are untrusted text and never markup."""
    grid = Table(box=None, pad_edge=False, title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        grid.add_column(column, no_wrap=True)
    empty = True
    for row in rows:
        empty = False
        grid.add_row(*(Text(clean(cell)) for cell in row))
    if empty:
        console.print("nothing to show")
        return
    # As wide as its content: a terminal may wrap a row, but no column is cut, for people or for a pipe.
    wide = Console(highlight=False, width=10_000)
    wide.print(grid)


def line(text: str, style: str = "") -> None:
    console.print(Text(clean(text), style=style))


def note(text: str) -> None:
    """Print a note beside the answer, on stderr."""
    _stderr_console.print(Text(clean(text), style="dim"))


def progress(output: str) -> Callable[[str], None]:
    """Prints progress: on stderr if the output is for programs."""
    return note if output in ("json", "yaml") else line


def clean(text: str) -> str:
    """Remove control characters, so that untrusted text cannot control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
