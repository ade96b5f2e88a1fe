"""Questions to nodes over their links: nothing is kept, and each answer is waited for a bounded time."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from shoal.coordinator.ports import AgentLinks
from shoal.types.link import ToAgent

Answer = TypeVar("Answer")


class Questions(Generic[Answer]):
    """Of one kind."""

    def __init__(self, links: AgentLinks) -> None:
        self._links = links
        self._numbers = count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[Answer]] = {}

    async def ask(self, node: str, question: Callable[[int], ToAgent], within_s: float) -> Answer:
        """question: by its number. Raises TimeoutError."""
        request = next(self._numbers)
        waiting = self._waiting[node, request] = asyncio.get_running_loop().create_future()
        try:
            await self._links.send(node, question(request))
            return await asyncio.wait_for(waiting, within_s)
        finally:
            del self._waiting[node, request]

    def answered(self, node: str, request: int, answer: Answer) -> None:
        """One that nobody waits for is dropped: a node tells nobody anything unasked."""
        waiting = self._waiting.get((node, request))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
