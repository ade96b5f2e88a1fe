"""Free loopback ports for servers under test."""

import socket


def free_ports(count: int) -> tuple[int, ...]:
    """Distinct ports that nothing listened on a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(one.getsockname()[1] for one in sockets)
    finally:
        for one in sockets:
            one.close()
