"""The election of one coordinator, whose store nobody else can open."""

import asyncio


class Alone:
    """ports.Election: elected at once, for good."""

    shared = False

    def __init__(self, candidate: bytes) -> None:
        self._candidate = candidate

    async def win(self) -> None:
        pass

    async def lost(self) -> None:
        await asyncio.Event().wait()

    async def leader(self) -> bytes | None:
        return self._candidate

    async def resign(self) -> None:
        pass
