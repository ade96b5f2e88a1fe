"""Addresses of Unix sockets, however deep in a file system."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LONGEST: Final = 107
"""Bytes of a path that the kernel takes, its end not counted."""


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """An address to bind or connect to: `path`, or, if that is too long, the way through its open folder.

    Raises OSError when there is no such folder.
    """
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
