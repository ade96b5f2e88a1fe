"""Feeds behind a URL: HTTPS to public hosts, and to hosts named on the command line. No credentials, no redirects."""

import socket
import ssl
from collections.abc import Collection
from typing import Any, Final

import aiohttp
from yarl import URL

from shoal.coordinator.signals.files import MAX_FEED_BYTES, decode_feed, unreachable_error
from shoal.host.egress_guard import refusal_of_address
from shoal.types.codes import Code, ShoalError, refuse

TIMEOUT_S: Final = 10.0


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
        host = url.host or ""

        def dial(info: tuple[Any, ...]) -> socket.socket:
            """Checks the very address that is connected to, so that a name that resolves differently later changes
            nothing."""
            family, kind, proto, _, address = info
            remedy = f"start the coordinator with --signal-host {host:.120} if it is meant"
            if (refusal := refusal_of_address(host, str(address[0]), self._hosts, remedy)) is not None:
                raise ShoalError(refusal)
            return socket.socket(family, kind, proto)

        connector = aiohttp.TCPConnector(ssl=self._tls, socket_factory=dial, happy_eyeballs_delay=None)
        # A session for each reading, so that nothing (cookies, connections) carries over to the next.
        limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=limit,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    headers={"Accept-Encoding": "identity"},
                    auto_decompress=False,  # so that a decompression bomb stays small
                ) as session,
                session.get(url, allow_redirects=False) as answer,
            ):
                if 300 <= answer.status < 400:
                    raise _denial(f"{source:.200} leads elsewhere", "a URL that answers itself", "name where it leads")
                if answer.status != 200:
                    raise unreachable_error(f"{source:.200} answers with status {answer.status}")
                data = await _body(answer.content)
                await connector.close(abort_ssl=True)  # do not wait for a server that has more to send
                return decode_feed(data, source)
        except TimeoutError as cause:
            raise unreachable_error(f"{source:.200} took more than {TIMEOUT_S:g}s") from cause
        except aiohttp.InvalidURL as cause:
            raise _denial(f"{source:.200}", "a URL", "correct it") from cause
        except (aiohttp.ClientError, OSError, ValueError) as cause:
            raise unreachable_error(f"{source:.200}: {type(cause).__name__}: {cause!s:.120}") from cause

    def _parse_url(self, source: str) -> URL:
        try:
            url = URL(source)
        except ValueError as cause:
            raise _denial(f"{source:.200}: {cause}", "a URL", "correct it") from cause
        host = (url.host or "").lower()
        schemes = ("https", "http") if host in self._hosts else ("https",)
        if url.scheme not in schemes or not host:
            raise _denial(f"{source:.200}", f"{' or '.join(schemes)}://", "serve the feed over HTTPS")
        if url.user is not None or url.password is not None:
            raise _denial("a URL with a name or password", "none in a document", "fetch it to a file, and name that")
        return url


def _denial(found: str, asked: str, remedy: str) -> ShoalError:
    return refuse(Code.SOURCE_DENIED, found, asked, remedy)


async def _body(stream: aiohttp.StreamReader) -> bytes:
    data = bytearray()
    async for chunk in stream.iter_any():
        data += chunk
        if len(data) > MAX_FEED_BYTES:
            break
    return bytes(data)
