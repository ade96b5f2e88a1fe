"""Feeds behind a URL: HTTPS to public hosts, and to hosts named on the command line. No credentials, no redirects."""

import asyncio
import http.client
import socket
import ssl
from collections.abc import Collection
from contextlib import closing, suppress
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

from shoal.coordinator.signals.files import MAX_FEED_BYTES, decode_feed, unreachable_error
from shoal.host.egress_guard import refusal_of_address
from shoal.types.codes import Code, ShoalError, refuse

TIMEOUT_S: Final = 10.0
_PLAIN: Final = "%/:=&?~#+!$,;'@()*[]"
"""Characters of a path or query that are sent as they are."""


class FeedUrls:
    """hosts: names or addresses that may be inside this network, and may use plain HTTP.

    tls: which authorities to trust. [default: the system's]
    """

    def __init__(self, hosts: Collection[str] = (), tls: ssl.SSLContext | None = None) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._tls = tls or ssl.create_default_context()

    async def read(self, source: str) -> str:
        """Raises ShoalError(SOURCE_DENIED | SOURCE_UNREACHABLE | SIGNAL_INVALID)."""
        url = self._parse_url(source)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connected = await self._dial(url)
                with connected.dup() as same:
                    try:
                        return decode_feed(await asyncio.to_thread(self._get, connected, url, source), source)
                    finally:
                        with suppress(OSError):
                            same.shutdown(socket.SHUT_RDWR)  # the thread ends, whatever the server has yet to send
        except TimeoutError as cause:
            raise unreachable_error(f"{source:.200} took more than {TIMEOUT_S:g}s") from cause
        except http.client.InvalidURL as cause:
            raise _denial(f"{source:.200}", "a URL", "correct it") from cause
        except (http.client.HTTPException, OSError, ValueError) as cause:
            raise unreachable_error(f"{source:.200}: {type(cause).__name__}: {cause!s:.120}") from cause

    async def _dial(self, url: SplitResult) -> socket.socket:
        """Connects to the first address that answers. Checks the very address that is connected to, so that a name that
        resolves differently later changes nothing."""
        loop, host = asyncio.get_running_loop(), url.hostname or ""
        remedy = f"start the coordinator with --signal-host {host:.120} if it is meant"
        failure = OSError("no address")
        for family, kind, proto, _, address in await loop.getaddrinfo(host, _port(url), type=socket.SOCK_STREAM):
            if (refusal := refusal_of_address(host, str(address[0]), self._hosts, remedy)) is not None:
                raise ShoalError(refusal)
            dialled = socket.socket(family, kind, proto)
            try:
                dialled.setblocking(False)
                await loop.sock_connect(dialled, address)
                dialled.settimeout(TIMEOUT_S)
                return dialled
            except OSError as cause:
                dialled.close()
                failure = cause
            except BaseException:
                dialled.close()
                raise
        raise failure

    def _get(self, connected: socket.socket, url: SplitResult, source: str) -> bytes:
        """The body, of which at most one byte more than a feed may have. Blocking; closes the connection. Raises
        ShoalError, OSError, HTTPException."""
        # A connection for each reading, so that nothing carries over to the next. It knows no proxy and no cookie, and
        # unpacks nothing: a decompression bomb stays small.
        host, port, is_secure = url.hostname or "", _port(url), url.scheme == "https"
        with closing(
            http.client.HTTPSConnection(host, port, context=self._tls)
            if is_secure
            else http.client.HTTPConnection(host, port)
        ) as connection:
            connection.auto_open = 0  # never another connection than this one, whose address was checked
            connection.sock = connected
            if is_secure:
                connection.sock = self._tls.wrap_socket(connected, server_hostname=host)
            target = quote(url.path or "/", _PLAIN) + (f"?{quote(url.query, _PLAIN)}" if url.query else "")
            connection.request("GET", target, headers={"Accept": "*/*"})
            answer = connection.getresponse()
            if 300 <= answer.status < 400:
                raise _denial(f"{source:.200} leads elsewhere", "a URL that answers itself", "name where it leads")
            if answer.status != 200:
                raise unreachable_error(f"{source:.200} answers with status {answer.status}")
            data = answer.read(MAX_FEED_BYTES + 1)
            if len(data) <= MAX_FEED_BYTES and answer.length:
                raise http.client.IncompleteRead(data, answer.length)
            return data

    def _parse_url(self, source: str) -> SplitResult:
        try:
            url = urlsplit(source)
            _port(url)
        except ValueError as cause:
            raise _denial(f"{source:.200}: {cause}", "a URL", "correct it") from cause
        schemes = ("https", "http") if url.hostname in self._hosts else ("https",)
        if url.scheme not in schemes or not url.hostname:
            raise _denial(f"{source:.200}", f"{' or '.join(schemes)}://", "serve the feed over HTTPS")
        if url.username is not None or url.password is not None:
            raise _denial("a URL with a name or password", "none in a document", "fetch it to a file, and name that")
        return url


def _port(url: SplitResult) -> int:
    """Raises ValueError."""
    return url.port or (http.client.HTTPS_PORT if url.scheme == "https" else http.client.HTTP_PORT)


def _denial(found: str, asked: str, remedy: str) -> ShoalError:
    return refuse(Code.SOURCE_DENIED, found, asked, remedy)
