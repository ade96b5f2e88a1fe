"""A TCP proxy between two programs that delays, stalls, or resets connections above an age."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import inf

POLL_S = 0.1


@dataclass(slots=True)
class TcpProxy:
    """Settings and counters of a running proxy; changes take effect at once."""

    # On loopback.
    port: int = 0
    # One-way delay.
    delay_s: float = 0.0
    # True: nothing passes and nothing is reset, while TCP acknowledges everything.
    is_stalled: bool = False
    # Older connections are reset, as by middleboxes that end long-lived streams.
    max_age_s: float = inf
    # Connections reset so far.
    reset_count: int = 0


@asynccontextmanager
async def tcp_proxy(target_port: int, *, delay_s: float = 0.0) -> AsyncIterator[TcpProxy]:
    """A proxy to a server on loopback."""
    way = TcpProxy(delay_s=delay_s)
    loop = asyncio.get_running_loop()
    open_sides: set[asyncio.StreamWriter] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            if not way.is_stalled:
                loop.call_later(way.delay_s, writer.write, data)
        loop.call_later(way.delay_s, writer.close)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, thither = await asyncio.open_connection("127.0.0.1", target_port)
        open_sides.update((writer, thither))
        since = loop.time()
        both = asyncio.gather(carry(reader, thither), carry(there, writer), return_exceptions=True)
        while not (await asyncio.wait((both,), timeout=POLL_S))[0]:
            if loop.time() - since > way.max_age_s:
                way.reset_count += 1
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
def tcp_proxy_in_thread(target_port: int) -> Iterator[TcpProxy]:
    """The same on its own thread, for tests without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="way")
    thread.start()
    way = tcp_proxy(target_port)
    try:
        yield asyncio.run_coroutine_threadsafe(way.__aenter__(), loop).result(5)
    finally:
        asyncio.run_coroutine_threadsafe(way.__aexit__(None, None, None), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
