"""HTTP/1.1 at a data port: requests of one connection, one after another, each step within its time."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, aclosing, suppress
from typing import Final

import h11
import structlog

from shoal.agent.dataplane.log_budget import LogBudget
from shoal.agent.dataplane.request import invalid
from shoal.agent.dataplane.rest import (
    ClientGone,
    ClientIdentity,
    RestMethods,
    RestRequest,
    RestResponse,
    body_deadline_s,
    make_request,
    reason_of,
    refusal_response,
)
from shoal.agent.dataplane.transport import MAX_MESSAGE, REQUEST_KEY, retry_after_s
from shoal.host.connections import Connection, Connections
from shoal.host.tls_streams import CHUNK_BYTES, HEAD_READ_BYTES, TlsStreams
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds

MAX_HEAD: Final = 32 * 2**10
HEAD_TIMEOUT_S: Final = 10.0
"""Seconds to the first request's first byte, and for a request's head."""
IDLE_TIMEOUT_S: Final = 75.0
"""Seconds from one request to the next."""
FREE_PIECES: Final = 1024
LEAST_PIECE: Final = 64
"""Bytes of a body's pieces (chunks, or what arrives at once), on average, beyond the first ones: each takes as long as
some hundred bytes."""
SEND_TIMEOUT_S: Final = 60.0
LINGER_S: Final = 2.0

_log = structlog.get_logger(__name__)
_failures = LogBudget()


class Http1Server:
    """Serves the connections of a port whose handshake agreed on HTTP/1.1, or on nothing (`streams.protocol` is a
    protocol of a `TlsListener`).

    connections: the port's. identify: whom a client's certificate (PEM) names.
    """

    def __init__(
        self, methods: RestMethods, connections: Connections, identify: Callable[[bytes | None], ClientIdentity]
    ) -> None:
        self.methods = methods
        self.connections = connections
        self.identify = identify
        self.streams = TlsStreams(connections, self.serve)
        self.stopping = asyncio.Event()
        """Set when the port stops: connections close after their current request."""

    async def stop(self, grace_s: Seconds) -> None:
        """Answer the requests inside, for `grace_s` at most, and close. The port accepts no more by then."""
        self.stopping.set()
        if tasks := self.streams.tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in self.streams.tasks:
            task.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Connection) -> None:
        """Serve one connection until it ends."""
        await _Connection(self, reader, writer, place).serve()


class _Connection:
    """One client's connection. It is the `RequestCarrier` of its current request."""

    def __init__(
        self, server: Http1Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Connection
    ) -> None:
        self._server = server
        self._place = place
        self._reader = reader
        self._writer = writer
        self._idle_s = HEAD_TIMEOUT_S
        self._is_admitted = False
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        certificate: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self._client = server.identify(ssl.DER_cert_to_PEM_cert(certificate).encode() if certificate else None)

    async def serve(self) -> None:
        try:
            while await self._answer_next() and not self._is_stopping:
                self._http.start_next_cycle()
                self._idle_s = IDLE_TIMEOUT_S
        except (ClientGone, OSError, asyncio.IncompleteReadError):
            pass
        except Exception:
            if (left_out := _failures.take(asyncio.get_running_loop().time())) is not None:
                _log.exception("client_connection_failed", suppressed=left_out)
        finally:
            await self._close()

    @property
    def _is_stopping(self) -> bool:
        return self._server.stopping.is_set()

    async def _close(self) -> None:
        """Close the connection, within LINGER_S even if the peer takes nothing any more."""
        self._writer.close()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            pass  # the peer disconnected

    async def _answer_next(self) -> bool:
        """Answer one request; return whether another may follow on this connection."""
        with ExitStack() as held:
            request: RestRequest | None = None
            try:
                request = self._request(await self._head())
            except ShoalError as error:
                response = refusal_response(error.refusal, retry_after_s(error))
            except h11.RemoteProtocolError as error:
                response = refusal_response(_malformed(error), at=error.error_status_hint)
            else:
                response = await self._server.methods.answer(request, held)
            try:
                return await self._send(response, request)
            finally:
                if self._is_admitted:
                    self._is_admitted = False
                    self._server.connections.set_idle(self._place)

    async def _head(self) -> h11.Request:
        """The next request's head. Its first byte may take the idle time, the rest HEAD_TIMEOUT_S."""
        event = self._http.next_event()
        if event is h11.NEED_DATA:
            await self._receive(self._idle_s, HEAD_READ_BYTES, idle=True)
            event = self._http.next_event()
        deadline = asyncio.get_running_loop().time() + HEAD_TIMEOUT_S
        while event is h11.NEED_DATA:
            await self._receive(deadline - asyncio.get_running_loop().time(), HEAD_READ_BYTES)
            event = self._http.next_event()
        if not isinstance(event, h11.Request):
            raise ClientGone
        return event

    async def _receive(self, timeout: float, size: int = CHUNK_BYTES, *, idle: bool = False) -> None:
        try:
            async with asyncio.timeout(timeout):
                data = await self._reader.read(size)
        except TimeoutError as error:
            if idle:
                raise ClientGone from error
            raise refuse(Code.TOO_SLOW, "a request that does not arrive", "bytes in time", "send it faster") from error
        if idle and not data:
            raise ClientGone
        self._http.receive_data(data)

    def _request(self, head: h11.Request) -> RestRequest:
        """Raises ShoalError(INVALID_ARGUMENT)."""
        fields = [(name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers]
        if {"content-length", "transfer-encoding"} <= {name for name, _ in fields}:
            raise invalid("content-length and transfer-encoding", "one of them (RFC 9112, section 6.1)")
        return make_request(head.method.decode("ascii"), head.target.decode("ascii"), fields, self._client, self)

    # RequestCarrier

    async def body(self) -> AsyncIterator[bytes]:
        if self._http.they_are_waiting_for_100_continue:
            self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        loop = asyncio.get_running_loop()
        start, received, pieces = loop.time(), 0, 0
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise ShoalError(_malformed(error)) from error
            if event is h11.NEED_DATA:
                await self._receive(start + body_deadline_s(received) - loop.time())
            elif isinstance(event, h11.Data):
                received += len(event.data)
                pieces += 1
                if pieces > FREE_PIECES and received < pieces * LEAST_PIECE:
                    raise invalid(f"{pieces} pieces of {received} bytes", "larger chunks")
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise ClientGone

    async def wait_until_gone(self) -> None:
        """Bytes that a pipelining client sent early are kept for their turn; after them its end is not noticed."""
        data = await self._reader.read(CHUNK_BYTES)
        self._http.receive_data(data)
        if data:
            await asyncio.Event().wait()

    def on_admitted(self) -> None:
        self._is_admitted = True
        self._server.connections.set_busy(self._place)

    async def _send(self, response: RestResponse, request: RestRequest | None) -> bool:
        """Send the response. Returns whether the connection can continue: only if its request was read to the end, and
        was one."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise ClientGone
        if self._http.their_state is h11.SEND_BODY:
            with suppress(h11.RemoteProtocolError):
                self._http.next_event()  # the end of a request without a body is an event too
        over = request is None or self._http.their_state is not h11.DONE or self._is_stopping
        headers = {**response.headers}
        if response.events is None:  # else in chunks
            headers["content-length"] = str(len(response.body))
        if over:
            headers["connection"] = "close"
        if request is not None and request.call.request_id:
            headers[REQUEST_KEY] = request.call.request_id
        reason = reason_of(response.status)
        head = h11.Response(status_code=response.status, reason=reason, headers=list(headers.items()))
        start = self._http.send(head) or b""
        body = memoryview(b"" if request is not None and request.method == "HEAD" else response.body)
        if response.events is None:
            await self._write(start, body, is_last=True)
        else:
            async with aclosing(response.events) as events:
                await self._write(start, memoryview(b""))
                async for event in events:
                    await self._write(b"", memoryview(event))
            await self._write(b"", memoryview(b""), is_last=True)
        if over and not self._is_stopping:
            await self._linger()
        return not over

    async def _write(self, start: bytes, body: memoryview, *, is_last: bool = False) -> None:
        """Write a part of the response after `start`, within SEND_TIMEOUT_S. Raises ClientGone."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                # In chunks, because TLS copies what it is given.
                for offset in range(0, len(body), CHUNK_BYTES):
                    part = self._http.send(h11.Data(data=bytes(body[offset : offset + CHUNK_BYTES]))) or b""
                    self._writer.write(start + part if start else part)
                    start = b""
                    await self._writer.drain()
                self._writer.write(start + ((self._http.send(h11.EndOfMessage()) or b"") if is_last else b""))
                await self._writer.drain()
        except TimeoutError as error:
            raise ClientGone from error

    async def _linger(self) -> None:
        """Read and discard bytes for a moment, so that closing does not reset what the client has yet to read."""
        left = 2 * MAX_MESSAGE
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_S):
                while left > 0 and (data := await self._reader.read(CHUNK_BYTES)):
                    left -= len(data)


def _malformed(error: h11.RemoteProtocolError) -> Refusal:
    return Refusal(Code.INVALID_ARGUMENT, f"{error}"[:200], "HTTP/1.1", "see the protocol")
