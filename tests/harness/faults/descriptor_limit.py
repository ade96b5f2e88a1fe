"""Processes that can open no further file or connection."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def descriptor_limit(pid: int, spare: int = 0) -> Iterator[None]:
    """Limit one of our processes, this one included, to `spare` more descriptors than it has; restored afterwards."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = open_descriptors(pid)
    free = [number for number in range(max(taken) + spare + 2) if number not in taken]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def are_descriptors_used_up(pid: int) -> bool:
    """Whether the process can open nothing more."""
    return open_descriptors(pid).issuperset(range(resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]))


def open_descriptors(pid: int) -> set[int]:
    """The open descriptors of one of our processes."""
    seen = list(Path(f"/proc/{pid}/fd").iterdir())
    return {int(path.name) for path in seen if path.is_symlink()}  # without the one by which they were seen
