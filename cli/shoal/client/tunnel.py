"""A port of this machine whose connections go on to a region's server over TLS, for browsers: they do not know a
region's CA, and take plain HTTP from their own machine.

Who connects to the port has what whoever reaches the server has, and no more: no client certificate is shown.
"""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress

from shoal.client.contexts import Context
from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.wire.identity import dns_of

CHUNK_BYTES = 64 * 2**10
CONNECT_S = 10.0


async def serve(context: Context, server: HostPort, port: int, on_ready: Callable[[int], None]) -> None:
    """Until cancelled. port: of 127.0.0.1; 0: any. on_ready: gets the port. Raises ShoalError(COORDINATOR_UNREACHABLE |
    CERT_UNTRUSTED | FIELD_INVALID)."""
    secured = ssl.create_default_context(cafile=str(context.ca))
    name = dns_of(context.region, Role.COORDINATOR, "coordinator")

    async def dial() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(server.host, server.port, ssl=secured, server_hostname=name)

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await dial()
        except (OSError, TimeoutError):
            writer.close()
            return
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer), return_exceptions=True)

    try:
        _, writer = await dial()
    except ssl.SSLCertVerificationError as cause:
        found = f"{server}: {cause.verify_message}"
        raise refuse(Code.CERT_UNTRUSTED, found, f"a certificate of {context.region}", "look at the address") from cause
    except (OSError, TimeoutError) as cause:
        raise _unreachable(server, cause) from cause
    writer.close()
    try:
        listening = await asyncio.start_server(on_connection, "127.0.0.1", port)
    except OSError as cause:
        found = f"port {port}: {cause.strerror}"
        raise refuse(Code.FIELD_INVALID, found, "a free port of this machine", "choose another --port") from cause
    async with listening:
        on_ready(listening.sockets[0].getsockname()[1])
        await listening.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


def _unreachable(server: HostPort, cause: Exception) -> ShoalError:
    return refuse(
        Code.COORDINATOR_UNREACHABLE,
        f"{server}: {str(cause) or 'no answer'}",
        "the region's dashboard",
        "start the coordinator with a --dashboard that this machine reaches, or forward that port",
    )
