"""Addresses of Unix sockets whose path may be longer than the kernel allows."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MAX_PATH_BYTES: Final = 107
"""The kernel's limit on a path, without the terminating NUL."""


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address to bind or connect to: `path`, or, if that is too long, a path through its open folder.

    Raises OSError when the folder does not exist.
    """
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
