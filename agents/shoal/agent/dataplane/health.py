"""Liveness and readiness over plain HTTP on a separate port, for a kubelet or a container's health check.

Clients cannot exhaust its connections: each closes after its one answer or a timeout, and a new one replaces the
oldest. It needs no authentication, because it reveals only two booleans of the whole front and nothing of any model.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Final

from shoal.host import file_descriptors
from shoal.host.connections import Connection, Connections
from shoal.types.units import Seconds

MAX_CONNECTIONS: Final = 64
MAX_HEAD: Final = 4 * 2**10
TIMEOUT_S: Final = 5.0
"""Seconds for one connection in total, as long as probes wait by default."""


class HealthPort:
    """Listens on one port."""

    def __init__(self, is_live: Callable[[], bool], is_ready: Callable[[], bool], host: str, port: int) -> None:
        self._answers = {"/v2/health/live": ("live", is_live), "/v2/health/ready": ("ready", is_ready)}
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections = Connections(MAX_CONNECTIONS, MAX_CONNECTIONS, replaces_own=True)

    async def start(self) -> int:
        self._server = await asyncio.start_server(
            self._serve,
            self._host,
            self._port,
            reuse_port=True,
            limit=MAX_HEAD,
            backlog=file_descriptors.ACCEPTS_PER_TURN,
        )
        file_descriptors.set_backlog(self._server, MAX_CONNECTIONS)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, grace_s: Seconds) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str(writer.get_extra_info("peername", ("",))[0])
        place: Connection | None = self._connections.add(address, writer.transport.abort)
        if place is None:
            writer.transport.abort()
            return
        try:
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._connections.remove(place)
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "GET or HEAD"}, method)
        if path not in self._answers:
            return _response(HTTPStatus.NOT_FOUND, {"error": f"one of {', '.join(self._answers)}"}, method)
        name, ask = self._answers[path]
        is_so = ask()
        return _response(HTTPStatus.OK if is_so else HTTPStatus.SERVICE_UNAVAILABLE, {name: is_so}, method)


def _response(status: HTTPStatus, document: dict[str, bool] | dict[str, str], method: str) -> bytes:
    body = json.dumps(document).encode()
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(("allow: GET, HEAD",) if status is HTTPStatus.METHOD_NOT_ALLOWED else ()),
        "",
        "",
    )
    return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else body)
