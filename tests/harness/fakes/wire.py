"""The transport of a connection that is no socket: it keeps what is written."""

import asyncio
from typing import Any

from shoal.host.connections import Connections
from shoal.host.grpc_server import GrpcServer, GrpcServerLimits, GrpcSession, ServerMethod
from shoal.http2 import frames


class Wire(asyncio.Transport):
    """Of a client without a certificate."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None:
        raise AssertionError("the connection is given up")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "ssl_object": self}.get(name, default)

    def getpeercert(self, *, binary_form: bool) -> bytes | None:
        return None

    def window_updates(self) -> int:
        """Bytes by which the windows of streams were widened."""
        at, found = 0, 0
        while at < len(self.sent):
            size, kind = int.from_bytes(self.sent[at : at + 3], "big"), self.sent[at + 3]
            if kind == frames.WINDOW_UPDATE and any(self.sent[at + 5 : at + 9]):
                found += int.from_bytes(self.sent[at + 9 : at + 13], "big")
            at += frames.HEAD_BYTES + size
        return found

    def session(self, method: ServerMethod, limits: GrpcServerLimits) -> GrpcSession:
        """Of a server whose calls are all of this method, once the client has begun."""
        connections = Connections(8, 8)
        place = connections.add("127.0.0.1", lambda: None)
        assert place is not None
        found = GrpcSession(GrpcServer(lambda _: method, limits, connections), place)
        found.connection_made(self)
        found.data_received(frames.PREFACE + frames.settings(()))
        return found
