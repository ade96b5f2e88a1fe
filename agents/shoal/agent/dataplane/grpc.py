"""The Open Inference Protocol over gRPC: one server with client certificates, one with bearer tokens.

grpcio cannot ask for a client certificate and go on without one, hence two ports. Inference requests and answers pass
as the bytes that they are; only the small calls are parsed here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import grpc
import grpc.aio
import structlog

from shoal.agent.dataplane.intake import Intake
from shoal.agent.dataplane.request import invalid
from shoal.agent.dataplane.transport import (
    AGREEMENT_KEY,
    HOP_KEY,
    MAX_MESSAGE,
    ORIGIN_KEY,
    REQUEST_KEY,
    STEP_KEY,
    TENANT_KEY,
    TRACE_KEY,
    Call,
    Service,
    TlsFiles,
    retry_after_s,
)
from shoal.agent.dataplane.trust import Authorities, Handshake
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds
from shoal.wire import limits, status
from shoal.wire.identity import Identity

SERVICE: Final = "inference.GRPCInferenceService"
MAX_CALLS: Final = 2048
MAX_STREAMS: Final = 256
LAST_ANSWER_S: Final = 0.05
"""What the last answer has to leave in, before its connection closes."""

_log = structlog.get_logger(__name__)
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Method:
    """A method whose request and answer pass as the bytes that they are. admit: asked before the request is read."""

    admit: Callable[[Call], None]
    answer: Callable[[Call, bytes], Awaitable[bytes]]


NOTHING_BESIDE: Final[Mapping[str, Mapping[str, Method]]] = {}


class GrpcTransport:
    """Listens on one port. authorities: of the certificate that clients must show; None: they send a bearer token.
    beside: methods by service and name, that are answered here too."""

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        tls: TlsFiles,
        authorities: Authorities | None = None,
        beside: Mapping[str, Mapping[str, Method]] = NOTHING_BESIDE,
    ) -> None:
        self._service = service
        self._beside = beside
        self._address = f"{host}:{port}"
        self._tls = tls
        self._authorities = authorities
        self._server: grpc.aio.Server | None = None
        self._intake = Intake()
        self._inside = 0
        self._empty = asyncio.Event()
        self._leaving = False

    async def start(self) -> int:
        guards = (_TokenFirst(self._service),) if self._authorities is None else ()
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS, interceptors=guards)
        server.add_generic_rpc_handlers((self._handlers(), *self._handlers_beside()))
        try:
            port = server.add_secure_port(self._address, self._credentials())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._address}: {error}") from error
        await server.start()
        self._server = server
        return port

    async def stop(self, grace_s: Seconds) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    async def leave(self, grace_s: Seconds) -> None:
        """The library answers CANCELLED to calls that its peers sent before they heard that it stops (grpc issue
        41785), which no client sends again. So they are refused until those inside are over; then the process ends, and
        its connections with it."""
        self._leaving = True
        self._empty.clear()
        if self._inside:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
        await asyncio.sleep(LAST_ANSWER_S)

    def _enter(self, context: _Context) -> None:
        """Raises ShoalError(MODEL_NOT_READY) while leaving."""
        if self._leaving:
            raise refuse(Code.MODEL_NOT_READY, "this front ends", "one that stays", "ask again, or another front")
        self._inside += 1
        cast(Any, context).add_done_callback(self._left)

    def _left(self, _: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    def _credentials(self) -> grpc.ServerCredentials:
        stamp = self._stamp()
        configuration = self._configuration(stamp[1])

        def fetch() -> Any:
            """At each handshake; None keeps what is in use, also while files are being replaced."""
            nonlocal stamp
            try:
                newest = self._stamp()
                if newest == stamp:
                    return None
                fresh = self._configuration(newest[1])
            except OSError:
                return None
            stamp = newest
            return fresh

        return grpc.dynamic_ssl_server_credentials(configuration, fetch, self._authorities is not None)

    def _stamp(self) -> tuple[tuple[int, ...], Handshake | None]:
        return self._tls.stamp(), None if self._authorities is None else self._authorities.handshake

    def _configuration(self, handshake: Handshake | None) -> grpc.ServerCertificateConfiguration:
        """handshake: None where no client certificate is asked for."""
        certificate, key, authority = self._tls.read()
        believed = authority + b"\n" + handshake.pem if handshake is not None else None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], believed)

    def _handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Without a deserializer a request is its bytes, without a serializer so is the answer."""
        small: tuple[tuple[str, type[Any], Callable[[Call, Any], Awaitable[Any]]], ...] = (
            ("ServerLive", oip.ServerLiveRequest, self._live),
            ("ServerReady", oip.ServerReadyRequest, self._ready),
            ("ServerMetadata", oip.ServerMetadataRequest, self._metadata),
            ("ModelReady", oip.ModelReadyRequest, self._model_ready),
            ("ModelMetadata", oip.ModelMetadataRequest, self._model_metadata),
            ("RepositoryIndex", oip.RepositoryIndexRequest, self._index),
            ("RepositoryModelLoad", oip.RepositoryModelLoadRequest, self._load),
            ("RepositoryModelUnload", oip.RepositoryModelUnloadRequest, self._load),
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._answering(answer), kind.FromString, lambda response: response.SerializeToString()
            )
            for name, kind, answer in small
        }
        handlers["ModelInfer"] = self._whole(Method(self._service.admit, self._service.infer))
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _handlers_beside(self) -> "tuple[grpc.GenericRpcHandler[Any, Any], ...]":
        return tuple(
            grpc.method_handlers_generic_handler(service, {name: self._whole(each) for name, each in methods.items()})
            for service, methods in self._beside.items()
        )

    def _answering(self, answer: Callable[[Call, Any], Awaitable[Any]]) -> Callable[[Any, _Context], Awaitable[Any]]:
        async def handle(request: Any, context: _Context) -> Any:
            try:
                self._enter(context)
                return await answer(self._call(context), request)
            except ShoalError as error:
                return await status.abort(context, error.refusal, retry_after_s(error))
            except Exception as error:
                _log.exception("call_failed")
                return await status.abort(context, _internal(error))

        return handle

    def _whole(self, method: Method) -> "grpc.RpcMethodHandler[Any, Any]":
        """A stream here, though not to its caller: only so is a message read when there is a place for it."""

        async def handle(requests: AsyncIterator[bytes], context: _Context) -> bytes:
            held = ExitStack()
            cast(Any, context).add_done_callback(lambda _: held.close())  # its caller has read the answer, or is gone
            try:
                self._enter(context)
                call = self._call(context)
                method.admit(call)
                held.enter_context(self._intake.call(call.caller))
                async with self._intake.place(call.caller):
                    request = await context.read()
                if not isinstance(request, bytes):
                    raise invalid("a call without a message", "a request")
                answer = await method.answer(call, request)
                held.enter_context(self._intake.unread(call.caller, len(answer)))
                return answer
            except ShoalError as error:
                return await status.abort(context, error.refusal, retry_after_s(error))
            except Exception as error:
                _log.exception("call_failed")
                return await status.abort(context, _internal(error))

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _stream(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        """One answer for each request, in order; a refused request is answered as such and the stream goes on."""
        try:
            self._enter(context)
            call = self._call(context)
            self._service.admit(call)
            with self._intake.call(call.caller, stream=True):
                async for request in requests:
                    answer = await self._streamed(self._call(context), request)
                    with self._intake.unread(call.caller, len(answer)):
                        yield answer
        except ShoalError as error:
            await status.abort(context, error.refusal, retry_after_s(error))

    async def _streamed(self, call: Call, request: bytes) -> bytes:
        try:
            return _stream_response(2, await self._service.infer(call, request))
        except ShoalError as error:
            return _stream_response(1, str(error.refusal).encode())
        except Exception as error:
            _log.exception("call_failed")
            return _stream_response(1, str(_internal(error)).encode())

    def _call(self, context: _Context) -> Call:
        """Raises ShoalError(UNAUTHENTICATED | CERT_NAME_INVALID | CERT_UNTRUSTED | REGION_MISMATCH |
        INVALID_ARGUMENT)."""
        said: dict[str, Any] = dict(context.invocation_metadata() or ())
        hop = str(said.get(HOP_KEY, "0"))
        if hop not in ("0", "1"):
            raise refuse(Code.INVALID_ARGUMENT, f"{HOP_KEY} {hop!r:.40}", "0 or 1", "leave it out")
        left = context.time_remaining()
        return Call(
            identity=self._identity(context),
            bearer=_bearer(said),
            tenant=str(said.get(TENANT_KEY, "")),
            origin=str(said.get(ORIGIN_KEY, "")),
            hop=int(hop),
            request_id=str(said.get(REQUEST_KEY, "")),
            left_s=None if left is None else Seconds(left),
            agreement=str(said.get(AGREEMENT_KEY, "")),
            step=str(said.get(STEP_KEY, ""))[:128],
            trace=str(said.get(TRACE_KEY, "")),
        )

    def _identity(self, context: _Context) -> Identity | None:
        if self._authorities is None:
            return None
        pems: Sequence[bytes] = tuple(context.auth_context().get("x509_pem_cert") or ())
        return self._authorities.identity(pems[0]) if pems else None

    async def _live(self, call: Call, request: oip.ServerLiveRequest) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=self._service.live())

    async def _ready(self, call: Call, request: oip.ServerReadyRequest) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._service.server_ready(call))

    async def _metadata(self, call: Call, request: oip.ServerMetadataRequest) -> oip.ServerMetadataResponse:
        return self._service.server_metadata(call)

    async def _model_ready(self, call: Call, request: oip.ModelReadyRequest) -> oip.ModelReadyResponse:
        return oip.ModelReadyResponse(ready=self._service.model_ready(call, request.name, request.version))

    async def _model_metadata(self, call: Call, request: oip.ModelMetadataRequest) -> oip.ModelMetadataResponse:
        return await self._service.model_metadata(call, request.name, request.version)

    async def _index(self, call: Call, request: oip.RepositoryIndexRequest) -> oip.RepositoryIndexResponse:
        return self._service.index(call, ready_only=request.ready)

    async def _load(self, call: Call, request: object) -> None:
        self._service.server_ready(call)
        raise ShoalError(NO_REPOSITORY_CONTROL)


class _TokenFirst(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Where anybody may connect, the caller is judged by the head: grpc would take a whole message first."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method != f"/{SERVICE}/ServerLive":
            try:
                self._service.admit(Call(bearer=_bearer(dict(handler_call_details.invocation_metadata or ()))))
            except ShoalError as error:
                return _refusing(error.refusal, retry_after_s(error))
            except Exception as error:
                _log.exception("call_failed")
                return _refusing(_internal(error))
        return await continuation(handler_call_details)


def _refusing(refusal: Refusal, retry_s: Seconds | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler of a stream, whatever the method: the only kind that reads nothing unasked."""

    async def refuse_all(_requests: AsyncIterator[bytes], context: _Context) -> None:
        await status.abort(context, refusal, retry_s)

    return grpc.stream_stream_rpc_method_handler(refuse_all)


def _bearer(said: Mapping[str, Any]) -> str:
    scheme, _, token = str(said.get("authorization", "")).partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


NO_REPOSITORY_CONTROL: Final = Refusal(
    Code.UNIMPLEMENTED,
    "loading and unloading by clients",
    "a policy: the coordinator decides what runs where",
    "shoal apply -f WORKLOAD.yaml",
)

_OPTIONS: Final = (
    *limits.server_options(MAX_MESSAGE, limits.DATA_CONNECTIONS, stuck_s=limits.ROAD.stuck_s),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # grpc checks the size of a compressed message before it expands it and never after: none is taken.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


def _internal(error: Exception) -> Refusal:
    return Refusal(Code.INTERNAL, type(error).__name__, "an answer", "report this with the log of the node")


def _stream_response(field: int, content: bytes) -> bytes:
    """A serialized ModelStreamInferResponse around what is already serialized (wire type 2: tag, length, bytes)."""
    head = bytearray((field << 3 | 2,))
    size = len(content)
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + content
