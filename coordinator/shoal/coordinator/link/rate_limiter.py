"""How fast one node's messages are read: excess messages wait at their sender, or are dropped there, and delay nobody
else."""

import asyncio

from shoal.coordinator.core.rate_limit import MESSAGE_BURST, MESSAGES_PER_S, TokenBucket
from shoal.types.units import Elapsed


class SessionRateLimiter:
    """Limits the messages of one session."""

    def __init__(self) -> None:
        self._bucket = TokenBucket(MESSAGE_BURST, MESSAGES_PER_S, _now())

    async def wait(self) -> None:
        """Returns when one more message may be read."""
        now = _now()
        if not self._bucket.allows(now):
            await asyncio.sleep(1.0 / MESSAGES_PER_S)
            now = _now()
        self._bucket.spend(now)


def _now() -> Elapsed:
    return Elapsed(asyncio.get_running_loop().time())
