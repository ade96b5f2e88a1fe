"""The Open Inference Protocol over grpcio: the reference that `data_port` is compared with, in tests and benchmarks.

grpcio cannot request a client certificate and continue without one, hence a port for certificates and one for tokens.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeAlias, cast

import grpc
import grpc.aio
import structlog

from shoal.agent.dataplane import compression
from shoal.agent.dataplane.grpc_methods import NO_EXTRA_METHODS, SERVICE, GrpcMethods, Method, MethodHandler, bearer_of
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.memory import MessageMemory
from shoal.agent.dataplane.stream_resets import StreamResets, close_connection
from shoal.agent.dataplane.transport import (
    MAX_MESSAGE,
    InboundCall,
    InferenceService,
    TlsFiles,
    drop_tracebacks,
    retry_after_s,
)
from shoal.agent.dataplane.trust import Authorities, Handshake
from shoal.host.event_wait import wait_or_timeout
from shoal.host.grpc_server import CallEnded
from shoal.host.peer_certificate import PeerCertificate
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds
from shoal.wire import grpcio_status, limits
from shoal.wire.enrol import is_matching_pair

MAX_STREAMS: Final = 256
MAX_PENDING: Final = 8192
"""Calls of all connections that wait for this process to accept them, 13 KB each (measured with a burst of 20,000).
Beyond it the library answers any caller CANCELLED without a code; by its own default it does so at random from 1,000
on.
"""
LAST_ANSWER_S: Final = 0.05
"""Seconds for the last answer to be sent before its connection closes."""

_log = structlog.get_logger(__name__)
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class _Call:
    """A call of grpcio as a `GrpcCall`. Whether its message has arrived is only known once it is read."""

    message_bytes = None
    has_message = False
    has_begun = True
    """The library does not say."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.memo: dict[str, object] = {}
        self.is_received = False
        """Whether a message was read."""
        self.peer = str(context.peer())
        self.metadata: Mapping[str, str] = {
            key: str(value) for key, value in dict(context.invocation_metadata() or ()).items()
        }

    @property
    def certificate(self) -> PeerCertificate | None:
        pems = tuple(self._context.auth_context().get("x509_pem_cert") or ())
        return PeerCertificate(pems[0]) if pems else None

    def remaining_s(self) -> float | None:
        return self._context.time_remaining()

    def discard(self) -> None:
        """The library reads no message that nobody asks for."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        cast(Any, self._context).add_done_callback(lambda _: callback())

    async def read(self, max_bytes: int) -> bytes | None:
        """The library has its own limit, MAX_MESSAGE, and reads whole messages."""
        request = await self._context.read()
        self.is_received = True
        return request if isinstance(request, bytes) else None

    def write_now(self, message: bytes) -> bool:
        return False

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise CallEnded from error


class GrpcioTransport:
    """Listens on one port. Parameters as `DataPort`; authorities: None: clients send a bearer token."""

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
        self._methods = GrpcMethods(service, IngressAdmission(memory), authorities, extra_methods)
        self._address = str(HostPort(host, port))
        self._tls = tls
        self._authorities = authorities
        self._server: grpc.aio.Server | None = None
        self._inside = 0
        self._resets = StreamResets()
        self._empty = asyncio.Event()
        self._leaving = False

    @property
    def admission(self) -> IngressAdmission:
        return self._methods.admission

    @property
    def is_busy(self) -> bool:
        """Whether a call is inside that `stop` waits for."""
        return self._inside > 0

    async def start(self) -> int:
        guards = (_TokenGuard(self._service),) if self._authorities is None else ()
        # No `maximum_concurrent_rpcs`: one caller with many calls would block all others. IngressAdmission limits
        # calls by caller.
        server = grpc.aio.server(options=_OPTIONS if guards else _CERTIFIED_OPTIONS, interceptors=guards)
        server.add_generic_rpc_handlers((_AllMethods(self._handler),))
        try:
            port = server.add_secure_port(self._address, self._credentials())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._address}: {error}") from error
        await server.start()
        self._server = server
        return port

    async def stop(self, grace_s: Seconds) -> None:
        """Refuse new calls until those inside have ended or `grace_s` is over, and close.

        The library's own stop answers CANCELLED to calls that peers sent before they learned of it (grpc issue 41785),
        and clients do not retry those.
        """
        self._leaving = True
        self._empty.clear()
        if self._inside:
            await wait_or_timeout(self._empty, grace_s)
        await asyncio.sleep(LAST_ANSWER_S)
        if self._server is not None:
            await self._server.stop(0.0)

    def _handler(self, path: str) -> "grpc.RpcMethodHandler[Any, Any]":
        """A streaming handler, though the method may be unary for its caller: only a stream lets this process read a
        message when a slot is free."""
        method = self._methods.find(path)

        async def answer(_requests: AsyncIterator[bytes], context: _Context) -> bytes | None:
            return await self._answer(method, context)

        if method.is_unary:
            return grpc.stream_unary_rpc_method_handler(answer)
        return grpc.stream_stream_rpc_method_handler(answer)

    async def _answer(self, method: MethodHandler, context: _Context) -> bytes | None:
        call = _Call(context)
        was_reset = False
        try:
            self._enter(context, long_lived=method.is_long_lived)
            return await method.answer(call)
        except CallEnded as error:
            raise asyncio.CancelledError from error
        except ShoalError as error:
            call.is_received = True
            drop_tracebacks(error)
            return await grpcio_status.abort(context, error.refusal, retry_after_s(error))
        except asyncio.CancelledError:
            was_reset = not call.is_received
            raise
        finally:
            is_storm = self._resets.record_stream(call.peer, was_reset=was_reset)
            if is_storm and not self._methods.is_front(call.certificate) and close_connection(call.peer):
                _log.warning(
                    "client_connection_closed",
                    peer=call.peer,
                    reason="most of its calls were reset before they arrived",
                )

    def _enter(self, context: _Context, *, long_lived: bool) -> None:
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
        certificate, key, authority = _read(self._tls)
        believed = authority + b"\n" + handshake.pem if handshake is not None else None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], believed)


def _read(tls: TlsFiles) -> tuple[bytes, bytes, bytes]:
    """(certificate, key, CAs). Raises OSError, also while the files are only half replaced."""
    certificate, key = tls.certificate.read_bytes(), tls.key.read_bytes()
    try:
        whole = is_matching_pair(certificate, key)
    except ValueError as cause:
        raise OSError(errno.EAGAIN, f"{tls.certificate.name} or {tls.key.name} is unreadable") from cause
    if not whole:
        raise OSError(errno.EAGAIN, f"{tls.key.name} is not the key of {tls.certificate.name}")
    return certificate, key, tls.authority.read_bytes()


class _AllMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg] # generic in its stubs only
    """Every method, unknown ones too: the library itself would refuse those without a code."""

    def __init__(self, handler_of: Callable[[str], "grpc.RpcMethodHandler[Any, Any]"]) -> None:
        self._handler_of = handler_of

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        return self._handler_of(str(handler_call_details.method))


class _TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Authenticates by the headers on the port without client certificates: grpc would first receive a whole
    message."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method != f"/{SERVICE}/ServerLive":
            said = {key: str(value) for key, value in handler_call_details.invocation_metadata or ()}
            try:
                self._service.authenticate(InboundCall(bearer=bearer_of(said)))
            except ShoalError as error:
                return _refusal_handler(error.refusal, retry_after_s(error))
            except Exception as error:
                _log.exception("call_failed")
                found = Refusal(
                    Code.INTERNAL, type(error).__name__, "an answer", "report this with the log of the node"
                )
                return _refusal_handler(found)
        return await continuation(handler_call_details)


def _refusal_handler(refusal: Refusal, retry_s: Seconds | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
    """A streaming handler for any method, the only kind that reads nothing by itself."""

    async def refuse_all(_requests: AsyncIterator[bytes], context: _Context) -> None:
        await grpcio_status.abort(context, refusal, retry_s)

    return grpc.stream_stream_rpc_method_handler(refuse_all)


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
