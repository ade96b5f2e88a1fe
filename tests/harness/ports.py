"""Free loopback ports for servers under test."""

import itertools
import os
import socket
from contextlib import ExitStack

FIRST_PORT, PORTS_PER_WORKER = 10_000, 2_500
"""Below those that the kernel hands out by itself, so many for each worker of pytest-xdist."""
HOSTS = ("127.0.0.1", "127.0.0.2")
"""Members of a local region are at one, the roads to them at the other."""

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw7").removeprefix("gw")) % 8
_steps = itertools.count(os.getpid() * 31)  # two test runs at the same time begin at different places


def free_ports(count: int) -> tuple[int, ...]:
    """Distinct ports that nothing listened on a moment ago; of two workers each has its own."""
    found: list[int] = []
    while len(found) < count:
        port = FIRST_PORT + PORTS_PER_WORKER * _worker + next(_steps) % PORTS_PER_WORKER
        if _is_free(port):
            found.append(port)
    return tuple(found)


def _is_free(port: int) -> bool:
    with ExitStack() as held:
        try:
            for host in HOSTS:
                held.enter_context(socket.socket()).bind((host, port))
        except OSError:
            return False
    return True
