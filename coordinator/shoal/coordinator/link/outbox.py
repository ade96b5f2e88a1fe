"""The bounded queue of messages to one node: a node that does not read affects only itself."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from shoal.types.assignment import DesiredSet
from shoal.types.link import ToAgent

MAX_WAITING: Final = 32
"""Messages other than the desired set that may wait for one node. One more ends the session, because the node does not
read."""


class Outbox:
    """Messages that wait for one node. A newer desired set replaces an older one that was not sent yet.

    epoch: of its session; 0 until that is open.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._waiting: deque[ToAgent] = deque()
        self._desired: DesiredSet | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._wake.set()

    def put(self, message: ToAgent) -> None:
        if isinstance(message, DesiredSet):
            self._desired = message
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(message)
        else:
            self._closed = True
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[ToAgent]:
        while True:
            self._wake.clear()
            while self._waiting:
                yield self._waiting.popleft()
            if self._desired is not None:
                desired, self._desired = self._desired, None
                yield desired
                continue
            if self._closed:
                return
            await self._wake.wait()
