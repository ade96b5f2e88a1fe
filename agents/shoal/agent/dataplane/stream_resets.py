"""Rapid resets (`shoal.http2.stream_resets`) by connection, for a library that does not say which connection a call is
on."""

import os
import socket
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Final

from shoal.http2.stream_resets import ResetCount
from shoal.types.address import HostPort
from shoal.wire.identity import peer_address

CONNECTIONS: Final = 4096
"""Connections whose streams are counted; beyond it the least recently active one is forgotten."""


class StreamResets:
    """Streams of each connection, and how many were reset early."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, ResetCount] = OrderedDict()

    def record_stream(self, peer: str, *, was_reset: bool) -> bool:
        """Count a stream of `peer`; as `ResetCount.record`."""
        count = self._counts.setdefault(peer, ResetCount())
        self._counts.move_to_end(peer)
        if len(self._counts) > CONNECTIONS:
            self._counts.popitem(last=False)
        return count.record(was_reset=was_reset)


def close_connection(peer: str) -> bool:
    """Close the connection of `peer`, as grpc names it: `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`.

    The library cannot close the connection of one client, so this process shuts down the socket that is connected to
    it. Returns False when there is none.
    """
    client = peer_address(peer)
    if client is None:
        return False
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:  # dup: the number may be reused meanwhile
                if found.family in (socket.AF_INET, socket.AF_INET6) and _is_at(found.getpeername(), client):
                    found.shutdown(socket.SHUT_RDWR)
                    return True
    return False


def _is_at(address: tuple[str, int, *tuple[object, ...]], client: HostPort) -> bool:
    """Whether a socket's address matches. On a dual-stack socket an IPv4 address has the prefix `::ffff:`."""
    hosts = {each.removeprefix("::ffff:") for each in (address[0], client.host)}
    return address[1] == client.port and len(hosts) == 1
