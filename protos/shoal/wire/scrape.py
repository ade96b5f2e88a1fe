"""An HTTPS page that a scraper reads: `/metrics` of every server. Only for who may look at the whole region.

Metrics name every tenant's workloads, so a certificate of the region is not enough: its role must be one that reads.
Each connection has a thread of its own from its handshake on, so that one that stays silent holds up nobody.
"""

import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from shoal.types.codes import Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.identity import check_validity, identity_of_der, require

READERS: Final = frozenset({Role.OPERATOR, Role.VIEWER, Role.COORDINATOR})
MAX_CONNECTIONS: Final = 16
MAX_CONNECTIONS_PER_ADDRESS: Final = 8
TIMEOUT_S: Final = 10.0
"""For one connection in all: handshake, request and answer."""

Page = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


@dataclass(frozen=True, slots=True)
class Guard:
    """certificate, key, ca: PEM files of the server, read again for each connection, since they are renewed.

    revoked: why a certificate of this serial is refused, if it is.
    """

    region: str
    certificate: Path
    key: Path
    ca: Path
    wall: Callable[[], Wall]
    revoked: Callable[[str], Refusal | None] = lambda serial: None

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def admit(self, der: bytes) -> None:
        """Raises ShoalError(CERT_* | REGION_MISMATCH | ROLE_DENIED)."""
        identity = identity_of_der(der)
        if (refusal := check_validity(identity, self.wall())) is not None:
            raise ShoalError(refusal)
        if (refusal := self.revoked(identity.serial)) is not None:
            raise ShoalError(refusal)
        require(identity, region=self.region, roles=READERS)


def serve(page: Page, host: str, port: int, guard: Guard) -> int:
    """Serves in daemon threads until the process ends; returns the bound port. Raises OSError."""
    server = _Server(page, host, port, guard)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)


class _Handler(WSGIRequestHandler):
    def get_environ(self) -> dict[str, Any]:
        return super().get_environ() | {"shoal.peer": self.connection.getpeercert(binary_form=True)}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Nothing: what strangers send is not for the log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = (
        1024  # of a full queue the kernel drops: a scraper's next try comes 1, 3, 7, 15... seconds later
    )

    def __init__(self, page: Page, host: str, port: int, guard: Guard) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self._guard = guard
        self._lock = threading.Lock()
        self._of_address: Counter[str] = Counter()
        super().__init__((host, port), _Handler)
        self.set_app(self._guarded(page))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            full = self._of_address.total() >= MAX_CONNECTIONS
            if full or self._of_address[client_address[0]] >= MAX_CONNECTIONS_PER_ADDRESS:
                return False
            self._of_address[client_address[0]] += 1
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._of_address[client_address[0]] -= 1

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(TIMEOUT_S)
        # a byte now and then would keep each read in its time
        watched = request.dup()
        end = threading.Timer(TIMEOUT_S, _hang_up, (watched,))
        end.daemon = True
        end.start()
        try:
            with self._guard.context().wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)
        finally:
            end.cancel()
            watched.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handshake that failed, a scraper that left: theirs to see."""

    def _guarded(self, page: Page) -> Page:
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
