"""`core.link.outgoing` for a task that waits for the next message."""

import asyncio
from collections.abc import AsyncIterator

from shoal.coordinator.core.link.outgoing import OutgoingQueue
from shoal.types.link import ToAgent


class Outbox:
    """Messages that wait for one node.

    epoch: of its session; 0 until that is open.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._queue = OutgoingQueue()
        self._wake = asyncio.Event()

    def put(self, message: ToAgent) -> None:
        self._queue.put(message)
        self._wake.set()

    def close(self) -> None:
        self._queue.close()
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[ToAgent]:
        while True:
            self._wake.clear()
            while (message := self._queue.next()) is not None:
                yield message
            if self._queue.is_finished:
                return
            await self._wake.wait()
