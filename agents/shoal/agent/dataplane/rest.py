"""The Open Inference Protocol over HTTP/1.1 and TLS, with the binary tensor extension.

Requests become the same serialized ModelInferRequest that gRPC carries. A client certificate is asked for, not
required: without one a bearer token counts. Nothing is read further than it must be: the caller is judged by the head,
a body is measured as it comes and as it expands, and who sends too slowly is cut off.
"""

import asyncio
import json
import math
import ssl
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import unquote

import h11
import structlog

from shoal.agent.dataplane import tensors
from shoal.agent.dataplane.grpc import NO_REPOSITORY_CONTROL
from shoal.agent.dataplane.intake import Intake
from shoal.agent.dataplane.request import invalid, too_large
from shoal.agent.dataplane.transport import (
    HOP_KEY,
    MAX_MESSAGE,
    ORIGIN_KEY,
    REQUEST_KEY,
    TENANT_KEY,
    TRACE_KEY,
    Call,
    Service,
    TlsFiles,
    retry_after_s,
)
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds
from shoal.wire import descriptors, status
from shoal.wire.identity import Identity, identity_of_der
from shoal.wire.undated import NO_CHECK_TIME

MAX_HEAD: Final = 32 * 2**10
MAX_CONNECTIONS: Final = 1024
MAX_CONNECTIONS_PER_ADDRESS: Final = 512
"""More are closed before TLS costs anything; clients behind one address share these."""
HEAD_TIMEOUT_S: Final = 10.0
IDLE_TIMEOUT_S: Final = 75.0
BODY_GRACE_S: Final = 10.0
BODY_RATE: Final = 128 * 2**10
"""Bytes a second below which a body counts as too slow, once the grace is over."""
SEND_TIMEOUT_S: Final = 60.0
LINGER_S: Final = 2.0
_CHUNK: Final = 256 * 2**10
_HEAD_CHUNK: Final = 8 * 2**10
"""Little at a time, so that a head is found too large before much of it is held."""
_LENGTH_HEADER: Final = "inference-header-content-length"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: tuple[str, ...]
    headers: Mapping[str, str]
    call: Call


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class RestTransport:
    """Listens on one port."""

    def __init__(self, service: Service, host: str, port: int, tls: TlsFiles) -> None:
        self._service = service
        self._host = host
        self._port = port
        self._tls = tls
        self._stamp: tuple[int, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._of_address: Counter[str] = Counter()
        self._intake = Intake()
        self._stopping = asyncio.Event()

    async def start(self) -> int:
        self._stamp = self._tls.stamp()
        self._context = self._build_context()
        self._server = await asyncio.start_server(
            self._accept,
            self._host,
            self._port,
            reuse_port=True,
            limit=_CHUNK,
            backlog=descriptors.ACCEPTED_AT_ONCE,
        )
        descriptors.widen(self._server, MAX_CONNECTIONS)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, grace_s: Seconds) -> None:
        self._stopping.set()
        if self._server is not None:
            self._server.close()
        if self._connections:
            await asyncio.wait(tuple(self._connections), timeout=grace_s)
        for task in tuple(self._connections):
            task.cancel()

    async def leave(self, grace_s: Seconds) -> None:
        await self.stop(grace_s)

    def _build_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._tls.certificate, self._tls.key)
        context.load_verify_locations(self._tls.authority)
        context.verify_mode = ssl.CERT_OPTIONAL
        # Dates are judged for each call, by the time that this node believes: its machine may be wrong by years.
        context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | NO_CHECK_TIME)
        context.set_alpn_protocols(["http/1.1"])
        context.sni_callback = self._renew
        return context

    def _renew(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """At each handshake, with or without a name: files that changed count from this connection on."""
        try:
            stamp = self._tls.stamp()
            if stamp != self._stamp:
                self._context = self._build_context()
                self._stamp = stamp
        except (OSError, ssl.SSLError):
            return  # half replaced: what is in use stays
        if self._context is not None and self._context is not context:
            connection.context = self._context

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Before TLS: a stranger costs no handshake where there is no room for it."""
        cast(asyncio.Transport, writer.transport).pause_reading()  # the first bytes are the handshake's
        address = str(writer.get_extra_info("peername", ("",))[0])
        if len(self._connections) >= MAX_CONNECTIONS or self._of_address[address] >= MAX_CONNECTIONS_PER_ADDRESS:
            writer.transport.abort()
            return
        self._of_address[address] += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(lambda _: self._left(task, address))

    def _left(self, task: asyncio.Task[None], address: str) -> None:
        self._connections.discard(task)
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._context is not None
        try:
            await writer.start_tls(self._context, ssl_handshake_timeout=HEAD_TIMEOUT_S)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        await _Connection(self._service, self._intake, reader, writer, self._stopping).serve()


class _Gone(Exception):
    """The client left, or the connection is of no more use."""


class _Connection:
    """One client's connection: requests one after another."""

    def __init__(
        self,
        service: Service,
        intake: Intake,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stopping: asyncio.Event,
    ) -> None:
        self._service = service
        self._intake = intake
        self._reader = reader
        self._writer = writer
        self._stopping = stopping
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._identity: Identity | None = None
        self._unnamed: ShoalError | None = None

    async def serve(self) -> None:
        try:
            self._identify()
            while await self._exchange() and not self._stopping.is_set():
                self._http.start_next_cycle()
        except (_Gone, OSError, asyncio.IncompleteReadError):
            pass
        except Exception:
            _log.exception("connection_failed")
        finally:
            await self._close()

    async def _close(self) -> None:
        """A peer that does not answer the end of TLS keeps its connection no longer than any other."""
        self._writer.close()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            pass  # it is gone: Python 3.11.2 fails where it is asked to end that

    def _identify(self) -> None:
        connection: ssl.SSLObject = self._writer.get_extra_info("ssl_object")
        der = connection.getpeercert(binary_form=True)
        try:
            self._identity = identity_of_der(der) if der else None
        except ShoalError as error:
            self._unnamed = error

    async def _exchange(self) -> bool:
        """One request and its response; whether another may follow on this connection."""
        with ExitStack() as held:
            return await self._answered(held)

    async def _answered(self, held: ExitStack) -> bool:
        """held: what this caller holds of the intake until its response is sent."""
        request: _Request | None = None
        try:
            request = self._request(await self._head())
            response = await self._answer(request, held)
        except ShoalError as error:
            response = _refused(error.refusal, retry_after_s(error))
        except h11.RemoteProtocolError as error:
            refusal = Refusal(Code.INVALID_ARGUMENT, f"{error}"[:200], "HTTP/1.1", "see the protocol")
            response = _refused(refusal, at=error.error_status_hint)
        except (_Gone, OSError):
            raise
        except Exception as error:
            _log.exception("call_failed")
            refusal = Refusal(Code.INTERNAL, type(error).__name__, "an answer", "report this with the log of the node")
            response = _refused(refusal)
        return await self._send(response, request)

    async def _head(self) -> h11.Request:
        """The next request's head: any time may pass before its first byte, little until its last."""
        event = self._http.next_event()
        if event is h11.NEED_DATA:
            await self._receive(IDLE_TIMEOUT_S, _HEAD_CHUNK, idle=True)
            event = self._http.next_event()
        deadline = asyncio.get_running_loop().time() + HEAD_TIMEOUT_S
        while event is h11.NEED_DATA:
            await self._receive(deadline - asyncio.get_running_loop().time(), _HEAD_CHUNK)
            event = self._http.next_event()
        if not isinstance(event, h11.Request):
            raise _Gone
        return event

    async def _receive(self, timeout: float, size: int = _CHUNK, *, idle: bool = False) -> None:
        try:
            async with asyncio.timeout(timeout):
                data = await self._reader.read(size)
        except TimeoutError as error:
            if idle:
                raise _Gone from error
            raise refuse(Code.TOO_SLOW, "a request that does not arrive", "bytes in time", "send it faster") from error
        if idle and not data:
            raise _Gone
        self._http.receive_data(data)

    def _request(self, head: h11.Request) -> _Request:
        headers: dict[str, str] = {}
        for name, value in head.headers:
            key = name.decode("ascii")
            if key in headers and key in _ONCE:
                raise invalid(f"{key} twice", "once")
            headers[key] = value.decode("latin-1")
        hop = headers.get(HOP_KEY, "0")
        if hop not in ("0", "1"):
            raise invalid(f"{HOP_KEY} {hop!r:.40}", "0 or 1")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        call = Call(
            identity=self._identity,
            bearer=token.strip() if scheme.lower() == "bearer" else "",
            tenant=headers.get(TENANT_KEY, ""),
            origin=headers.get(ORIGIN_KEY, ""),
            hop=int(hop),
            request_id=headers.get(REQUEST_KEY, ""),
            trace=headers.get(TRACE_KEY, ""),
        )
        target = head.target.decode("ascii").partition("?")[0]
        path = tuple(unquote(part) for part in target.split("/")[1:] if part)
        return _Request(head.method.decode("ascii"), path, headers, call)

    async def _answer(self, request: _Request, held: ExitStack) -> _Response:
        """Raises ShoalError."""
        if (request.method, request.path) == ("GET", ("v2", "health", "live")):
            return _response({"live": self._service.live()})
        if self._unnamed is not None:
            raise self._unnamed
        match request.method, request.path:
            case "GET", ("v2", "health", "ready"):
                return _ready({}, self._service.server_ready(request.call))
            case "GET", ("v2",):
                said = self._service.server_metadata(request.call)
                return _response({"name": said.name, "version": said.version, "extensions": list(said.extensions)})
            case "GET", ("v2", "models", name) | ("v2", "models", name, "versions", _):
                return _response(_model(await self._service.model_metadata(request.call, name, _version(request))))
            case "GET", ("v2", "models", name, "ready") | ("v2", "models", name, "versions", _, "ready"):
                return _ready({"name": name}, self._service.model_ready(request.call, name, _version(request)))
            case "POST", ("v2", "models", name, "infer") | ("v2", "models", name, "versions", _, "infer"):
                return await self._infer(request, name, held)
            case "POST", ("v2", "repository", "index"):
                return await self._index(request)
            case "POST", ("v2", "repository", "models", _, "load" | "unload"):
                self._service.server_ready(request.call)
                raise ShoalError(NO_REPOSITORY_CONTROL)
            case method, path:
                self._service.server_ready(request.call)
                shown = f"{method} /{'/'.join(path)}"
                raise refuse(
                    Code.NOT_FOUND, f"{shown!r:.200}", "a path of the Open Inference Protocol", "see its REST form"
                )

    async def _infer(self, request: _Request, name: str, held: ExitStack) -> _Response:
        self._service.admit(request.call)
        caller = request.call.caller
        held.enter_context(self._intake.call(caller))
        async with self._intake.place(caller, MAX_MESSAGE / BODY_RATE + BODY_GRACE_S):
            body = await self._body(request.headers)
        message, wanted = tensors.request_of(name, _version(request), body, _whole(request.headers, _LENGTH_HEADER))
        del body
        answer = await self._while_connected(self._service.infer(request.call, message.SerializeToString()))
        content, json_length = tensors.response_of(answer, wanted)
        held.enter_context(self._intake.unread(caller, len(content)))
        if json_length is None:
            return _Response(200, content, {"content-type": "application/json"})
        headers = {"content-type": "application/octet-stream", _LENGTH_HEADER: str(json_length)}
        return _Response(200, content, headers)

    async def _index(self, request: _Request) -> _Response:
        self._service.server_ready(request.call)
        body = await self._body(request.headers)
        ready = tensors.load_json(body).get("ready", False) if body.strip() else False
        if not isinstance(ready, bool):
            raise invalid(f"ready {ready!r:.80}", "true or false")
        listed = self._service.index(request.call, ready_only=ready)
        rows = [{"name": m.name, "version": m.version, "state": m.state, "reason": m.reason} for m in listed.models]
        return _response(rows)

    async def _while_connected(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """The result of `work`, which is cancelled if the client hangs up meanwhile."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._read_on())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not watch.result():
                raise _Gone
            return await task
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _read_on(self) -> bool:
        """False at the end of the stream. What a pipelining client sent early is kept for its turn."""
        data = await self._reader.read(_CHUNK)
        self._http.receive_data(data)
        return bool(data)

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        """The body, expanded. Raises ShoalError(TOO_LARGE) by its declared length before a byte of it is read."""
        declared = _whole(headers, "content-length")
        if declared is not None and declared > MAX_MESSAGE:
            raise too_large(f"a body of {declared} bytes", MAX_MESSAGE)
        expand = _expander(headers.get("content-encoding", "identity"))
        if self._http.they_are_waiting_for_100_continue:
            self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        parts: list[bytes] = []
        size = 0
        async for data in self._data():
            part = expand(data, MAX_MESSAGE - size)
            size += len(part)
            if size > MAX_MESSAGE:
                raise too_large(f"a body of over {MAX_MESSAGE} bytes once expanded", MAX_MESSAGE)
            parts.append(part)
        return b"".join(parts)

    async def _data(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        start, received = loop.time(), 0
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                await self._receive(start + BODY_GRACE_S + received / BODY_RATE - loop.time())
            elif isinstance(event, h11.Data):
                received += len(event.data)
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise _Gone

    async def _send(self, response: _Response, request: _Request | None) -> bool:
        """Whether the connection may go on: only if its request was read to the end."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise _Gone
        if self._http.their_state is h11.SEND_BODY:
            with suppress(h11.RemoteProtocolError):
                self._http.next_event()  # the end of a request without a body is an event too
        over = self._http.their_state is not h11.DONE or self._stopping.is_set()
        headers = {"content-length": str(len(response.body)), **response.headers}
        if over:
            headers["connection"] = "close"
        if request is not None and request.call.request_id:
            headers[REQUEST_KEY] = request.call.request_id
        head = h11.Response(status_code=response.status, headers=list(headers.items()))
        self._writer.write(self._http.send(head) or b"")
        if request is None or request.method != "HEAD":
            self._writer.write(self._http.send(h11.Data(data=response.body)) or b"")
        self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._writer.drain()
        except TimeoutError as error:
            raise _Gone from error
        if over and not self._stopping.is_set():
            await self._linger()
        return not over

    async def _linger(self) -> None:
        """Reads on for a moment what nobody wants, so that closing does not reset what the client has yet to read."""
        left = 2 * MAX_MESSAGE
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_S):
                while left > 0 and (data := await self._reader.read(_CHUNK)):
                    left -= len(data)


_ONCE: Final = frozenset({"authorization", "content-length", "content-encoding", TENANT_KEY, HOP_KEY, _LENGTH_HEADER})
_Expander = Callable[[bytes, int], bytes]


def _expander(encoding: str) -> _Expander:
    """A function of (data, room) that gives at most one byte more than there is room for."""
    match encoding.strip().lower():
        case "identity" | "":
            return lambda data, room: data
        case "gzip" | "deflate":
            stream = zlib.decompressobj(wbits=47)

            def expand(data: bytes, room: int) -> bytes:
                try:
                    return stream.decompress(data, room + 1)
                except zlib.error as error:
                    raise invalid(f"a body that is not {encoding}: {error}"[:200], encoding) from error

            return expand
        case _:
            raise refuse(
                Code.UNIMPLEMENTED, f"content-encoding {encoding!r:.40}", "identity, gzip or deflate", "send it plain"
            )


def _whole(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise invalid(f"{name} {text!r:.40}", "a whole number")
    return int(text)


def _version(request: _Request) -> str:
    """/v2/models/NAME/versions/VERSION/..."""
    return request.path[4] if len(request.path) > 4 and request.path[3] == "versions" else ""


def _response(document: Any, at: int = 200) -> _Response:
    return _Response(at, json.dumps(document).encode(), {"content-type": "application/json"})


def _ready(document: Mapping[str, Any], ready: bool) -> _Response:
    return _response({**document, "ready": ready}, 200 if ready else 503)


def _refused(refusal: Refusal, retry_s: float | None = None, at: int | None = None) -> _Response:
    response = _response({"error": str(refusal), "code": refusal.code}, at or status.http_status(refusal.code))
    headers = {**response.headers, status.CODE_KEY: str(refusal.code)}
    if retry_s is not None:
        headers |= {"retry-after": str(math.ceil(retry_s)), status.RETRY_KEY: str(max(1, round(retry_s * 1000)))}
    if refusal.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return _Response(response.status, response.body, headers)


def _model(said: oip.ModelMetadataResponse) -> dict[str, Any]:
    def shown(tensors_: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors_]

    return {
        "name": said.name,
        "versions": list(said.versions),
        "platform": said.platform,
        "inputs": shown(said.inputs),
        "outputs": shown(said.outputs),
    }
