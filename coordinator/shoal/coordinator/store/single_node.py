"""The election for a store that only one coordinator can open."""

import asyncio


class SingleNodeElection:
    """ports.Election: elected at once and for good."""

    is_shared = False

    def __init__(self, candidate: bytes) -> None:
        self._candidate = candidate

    async def campaign(self) -> None:
        pass

    async def wait_lost(self) -> None:
        await asyncio.Event().wait()

    async def leader(self) -> bytes | None:
        return self._candidate

    async def resign(self) -> None:
        pass
