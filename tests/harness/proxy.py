"""A way between two programs that takes its time, or swallows everything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Way:
    """port: on loopback. delay_s: one way. held: nothing passes, nothing is reset, and TCP acknowledges all of it."""

    port: int = 0
    delay_s: float = 0.0
    held: bool = False


@asynccontextmanager
async def way_to(target_port: int, *, delay_s: float = 0.0) -> AsyncIterator[Way]:
    """To a server on loopback."""
    way = Way(delay_s=delay_s)
    loop = asyncio.get_running_loop()
    open_sides: set[asyncio.StreamWriter] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            if not way.held:
                loop.call_later(way.delay_s, writer.write, data)
        loop.call_later(way.delay_s, writer.close)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, thither = await asyncio.open_connection("127.0.0.1", target_port)
        open_sides.update((writer, thither))
        await asyncio.gather(carry(reader, thither), carry(there, writer), return_exceptions=True)

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    way.port = server.sockets[0].getsockname()[1]
    try:
        yield way
    finally:
        server.close()
        for side in open_sides:
            side.transport.abort()
