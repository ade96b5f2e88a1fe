"""Progress of long work: a bar on a terminal, plain lines in a pipe; on stderr, so that output stays output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.text import Text

from shoal.cli.render.output import clean, notes_above
from shoal.client.transfers import Progress as Report
from shoal.types.units import show_bytes


@contextmanager
def bytes_progress(label: str, size: int) -> Iterator[Report]:
    """Yields the callback for `RegionClient.push`."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(f"{label}, {show_bytes(size)}")
        yield lambda done, total: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as bar:
        task = bar.add_task(label, total=size)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def status_progress(say: Callable[[str], None]) -> Iterator[Callable[[str, str], None]]:
    """Yields the callback for a wait, called with (its stable part, all of it).

    On a terminal one line is updated; in a pipe `say` gets a line whenever the stable part changes.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("") as status, notes_above(console):
            yield lambda _, text: status.update(Text(clean(text)))
        return
    last = ""

    def report(stable: str, text: str) -> None:
        nonlocal last
        if stable != last:
            last = stable
            say(text)

    yield report
