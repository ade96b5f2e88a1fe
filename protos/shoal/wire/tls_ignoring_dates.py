"""A gRPC channel to a server whose CA is pinned, without checking certificate dates.

A device that boots in 1970, or that was off for long, cannot check dates, yet must reach the enrolment port to learn
the time. gRPC checks dates by the system's clock and has no option against that. So this module makes the TLS
connection itself, and gRPC uses it over a Unix socket in a private folder. Use it only where the pinned CA alone is
enough.
"""

import asyncio
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc

from shoal.host.unix_sockets import socket_address
from shoal.types.address import HostPort
from shoal.wire.limits import channel_options
from shoal.wire.tls_files import NO_CHECK_TIME

CONNECT_S: Final = 15.0
_CHUNK: Final = 64 * 2**10


def context_ignoring_dates(ca_pem: bytes) -> ssl.SSLContext:
    """Checks chains and names, but not dates."""
    context = ssl.create_default_context(cadata=ca_pem.decode())
    context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | NO_CHECK_TIME)
    context.set_alpn_protocols(["h2"])
    return context


@contextmanager
def channel_ignoring_dates(address: str, ca_pem: bytes, server_name: str, max_bytes: int) -> Iterator[grpc.Channel]:
    """A channel to `address` (host:port). Blocking; a thread relays the bytes.

    server_name: the DNS name that the server must show. Raises OSError (including ssl.SSLError) when the server cannot
    be reached or its certificate is not of that CA.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        path = Path(folder) / "enrol.sock"
        carrier = _TlsBridge(address, context_ignoring_dates(ca_pem), server_name, path)
        try:
            carrier.start()
            options = (*channel_options(max_bytes), ("grpc.default_authority", server_name))
            with grpc.insecure_channel(f"unix:{path}", options) as channel:
                yield channel
        finally:
            carrier.stop()


class _TlsBridge:
    """One TLS connection, and one Unix socket whose only client it relays."""

    def __init__(self, address: str, context: ssl.SSLContext, server_name: str, path: Path) -> None:
        self._server = HostPort.parse(address)
        self._context = context
        self._server_name = server_name
        self._path = path
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="enrolment", daemon=True)

    def start(self) -> None:
        """Returns when TLS is established and the socket listens. Raises OSError."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._carry())
        except Exception as error:
            self._failure = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _carry(self) -> None:
        async with asyncio.timeout(CONNECT_S):
            far, far_out = await asyncio.open_connection(
                self._server.host, self._server.port, ssl=self._context, server_hostname=self._server_name
            )
        carrying: set[asyncio.Task[None]] = set()

        def on_client(near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
            if carrying:
                near_out.close()
                return
            carrying.add(asyncio.ensure_future(_pump(near, far_out)))
            carrying.add(asyncio.ensure_future(_pump(far, near_out)))

        with socket_address(self._path) as address:
            server = await asyncio.start_unix_server(on_client, address)
        self._ready.set()
        async with server:
            await self._over.wait()
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
            far_out.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass  # the other side is gone, and gRPC sees that
    finally:
        sink.close()
