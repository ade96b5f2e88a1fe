"""The bytes of one connection, for a task that reads and writes it.

Unlike asyncio's streams it gives away what arrived without a copy, and tells when the peer is gone while nobody reads.
"""

import asyncio
from typing import Final, cast

from shoal.types.units import Seconds

MAX_UNREAD: Final = 256 * 2**10
"""Bytes that wait for their reader before the connection's reading pauses, unless it wants more. What arrives at once
comes on top."""
ARRIVALS: Final = 512
"""Times that something arrives before who waits is woken though it is less than what it wants."""


class ByteStream(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.content = bytearray()
        """What has arrived and is not read yet."""
        self.lost = asyncio.Event()
        """Set when the connection has ended."""
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self.arrivals = 0
        """Times that something has arrived."""
        self._wanted = 1
        self._is_full = False
        self._can_write = True

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes | memoryview) -> None:
        self.content += data
        self.arrivals += 1
        if len(self.content) > max(MAX_UNREAD, self._wanted) and not self._is_full:
            self._is_full = True
            self.transport.pause_reading()
        if len(self.content) >= self._wanted or self.arrivals % ARRIVALS == 0:
            _wake(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        _wake(self._reading)
        _wake(self._writing)

    def pause_writing(self) -> None:
        self._can_write = False

    def resume_writing(self) -> None:
        self._can_write = True
        _wake(self._writing)

    # For its task

    @property
    def is_waiting(self) -> bool:
        """Whether its task waits for bytes."""
        return self._reading is not None and not self._reading.done()

    def take(self, most: int) -> bytearray:
        """Up to `most` of the bytes that have arrived."""
        if len(self.content) <= most:
            taken, self.content = self.content, bytearray()
        else:
            taken = self.content[:most]
            del self.content[:most]
        self._go_on()
        return taken

    async def more(self, timeout: Seconds, wanted: int = 1) -> bool:
        """Wait until `wanted` bytes are there to take, or something has arrived many times; False at the end of the
        connection. Raises TimeoutError."""
        if len(self.content) < wanted and not self.lost.is_set():
            self._wanted = wanted
            self._go_on()
            self._reading = self._loop.create_future()
            try:
                await _wait(self._reading, timeout)
            finally:
                self._wanted = 1
        return len(self.content) >= wanted or not self.lost.is_set()

    def _go_on(self) -> None:
        """Read on, if that paused and there is room again."""
        if self._is_full and len(self.content) <= max(MAX_UNREAD, self._wanted) and not self.lost.is_set():
            self._is_full = False
            self.transport.resume_reading()

    async def drain(self, timeout: Seconds) -> bool:
        """Wait until more can be written; False at the end of the connection. Raises TimeoutError."""
        if not self._can_write and not self.lost.is_set():
            self._writing = self._loop.create_future()
            await _wait(self._writing, timeout)
        return not self.lost.is_set()


async def _wait(waiting: asyncio.Future[None], timeout: Seconds) -> None:
    """As `asyncio.timeout`, at a quarter of its cost."""
    timer = waiting.get_loop().call_later(timeout, _fail, waiting)
    try:
        await waiting
    finally:
        timer.cancel()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


def _fail(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())
