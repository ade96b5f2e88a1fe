"""A small HTTP/1.1 server over TLS: h11 on asyncio streams, one request on each connection, each step within its time.

It is for ports that are asked seldom: metrics, models. A front's data port keeps connections open, and has a server of
its own.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import h11
import structlog

from shoal.host import file_descriptors
from shoal.host.connections import Connection, Connections
from shoal.host.tls_listener import TlsListener
from shoal.host.tls_streams import CHUNK_BYTES, HEAD_READ_BYTES, TlsStreams, drop_frames

_REASONS: Final = {each.value: each.phrase for each in HTTPStatus}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one port."""

    # Open connections. The longest idle one, without a certificate yet, ends for a newcomer.
    connections: int
    # Open connections of one address (of IPv6, one /64).
    connections_per_address: int
    # Seconds for the TLS handshake.
    handshake_s: float
    # Seconds from then to the end of the request's head.
    head_s: float
    # Seconds in which the next bytes of a body have to come, or to be taken.
    stall_s: float
    # Seconds for request and response together; None: as long as they go on.
    total_s: float | None = None
    # Seconds for what a client still sends after its response, so that closing does not reset what it has yet to read.
    linger_s: float = 2.0
    # Bytes of a request's head.
    head_bytes: int = 32 * 2**10
    # Connections that wait in the kernel to be accepted.
    backlog: int = file_descriptors.LISTEN_BACKLOG


class HttpExchange:
    """One request, and its response. Methods raise ConnectionError if the client is gone, TimeoutError if it stalls."""

    def __init__(
        self, head: h11.Request, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        stall_s: float, set_known: Callable[[], None],
    ) -> None:  # fmt: skip
        self.method = head.method.decode("ascii")
        self.target = head.target.decode("ascii")
        self.headers: Mapping[str, str] = {
            name.decode("ascii"): value.decode("latin-1") for name, value in head.headers
        }
        self._http = http
        self._reader = reader
        self._writer = writer
        self._stall_s = stall_s
        self.set_known = set_known
        """Tells that the client may stay: no newcomer closes its connection from then on."""

    @property
    def peer_address(self) -> str:
        """The client's IP address."""
        return str((self._writer.get_extra_info("peername") or ("",))[0])

    @property
    def is_closed(self) -> bool:
        """True once the client is known to be gone."""
        return self._writer.transport.is_closing() or self._reader.at_eof()

    @property
    def certificate(self) -> bytes | None:
        """The client's, as DER; None: it showed none."""
        connection: ssl.SSLObject = self._writer.get_extra_info("ssl_object")
        return connection.getpeercert(binary_form=True)

    @property
    def peer(self) -> Mapping[str, Any]:
        """The client's certificate as `getpeercert()` of the ssl module tells it; empty: it showed none."""
        connection: ssl.SSLObject = self._writer.get_extra_info("ssl_object")
        return connection.getpeercert() or {}

    async def body(self) -> AsyncIterator[bytes]:
        if self._http.they_are_waiting_for_100_continue:
            self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        try:
            while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
                    continue
                async with asyncio.timeout(self._stall_s):
                    self._http.receive_data(await self._reader.read(CHUNK_BYTES))
        except h11.RemoteProtocolError as cause:
            raise ConnectionAbortedError(str(cause)) from cause

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        length = {} if status == HTTPStatus.NO_CONTENT else {"content-length": str(len(body))}
        self.begin(status, {**headers, **length})
        for start in range(0, 0 if self.method == "HEAD" else len(body), CHUNK_BYTES):
            await self.write(body[start : start + CHUNK_BYTES])

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The response's head; `write` sends its body."""
        fields = [*headers.items(), ("connection", "close")]
        head = h11.Response(status_code=status, reason=_REASONS.get(status, ""), headers=fields)
        self._writer.write(self._http.send(head) or b"")

    async def write(self, data: bytes) -> None:
        if self._writer.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._writer.write(self._http.send(h11.Data(data=data)) or b"")
        async with asyncio.timeout(self._stall_s):
            await self._writer.drain()
        # While there is room draining gives the loop no turn, which others need, and the end of this connection too.
        await asyncio.sleep(0)


class HttpServer:
    """Listens on one port.

    answer: called with each request; it responds. context: called for each connection, so that renewed certificates
    count from the next one on; it may raise OSError. is_known_at_handshake: who passed it showed a certificate; else
    `answer` decides who is known (`HttpExchange.set_known`).
    """

    def __init__(
        self,
        answer: Callable[[HttpExchange], Awaitable[None]],
        limits: HttpLimits,
        context: Callable[[], ssl.SSLContext],
        *,
        is_known_at_handshake: bool = True,
    ) -> None:
        self._answer = answer
        self._is_known_at_handshake = is_known_at_handshake
        self._limits = limits
        self._connections = Connections(limits.connections, limits.connections_per_address, replaces_own=True)
        self._streams = TlsStreams(self._connections, self._serve)
        protocols = {"http/1.1": self._streams.protocol, None: self._streams.protocol}
        self._listener = TlsListener(self._connections, context, protocols, limits.handshake_s)

    async def start(self, host: str, port: int) -> int:
        """The port it listens on. Raises OSError."""
        return await self._listener.start(host, port, backlog=self._limits.backlog)

    async def stop(self) -> None:
        """End every connection at once."""
        self._listener.close()
        tasks = self._streams.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Connection) -> None:
        try:
            if self._is_known_at_handshake:
                self._connections.set_busy(place)  # no newcomer may close it
            async with asyncio.timeout(self._limits.total_s):
                await self._exchange(reader, writer, place)
        except OSError:
            pass  # the client sees it: it was silent for too long, or it hung up
        finally:
            writer.transport.abort()
            if (error := reader.exception()) is not None:
                drop_frames(error)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Connection) -> None:
        def set_known() -> None:
            self._connections.set_busy(place)

        http = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head_bytes)
        try:
            async with asyncio.timeout(self._limits.head_s):
                while (head := http.next_event()) is h11.NEED_DATA:
                    http.receive_data(await reader.read(HEAD_READ_BYTES))
            if not isinstance(head, h11.Request):
                return
            await self._answer(HttpExchange(head, http, reader, writer, self._limits.stall_s, set_known))
            writer.write(http.send(h11.EndOfMessage()) or b"")
        except h11.RemoteProtocolError as error:
            _refuse(http, writer, error.error_status_hint)
        except (ConnectionError, TimeoutError, ssl.SSLError):
            raise
        except Exception:
            _log.exception("http_request_failed")
            _refuse(http, writer, HTTPStatus.INTERNAL_SERVER_ERROR)
        async with asyncio.timeout(self._limits.stall_s):
            await writer.drain()
        if http.their_state is h11.SEND_BODY:
            with suppress(h11.RemoteProtocolError):
                http.next_event()  # the end of a request without a body is an event too
        if http.their_state is not h11.DONE:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.linger_s):
                    while await reader.read(CHUNK_BYTES):
                        pass
        writer.close()
        async with asyncio.timeout(self._limits.linger_s):
            await writer.wait_closed()


def _refuse(http: h11.Connection, writer: asyncio.StreamWriter, status: int) -> None:
    """Raises ConnectionAbortedError if another response has begun."""
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        raise ConnectionAbortedError
    headers = [("content-length", "0"), ("connection", "close")]
    head = http.send(h11.Response(status_code=status, reason=_REASONS.get(status, ""), headers=headers)) or b""
    writer.write(head + (http.send(h11.EndOfMessage()) or b""))
