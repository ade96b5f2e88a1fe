"""Limits on the connections of a port that unauthenticated callers can reach, and which connection is closed when
full."""

import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


def share_of(address: str) -> str:
    """Key that a peer's address is counted under: for IPv6 the first 64 bits, because a host can choose the others."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))


@dataclass(eq=False, slots=True)
class Connection:
    share: str
    # Closes it at once.
    close: Callable[[], None]
    is_open: bool = True


class Connections:
    """Open connections of one port. When the port is full, the longest idle connection of the address with the most
    connections is closed. So a caller that holds many idle connections makes room for others."""

    def __init__(self, most: int, most_per_address: int, *, replaces_own: bool = False) -> None:
        """replaces_own: where no other address has more connections, the newcomer's own idle connection may be
        closed."""
        self._replaces_own = replaces_own
        self._most = most
        self._most_per_address = most_per_address
        self._count: Counter[str] = Counter()
        """By share."""
        self._idle: dict[str, dict[Connection, None]] = {}
        """By share; the longest idle comes first."""

    def __len__(self) -> int:
        return self._count.total()

    def add(self, address: str, close: Callable[[], None]) -> Connection | None:
        """A new connection, idle at first; None where there is no room for it."""
        share = share_of(address)
        if self._count[share] >= self._most_per_address and not (self._replaces_own and self._evict(share)):
            return None
        if len(self) >= self._most and not (self._make_room(share) or (self._replaces_own and self._evict(share))):
            return None
        added = Connection(share, close)
        self._count[share] += 1
        self.set_idle(added)
        return added

    def set_busy(self, connection: Connection) -> None:
        idle = self._idle.get(connection.share)
        if idle is None:
            return
        idle.pop(connection, None)
        if not idle:
            del self._idle[connection.share]

    def set_idle(self, connection: Connection) -> None:
        if not connection.is_open:
            return
        idle = self._idle.get(connection.share)
        if idle is None:
            idle = self._idle[connection.share] = {}
        idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Idempotent."""
        if not connection.is_open:
            return
        self.set_busy(connection)
        connection.is_open = False
        self._count[connection.share] -= 1
        if not self._count[connection.share]:
            del self._count[connection.share]

    def _make_room(self, newcomer: str) -> bool:
        """Closes an idle connection of an address that has more connections than the newcomer; no other address loses
        one."""
        own = self._count[newcomer]
        for share, count in self._count.most_common():
            if count <= own:
                return False
            if self._evict(share):
                return True
        return False

    def _evict(self, share: str) -> bool:
        oldest = next(iter(self._idle.get(share, ())), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.close()
        return True
