"""A way between two programs that takes its time, swallows everything, or lets no connection grow old."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import inf

LOOKS_EVERY_S = 0.1


@dataclass(slots=True)
class Way:
    """port: on loopback. delay_s: one way. held: nothing passes, nothing is reset, and TCP acknowledges all of it.

    lives_s: an older connection is reset, as by middleboxes that suffer no long-lived stream. cut: how many were.
    """

    port: int = 0
    delay_s: float = 0.0
    held: bool = False
    lives_s: float = inf
    cut: int = 0


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
        since = loop.time()
        both = asyncio.gather(carry(reader, thither), carry(there, writer), return_exceptions=True)
        while not (await asyncio.wait((both,), timeout=LOOKS_EVERY_S))[0]:
            if loop.time() - since > way.lives_s:
                way.cut += 1
                for side in (writer, thither):
                    side.transport.abort()
        open_sides.difference_update((writer, thither))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    way.port = server.sockets[0].getsockname()[1]
    try:
        yield way
    finally:
        server.close()
        for side in open_sides:
            side.transport.abort()


@contextmanager
def way_beside(target_port: int) -> Iterator[Way]:
    """The same on a thread of its own, for tests that have no loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="way")
    thread.start()
    way = way_to(target_port)
    try:
        yield asyncio.run_coroutine_threadsafe(way.__aenter__(), loop).result(5)
    finally:
        asyncio.run_coroutine_threadsafe(way.__aexit__(None, None, None), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
