"""An HTTPS page for scrapers: `/metrics` of every server, for readers of the whole region only.

Metrics name every tenant's workloads, so a certificate of the region is not enough: its role must allow reading. Each
connection has its own thread from the handshake on, so that a silent one does not block others.
"""

import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from typing import Any, Final, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from shoal.host.connections import Connection, Connections
from shoal.types.codes import ShoalError

MAX_CONNECTIONS: Final = 16
MAX_CONNECTIONS_PER_ADDRESS: Final = 8
HANDSHAKE_S: Final = 5.0
"""Limit for one connection to show a certificate."""
TIMEOUT_S: Final = 10.0
"""Limit for its request and answer together."""

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


class MetricsAccess(Protocol):
    """Decides who may read the page. Servers use the implementation in `shoal.wire.metrics_access`."""

    @property
    def certificate(self) -> Path:
        """The server's certificate (PEM). This file, `key` and `ca` are read again when they change, because they are
        renewed."""
        ...

    @property
    def key(self) -> Path: ...

    @property
    def ca(self) -> Path: ...

    def context(self) -> ssl.SSLContext: ...

    def admit(self, der: bytes) -> None:
        """Raises ShoalError where the holder of this client certificate (DER) may not read."""
        ...


def serve(page: WsgiApp, host: str, port: int, guard: MetricsAccess) -> int:
    """Serves in daemon threads until the process ends; returns the bound port. Raises OSError."""
    server = _Server(page, host, port, guard)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)


class _Handler(WSGIRequestHandler):
    def get_environ(self) -> dict[str, Any]:
        return super().get_environ() | {"shoal.peer": self.connection.getpeercert(binary_form=True)}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Logs nothing: input of unauthenticated callers must not reach the log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 4096
    """The kernel drops connections beyond a full queue, and a scraper retries only after 1, 3, 7, 15.. seconds."""

    def __init__(self, page: WsgiApp, host: str, port: int, guard: MetricsAccess) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self._guard = guard
        self._context: tuple[tuple[float, ...], ssl.SSLContext] | None = None
        """With the files' modification times, so that the keys are read only when a file has changed."""
        self._lock = threading.Lock()
        self._connections = Connections(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS, replaces_own=True)
        self._of_socket: dict[Any, tuple[Connection, socket]] = {}
        """By accepted socket: its entry in `_connections`, and a duplicate by which it can be shut down."""
        super().__init__((host, port), _Handler)
        self.set_app(self._with_access_check(page))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        try:
            handle: socket = request.dup()
        except OSError:
            return False  # no free descriptor
        with self._lock:
            place = self._connections.add(client_address[0], lambda: _hang_up(handle))
            if place is not None:
                self._of_socket[request] = place, handle
                return True
        handle.close()
        return False

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                place, handle = self._of_socket.pop(request)
                self._connections.remove(place)
                handle.close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        place, handle = self._of_socket[request]
        with self._deadline(handle, request, HANDSHAKE_S):
            secured = self._current_context().wrap_socket(request, server_side=True)
        with secured, self._deadline(handle, secured, TIMEOUT_S):
            with self._lock:
                self._connections.set_busy(place)  # it showed a certificate: no newcomer may close it
            super().finish_request(secured, client_address)

    @contextmanager
    def _deadline(self, handle: socket, connection: Any, limit_s: float) -> Iterator[None]:
        """Closes the connection after `limit_s`. Without it, a client that sends a byte now and then would never exceed
        the timeout of a single read."""
        connection.settimeout(limit_s)
        end = threading.Timer(limit_s, _hang_up, (handle,))
        end.daemon = True
        end.start()
        try:
            yield
        finally:
            end.cancel()

    def _current_context(self) -> ssl.SSLContext:
        """Raises OSError, ssl.SSLError."""
        stamp = tuple(each.stat().st_mtime for each in (self._guard.certificate, self._guard.key, self._guard.ca))
        known = self._context
        if known is None or known[0] != stamp:
            known = self._context = stamp, self._guard.context()
        return known[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing: a failed handshake, or a scraper that hangs up, is visible at the client."""

    def _with_access_check(self, page: WsgiApp) -> WsgiApp:
        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            try:
                self._guard.admit(environ["shoal.peer"])
            except ShoalError as error:
                start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
                return [f"{error.refusal}\n".encode()]
            return page(environ, start_response)

        return answer


def _hang_up(connection: socket) -> None:
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)
