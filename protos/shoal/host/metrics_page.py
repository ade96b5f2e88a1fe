"""An HTTPS page for scrapers: `/metrics` of every server, for readers of the whole region only.

Metrics name every tenant's workloads, so a certificate of the region is not enough: its role must allow reading. The
page has a thread with an event loop of its own, so that scrapers and strangers take no turn of the server's loop.
"""

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from shoal.host.http_server import HttpExchange, HttpLimits, HttpServer
from shoal.types.codes import ShoalError

MAX_CONNECTIONS: Final = 16
MAX_CONNECTIONS_PER_ADDRESS: Final = 8
HANDSHAKE_S: Final = 5.0
"""Limit for one connection to show a certificate."""
TIMEOUT_S: Final = 10.0
"""Limit for its request and answer together."""

_BACKLOG: Final = 4096
"""The kernel drops connections beyond a full queue, and a scraper retries only after 1, 3, 7, 15.. seconds."""

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


def late_page(make: Callable[[], WsgiApp]) -> WsgiApp:
    """The page that `make` gives, made with the first scrape: Prometheus's library brings an HTTP server, 4 MB that a
    process does without while nobody reads its metrics. `make` imports it."""
    page = cache(make)
    return lambda environ, start_response: page()(environ, start_response)


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

    def admit(self, peer: Mapping[str, Any]) -> None:
        """peer: the client's certificate as `getpeercert()` of the ssl module tells it. Raises ShoalError where its
        holder may not read."""
        ...


def serve(page: WsgiApp, host: str, port: int, guard: MetricsAccess) -> int:
    """Serves in a daemon thread until the process ends; returns the bound port. Raises OSError."""
    bound = Future[int]()

    def run() -> None:
        try:
            asyncio.run(_Page(page, guard).serve(host, port, bound))
        except OSError as error:
            bound.set_exception(error)  # raised before it was bound: nothing ends it afterwards

    threading.Thread(target=run, name="metrics", daemon=True).start()
    return bound.result()


class _Page:
    def __init__(self, page: WsgiApp, guard: MetricsAccess) -> None:
        self._page = page
        self._guard = guard
        self._context: tuple[tuple[float, ...], ssl.SSLContext] | None = None
        """With the files' modification times, so that the keys are read only when a file has changed."""

    async def serve(self, host: str, port: int, bound: Future[int]) -> None:
        """Never returns. bound: gets the port. Raises OSError if there is none."""
        limits = HttpLimits(
            connections=MAX_CONNECTIONS,
            connections_per_address=MAX_CONNECTIONS_PER_ADDRESS,
            handshake_s=HANDSHAKE_S,
            head_s=TIMEOUT_S,
            stall_s=TIMEOUT_S,
            total_s=TIMEOUT_S,
            backlog=_BACKLOG,
        )
        server = HttpServer(self._answer, limits, self._current_context)
        bound.set_result(await server.start(host, port))
        await asyncio.Event().wait()

    def _current_context(self) -> ssl.SSLContext:
        """Raises OSError, ssl.SSLError."""
        stamp = tuple(each.stat().st_mtime for each in (self._guard.certificate, self._guard.key, self._guard.ca))
        known = self._context
        if known is None or known[0] != stamp:
            known = self._context = stamp, self._guard.context()
        return known[1]

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            self._guard.admit(exchange.peer)
        except ShoalError as error:
            plain = {"content-type": "text/plain; charset=utf-8"}
            await exchange.respond(403, plain, f"{error.refusal}\n".encode())
            return
        path, _, query = exchange.target.partition("?")
        environ = {"REQUEST_METHOD": exchange.method, "PATH_INFO": path, "QUERY_STRING": query}
        environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in exchange.headers.items()}
        told = list[tuple[str, list[tuple[str, str]]]]()
        body = b"".join(self._page(environ, lambda status, headers: told.append((status, headers))))
        status, headers = told[0]
        await exchange.respond(int(status[:3]), dict(headers), body)
