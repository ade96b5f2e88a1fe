"""A TCP port with TLS: connections are counted before their handshake, and served by the protocol that it agrees on."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import cast

from shoal.host import file_descriptors
from shoal.host.connections import Connection, Connections

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
        self._connections = connections
        self._context = context
        self._protocols = protocols
        self._handshake_s = handshake_s
        self._server: asyncio.Server | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

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
        for task in self._handshakes:
            task.cancel()

    def on_accept(self, transport: asyncio.Transport, accepted: "_Accepted") -> None:
        peer = transport.get_extra_info("peername", ("",))
        place = self._connections.add(str(peer[0]) if peer else "", transport.abort)
        if place is None:
            transport.abort()
            return
        accepted.place = place
        task = asyncio.get_running_loop().create_task(self._handshake(transport, place))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def on_lost(self, place: Connection) -> None:
        """The connection ended before its handshake began."""
        self._connections.remove(place)

    async def _handshake(self, transport: asyncio.Transport, place: Connection) -> None:
        # Python 3.11.2 (Debian 12) keeps reading although the transport was paused when the connection was made. This
        # pair of calls stops it.
        transport.resume_reading()
        transport.pause_reading()
        early = _Early()
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport, early, self._context(), server_side=True, ssl_handshake_timeout=self._handshake_s
            )
        except BaseException as error:
            self._connections.remove(place)
            transport.abort()
            if isinstance(error, OSError):
                return
            raise
        if secure is None or early.is_lost:
            self._connections.remove(place)
            return
        agreed = cast(ssl.SSLObject, secure.get_extra_info("ssl_object")).selected_alpn_protocol()
        make = self._protocols.get(agreed)
        if make is None:
            self._connections.remove(place)
            secure.abort()
            return
        early.hand_over(secure, make(place))


class _Accepted(asyncio.Protocol):
    """A connection before its handshake."""

    def __init__(self, listener: TlsListener) -> None:
        self._listener = listener
        self.place: Connection | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        plain.pause_reading()
        self._listener.on_accept(plain, self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.place is not None:
            self._listener.on_lost(self.place)


class _Early(asyncio.Protocol):
    """A connection from its handshake until its protocol is known; it keeps what arrives meanwhile."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        self._kept.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._kept:
            protocol.data_received(data)
        self._kept.clear()
