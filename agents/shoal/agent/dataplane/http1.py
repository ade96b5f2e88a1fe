"""HTTP/1.1 at a data port: requests of one connection, one after another, each step within its time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import ExitStack, aclosing, suppress
from sys import getsizeof
from typing import Final, NamedTuple

import h11
import structlog

from shoal.agent.dataplane.byte_stream import ByteStream
from shoal.agent.dataplane.http1_heads import read_usual_head
from shoal.agent.dataplane.log_budget import LogBudget
from shoal.agent.dataplane.request import invalid
from shoal.agent.dataplane.rest import (
    ClientGone,
    ClientIdentity,
    RestMethods,
    RestRequest,
    RestResponse,
    body_deadline_s,
    check_pieces,
    make_request,
    reason_of,
    refusal_response,
)
from shoal.agent.dataplane.transport import MAX_MESSAGE, REQUEST_KEY, InboundCall, retry_after_s
from shoal.host.connections import Connection, Connections
from shoal.host.event_wait import wait_or_timeout
from shoal.host.peer_certificate import PeerCertificate, certificate_of_peer
from shoal.host.tls_streams import CHUNK_BYTES, HEAD_READ_BYTES
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds

MAX_HEAD: Final = 32 * 2**10
REPEATED_BYTES: Final = 4 * 2**10
"""Memory for the head that a connection keeps, and what was made of it; larger ones are read anew each time. A choice:
a head of 9 fields takes 2.1 KiB, and one of 15 behind a proxy 3.1."""
HEAD_TIMEOUT_S: Final = Seconds(10.0)
"""Seconds to the first request's first byte, and for a request's head."""
IDLE_TIMEOUT_S: Final = Seconds(75.0)
"""Seconds from one request to the next."""
TAKEN_AT_ONCE: Final = 2**20
"""Bytes of a body that its reader waits for, where so many are to come. A body that is no larger is not copied."""
SEND_TIMEOUT_S: Final = Seconds(60.0)
LINGER_S: Final = Seconds(2.0)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_log = structlog.get_logger(__name__)
_failures = LogBudget()


class Http1Server:
    """Serves the connections of a port whose handshake agreed on HTTP/1.1, or on nothing (`protocol` is a protocol of a
    `TlsListener`).

    connections: the port's. identify: whom a client's certificate names.
    """

    def __init__(
        self,
        methods: RestMethods,
        connections: Connections,
        identify: Callable[[PeerCertificate | None], ClientIdentity],
    ) -> None:
        self.methods = methods
        self.connections = connections
        self.identify = identify
        self.stopping = asyncio.Event()
        """Set when the port stops: connections close after their current request."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """Of the open connections."""
        return tuple(self._tasks)

    def protocol(self, place: Connection) -> ByteStream:
        """The protocol of a new connection."""
        return _Connection(self, place)

    def begin(self, connection: "_Connection", place: Connection) -> asyncio.Task[None]:
        """Serve a connection until it ends, then give its place back."""
        task = asyncio.create_task(connection.serve())
        self._tasks.add(task)

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.connections.remove(place)

        task.add_done_callback(on_done)
        return task

    async def stop(self, grace_s: Seconds) -> None:
        """Answer the requests inside, for `grace_s` at most, and close. The port accepts no more by then."""
        self.stopping.set()
        if tasks := self.tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in self.tasks:
            task.cancel()


class _RepeatedHead(NamedTuple):
    """A usual head that says no deadline: what it asks for is the same each time."""

    # Its bytes, the empty line included.
    head: bytes
    # Bytes of the body after it.
    body_bytes: int
    # What was made of it.
    request: RestRequest

    @property
    def memory_bytes(self) -> int:
        """Of its variable parts. The head has few bytes, so that it has few parts."""
        path, fields = self.request.path, self.request.headers
        parts = self.head, path, *path, fields, *fields, *fields.values()
        return sum(map(getsizeof, parts))


class _Connection(ByteStream):
    """One client's connection. It is the `RequestCarrier` of its current request."""

    def __init__(self, server: Http1Server, place: Connection) -> None:
        super().__init__()
        self._server = server
        self._place = place
        self._idle_s = HEAD_TIMEOUT_S
        self._is_admitted = False
        self._client = ClientIdentity()
        self._task: asyncio.Task[None] | None = None
        self._is_answering = False
        """Whether its request is with the methods, which the end of the connection cancels."""
        self._memo: tuple[InboundCall, dict[str, object]] | None = None
        self._newest: _RepeatedHead | None = None
        """The usual head of its current request, until somebody may ask for it."""
        self._repeated: _RepeatedHead | None = None
        """The newest usual head of a request that was admitted: mostly the next one is the same."""
        self._unread = 0
        """Bytes of a usual request's body that are not read yet."""
        self._http: h11.Connection | None = None
        """Reads the current request, unless that is usual."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._task = self._server.begin(self, self._place)  # first: it gives the place back, whatever comes
        self._client = self._server.identify(certificate_of_peer(transport.get_extra_info("ssl_object")))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._is_answering and self._task is not None:
            self._task.cancel()

    async def serve(self) -> None:
        try:
            while await self._answer_next() and not self._is_stopping:
                self._idle_s = IDLE_TIMEOUT_S
                if self.content:
                    await asyncio.sleep(0)  # who pipelines thousands of requests has them answered between others
        except ClientGone:
            pass
        except Exception:
            if (left_out := _failures.take(self._loop.time())) is not None:
                _log.exception("client_connection_failed", suppressed=left_out)
        finally:
            self._newest = self._repeated = None  # their requests refer to this connection
            await self._close()

    @property
    def _is_stopping(self) -> bool:
        return self._server.stopping.is_set()

    async def _close(self) -> None:
        """Close the connection, within LINGER_S even if the peer takes nothing any more."""
        self.transport.close()
        if not await wait_or_timeout(self.lost, LINGER_S):
            self.transport.abort()

    async def _answer_next(self) -> bool:
        """Answer one request; return whether another may follow on this connection."""
        with ExitStack() as held:
            request: RestRequest | None = None
            try:
                request = await self._next_request()
            except ShoalError as error:
                response = refusal_response(error.refusal, retry_after_s(error))
            except h11.RemoteProtocolError as error:
                response = refusal_response(_malformed(error), at=error.error_status_hint)
            else:
                response = await self._answer(request, held)
            try:
                return await self._send(response, request)
            finally:
                self._newest = None
                if self._is_admitted:
                    self._is_admitted = False
                    self._server.connections.set_idle(self._place)

    async def _answer(self, request: RestRequest, held: ExitStack) -> RestResponse:
        self._is_answering = True
        try:
            return await self._server.methods.answer(request, held)
        finally:
            self._is_answering = False

    async def _next_request(self) -> RestRequest:
        """The next request, once its head is there. Its first byte may take the idle time, the rest HEAD_TIMEOUT_S.

        Raises ShoalError(INVALID_ARGUMENT | TOO_SLOW), h11.RemoteProtocolError, ClientGone.
        """
        try:
            if not await self.more(self._idle_s):
                raise ClientGone
        except TimeoutError as error:
            raise ClientGone from error
        known = self._repeated
        if known is not None and self.content.startswith(known.head):
            self._begin_usual(len(known.head), known.body_bytes)
            return known.request
        head = read_usual_head(self.content, MAX_HEAD)
        if head is None:
            return await self._unusual_request()
        text = bytes(self.content[: min(head.size, REPEATED_BYTES + 1)])
        self._begin_usual(head.size, head.body_bytes)
        request = make_request(head.method, head.target, head.fields, self._client, self)
        if len(text) <= REPEATED_BYTES and request.expires_at is None:
            self._newest = _RepeatedHead(text, head.body_bytes, request)
        return request

    def _begin_usual(self, head_bytes: int, body_bytes: int) -> None:
        self._http = None
        self._unread = body_bytes
        self.take(head_bytes)

    async def _unusual_request(self) -> RestRequest:
        self._unread = 0
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        deadline = self._loop.time() + HEAD_TIMEOUT_S
        while (event := self._http.next_event()) is h11.NEED_DATA:
            await self._feed(self._http, deadline, HEAD_READ_BYTES)
        if not isinstance(event, h11.Request):
            raise ClientGone
        fields = [(name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers]
        if {"content-length", "transfer-encoding"} <= {name for name, _ in fields}:
            raise invalid("content-length and transfer-encoding", "one of them (RFC 9112, section 6.1)")
        return make_request(event.method.decode("ascii"), event.target.decode("ascii"), fields, self._client, self)

    async def _feed(self, http: h11.Connection, deadline: float, most: int) -> None:
        """Pass bytes on, few of a head, so that it is found too large before much of it is held.

        Raises ShoalError(TOO_SLOW).
        """
        try:
            is_open = await self.more(Seconds(deadline - self._loop.time()))
        except TimeoutError as error:
            raise _too_slow() from error
        http.receive_data(bytes(self.take(most)) if is_open else b"")

    # RequestCarrier

    def memo(self, call: InboundCall) -> dict[str, object]:
        if self._memo is None or (self._memo[0] is not call and self._memo[0] != call):
            self._memo = (call, {})
        return self._memo[1]

    def whole_body(self) -> bytearray | None:
        if self._http is not None or len(self.content) < self._unread:
            return None
        size, self._unread = self._unread, 0
        return self.take(size) if size else bytearray()

    def body(self) -> AsyncIterator[bytes | bytearray]:
        return self._usual_body() if self._http is None else self._unusual_body(self._http)

    async def _usual_body(self) -> AsyncIterator[bytearray]:
        start, before, received = self._loop.time(), self.arrivals, 0
        while self._unread:
            wanted = min(self._unread, TAKEN_AT_ONCE)
            while len(self.content) < wanted:
                have = received + len(self.content)
                check_pieces(self.arrivals - before, have)
                try:
                    is_open = await self.more(Seconds(start + body_deadline_s(have) - self._loop.time()), wanted)
                except TimeoutError as error:
                    if received + len(self.content) == have:
                        raise _too_slow() from error
                else:
                    if not is_open:
                        raise ClientGone
            data = self.take(wanted)
            self._unread -= len(data)
            received += len(data)
            yield data

    async def _unusual_body(self, http: h11.Connection) -> AsyncIterator[bytes]:
        if http.they_are_waiting_for_100_continue:
            self.transport.write(_CONTINUE)
        start, received, pieces = self._loop.time(), 0, 0
        while True:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as error:
                raise ShoalError(_malformed(error)) from error
            if event is h11.NEED_DATA:
                await self._feed(http, start + body_deadline_s(received), CHUNK_BYTES)
            elif isinstance(event, h11.Data):
                received += len(event.data)
                pieces += 1
                check_pieces(pieces, received)
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise ClientGone

    def on_admitted(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None and newest.memory_bytes <= REPEATED_BYTES:
            self._repeated = newest
        self._is_admitted = True
        self._server.connections.set_busy(self._place)

    def _end_request(self) -> bool:
        """Whether the request was read to its end, so that another may follow."""
        http = self._http
        if http is None:
            return not self._unread
        if http.their_state is h11.SEND_BODY:
            with suppress(h11.RemoteProtocolError):
                http.next_event()  # the end of a request without a body is an event too
        early, _ = http.trailing_data
        self.content[:0] = early
        return http.their_state is h11.DONE

    async def _send(self, response: RestResponse, request: RestRequest | None) -> bool:
        """Send the response. Returns whether the connection can continue: only if its request was read to the end, and
        was one."""
        over = request is None or not self._end_request() or self._is_stopping
        headers = {"content-length": str(len(response.body)), **response.headers}
        is_chunked = response.events is not None and self._takes_chunks
        if response.events is not None:
            del headers["content-length"]
            over = over or not is_chunked
        if is_chunked:
            headers["transfer-encoding"] = "chunked"
        if over:
            headers["connection"] = "close"
        if request is not None and request.call.request_id:
            headers[REQUEST_KEY] = request.call.request_id
        head = head_of(response.status, headers)
        body = b"" if request is not None and request.method == "HEAD" else response.body
        if response.events is not None:
            await self._send_events(head, response.events, is_chunked=is_chunked)
        elif len(body) <= CHUNK_BYTES:
            self.transport.write(head + body)
        else:
            await self._send_large(head, memoryview(body), self._loop.time() + SEND_TIMEOUT_S)
        await self._drain()
        ends_with_connection = response.events is not None and not is_chunked
        if over and not ends_with_connection and not self._is_stopping:
            await self._linger()
        return not over

    @property
    def _takes_chunks(self) -> bool:
        """Not over HTTP/1.0: there a body of unknown length ends with the connection."""
        return self._http is None or self._http.their_http_version != b"1.0"

    async def _send_events(self, head: bytes, events: AsyncGenerator[bytes, None], *, is_chunked: bool) -> None:
        self.transport.write(head)
        await self._drain()
        self._is_answering = True
        try:
            async with aclosing(events):
                async for event in events:
                    self.transport.write(b"%x\r\n%b\r\n" % (len(event), event) if is_chunked else event)
                    await self._drain()
        finally:
            self._is_answering = False
        if is_chunked:
            self.transport.write(b"0\r\n\r\n")

    async def _send_large(self, head: bytes, body: memoryview, deadline: float) -> None:
        """In chunks, because TLS copies what it is given."""
        self.transport.write(head)
        for offset in range(0, len(body), CHUNK_BYTES):
            self.transport.write(body[offset : offset + CHUNK_BYTES])
            await self._drain(Seconds(deadline - self._loop.time()))

    async def _drain(self, within_s: Seconds = SEND_TIMEOUT_S) -> None:
        """Raises ClientGone."""
        try:
            if not await self.drain(within_s):
                raise ClientGone
        except TimeoutError as error:
            raise ClientGone from error

    async def _linger(self) -> None:
        """Read and discard bytes for a moment, so that closing does not reset what the client has yet to read."""
        left = 2 * MAX_MESSAGE
        deadline = self._loop.time() + LINGER_S
        with suppress(TimeoutError):
            while left > 0 and await self.more(Seconds(deadline - self._loop.time())):
                left -= len(self.take(CHUNK_BYTES))


def head_of(at: int, headers: Mapping[str, str]) -> bytes:
    """A response's head. Raises ValueError where a header would be more than one line."""
    lines = (f"HTTP/1.1 {at} {reason_of(at)}", *(f"{name}: {value}" for name, value in headers.items()), "", "")
    head = "\r\n".join(lines).encode("latin-1")
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
        raise ValueError(f"a line's end in a header of {headers!r:.200}")
    return head


def _too_slow() -> ShoalError:
    return refuse(Code.TOO_SLOW, "a request that does not arrive", "bytes in time", "send it faster")


def _malformed(error: h11.RemoteProtocolError) -> Refusal:
    return Refusal(Code.INVALID_ARGUMENT, f"{error}"[:200], "HTTP/1.1", "see the protocol")
