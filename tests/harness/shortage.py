"""Processes that may open no file and no connection more."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_descriptors(pid: int, spare: int = 0) -> Iterator[None]:
    """A process of ours, this one included, may open `spare` more than it has. Afterwards as many as before."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    seen = list(Path(f"/proc/{pid}/fd").iterdir())
    taken = {int(path.name) for path in seen if path.is_symlink()}  # without the one by which they were seen
    free = [number for number in range(max(taken) + spare + 2) if number not in taken]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
