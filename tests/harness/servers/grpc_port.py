"""This project's gRPC server on a port of its own."""

import ssl
from collections.abc import Callable

from shoal.host.connections import Connections
from shoal.host.grpc_server import GrpcServer, GrpcServerLimits, ServerMethod
from shoal.host.tls_listener import TlsListener


class GrpcPort:
    def __init__(
        self, find: Callable[[str], ServerMethod], limits: GrpcServerLimits, context: Callable[[], ssl.SSLContext]
    ) -> None:
        connections = Connections(64, 64)
        self._server = GrpcServer(find, limits, connections)
        self._listener = TlsListener(connections, context, {"h2": self._server.session}, limits.handshake_s)

    async def start(self) -> int:
        """The port of 127.0.0.1 it listens on."""
        return await self._listener.start("127.0.0.1", 0, backlog=100)

    async def stop(self, grace_s: float) -> None:
        self._listener.close()
        await self._server.stop(grace_s)
