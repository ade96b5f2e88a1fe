"""Detects clients that reset streams before their messages arrive: HTTP/2 rapid reset (CVE-2023-44487).

Each such stream costs this process a call without a receiver, and no limit of concurrent streams counts it. Envoy
closes a connection by the same rule (`overload.premature_reset_total_stream_count`).
"""

import os
import socket
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.types.address import HostPort
from shoal.wire.identity import peer_address

STREAMS: Final = 500
"""Streams of one connection before its resets are evaluated: Envoy's default."""
CONNECTIONS: Final = 4096
"""Connections whose streams are counted; beyond it the least recently active one is forgotten."""


@dataclass(slots=True)
class _Count:
    """Streams of one connection."""

    # Streams since the last evaluation, older ones halved.
    streams: int = 0
    # Those of them that were reset before their message arrived.
    resets: int = 0


class StreamResets:
    """Streams of each connection, and how many were reset early. Older ones weigh less."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, _Count] = OrderedDict()

    def record_stream(self, peer: str, *, was_reset: bool) -> bool:
        """Count a stream of `peer`. Returns True when more than half were reset early, at most once for each
        STREAMS."""
        count = self._counts.setdefault(peer, _Count())
        self._counts.move_to_end(peer)
        if len(self._counts) > CONNECTIONS:
            self._counts.popitem(last=False)
        count.streams += 1
        count.resets += was_reset
        if count.streams < STREAMS:
            return False
        found = 2 * count.resets > count.streams
        count.streams, count.resets = (0, 0) if found else (count.streams // 2, count.resets // 2)
        return found


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
