"""The Open Inference Protocol over gRPC, on `shoal.host.grpc_server`."""

import ssl
from collections.abc import Mapping
from typing import Final

from shoal.agent.dataplane.grpc_methods import NO_EXTRA_METHODS, GrpcMethods, Method, MethodHandler
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.memory import MessageMemory
from shoal.agent.dataplane.tls_context import ServerTls
from shoal.agent.dataplane.transport import MAX_MESSAGE, InferenceService, TlsFiles, retry_after_s
from shoal.agent.dataplane.trust import Authorities
from shoal.host.connections import Connections
from shoal.host.grpc_server import CallFailure, GrpcServer, GrpcServerLimits, ServerCall, ServerMethod
from shoal.types.codes import ShoalError
from shoal.types.units import Seconds
from shoal.wire import limits, status

MAX_STREAMS: Final = 256
"""Open calls of one connection."""
CONNECTIONS_PER_ADDRESS: Final = limits.DATA_CONNECTIONS // 2
"""Clients behind one address (of IPv6, one /64) share this limit."""
_LIMITS: Final = GrpcServerLimits(
    streams=MAX_STREAMS,
    message_bytes=MAX_MESSAGE,
    handshake_s=limits.HANDSHAKE_S,
    ping_interval_s=limits.KEEPALIVE_S,
    ping_timeout_s=limits.FORWARD.ping_timeout_s,
    backlog=limits.DATA_CONNECTIONS,
)


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
        self._host = host
        self._port = port
        self._methods = GrpcMethods(service, authorities, extra_methods, memory)
        self._by_path = {path: _server_method(handler) for path, handler in self._methods.handlers.items()}
        asks = ssl.CERT_NONE if authorities is None else ssl.CERT_REQUIRED
        self._tls = ServerTls(tls, ("h2",), asks, authorities)
        self._server = GrpcServer(
            self._find,
            _LIMITS,
            Connections(limits.DATA_CONNECTIONS, CONNECTIONS_PER_ADDRESS),
            self._tls.context,
            may_reset=lambda call: self._methods.is_front(call.certificate),
        )

    @property
    def admission(self) -> IngressAdmission:
        return self._methods.admission

    @property
    def is_busy(self) -> bool:
        """Whether a call is inside that `leave` waits for."""
        return self._server.is_busy

    async def start(self) -> int:
        self._tls.context()  # raises OSError now, not at the first handshake
        return await self._server.start(self._host, self._port)

    async def stop(self, grace_s: Seconds) -> None:
        await self._server.stop(grace_s)

    async def leave(self, grace_s: Seconds) -> None:
        await self._server.stop(grace_s)

    def _find(self, path: str) -> ServerMethod:
        return self._by_path.get(path) or _server_method(self._methods.find(path))


def _server_method(handler: MethodHandler) -> ServerMethod:
    """The method, with its refusals as statuses of gRPC."""

    async def answer_call(call: ServerCall) -> bytes | None:
        try:
            return await handler.answer(call)
        except ShoalError as error:
            refusal = error.refusal
            code = status.grpc_status(refusal.code)
            raise CallFailure(code, str(refusal), status.trailers(refusal, retry_after_s(error))) from None

    return ServerMethod(answer_call, handler.is_long_lived)
