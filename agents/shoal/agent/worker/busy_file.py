"""The file in which a worker notes the assignments with requests in flight: who finds it dead reads whom to suspect."""

import mmap
import os
from typing import BinaryIO, Final

BUSY_BYTES: Final = 64 * 1024
"""Its size: names, then a zero byte. What does not fit is left out."""


def map_busy_file(file: BinaryIO) -> mmap.mmap:
    """Of this empty file, with its blocks, since a process that writes to a page without one is killed (SIGBUS).

    On a full disk it is memory of this process alone. A crash then tells nobody which assignments had requests in
    flight.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, BUSY_BYTES)
    except OSError:
        file.truncate(0)
        return mmap.mmap(-1, BUSY_BYTES)
    return mmap.mmap(file.fileno(), BUSY_BYTES)
