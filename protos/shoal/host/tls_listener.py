"""A TCP port with TLS: connections are counted before their handshake, and served by the protocol that it agrees on."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import cast

from shoal.host import file_descriptors
from shoal.host.connections import Connection, Connections
from shoal.host.tls import TlsConnection

Protocols = Mapping[str | None, Callable[[Connection], asyncio.Protocol]]
"""Makes the protocol of a connection by what ALPN agreed on; None for a client that offers nothing. The protocol gives
the connection's place back when it is lost."""


class TlsListener:
    """Listens on one port.

    connections: the limits. context: called for each connection, so that changed files count from the next one on; it
    may raise OSError. handshake_s: seconds for a handshake.
    """

    def __init__(
        self,
        connections: Connections,
        context: Callable[[], ssl.SSLContext],
        protocols: Protocols,
        handshake_s: float,
    ) -> None:
        self.connections = connections
        self._context = context
        self._protocols = protocols
        self._handshake_s = handshake_s
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, *, backlog: int, reuse_port: bool = False) -> int:
        """The port it listens on. backlog: connections that wait in the kernel to be accepted. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Accepted(self), host, port, backlog=file_descriptors.ACCEPTS_PER_TURN, reuse_port=reuse_port
        )
        file_descriptors.set_backlog(self._server, backlog)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more; open connections go on."""
        if self._server is not None:
            self._server.close()

    def shake_hands(self, place: Connection) -> TlsConnection:
        """The protocol of a connection that has a place. Raises OSError."""
        return TlsConnection(
            self._context(),
            lambda secure: self._protocol_of(secure, place),
            lambda _: self.connections.remove(place),
            handshake_s=self._handshake_s,
        )

    def _protocol_of(self, secure: ssl.SSLObject, place: Connection) -> asyncio.Protocol | None:
        make = self._protocols.get(secure.selected_alpn_protocol())
        return None if make is None else make(place)


class _Accepted(asyncio.Protocol):
    """A connection until it has a place."""

    def __init__(self, listener: TlsListener) -> None:
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        peer = plain.get_extra_info("peername") or ("",)
        place = self._listener.connections.add(str(peer[0]), plain.abort)
        if place is None:
            plain.abort()
            return
        try:
            connection = self._listener.shake_hands(place)
        except OSError:
            self._listener.connections.remove(place)
            plain.abort()
            return
        plain.set_protocol(connection)
        connection.connection_made(plain)
