"""A TCP port with TLS: connections are counted before their handshake, and served by the protocol that it agrees on."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Final, cast

from shoal.host import file_descriptors
from shoal.host.connections import Connection, Connections
from shoal.host.tls import TlsConnection, receive_buffers

Protocols = Mapping[str | None, Callable[[Connection], asyncio.Protocol]]
"""Makes the protocol of a connection by what ALPN agreed on; None for a client that offers nothing. The protocol, or
what serves it, gives the connection's place back."""

_FIRST_BYTES: Final = 2**14
"""More than a client says before it is answered."""
LINGER_S: Final = 2.0
"""Seconds for what a client still sends after it was refused, so that closing does not reset what it has yet to
read."""
_HTTP: Final = frozenset((b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC", b"PRI "))
"""First bytes of an HTTP client that does not use TLS; PRI begins HTTP/2."""


class TlsListener:
    """Listens on one port.

    connections: the limits. context: called for each connection, so that changed files count from the next one on; it
    may raise OSError. handshake_s: seconds for a handshake. plaintext_answer: what an HTTP client without TLS is told,
    as a whole response of HTTP/1.1.
    """

    def __init__(
        self,
        connections: Connections,
        context: Callable[[], ssl.SSLContext],
        protocols: Protocols,
        handshake_s: float,
        plaintext_answer: bytes = b"",
    ) -> None:
        self.connections = connections
        self.handshake_s = handshake_s
        self.plaintext_answer = plaintext_answer
        self._context = context
        self._protocols = protocols
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

    def shake_hands(self, place: Connection, within_s: float) -> TlsConnection:
        """The protocol of a connection that has a place. Raises OSError."""
        return TlsConnection(
            self._context(),
            lambda secure: self._protocol_of(secure, place),
            lambda _: self.connections.remove(place),
            handshake_s=within_s,
        )

    def _protocol_of(self, secure: ssl.SSLObject, place: Connection) -> asyncio.Protocol | None:
        make = self._protocols.get(secure.selected_alpn_protocol())
        return None if make is None else make(place)


class _Accepted(asyncio.BufferedProtocol):
    """A connection until its first bytes."""

    def __init__(self, listener: TlsListener) -> None:
        self._listener = listener
        self._plain: asyncio.Transport = cast(asyncio.Transport, None)
        self._place: Connection | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._buffer = receive_buffers().secret[:_FIRST_BYTES]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = plain = cast(asyncio.Transport, transport)
        peer = plain.get_extra_info("peername") or ("",)
        self._place = self._listener.connections.add(str(peer[0]), plain.abort)
        if self._place is None:
            plain.abort()
            return
        self._limit = asyncio.get_running_loop().call_later(self._listener.handshake_s, plain.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._buffer[:nbytes]
        if self._is_refused or self._place is None or self._limit is None:
            return
        if self._listener.plaintext_answer and bytes(data[:4]) in _HTTP:
            self._refuse_plaintext()
            return
        left_s = self._limit.when() - asyncio.get_running_loop().time()
        try:
            connection = self._listener.shake_hands(self._place, max(0.0, left_s))
        except OSError:
            self._plain.abort()
            return
        self._limit.cancel()
        self._plain.set_protocol(connection)
        connection.connection_made(self._plain)
        connection.receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        if self._place is not None:
            self._listener.connections.remove(self._place)

    def _refuse_plaintext(self) -> None:
        """Answer, and read what the client still sends until it closes, for a moment."""
        self._is_refused = True
        self._plain.write(self._listener.plaintext_answer)
        self._plain.write_eof()
        if self._limit is not None:
            self._limit.cancel()
        self._limit = asyncio.get_running_loop().call_later(LINGER_S, self._plain.abort)
