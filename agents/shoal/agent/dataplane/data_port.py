"""The data port: gRPC and REST of the Open Inference Protocol on one TLS port. REST comes over HTTP/1.1 or HTTP/2.

A client certificate is asked for, and not demanded: without one a bearer token counts.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from shoal.agent.dataplane.grpc_methods import (
    NO_EXTRA_METHODS,
    SHARED_FIELDS,
    GrpcMethods,
    Method,
    MethodHandler,
    call_failure,
)
from shoal.agent.dataplane.http1 import Http1Server, head_of
from shoal.agent.dataplane.http2 import RestStreams
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.memory import MessageMemory
from shoal.agent.dataplane.rest import ClientIdentity, RestMethods, refusal_response
from shoal.agent.dataplane.tls_context import ServerTls
from shoal.agent.dataplane.transport import MAX_MESSAGE, InferenceService, TlsFiles
from shoal.agent.dataplane.trust import Authorities
from shoal.host.connections import Connections
from shoal.host.grpc_server import GrpcServer, GrpcServerLimits, ServerCall, ServerMethod
from shoal.host.peer_certificate import PeerCertificate
from shoal.host.tls_listener import TlsListener
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Seconds
from shoal.wire import limits

MAX_STREAMS: Final = 256
"""Open calls of one connection."""
CONNECTIONS_PER_ADDRESS: Final = limits.DATA_CONNECTIONS // 2
"""Clients behind one address (of IPv6, one /64) share this limit."""
_GRPC_LIMITS: Final = GrpcServerLimits(
    streams=MAX_STREAMS,
    message_bytes=MAX_MESSAGE,
    handshake_s=limits.HANDSHAKE_S,
    ping_interval_s=limits.KEEPALIVE_S,
    ping_timeout_s=limits.FORWARD.ping_timeout_s,
)
_NO_TLS: Final = Refusal(Code.TLS_REQUIRED, "a request without TLS", "HTTPS: this port takes TLS alone", "use https://")


class DataPort:
    """Listens on one port.

    - `authorities`: CAs of the certificates that clients may show.
    - `extra_methods`: further gRPC methods to answer, by service and name.
    - `memory`: memory accounting of the process.
    """

    def __init__(
        self,
        service: InferenceService,
        host: str,
        port: int,
        tls: TlsFiles,
        authorities: Authorities,
        extra_methods: Mapping[str, Mapping[str, Method]] = NO_EXTRA_METHODS,
        memory: MessageMemory | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._authorities = authorities
        self.admission = IngressAdmission(memory)
        self._grpc_methods = GrpcMethods(service, self.admission, authorities, extra_methods)
        self._by_path = {path: _server_method(handler) for path, handler in self._grpc_methods.handlers.items()}
        self._rest_methods = rest_methods = RestMethods(service, self.admission)
        self.connections = connections = Connections(limits.DATA_CONNECTIONS, CONNECTIONS_PER_ADDRESS)
        rest_streams = RestStreams(rest_methods, self._identify)
        is_front = self._grpc_methods.is_front
        self._http2 = GrpcServer(self._find, _GRPC_LIMITS, connections, is_front, rest_streams.serve, SHARED_FIELDS)
        self._http1 = Http1Server(rest_methods, connections, self._identify)
        rest = self._http1.protocol
        protocols = {"http/1.1": rest, None: rest, "h2": self._http2.session}
        self._tls = ServerTls(tls, ("h2", "http/1.1"), authorities)
        self.listener = TlsListener(connections, self._tls.context, protocols, limits.HANDSHAKE_S, _plaintext_answer())

    @property
    def is_busy(self) -> bool:
        """Whether a call is inside that `stop` waits for."""
        return self._http2.is_busy or bool(self._http1.tasks)

    async def start(self) -> int:
        """Listen; return the port. Raises OSError."""
        self._tls.context()  # raises OSError now, not at the first handshake
        return await self.listener.start(self._host, self._port, backlog=limits.DATA_CONNECTIONS, reuse_port=True)

    async def stop(self, grace_s: Seconds) -> None:
        """Accept nothing new, and return when the calls inside have ended, or after `grace_s`."""
        self.listener.close()
        await asyncio.gather(self._http2.stop(grace_s), self._http1.stop(grace_s))
        self._rest_methods.close()

    def _find(self, path: str) -> ServerMethod:
        return self._by_path.get(path) or _server_method(self._grpc_methods.find(path))

    def _identify(self, certificate: PeerCertificate | None) -> ClientIdentity:
        if certificate is None:
            return ClientIdentity()
        try:
            return ClientIdentity(self._authorities.identity(certificate))
        except ShoalError as error:
            return ClientIdentity(error=error)


def _server_method(handler: MethodHandler) -> ServerMethod:
    """The method, with its refusals as statuses of gRPC."""

    async def answer_call(call: ServerCall) -> bytes | None:
        try:
            return await handler.answer(call)
        except ShoalError as error:
            raise call_failure(error) from None

    return ServerMethod(answer_call, handler.is_long_lived, handler.answer_now, handler.begin_read)


def _plaintext_answer() -> bytes:
    """What an HTTP client without TLS is told."""
    response = refusal_response(_NO_TLS, at=HTTPStatus.BAD_REQUEST)
    headers = {"content-length": str(len(response.body)), **response.headers, "connection": "close"}
    return head_of(response.status, headers) + response.body
