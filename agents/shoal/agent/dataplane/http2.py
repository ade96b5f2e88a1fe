"""REST over HTTP/2 at a data port: requests that are none of gRPC, each on a stream of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, aclosing, suppress
from typing import Final

from shoal.agent.dataplane.rest import (
    ClientGone,
    ClientIdentity,
    RestMethods,
    RestRequest,
    RestResponse,
    body_deadline_s,
    check_pieces,
    make_request,
    refusal_response,
)
from shoal.agent.dataplane.transport import REQUEST_KEY, InboundCall
from shoal.host.event_wait import wait_or_timeout
from shoal.host.grpc_server import GrpcSession
from shoal.host.peer_certificate import PeerCertificate
from shoal.http2.connection import Stream
from shoal.http2.header_blocks import HeaderList, encode
from shoal.types.codes import Code, ShoalError, refuse

BODY_WINDOW: Final = 2**20
"""Bytes of a body that may be on their way once it is read: of a client that is a round trip of 100 ms away, 10 MiB a
second."""


class RestStreams:
    """identify: whom a client's certificate names."""

    def __init__(self, methods: RestMethods, identify: Callable[[PeerCertificate | None], ClientIdentity]) -> None:
        self.methods = methods
        self.identify = identify

    def serve(self, session: GrpcSession, stream: Stream, headers: HeaderList) -> "RestStream":
        """Answer the request of a stream whose headers have arrived."""
        return RestStream(self, session, stream, headers)


class RestStream:
    """One request. It is its own `RequestCarrier`."""

    is_long_lived = False

    def __init__(self, server: RestStreams, session: GrpcSession, stream: Stream, headers: HeaderList) -> None:
        self.is_taken_up = False
        """Whether its body is read, or it is answered."""
        self._is_answered = False
        self._server = server
        self._session = session
        self._stream = stream
        self._body = bytearray()
        """What has arrived of its body and is not read yet. Many small frames are no larger here than one."""
        self._pieces = 0
        """Frames of its body that have arrived."""
        self._change = asyncio.Event()
        """Set when data has arrived, or the stream's end."""
        self._held = ExitStack()
        self._task = session.loop.create_task(self._run(headers))

    async def _run(self, headers: HeaderList) -> None:
        request: RestRequest | None = None
        try:
            request = self._request(headers)
            response = await self._server.methods.answer(request, self._held)
        except ShoalError as error:
            response = refusal_response(error.refusal)
        except ClientGone:
            return
        if response.events is None:
            self._respond(response, request)
            return
        async with aclosing(response.events) as events:
            self._send_head(response, request, {})
            with suppress(ClientGone):
                async for event in events:
                    self._session.connection.send_data(self._stream, event)
                    self._session.flush_soon()
        self._end()

    def _request(self, headers: HeaderList) -> RestRequest:
        """Raises ShoalError(INVALID_ARGUMENT)."""
        fields = [(name.decode("ascii"), value.decode("latin-1")) for name, value in headers.fields]
        head = dict(fields)
        plain = (field for field in fields if not field[0].startswith(":"))
        client = self._server.identify(self._session.certificate)
        return make_request(head[":method"], head[":path"], plain, client, self)

    def _respond(self, response: RestResponse, request: RestRequest | None) -> None:
        self._send_head(response, request, {"content-length": str(len(response.body))})
        if request is None or request.method != "HEAD":
            self._session.connection.send_data(self._stream, response.body)
        self._end()

    def _send_head(self, response: RestResponse, request: RestRequest | None, length: Mapping[str, str]) -> None:
        self.is_taken_up = True
        headers = {":status": str(response.status), **length, **response.headers}
        if request is not None and request.call.request_id:
            headers[REQUEST_KEY] = request.call.request_id
        block = encode((name.encode(), value.encode("latin-1")) for name, value in headers.items())
        self._session.connection.send_headers(self._stream, block)
        self._session.flush_soon()

    def _end(self) -> None:
        self._is_answered = True
        self._session.connection.end(self._stream)
        self._session.flush_soon()

    # RequestCarrier

    def memo(self, call: InboundCall) -> dict[str, object]:
        """Nothing is kept from stream to stream."""
        return {}

    def whole_body(self) -> bytearray | None:
        if self._stream.is_remote_open:
            return None
        self.is_taken_up = True
        check_pieces(self._pieces, len(self._body))
        return self._take()

    async def body(self) -> AsyncIterator[bytearray]:
        loop = self._session.loop
        start, received = loop.time(), 0
        self._widen(BODY_WINDOW - self._stream.receive_window)
        while True:
            check_pieces(self._pieces, received + len(self._body))
            while data := self._take():
                received += len(data)
                self._widen(len(data))
                yield data
            if not self._stream.is_remote_open:
                self.is_taken_up = True
                return
            self._change.clear()
            if not await wait_or_timeout(self._change, start + body_deadline_s(received) - loop.time()):
                found = "a request that does not arrive"
                raise refuse(Code.TOO_SLOW, found, "bytes in time", "send it faster")

    def _take(self) -> bytearray:
        taken, self._body = self._body, bytearray()
        return taken

    def _widen(self, size: int) -> None:
        self._session.connection.widen(self._stream, size)
        self._session.flush_soon()

    def on_admitted(self) -> None:
        """A connection with an open stream is busy."""

    # Called by the session

    def on_data(self, data: memoryview) -> None:
        if data:
            self._pieces += 1
            self._body += data
        self._change.set()

    def on_sent(self) -> None:
        """The session sends what the client's window lets through."""

    def on_closed(self) -> None:
        self._held.close()
        self._change.set()
        if not self._is_answered:
            self._task.cancel()
