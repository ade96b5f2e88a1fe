"""The Open Inference Protocol over gRPC: one server for client certificates, one for bearer tokens.

grpcio cannot request a client certificate and continue without one, hence two ports. Inference requests and answers
pass as bytes; only the small calls are parsed here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from shoal.agent.dataplane import compression, grpc_health, reflection
from shoal.agent.dataplane.compression import expand, expanded_size
from shoal.agent.dataplane.exchange import Exchange
from shoal.agent.dataplane.ingress_admission import SMALL_BYTES, IngressAdmission
from shoal.agent.dataplane.memory import MessageMemory
from shoal.agent.dataplane.request import invalid
from shoal.agent.dataplane.stream_resets import StreamResets, close_connection
from shoal.agent.dataplane.transport import (
    AGREEMENT_KEY,
    FORWARD_KEY,
    HOP_KEY,
    MAX_MESSAGE,
    ORIGIN_KEY,
    REQUEST_KEY,
    STEP_KEY,
    SUSPECT_KEY,
    TENANT_KEY,
    TRACE_KEY,
    InboundCall,
    InferenceService,
    TlsFiles,
    check_request_id,
    drop_tracebacks,
    retry_after_s,
)
from shoal.agent.dataplane.trust import Authorities, Handshake
from shoal.host.event_wait import wait_or_timeout
from shoal.inference import health_pb2, reflection_pb2
from shoal.inference import open_inference_pb2 as oip
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Seconds
from shoal.wire import limits, status
from shoal.wire.field_limits import CountLimits, encode_field, parse

SERVICE: Final = "inference.GRPCInferenceService"
MAX_STREAMS: Final = 256
MAX_PENDING: Final = 8192
"""Calls of all connections that wait for this process to accept them, 13 KB each (measured with a burst of 20,000).
Beyond it the library answers any caller CANCELLED without a code; by its own default it does so at random from 1,000
on.
"""
SMALL_LIMITS: Final = CountLimits(fields=256, repeated=64)
"""Limits for a request of any method but an inference."""
LAST_ANSWER_S: Final = 0.05
"""Seconds for the last answer to be sent before its connection closes."""

_log = structlog.get_logger(__name__)
_M = TypeVar("_M", bound=Message)
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _CallProgress:
    """How far a call has come."""

    # True once its message has arrived, or if it has none.
    is_received: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """A method whose request and answer pass as bytes."""

    # Returns the payer, or None for the caller itself; called before the request is read. Raises ShoalError.
    admit: Callable[[InboundCall], str | None]
    # Answers the request.
    answer: Callable[[InboundCall, bytes], Awaitable[bytes]]
    # True if neither request nor answer exceeds SMALL_BYTES. Then it has SMALL_S, and uses no slot of an inference.
    small: bool = False


NO_EXTRA_METHODS: Final[Mapping[str, Mapping[str, Method]]] = {}


class GrpcTransport:
    """Listens on one port.

    - `authorities`: CAs of the certificate that clients must show; None: they send a bearer token.
    - `extra_methods`: further methods to answer, by service and name.
    - `memory`: memory accounting of the process.
    """

    def __init__(
        self,
        service: InferenceService,
        host: str,
        port: int,
        tls: TlsFiles,
        authorities: Authorities | None = None,
        extra_methods: Mapping[str, Mapping[str, Method]] = NO_EXTRA_METHODS,
        memory: MessageMemory | None = None,
    ) -> None:
        self._service = service
        self._extra_methods = extra_methods
        self._address = str(HostPort(host, port))
        self._tls = tls
        self._authorities = authorities
        self._server: grpc.aio.Server | None = None
        self._admission = IngressAdmission(memory)
        self._inside = 0
        self._resets = StreamResets()
        self._empty = asyncio.Event()
        self._leaving = False

    async def start(self) -> int:
        guards = (_TokenGuard(self._service),) if self._authorities is None else ()
        # No `maximum_concurrent_rpcs`: one caller with many calls would block all others. IngressAdmission limits
        # calls by caller.
        server = grpc.aio.server(options=_OPTIONS if guards else _CERTIFIED_OPTIONS, interceptors=guards)
        server.add_generic_rpc_handlers((self._handlers(), *self._extra_handlers(), _UnknownMethod()))
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
        """Refuse new calls until those inside have ended or `grace_s` is over; then the process exits with its
        connections.

        The library's own stop answers CANCELLED to calls that peers sent before they learned of it (grpc issue 41785),
        and clients do not retry those.
        """
        self._leaving = True
        self._empty.clear()
        if self._inside:
            await wait_or_timeout(self._empty, grace_s)
        await asyncio.sleep(LAST_ANSWER_S)

    def _enter(self, context: _Context, *, long_lived: bool = False) -> None:
        """Count a call as inside; a `long_lived` one is not waited for. Raises ShoalError(MODEL_NOT_READY) while
        leaving."""
        if self._leaving:
            raise refuse(Code.MODEL_NOT_READY, "this front ends", "one that stays", "ask again, or another front")
        if long_lived:
            return
        self._inside += 1
        cast(Any, context).add_done_callback(self._on_call_done)

    def _on_call_done(self, _: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    @contextmanager
    def _watch_resets(self, context: _Context) -> Iterator[_CallProgress]:
        """Watch one call from its start. Closes the connection of a client that resets most of its calls early."""
        visit, was_reset = _CallProgress(), False
        try:
            yield visit
        except asyncio.CancelledError:
            was_reset = not visit.is_received
            raise
        finally:
            peer = str(context.peer())
            is_storm = self._resets.record_stream(peer, was_reset=was_reset)
            if is_storm and not self._is_shared(context) and close_connection(peer):
                _log.warning(
                    "client_connection_closed", peer=peer, reason="most of its calls were reset before they arrived"
                )

    def _is_shared(self, context: _Context) -> bool:
        """Whether the peer is another front: it sends many clients' calls on one connection, and their resets with
        them."""
        identity = self._identity(context)
        return identity is not None and identity.role in (Role.AGENT, Role.GATEWAY)

    def _credentials(self) -> grpc.ServerCredentials:
        stamp = self._stamp()
        configuration = self._configuration(stamp[1])

        def fetch() -> Any:
            """Called at each handshake. None keeps the current files, also while they are being replaced."""
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
        """`handshake` is None where no client certificate is requested."""
        certificate, key, authority = self._tls.read()
        believed = authority + b"\n" + handshake.pem if handshake is not None else None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], believed)

    def _handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Without a deserializer a request is its bytes, and without a serializer so is the answer."""
        service = self._service
        handlers = {
            "ServerLive": self._header_only_handler(
                lambda _: oip.ServerLiveResponse(live=service.live()), anonymous=True
            ),
            "ServerReady": self._header_only_handler(
                lambda call: oip.ServerReadyResponse(ready=service.server_ready(call))
            ),
            "ServerMetadata": self._header_only_handler(service.server_metadata),
            "RepositoryModelLoad": self._header_only_handler(self._refuse_load),
            "RepositoryModelUnload": self._header_only_handler(self._refuse_load),
            "ModelReady": self._small_handler(oip.ModelReadyRequest, self._model_ready),
            "ModelMetadata": self._small_handler(oip.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": self._small_handler(oip.ModelConfigRequest, self._model_config),
            "ModelStatistics": self._small_handler(oip.ModelStatisticsRequest, self._statistics),
            "RepositoryIndex": self._small_handler(oip.RepositoryIndexRequest, self._index),
            "ModelInfer": self._whole_handler(Method(service.admit, service.infer)),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _extra_handlers(self) -> "tuple[grpc.GenericRpcHandler[Any, Any], ...]":
        reflect = {reflection.METHOD: self._stream_handler(self._reflect)}
        health = {
            "Check": self._small_handler(health_pb2.HealthCheckRequest, self._check_health),
            "Watch": self._stream_handler(self._watch_health, long_lived=True),
        }
        beside = {
            service: {name: self._raw_handler(each) for name, each in methods.items()}
            for service, methods in self._extra_methods.items()
        }
        every = {**dict.fromkeys(reflection.SERVICES, reflect), grpc_health.SERVICE: health, **beside}
        return tuple(grpc.method_handlers_generic_handler(service, methods) for service, methods in every.items())

    def _header_only_handler(
        self, answer: Callable[[InboundCall], Message], *, anonymous: bool = False
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A method with an empty request: it is answered from its headers, without reading or waiting for the message.

        `anonymous` methods authenticate nobody.
        """

        async def handle(call: InboundCall, exchange: Exchange, visit: _CallProgress) -> None:
            visit.is_received = not anonymous
            known = call.identity is not None or not anonymous
            with self._admission.call(call.caller) if known else self._admission.anonymous(_address(exchange.context)):
                await exchange.send(answer(call))

        return self._stream_handler(handle)

    def _small_handler(
        self, kind: type[_M], answer: Callable[[InboundCall, _M], Awaitable[Message]]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A method with small requests. `answer` authenticates; until then a call counts in the share of the claimed
        caller."""

        async def handle(call: InboundCall, exchange: Exchange, visit: _CallProgress) -> None:
            with self._admission.call(call.caller):
                request = await self._read_small(call, exchange, visit)
                await exchange.send(await answer(call, parse(kind, _require_message(request), SMALL_LIMITS)))

        return self._stream_handler(handle)

    def _raw_handler(self, method: Method) -> "grpc.RpcMethodHandler[Any, Any]":
        if not method.small:
            return self._whole_handler(method)

        async def handle(call: InboundCall, exchange: Exchange, visit: _CallProgress) -> None:
            method.admit(call)
            with self._admission.call(call.caller):
                request = await self._read_small(call, exchange, visit)
                await exchange.send(await method.answer(call, _require_message(request)))

        return self._stream_handler(handle)

    async def _read_small(self, call: InboundCall, exchange: Exchange, visit: _CallProgress) -> bytes | None:
        """Read the next message of a method with small requests; None at the end of the call. Inside
        `IngressAdmission.call`.

        Raises ShoalError(INVALID_ARGUMENT | TOO_LARGE | TOO_SLOW).
        """
        async with self._admission.small_read_slot(call.caller):
            request = await exchange.read()
        visit.is_received = True
        return None if request is None else await expand(request, expanded_size(request, SMALL_BYTES))

    async def _reflect(self, call: InboundCall, exchange: Exchange, visit: _CallProgress) -> None:
        """Answer reflection requests in order, until the caller ends the stream or is no longer authorized."""
        self._service.server_ready(call)
        with self._admission.call(call.caller, stream=True):
            while (request := await self._read_small(call, exchange, visit)) is not None:
                asked = parse(reflection_pb2.ServerReflectionRequest, request, SMALL_LIMITS)
                self._service.server_ready(call)
                await exchange.send(reflection.answer(asked))

    async def _watch_health(self, call: InboundCall, exchange: Exchange, visit: _CallProgress) -> None:
        self._service.server_ready(call)
        with self._admission.call(call.caller):
            request = await self._read_small(call, exchange, visit)
        asked = parse(health_pb2.HealthCheckRequest, _require_message(request), SMALL_LIMITS)
        async with self._admission.watch(call.caller):
            await grpc_health.watch(self._service, call, asked.service, exchange.send)

    def _stream_handler(
        self, handle: Callable[[InboundCall, Exchange, _CallProgress], Awaitable[None]], *, long_lived: bool = False
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A streaming handler, though the method is unary for its caller.

        Only a stream lets this process read a message when a slot is free, and limit the time of a send. A front that
        leaves does not wait for a `long_lived` call.
        """

        async def handle_stream(_requests: AsyncIterator[bytes], context: _Context) -> None:
            exchange = Exchange(context)
            try:
                self._enter(context, long_lived=long_lived)
                with self._watch_resets(context) as visit:
                    await handle(self._call(context), exchange, visit)
            except ShoalError as error:
                drop_tracebacks(error)
                await exchange.abort(error.refusal, retry_after_s(error))
            except Exception as error:
                if isinstance(error, grpc.aio.BaseError):
                    raise  # the caller disconnected
                _log.exception("call_failed")
                await exchange.abort(_internal_error(error))

        return grpc.stream_stream_rpc_method_handler(handle_stream)

    def _whole_handler(self, method: Method) -> "grpc.RpcMethodHandler[Any, Any]":
        """A streaming handler, though the method is unary for its caller.

        Only a stream lets this process read a message when a slot is free.
        """

        async def handle(requests: AsyncIterator[bytes], context: _Context) -> bytes:
            held = ExitStack()
            # Called when the caller has read the answer, or disconnected.
            cast(Any, context).add_done_callback(lambda _: held.close())
            try:
                self._enter(context)
                with self._watch_resets(context) as visit:
                    return await self._answer_whole(method, context, held, visit)
            except ShoalError as error:
                drop_tracebacks(error)
                return await status.abort(context, error.refusal, retry_after_s(error))
            except Exception as error:
                _log.exception("call_failed")
                drop_tracebacks(error)
                return await status.abort(context, _internal_error(error))

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _answer_whole(self, method: Method, context: _Context, held: ExitStack, visit: _CallProgress) -> bytes:
        """`held` is closed when the caller has read the answer. Raises ShoalError."""
        call = self._call(context)
        payer = method.admit(call) or call.caller
        held.enter_context(self._admission.call(call.caller))
        async with self._admission.read_slot(call.caller, payer=payer):
            request = await context.read()
        visit.is_received = True
        if not isinstance(request, bytes):
            raise invalid("a call without a message", "a request")
        size = expanded_size(request, MAX_MESSAGE)
        with self._admission.hold_request(call.caller, size, payer):
            request = await expand(request, size)
            answer = await method.answer(call, request)
            del request
        held.enter_context(self._admission.hold_answer(call.caller, len(answer), payer))
        return answer

    async def _stream(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        """Answer each request of the stream in order. A refused request is answered as an error, and the stream
        continues."""
        try:
            self._enter(context)
            with self._watch_resets(context) as visit:
                await self._answer_each(context, visit)
        except ShoalError as error:
            drop_tracebacks(error)
            await status.abort(context, error.refusal, retry_after_s(error))

    async def _answer_each(self, context: _Context, visit: _CallProgress) -> None:
        """Return at the end of the stream. Raises ShoalError."""
        call = self._call(context)
        payer = self._service.admit(call)
        with self._admission.call(call.caller, stream=True):
            while True:
                async with self._admission.stream_read(call.caller):
                    request = await context.read()
                visit.is_received = True
                if not isinstance(request, bytes):
                    return
                size = expanded_size(request, MAX_MESSAGE)
                with self._admission.hold_request(call.caller, size, payer):
                    answering = self._answer_one(self._call(context), request, size)
                    del request  # if it is compressed, it is freed as soon as it is expanded
                    answer = await answering
                with self._admission.hold_answer(call.caller, len(answer), payer):
                    await context.write(answer)

    async def _answer_one(self, call: InboundCall, request: bytes, size: int) -> bytes:
        """`size` is the request's size once expanded."""
        try:
            request = await expand(request, size)
            return _stream_response(2, await self._service.infer(call, request))
        except ShoalError as error:
            drop_tracebacks(error)
            return _stream_response(1, str(error.refusal).encode())
        except Exception as error:
            _log.exception("call_failed")
            drop_tracebacks(error)
            return _stream_response(1, str(_internal_error(error)).encode())

    def _call(self, context: _Context) -> InboundCall:
        """Raises ShoalError(UNAUTHENTICATED | CERT_NAME_INVALID | CERT_UNTRUSTED | REGION_MISMATCH |
        INVALID_ARGUMENT)."""
        said: dict[str, Any] = dict(context.invocation_metadata() or ())
        hop = str(said.get(HOP_KEY, "0"))
        if hop not in ("0", "1"):
            raise refuse(Code.INVALID_ARGUMENT, f"{HOP_KEY} {hop!r:.40}", "0 or 1", "leave it out")
        left = context.time_remaining()
        return InboundCall(
            identity=self._identity(context),
            bearer=_bearer(said),
            tenant=str(said.get(TENANT_KEY, "")),
            origin=str(said.get(ORIGIN_KEY, "")),
            hop=int(hop),
            request_id=check_request_id(str(said.get(REQUEST_KEY, ""))),
            remaining_s=None if left is None else Seconds(left),
            agreement=str(said.get(AGREEMENT_KEY, "")),
            step=str(said.get(STEP_KEY, ""))[:128],
            trace=str(said.get(TRACE_KEY, "")),
            forward=str(said.get(FORWARD_KEY, ""))[:512],
            suspect=said.get(SUSPECT_KEY) == "1",
        )

    def _identity(self, context: _Context) -> Identity | None:
        if self._authorities is None:
            return None
        pems: Sequence[bytes] = tuple(context.auth_context().get("x509_pem_cert") or ())
        return self._authorities.identity(pems[0]) if pems else None

    async def _model_ready(self, call: InboundCall, request: oip.ModelReadyRequest) -> oip.ModelReadyResponse:
        """False for an unknown model, as in Triton."""
        try:
            return oip.ModelReadyResponse(ready=self._service.model_ready(call, request.name, request.version))
        except ShoalError as error:
            if error.code is not Code.MODEL_NOT_FOUND:
                raise
            return oip.ModelReadyResponse(ready=False)

    async def _model_metadata(self, call: InboundCall, request: oip.ModelMetadataRequest) -> oip.ModelMetadataResponse:
        return await self._service.model_metadata(call, request.name, request.version)

    async def _check_health(
        self, call: InboundCall, request: health_pb2.HealthCheckRequest
    ) -> health_pb2.HealthCheckResponse:
        return grpc_health.check(self._service, call, request.service)

    async def _model_config(self, call: InboundCall, request: oip.ModelConfigRequest) -> oip.ModelConfigResponse:
        return await self._service.model_config(call, request.name, request.version)

    async def _statistics(self, call: InboundCall, request: oip.ModelStatisticsRequest) -> oip.ModelStatisticsResponse:
        return self._service.statistics(call, request.name, request.version)

    async def _index(self, call: InboundCall, request: oip.RepositoryIndexRequest) -> oip.RepositoryIndexResponse:
        return self._service.index(call, ready_only=request.ready)

    def _refuse_load(self, call: InboundCall) -> Message:
        self._service.server_ready(call)
        raise ShoalError(NO_REPOSITORY_CONTROL)


class _TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Authenticates by the headers on the port without client certificates: grpc would first receive a whole
    message."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method != f"/{SERVICE}/ServerLive":
            try:
                self._service.admit(InboundCall(bearer=_bearer(dict(handler_call_details.invocation_metadata or ()))))
            except ShoalError as error:
                return _refusal_handler(error.refusal, retry_after_s(error))
            except Exception as error:
                _log.exception("call_failed")
                return _refusal_handler(_internal_error(error))
        return await continuation(handler_call_details)


class _UnknownMethod(grpc.GenericRpcHandler):  # type: ignore[type-arg] # generic in its stubs only
    """The last handler, for a method that no other handler has. The library itself would refuse it without a code."""

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        asked = "a method of the Open Inference Protocol"
        found = f"{handler_call_details.method!r:.200}"
        return _refusal_handler(Refusal(Code.UNIMPLEMENTED, found, asked, "another method"))


def _refusal_handler(refusal: Refusal, retry_s: Seconds | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
    """A streaming handler for any method, the only kind that reads nothing by itself."""

    async def refuse_all(_requests: AsyncIterator[bytes], context: _Context) -> None:
        await status.abort(context, refusal, retry_s)

    return grpc.stream_stream_rpc_method_handler(refuse_all)


def _require_message(request: bytes | None) -> bytes:
    """Raises ShoalError(INVALID_ARGUMENT)."""
    if request is None:
        raise invalid("a call without a message", "a request")
    return request


def _address(context: _Context) -> str:
    """The caller's address without its port."""
    return str(context.peer()).rpartition(":")[0]


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
    *limits.server_options(MAX_MESSAGE, limits.DATA_CONNECTIONS, ping_timeout_s=limits.FORWARD.ping_timeout_s),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    # A message that is not read takes at most the window of RFC 9113, 64 KiB. The probe would widen it for each stream
    # to what the connection can carry: 20 MiB on loopback. While a message is read, its window is 1 MiB wider, which is
    # a constant of the library: at an RTT of 100 ms one stream reaches 9 MiB/s, with the probe 80 and more. A wider
    # initial window (`grpc.http2.lookahead_bytes`) would apply to 2,048 calls at once: 1 MiB of each is 2 GiB unread.
    ("grpc.http2.bdp_probe", 0),
    *compression.SERVER_OPTIONS,
)


_CERTIFIED_OPTIONS: Final = (
    *_OPTIONS,
    # Overload protection refuses streams without a code as soon as MAX_STREAMS are open here. It counts streams whose
    # end the client has already seen, and so refuses three quarters of 4,000 calls that a client makes at once. It
    # stays on where unauthenticated clients connect.
    ("grpc.http.overload_protection", 0),
)


def _internal_error(error: Exception) -> Refusal:
    return Refusal(Code.INTERNAL, type(error).__name__, "an answer", "report this with the log of the node")


def _stream_response(field: int, content: bytes) -> bytes:
    """A serialized ModelStreamInferResponse around content that is already serialized."""
    return encode_field(field, (content,))
