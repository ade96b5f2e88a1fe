"""The limit of open files and connections of this process, and the refusal when it is reached."""

import asyncio
import errno
import resource
from typing import Final

from shoal.types.codes import Code, Refusal

NONE_LEFT: Final = Refusal(
    Code.OVERLOADED, "no file descriptor is left", "one for a connection more", "retry later, over open connections"
)
ACCEPTS_PER_TURN: Final = 1
"""Value for `backlog` of an asyncio server, which accepts that many connections per turn of its loop. A server without
a free descriptor fails, logs and reschedules once per accept, over and over, and has no time left for its open
connections."""

LISTEN_BACKLOG: Final = 100


def raise_limit() -> None:
    """Raises the limit to the hard limit, because a server without free descriptors takes no new connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_exhaustion(error: OSError) -> bool:
    """Whether the error means that this process, or the machine, has no free descriptor."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def set_backlog(server: asyncio.Server, backlog: int = LISTEN_BACKLOG) -> None:
    """Sets how many connections may wait for a server that was started with ACCEPTS_PER_TURN. Raises OSError."""
    for listening in server.sockets:
        with listening.dup() as same:
            same.listen(backlog)
