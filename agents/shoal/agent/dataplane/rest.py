"""The Open Inference Protocol over HTTP/1.1 and TLS, with the binary tensor extension.

Requests become the same serialized ModelInferRequest that gRPC carries. A client certificate is requested, not
required: without one a bearer token counts. As little as possible is read: the caller is authenticated from the
headers, a body is measured while it arrives and expands, and a slow sender is disconnected.
"""

import asyncio
import json
import math
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from socket import MSG_PEEK, socket
from typing import Any, Final, cast
from urllib.parse import unquote

import h11
import structlog

from shoal.agent.dataplane import tensors
from shoal.agent.dataplane.conversion import Conversions
from shoal.agent.dataplane.grpc_methods import NO_REPOSITORY_CONTROL
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.log_budget import LogBudget
from shoal.agent.dataplane.memory import MessageMemory
from shoal.agent.dataplane.request import invalid, too_large
from shoal.agent.dataplane.tls_context import ServerTls
from shoal.agent.dataplane.transport import (
    HOP_KEY,
    MAX_MESSAGE,
    ORIGIN_KEY,
    REQUEST_KEY,
    TENANT_KEY,
    TRACE_KEY,
    InboundCall,
    InferenceService,
    TlsFiles,
    check_request_id,
    drop_tracebacks,
    retry_after_s,
)
from shoal.host.connections import Connection, Connections
from shoal.host.limited_listener import CHUNK_BYTES, HEAD_READ_BYTES, LimitedListener
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.units import Seconds
from shoal.wire import status
from shoal.wire.certificates import identity_of_der

MAX_HEAD: Final = 32 * 2**10
MAX_CONNECTIONS: Final = 1024
MAX_CONNECTIONS_PER_ADDRESS: Final = 512
"""Connections beyond either limit are closed before TLS costs anything. Clients behind one address (of IPv6, one /64)
share this limit."""
HEAD_TIMEOUT_S: Final = 10.0
"""Seconds for the TLS handshake, from then to the first request's first byte, and for a request's head."""
IDLE_TIMEOUT_S: Final = 75.0
"""Seconds from one request to the next."""
SMALL_BYTES: Final = 16 * 2**10
"""Largest body of a request that carries no tensors."""
BODY_GRACE_S: Final = 10.0
BODY_RATE: Final = 128 * 2**10
"""Bytes per second below which a body counts as too slow, once the grace is over."""
SEND_TIMEOUT_S: Final = 60.0
LINGER_S: Final = 2.0
_LENGTH_HEADER: Final = "inference-header-content-length"

_HTTP: Final = frozenset((b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC", b"PRI "))
"""First bytes of a client that does not use TLS; PRI begins HTTP/2."""

_log = structlog.get_logger(__name__)
_failures = LogBudget()


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: tuple[str, ...]
    headers: Mapping[str, str]
    call: InboundCall


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class RestTransport:
    """Listens on one port."""

    def __init__(
        self, service: InferenceService, host: str, port: int, tls: TlsFiles, memory: MessageMemory | None = None
    ) -> None:
        self._service = service
        self._host = host
        self._port = port
        self._tls = ServerTls(tls, ("http/1.1",), ssl.CERT_OPTIONAL)
        self._connections = Connections(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS)
        self._listener = LimitedListener(self._connections, self._serve)
        self._conversions = Conversions()
        self._admission = IngressAdmission(memory)
        self._stopping = asyncio.Event()

    async def start(self) -> int:
        self._tls.context()  # raises OSError now, not at the first handshake
        return await self._listener.start(self._host, self._port, backlog=MAX_CONNECTIONS, reuse_port=True)

    async def stop(self, grace_s: Seconds) -> None:
        self._stopping.set()
        self._listener.close()
        if tasks := self._listener.tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in self._listener.tasks:
            task.cancel()
        self._conversions.close()

    async def leave(self, grace_s: Seconds) -> None:
        await self.stop(grace_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection) -> None:
        try:
            if await _first_bytes(writer) in _HTTP:
                await _refuse_plaintext(reader, writer)
                return
            await writer.start_tls(self._tls.context(), ssl_handshake_timeout=HEAD_TIMEOUT_S)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        shared = _Shared(self._service, self._admission, self._conversions, self._connections, self._stopping)
        await _Connection(shared, reader, writer, connection).serve()


async def _first_bytes(writer: asyncio.StreamWriter) -> bytes:
    """The first four bytes, once they have arrived; they stay in the buffer. Raises TimeoutError."""
    try:
        same: socket = writer.get_extra_info("socket").dup()
    except OSError:
        return b""  # no descriptor is left: let the handshake fail
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()

    def on_readable() -> None:
        loop.remove_reader(same)
        if not arrived.done():
            arrived.set_result(None)

    try:
        loop.add_reader(same, on_readable)
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            await arrived
        return same.recv(4, MSG_PEEK)
    finally:
        loop.remove_reader(same)
        same.close()


async def _refuse_plaintext(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    refusal = Refusal(Code.TLS_REQUIRED, "a request without TLS", "HTTPS: this port takes TLS alone", "use https://")
    response = _refusal_response(refusal, at=HTTPStatus.BAD_REQUEST)
    lines = [f"HTTP/1.1 {response.status} {_reason(response.status)}", f"content-length: {len(response.body)}"]
    lines += [f"{name}: {value}" for name, value in {**response.headers, "connection": "close"}.items()]
    writer.write("\r\n".join((*lines, "", "")).encode() + response.body)
    cast(asyncio.Transport, writer.transport).resume_reading()
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(LINGER_S):
            await writer.drain()
            writer.write_eof()
            for _ in range(MAX_HEAD // HEAD_READ_BYTES):  # unread bytes would reset the connection before it reads this
                if not await reader.read(HEAD_READ_BYTES):
                    break
    writer.transport.abort()


class _ClientGone(Exception):
    """The client disconnected, or the connection is no longer usable."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """Objects that all connections of a transport share."""

    # Answers the calls.
    service: InferenceService
    # Limits by caller.
    admission: IngressAdmission
    # Converts JSON bodies.
    conversions: Conversions
    # Limits on connections.
    connections: Connections
    # Set when the transport stops: connections close after their current request.
    stopping: asyncio.Event


class _Connection:
    """One client's connection, with its requests one after another."""

    def __init__(
        self, shared: _Shared, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Connection
    ) -> None:
        self._service = shared.service
        self._admission = shared.admission
        self._conversions = shared.conversions
        self._connections = shared.connections
        self._stopping = shared.stopping
        self._place = place
        self._reader = reader
        self._writer = writer
        self._idle_s = HEAD_TIMEOUT_S
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._identity: Identity | None = None
        self._identity_error: ShoalError | None = None

    async def serve(self) -> None:
        try:
            self._identify()
            while await self._exchange() and not self._stopping.is_set():
                self._http.start_next_cycle()
                self._idle_s = IDLE_TIMEOUT_S
        except (_ClientGone, OSError, asyncio.IncompleteReadError):
            pass
        except Exception:
            if (left_out := _failures.take(asyncio.get_running_loop().time())) is not None:
                _log.exception("client_connection_failed", suppressed=left_out)
        finally:
            await self._close()

    async def _close(self) -> None:
        """Close the connection, within LINGER_S even if the peer does not answer the end of TLS."""
        self._writer.close()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            pass  # the peer disconnected; Python 3.11.2 fails to close such a connection

    def _identify(self) -> None:
        connection: ssl.SSLObject = self._writer.get_extra_info("ssl_object")
        der = connection.getpeercert(binary_form=True)
        try:
            self._identity = identity_of_der(der) if der else None
        except ShoalError as error:
            self._identity_error = error

    async def _exchange(self) -> bool:
        """Answer one request; return whether another may follow on this connection."""
        with ExitStack() as held:
            return await self._answer_one(held)

    async def _answer_one(self, held: ExitStack) -> bool:
        """As `_exchange`; `held` is what the caller holds of the admission until its response is sent."""
        request: _Request | None = None
        try:
            request = self._request(await self._head())
            response = await self._answer(request, held)
        except ShoalError as error:
            drop_tracebacks(error)
            response = _refusal_response(error.refusal, retry_after_s(error))
        except h11.RemoteProtocolError as error:
            refusal = Refusal(Code.INVALID_ARGUMENT, f"{error}"[:200], "HTTP/1.1", "see the protocol")
            response = _refusal_response(refusal, at=error.error_status_hint)
        except (_ClientGone, OSError):
            raise
        except Exception as error:
            if (left_out := _failures.take(asyncio.get_running_loop().time())) is not None:
                _log.exception("call_failed", suppressed=left_out)
            drop_tracebacks(error)
            refusal = Refusal(Code.INTERNAL, type(error).__name__, "an answer", "report this with the log of the node")
            response = _refusal_response(refusal)
        return await self._send(response, request)

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
            raise _ClientGone
        return event

    async def _receive(self, timeout: float, size: int = CHUNK_BYTES, *, idle: bool = False) -> None:
        try:
            async with asyncio.timeout(timeout):
                data = await self._reader.read(size)
        except TimeoutError as error:
            if idle:
                raise _ClientGone from error
            raise refuse(Code.TOO_SLOW, "a request that does not arrive", "bytes in time", "send it faster") from error
        if idle and not data:
            raise _ClientGone
        self._http.receive_data(data)

    def _request(self, head: h11.Request) -> _Request:
        headers: dict[str, str] = {}
        for name, value in head.headers:
            key = name.decode("ascii")
            if key in headers and key in _SINGLE_HEADERS:
                raise invalid(f"{key} twice", "once")
            headers[key] = value.decode("latin-1")
        hop = headers.get(HOP_KEY, "0")
        if hop not in ("0", "1"):
            raise invalid(f"{HOP_KEY} {hop!r:.40}", "0 or 1")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        call = InboundCall(
            identity=self._identity,
            bearer=token.strip() if scheme.lower() == "bearer" else "",
            tenant=headers.get(TENANT_KEY, ""),
            origin=headers.get(ORIGIN_KEY, ""),
            hop=int(hop),
            request_id=check_request_id(headers.get(REQUEST_KEY, "")),
            trace=headers.get(TRACE_KEY, ""),
        )
        target = head.target.decode("ascii").partition("?")[0]
        path = ("*",) if target == "*" else tuple(unquote(part) for part in target.split("/")[1:] if part)
        return _Request(head.method.decode("ascii"), path, headers, call)

    async def _answer(self, request: _Request, held: ExitStack) -> _Response:
        """Raises ShoalError."""
        if request.method == "OPTIONS":
            return _options(request.path)
        method = "GET" if request.method == "HEAD" else request.method
        if (method, request.path) == ("GET", ("v2", "health", "live")):
            return _response({"live": self._service.live()})
        if self._identity_error is not None:
            raise self._identity_error
        match method, request.path:
            case "GET", ("v2", "health", "ready"):
                return _ready({}, self._service.server_ready(request.call))
            case "GET", ("v2",):
                said = self._service.server_metadata(request.call)
                return _response({"name": said.name, "version": said.version, "extensions": list(said.extensions)})
            case "GET", ("v2", "models", "stats"):
                return _response(_statistics(self._service.statistics(request.call, "", "")))
            case "GET", ("v2", "models", name) | ("v2", "models", name, "versions", _):
                return _response(_model(await self._service.model_metadata(request.call, name, _version(request))))
            case "GET", ("v2", "models", name, "ready") | ("v2", "models", name, "versions", _, "ready"):
                return self._model_ready(request, name)
            case "GET", ("v2", "models", name, "config") | ("v2", "models", name, "versions", _, "config"):
                return _response(_config(await self._service.model_config(request.call, name, _version(request))))
            case "GET", ("v2", "models", name, "stats") | ("v2", "models", name, "versions", _, "stats"):
                return _response(_statistics(self._service.statistics(request.call, name, _version(request))))
            case "POST", ("v2", "models", name, "infer") | ("v2", "models", name, "versions", _, "infer"):
                return await self._infer(request, name, held)
            case "POST", ("v2", "repository", "index"):
                return await self._index(request)
            case "POST", ("v2", "repository", "models", _, "load" | "unload"):
                self._service.server_ready(request.call)
                raise ShoalError(NO_REPOSITORY_CONTROL)
            case method, path:
                self._service.server_ready(request.call)
                raise _no_such_path(method, path)

    def _model_ready(self, request: _Request, name: str) -> _Response:
        try:
            return _ready({"name": name}, self._service.model_ready(request.call, name, _version(request)))
        except ShoalError as error:
            if error.code is not Code.MODEL_NOT_FOUND:
                raise
            refused = _refusal_response(error.refusal)
            return replace(refused, body=_dump({"name": name, "ready": False, **json.loads(refused.body)}))

    async def _infer(self, request: _Request, name: str, held: ExitStack) -> _Response:
        payer = self._service.admit(request.call)
        caller = request.call.caller
        held.enter_context(self._admission.call(caller))
        self._connections.set_busy(self._place)
        held.callback(self._connections.set_idle, self._place)
        async with self._admission.read_slot(caller, MAX_MESSAGE / BODY_RATE + BODY_GRACE_S, payer=payer):
            body = await self._body(request.headers)
        with self._admission.hold_request(caller, len(body), payer):
            header_length = _whole_number(request.headers, _LENGTH_HEADER)
            steps = tensors.convert_request(name, _version(request), body, header_length)
            message, wanted = await self._conversions.run(caller, len(body), steps)
            answer = await self._cancel_on_disconnect(self._service.infer(request.call, message))
            del message, steps, body
        shown = tensors.convert_response(answer, wanted)
        content, json_length = await self._conversions.run(caller, len(answer), shown)
        held.enter_context(self._admission.hold_answer(caller, len(content), payer))
        if json_length is None:
            return _Response(200, content, {"content-type": "application/json"})
        headers = {"content-type": "application/octet-stream", _LENGTH_HEADER: str(json_length)}
        return _Response(200, content, headers)

    async def _index(self, request: _Request) -> _Response:
        self._service.server_ready(request.call)
        body = bytes(await self._body(request.headers, SMALL_BYTES))
        ready = tensors.load_json(body).get("ready", False) if body.strip() else False
        if not isinstance(ready, bool):
            raise invalid(f"ready {ready!r:.80}", "true or false")
        listed = self._service.index(request.call, ready_only=ready)
        rows = [{"name": m.name, "version": m.version, "state": m.state, "reason": m.reason} for m in listed.models]
        return _response(rows)

    async def _cancel_on_disconnect(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """The result of `work`, which is cancelled if the client disconnects meanwhile."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._read_on())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not watch.result():
                raise _ClientGone
            return await task
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _read_on(self) -> bool:
        """Return False at the end of the stream. Bytes that a pipelining client sent early are kept for their turn."""
        data = await self._reader.read(CHUNK_BYTES)
        self._http.receive_data(data)
        return bool(data)

    async def _body(self, headers: Mapping[str, str], most: int = MAX_MESSAGE) -> bytearray:
        """The body, expanded. Raises ShoalError(TOO_LARGE), by its declared length before a byte of it is read."""
        declared = _whole_number(headers, "content-length")
        if declared is not None and declared > most:
            raise too_large(f"a body of {declared} bytes", most)
        expand = _expander(headers.get("content-encoding", "identity"))
        if self._http.they_are_waiting_for_100_continue:
            self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        body = bytearray()
        async for data in self._data():
            for part in expand(data):
                if len(body) + len(part) > most:
                    raise too_large(f"a body of over {most} bytes once expanded", most)
                body += part
                if part is not data:
                    await asyncio.sleep(0)  # let other tasks run: a small body may expand to a large one
        return body

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
                raise _ClientGone

    async def _send(self, response: _Response, request: _Request | None) -> bool:
        """Send the response. Returns whether the connection can continue: only if its request was read to the end."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise _ClientGone
        if self._http.their_state is h11.SEND_BODY:
            with suppress(h11.RemoteProtocolError):
                self._http.next_event()  # the end of a request without a body is an event too
        over = self._http.their_state is not h11.DONE or self._stopping.is_set()
        headers = {"content-length": str(len(response.body)), **response.headers}
        if over:
            headers["connection"] = "close"
        if request is not None and request.call.request_id:
            headers[REQUEST_KEY] = request.call.request_id
        reason = _reason(response.status)
        head = h11.Response(status_code=response.status, reason=reason, headers=list(headers.items()))
        start = self._http.send(head) or b""
        body = memoryview(b"" if request is not None and request.method == "HEAD" else response.body)
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                # In chunks, because TLS copies what it is given.
                for offset in range(0, len(body), CHUNK_BYTES):
                    part = self._http.send(h11.Data(data=bytes(body[offset : offset + CHUNK_BYTES]))) or b""
                    self._writer.write(start + part if start else part)
                    start = b""
                    await self._writer.drain()
                self._writer.write(start + (self._http.send(h11.EndOfMessage()) or b""))
                await self._writer.drain()
        except TimeoutError as error:
            raise _ClientGone from error
        if over and not self._stopping.is_set():
            await self._linger()
        return not over

    async def _linger(self) -> None:
        """Read and discard bytes for a moment, so that closing does not reset what the client has yet to read."""
        left = 2 * MAX_MESSAGE
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_S):
                while left > 0 and (data := await self._reader.read(CHUNK_BYTES)):
                    left -= len(data)


_SINGLE_HEADERS: Final = frozenset(
    {"authorization", "content-length", "content-encoding", TENANT_KEY, HOP_KEY, _LENGTH_HEADER}
)
_Expander = Callable[[bytes], Iterator[bytes]]
_EXPANDED_AT_ONCE: Final = 2**20


def _expander(encoding: str) -> _Expander:
    """A function that expands the next bytes of a body. Pieces of a compressed body have at most `_EXPANDED_AT_ONCE`
    bytes."""
    match encoding.strip().lower():
        case "identity" | "":
            return lambda data: iter((data,))
        case "gzip" | "deflate":
            stream = zlib.decompressobj(wbits=47)

            def expand(data: bytes) -> Iterator[bytes]:
                try:
                    while data and not stream.eof:
                        yield stream.decompress(data, _EXPANDED_AT_ONCE)
                        data = stream.unconsumed_tail
                except zlib.error as error:
                    raise invalid(f"a body that is not {encoding}: {error}"[:200], encoding) from error

            return expand
        case _:
            raise refuse(
                Code.UNIMPLEMENTED, f"content-encoding {encoding!r:.40}", "identity, gzip or deflate", "send it plain"
            )


def _whole_number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise invalid(f"{name} {text!r:.40}", "a whole number")
    return int(text)


def _version(request: _Request) -> str:
    """The version in /v2/models/NAME/versions/VERSION/...; empty without one."""
    return request.path[4] if len(request.path) > 4 and request.path[3] == "versions" else ""


def _dump(document: Any) -> bytes:
    return json.dumps(document).encode()


def _response(document: Any, at: int = 200) -> _Response:
    return _Response(at, _dump(document), {"content-type": "application/json"})


def _reason(at: int) -> str:
    """The reason phrase. 499, from nginx, is not in the standard."""
    return HTTPStatus(at).phrase if at in HTTPStatus.__members__.values() else "Client Closed Request"


def _options(path: tuple[str, ...]) -> _Response:
    match path:
        case ("*",):
            allowed = "GET, HEAD, POST, OPTIONS"
        case ("v2", "models", *_, "infer") | ("v2", "repository", *_):
            allowed = "POST, OPTIONS"
        case ("v2", *_):
            allowed = "GET, HEAD, OPTIONS"
        case _:
            raise _no_such_path("OPTIONS", path)
    return _Response(200, b"", {"allow": allowed})


def _no_such_path(method: str, path: tuple[str, ...]) -> ShoalError:
    shown = f"{method} /{'/'.join(path)}"
    return refuse(Code.NOT_FOUND, f"{shown!r:.200}", "a path of the Open Inference Protocol", "see its REST form")


def _ready(document: Mapping[str, Any], ready: bool) -> _Response:
    return _response({**document, "ready": ready}, 200 if ready else 503)


def _refusal_response(refusal: Refusal, retry_s: float | None = None, at: int | None = None) -> _Response:
    response = _response({"error": str(refusal), "code": refusal.code}, at or status.http_status(refusal.code))
    headers = {**response.headers, status.CODE_KEY: str(refusal.code)}
    if retry_s is not None:
        headers |= {"retry-after": str(math.ceil(retry_s)), status.RETRY_KEY: str(max(1, round(retry_s * 1000)))}
    if refusal.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return _Response(response.status, response.body, headers)


def _model(said: oip.ModelMetadataResponse) -> dict[str, Any]:
    def describe(tensors_: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors_]

    return {
        "name": said.name,
        "versions": list(said.versions),
        "platform": said.platform,
        "inputs": describe(said.inputs),
        "outputs": describe(said.outputs),
    }


def _config(said: oip.ModelConfigResponse) -> dict[str, Any]:
    def describe(tensors_: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "data_type": oip.DataType.Name(t.data_type), "dims": list(t.dims)} for t in tensors_]

    config = said.config
    return {
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "max_batch_size": config.max_batch_size,
        "input": describe(config.input),
        "output": describe(config.output),
    }


def _statistics(said: oip.ModelStatisticsResponse) -> dict[str, Any]:
    rows = []
    for each in said.model_stats:
        stats = each.inference_stats
        shown = {name.name: {"count": value.count, "ns": value.ns} for name, value in stats.ListFields()}
        rows.append(
            {
                "name": each.name,
                "version": each.version,
                "last_inference": each.last_inference,
                "inference_count": each.inference_count,
                "execution_count": each.execution_count,
                "inference_stats": shown,
                "batch_stats": [],
            }
        )
    return {"model_stats": rows}
