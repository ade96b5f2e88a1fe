"""Asks code that may end its process, in a child whose end is survived.

A worker may fork and not start programs: its sandbox lets it execute none.
"""

import faulthandler
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress


def answer_of_child(work: Callable[[], bytes], limit_s: float) -> bytes:
    """What `work` returns, run in a child. Empty where the child ended first, or took longer than `limit_s`.

    Other threads may hold locks that the child then waits for in vain: that is what the limit is for. The child keeps
    to it too, and holds no other end of the pipe, so that it does not outlive a parent that was killed meanwhile.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(math.ceil(limit_s))
            os.close(reader)
            # Its crash is expected: no core, and no stack in the file that tells of this process's own.
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with os.fdopen(writer, "wb") as answer:
                answer.write(work())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        found = _read_until(reader, time.perf_counter() + limit_s)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def _read_until(reader: int, end_s: float) -> bytes:
    """All that is written to the pipe; empty if it is not closed by then."""
    parts = list[bytes]()
    while select.select([reader], [], [], max(0.0, end_s - time.perf_counter()))[0]:
        part = os.read(reader, 2**16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""
