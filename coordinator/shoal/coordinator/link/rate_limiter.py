"""How fast one node's messages are read: excess messages wait at their sender, or are dropped there, and delay nobody
else."""

import asyncio
from typing import Final

from shoal.coordinator.core.rate_limit import TokenBucket
from shoal.types.units import Elapsed

BURST: Final = 256
"""Messages of one node that are read without delay: what an agent reports when its link opens, with room."""
RATE_PER_S: Final = 50.0
"""Messages a second after the burst: ten times what the shortest heartbeat (200 ms) sends."""


class SessionRateLimiter:
    """Limits the messages of one session."""

    def __init__(self) -> None:
        self._bucket = TokenBucket(BURST, RATE_PER_S, _now())

    async def wait(self) -> None:
        """Returns when one more message may be read."""
        if not self._bucket.allows(_now()):
            await asyncio.sleep(1.0 / RATE_PER_S)
        self._bucket.spend(_now())


def _now() -> Elapsed:
    return Elapsed(asyncio.get_running_loop().time())
