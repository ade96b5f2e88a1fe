"""Progress of long work: a bar on a terminal, plain lines in a pipe; on stderr, so that output stays output."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from shoal.client.region import Progress as Report
from shoal.types.units import show_bytes


@contextmanager
def bytes_progress(label: str, size: int) -> Iterator[Report]:
    """Yields what `Region.push` reports to."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(f"{label}, {show_bytes(size)}")
        yield lambda done, total: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as bar:
        task = bar.add_task(label, total=size)
        yield lambda done, total: bar.update(task, completed=done, total=total)
