"""Requests to nodes over their links, matched with their answers. Nothing is stored, and each answer has a timeout."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from shoal.coordinator.ports import AgentLinks
from shoal.types.link import ToAgent

Answer = TypeVar("Answer")


class RequestCorrelator(Generic[Answer]):
    """Matches answers of one type with the requests that are waiting for them."""

    def __init__(self, links: AgentLinks) -> None:
        self._links = links
        self._numbers = count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[Answer]] = {}

    async def ask(self, node: str, message: Callable[[int], ToAgent], timeout_s: float) -> Answer:
        """Sends a request and awaits its answer. message: builds the request from its number. Raises TimeoutError."""
        request = next(self._numbers)
        waiting = self._waiting[node, request] = asyncio.get_running_loop().create_future()
        try:
            await self._links.send(node, message(request))
            async with asyncio.timeout(timeout_s):
                answer: Answer = await waiting
                return answer
        finally:
            del self._waiting[node, request]

    def on_answer(self, node: str, request: int, answer: Answer) -> None:
        """Delivers an answer. One that no request waits for is dropped, because nodes must not send data unasked."""
        waiting = self._waiting.get((node, request))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
