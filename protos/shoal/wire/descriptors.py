"""How many files and connections this process may have open, and what is said when it has as many."""

import asyncio
import errno
import os
import resource
from typing import Final

from shoal.types.codes import Code, Refusal

NONE_LEFT: Final = Refusal(
    Code.OVERLOADED, "no file descriptor is left", "one for a connection more", "retry later, over open connections"
)
ACCEPTED_AT_ONCE: Final = 1
"""`backlog` of a server on asyncio, which accepts as often in one turn of its loop as that says. One that has no
descriptor left fails, logs and schedules as often, again and again, and has no time for who is connected."""

WAITING: Final = 100


def raise_limit() -> None:
    """To as many as the machine allows it: a server that runs out of them takes no new connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def are_short(error: OSError) -> bool:
    """Whether this process, or its machine, may open nothing more."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def used_up() -> bool:
    """As `are_short`, now; for where a library tells no errno."""
    try:
        os.close(os.open(os.sep, os.O_PATH))
    except OSError as error:
        return are_short(error)
    return False


def widen(server: asyncio.Server, waiting: int = WAITING) -> None:
    """So many connections may wait for a server that was started with ACCEPTED_AT_ONCE. Raises OSError."""
    for listening in server.sockets:
        with listening.dup() as same:
            same.listen(waiting)
